"""The block index in RocksDB, raw mode. Small: about 8 MB of memory, since it has one key per block of a megabyte, not per entry.

key                                                              value (big-endian)
'B' ledger id (8) first entry id (8) log id (8) offset (8)       length (4), last entry id (8)
'L' ledger id (8)                                                ledger record
'S' ledger id (8)                                                largest last entry id (8), longest block in entries (8)
'I'                                                              stamp: incarnation of the bookie
'V'                                                              format version (4)
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rocksdict import AccessType, BlockBasedOptions, Cache, DBCompressionType, DBRecoveryMode, Options, Rdict, WriteBatch

from cepheid_bookie.block_index import BlockIndex, BlockRef, Summary, group_by_ledger
from cepheid_bookie.disk import DirectoryInUseError, SyncFailedError
from cepheid_bookie.errors import BookieError, DiskFullError, FormatVersionError, IndexCorruptError
from cepheid_bookie.ledger_record import LedgerRecord, decode_record, encode_record, is_deleted_record

_BLOCK_KEY = struct.Struct(">cQQQQ")
_BLOCK_VALUE = struct.Struct(">IQ")
_LEDGER_KEY = struct.Struct(">cQ")
_SUMMARY = struct.Struct(">qQ")
_MAX = (1 << 64) - 1
_STAMP_KEY = b"I"
_VERSION_KEY = b"V"
_VERSION = 1
_BATCH_KEYS = 500
"""Limit of keys written at once. A write holds the interpreter's lock: 15 to 35 ms for the 20,000 keys of 10,000 topics."""

_KEYS_OF_DELETION = 3


def _options() -> Options:
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_write_buffer_size(2 << 20)
    options.set_max_write_buffer_number(2)
    options.set_max_total_wal_size(8 << 20)
    # By default the database opens despite damage inside its log and silently drops every synced write after it.
    options.set_wal_recovery_mode(DBRecoveryMode.tolerate_corrupted_tail_records())
    options.set_keep_log_file_num(2)
    options.set_max_open_files(64)
    options.set_max_background_jobs(2)
    # Keys of one ledger begin alike. Many topics make many small blocks: 310,000 of them take 3 to 5 MB instead of 16 to 25.
    options.set_compression_type(DBCompressionType.lz4())
    options.set_bottommost_compression_type(DBCompressionType.zstd())
    options.set_stats_dump_period_sec(0)
    options.set_stats_persist_period_sec(0)
    table = BlockBasedOptions()
    table.set_block_cache(Cache(4 << 20))
    table.set_cache_index_and_filter_blocks(True)
    table.set_bloom_filter(10, False)
    options.set_block_based_table_factory(table)
    return options


