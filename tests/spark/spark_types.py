"""Schemas from short texts, without the JVM that Spark's own parser needs."""

from __future__ import annotations

from pyspark.sql import types as t

_TYPES: dict[str, t.DataType] = {
    each.simpleString(): each
    for each in (
        t.BinaryType(), t.StringType(), t.IntegerType(), t.LongType(), t.TimestampType(), t.DateType(), t.DecimalType(10, 2),
        t.MapType(t.StringType(), t.StringType()), t.MapType(t.StringType(), t.IntegerType()), t.ArrayType(t.StringType()),
        t.StructType([t.StructField("a", t.IntegerType())]),
    )
}  # fmt: skip


def columns(text: str) -> t.StructType:
    """Return the schema of `name type; name type`, with types as Spark shows them."""
    pairs = [each.strip().split(" ", 1) for each in text.split(";")]
    return t.StructType([t.StructField(name, _TYPES[kind]) for name, kind in pairs])
