"""Entry logs: append-only files with blocks of many ledgers. A flush appends blocks, ledger by ledger, and syncs.

    entrylog/0000002a.log = header (4096) │ flush: block │ block │ …  zeros to 4096 │ flush: block │ …

Header, 24 bytes: magic "CPHDELOG" (8), format version (4), CRC32C of the last 8 (4), log id (8); little-endian.

Rule 1: a block may be indexed only after `append` has returned: its bytes, and the file's name, are synced then.
Rule 2: every flush begins at a multiple of 4096, so that no synced sector is ever written again.
Rule 3: after a failed flush, and after a start, a new file begins, so that the contents of the old tail do not matter.
Rule 4: log ids increase from the largest on disk, never from a stored counter. No id is used twice within a process: a reader may
still have the file of a deleted log open.

Compaction copies blocks into logs of its own (`CopiedLog`), in another thread; both writers take their ids from one `LogIds`.
"""

from __future__ import annotations

import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from crc32c import crc32c

from cepheid_bookie.block_index import BlockIndex, BlockRef
from cepheid_bookie.disk import Disk, DiskFile
from cepheid_bookie.entry_block import decode_block, encode_block_to, plan_blocks, uncheck_block
from cepheid_bookie.errors import BlockCorruptError
from cepheid_bookie.write_cache import CachedLedger
from cepheid_rpc import Buffer, EntryGroup

_ALIGNMENT = 4096
LOG_HEADER_BYTES = _ALIGNMENT
"""Bytes of a log before its first block."""
_MAGIC = b"CPHDELOG"
_HEADER = struct.Struct("<8sIIQ")
_VERSION = LOG_VERSION = 1
_WRITE_BYTES = 1 << 20  # written and synced at a time: one large sync would delay the journal's small ones


def log_path(log_id: int) -> str:
    return f"entrylog/{log_id:08x}.log"


def list_logs(disk: Disk) -> list[int]:
    return sorted(int(name[:-4], 16) for name in disk.listdir("entrylog") if name.endswith(".log"))


def dead_logs(disk: Disk, index: BlockIndex) -> list[int]:
    """Return the logs without a block in the index, by reading all of it: about a second for a million blocks. The writer may still
    need some of them."""
    living = {block.log_id for block in index.blocks()}
    return [log_id for log_id in list_logs(disk) if log_id not in living]


def _encode_header(log_id: int) -> bytes:
    body = log_id.to_bytes(8, "little")
    return _HEADER.pack(_MAGIC, _VERSION, crc32c(body), log_id).ljust(_ALIGNMENT, b"\0")


def decode_log_header(data: bytes, log_id: int) -> int | None:
    """Return the format version, or None if the bytes are not the intact header of this log. The checksum does not cover the
    version, so an unknown one may also be damage."""
    if len(data) < _HEADER.size:
        return None
    magic, version, crc, found_id = _HEADER.unpack_from(data)
    is_intact = magic == _MAGIC and crc32c(memoryview(data)[_HEADER.size - 8 : _HEADER.size]) == crc and found_id == log_id
    return int(version) if is_intact else None


def _create_log(disk: Disk, log_id: int) -> DiskFile:
    """Create a log with its header. Its name is durable when this returns."""
    file = disk.open(log_path(log_id), create=True)
    try:
        file.pwrite(_encode_header(log_id), 0)
        disk.sync_dir("entrylog")
    except BaseException:
        file.close()
        raise
    return file


class LogIds:
    """Assigns the ids of new logs, each once, for all threads that write logs (rule 4)."""

    def __init__(self, disk: Disk) -> None:
        self._lock = threading.Lock()
        self._next = max(list_logs(disk), default=0) + 1

    def take(self) -> int:
        """Return the id for a new log."""
        with self._lock:
            self._next += 1
            return self._next - 1