class RocksBlockIndex(BlockIndex):
    """The index as a database in the directory `path`. `read_only`: it must exist, and the database changes none of its own files.

    rocksdict raises a plain Exception for all errors of the database. Here they become OSError (ENOSPC if the disk is full,
    else EIO) and IndexCorruptError. On a full disk the database checks every few seconds whether it can write again.
    """

    def __init__(self, path: str | Path, *, read_only: bool = False) -> None:
        access = AccessType.read_only() if read_only else AccessType.read_write()
        self._path = path
        self._is_full = False
        self.damage: IndexCorruptError | None = None
        self.on_damage: Callable[[IndexCorruptError], None] = lambda error: None
        try:
            self._open(access)
            self._check_version(read_only=read_only)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise DiskFullError(f"the block index {path} cannot be opened: its disk is full", path=str(path)) from error
            if "lock" in str(error) and "LOCK" in str(error):
                raise DirectoryInUseError(f"the block index {path} is in use by another process", path=str(path)) from None
            if "No such file" in str(error):
                raise IndexCorruptError(f"the block index {path} is damaged: {error.__cause__}", path=str(path)) from error
            raise

    def _open(self, access: AccessType) -> None:
        with self._named_errors():
            self._db = Rdict(str(self._path), options=_options(), access_type=access)

    def _check_version(self, *, read_only: bool) -> None:
        try:
            self._read_version(read_only=read_only)
        except BaseException:
            with suppress(Exception):  # the first error is the informative one
                self._db.close()
            raise

    def _read_version(self, *, read_only: bool) -> None:
        path, version = self._path, self._get(_VERSION_KEY)
        if version is None and read_only:
            raise IndexCorruptError(f"the block index {path} has no format version: no bookie has written it", path=str(path))
        if version is None:
            self._put_synced(_VERSION_KEY, struct.pack(">I", _VERSION))
        elif struct.unpack(">I", version)[0] != _VERSION:
            raise FormatVersionError(
                f"the block index {path} has format {struct.unpack('>I', version)[0]}, this bookie reads {_VERSION}", path=str(path)
            )

    def write(self, blocks: Sequence[BlockRef], records: Mapping[int, LedgerRecord]) -> None:
        batch, keys = WriteBatch(raw_mode=True), 0
        for ledger_id, record in records.items():
            batch.put(_LEDGER_KEY.pack(b"L", ledger_id), encode_record(record))
            keys += 1
        for ledger_id, ledger_blocks in group_by_ledger(blocks).items():
            summary = self._summary(ledger_id)
            for block in ledger_blocks:
                batch.put(_block_key(block), _BLOCK_VALUE.pack(block.length, block.last_entry_id))
                summary = summary.including(block)
            batch.put(_LEDGER_KEY.pack(b"S", ledger_id), _SUMMARY.pack(*summary))
            keys += len(ledger_blocks) + 1
            if keys >= _BATCH_KEYS:
                self._write(batch)
                batch, keys = WriteBatch(raw_mode=True), 0
        self._write_synced(batch)

    def move(self, moves: Sequence[tuple[BlockRef, BlockRef]]) -> int:
        batch, moved = WriteBatch(raw_mode=True), 0
        for old, new in moves:
            if self._get(_block_key(old)) is not None:
                batch.delete(_block_key(old))
                batch.put(_block_key(new), _BLOCK_VALUE.pack(new.length, new.last_entry_id))
                moved += 1
        self._write_synced(batch)
        return moved

    def delete_ledgers(self, ledgers: Mapping[int, LedgerRecord | None]) -> None:
        batch, keys = WriteBatch(raw_mode=True), 0
        for ledger_id, tombstone in ledgers.items():
            if keys >= _BATCH_KEYS:
                self._write(batch)
                batch, keys = WriteBatch(raw_mode=True), 0
            keys += _KEYS_OF_DELETION
            batch.delete_range(_BLOCK_KEY.pack(b"B", ledger_id, 0, 0, 0), _BLOCK_KEY.pack(b"B", ledger_id + 1, 0, 0, 0))
            batch.delete(_LEDGER_KEY.pack(b"S", ledger_id))
            if tombstone is None:
                batch.delete(_LEDGER_KEY.pack(b"L", ledger_id))
            else:
                batch.put(_LEDGER_KEY.pack(b"L", ledger_id), encode_record(tombstone))
        self._write_synced(batch)

    def remove_blocks(self, blocks: Sequence[BlockRef]) -> None:
        batch = WriteBatch(raw_mode=True)
        for block in blocks:
            batch.delete(_block_key(block))
        self._write_synced(batch)

    def sync(self) -> None:
        try:
            with self._named_errors():
                self._db.flush_wal(True)
        except Exception as error:
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise
            raise SyncFailedError(errno.EIO, f"the block index cannot be synced: {error}") from error

    def find(self, ledger_id: int, first_entry_id: int, last_entry_id: int, max_blocks: int) -> list[BlockRef]:
        summary = self._summary(ledger_id)
        last_entry_id = min(last_entry_id, summary.last_entry_id)
        found: list[BlockRef] = []
        entry_id = first_entry_id
        cursor = self._db.iter() if entry_id <= last_entry_id else None
        while cursor is not None and entry_id <= last_entry_id and len(found) < max_blocks:
            if found:  # mostly the next block begins where this one ended
                cursor.next()
                block = self._block_at(cursor, ledger_id)
                if block is not None and block.first_entry_id == entry_id:
                    found.append(block)
                    entry_id = block.last_entry_id + 1
                    continue
            block = self._containing(cursor, ledger_id, entry_id, summary.longest)
            if block is None:
                cursor.seek(_BLOCK_KEY.pack(b"B", ledger_id, entry_id + 1, 0, 0))
                block = self._block_at(cursor, ledger_id)
                if block is None or block.first_entry_id > last_entry_id:
                    break
            found.append(block)
            entry_id = block.last_entry_id + 1
        return found

    def overlapping(self, ledger_id: int, first_entry_id: int, last_entry_id: int) -> list[BlockRef]:
        found: list[BlockRef] = []
        reach = max(self._summary(ledger_id).longest - 1, 0)  # an earlier block cannot have an entry of the range
        cursor = self._db.iter()
        cursor.seek(_BLOCK_KEY.pack(b"B", ledger_id, max(first_entry_id - reach, 0), 0, 0))
        while (block := self._block_at(cursor, ledger_id)) is not None and block.first_entry_id <= last_entry_id:
            if block.last_entry_id >= first_entry_id:
                found.append(block)
            cursor.next()
        return found

    def contains(self, block: BlockRef) -> bool:
        return bool(self._get(_block_key(block)) == _BLOCK_VALUE.pack(block.length, block.last_entry_id))

    def last_entry_id(self, ledger_id: int) -> int:
        return self._summary(ledger_id).last_entry_id

    def record(self, ledger_id: int) -> LedgerRecord | None:
        value = self._get(_LEDGER_KEY.pack(b"L", ledger_id))
        return None if value is None else decode_record(value)

    def records(self) -> Iterator[tuple[int, LedgerRecord]]:
        cursor = self._db.iter()
        cursor.seek(b"L")
        while self._is_valid(cursor) and (key := cursor.key())[:1] == b"L":
            yield _LEDGER_KEY.unpack(key)[1], decode_record(cursor.value())
            cursor.next()

    def ledger_ids(self, above: int, limit: int) -> list[tuple[int, bool]]:
        found: list[tuple[int, bool]] = []
        cursor = self._db.iter()
        cursor.seek(_LEDGER_KEY.pack(b"L", above + 1))
        while len(found) < limit and self._is_valid(cursor) and (key := cursor.key())[:1] == b"L":
            found.append((_LEDGER_KEY.unpack(key)[1], is_deleted_record(cursor.value())))
            cursor.next()
        return found

    def largest_ledger_id(self) -> int | None:
        cursor = self._db.iter()
        cursor.seek_for_prev(_LEDGER_KEY.pack(b"L", _MAX))
        if not self._is_valid(cursor) or (key := cursor.key())[:1] != b"L":
            return None
        ledger_id: int = _LEDGER_KEY.unpack(key)[1]
        return ledger_id

    def blocks(self) -> Iterator[BlockRef]:
        cursor = self._db.iter()
        cursor.seek(b"B")
        while (block := self._block_at(cursor, None)) is not None:
            yield block
            cursor.next()

    def blocks_after(self, last: BlockRef | None, limit: int) -> list[BlockRef]:
        cursor = self._db.iter()
        cursor.seek(b"B" if last is None else _block_key(last))
        found: list[BlockRef] = []
        while len(found) < limit and (block := self._block_at(cursor, None)) is not None:
            if block != last:
                found.append(block)
            cursor.next()
        return found

    def stamp(self) -> bytes | None:
        return self._get(_STAMP_KEY)

    def put_stamp(self, stamp: bytes) -> None:
        self._put_synced(_STAMP_KEY, stamp)

    def close(self) -> None:
        with self._named_errors():
            self._db.close()

    def _put_synced(self, key: bytes, value: bytes) -> None:
        batch = WriteBatch(raw_mode=True)
        batch.put(key, value)
        self._write_synced(batch)

    def _write_synced(self, batch: WriteBatch) -> None:
        """Write in two steps, so that the interpreter's lock is free during the sync.

        A write with `sync` set keeps the lock while it waits for the disk, and the loop stands still (measured: up to 12 ms);
        `flush_wal` releases it.
        """
        self._write(batch)
        self.sync()

    def _write(self, batch: WriteBatch) -> None:
        with self._named_errors():
            self._db.write(batch)
        self._is_full = False

    def _get(self, key: bytes) -> bytes | None:
        with self._named_errors():
            value: bytes | None = self._db.get(key)
        return value

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Translate errors of rocksdict into errors that say what is wrong."""
        try:
            yield
        except Exception as error:
            named = self._named(error)
            if named is error:
                raise
            raise named from error

    def _named(self, error: Exception) -> Exception:
        text = str(error)
        if isinstance(error, OSError | BookieError):
            return error
        # After a write that failed for lack of space, syncs report only the second text until the database has begun a new log.
        if "No space left" in text or (self._is_full and "Writer has previous error" in text):
            self._is_full = True
            return OSError(errno.ENOSPC, f"the disk of the block index {self._path} is full: {text}")
        if "Corruption" in text:
            damage = IndexCorruptError(f"the block index {self._path} is damaged: {text}", path=str(self._path))
            self.damage = self.damage or damage
            self.on_damage(damage)
            return damage
        if "IO error" in text:
            return OSError(errno.EIO, f"the block index {self._path} cannot be used: {text}")
        return error

    def _summary(self, ledger_id: int) -> Summary:
        value = self._get(_LEDGER_KEY.pack(b"S", ledger_id))
        return Summary() if value is None else Summary(*_SUMMARY.unpack(value))

    def _containing(self, cursor: Any, ledger_id: int, entry_id: int, longest: int) -> BlockRef | None:
        """Search downwards from the last block that begins at or below `entry_id` to the last that could reach it."""
        cursor.seek_for_prev(_BLOCK_KEY.pack(b"B", ledger_id, entry_id, _MAX, _MAX))
        while (block := self._block_at(cursor, ledger_id)) is not None and block.first_entry_id + longest > entry_id:
            if block.last_entry_id >= entry_id:
                return block
            cursor.prev()
        return None

    def _block_at(self, cursor: Any, ledger_id: int | None) -> BlockRef | None:
        """Return the block under the cursor if it is one of this ledger (any ledger if None)."""
        if not self._is_valid(cursor):
            return None
        key = cursor.key()
        if key[:1] != b"B":
            return None
        _, found_id, first_entry_id, log_id, offset = _BLOCK_KEY.unpack(key)
        if ledger_id is not None and found_id != ledger_id:
            return None
        length, last_entry_id = _BLOCK_VALUE.unpack(cursor.value())
        return BlockRef(found_id, first_entry_id, last_entry_id, log_id, offset, length)

    def _is_valid(self, cursor: Any) -> bool:
        """Return False at the end. Raises if the database cannot read further, which its cursors also show as an end."""
        valid: bool = cursor.valid()
        if not valid:
            with self._named_errors():
                cursor.status()
        return valid


def _block_key(block: BlockRef) -> bytes:
    return _BLOCK_KEY.pack(b"B", block.ledger_id, block.first_entry_id, block.log_id, block.offset)
