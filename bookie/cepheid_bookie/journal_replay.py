"""Reads the journal from the mark to its end. Tells a torn tail from damage of what was synced.

Batches are written one at a time, each after the one before was synced (journal_writer.py, rule 1). So a damaged batch is

    the last one written   no intact batch header with a higher sequence behind it, no later segment      → torn: cut there
    an earlier one         such a header, or a later segment that begins above it                          → JournalCorruptError

Rule 1: torn batches are cut whole; nothing of them was answered.
Rule 2: damage of synced data stops the start. Never skipped: it may hide acknowledged entries and fences.
Rule 3: what is read here is made durable first. A crash of the process alone leaves batches and names that the system has and the
disk does not: what this start builds on must not be lost by the next power loss. The header that the new mark will point behind
is written again: after a sync that failed, the system shows bytes that later syncs do not write.
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
    JournalRecord,
    SegmentHeader,
    align,
    decode_batch_header,
    decode_records,
    decode_segment_header,
    parse_segment_name,
    segment_path,
)
from cepheid_bookie.journal_writer import JournalPosition

_SCAN_BYTES = 1 << 20


@dataclass(slots=True)
class ReplayReport:
    """What a start found; for the log line and for tests."""

    end: JournalPosition
    batches: int = 0
    records: int = 0
    cut_offset: int | None = None  # where a torn batch was cut, in the last segment


class JournalReplay:
    """Blocking. Iterate `records()` to the end, then `report.end` is where the journal goes on."""

    def __init__(self, disk: Disk, mark: JournalPosition) -> None:
        self._disk = disk
        self._mark = mark
        self.report = ReplayReport(mark)

    def records(self) -> Iterator[JournalRecord]:
        self._disk.sync_dir("journal")
        segments = self._segments()
        for place, segment_id in enumerate(segments):
            last = place == len(segments) - 1
            file = self._disk.open(segment_path(segment_id))
            try:
                if last:
                    file.pwrite(file.pread(ALIGNMENT, 0), 0)
                file.sync()
                header = self._header(file, segment_id, last=last)
                if header is None:
                    break
                yield from self._segment(file, header, last=last)
            finally:
                file.close()

    def _segments(self) -> list[int]:
        """Ids from the mark's segment on. Raises JournalMissingError when one is not there."""
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
        """None for a last segment whose creation was cut by a crash: nothing was written to it. It is removed."""
        header = decode_segment_header(file.pread(ALIGNMENT, 0))
        end = self.report.end
        if header is not None and header.segment_id == segment_id:
            # Below: the batch before is one that a full disk refused, but whole (journal_writer.py, rule 2). Nothing is missing.
            if segment_id != self._mark.segment_id and header.first_sequence > end.sequence:
                raise JournalCorruptError(
                    f"{segment_path(end.segment_id)} ends at batch {end.sequence - 1} (offset {end.offset}), "
                    f"but {segment_path(segment_id)} proves that batches up to {header.first_sequence - 1} were synced",
                    file=segment_path(end.segment_id),
                    offset=end.offset,
                )
            return header
        if not last or segment_id == self._mark.segment_id or self._was_used(file, segment_id):
            raise JournalCorruptError(
                f"{segment_path(segment_id)} is damaged at offset 0 (segment header) and was in use",
                file=segment_path(segment_id),
                offset=0,
            )
        self._disk.unlink(segment_path(segment_id))
        self._disk.sync_dir("journal")
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
                self._check_end(file, header, offset, sequence, last=last, clean=not any(head))
                return
            yield from records
            self.report.batches += 1
            self.report.records += len(records)
            offset += align(BATCH_HEADER_BYTES + batch.size_bytes)
            sequence += 1

    def _check_end(self, file: DiskFile, header: SegmentHeader, offset: int, sequence: int, *, last: bool, clean: bool) -> None:
        """No intact batch at `offset`. A later one in this segment proves that this one was synced."""
        for later_offset, later in self._batches(file, header.segment_id, header.nonce, offset + ALIGNMENT):
            if later > sequence:
                raise JournalCorruptError(
                    f"{segment_path(header.segment_id)} is damaged at offset {offset} (batch {sequence}): "
                    f"batch {later} at offset {later_offset} was written after it was synced",
                    file=segment_path(header.segment_id),
                    offset=offset,
                )
        if last and not clean:
            self.report.cut_offset = offset

    @staticmethod
    def _batches(file: DiskFile, segment_id: int, nonce: bytes | None, start: int) -> Iterator[tuple[int, int]]:
        """(offset, sequence) of every intact batch header from `start` on."""
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
        """Whether a segment that lost its header has a batch. A lost sector may show bytes of other files: only its own count."""
        return next(cls._batches(file, segment_id, None, ALIGNMENT), None) is not None
