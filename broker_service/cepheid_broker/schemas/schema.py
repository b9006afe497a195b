"""A schema as a client sends it, and the encoding of versions."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from cepheid_broker.errors import IncompatibleSchemaError

NO_VERSION = b""  # "has no schema"; clients expect the field to be set (protocol.md §20)
_VERSION_BYTES = 8


class SchemaType(enum.Enum):
    """Schema type; values are the names of the admin API (docs/reference/shapes.md §5)."""

    NONE = "NONE"
    BYTES = "BYTES"
    STRING = "STRING"
    JSON = "JSON"
    PROTOBUF = "PROTOBUF"
    AVRO = "AVRO"
    BOOLEAN = "BOOLEAN"
    INT8 = "INT8"
    INT16 = "INT16"
    INT32 = "INT32"
    INT64 = "INT64"
    FLOAT = "FLOAT"
    DOUBLE = "DOUBLE"
    DATE = "DATE"
    TIME = "TIME"
    TIMESTAMP = "TIMESTAMP"
    KEY_VALUE = "KEY_VALUE"
    INSTANT = "INSTANT"
    LOCAL_DATE = "LOCAL_DATE"
    LOCAL_TIME = "LOCAL_TIME"
    LOCAL_DATE_TIME = "LOCAL_DATE_TIME"
    PROTOBUF_NATIVE = "PROTOBUF_NATIVE"
    AUTO_CONSUME = "AUTO_CONSUME"
    AUTO_PUBLISH = "AUTO_PUBLISH"
    EXTERNAL = "EXTERNAL"


UNREGISTERED = frozenset({SchemaType.NONE, SchemaType.BYTES, SchemaType.AUTO_CONSUME, SchemaType.AUTO_PUBLISH})
"""Types that mean "any bytes" or "the topic's schema": never in a history."""

AVRO_BASED = frozenset({SchemaType.JSON, SchemaType.AVRO, SchemaType.PROTOBUF})
"""Types whose definition is an Avro schema."""


@dataclass(frozen=True, slots=True)
class Schema:
    """A schema. `data` is the definition, in the encoding of `type` on the wire."""

    type: SchemaType
    data: bytes = b""
    properties: Mapping[str, str] = field(default_factory=dict)


def encode_version(version: int) -> bytes:
    return version.to_bytes(_VERSION_BYTES, "big", signed=True)


def decode_version(version: bytes) -> int:
    """Decode a version. Raises IncompatibleSchemaError, which Pulsar's clients expect for an invalid one (protocol.md §20)."""
    if len(version) != _VERSION_BYTES:
        raise IncompatibleSchemaError(f"a schema version has {_VERSION_BYTES} bytes, not {len(version)}")
    return int.from_bytes(version, "big", signed=True)
