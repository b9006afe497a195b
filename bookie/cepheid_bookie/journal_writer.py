"""The blocking part of the journal: append batches to preallocated segments. Runs only in the journal's worker thread.

    write_batch ──► [roll] ──► pwritev at an aligned offset ──► sync ──► position
    roll: create under another name, preallocate, sync ──► header with the size, sync ──► rename, sync_dir
    roll with a spare segment: rename to that other name ──► header, zeros ahead, sync ──► rename, sync_dir

Rule 1: one batch is in flight. A batch is written only after the one before was synced, so a damaged batch that is followed by a
later one was synced once (`journal_replay.py` relies on it).
Rule 2: a write that failed for lack of space leaves the position unchanged: the next batch overwrites the remains, with the same
sequence, so nothing ever follows half a batch. A failed *sync* is final. Before the next batch is written there, the remains are
overwritten with zeros and synced: bytes of two batches would look like damage (`journal_tail.py`).
Rule 3: a segment has its name only when size and header are durable. So one that is shorter than its header says, or has no header,
was damaged; what a crash leaves of a roll has no such name, and nothing in it was answered.
Rule 4: a batch never makes its segment longer: what a file grew by may read as anything after a power loss.
Rule 5: a log mark is durable before the first batch of a bookie's life. It points to the start of the first segment. Without it, a
start that finds no journal cannot tell whether one was lost.
Rule 6: a spare segment is one that the log mark has passed. Syncs into it need not write the file system's metadata, as all its
blocks were written before, except for an unused end. It is full of old batches, so zeros are written ahead of the end: each batch
is written where zeros were synced, and so was the block after it. A crash leaves at the end of the journal what it leaves in a
preallocated segment (`journal_tail.py`), and old batches lie beyond. They have another segment id, another nonce, and lower
sequences.
Rule 7: spare segments do not outlive the process. A start deletes them, and what a roll left that was cut by a crash.
"""

from __future__ import annotations

import errno
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
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

log = logging.getLogger(__name__)

_PADDING = END_MARKER + bytes(ALIGNMENT)
_UNNAMED = ".new"
_SPARE = ".spare"
_ZEROED_BYTES = 64 << 10
"""Minimum of zeros after the end of the journal in a recycled segment, in bytes, unless the segment is small."""
_PARTS_OF_SEGMENT = 16  # of which one may be zeros ahead
_LARGE_BATCH_BYTES = 64 << 10
"""Mean size of batches from which a preallocated segment is better: with zeros ahead, every byte is written twice."""


@dataclass(frozen=True, slots=True, order=True)
class JournalPosition:
    """A place between two batches, standing for everything below it and nothing at or above it. Ordered by `sequence`."""

    sequence: int  # of the batch that is or will be here
    segment_id: int
    offset: int


class JournalSpaceError(BookieError):
    """The journal's disk is full. Nothing of the batch was kept, and the journal can continue."""

    hint = "free space on the journal's disk; nothing acknowledged is lost, and adds succeed again when there is room"


class SpareSegments:
    """Segments that the log mark has passed, to be written again (rule 6).

    The flush thread adds them, the journal's thread takes them, and a third thread deletes them when the disk is low. A segment
    belongs to the thread that took its name from the deque.
    """

    def __init__(self, disk: Disk, *, limit: int, segment_bytes: int) -> None:
        self._disk = disk
        self._limit = limit
        self._segment_bytes = segment_bytes
        self._paths: deque[str] = deque()
        self.keeps = True  # False: the disk is low on space

    def __len__(self) -> int:
        return len(self._paths)

    @property
    def most_bytes(self) -> int:
        """Return how many bytes all spare segments take at most."""
        return self._limit * self._segment_bytes

    def add(self, segment_id: int) -> bool:
        """Keep a segment. Return False if it is not kept, and is to be deleted."""
        if not self.keeps or len(self._paths) >= self._limit:
            return False
        path = segment_path(segment_id)
        file = self._disk.open(path)
        try:
            if file.size() != self._segment_bytes:
                return False
        finally:
            file.close()
        spare = path + _SPARE
        self._disk.rename(path, spare)
        self._paths.append(spare)
        return True

    def take(self) -> str | None:
        """Return the path of a spare segment that belongs to the caller from now on, None if there is none."""
        with suppress(IndexError):  # another thread takes them, too
            while True:
                path = self._paths.popleft()
                if self._disk.exists(path):  # an operator may have made room by hand
                    return path
        return None

    def drop(self) -> None:
        """Delete all spare segments."""
        while (path := self.take()) is not None:
            try:
                self._disk.unlink(path)
            except OSError as error:
                log.warning(
                    "journal.spare_not_deleted", extra={"file": path, "error": str(error), "hint": "it is deleted at a start"}
                )


