"""What a crash may leave of the last batch is torn; what no crash explains is damage."""

from __future__ import annotations

import random

import pytest

from cepheid_bookie.journal_format import (
    ALIGNMENT,
    BATCH_HEADER_BYTES,
    BatchHeader,
    SegmentHeader,
    align,
    decode_batch_header,
    decode_records,
    encode_batch_header,
    encode_entries_to,
)
from cepheid_bookie.journal_mark import START
from cepheid_bookie.journal_tail import SECTOR_BYTES, Tail, judge_tail
from cepheid_bookie.journal_writer import JournalWriter
from cepheid_rpc import Buffer, encode_group
from tests.bookie.bookie_support import KEY
from tests.bookie.test_journal import new_disk

SEGMENT = SegmentHeader(1, 1, b"n" * 16, 64 << 10)


def batch(*payloads: bytes) -> tuple[bytes, int]:
    """One record for each payload, as the writer puts them on the disk; and how many of these bytes are not padding."""
    parts: list[Buffer] = []
    size = sum(encode_entries_to(parts, KEY, encode_group(7, place, -1, 0, [data])) for place, data in enumerate(payloads))
    disk = new_disk()
    writer = JournalWriter(disk, START, segment_bytes=SEGMENT.size_bytes, new_nonce=lambda: SEGMENT.nonce)
    writer.write_batch(parts, size, len(payloads))
    whole = disk.open("journal/0000000000000001.journal").pread(align(BATCH_HEADER_BYTES + size), ALIGNMENT)
    return whole, BATCH_HEADER_BYTES + size


def some_batch(rng: random.Random) -> tuple[bytes, int]:
    """Payloads without zeros, but the last one may end with some."""
    payloads = [bytes(rng.randrange(1, 256) for _ in range(rng.choice((1, 40, 500, 3_000)))) for _ in range(rng.randrange(1, 5))]
    payloads[-1] += bytes(rng.choice((0, 0, 7, 300)))
    return batch(*payloads)


def judge(data: bytes | bytearray, sequence: int = 1) -> Tail:
    return judge_tail(bytes(data), SEGMENT, sequence)


def is_intact(data: bytes) -> bool:
    """Then it is replayed, and not judged."""
    header = decode_batch_header(data, SEGMENT.segment_id, SEGMENT.nonce)
    end = 0 if header is None else BATCH_HEADER_BYTES + header.size_bytes
    return header is not None and decode_records(memoryview(data)[BATCH_HEADER_BYTES:end], header.records) is not None


def with_zeros(data: bytes, start: int, end: int) -> bytes:
    return data[:start] + bytes(end - start) + data[end:]


def with_flip(data: bytes, place: int, bit: int = 0) -> bytes:
    return data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]


WHOLE, END = batch(b"a" * 700, b"b" * 700, b"c" * 700)


@pytest.mark.parametrize(
    ("verdict", "what", "data"),
    [
        (Tail.CLEAN, "nothing", bytes(len(WHOLE))),
        (Tail.CLEAN, "the first sector was not written", with_zeros(WHOLE, 0, SECTOR_BYTES)),
        (Tail.TORN, "another sector was not written", with_zeros(WHOLE, 2 * SECTOR_BYTES, 3 * SECTOR_BYTES)),
        (Tail.TORN, "the last sectors were not written", with_zeros(WHOLE, 3 * SECTOR_BYTES, len(WHOLE))),
        (Tail.TORN, "cut in the batch header", with_zeros(WHOLE, 20, len(WHOLE))),
        (Tail.TORN, "cut behind the batch header", with_zeros(WHOLE, BATCH_HEADER_BYTES, len(WHOLE))),
        (Tail.TORN, "cut in the head of the second record", with_zeros(WHOLE, 800, len(WHOLE))),
        (Tail.TORN, "cut before the last byte of the last record", with_zeros(WHOLE, END - 1, len(WHOLE))),
        (Tail.TORN, "remains that were about to be overwritten", with_zeros(WHOLE, 0, 30)),
        (Tail.DAMAGED, "a bit of the batch header", with_flip(WHOLE, 17)),
        (Tail.DAMAGED, "the magic", with_flip(WHOLE, 0)),
        (Tail.DAMAGED, "a bit of the first record", with_flip(WHOLE, 300)),
        (Tail.DAMAGED, "the size in the head of the first record", with_flip(WHOLE, BATCH_HEADER_BYTES + 4, 7)),
        (Tail.DAMAGED, "a size beyond the batch", with_flip(WHOLE, BATCH_HEADER_BYTES + 6, 7)),
        (Tail.DAMAGED, "the last byte of the last record", with_flip(WHOLE, END - 1)),
        (Tail.DAMAGED, "a byte that became zero", with_zeros(WHOLE, 300, 301)),
        (Tail.DAMAGED, "zeros that are not a sector", with_zeros(WHOLE, 520, 1_000)),
        (Tail.DAMAGED, "a torn batch with a flipped bit", with_flip(with_zeros(WHOLE, 1_536, 2_048), 300)),
    ],
)
def test_the_verdict(verdict: Tail, what: str, data: bytes) -> None:
    assert judge(data) is verdict, what


def test_an_intact_batch_with_another_sequence_is_damage() -> None:
    assert judge(WHOLE, sequence=2) is Tail.DAMAGED


def test_records_that_end_before_the_batch_does_are_damage() -> None:
    """The header has its own checksum: these are not the records that it was written for."""
    header = encode_batch_header(SEGMENT.segment_id, SEGMENT.nonce, BatchHeader(1, END - BATCH_HEADER_BYTES, records=2))
    assert judge(header + WHOLE[BATCH_HEADER_BYTES:]) is Tail.DAMAGED


@pytest.mark.parametrize("seed", range(100))
def test_what_a_crash_leaves_is_never_damage(seed: int) -> None:
    """A prefix, of which zeros may have overwritten a part, without the sectors that a power loss took."""
    rng = random.Random(seed)
    whole, _ = some_batch(rng)
    for _ in range(20):
        data = whole
        if rng.random() < 0.5:
            data = with_zeros(data, rng.randrange(len(data)), len(data))
        if rng.random() < 0.3:
            data = with_zeros(data, 0, rng.choice((rng.randrange(BATCH_HEADER_BYTES), rng.randrange(len(data)))))
        if rng.random() < 0.7:
            sector_bytes = rng.choice((SECTOR_BYTES, 4_096))
            for start in range(0, len(data), sector_bytes):
                if rng.random() < 0.5:
                    data = with_zeros(data, start, start + sector_bytes)
        assert is_intact(data) or judge(data) is not Tail.DAMAGED


@pytest.mark.parametrize("seed", range(100))
def test_any_flipped_bit_of_a_whole_batch_is_damage(seed: int) -> None:
    rng = random.Random(seed)
    data, end = some_batch(rng)
    for _ in range(20):
        assert judge(with_flip(data, rng.randrange(end), rng.randrange(8))) is Tail.DAMAGED


def test_a_flipped_bit_next_to_a_sector_of_zeros_in_the_same_record_passes_for_torn() -> None:
    """The limit: that sector may be one that a power loss took."""
    data, _ = batch(b"a" * 700 + bytes(1_100) + b"a" * 700, b"b" * 700)
    assert judge(with_flip(data, 300)) is Tail.TORN
    assert judge(with_flip(data, 3_000)) is Tail.DAMAGED
