"""Versions, bad records and wanted columns: what is the same for every kind of schema."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from cepheid_decode import BadOptionError, BadRecordError, OnBadRecord, ScanCounters, SchemaVersion
from cepheid_decode.typed import TypedColumns, typed_fields
from tests.decode.typed.typed_support import avro_bytes, decode, record, schema_version, version

OLD = record(("x", "int"), ("gone", "string"))
NEW = {
    "type": "record",
    "name": "R",
    "fields": [{"name": "y", "type": "string", "default": "none"}, {"name": "x", "type": ["null", "double"]}],
}
HISTORY = [schema_version("AVRO", OLD, 0), schema_version("AVRO", NEW, 1)]


def test_rows_of_all_versions_in_their_order() -> None:
    old = [avro_bytes(OLD, {"x": row, "gone": "g"}) for row in range(40)]
    new = [avro_bytes(NEW, {"x": row + 0.5, "y": "new"}) for row in range(40)]
    values = [value for pair in zip(old, new, strict=True) for value in pair]
    rows, errors = decode(HISTORY, values, written_with=[version(0), version(1)] * 40)
    assert not errors
    assert rows[::2] == [{"y": "none", "x": float(row)} for row in range(40)]
    assert rows[1::2] == [{"y": "new", "x": row + 0.5} for row in range(40)]


def test_only_wanted_fields_are_resolved() -> None:
    values = [avro_bytes(OLD, {"x": row, "gone": "g"}) for row in range(20)]
    rows, errors = decode(HISTORY, values, written_with=[version(0)] * 20, columns=["x"])
    assert not errors
    assert rows == [{"x": float(row)} for row in range(20)]
    unshowable = [schema_version("AVRO", record(("x", "string"), ("y", "string")), 0), HISTORY[1]]
    other = avro_bytes(record(("x", "string"), ("y", "string")), {"x": "no number", "y": "b"})
    rows, errors = decode(unshowable, [other], written_with=[version(0)], columns=["y"])
    assert (rows, errors) == ([{"y": "b"}], {})


def test_an_older_version_can_be_shown() -> None:
    rows, errors = decode(HISTORY[:1] + HISTORY, [avro_bytes(OLD, {"x": 3, "gone": "g"})], reader_version=version(0))
    assert rows == [{"x": 3, "gone": "g"}]
    rows, errors = decode(HISTORY, [avro_bytes(NEW, {"x": 3.0, "y": "b"})], written_with=[version(1)], reader_version=version(0))
    assert "version 1 cannot be shown as version 0: field 'x'" in errors[0]


def test_a_version_that_the_history_has_not() -> None:
    good = avro_bytes(NEW, {"x": 1.0, "y": "b"})
    rows, errors = decode(HISTORY, [good, good, None], written_with=[version(1), version(7), version(7)])
    assert rows[0] == {"y": "b", "x": 1.0}
    assert errors[1] == "its schema version 7 is not in the topic's history of 2 versions"


def test_a_value_without_version_is_read_as_what_is_shown() -> None:
    rows, _ = decode(HISTORY, [avro_bytes(NEW, {"x": 1.0, "y": "b"})])
    assert rows == [{"y": "b", "x": 1.0}]


def test_a_value_without_version_of_another_topic_is_read_as_the_newest_there() -> None:
    """The same fields in another order: as what is shown they would be each other's values."""
    shown, other = record(("a", "int"), ("b", "int")), record(("b", "int"), ("a", "int"))
    rows, _ = decode(
        [schema_version("AVRO", shown, 0)], [avro_bytes(other, {"a": 7, "b": 5})], writers=[schema_version("AVRO", other, 0)]
    )
    assert rows == [{"a": 7, "b": 5}]
    history = [schema_version("AVRO", shown, 0), schema_version("AVRO", other, 1)]
    rows, _ = decode(history[:1], [avro_bytes(shown, {"a": 7, "b": 5})], writers=history)
    assert rows == [{"a": 7, "b": 5}], "a version that came to the topic later changes nothing"
    elsewhere = [replace(schema_version("AVRO", shown, 0), properties={"p": "q"}), schema_version("AVRO", other, 1)]
    rows, _ = decode([schema_version("AVRO", shown, 3)], [avro_bytes(shown, {"a": 7, "b": 5})], writers=elsewhere)
    assert rows == [{"a": 7, "b": 5}], "what is shown is there under another number"


def test_kinds_that_followed_one_another() -> None:
    history = [schema_version("AVRO", OLD, 0), schema_version("JSON", NEW, 1), schema_version("INT32", b"", 2)]
    values = [avro_bytes(OLD, {"x": 3, "gone": "g"}), b'{"x": 0.5}', b"\x00\x00\x00\x01"]
    rows, errors = decode(history, values, written_with=[version(number) for number in range(3)], reader_version=version(1))
    assert rows[:2] == [{"y": "none", "x": 3.0}, {"y": None, "x": 0.5}]
    assert "version 2 cannot be shown as version 1: INT32 is not JSON" in errors[2]


