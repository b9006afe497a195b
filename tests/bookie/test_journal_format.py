"""Bytes of the journal that another version wrote, or that stop too early: known as such, and never taken for something else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from crc32c import crc32c

from cepheid_bookie.errors import FormatVersionError
from cepheid_bookie.journal_format import (
    SIZED_FORMAT_VERSION,
    LedgerStateRecord,
    SegmentHeader,
    decode_records,
    decode_segment_header,
    encode_ledger_to,
    encode_segment_header,
)
from cepheid_bookie.ledger_record import LedgerRecord, decode_record, encode_record
from cepheid_rpc import Buffer

RECORD = LedgerRecord(b"k" * 16, fenced=True, explicit_lac=7)
HEADER = SegmentHeader(5, 12, b"n" * 16, size_bytes=64 << 20)


def one_record() -> bytearray:
    parts: list[Buffer] = []
    encode_ledger_to(parts, 21, RECORD)
    return bytearray(b"".join(parts))


def with_crc(record: bytearray) -> bytearray:
    record[:4] = crc32c(bytes(record[4:])).to_bytes(4, "little")
    return record


def test_a_record_comes_back() -> None:
    assert decode_records(memoryview(one_record()), 1) == [LedgerStateRecord(21, RECORD)]


def test_an_intact_record_of_an_unknown_type_is_not_skipped() -> None:
    record = one_record()
    record[8] = 9
    with pytest.raises(FormatVersionError, match="record of type 9"):
        decode_records(memoryview(with_crc(record)), 1)


def test_a_batch_that_ends_before_its_last_record_is_damaged() -> None:
    record = one_record()
    assert decode_records(memoryview(record), 2) is None, "nothing follows"
    assert decode_records(memoryview(record + record[:5]), 2) is None, "not even the head of the next one"
    assert decode_records(memoryview(record + record[:-1]), 2) is None, "not all of it"
    assert decode_records(memoryview(record + b"x"), 1) is None, "more than its records"


def test_a_ledger_record_of_a_newer_format_is_refused() -> None:
    data = bytearray(encode_record(RECORD))
    assert decode_record(data) == RECORD
    data[0] = 2
    with pytest.raises(FormatVersionError, match="format 2, this bookie reads 1"):
        decode_record(data)


def test_a_segment_of_a_newer_format_is_refused_and_not_taken_for_a_torn_one() -> None:
    data = bytearray(encode_segment_header(HEADER))
    assert decode_segment_header(bytes(data)) == HEADER
    assert decode_segment_header(bytes(data[:-1])) is None
    data[8] = SIZED_FORMAT_VERSION + 1
    with pytest.raises(FormatVersionError, match=f"format {SIZED_FORMAT_VERSION + 1}"):
        decode_segment_header(bytes(data))


@pytest.mark.parametrize("place", [48, 53, 56, 59])
def test_a_segment_header_whose_size_is_damaged_is_not_one_of_an_older_release(place: int) -> None:
    data = bytearray(encode_segment_header(HEADER))
    data[place] ^= 4
    assert decode_segment_header(bytes(data)) is None


def test_a_segment_of_an_older_release_does_not_tell_its_size() -> None:
    """And an older release reads the first 48 bytes alone, which are the same."""
    data = encode_segment_header(HEADER)
    assert decode_segment_header(data[:48] + bytes(12)) == SegmentHeader(5, 12, b"n" * 16, size_bytes=0)
    assert data[8:12] == (1).to_bytes(4, "little"), "an older release refuses any other version"


def test_a_segment_of_format_2_tells_its_size_or_is_damaged() -> None:
    header = replace(HEADER, version=SIZED_FORMAT_VERSION)
    data = encode_segment_header(header)
    assert decode_segment_header(data) == header
    assert decode_segment_header(data[:48] + bytes(12)) is None
