"""Columns of a scan as Spark's: names, types and order of each mode and style; message ids as clients serialize them."""

from __future__ import annotations

import pulsar
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import ArrayType, BinaryType, LongType, StringType, StructField, StructType

from cepheid_decode import BadOptionError, ReadMode, SchemaVersion
from cepheid_decode.columns import DEFAULT_MESSAGE_COLUMNS, ENTRY_COLUMNS, MESSAGE_COLUMNS, arrow_schema
from cepheid_spark.column_styles import encode_message_ids
from cepheid_spark.options import SourceOptions, parse_options
from cepheid_spark.spark_schema import choose_columns, rows_schema

NUMBER, NAMES = b'{"name":"number","type":["null","int"]}', b'{"name":"names","type":{"type":"array","items":"string"}}'
DEFINITION = b'{"type":"record","name":"F","fields":[' + NUMBER + b"," + NAMES + b"]}"
SCHEMAS = (SchemaVersion(bytes(8), "AVRO", DEFINITION),)


def parse(**options: str) -> SourceOptions:
    return parse_options({"serviceUrl": "pulsar://b:1", "topic": "t", **options}, streaming=False)


TYPES = {"string": StringType(), "binary": BinaryType(), "bigint": LongType(), "array<string>": ArrayType(StringType(), False)}


def schema_of(ddl: str) -> StructType:
    """As Spark makes it of such a text, without a session."""
    columns = [column.removesuffix(" not null").split() for column in ddl.split(", ")]
    nullable = " not null" not in ddl
    return StructType([StructField(name.strip("`"), TYPES[kind], nullable) for name, kind in columns])


@pytest.mark.parametrize("mode", list(ReadMode))
def test_spark_makes_of_our_schema_the_very_types_that_scans_give(mode: ReadMode) -> None:
    """Else Spark refuses the first batch (DATA_SOURCE_RETURN_SCHEMA_MISMATCH)."""
    schemas = SCHEMAS if mode is ReadMode.TYPED else ()
    options = parse(readMode=mode.value)
    shown = rows_schema(options, schemas)
    spec = options.reading(choose_columns(shown, options, schemas).scan_columns, schemas).spec
    assert to_arrow_schema(shown, timezone="UTC").equals(arrow_schema(spec))


def test_the_usual_columns() -> None:
    assert tuple(rows_schema(parse()).names) == DEFAULT_MESSAGE_COLUMNS
    assert tuple(rows_schema(parse(readMode="entries")).names) == tuple(ENTRY_COLUMNS)
    typed = [f"__{name}" for name in DEFAULT_MESSAGE_COLUMNS if name != "value"]
    assert rows_schema(parse(readMode="typed"), SCHEMAS).names == ["number", "names", *typed]
    assert rows_schema(parse(columns=",".join(MESSAGE_COLUMNS))).names == list(MESSAGE_COLUMNS)


def test_a_user_picks_names_and_order() -> None:
    layout = choose_columns(schema_of("entry_id bigint, value binary"), parse())
    assert layout.names == layout.scan_columns == ("entry_id", "value")


def test_what_a_user_says_of_nulls_inside_is_no_other_type() -> None:
    typed = parse(readMode="typed")
    shown = rows_schema(typed, SCHEMAS)
    assert choose_columns(schema_of("names array<string>"), typed, SCHEMAS).names == ("names",)
    assert "names" in shown.names


@pytest.mark.parametrize("ddl", ["value string", "vale binary", "Value binary", "entry_id bigint not null"])
def test_other_names_and_types_are_refused(ddl: str) -> None:
    with pytest.raises(BadOptionError):
        choose_columns(schema_of(ddl), parse())


def test_entries_have_no_pulsar_spark_style() -> None:
    with pytest.raises(BadOptionError, match="columnStyle=pulsar-spark has no entries"):
        rows_schema(parse(readMode="entries", columnStyle="pulsar-spark"))


