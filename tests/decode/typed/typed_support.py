"""Schemas, encoded values and columns for tests of typed rows."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cepheid_decode import OnBadRecord, ScanCounters, SchemaVersion
from cepheid_decode.typed import TypedColumns, TypedResult


def version(number: int) -> bytes:
    return number.to_bytes(8, "big")


def schema_version(kind: str, definition: Any = b"", number: int = 0, **properties: str) -> SchemaVersion:
    data = definition if isinstance(definition, bytes) else json.dumps(definition).encode()
    return SchemaVersion(version(number), kind, data, properties)


def record(*fields: tuple[str, Any], name: str = "R") -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [{"name": field, "type": kind} for field, kind in fields]}


def avro_bytes(schema: Any, value: Any) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), value)
    return out.getvalue()


def decode(
    schemas: Sequence[SchemaVersion],
    values: Sequence[bytes | None],
    *,
    keys: Sequence[bytes | None] | None = None,
    written_with: Sequence[bytes] | None = None,
    reader_version: bytes | None = None,
    on_bad_record: OnBadRecord = OnBadRecord.NULL,
    columns: Sequence[str] | None = None,
    counters: ScanCounters | None = None,
    writers: Sequence[SchemaVersion] | None = None,
) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """Rows and errors by row. `written_with`: each value's version; without, none."""
    typed = TypedColumns(schemas, reader_version, on_bad_record, counters or ScanCounters(), columns, writers)
    named = list(dict.fromkeys(written_with)) if written_with is not None else [b""]
    codes = [named.index(one) for one in written_with] if written_with is not None else [0] * len(values)
    result = typed.columns(
        pa.array(values, pa.binary()),
        None if keys is None else pa.array(keys, pa.binary()),
        np.array(codes, np.int32),
        named,
    )
    check(typed, result, len(values))
    rows = pa.Table.from_arrays(result.arrays, schema=pa.schema(typed.fields)).to_pylist()
    errors = result.errors.to_pylist() if result.errors is not None else [None] * len(values)
    return rows, {row: text for row, text in enumerate(errors) if text is not None}


def check(typed: TypedColumns, result: TypedResult, count: int) -> None:
    """What whoever reads the columns relies on."""
    for field, array in zip(typed.fields, result.arrays, strict=True):
        assert array.type.equals(field.type, check_metadata=True), f"{field} is {array.type}"
        assert len(array) == count
        array.validate(full=True)
    if result.bad is not None:
        assert result.errors is not None
        assert result.bad.tolist() == result.errors.is_valid().to_pylist()
        for array in result.arrays:
            assert not array.filter(pa.array(result.bad)).is_valid().to_numpy(zero_copy_only=False).any()


def same(one: pa.Array, other: pa.Array) -> bool:
    """Equal, where a NaN is equal to itself, and times may be such as Python has none for."""
    if pa.types.is_struct(one.type):
        return one.is_valid().equals(other.is_valid()) and all(map(same, one.flatten(), other.flatten()))
    if pa.types.is_map(one.type):
        return lengths(one) == lengths(other) and one.keys.equals(other.keys) and same(one.items, other.items)
    if pa.types.is_list(one.type):
        return lengths(one) == lengths(other) and same(one.flatten(), other.flatten())
    if pa.types.is_floating(one.type):
        return bits(one).equals(bits(other))
    return bool(one.equals(other))


def lengths(array: pa.Array) -> list[int | None]:
    ends = array.offsets.to_pylist()
    return [end - start if ok else None for start, end, ok in zip(ends, ends[1:], array.is_valid().to_pylist(), strict=False)]


def bits(array: pa.Array) -> pa.Array:
    """Bits of floats, to tell -0.0 from 0.0. All NaNs are one: a signaling NaN has other bits after Python's conversion to 64."""
    array = pc.if_else(pc.is_nan(array), pa.scalar(float("nan"), array.type), array)
    return array.view(pa.int32() if array.type.bit_width == 32 else pa.int64())
