"""The tree in RocksDB, for the one thread that may use it. Blocking; `rocks_store` makes it available in the loop.

    keys in the database                                  values
    "n" + depth (2 bytes, big endian) + key               a node: header (see _HEADER) and the caller's bytes
    "e" + key                                             empty; index of ephemeral nodes, to find them at the next open
    "m" + "format" | "commit"                             format of this layout | number of the last commit

Depth comes first, so that the children of a key are one contiguous range: a listing never iterates over grandchildren.
Every commit is one synced batch and carries its number. After a failed write the database is opened again (it refuses everything
until then), and the number found shows whether the failed commit survived, which the caller must be told.
"""

from __future__ import annotations

import enum
import logging
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import rocksdict as rocks

from cepheid_metadata.errors import (
    MetadataError,
    NewerFormatError,
    NoSuchKeyError,
    StoreDamagedError,
    StoreInUseError,
    StoreOpenError,
    StoreUnavailableError,
)
from cepheid_metadata.store import Delete, Op, OpResult, Versioned
from cepheid_metadata.tree import EMPTY_NODE, NOBODY, ROOT, Node, TreeBatch
from cepheid_ports import make_private

log = logging.getLogger(__name__)

FORMAT = 1
_FORMAT_KEY = b"mformat"
_COMMIT_KEY = b"mcommit"
_HEADER = struct.Struct("<qqIQ")  # version, owner, children, next sequence; the value follows
_SESSION = 1  # one session per open; those of earlier ones have no ephemeral nodes left
KiB, MiB = 1024, 1024 * 1024


class Outcome(enum.Enum):
    """The outcome of a commit."""

    APPLIED = "applied"
    NOT_APPLIED = "not applied"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Commit:
    """The result of a commit, with answers in the order of the requests; the answer to a refused request is its MetadataError."""

    outcome: Outcome
    answers: list[list[OpResult] | MetadataError]
    batch: TreeBatch
    problem: str = ""


