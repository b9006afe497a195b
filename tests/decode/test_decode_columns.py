from __future__ import annotations

import pyarrow as pa
import pytest

from cepheid_decode import BadOptionError, ReadMode, ScanSpec
from cepheid_decode.columns import (
    DEFAULT_ENTRY_COLUMNS,
    DEFAULT_MESSAGE_COLUMNS,
    ENTRY_COLUMNS,
    MESSAGE_COLUMNS,
    arrow_schema,
    metadata_columns,
)

SPARK_TYPES = {
    pa.string(): "StringType",
    pa.binary(): "BinaryType",
    pa.int32(): "IntegerType",
    pa.int64(): "LongType",
    pa.timestamp("us", tz="UTC"): "TimestampType",
}


@pytest.mark.parametrize(("mode", "columns"), [(ReadMode.MESSAGES, MESSAGE_COLUMNS), (ReadMode.ENTRIES, ENTRY_COLUMNS)])
def test_schemas_are_those_that_spark_makes_of_the_same_columns(mode: ReadMode, columns: dict[str, pa.DataType]) -> None:
    types = pytest.importorskip("pyspark.sql.types")
    from pyspark.sql.pandas.types import to_arrow_schema

    def spark_type(kind: pa.DataType) -> object:
        if pa.types.is_map(kind):
            return types.MapType(types.StringType(), types.StringType())
        return getattr(types, SPARK_TYPES[kind])()

    wanted = types.StructType([types.StructField(name, spark_type(kind), True) for name, kind in columns.items()])
    expected = to_arrow_schema(wanted, timezone="UTC")
    ours = arrow_schema(ScanSpec(mode, tuple(columns)))
    assert ours.equals(expected, check_metadata=True)
    assert [field.nullable for field in ours] == [True] * len(columns)
    backwards = tuple(reversed(columns))
    assert arrow_schema(ScanSpec(mode, backwards)).names == list(backwards)


def test_a_name_that_is_no_column_is_refused_with_the_names_that_are() -> None:
    with pytest.raises(BadOptionError, match="no column 'keys' in messages mode; available: key, value, topic"):
        arrow_schema(ScanSpec(ReadMode.MESSAGES, ("keys",)))


def test_defaults_are_columns() -> None:
    assert set(DEFAULT_MESSAGE_COLUMNS) < set(MESSAGE_COLUMNS)
    assert set(DEFAULT_ENTRY_COLUMNS) == set(ENTRY_COLUMNS)
    assert metadata_columns()["__publish_time"] == MESSAGE_COLUMNS["publish_time"]
    assert "__value" not in metadata_columns()
