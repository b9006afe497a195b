"""Protobuf messages and primitive values of rows, without Spark's JVM: what the source reads of them is what was written."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import types as t
from pyspark.sql.pandas.types import from_arrow_schema

from cepheid_decode import SchemaVersion
from cepheid_decode.typed import typed_fields
from cepheid_scan import BadOptionError
from cepheid_spark.sink_rows import SinkRowError, plan_rows
from cepheid_spark.sink_values import PrimitiveEncoder, ProtobufEncoder
from tests.decode.typed.test_typed_protobuf import FLAT, flat_file, native, rich
from tests.decode.typed.typed_support import decode, schema_version

MOMENT = datetime(2026, 3, 1, 12, 0, 0, 123456, UTC)
BEFORE = datetime(1969, 12, 31, 23, 59, 59, 999_999, UTC)


def shown(schema: SchemaVersion, *left_out: str) -> t.StructType:
    """The columns as the source shows them."""
    return from_arrow_schema(pa.schema([field for field in typed_fields([schema], None) if field.name not in left_out]))


def there_and_back(schema: SchemaVersion, columns: t.StructType, record: dict[str, Any]) -> dict[str, Any]:
    rows, errors = decode([schema], [ProtobufEncoder(schema.definition, columns).encode(record)])
    assert not errors
    return rows[0]


RICH: dict[str, Any] = {
    "color": "BLUE",
    "at": BEFORE,
    "part": {"n": 3},
    "numbers": [1, -2],
    "parts": [{"n": 5}, {"n": 0}],
    "counts": [(7, Decimal(2**64 - 1)), (-1, Decimal(0))],
    "maybe": 0,
}


def test_a_message_with_all_that_it_may_hold() -> None:
    read = there_and_back(rich(), shown(rich(), "next"), RICH)
    assert {**read, "counts": sorted(read["counts"])} == {**RICH, "next": None, "counts": sorted(RICH["counts"])}


def test_null_is_a_field_that_is_absent_where_the_message_can_tell() -> None:
    nulls = {"at": None, "part": None, "maybe": None}
    read = there_and_back(rich(), shown(rich(), "next"), {**RICH, **nulls})
    assert {name: read[name] for name in nulls} == nulls
    assert there_and_back(rich(), shown(rich(), "next"), {**RICH, "part": {"n": 0}})["part"] == {"n": 0}


def test_fields_without_a_column_are_absent() -> None:
    columns = t.StructType([t.StructField("maybe", t.ByteType())])
    assert ProtobufEncoder(rich().definition, columns).encode({"maybe": 3}) == b"\x40\x03"


ONE_OF_EACH = st.fixed_dictionaries(
    {
        "i32": st.integers(-(2**31), 2**31 - 1),
        "s64": st.integers(-(2**63), 2**63 - 1),
        "u32": st.integers(0, 2**32 - 1),
        "u64": st.integers(0, 2**64 - 1).map(Decimal),
        "f32": st.integers(0, 2**32 - 1),
        "sf64": st.integers(-(2**63), 2**63 - 1),
        "real": st.floats(allow_nan=False),
        "single": st.floats(allow_nan=False, width=32),
        "yes": st.booleans(),
        "text": st.text(max_size=9),
        "raw": st.binary(max_size=9),
        "color": st.sampled_from(["RED", "BLUE", "BLACK"]),
    }
)


@pytest.mark.parametrize("syntax", ["proto2", "proto3"])
@settings(max_examples=30)
@given(record=ONE_OF_EACH)
def test_scalars_of_every_type(syntax: str, record: dict[str, Any]) -> None:
    schema = native("p.Flat", flat_file(syntax))
    assert there_and_back(schema, shown(schema, "maybe"), record) == {**record, **({"maybe": None} if syntax == "proto3" else {})}


def column(name: str, kind: t.DataType) -> t.StructType:
    return t.StructType([t.StructField(name, kind)])


PART = t.StructType([t.StructField("n", t.LongType())])


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (column("colour", t.StringType()), "has no field colour; did you mean color?"),
        (column("color", t.IntegerType()), "column color must be string, as the topic's schema says, and is int"),
        (column("at", t.LongType()), "column at must be timestamp"),
        (column("part", PART), "column part.n must be tinyint or smallint or int"),
        (column("next", t.StringType()), "column next must be struct"),
        (column("numbers", t.LongType()), "column numbers must be array"),
        (column("parts", t.ArrayType(PART)), r"column parts\[\].n must be"),
        (column("counts", t.MapType(t.StringType(), t.LongType())), r"column counts \(key\) must be tinyint"),
    ],
)
def test_columns_that_do_not_fit_the_message_are_refused(columns: t.StructType, said: str) -> None:
    with pytest.raises(BadOptionError, match=said):
        ProtobufEncoder(rich().definition, columns)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"color": None}, "color is null, and the schema does not allow it"),
        ({"color": "GREEN"}, "color is 'GREEN', and the schema has RED, BLUE"),
        ({"numbers": None}, "numbers is null"),
        ({"numbers": [1, None]}, r"numbers\[\] is null"),
        ({"parts": [None]}, r"parts\[\] is null"),
        ({"counts": [(1, Decimal(-1))]}, r"counts\[\] is -1, and the schema allows 0 to 18446744073709551615"),
    ],
)
def test_a_value_that_does_not_fit_the_message_names_its_field(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ProtobufEncoder(rich().definition, shown(rich(), "next")).encode({**RICH, **values})


def test_one_of_several_fields_has_a_value() -> None:
    file = flat_file("proto2")
    file.message_type[0].oneof_decl.add(name="either")
    for field in file.message_type[0].field[:2]:
        field.oneof_index = 0
    schema, (first, second) = native("p.Flat", file), list(FLAT)[:2]
    encoder = ProtobufEncoder(schema.definition, t.StructType([shown(schema)[first], shown(schema)[second]]))
    assert decode([schema], [encoder.encode({first: None, second: 0})])[0][0][second] == 0
    with pytest.raises(ValueError, match=f"{first} and {second} have values"):
        encoder.encode({first: 1, second: 2})


def test_a_field_that_is_required_needs_a_column() -> None:
    file = flat_file("proto2")
    file.message_type[0].field[0].label = file.message_type[0].field[0].LABEL_REQUIRED
    with pytest.raises(BadOptionError, match="requires a field i32: give a column i32"):
        ProtobufEncoder(native("p.Flat", file).definition, column("text", t.StringType()))


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("STRING", "é"),
        ("BOOLEAN", True),
        ("INT8", -128),
        ("INT16", -2),
        ("INT32", 2**31 - 1),
        ("INT64", -(2**63)),
        ("FLOAT", 1.5),
        ("DOUBLE", -0.1),
        ("DATE", datetime(2026, 3, 1, 12, 0, 0, 123_000, UTC)),
        ("TIMESTAMP", datetime(1969, 12, 31, 23, 59, 59, 999_000, UTC)),
        ("TIME", 3_600_000),
        ("INSTANT", MOMENT),
        ("INSTANT", BEFORE),
        ("LOCAL_DATE", date(1900, 1, 1)),
        ("LOCAL_TIME", 1),
        ("LOCAL_DATE_TIME", MOMENT.replace(tzinfo=None)),
        ("LOCAL_DATE_TIME", BEFORE.replace(tzinfo=None)),
    ],
)
def test_a_primitive_value_is_read_as_it_was_written(kind: str, value: Any) -> None:
    schema = schema_version(kind)
    payload = PrimitiveEncoder(kind, shown(schema)["value"].dataType.simpleString()).encode(value)
    assert decode([schema], [payload]) == ([{"value": value}], {})


def test_a_primitive_schema_takes_its_own_type_and_smaller_ones() -> None:
    assert PrimitiveEncoder("INT64", "smallint").encode(1) == bytes(7) + b"\1"
    with pytest.raises(BadOptionError, match="column value must be tinyint or smallint or int, as the topic's schema INT32 says"):
        PrimitiveEncoder("INT32", "bigint")


def test_typed_values_are_messages_and_null_deletes() -> None:
    plan = plan_rows(
        t.StructType([t.StructField("key", t.StringType()), t.StructField("value", t.LongType())]), has_topic=True, encode=None
    )
    batch = pa.RecordBatch.from_pydict({"key": ["a", "b"], "value": pa.array([5, None], pa.int64())})
    encode = PrimitiveEncoder("INT64", plan.value_type).encode
    assert plan.messages(batch, encode).payloads == [bytes(7) + b"\5", None]


def test_a_typed_value_that_does_not_fit_names_its_row() -> None:
    plan = plan_rows(column("value", t.LongType()), has_topic=True, encode=None)
    batch = pa.RecordBatch.from_pydict({"value": pa.array([1, -5], pa.int64())})
    with pytest.raises(SinkRowError, match="row 8 of its task does not fit the topic's schema: value is -5, and a time of day"):
        plan.messages(batch, PrimitiveEncoder("LOCAL_TIME", plan.value_type).encode, first_row=7)


@pytest.mark.parametrize("kind", [t.ArrayType(t.LongType()), t.DecimalType(10, 2)])
def test_a_type_that_no_primitive_schema_has_is_refused(kind: t.DataType) -> None:
    with pytest.raises(BadOptionError, match="neither a payload"):
        plan_rows(column("value", kind), has_topic=True, encode=None)


def test_typed_values_need_the_option_topic() -> None:
    columns = t.StructType([t.StructField("value", t.LongType()), t.StructField("topic", t.StringType())])
    with pytest.raises(BadOptionError, match="column value must be binary or string, and is bigint"):
        plan_rows(columns, has_topic=False, encode=None)