class RocksTree:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.is_writable = False
        self._db: rocks.Rdict | None = None
        self._commits = 0

    def __repr__(self) -> str:
        state = "writable" if self.is_writable else "read-only" if self._db is not None else "closed"
        return f"<RocksTree {self.directory} {state}: commit {self._commits}>"

    def open(self) -> None:
        """Open the database and delete the ephemeral nodes of earlier sessions. Raises StoreInUseError, NewerFormatError,
        StoreDamagedError, StoreOpenError."""
        try:
            self._db = rocks.Rdict(str(self.directory), _options())
            self._check_format()
            self._commits = self._read_number(_COMMIT_KEY)
            self.is_writable = True
            self._delete_ephemeral_nodes()
            make_private(self.directory)
        except Exception as error:
            self.close()
            raise _open_error(error, self.directory) from error

    def close(self) -> None:
        """Close the database. Idempotent. Commits are durable already: a failure here only makes the next open longer."""
        db, self._db, self.is_writable = self._db, None, False
        if db is not None:
            try:
                db.close()
            except Exception as error:  # rocksdict raises bare Exceptions; the files are released anyway
                log.warning("metadata.close_failed", extra={"directory": str(self.directory), "error": str(error)})

    def get(self, key: str) -> Versioned | None:
        node = self.load(key)
        return None if node is None else Versioned(node.value, node.version)

    def load(self, key: str) -> Node | None:
        try:
            value = self._open_db().get(_node_key(key))
        except Exception as error:
            raise _read_error(error, self.directory) from error
        if value is None:
            return EMPTY_NODE if key == ROOT else None
        version, owner, children, next_sequence = _HEADER.unpack_from(value)
        return Node(value[_HEADER.size :], version, owner, children, next_sequence)

    def children(self, key: str) -> list[str]:
        if self.load(key) is None:
            raise NoSuchKeyError(f"{key} does not exist", key=key)
        prefix = _children_prefix(key)
        return [found[len(prefix) :].decode("ascii") for found in self._scan(prefix)]

    def commit(self, requests: Sequence[Sequence[Op]]) -> Commit:
        """Apply the requests in order and make them durable with one sync."""
        if not self.is_writable:
            raise StoreUnavailableError(f"metadata in {self.directory} cannot be written now", directory=str(self.directory))
        batch = TreeBatch(self.load)
        answers: list[list[OpResult] | MetadataError] = []
        for ops in requests:
            try:
                answers.append(batch.apply(ops, _SESSION))
            except MetadataError as error:
                answers.append(error)
        try:
            if batch.changed:
                self._write(batch)
        except Exception as error:  # rocksdict raises bare Exceptions
            outcome = self._reopen_after(error)
            return Commit(outcome, answers, batch, problem=str(error))
        return Commit(Outcome.APPLIED, answers, batch)

    def reopen(self) -> bool:
        """Try to make a store that lost its disk writable again; after a failure it stays readable if that is safe."""
        commits = self._commits
        self.close()
        try:
            self._db = rocks.Rdict(str(self.directory), _options())
            self._commits = self._read_number(_COMMIT_KEY)
        except Exception as error:
            log.warning("metadata.reopen_failed", extra={"directory": str(self.directory), "error": str(error)})
            self.close()
            self._open_read_only(commits)
            return False
        self.is_writable = True
        return True

    def _write(self, batch: TreeBatch) -> None:
        db = self._open_db()
        writes = rocks.WriteBatch(raw_mode=True)
        for key, node in batch.changed.items():
            before = batch.stored[key]
            if node is not None:
                header = _HEADER.pack(node.version, node.owner, node.children, node.next_sequence)
                writes.put(_node_key(key), header + node.value)
            elif before is not None:  # otherwise it was created and deleted within the batch
                writes.delete(_node_key(key))
            # Also if one batch replaces an ephemeral node by a persistent one.
            was_ephemeral = before is not None and before.owner != NOBODY
            is_ephemeral = node is not None and node.owner != NOBODY
            if is_ephemeral and not was_ephemeral:
                writes.put(_ephemeral_key(key), b"")
            elif was_ephemeral and not is_ephemeral:
                writes.delete(_ephemeral_key(key))
        writes.put(_COMMIT_KEY, str(self._commits + 1).encode("ascii"))
        db.write(writes)
        db.flush_wal(True)  # apart from the write: rocksdict holds the interpreter's lock while it writes, but not while it syncs
        self._commits += 1

    def _reopen_after(self, error: Exception) -> Outcome:
        before = self._commits
        log.error("metadata.write_failed", extra={"directory": str(self.directory), "error": str(error)})
        if self.reopen():  # what a writable open finds is durable: it has moved the log's content to a synced table
            return Outcome.APPLIED if self._commits > before else Outcome.NOT_APPLIED
        return Outcome.NOT_APPLIED if self._db is not None else Outcome.UNKNOWN

    def _open_read_only(self, commits: int) -> None:
        """Open read-only, which needs no space, and serve reads only if the last known durable commit is the newest.

        Such an open replays the log as the page cache has it, synced or not.
        """
        try:
            self._db = rocks.Rdict(str(self.directory), _options(), access_type=rocks.AccessType.read_only())
            found = self._read_number(_COMMIT_KEY)
        except Exception as error:
            log.error("metadata.unreadable", extra={"directory": str(self.directory), "error": str(error)})
            found = -1
        self._commits = commits
        if found != commits:
            self.close()

    def _check_format(self) -> None:
        db = self._open_db()
        found = self._read_number(_FORMAT_KEY)
        if found > FORMAT:
            message = f"metadata in {self.directory} has format {found}; this release knows formats up to {FORMAT}"
            raise NewerFormatError(message, directory=str(self.directory), format=found, known_format=FORMAT)
        if found == 0:
            if self._scan(b""):
                raise StoreOpenError(f"{self.directory} holds a database that is not Cepheid's metadata")
            writes = rocks.WriteBatch(raw_mode=True)
            writes.put(_FORMAT_KEY, str(FORMAT).encode("ascii"))
            db.write(writes)
            db.flush_wal(True)

    def _read_number(self, key: bytes) -> int:
        return int(self._open_db().get(key) or b"0")

    def _delete_ephemeral_nodes(self) -> None:
        left = [found[1:].decode("ascii") for found in self._scan(b"e")]
        for key in left:
            node = self.load(key)
            assert node is not None, f"{key} is in the index of ephemeral nodes, but does not exist"
            assert node.owner != NOBODY, f"{key} is in the index of ephemeral nodes, but is persistent"
        if left:
            batch = TreeBatch(self.load)
            batch.apply([Delete(key) for key in left], _SESSION)
            self._write(batch)

    def _scan(self, prefix: bytes) -> list[bytes]:
        """Return all keys with this prefix, in order."""
        try:
            found: list[bytes] = []
            cursor = self._open_db().iter()
            cursor.seek(prefix)
            while cursor.valid():
                key = cursor.key()
                if not key.startswith(prefix):
                    break
                found.append(key)
                cursor.next()
            cursor.status()  # an iterator that met an error looks finished until its status is checked
            return found
        except Exception as error:
            raise _read_error(error, self.directory) from error

    def _open_db(self) -> rocks.Rdict:
        if self._db is None:
            raise StoreUnavailableError(f"metadata in {self.directory} cannot be read now", directory=str(self.directory))
        return self._db


