"""Decide whether the last batch of a journal was cut by a crash or damaged after its sync, from its bytes and without I/O.

    before the write    zeros      (preallocated or written ahead, and synced; remains are overwritten, journal_writer.py)
    after a power loss  each sector of 512 bytes is as written, or zeros
    after the end of the process alone   the batch up to some byte, zeros from there on
    overwritten remains zeros up to some byte of them

Anything else is damage: those bytes were written, and are not what was written.

Rule 1: whatever a crash explains counts as torn, even if damage could have caused it: a sector that was lost and reads as zeros, or
a flipped bit in a record of which a whole sector is zeros because a client sent zeros.
Rule 2: only segments whose header tells their size are judged (`journal_format.py`): older releases left remains of refused batches
below the next one, and wrote no end markers.
"""

from __future__ import annotations

import enum

from cepheid_bookie.journal_format import (
    BATCH_HEADER_BYTES,
    HEAD_BYTES,
    SegmentHeader,
    decode_batch_header,
    end_of_record,
    is_record_intact,
)

SECTOR_BYTES = 512
"""Smallest unit that a disk writes atomically, in bytes. Larger sectors consist of such units."""
_ZEROS = bytes(SECTOR_BYTES)


class Tail(enum.Enum):
    CLEAN = "clean"  # nothing was written here, or its first sector was not
    TORN = "torn"  # a write that was never answered
    DAMAGED = "damaged"  # it was on the disk, whole


def judge_tail(data: bytes, segment: SegmentHeader, sequence: int) -> Tail:
    """Judge the place where batch `sequence` is not intact, and no later batch follows.

    `data`: the first sector there; all sectors of the batch if its header is intact.
    """
    first_sector = data[:SECTOR_BYTES]
    if not any(first_sector):
        return Tail.CLEAN
    header = decode_batch_header(data, segment.segment_id, segment.nonce)
    if header is None:
        cut_in_header = not any(first_sector[BATCH_HEADER_BYTES:])
        overwritten = first_sector[0] == 0
        return Tail.TORN if cut_in_header or overwritten else Tail.DAMAGED
    if header.sequence != sequence:
        return Tail.DAMAGED
    return _judge_records(data, BATCH_HEADER_BYTES + header.size_bytes, header.records)


def _judge_records(data: bytes, end: int, count: int) -> Tail:
    written = len(data.rstrip(b"\0"))  # more than `end` if all of the batch was written: then it has its end marker
    start, verdict = BATCH_HEADER_BYTES, Tail.DAMAGED
    for _ in range(count):
        if _is_cut(data, start, start + HEAD_BYTES, written):
            return Tail.TORN  # and where the next record begins is not known
        record_end = end_of_record(data, start)
        if record_end > end:
            return Tail.DAMAGED
        if not is_record_intact(data, start, record_end):
            if not _is_cut(data, start, record_end, written):
                return Tail.DAMAGED
            verdict = Tail.TORN
        start = record_end
    return verdict


def _is_cut(data: bytes, start: int, end: int, written: int) -> bool:
    """Return whether a crash explains that these bytes differ from what was written."""
    first = start - start % SECTOR_BYTES
    return end > written or any(data[sector : sector + SECTOR_BYTES] == _ZEROS for sector in range(first, end, SECTOR_BYTES))