class EntryLogWriter:
    """Writes the blocks of flushes. Blocking; used only by the flush thread, except for `ids`, which all threads use."""

    def __init__(self, disk: Disk, *, block_bytes: int, log_bytes: int) -> None:
        self._disk = disk
        self._block_bytes = block_bytes
        self._log_bytes = log_bytes
        self.ids = LogIds(disk)
        self._file: DiskFile | None = None
        self._log_id = 0
        self._offset = 0
        self._created: list[int] = []  # logs of the `append` under way, or of the last one
        self._unindexed: frozenset[int] = frozenset()  # logs of the last `append`, until its blocks are indexed
        self.written_bytes = 0

    @property
    def current_log_id(self) -> int:
        """The log being written, or 0."""
        return self._log_id if self._file is not None else 0

    @property
    def current_bytes(self) -> int:
        """Size of the log being written; 0 if there is none."""
        return self._offset if self._file is not None else 0

    def is_needed(self, log_id: int) -> bool:
        """Return whether the log is being written or its blocks are not indexed yet, so that it must stay."""
        return log_id == self.current_log_id or log_id in self._unindexed

    def closed_logs(self) -> list[int]:
        """Return the logs on disk to which this writer will not add another block."""
        return [log_id for log_id in list_logs(self._disk) if not self.is_needed(log_id)]

    def append(self, ledgers: Iterable[tuple[int, CachedLedger]]) -> list[BlockRef]:
        """Write the ledgers' groups as blocks and sync them. After an OSError index no block of this call."""
        log_id, size_bytes = self.current_log_id, self._offset
        self._created = []
        try:
            blocks = self._append(ledgers)
        except OSError:
            self._abandon(log_id, size_bytes)
            raise
        if blocks:
            self._unindexed = frozenset(block.log_id for block in blocks)
        return blocks

    def on_indexed(self) -> None:
        """Note that all blocks of the last `append` are in the index."""
        self._unindexed = frozenset()

    def close(self) -> None:
        """Write no more to the current log; the next flush begins another one."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _append(self, ledgers: Iterable[tuple[int, CachedLedger]]) -> list[BlockRef]:
        blocks: list[BlockRef] = []
        parts: list[Buffer] = []
        gathered = 0
        self._offset = -(-self._offset // _ALIGNMENT) * _ALIGNMENT
        for ledger_id, ledger in ledgers:
            for group in plan_blocks(ledger.groups, self._block_bytes):
                if self._file is None or self._offset + gathered >= self._log_bytes:
                    self._write(parts, gathered)
                    parts, gathered = [], 0
                    self._roll()
                length = encode_block_to(parts, group)
                offset = self._offset + gathered
                blocks.append(BlockRef(ledger_id, group.first_entry_id, group.last_entry_id, self._log_id, offset, length))
                gathered += length
                if gathered >= _WRITE_BYTES:
                    self._write(parts, gathered)
                    parts, gathered = [], 0
        self._write(parts, gathered)
        if blocks:
            assert self._file is not None
            self._file.sync()
        return blocks

    def _write(self, parts: list[Buffer], size_bytes: int) -> None:
        if parts:
            assert self._file is not None
            self._file.pwritev(parts, self._offset)
            self._file.sync()
            self._offset += size_bytes
            self.written_bytes += size_bytes

    def _roll(self) -> None:
        if self._file is not None:
            self._file.sync()
            self.close()
        self._log_id = self.ids.take()
        self._created.append(self._log_id)
        self._file = _create_log(self._disk, self._log_id)
        self._offset = LOG_HEADER_BYTES

    def _abandon(self, log_id: int, size_bytes: int) -> None:
        """Close the log after a failed flush, and free the unreferenced space that it wrote, as far as the disk permits."""
        self.close()
        self._offset = 0
        with suppress(OSError):
            if log_id:
                log = self._disk.open(log_path(log_id))
                try:
                    log.truncate(size_bytes)
                finally:
                    log.close()
        for new_id in self._created:
            with suppress(OSError):
                self._disk.unlink(log_path(new_id))


class CopiedLog:
    """A log of blocks copied unchanged from other logs. Blocking; used by one thread at a time.

    Nothing refers to it before it is finished, so its file can be deleted after any failure until then.
    """

    def __init__(self, disk: Disk, log_id: int) -> None:
        """Create the file. Raises OSError; then there may be a file, to which nothing refers."""
        self.log_id = log_id
        self._disk = disk
        self._file: DiskFile | None = None
        self.size_bytes = LOG_HEADER_BYTES
        try:
            self._file = _create_log(disk, log_id)
        except OSError:
            self.abandon()
            raise

    def append(self, blocks: Sequence[tuple[BlockRef, bytes]]) -> list[BlockRef]:
        """Write and sync blocks, about a megabyte of them. Return where they are now. Raises OSError; abandon the log then."""
        assert self._file is not None, "the log is finished"
        copies: list[BlockRef] = []
        offset = self.size_bytes
        for block, data in blocks:
            copies.append(block._replace(log_id=self.log_id, offset=offset))
            offset += len(data)
        self._file.pwritev([data for _, data in blocks], self.size_bytes)
        self._file.sync()  # in small steps: one large sync would delay the journal's small ones
        self.size_bytes = offset
        return copies

    def finish(self) -> None:
        """Make the log's contents and name durable. Raises OSError; abandon the log then."""
        assert self._file is not None, "the log is finished"
        self._file.sync()
        self._disk.sync_dir("entrylog")
        self._file.close()
        self._file = None

    def abandon(self) -> None:
        """Delete the log, as far as the disk permits."""
        if self._file is not None:
            self._file.close()
            self._file = None
        with suppress(OSError):
            self._disk.unlink(log_path(self.log_id))


OnReadError = Callable[[int, int, OSError], None]
"""`(log_id, offset, error)`: the disk did not give what lies there. Called in the thread that reads."""


