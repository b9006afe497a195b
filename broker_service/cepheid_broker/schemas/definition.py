"""The meaning of a schema: its checked definition, a hash, and whether it can read what another one wrote.

Schema (bytes) ──parse_definition──► Definition ──mismatch(writer)──► None, or the field that differs
"""

from __future__ import annotations

import hashlib
from typing import Any, Protocol

from cepheid_broker.errors import InvalidSchemaError
from cepheid_broker.schemas.avro_compatibility import avro_mismatch
from cepheid_broker.schemas.avro_schema import Node, canonical_json, load_json, parse_avro
from cepheid_broker.schemas.key_value import encoding_of, split_key_value
from cepheid_broker.schemas.mismatch import Mismatch
from cepheid_broker.schemas.schema import AVRO_BASED, Schema, SchemaType

MAX_SCHEMA_BYTES = 1 << 20
"""Limit of definition and properties. A broker compares them without a pause, so it bounds the delay of all others."""

# Sent by C++, Python and Go clients where Java's send nothing.
_NO_DEFINITION = frozenset({b"", b"null", b'""', b"{}"})


class Definition(Protocol):
    """A definition of one type; `mismatch` is called with one of the same type."""

    @property
    def type(self) -> SchemaType: ...

    @property
    def canonical(self) -> bytes:
        """Bytes that are equal for definitions of the same meaning."""

    def mismatch(self, writer: Any) -> Mismatch | None: ...


def parse_definition(schema: Schema) -> Definition:
    """Parse a definition. Raises InvalidSchemaError, which names what is wrong."""
    size_bytes = len(schema.data) + sum(len(key) + len(value) for key, value in schema.properties.items())
    if size_bytes > MAX_SCHEMA_BYTES:
        raise InvalidSchemaError(f"the schema has {size_bytes} bytes; {MAX_SCHEMA_BYTES} are possible")
    if schema.type in AVRO_BASED:
        return _parse_struct(schema)
    if schema.type is SchemaType.PROTOBUF_NATIVE:
        # Imported here: brokers load descriptors with the first such schema, not at every start.
        from cepheid_broker.schemas.protobuf_native import parse_protobuf, protobuf_mismatch

        return _Structured(schema.type, *parse_protobuf(schema.data), protobuf_mismatch)
    if schema.type is SchemaType.KEY_VALUE:
        return _KeyValue(schema)
    if schema.type is SchemaType.EXTERNAL:
        return _Opaque(schema)
    if schema.data.strip() not in _NO_DEFINITION:
        raise InvalidSchemaError(f"type {schema.type.value} has no definition, but {len(schema.data)} bytes were sent")
    return _Primitive(schema.type)


def content_hash(definition: Definition) -> str:
    return hashlib.sha256(definition.type.value.encode() + b"\0" + definition.canonical).hexdigest()


def mismatch_of(reader: Definition, writer: Definition) -> Mismatch | None:
    """Return why the reader cannot read all that the writer writes, or None. Raises InvalidSchemaError if they are too large."""
    if reader.type is not writer.type:
        return Mismatch("", reader.type.value, writer.type.value)
    return reader.mismatch(writer)


class _Primitive:
    canonical = b""

    def __init__(self, kind: SchemaType) -> None:
        self.type = kind

    def mismatch(self, writer: _Primitive) -> Mismatch | None:
        return None


class _Opaque:
    """A type whose definition only clients understand: compatible only if equal."""

    def __init__(self, schema: Schema) -> None:
        self.type = schema.type
        self.canonical = schema.data

    def mismatch(self, writer: _Opaque) -> Mismatch | None:
        return None if self.canonical == writer.canonical else Mismatch("", "one definition", "another")


class _Structured:
    def __init__(self, kind: SchemaType, parsed: Any, canonical: bytes, compare: Any) -> None:
        self.type = kind
        self.canonical = canonical
        self._parsed = parsed
        self._compare = compare

    def mismatch(self, writer: _Structured) -> Mismatch | None:
        found: Mismatch | None = self._compare(self._parsed, writer._parsed)
        return found


def _parse_struct(schema: Schema) -> Definition:
    if schema.type is SchemaType.JSON:
        document = load_json(schema.data)
        if isinstance(document, dict) and document.get("type") == "object":
            return _Structured(schema.type, None, canonical_json(document), _json_mismatch)
    node, canonical = parse_avro(schema.data)
    return _Structured(schema.type, node, canonical, _json_mismatch if schema.type is SchemaType.JSON else avro_mismatch)


def _json_mismatch(reader: Node | None, writer: Node | None) -> Mismatch | None:
    """Compare JSON schemas. None: a draft of JSON schema from Java clients before 2.1, which is not compared, as in Pulsar."""
    return None if reader is None or writer is None else avro_mismatch(reader, writer)


class _KeyValue:
    type = SchemaType.KEY_VALUE

    def __init__(self, schema: Schema) -> None:
        key, value = split_key_value(schema)
        self._encoding = encoding_of(schema.properties)
        self._key = _parse_side("key", key)
        self._value = _parse_side("value", value)
        hashes = (content_hash(self._key), content_hash(self._value))
        self.canonical = "\0".join((self._encoding, *hashes)).encode()

    def mismatch(self, writer: _KeyValue) -> Mismatch | None:
        if self._encoding != writer._encoding:
            return Mismatch("", f"encoding {self._encoding}", f"encoding {writer._encoding}")
        for name, own, other in (("key", self._key, writer._key), ("value", self._value, writer._value)):
            if (found := mismatch_of(own, other)) is not None:
                return found.under(name)
        return None


def _parse_side(name: str, schema: Schema) -> Definition:
    try:
        return parse_definition(schema)
    except InvalidSchemaError as error:
        raise InvalidSchemaError(f"{name}: {error.args[0]}") from None