def delete_unused_segments(disk: Disk) -> None:
    """Delete files that are not part of the journal: spare segments, and remains of a roll after a crash (rule 7)."""
    for name in disk.listdir("journal"):
        if name.endswith((_SPARE, _UNNAMED)):
            disk.unlink(f"journal/{name}")


def create_segment(disk: Disk, header: SegmentHeader, spare: str | None = None, zeroed_bytes: int = 0) -> DiskFile:
    """Create a segment, durable with its name (rule 3), of a spare segment if one is given: with zeros up to `zeroed_bytes`.

    Raises JournalSpaceError, having left nothing, or OSError.
    """
    path = segment_path(header.segment_id)
    file: DiskFile | None = None
    try:
        if spare is None:
            file = disk.open(path + _UNNAMED, create=True)
            file.truncate(0)  # what an earlier attempt left
            file.preallocate(header.size_bytes)
            file.sync()
            file.pwrite(encode_segment_header(header), 0)
        else:
            disk.rename(spare, path + _UNNAMED)
            file = disk.open(path + _UNNAMED)
            file.pwrite(encode_segment_header(header).ljust(zeroed_bytes, b"\0"), 0)
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
        spares: SpareSegments | None = None,
    ) -> None:
        """`save_first_mark` is called once before the first batch is written (rule 5); None: there is a mark already."""
        self._disk = disk
        self._segment_bytes = segment_bytes
        self._new_nonce = new_nonce
        self._format_version = format_version
        self._save_first_mark = save_first_mark
        self._spares = spares
        self._ahead_bytes = max(ALIGNMENT, min(_ZEROED_BYTES, align(segment_bytes // _PARTS_OF_SEGMENT)))
        self._segment_id = start.segment_id
        self._sequence = start.sequence
        self._offset = 0
        self._size_bytes = 0  # of the segment
        self._zeroed_to = 0  # from `_offset` up to here the segment is zeros, and synced
        self._batches = 0  # in the segment
        self._remains_bytes = 0  # of batches that a full disk refused, from `_offset` on
        self._file: DiskFile | None = None
        self._nonce = b""

    def write_batch(self, parts: Sequence[Buffer], size_bytes: int, records: int) -> JournalPosition:
        """Make the records durable and return the position after them.

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
            if self._zeroed_to < min(self._offset + total + ALIGNMENT, self._size_bytes):
                self._zeroed_to = self._zero_ahead(self._file, total)  # larger than the batches before it
                self._file.sync()
            self._remains_bytes = total
            self._file.pwritev([header, *parts, padding], self._offset)
            zeroed_to = self._zero_ahead(self._file, total)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise JournalSpaceError(f"journal segment {self._segment_id:016x} cannot grow: {error}") from error
            raise
        self._file.sync()
        self._remains_bytes = 0
        self._offset += total
        self._zeroed_to = zeroed_to
        self._batches += 1
        self._sequence += 1
        return JournalPosition(self._sequence, self._segment_id, self._offset)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _mark_start(self, save: Callable[[JournalPosition], None]) -> None:
        """Save the first mark. Raises JournalSpaceError if the data disk has no room for it."""
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

    def _zero_ahead(self, file: DiskFile, batch_bytes: int) -> int:
        """Write zeros after a batch unless there are enough. Return the end of the zeros once the file is synced."""
        end, ahead_bytes = self._offset + batch_bytes, max(self._ahead_bytes, batch_bytes)
        if self._zeroed_to >= min(end + ahead_bytes, self._size_bytes):
            return self._zeroed_to
        zeroed_to = min(end + 2 * ahead_bytes, self._size_bytes)
        file.pwrite(bytes(zeroed_to - self._zeroed_to), self._zeroed_to)
        return zeroed_to

    def _roll(self, first_batch_bytes: int) -> None:
        size_bytes = max(self._segment_bytes, ALIGNMENT + first_batch_bytes)
        header = SegmentHeader(self._segment_id + 1, self._sequence, self._new_nonce(), size_bytes, self._format_version)
        spare, zeroed_to = self._spare(first_batch_bytes), size_bytes
        if spare is not None:
            zeroed_to = min(ALIGNMENT + max(2 * self._ahead_bytes, first_batch_bytes + ALIGNMENT), size_bytes)
        file = create_segment(self._disk, header, spare, zeroed_to)
        self.close()
        self._file, self._segment_id, self._nonce, self._offset = file, header.segment_id, header.nonce, ALIGNMENT
        self._size_bytes, self._zeroed_to, self._batches, self._remains_bytes = size_bytes, zeroed_to, 0, 0

    def _spare(self, first_batch_bytes: int) -> str | None:
        """Return a spare segment for the next batches, or None."""
        fits = ALIGNMENT + first_batch_bytes <= self._segment_bytes
        small = self._offset - ALIGNMENT <= _LARGE_BATCH_BYTES * self._batches  # those of the segment before
        return self._spares.take() if self._spares is not None and fits and small else None