def test_the_pulsar_spark_style_asks_a_scan_for_each_column_once() -> None:
    options = parse(columnStyle="pulsar-spark")
    layout = choose_columns(rows_schema(options), options)
    parts = ("ledger_id", "entry_id", "partition", "batch_index")
    assert layout.scan_columns == ("value", "key_bytes", "topic", "publish_time", "event_time", "properties", *parts)
    assert choose_columns(schema_of("`__key` binary"), options).scan_columns == ("key_bytes",)


def test_a_batch_in_the_right_shape_is_passed_on_as_it_is() -> None:
    layout = choose_columns(schema_of("value binary"), parse())
    batch = pa.RecordBatch.from_pydict({"value": pa.array([b"x"], pa.binary())})
    assert layout.arrange(batch, to_arrow_schema(schema_of("value binary"))) is batch


PLACES = st.tuples(
    st.integers(0, (1 << 63) - 1),
    st.integers(0, (1 << 63) - 1),
    st.one_of(st.just(-1), st.integers(0, (1 << 31) - 1)),
    st.one_of(st.none(), st.integers(0, (1 << 31) - 1)),
)


@given(st.lists(PLACES, max_size=20))
def test_message_ids_are_those_that_clients_read(places: list[tuple[int, int, int, int | None]]) -> None:
    types = (pa.int64(), pa.int64(), pa.int32(), pa.int32())
    columns = [pa.array([place[index] for place in places], kind) for index, kind in enumerate(types)]
    ids = encode_message_ids(*columns)
    ids.validate(full=True)
    read = [pulsar.MessageId.deserialize(each) for each in ids.to_pylist()]
    assert [(each.ledger_id(), each.entry_id(), each.partition(), each.batch_index()) for each in read] == [
        (ledger, entry, partition, -1 if index is None else index) for ledger, entry, partition, index in places
    ]


def schemas_with(*names: str) -> tuple[SchemaVersion, ...]:
    fields = ",".join(f'{{"name":"{name}","type":"int"}}' for name in names)
    return (SchemaVersion(bytes(8), "AVRO", f'{{"type":"record","name":"F","fields":[{fields}]}}'.encode()),)


@pytest.mark.parametrize("style", ["plain", "pulsar-spark"])
def test_fields_of_a_schema_are_shown_whatever_they_begin_with(style: str) -> None:
    names, options = ("_id", "__v", "_", "__ts", "key", "value"), parse(readMode="typed", columnStyle=style)
    shown = rows_schema(options, schemas_with(*names))
    assert tuple(shown.names[: len(names)]) == names
    assert choose_columns(shown, options, schemas_with(*names)).scan_columns[: len(names)] == names


@pytest.mark.parametrize(
    ("style", "name"),
    [("plain", "__key"), ("plain", "_error"), ("plain", "__ordering_key"), ("pulsar-spark", "_error"), ("pulsar-spark", "__key")],
)
def test_a_field_that_would_hide_a_column_of_the_message_is_refused(style: str, name: str) -> None:
    for function in (rows_schema, lambda *given: choose_columns(schema_of("a bigint"), *given)):
        with pytest.raises(BadOptionError, match=f"has a field {name}, .* read with readMode=messages"):
            function(parse(readMode="typed", columnStyle=style), schemas_with("a", name))


def test_a_field_that_hides_a_column_of_the_style_alone_is_read_without_it() -> None:
    schemas = schemas_with("__messageId")
    assert "__messageId" in rows_schema(parse(readMode="typed"), schemas).names
    with pytest.raises(BadOptionError, match="leave columnStyle out"):
        rows_schema(parse(readMode="typed", columnStyle="pulsar-spark"), schemas)


def test_the_typed_spec_shows_one_version() -> None:
    from cepheid_spark.spark_schema import with_reader_version

    newer = SchemaVersion((1).to_bytes(8, "big"), "AVRO", DEFINITION)
    assert with_reader_version(parse(readMode="typed"), (*SCHEMAS, newer)).spec.reader_version == newer.version
    assert with_reader_version(parse(readMode="typed", schemaVersion="0"), (*SCHEMAS, newer)).spec.reader_version == bytes(8)
    assert with_reader_version(parse(), ()).spec.reader_version is None