def test_fail_names_the_row() -> None:
    good = avro_bytes(OLD, {"x": 1, "gone": "g"})
    with pytest.raises(BadRecordError, match=r"row 2 cannot be decoded .* field 'x': it ends inside a number") as raised:
        decode(HISTORY[:1], [good, good, b"", b""], on_bad_record=OnBadRecord.FAIL)
    assert raised.value.facts == {"row": 2, "bad_rows": 2}


@pytest.mark.parametrize("policy", [OnBadRecord.NULL, OnBadRecord.SKIP])
def test_bad_rows_are_null_and_counted(policy: OnBadRecord) -> None:
    counters = ScanCounters()
    good = avro_bytes(OLD, {"x": 1, "gone": "g"})
    rows, errors = decode(HISTORY[:1], [good, b"\x02\x04\xff\xff", good], on_bad_record=policy, counters=counters)
    assert counters.bad_records == 1
    assert list(errors) == [1]
    assert rows == [{"x": 1, "gone": "g"}, {"x": None, "gone": None}, {"x": 1, "gone": "g"}]


def test_a_bad_row_is_null_in_the_fields_that_could_be_read_too() -> None:
    more = {"type": "enum", "name": "E", "symbols": ["A", "B"]}
    fewer = {"type": "enum", "name": "E", "symbols": ["A"]}
    old, new = record(("x", "int"), ("e", more)), record(("x", "int"), ("e", fewer))
    values = [avro_bytes(old, {"x": 1, "e": symbol}) for symbol in ("A", "B")]
    history = [schema_version("AVRO", old, 0), schema_version("AVRO", new, 1)]
    rows, errors = decode(history, values, written_with=[version(0)] * 2)
    assert rows == [{"x": 1, "e": "A"}, {"x": None, "e": None}]
    assert list(errors) == [1]


def test_without_bad_rows_there_is_no_mask() -> None:
    typed = TypedColumns(HISTORY, None, OnBadRecord.NULL, ScanCounters())
    result = typed.columns(pa.array([], pa.binary()), None, np.array([], np.int32), [b""])
    assert result.bad is None
    assert result.errors is None
    assert [len(array) for array in result.arrays] == [0, 0]


@pytest.mark.parametrize("values", [[], [None], [None] * 40], ids=len)
@pytest.mark.parametrize(
    "schema",
    [
        HISTORY[0],
        schema_version("JSON", OLD),
        *(schema_version(kind) for kind in ("INT8", "BOOLEAN", "STRING", "BYTES", "INSTANT", "LOCAL_DATE_TIME")),
        schema_version("KEY_VALUE", {"key": "", "value": ""}, **{"key.schema.type": "STRING", "value.schema.type": "INT64"}),
    ],
    ids=lambda schema: schema.kind,
)
def test_tombstones_and_nothing(schema: SchemaVersion, values: list[None]) -> None:
    rows, errors = decode([schema], values)
    assert not errors
    assert len(rows) == len(values)
    assert all(field is None for row in rows for field in row.values())


@pytest.mark.parametrize(
    ("schemas", "shown", "text"),
    [
        ([], None, "no schema"),
        (HISTORY, version(9), "no schema version 9; it has 0, 1"),
        ([schema_version("EXTERNAL", b"x")], None, "type EXTERNAL has no columns"),
        ([schema_version("AVRO", b"{")], None, "is not a valid Avro schema"),
        ([schema_version("JSON", {"type": "object", "properties": {}})], None, "is not a valid Avro schema"),
        ([schema_version("PROTOBUF_NATIVE", b"{}")], None, "is not a valid Protobuf descriptor"),
        ([schema_version("PROTOBUF", b"{}")], None, "__PARSING_INFO__"),
    ],
)
def test_topics_without_columns(schemas: list[object], shown: bytes | None, text: str) -> None:
    with pytest.raises(BadOptionError, match=text):
        typed_fields(schemas, shown)  # type: ignore[arg-type]


def test_a_wanted_field_that_is_not_there() -> None:
    with pytest.raises(BadOptionError, match="no field 'z'; it has y, x"):
        TypedColumns(HISTORY, None, OnBadRecord.FAIL, ScanCounters(), ["x", "z"])


def test_no_field_is_wanted() -> None:
    """Only metadata columns are: still a bad record is one."""
    rows, errors = decode(HISTORY[:1], [avro_bytes(OLD, {"x": 1, "gone": "g"}), b""] * 20, columns=[])
    assert rows == []
    assert list(errors) == list(range(1, 40, 2))
