"""Key/value schemas: two schemas in one, as clients pack them.

data        key length (4 bytes, big-endian), key definition, value length, value definition
properties  key.schema.type, key.schema.properties (JSON), the same for `value`, kv.encoding.type: INLINE or SEPARATED
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

from cepheid_broker.errors import InvalidSchemaError
from cepheid_broker.schemas.avro_schema import load_json
from cepheid_broker.schemas.mismatch import shown
from cepheid_broker.schemas.schema import Schema, SchemaType

INLINE = "INLINE"
SEPARATED = "SEPARATED"
_LENGTH = struct.Struct(">i")
_INNER_REFUSED = frozenset({SchemaType.KEY_VALUE, SchemaType.AUTO_CONSUME, SchemaType.AUTO_PUBLISH})


def split_key_value(schema: Schema) -> tuple[Schema, Schema]:
    """Return the schemas of key and value. Raises InvalidSchemaError."""
    key, offset = _part(schema.data, 0, "key")
    value, offset = _part(schema.data, offset, "value")
    if offset != len(schema.data):
        raise InvalidSchemaError(f"{len(schema.data) - offset} bytes follow the definition of the value")
    return _inner(schema.properties, "key", key), _inner(schema.properties, "value", value)


def join_key_value(key: bytes, value: bytes) -> bytes:
    return b"".join((_LENGTH.pack(len(key)), key, _LENGTH.pack(len(value)), value))


def encoding_of(properties: Mapping[str, str]) -> str:
    encoding = properties.get("kv.encoding.type", INLINE)
    if encoding not in (INLINE, SEPARATED):
        raise InvalidSchemaError(f"kv.encoding.type is {shown(encoding)}, neither {INLINE} nor {SEPARATED}")
    return encoding


def key_value_json(schema: Schema) -> str:
    """Return the definition as the admin API shows it (docs/reference/shapes.md §5)."""
    parts = {}
    for name, part in zip(("key", "value"), split_key_value(schema), strict=True):
        text = part.data.decode(errors="replace")
        parts[name] = json.loads(text) if text.strip() and part.type in _JSON_DEFINED else text
    return json.dumps(parts)


def key_value_data(text: bytes) -> bytes:
    """Return the inverse of `key_value_json`. Raises InvalidSchemaError."""
    document = load_json(text)
    if not (isinstance(document, dict) and document.keys() == {"key", "value"}):
        raise InvalidSchemaError('the definition of a key/value schema is {"key": …, "value": …}')
    return join_key_value(_definition(document["key"]), _definition(document["value"]))


_JSON_DEFINED = frozenset({SchemaType.AVRO, SchemaType.JSON, SchemaType.PROTOBUF, SchemaType.PROTOBUF_NATIVE})


def _definition(part: Any) -> bytes:
    return b"" if part in ("", None) else json.dumps(part).encode()


def _part(data: bytes, offset: int, name: str) -> tuple[bytes, int]:
    start = offset + _LENGTH.size
    if len(data) < start:
        raise InvalidSchemaError(f"the definition ends before the length of the {name}'s ({len(data)} bytes)")
    length = max(0, _LENGTH.unpack_from(data, offset)[0])  # -1: none
    if len(data) < start + length:
        raise InvalidSchemaError(f"the {name}'s definition should have {length} bytes, {len(data) - start} are there")
    return data[start : start + length], start + length


def _inner(properties: Mapping[str, str], side: str, data: bytes) -> Schema:
    name = properties.get(f"{side}.schema.type", SchemaType.BYTES.value)
    kind = SchemaType.__members__.get(name)
    if kind is None or kind in _INNER_REFUSED:
        raise InvalidSchemaError(f"{side}.schema.type {shown(name)} is not a type of a {side}")
    inner = load_json(properties.get(f"{side}.schema.properties", "{}").encode() or b"{}")
    if not isinstance(inner, dict):
        raise InvalidSchemaError(f"{side}.schema.properties are not a JSON object")
    return Schema(kind, data, {str(key): str(value) for key, value in inner.items()})
