"""Read the journal from the mark to its end, and distinguish a torn tail from damage of synced data.

Batches are written one at a time, each after the one before was synced (journal_writer.py, rule 1). So a damaged batch is

    an earlier one         an intact header with a higher sequence after it, or a later segment that begins above it
                                                                                              → JournalCorruptError
    the last one written   torn, if a crash explains what is there (`journal_tail.py`)       → cut there
                           damaged, if not, or if the segment is shorter than its header says or than the mark needs
                                                                                              → cut there, and reported

Rule 1: torn batches are cut whole; nothing of them was answered.
Rule 2: damage of synced data is never skipped silently: it may hide acknowledged entries and fences. If intact batches follow it,
it fails the start. At the end of the journal it is `report.damage`: what was lost is unknown, and the caller must not deny
it (`opening.py`, rule 3).
Rule 3: everything read here is made durable first. A crash of the process alone leaves batches and names that the system has but
the disk does not: the next power loss must not remove what this start builds on. The header that the new mark will point past
is written again: after a failed sync, the system shows bytes that later syncs do not write.
Rule 4: entries bypass the fence: a fence earlier in the log must not drop later recovery adds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cepheid_bookie.disk import Disk, DiskFile
from cepheid_bookie.errors import JournalCorruptError, JournalMissingError
from cepheid_bookie.journal_format import (
    ALIGNMENT,
    BATCH_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    JournalRecord,
    SegmentHeader,
    align,
    decode_batch_header,
    decode_records,
    decode_segment_header,
    parse_segment_name,
    segment_path,
)
from cepheid_bookie.journal_tail import SECTOR_BYTES, Tail, judge_tail
from cepheid_bookie.journal_writer import JournalPosition

_SCAN_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class TailDamage:
    """Where the end of the journal was lost after it had been synced, and the proof."""

    file: str
    offset: int
    proof: str


@dataclass(slots=True)
class ReplayReport:
    """The result of a replay, for the log line and for tests."""

    end: JournalPosition
    batches: int = 0
    records: int = 0
    cut_offset: int | None = None  # where a torn or damaged batch was cut, in the last segment
    damage: TailDamage | None = None
    last_segment_id: int = 0
    unsized_bytes: int | None = None  # size of the last segment if its header does not tell what it was: an older release wrote it


class JournalReplay:
    """Blocking. Iterate `records()` to the end, then `report.end` is where the journal goes on."""

    def __init__(self, disk: Disk, mark: JournalPosition) -> None:
        self._disk = disk
        self._mark = mark
        self._previous: SegmentHeader | None = None
        self.report = ReplayReport(mark)

    def records(self) -> Iterator[JournalRecord]:
        self._disk.sync_dir("journal")
        segments = self._segments()
        for place, segment_id in enumerate(segments):
            last = place == len(segments) - 1
            self.report.last_segment_id = segment_id
            file = self._disk.open(segment_path(segment_id))
            try:
                if last:
                    file.pwrite(file.pread(ALIGNMENT, 0), 0)
                file.sync()
                header = self._header(file, segment_id, last=last)
                if header is not None:
                    yield from self._segment(file, header, last=last)
            finally:
                file.close()

    def _segments(self) -> list[int]:
        """Return the ids from the mark's segment on. Raises JournalMissingError if one is missing."""
        names = self._disk.listdir("journal")
        found = sorted(number for name in names if (number := parse_segment_name(name)) is not None)
        needed = [number for number in found if number >= self._mark.segment_id]
        first = max(self._mark.segment_id, 1)
        expected = list(range(first, first + len(needed)))
        if needed != expected or (not needed and self._mark.segment_id > 0):
            missing = next((number for number in expected if number not in needed), first)
            raise JournalMissingError(
                f"{segment_path(missing)} is missing; the log mark needs all segments from {first:016x} on, "
                f"found: {', '.join(f'{number:x}' for number in found) or 'none'}",
                segment_id=missing,
            )
        return needed

    def _header(self, file: DiskFile, segment_id: int, *, last: bool) -> SegmentHeader | None:
        """Return None for a segment without a header and without batches. The next segment tells whether one is missing."""
        header = decode_segment_header(file.pread(SEGMENT_HEADER_BYTES, 0))
        end, is_marked, previous = self.report.end, segment_id == self._mark.segment_id, self._previous
        if header is not None and header.segment_id == segment_id:
            # Below: the batch before is one that a full disk refused, but whole (journal_writer.py, rule 2). Nothing is missing.
            if not is_marked and header.first_sequence > end.sequence:
                raise JournalCorruptError(
                    f"{segment_path(end.segment_id)} ends at batch {end.sequence - 1} (offset {end.offset}), "
                    f"but {segment_path(segment_id)} proves that batches up to {header.first_sequence - 1} were synced",
                    file=segment_path(end.segment_id),
                    offset=end.offset,
                )
            self._previous = header
            return header
        if (is_marked and file.size() > self._mark.offset) or self._was_used(file, segment_id):
            raise JournalCorruptError(
                f"{segment_path(segment_id)} is damaged at offset 0 (segment header) and was in use",
                file=segment_path(segment_id),
                offset=0,
            )
        if last and previous is not None and not previous.size_bytes:
            self._disk.unlink(segment_path(segment_id))  # an older release names a segment first: its creation was cut by a crash
            self._disk.sync_dir("journal")
        elif last:
            self._report_damage(segment_id, 0, f"it has {file.size()} bytes and no segment header")
        return None

    def _segment(self, file: DiskFile, header: SegmentHeader, *, last: bool) -> Iterator[JournalRecord]:
        if header.segment_id == self._mark.segment_id:
            offset, sequence = self._mark.offset, self._mark.sequence
        else:
            offset, sequence = ALIGNMENT, header.first_sequence
        while True:
            self.report.end = JournalPosition(sequence, header.segment_id, offset)
            head = file.pread(BATCH_HEADER_BYTES, offset)
            batch = decode_batch_header(head, header.segment_id, header.nonce)
            records = None
            if batch is not None and batch.sequence == sequence:
                body = file.pread(batch.size_bytes, offset + BATCH_HEADER_BYTES)
                records = decode_records(memoryview(body), batch.records)
            if batch is None or records is None:
                self._check_end(file, header, offset, sequence, last=last)
                return
            yield from records
            self.report.batches += 1
            self.report.records += len(records)
            offset += align(BATCH_HEADER_BYTES + batch.size_bytes)
            sequence += 1

    def _check_end(self, file: DiskFile, header: SegmentHeader, offset: int, sequence: int, *, last: bool) -> None:
        """Check a place without an intact batch. A later batch in this segment proves that this one was synced."""
        for later_offset, later in self._batches(file, header.segment_id, header.nonce, offset + ALIGNMENT):
            if later > sequence:
                raise JournalCorruptError(
                    f"{segment_path(header.segment_id)} is damaged at offset {offset} (batch {sequence}): "
                    f"batch {later} at offset {later_offset} was written after it was synced",
                    file=segment_path(header.segment_id),
                    offset=offset,
                )
        if last:
            self._judge_end(file, header, offset, sequence)

    def _judge_end(self, file: DiskFile, header: SegmentHeader, offset: int, sequence: int) -> None:
        """Judge the end of the last segment: either it proves damage, or a crash explains its contents."""
        size, report = file.size(), self.report
        needed = max(header.size_bytes, self._mark.offset if header.segment_id == self._mark.segment_id else 0)
        if not header.size_bytes:
            report.unsized_bytes = size
        if size < needed:
            self._report_damage(header.segment_id, offset, f"it has {size} bytes, and had {needed} or more")
            return
        tail = self._judge_tail(file, header, offset, sequence)
        if tail is Tail.DAMAGED:
            self._report_damage(header.segment_id, offset, f"batch {sequence} was written whole, and is not as it was written")
        elif tail is Tail.TORN:
            report.cut_offset = offset

    @staticmethod
    def _judge_tail(file: DiskFile, header: SegmentHeader, offset: int, sequence: int) -> Tail:
        head = file.pread(SECTOR_BYTES, offset)
        if not header.size_bytes:  # journal_tail.py, rule 2
            return Tail.TORN if any(head[:BATCH_HEADER_BYTES]) else Tail.CLEAN
        batch = decode_batch_header(head, header.segment_id, header.nonce)
        if batch is not None:
            head = file.pread(align(BATCH_HEADER_BYTES + batch.size_bytes), offset)
        return judge_tail(head, header, sequence)

    def _report_damage(self, segment_id: int, offset: int, proof: str) -> None:
        self.report.damage = TailDamage(segment_path(segment_id), offset, proof)
        self.report.cut_offset = offset

    @staticmethod
    def _batches(file: DiskFile, segment_id: int, nonce: bytes | None, start: int) -> Iterator[tuple[int, int]]:
        """Yield (offset, sequence) of every intact batch header from `start` on."""
        size = file.size()
        while start < size:
            chunk = file.pread(_SCAN_BYTES, start)
            if not chunk:
                return
            for place in range(0, len(chunk), ALIGNMENT):
                batch = decode_batch_header(chunk[place : place + BATCH_HEADER_BYTES], segment_id, nonce)
                if batch is not None:
                    yield start + place, batch.sequence
            start += _SCAN_BYTES

    @classmethod
    def _was_used(cls, file: DiskFile, segment_id: int) -> bool:
        """Return whether a segment that lost its header has a batch of its own. A lost sector may show bytes of other files."""
        return next(cls._batches(file, segment_id, None, ALIGNMENT), None) is not None
