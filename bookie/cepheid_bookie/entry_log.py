"""Entry logs: append-only files of blocks, many ledgers together. A flush appends, ledger by ledger, and syncs.

    entrylog/0000002a.log = header (4096) │ flush: block │ block │ …  zeros to 4096 │ flush: block │ …

Header, 24 bytes: magic "CPHDELOG" (8), format version (4), CRC32C of the last 8 (4), log id (8); little-endian.

Rule 1: a block may be indexed only after `append` returned: its bytes, and the file's name, are synced then.
Rule 2: every flush begins at a multiple of 4096: no synced sector is ever written again.
Rule 3: after a failed flush, and after a start, a new file is begun: nobody needs to know what the old tail holds.
Rule 4: log ids go up from the largest on disk, never from a counter.
"""

from __future__ import annotations

import struct
import threading
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress

from crc32c import crc32c

from cepheid_bookie.block_index import BlockIndex, BlockRef
from cepheid_bookie.disk import Disk, DiskFile
from cepheid_bookie.entry_block import decode_block, encode_block_to, plan_blocks, uncheck_block
from cepheid_bookie.errors import BlockCorruptError
from cepheid_bookie.write_cache import CachedLedger
from cepheid_rpc import Buffer, EntryGroup

_ALIGNMENT = 4096
_MAGIC = b"CPHDELOG"
_HEADER = struct.Struct("<8sIIQ")
_VERSION = LOG_VERSION = 1
_WRITE_BYTES = 1 << 20  # gathered per pwritev, and synced: one large sync would hold up the journal's small ones


def log_path(log_id: int) -> str:
    return f"entrylog/{log_id:08x}.log"


def list_logs(disk: Disk) -> list[int]:
    return sorted(int(name[:-4], 16) for name in disk.listdir("entrylog") if name.endswith(".log"))


def dead_logs(disk: Disk, index: BlockIndex) -> list[int]:
    """To which nothing refers, by the whole index: a second or so for a million blocks. The writer may need some of them yet."""
    living = {block.log_id for block in index.blocks()}
    return [log_id for log_id in list_logs(disk) if log_id not in living]


def _encode_header(log_id: int) -> bytes:
    body = log_id.to_bytes(8, "little")
    return _HEADER.pack(_MAGIC, _VERSION, crc32c(body), log_id).ljust(_ALIGNMENT, b"\0")


def decode_log_header(data: bytes, log_id: int) -> int | None:
    """Return the format version, or None when the bytes are not the intact header of this log. Its checksum does not cover the
    version, so an unknown one may be damage, too."""
    if len(data) < _HEADER.size:
        return None
    magic, version, crc, found_id = _HEADER.unpack_from(data)
    is_intact = magic == _MAGIC and crc32c(memoryview(data)[_HEADER.size - 8 : _HEADER.size]) == crc and found_id == log_id
    return int(version) if is_intact else None


class EntryLogWriter:
    """Blocking; used by the flush thread only."""

    def __init__(self, disk: Disk, *, block_bytes: int, log_bytes: int) -> None:
        self._disk = disk
        self._block_bytes = block_bytes
        self._log_bytes = log_bytes
        self._next_id = max(list_logs(disk), default=0) + 1
        self._file: DiskFile | None = None
        self._log_id = 0
        self._offset = 0
        self._unindexed_from: int | None = None  # the first log of the last `append`, until its blocks are indexed
        self.written_bytes = 0

    @property
    def current_log_id(self) -> int:
        """The log being written, or 0."""
        return self._log_id if self._file is not None else 0

    def is_needed(self, log_id: int) -> bool:
        """Whatever the index says: it is being written, or its blocks are on their way to the index."""
        return log_id == self.current_log_id or (self._unindexed_from is not None and log_id >= self._unindexed_from)

    def append(self, ledgers: Iterable[tuple[int, CachedLedger]]) -> list[BlockRef]:
        """Writes the ledgers' groups as blocks and syncs them. After an OSError nothing of this call is to be indexed."""
        log_id, size_bytes, first_new = self.current_log_id, self._offset, self._next_id
        try:
            blocks = self._append(ledgers)
        except OSError:
            self._abandon(log_id, size_bytes, first_new)
            raise
        if blocks:
            self._unindexed_from = blocks[0].log_id
        return blocks

    def on_indexed(self) -> None:
        """All blocks of the last `append` are in the index."""
        self._unindexed_from = None

    def close(self) -> None:
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
        self._log_id, self._next_id = self._next_id, self._next_id + 1
        self._file = self._disk.open(log_path(self._log_id), create=True)
        self._file.pwrite(_encode_header(self._log_id), 0)
        self._disk.sync_dir("entrylog")
        self._offset = _ALIGNMENT

    def _abandon(self, log_id: int, size_bytes: int, first_new: int) -> None:
        """Gives back the space of a failed flush, as far as the disk lets us: nothing refers to what it wrote. Leaves the log."""
        self.close()
        self._offset = 0
        with suppress(OSError):
            if log_id:
                log = self._disk.open(log_path(log_id))
                try:
                    log.truncate(size_bytes)
                finally:
                    log.close()
        for new_id in range(first_new, self._next_id):
            with suppress(OSError):
                self._disk.unlink(log_path(new_id))


class EntryLogReader:
    """Reads whole blocks; called by reader threads. Keeps up to `open_logs` files open, closes none that is in use."""

    def __init__(self, disk: Disk, *, open_logs: int) -> None:
        self._disk = disk
        self._open_logs = open_logs
        self._lock = threading.Lock()
        self._files: OrderedDict[int, _OpenLog] = OrderedDict()

    def read_block(self, block: BlockRef, *, check: bool = True) -> EntryGroup:
        """Raises BlockCorruptError, or OSError. Without `check` for who looks at each entry's digest and wants what is whole."""
        log = self._take(block.log_id)
        try:
            data = log.file.pread(block.length, block.offset)
        finally:
            self._give_back(log)
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
        """Of blocks, as they lie there: unlike `read_block` it checks nothing. Raises OSError, for a log that is too short too."""
        log = self._take(log_id)
        try:
            data = log.file.pread(size_bytes, offset)
        finally:
            self._give_back(log)
        if len(data) < size_bytes:
            raise OSError(f"{log_path(log_id)} ends at {offset + len(data)}, {size_bytes} bytes from {offset} on are wanted")
        return data

    def share(self, log_id: int) -> int:
        """A descriptor for another process. Raises OSError, for a log that is gone too."""
        return self._disk.share(log_path(log_id))

    def forget(self, log_id: int) -> None:
        """The log is about to be deleted."""
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