def _read_error(error: Exception, directory: Path) -> Exception:
    """Return a failed read as one of our types. rocksdict raises bare Exceptions with RocksDB's text in them."""
    if isinstance(error, MetadataError) or type(error) is not Exception:
        return error
    kind = StoreDamagedError if str(error).startswith("Corruption") else StoreUnavailableError
    return kind(f"reading metadata in {directory} failed: {error}", directory=str(directory))


def _open_error(error: Exception, directory: Path) -> Exception:
    if isinstance(error, MetadataError) or type(error) is not Exception:
        return error
    words = str(error)
    if "lock hold" in words or "While lock file" in words:
        return StoreInUseError(f"another process has the metadata in {directory} open", directory=str(directory))
    kind = StoreDamagedError if words.startswith("Corruption") else StoreOpenError
    return kind(f"metadata in {directory} cannot be opened: {words}", directory=str(directory))


def _node_key(key: str) -> bytes:
    depth = 0 if key == ROOT else key.count("/")
    return b"n" + depth.to_bytes(2, "big") + key.encode("ascii")


def _ephemeral_key(key: str) -> bytes:
    return b"e" + key.encode("ascii")


def _children_prefix(key: str) -> bytes:
    depth, path = (1, "/") if key == ROOT else (key.count("/") + 1, key + "/")
    return b"n" + depth.to_bytes(2, "big") + path.encode("ascii")


def _options() -> rocks.Options:
    """Return options for a small database: tens of megabytes on one machine, in a process with other work."""
    options = rocks.Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_write_buffer_size(4 * MiB)
    options.set_max_write_buffer_number(3)
    table = rocks.BlockBasedOptions()
    table.set_block_cache(rocks.Cache(8 * MiB))
    table.set_bloom_filter(10, False)
    options.set_block_based_table_factory(table)
    options.set_max_background_jobs(2)
    options.set_max_open_files(256)
    options.set_max_file_opening_threads(1)
    options.set_skip_stats_update_on_db_open(True)
    options.set_manifest_preallocation_size(64 * KiB)
    # A torn last record is a write that was never answered; damage before it is not, and must fail the open.
    options.set_wal_recovery_mode(rocks.DBRecoveryMode.tolerate_corrupted_tail_records())
    # RocksDB's own log file has nothing for operators that our log lacks; it must not grow.
    options.set_keep_log_file_num(2)
    options.set_max_log_file_size(1 * MiB)
    options.set_stats_dump_period_sec(0)
    options.set_stats_persist_period_sec(0)
    return options