class EntryLogReader:
    """Reads blocks, in any reader thread. Keeps up to `open_logs` files open, and closes none that is in use."""

    def __init__(self, disk: Disk, *, open_logs: int, on_error: OnReadError = lambda log_id, offset, error: None) -> None:
        self._disk = disk
        self._open_logs = open_logs
        self.on_error = on_error
        self._lock = threading.Lock()
        self._files: OrderedDict[int, _OpenLog] = OrderedDict()

    def read_block(self, block: BlockRef, *, check: bool = True, fresh: bool = False) -> EntryGroup:
        """Raises BlockCorruptError, or OSError. Without `check` for callers that look at each entry's digest and want what is
        whole. `fresh`: the system should not give what it has in memory of the file."""
        return self._decode(block, self._read(block, fresh=fresh), check=check)

    def read_checked(self, block: BlockRef) -> bytes:
        """Return the bytes of a block, for a copy of it. Raises BlockCorruptError unless all are as written, and OSError."""
        data = self._read(block)
        self._decode(block, data, check=True)
        return data

    def _read(self, block: BlockRef, *, fresh: bool = False) -> bytes:
        log = self._take(block.log_id)
        try:
            if fresh:
                log.file.drop_cached(block.offset, block.length)
            return self._pread(log, block.log_id, block.length, block.offset)
        finally:
            self._give_back(log)

    def _pread(self, log: _OpenLog, log_id: int, size_bytes: int, offset: int) -> bytes:
        try:
            return log.file.pread(size_bytes, offset)
        except OSError as error:
            self.on_error(log_id, offset, error)
            raise

    def _decode(self, block: BlockRef, data: bytes, *, check: bool) -> EntryGroup:
        try:
            group = decode_block(data) if check else uncheck_block(data)
        except BlockCorruptError as error:
            raise BlockCorruptError(
                f"{log_path(block.log_id)} at offset {block.offset}: {error.args[0]}",
                file=log_path(block.log_id),
                offset=block.offset,
            ) from None
        if (group.ledger_id, group.first_entry_id, group.last_entry_id) != block[:3]:
            raise BlockCorruptError(
                f"{log_path(block.log_id)} at offset {block.offset} holds {group!r}, the index says "
                f"{block.ledger_id}:{block.first_entry_id}..{block.last_entry_id}",
                file=log_path(block.log_id),
                offset=block.offset,
            )
        return group

    def read_bytes(self, log_id: int, size_bytes: int, offset: int) -> bytes:
        """Return raw bytes of blocks. Unlike `read_block` it checks nothing. Raises OSError, also for a log that is too short."""
        log = self._take(log_id)
        try:
            data = self._pread(log, log_id, size_bytes, offset)
        finally:
            self._give_back(log)
        if len(data) < size_bytes:
            raise OSError(f"{log_path(log_id)} ends at {offset + len(data)}, {size_bytes} bytes from {offset} on are wanted")
        return data

    def read_once(self, log_id: int, size_bytes: int, offset: int) -> bytes:
        """Like `read_bytes`, but drop the data from the page cache, since it will not be read again soon. Raises OSError."""
        log = self._take(log_id)
        try:
            data = self._pread(log, log_id, size_bytes, offset)
            log.file.drop_cached(offset, size_bytes)
        finally:
            self._give_back(log)
        if len(data) < size_bytes:
            raise OSError(f"{log_path(log_id)} ends at {offset + len(data)}, {size_bytes} bytes from {offset} on are wanted")
        return data

    def share(self, log_id: int) -> int:
        """Return a descriptor for another process. Raises OSError, also for a deleted log."""
        return self._disk.share(log_path(log_id))

    def forget(self, log_id: int) -> None:
        """Close a deleted log, which frees its space. Call after the deletion, or a reader may open it again."""
        with self._lock:
            log = self._files.pop(log_id, None)
            if log is not None:
                log.drop_when_unused()

    def close(self) -> None:
        with self._lock:
            for log in self._files.values():
                log.drop_when_unused()
            self._files.clear()

    def _take(self, log_id: int) -> _OpenLog:
        with self._lock:
            log = self._files.get(log_id)
            if log is None:
                log = self._files[log_id] = _OpenLog(self._disk.open(log_path(log_id)))
                if len(self._files) > self._open_logs:
                    self._files.popitem(last=False)[1].drop_when_unused()
            else:
                self._files.move_to_end(log_id)
            log.users += 1
            return log

    def _give_back(self, log: _OpenLog) -> None:
        with self._lock:
            log.users -= 1
            if log.dropped:
                log.drop_when_unused()


class _OpenLog:
    __slots__ = ("dropped", "file", "users")

    def __init__(self, file: DiskFile) -> None:
        self.file = file
        self.users = 0
        self.dropped = False

    def drop_when_unused(self) -> None:
        self.dropped = True
        if self.users == 0:
            self.file.close()
