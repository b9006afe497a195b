"""What the decoder of entries and the decoder of values say together: bad entries among typed rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from cepheid_decode import BadOptionError, BadRecordError, OnBadRecord, ReadMode, ScanCounters, ScanSpec, SchemaVersion
from cepheid_decode.typed_rows import TypedRows
from cepheid_wire import encode_tail
from tests.decode.decode_reference import batched, groups_of, message, metadata, piece, single, values_before_failure

VERSION = b"\0\0\0\0\0\0\0\1"
COLUMNS = ("value", "__key", "__entry_id", "_error")


def typed(tails: Sequence[bytes], on_bad_record: OnBadRecord, counters: ScanCounters | None = None) -> list[dict[str, Any]]:
    schemas = (SchemaVersion(VERSION, "INT32", b""),)
    spec = ScanSpec(ReadMode.TYPED, COLUMNS, on_bad_record=on_bad_record, schemas=schemas)
    decoder = TypedRows(spec, counters or ScanCounters(), lambda asked, count: iter(()))
    of_piece = piece(len(tails))
    return [row for batch in decoder.decode(of_piece, groups_of(tails)) for row in batch.to_pylist()]


def entries() -> list[bytes]:
    encrypted = metadata(partition_key="e", schema_version=VERSION)
    encrypted.encryption_keys.add(key="team", value=b"\xff")
    return [
        single(b"\0\0\0\x07", partition_key="k", schema_version=VERSION),
        encode_tail(encrypted, b"\0\0\0\x09"),  # four bytes: they would read as a number
        encode_tail(metadata(num_messages_in_batch=2, schema_version=VERSION), b"broken"),
        batched([message(b"\0\0\0\x08"), message(b"\0\0")], schema_version=VERSION),
    ]


def test_a_bad_entry_is_a_row_of_nulls_that_says_why() -> None:
    rows = typed(entries(), OnBadRecord.NULL)
    assert [row["value"] for row in rows] == [7, None, None, 8, None]
    assert [row["__entry_id"] for row in rows] == [0, 1, 2, 3, 3]
    assert [row["__key"] for row in rows] == ["k", "e", None, None, None]
    errors = [row["_error"] for row in rows]
    assert (errors[0], errors[3]) == (None, None)
    assert errors[1] == "its payload is encrypted, and no decryption keys are given"
    assert errors[2] == "a batch of 2 messages in 6 bytes"
    assert errors[4]


def test_bad_entries_are_left_out_or_fail() -> None:
    counters = ScanCounters()
    assert [row["value"] for row in typed(entries(), OnBadRecord.SKIP, counters)] == [7, 8]
    assert (counters.bad_records, counters.messages) == (3, 2)
    with pytest.raises(BadRecordError, match="12:1"):
        typed(entries(), OnBadRecord.FAIL)


def test_rows_before_one_that_cannot_be_decoded_are_given_out_before_it_fails() -> None:
    tails = [
        single(b"\0\0\0\x07", schema_version=VERSION),
        batched([message(b"\0\0\0\x08"), message(b"\0\0")], schema_version=VERSION),
    ]
    spec = ScanSpec(ReadMode.TYPED, COLUMNS, schemas=(SchemaVersion(VERSION, "INT32", b""),))
    counters = ScanCounters()
    decoder = TypedRows(spec, counters, lambda asked, count: iter(()))
    found, failure = values_before_failure(decoder.decode(piece(2), groups_of(tails)))
    assert (found, counters.messages) == ([7, 8], 2)
    assert "12:1:1" in failure


def test_a_field_that_begins_with_underscores_is_the_schemas_and_none_hides_what_is_the_messages() -> None:
    definition = b'{"type":"record","name":"R","fields":[{"name":"__v","type":"int"},{"name":"%s","type":"int"}]}'
    spec = ScanSpec(ReadMode.TYPED, ("_id", "__v", "__key"), schemas=(SchemaVersion(VERSION, "AVRO", definition % b"_id"),))
    decoder = TypedRows(spec, ScanCounters(), lambda asked, count: iter(()))
    (batch,) = decoder.decode(piece(1), groups_of([single(b"\x02\x04", partition_key="k", schema_version=VERSION)]))
    assert batch.to_pylist() == [{"_id": 2, "__v": 1, "__key": "k"}]
    hiding = ScanSpec(ReadMode.TYPED, ("__v",), schemas=(SchemaVersion(VERSION, "AVRO", definition % b"__key"),))
    with pytest.raises(BadOptionError, match="has a field __key"):
        TypedRows(hiding, ScanCounters(), lambda asked, count: iter(()))
