"""The columns of each mode: names, order and Arrow types, exactly as Spark's own `to_arrow_schema` creates them.

All columns are nullable, because Spark compares nullability too; times are microseconds in UTC; text and bytes have 32-bit offsets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import pyarrow as pa

from cepheid_decode.errors import BadOptionError
from cepheid_decode.history import SchemaVersion
from cepheid_decode.scan_request import ReadMode, ScanSpec

TIMESTAMP = pa.timestamp("us", tz="UTC")
PROPERTIES = pa.map_(pa.string(), pa.string())
TYPED_PREFIX = "__"  # of the columns that are not the schema's, in typed rows
ERROR_COLUMN = "_error"

MESSAGE_COLUMNS: Mapping[str, pa.DataType] = MappingProxyType(
    {
        "key": pa.string(),
        "value": pa.binary(),
        "topic": pa.string(),
        "partition": pa.int32(),
        "message_id": pa.string(),
        "ledger_id": pa.int64(),
        "entry_id": pa.int64(),
        "batch_index": pa.int32(),
        "publish_time": TIMESTAMP,
        "event_time": TIMESTAMP,
        "producer_name": pa.string(),
        "sequence_id": pa.int64(),
        "properties": PROPERTIES,
        "ordering_key": pa.binary(),
        "schema_version": pa.binary(),
        "replicated_from": pa.string(),
        "key_bytes": pa.binary(),
    }
)
DEFAULT_MESSAGE_COLUMNS = tuple(
    name for name in MESSAGE_COLUMNS if name not in ("message_id", "ordering_key", "schema_version", "replicated_from", "key_bytes")
)

ENTRY_COLUMNS: Mapping[str, pa.DataType] = MappingProxyType(
    {
        "topic": pa.string(),
        "partition": pa.int32(),
        "ledger_id": pa.int64(),
        "entry_id": pa.int64(),
        "publish_time": TIMESTAMP,
        "producer_name": pa.string(),
        "sequence_id": pa.int64(),
        "num_messages": pa.int32(),
        "entry": pa.binary(),
    }
)
DEFAULT_ENTRY_COLUMNS = tuple(ENTRY_COLUMNS)


def arrow_schema(spec: ScanSpec) -> pa.Schema:
    """Return the schema of the rows that `spec` requests. Raises BadOptionError that lists the names if a column does not exist."""
    types = _types(spec)
    for name in spec.columns:
        if name not in types:
            raise BadOptionError(f"no column '{name}' in {spec.mode.value} mode; available: {', '.join(types)}", column=name)
    return pa.schema([pa.field(name, types[name]) for name in spec.columns])


def metadata_columns() -> Mapping[str, pa.DataType]:
    """Return the columns of typed rows besides the schema's."""
    columns = {f"{TYPED_PREFIX}{name}": kind for name, kind in MESSAGE_COLUMNS.items() if name != "value"}
    return {**columns, ERROR_COLUMN: pa.string()}


def schema_columns(schemas: Sequence[SchemaVersion], reader_version: bytes | None) -> Mapping[str, pa.DataType]:
    """Return the schema's columns in typed rows. Raises BadOptionError, also if a field would hide one of `metadata_columns`."""
    from cepheid_decode.typed import typed_fields  # imports the schema libraries

    columns = {field.name: field.type for field in typed_fields(schemas, reader_version)}
    if hidden := metadata_columns().keys() & columns.keys():
        name = min(hidden)
        raise BadOptionError(
            f"the schema has a field {name}, and typed rows have a column of that name for what is known of each message: read "
            "with readMode=messages, or show a version of the schema without that field",
            column=name,
        )
    return columns


def _types(spec: ScanSpec) -> Mapping[str, pa.DataType]:
    if spec.mode is ReadMode.MESSAGES:
        return MESSAGE_COLUMNS
    if spec.mode is ReadMode.ENTRIES:
        return ENTRY_COLUMNS
    return {**schema_columns(spec.schemas, spec.reader_version), **metadata_columns()}
