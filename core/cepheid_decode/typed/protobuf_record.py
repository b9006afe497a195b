"""Decodes Protobuf values one by one, with the library.

Fields are identified by number, so messages of every version of a schema are decoded with the version to show. An absent field is
null if its presence is tracked (messages, `optional`, proto2, oneofs), otherwise its type's zero, as in every Protobuf API.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.json_format import MessageToJson
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from cepheid_decode.typed.arrow_types import MAX_MICROS, MIN_MICROS, TIMESTAMP, list_of, map_of
from cepheid_decode.typed.records import RecordError

Converter = Callable[[Any], Any]
_TIMESTAMP_NAME = "google.protobuf.Timestamp"
UINT64 = pa.decimal128(20, 0)
_F = FieldDescriptor
_SCALARS = {
    _F.CPPTYPE_INT32: pa.int32(),
    _F.CPPTYPE_INT64: pa.int64(),
    _F.CPPTYPE_UINT32: pa.int64(),
    _F.CPPTYPE_UINT64: UINT64,
    _F.CPPTYPE_DOUBLE: pa.float64(),
    _F.CPPTYPE_FLOAT: pa.float32(),
    _F.CPPTYPE_BOOL: pa.bool_(),
    _F.CPPTYPE_ENUM: pa.string(),
}


class ProtobufRecordDecoder:
    def __init__(self, descriptor: Descriptor) -> None:
        self.type = message_type(descriptor, ())
        self._class: type[Message] = GetMessageClass(descriptor)
        self._convert = _message(descriptor, ())

    def decode(self, record: bytes) -> Any:
        """Raises RecordError."""
        try:
            return self._convert(self._class.FromString(record))
        except DecodeError as error:
            raise RecordError(f"it is not a valid message of its schema: {error}") from None
        except UnicodeDecodeError:  # proto2: raised when the field is read
            raise RecordError("a string is not UTF-8 text") from None


def message_type(descriptor: Descriptor, inside: tuple[str, ...]) -> pa.DataType:
    if descriptor.full_name in inside:
        return pa.string()
    if descriptor.full_name == _TIMESTAMP_NAME:
        return TIMESTAMP
    return pa.struct([pa.field(field.name, field_type(field, (*inside, descriptor.full_name))) for field in descriptor.fields])


def field_type(field: FieldDescriptor, inside: tuple[str, ...]) -> pa.DataType:
    if is_map(field):
        key, value = map_fields(field)
        return map_of(_single_type(key, inside), _single_type(value, inside))
    single = _single_type(field, inside)
    return list_of(single) if field.is_repeated else single


def _single_type(field: FieldDescriptor, inside: tuple[str, ...]) -> pa.DataType:
    if field.cpp_type == _F.CPPTYPE_MESSAGE:
        return message_type(message_of(field), inside)
    if field.cpp_type == _F.CPPTYPE_STRING:
        return pa.binary() if field.type == _F.TYPE_BYTES else pa.string()
    return _SCALARS[field.cpp_type]


def message_of(field: FieldDescriptor) -> Descriptor:
    assert field.message_type is not None, f"{field.name} is a message"  # callers check its cpp_type
    return field.message_type


def is_map(field: FieldDescriptor) -> bool:
    return field.type == _F.TYPE_MESSAGE and message_of(field).GetOptions().map_entry


def map_fields(field: FieldDescriptor) -> tuple[FieldDescriptor, FieldDescriptor]:
    by_name = message_of(field).fields_by_name
    return by_name["key"], by_name["value"]


def _message(descriptor: Descriptor, inside: tuple[str, ...]) -> Converter:
    if descriptor.full_name in inside:
        return lambda message: MessageToJson(message, preserving_proto_field_name=True, indent=None)
    if descriptor.full_name == _TIMESTAMP_NAME:
        return _timestamp
    deeper = (*inside, descriptor.full_name)
    fields = [(field.name, _field(field, deeper)) for field in descriptor.fields]
    return lambda message: {name: read(message) for name, read in fields}


def _timestamp(message: Any) -> int:
    micros = int(message.seconds) * 10**6 + int(message.nanos) // 1000
    if not MIN_MICROS <= micros <= MAX_MICROS or not 0 <= message.nanos < 10**9:
        raise RecordError(f"{message.seconds} s and {message.nanos} ns are not a time within the years 1 to 9999")
    return micros


def _field(field: FieldDescriptor, inside: tuple[str, ...]) -> Converter:
    name = field.name
    if is_map(field):
        key, value = map_fields(field)
        convert_key, convert = _single(key, inside), _single(value, inside)
        return lambda message: [(convert_key(k), convert(v)) for k, v in getattr(message, name).items()]
    convert = _single(field, inside)
    if field.is_repeated:
        return lambda message: [convert(item) for item in getattr(message, name)]
    if field.has_presence:
        return lambda message: convert(getattr(message, name)) if message.HasField(name) else None
    return lambda message: convert(getattr(message, name))


def _single(field: FieldDescriptor, inside: tuple[str, ...]) -> Converter:
    if field.cpp_type == _F.CPPTYPE_MESSAGE:
        return _message(message_of(field), inside)
    if field.enum_type is not None:
        names = {value.number: value.name for value in field.enum_type.values}
        return lambda number: names.get(number) or str(number)
    return lambda value: value
