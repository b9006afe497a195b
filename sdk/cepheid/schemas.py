"""How values become payloads: bytes, text, and records described by ordinary Python types.

bytes (the default)                              no schema: the payload as it is
str                                              UTF-8
a dataclass, TypedDict or pydantic model         JSON, with the definition that Pulsar's JSON schemas have
AvroSchema(of one of these)                      Avro, with the library fastavro
"""

from __future__ import annotations

import functools
import io
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from cepheid.errors import MissingExtraError, UnreadableMessageError, UsageError
from cepheid.record_types import RecordCodec, is_record_type
from cepheid_wire import pulsar_api_pb2 as pb

T = TypeVar("T")


class Schema(ABC, Generic[T]):
    """Encodes and decodes the values of one topic. Subclass it for a format of your own."""

    needs_writer_schema = False
    """Whether `decode` must know the definition with which the message was written."""

    @abstractmethod
    def encode(self, value: T) -> bytes:
        """Return the payload. Raises UsageError when the value does not fit."""

    @abstractmethod
    def decode(self, payload: bytes, writer: bytes | None = None) -> T:
        """Return the value. Raises UnreadableMessageError. `writer`: definition of the writer's schema, where it is needed."""

    def describe(self) -> pb.Schema | None:
        """Return what the broker is told when a producer or consumer is opened; None: nothing."""
        return None


class BytesSchema(Schema[bytes]):
    """Payloads as they are. Such producers and consumers fit every topic."""

    def encode(self, value: bytes) -> bytes:
        if type(value) is bytes:
            return value
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value)
        raise UsageError(f"the value must be bytes, got {type(value).__name__}: encode it, or open the producer with schema=")

    def decode(self, payload: bytes, writer: bytes | None = None) -> bytes:
        return payload


class StringSchema(Schema[str]):
    """Text in UTF-8."""

    def encode(self, value: str) -> bytes:
        if not isinstance(value, str):
            raise UsageError(f"the value must be a str, got {type(value).__name__}")
        return value.encode()

    def decode(self, payload: bytes, writer: bytes | None = None) -> str:
        try:
            return payload.decode()
        except UnicodeDecodeError as error:
            raise UnreadableMessageError(f"the payload is not UTF-8: {error}") from None

    def describe(self) -> pb.Schema:
        return pb.Schema(name="String", type=pb.Schema.String, schema_data=b"")


class JsonSchema(Schema[T]):
    """Records as JSON objects."""

    def __init__(self, record: type[T]) -> None:
        self._codec = RecordCodec(record, binary=False)
        self.definition = self._codec.definition

    def encode(self, value: T) -> bytes:
        return json.dumps(self._codec.lower(value), separators=(",", ":"), ensure_ascii=False).encode()

    def decode(self, payload: bytes, writer: bytes | None = None) -> T:
        try:
            parsed = json.loads(payload)
        except ValueError as error:
            raise UnreadableMessageError(f"the payload is not JSON: {error}") from None
        return self._codec.lift(parsed)  # type: ignore[no-any-return]  # the codec was made for T

    def describe(self) -> pb.Schema:
        return pb.Schema(name=self.definition["name"], type=pb.Schema.Json, schema_data=json.dumps(self.definition).encode())


class AvroSchema(Schema[T]):
    """Records in Avro's binary encoding. A message is read with the definition that it was written with."""

    needs_writer_schema = True

    def __init__(self, record: type[T]) -> None:
        try:
            import fastavro
        except ImportError:
            raise MissingExtraError("AvroSchema needs the library fastavro: pip install 'cepheid[avro]'") from None
        self._fastavro = fastavro
        self._codec = RecordCodec(record, binary=True)
        self.definition = self._codec.definition
        self._parsed = fastavro.parse_schema(self.definition)
        self._writer = functools.lru_cache(maxsize=64)(lambda data: fastavro.parse_schema(json.loads(data)))

    def encode(self, value: T) -> bytes:
        lowered = self._codec.lower(value)
        buffer = io.BytesIO()
        try:
            self._fastavro.schemaless_writer(buffer, self._parsed, lowered)
        except (TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"the value does not fit the schema of {self.definition['name']}: {error}") from None
        return buffer.getvalue()

    def decode(self, payload: bytes, writer: bytes | None = None) -> T:
        try:
            written = self._parsed if writer is None else self._writer(writer)
            record = self._fastavro.schemaless_reader(io.BytesIO(payload), written, self._parsed)
        except Exception as error:  # fastavro raises whatever a wrong byte leads to
            raise UnreadableMessageError(f"the payload is not a {self.definition['name']} in Avro: {error!r}") from None
        return self._codec.lift(record)  # type: ignore[no-any-return]  # the codec was made for T

    def describe(self) -> pb.Schema:
        return pb.Schema(name=self.definition["name"], type=pb.Schema.Avro, schema_data=json.dumps(self.definition).encode())


@dataclass(frozen=True, slots=True)
class TopicSchema:
    """A schema as a topic has it. `kind`: AVRO, JSON, STRING, PROTOBUF, …; `definition`: of these two in Avro's language."""

    kind: str
    name: str
    definition: bytes


BYTES = BytesSchema()
_TEXT = StringSchema()


def schema_of(schema: Any) -> Schema[Any]:
    """Return the schema for what was given as `schema=`. Raises UsageError when it is not one."""
    if isinstance(schema, Schema):
        return schema
    if schema is bytes:
        return BYTES
    if schema is str:
        return _TEXT
    if is_record_type(schema):
        return JsonSchema(schema)
    shown = getattr(schema, "__name__", repr(schema))
    raise UsageError(f"schema must be bytes, str, a dataclass, TypedDict, pydantic model or a Schema, got {shown}")
