"""The blocking half of the journal: appends batches to preallocated segments. Runs in the journal's worker thread only.

    write_batch ──► [roll] ──► pwritev at an aligned offset ──► sync ──► position
    roll: create under another name, preallocate, sync ──► header with the size, sync ──► rename, sync_dir

Rule 1: one batch is in flight. A batch is written only after the one before was synced, so a damaged batch that has a later one
behind it was synced once (`journal_replay.py` relies on it).
Rule 2: a write that failed for want of space leaves the position where it was: the next batch goes over the remains, with the same
sequence, so nothing is ever behind half a batch. A failed *sync* is final. Before the next batch goes there, the remains are
overwritten with zeros and synced: bytes of two batches would pass for damage (`journal_tail.py`).
Rule 3: a segment has its name only when size and header are durable. So one that is shorter than its header says, or has no header,
was damaged; what a crash leaves of a roll has no such name, and nothing in it was answered.
Rule 4: a batch never makes its segment longer: what a file grew by may read as anything after a power loss.
Rule 5: a log mark is durable before the first batch of a bookie's life. It points to the start of the first segment. Without it, a
start that finds no journal cannot tell whether one was lost.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cepheid_bookie.disk import Disk, DiskFile
from cepheid_bookie.errors import BookieError
from cepheid_bookie.journal_format import (
    ALIGNMENT,
    BATCH_HEADER_BYTES,
    END_MARKER,
    FORMAT_VERSION,
    BatchHeader,
    SegmentHeader,
    align,
    encode_batch_header,
    encode_segment_header,
    segment_path,
)
from cepheid_rpc import Buffer

_PADDING = END_MARKER + bytes(ALIGNMENT)
_UNNAMED = ".new"


@dataclass(frozen=True, slots=True, order=True)
class JournalPosition:
    """A place between two batches: everything below it, and nothing at or above, is meant. Ordered by `sequence`."""

    sequence: int  # of the batch that is or will be here
    segment_id: int
    offset: int


class JournalSpaceError(BookieError):
    """The journal's disk is full. Nothing of the batch was kept, and the journal can go on."""

    hint = "free space on the journal's disk; nothing acknowledged is lost, and adds succeed again when there is room"


def create_segment(disk: Disk, header: SegmentHeader) -> DiskFile:
    """Create a segment, durable with its name (rule 3). Raises JournalSpaceError, having left nothing, or OSError."""
    path = segment_path(header.segment_id)
    file: DiskFile | None = None
    try:
        file = disk.open(path + _UNNAMED, create=True)
        file.truncate(0)  # what an earlier attempt left
        file.preallocate(header.size_bytes)
        file.sync()
        file.pwrite(encode_segment_header(header), 0)
        file.sync()
    except OSError as error:
        if file is not None:
            file.close()
            disk.unlink(path + _UNNAMED)
        if error.errno == errno.ENOSPC:
            raise JournalSpaceError(f"no space for journal segment {header.segment_id:016x}: {error}") from error
        raise
    disk.rename(path + _UNNAMED, path)
    disk.sync_dir("journal")
    return file


class JournalWriter:
    """Opens a new segment for its first batch; `start` is where replay ended."""

    def __init__(
        self,
        disk: Disk,
        start: JournalPosition,
        *,
        segment_bytes: int,
        new_nonce: Callable[[], bytes],
        format_version: int = FORMAT_VERSION,
        save_first_mark: Callable[[JournalPosition], None] | None = None,
    ) -> None:
        """`save_first_mark` is called once before the first batch is written (rule 5); None: there is a mark already."""
        self._disk = disk
        self._segment_bytes = segment_bytes
        self._new_nonce = new_nonce
        self._format_version = format_version
        self._save_first_mark = save_first_mark
        self._segment_id = start.segment_id
        self._sequence = start.sequence
        self._offset = 0
        self._size_bytes = 0  # of the segment
        self._remains_bytes = 0  # of batches that a full disk refused, from `_offset` on
        self._file: DiskFile | None = None
        self._nonce = b""

    def write_batch(self, parts: Sequence[Buffer], size_bytes: int, records: int) -> JournalPosition:
        """Makes the records durable and returns the position behind them.

        Raises JournalSpaceError (nothing happened) or OSError (the journal must not be used again).
        """
        total = align(BATCH_HEADER_BYTES + size_bytes)
        if self._file is None or self._offset + total > self._size_bytes:
            self._roll(total)
        assert self._file is not None
        if self._save_first_mark is not None:
            self._mark_start(self._save_first_mark)
        header = encode_batch_header(self._segment_id, self._nonce, BatchHeader(self._sequence, size_bytes, records))
        padding = _PADDING[: total - BATCH_HEADER_BYTES - size_bytes]
        try:
            if self._remains_bytes:
                self._overwrite_remains(self._file)
            self._remains_bytes = total
            self._file.pwritev([header, *parts, padding], self._offset)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise JournalSpaceError(f"journal segment {self._segment_id:016x} cannot grow: {error}") from error
            raise
        self._file.sync()
        self._remains_bytes = 0
        self._offset += total
        self._sequence += 1
        return JournalPosition(self._sequence, self._segment_id, self._offset)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _mark_start(self, save: Callable[[JournalPosition], None]) -> None:
        """Raises JournalSpaceError when the data disk has no room for the mark."""
        try:
            save(JournalPosition(self._sequence, self._segment_id, self._offset))
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise JournalSpaceError(f"no space for the first log mark: {error}") from error
            raise
        self._save_first_mark = None

    def _overwrite_remains(self, file: DiskFile) -> None:
        file.pwrite(bytes(self._remains_bytes), self._offset)
        file.sync()

    def _roll(self, first_batch_bytes: int) -> None:
        size_bytes = max(self._segment_bytes, ALIGNMENT + first_batch_bytes)
        header = SegmentHeader(self._segment_id + 1, self._sequence, self._new_nonce(), size_bytes, self._format_version)
        file = create_segment(self._disk, header)
        self.close()
        self._file, self._segment_id, self._nonce, self._offset = file, header.segment_id, header.nonce, ALIGNMENT
        self._size_bytes, self._remains_bytes = size_bytes, 0
