"""Schemas of topics: registry, versions, compatibility. README.md has the rules."""

from cepheid_broker.schemas.definition import MAX_SCHEMA_BYTES
from cepheid_broker.schemas.history_store import HistoryStore
from cepheid_broker.schemas.key_value import key_value_data, key_value_json
from cepheid_broker.schemas.registry import RegisteredSchema, SchemaRegistry
from cepheid_broker.schemas.schema import NO_VERSION, Schema, SchemaType, decode_version, encode_version
from cepheid_broker.schemas.wire import asked_schema, wire_schema

__all__ = [
    "MAX_SCHEMA_BYTES",
    "NO_VERSION",
    "HistoryStore",
    "RegisteredSchema",
    "Schema",
    "SchemaRegistry",
    "SchemaType",
    "asked_schema",
    "decode_version",
    "encode_version",
    "key_value_data",
    "key_value_json",
    "wire_schema",
]
