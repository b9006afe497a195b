"""Read a whole journal segment, for tools: every record with its place, and all damage, without stopping at the first.

Unlike the replay (`journal_replay.py`) this decides nothing and changes nothing: it says where batches, records and damage are.

Rule 1: only the nonce of the segment tells its batches from bytes that a client sent. It is in the segment header and in each batch
header. When the segment header is lost, it is taken from the first batch, whose place is fixed; when that is lost as well, nothing
in the file can be believed.
Rule 2: in a damaged batch, records after a damaged one are listed only if their lengths lead exactly to the end of the batch.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from cepheid_bookie.disk import DiskFile
from cepheid_bookie.errors import FormatVersionError
from cepheid_bookie.journal_format import (
    ALIGNMENT,
    BATCH_HEADER_BYTES,
    HEAD_BYTES,
    SEGMENT_HEADER_BYTES,
    BatchHeader,
    JournalRecord,
    SegmentHeader,
    align,
    decode_batch_header,
    decode_record_at,
    decode_segment_header,
    end_of_record,
    is_record_intact,
)
from cepheid_bookie.journal_tail import SECTOR_BYTES, Tail, judge_tail
from cepheid_rpc import MalformedGroupError

_SEARCH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FoundRecord:
    """An intact record, `length` bytes at `offset`, of the batch `sequence`."""

    offset: int
    length: int
    sequence: int
    record: JournalRecord


@dataclass(frozen=True, slots=True)
class JournalDamage:
    """Bytes `offset..end-1` that are not what was written. Torn: a crash explains it, and nothing in it was acknowledged."""

    offset: int
    end: int
    reason: str
    torn: bool = False


class SegmentScan:
    """One segment. `header` is None when it is damaged."""

    def __init__(self, file: DiskFile, segment_id: int) -> None:
        self._file = file
        self._segment_id = segment_id
        self.size_bytes = file.size()
        self.header: SegmentHeader | None = None
        self.problem = ""  # what is wrong with the segment header
        try:
            self.header = decode_segment_header(file.pread(SEGMENT_HEADER_BYTES, 0))
        except FormatVersionError as error:
            self.problem = error.args[0]
        if self.header is not None and self.header.segment_id != segment_id:
            self.problem = f"the segment header is of segment {self.header.segment_id:016x}"
            self.header = None
        elif self.header is None and not self.problem:
            self.problem = "the segment header is damaged"

    def contents(self, start: int = ALIGNMENT) -> Iterator[FoundRecord | JournalDamage]:
        """Yield records and damage in order, of batches that begin at `start` or later."""
        if self.header is None and start < ALIGNMENT:
            yield JournalDamage(0, min(ALIGNMENT, self.size_bytes), self.problem)
        nonce = self._nonce()
        if nonce is None:
            if self.size_bytes > ALIGNMENT:
                yield JournalDamage(
                    ALIGNMENT, self.size_bytes, "without segment header and first batch, nothing here can be believed"
                )
            return
        offset, sequence = ALIGNMENT, None if self.header is None else self.header.first_sequence
        while offset < self.size_bytes:
            batch = self._batch_at(offset, nonce)
            if batch is None or batch.sequence < (sequence or 0):  # lower: remains of a batch that an older release left
                found = self._search(offset + ALIGNMENT, nonce, sequence or 0)
                damage = self._gap(offset, found, sequence)
                if damage is not None and damage.end > start:
                    yield damage
                offset = self.size_bytes if found is None else found
                continue
            if offset >= start:
                yield from self._records(offset, batch, nonce)
            offset += align(BATCH_HEADER_BYTES + batch.size_bytes)
            sequence = batch.sequence + 1

    def _nonce(self) -> bytes | None:
        if self.header is not None:
            return self.header.nonce
        head = self._file.pread(BATCH_HEADER_BYTES, ALIGNMENT)
        return head[-16:] if decode_batch_header(head, self._segment_id, None) is not None else None

    def _batch_at(self, offset: int, nonce: bytes) -> BatchHeader | None:
        return decode_batch_header(self._file.pread(BATCH_HEADER_BYTES, offset), self._segment_id, nonce)

    def _search(self, start: int, nonce: bytes, lowest: int) -> int | None:
        """Return the offset of the next intact batch header, of batch `lowest` or a later one."""
        while start < self.size_bytes:
            chunk = self._file.pread(_SEARCH_BYTES, start)
            for place in range(0, len(chunk), ALIGNMENT):
                head = chunk[place : place + BATCH_HEADER_BYTES]
                batch = decode_batch_header(head, self._segment_id, nonce)
                if batch is not None and batch.sequence >= lowest:
                    return start + place
            start += _SEARCH_BYTES
        return None

    def _gap(self, offset: int, found: int | None, sequence: int | None) -> JournalDamage | None:
        """Judge a place without a batch. Return None if the journal simply ends there."""
        if found is not None:
            return JournalDamage(offset, found, "a batch header is damaged: an intact batch follows")
        head = self._file.pread(SECTOR_BYTES, offset)
        if not any(head):
            return None
        if self.header is not None and not self.header.size_bytes:  # journal_tail.py, rule 2: an older release wrote it
            return JournalDamage(offset, self.size_bytes, "a batch was cut by a crash, or refused by a full disk", torn=True)
        if self.header is not None and sequence is not None and judge_tail(head, self.header, sequence) is Tail.TORN:
            return JournalDamage(offset, self.size_bytes, "a batch was cut by a crash before it was acknowledged", torn=True)
        return JournalDamage(offset, self.size_bytes, "the header of the last batch is damaged")

    def _records(self, offset: int, batch: BatchHeader, nonce: bytes) -> Iterator[FoundRecord | JournalDamage]:
        data = self._file.pread(align(BATCH_HEADER_BYTES + batch.size_bytes), offset)
        end = BATCH_HEADER_BYTES + batch.size_bytes
        body = memoryview(data)[:end]
        bounds = _bounds(body, batch)
        leads_to_end = len(bounds) == batch.records and (bounds[-1][1] if bounds else BATCH_HEADER_BYTES) == end
        reached = BATCH_HEADER_BYTES
        for start, stop in bounds:
            record = _record(body, start, stop)
            if isinstance(record, str):
                if not leads_to_end:
                    break
                torn = self._is_torn(data, offset, batch, nonce)
                yield JournalDamage(offset + start, offset + stop, f"{record} (batch {batch.sequence})", torn)
            else:
                yield FoundRecord(offset + start, stop - start, batch.sequence, record)
            reached = stop
        if reached < end:
            reason = f"a record is damaged, and where the next one begins is not known (batch {batch.sequence})"
            last = min(offset + end, self.size_bytes)
            yield JournalDamage(offset + reached, last, reason, self._is_torn(data, offset, batch, nonce))

    def _is_torn(self, data: bytes, offset: int, batch: BatchHeader, nonce: bytes) -> bool:
        """Return whether a crash explains the damage. A later batch in the segment proves that this one was synced."""
        if self.header is None or not self.header.size_bytes:
            return False
        end = offset + align(BATCH_HEADER_BYTES + batch.size_bytes)
        is_last = self._search(end, nonce, batch.sequence + 1) is None
        return is_last and judge_tail(data, self.header, batch.sequence) is Tail.TORN


def _bounds(body: memoryview, batch: BatchHeader) -> list[tuple[int, int]]:
    """Return start and end of each record, as far as the lengths in their heads are valid."""
    bounds: list[tuple[int, int]] = []
    start = BATCH_HEADER_BYTES
    while len(bounds) < batch.records and start + HEAD_BYTES <= len(body):
        stop = end_of_record(body, start)
        if stop > len(body):
            break
        bounds.append((start, stop))
        start = stop
    return bounds


def _record(body: memoryview, start: int, stop: int) -> JournalRecord | str:
    """Return the record, or a description of what is wrong with it."""
    if not is_record_intact(body, start, stop):
        return "a record does not match its checksum"
    try:
        return decode_record_at(body, start, stop)
    except FormatVersionError as error:
        return str(error.args[0])
    except (MalformedGroupError, struct.error) as error:
        return f"a record cannot be read: {error.args[0]}"
