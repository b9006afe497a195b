"""Selects the decoder that decodes values of one schema and shows them as another."""

from __future__ import annotations

from collections.abc import Sequence

from cepheid_decode.errors import BadOptionError
from cepheid_decode.history import SchemaVersion
from cepheid_decode.typed.avro_decoder import AvroDecoder, ResolvingDecoder
from cepheid_decode.typed.avro_scalar_resolution import DifferentSchemaError
from cepheid_decode.typed.avro_schema import parse_avro
from cepheid_decode.typed.json_decoder import JsonDecoder
from cepheid_decode.typed.primitive import PRIMITIVE_KINDS, PrimitiveDecoder
from cepheid_decode.typed.records import ValueDecoder

__all__ = ["DifferentSchemaError", "value_decoder"]


def value_decoder(writer: SchemaVersion, reader: SchemaVersion, names: Sequence[str] | None = None) -> ValueDecoder:
    """`names`: the fields that will be needed. Raises BadOptionError, DifferentSchemaError."""
    if reader.kind in PRIMITIVE_KINDS or writer.kind in PRIMITIVE_KINDS:
        _same_kind(writer, reader)
        return PrimitiveDecoder(reader.kind)
    match reader.kind:
        case "AVRO" | "JSON":
            return _struct_decoder(writer, reader, names)
        case "PROTOBUF_NATIVE" | "PROTOBUF":
            _same_kind(writer, reader)
            return _protobuf_decoder(reader, names)
    raise BadOptionError(f"a schema of type {reader.kind} has no columns; read with readMode=messages")


def _same_kind(writer: SchemaVersion, reader: SchemaVersion) -> None:
    if writer.kind != reader.kind:
        raise DifferentSchemaError(f"{writer.kind} is not {reader.kind}")


def _struct_decoder(writer: SchemaVersion, reader: SchemaVersion, names: Sequence[str] | None) -> ValueDecoder:
    shown = parse_avro(reader.definition)
    if writer.kind == reader.kind == "JSON":
        return JsonDecoder(shown, names)  # fields have names in the value itself, so the writer's definition is not needed
    if writer.kind not in ("AVRO", "JSON"):
        raise DifferentSchemaError(f"{writer.kind} is not {reader.kind}")
    written = shown if writer.definition == reader.definition else parse_avro(writer.definition)
    if written is shown:
        return AvroDecoder(shown, names)
    return ResolvingDecoder(AvroDecoder if writer.kind == "AVRO" else JsonDecoder, written, shown, names)


def _protobuf_decoder(schema: SchemaVersion, names: Sequence[str] | None) -> ValueDecoder:
    # Imported here, because the library takes tens of milliseconds, which other kinds do not need.
    from cepheid_decode.typed.protobuf_decoder import ProtobufDecoder
    from cepheid_decode.typed.protobuf_schema import native_descriptor, old_descriptor

    native = schema.kind == "PROTOBUF_NATIVE"
    return ProtobufDecoder(native_descriptor(schema.definition) if native else old_descriptor(schema.properties), names)
