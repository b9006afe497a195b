"""A schema as a client sends it, and how versions travel."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from cepheid_broker.errors import IncompatibleSchemaError

NO_VERSION = b""  # "has no schema", which clients expect to be there (protocol.md §20)
_VERSION_BYTES = 8


class SchemaType(enum.Enum):
    """Values: the names of the admin API (docs/reference/shapes.md §5)."""

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
"""Types that say "any bytes" or "whatever the topic has": never in a history."""

AVRO_BASED = frozenset({SchemaType.JSON, SchemaType.AVRO, SchemaType.PROTOBUF})
"""Types whose definition is an Avro schema."""


@dataclass(frozen=True, slots=True)
class Schema:
    """`data` is the definition, in the form that `type` has on the wire."""

    type: SchemaType
    data: bytes = b""
    properties: Mapping[str, str] = field(default_factory=dict)


def encode_version(version: int) -> bytes:
    return version.to_bytes(_VERSION_BYTES, "big", signed=True)


def decode_version(version: bytes) -> int:
    """Raises IncompatibleSchemaError, which is what Pulsar's clients know for a version that is none (protocol.md §20)."""
    if len(version) != _VERSION_BYTES:
        raise IncompatibleSchemaError(f"a schema version has {_VERSION_BYTES} bytes, not {len(version)}")
    return int.from_bytes(version, "big", signed=True)
