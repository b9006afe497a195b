"""Encodes payloads of other schemas than Avro and JSON: Protobuf messages from columns, and primitive values. No I/O.

    ProtobufEncoder(definition, columns)     a column that does not fit is an error here, before any task runs
    PrimitiveEncoder(kind, type)             for a column `value`
        .encode(…) ──► payload               a value that does not fit is a ValueError, which names the field

| Spark | Protobuf |
| tinyint to int; to bigint | int32, sint32, sfixed32; int64, sint64, sfixed64 |
| tinyint to bigint; and decimal(20,0) | uint32, fixed32; uint64, fixed64 |
| float; float, double; boolean; string; binary | float; double; bool; string, enum (its name); bytes |
| timestamp | google.protobuf.Timestamp |
| struct; array; map | message; repeated; map |
Null is an absent field, if the message can express that: message fields, `optional`, proto2 and oneofs.
"""

from __future__ import annotations

import difflib
import struct
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from cepheid_decode import BadOptionError
from cepheid_spark.sink_records import Converter, days, micros

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, FieldDescriptor
    from pyspark.sql.types import DataType, StructType

Filler = Callable[[Any, Mapping[str, Any]], None]
"""Sets the fields of a message to the values of a record. Raises ValueError."""

_TIMESTAMP = "google.protobuf.Timestamp"
_INT32 = ("tinyint", "smallint", "int")
_INT64 = (*_INT32, "bigint")
_NANOS_A_DAY = 86_400 * 10**9


class ProtobufEncoder:
    """Encodes records as Protobuf. Raises BadOptionError if the columns do not fit the definition, of kind PROTOBUF_NATIVE."""

    def __init__(self, definition: bytes, columns: StructType) -> None:
        from google.protobuf.message_factory import GetMessageClass

        from cepheid_decode.typed.protobuf_schema import native_descriptor

        descriptor = native_descriptor(definition)
        self._class = GetMessageClass(descriptor)
        self._fill = _message(descriptor, columns, "")

    def encode(self, record: dict[str, Any]) -> bytes:
        """Return the payload. Raises ValueError."""
        message = self._class()
        self._fill(message, record)
        return message.SerializeToString(deterministic=True)


def _message(descriptor: Descriptor, columns: StructType, path: str) -> Filler:
    given = {field.name: field.dataType for field in columns.fields}
    fields = {field.name: field for field in descriptor.fields}
    if extra := [name for name in given if name not in fields]:
        near = difflib.get_close_matches(extra[0], fields, n=1)
        advice = f"did you mean {near[0]}?" if near else f"it has {', '.join(fields)}"
        raise BadOptionError(f"the topic's schema has no field {path}{extra[0]}; {advice}", column=extra[0])
    if missing := [field.name for field in descriptor.fields if field.is_required and field.name not in given]:
        raise BadOptionError(
            f"the topic's schema requires a field {path}{missing[0]}: give a column {path}{missing[0]}", column=missing[0]
        )
    setters = {name: _field(fields[name], kind, path + name) for name, kind in given.items()}
    choices = [[f.name for f in each.fields if f.name in given] for each in descriptor.oneofs]

    def fill(message: Any, record: Mapping[str, Any]) -> None:
        for names in choices:
            if len(chosen := [name for name in names if record[name] is not None]) > 1:
                raise ValueError(f"{path}{chosen[0]} and {path}{chosen[1]} have values, and the schema allows only one of the two")
        message.SetInParent()  # a nested message without values is still present
        for name, put in setters.items():
            put(message, record[name])

    return fill


def _field(field: FieldDescriptor, given: DataType, path: str) -> Callable[[Any, Any], None]:
    from cepheid_decode.typed.protobuf_record import is_map, map_fields

    name, found = field.name, given.typeName()
    if is_map(field):
        if found != "map":
            raise _misfit(path, "map", given)
        key_field, value_field = map_fields(field)
        key_of = _scalar(key_field, given.keyType, f"{path} (key)")  # type: ignore[attr-defined]
        if value_field.message_type is not None:
            fill_value = _inner(value_field, given.valueType, f"{path}[]")  # type: ignore[attr-defined]
            return lambda message, value: _each_entry(value, path, key_of, getattr(message, name), fill_value)
        value_of = _scalar(value_field, given.valueType, f"{path}[]")  # type: ignore[attr-defined]
        return lambda message, value: getattr(message, name).update(
            {key_of(key): value_of(_present(each, f"{path}[]")) for key, each in _present(value, path)}
        )
    if field.is_repeated:
        if found != "array":
            raise _misfit(path, "array", given)
        if field.message_type is not None:
            fill_item = _inner(field, given.elementType, f"{path}[]")  # type: ignore[attr-defined]

            def add_all(message: Any, value: Any) -> None:
                for each in _present(value, path):
                    fill_item(getattr(message, name).add(), _present(each, f"{path}[]"))

            return add_all
        item_of = _scalar(field, given.elementType, f"{path}[]")  # type: ignore[attr-defined]
        return lambda message, value: getattr(message, name).extend(
            item_of(_present(each, f"{path}[]")) for each in _present(value, path)
        )
    if field.message_type is not None:
        fill = _inner(field, given, path)
        return lambda message, value: None if value is None else fill(getattr(message, name), value)
    convert, may_be_null = _scalar(field, given, path), field.has_presence and not field.is_required

    def put(message: Any, value: Any) -> None:
        if value is not None or not may_be_null:
            setattr(message, name, convert(_present(value, path)))

    return put


def _inner(field: FieldDescriptor, given: DataType, path: str) -> Filler:
    """Return the function that fills a nested message."""
    inner = field.message_type
    assert inner is not None, f"{field.name} is a message"
    if inner.full_name == _TIMESTAMP:
        if given.simpleString() != "timestamp":
            raise _misfit(path, "timestamp", given)

        def fill(message: Any, value: Any) -> None:
            message.SetInParent()
            message.seconds, micros_of = divmod(micros(value), 10**6)
            message.nanos = micros_of * 1000

        return fill
    if given.typeName() != "struct":
        raise _misfit(path, "struct", given)
    return _message(inner, given, f"{path}.")  # type: ignore[arg-type]  # a struct's type is a StructType


def _each_entry(value: Any, path: str, key_of: Converter, target: Any, fill: Filler) -> None:
    for key, each in _present(value, path):
        fill(target[key_of(key)], _present(each, f"{path}[]"))


def _present(value: Any, path: str) -> Any:
    if value is None:
        raise ValueError(f"{path} is null, and the schema does not allow it")
    return value


def _scalar(field: FieldDescriptor, given: DataType, path: str) -> Converter:
    accepted = _accepted(field)
    if given.simpleString() not in accepted:
        raise _misfit(path, " or ".join(accepted), given)
    if field.enum_type is not None:
        numbers = {value.name: value.number for value in field.enum_type.values}

        def number(text: str) -> int:
            if text not in numbers:
                raise ValueError(f"{path} is {text[:40]!r}, and the schema has {', '.join(numbers)}")
            return numbers[text]

        return number
    if field.cpp_type not in (field.CPPTYPE_UINT32, field.CPPTYPE_UINT64):
        return lambda value: value
    most = (1 << (32 if field.cpp_type == field.CPPTYPE_UINT32 else 64)) - 1

    def unsigned(value: Any) -> int:
        if not 0 <= value <= most:
            raise ValueError(f"{path} is {value}, and the schema allows 0 to {most}")
        return int(value)

    return unsigned


def _accepted(field: FieldDescriptor) -> tuple[str, ...]:
    match field.cpp_type:
        case field.CPPTYPE_INT32:
            return _INT32
        case field.CPPTYPE_INT64 | field.CPPTYPE_UINT32:
            return _INT64
        case field.CPPTYPE_UINT64:
            return (*_INT64, "decimal(20,0)")
        case field.CPPTYPE_FLOAT:
            return ("float",)
        case field.CPPTYPE_DOUBLE:
            return ("float", "double")
        case field.CPPTYPE_BOOL:
            return ("boolean",)
    return ("binary",) if field.type == field.TYPE_BYTES else ("string",)


def _misfit(path: str, wanted: str, given: DataType) -> BadOptionError:
    return BadOptionError(f"column {path} must be {wanted}, as the topic's schema says, and is {given.simpleString()}", column=path)


def _packed(code: str) -> Converter:
    return struct.Struct(f">{code}").pack


def _nanos_of_day(value: int) -> bytes:
    if not 0 <= value < _NANOS_A_DAY:
        raise ValueError(f"value is {value}, and a time of day has 0 to {_NANOS_A_DAY - 1} ns")
    return struct.pack(">q", value)


def _instant(value: Any) -> bytes:
    seconds, rest = divmod(micros(value), 10**6)
    return struct.pack(">qi", seconds, rest * 1000)


def _local_date_time(value: Any) -> bytes:
    day, rest = divmod(micros(value), 86_400 * 10**6)
    return struct.pack(">qq", day, rest * 1000)


_MILLIS: Converter = lambda value: struct.pack(">q", micros(value) // 1000)  # noqa: E731  # a row of the table below
_PRIMITIVES: Mapping[str, tuple[tuple[str, ...], Converter]] = {
    "STRING": (("string",), str.encode),
    "BOOLEAN": (("boolean",), _packed("?")),
    "INT8": (("tinyint",), _packed("b")),
    "INT16": (("tinyint", "smallint"), _packed("h")),
    "INT32": (_INT32, _packed("i")),
    "INT64": (_INT64, _packed("q")),
    "FLOAT": (("float",), _packed("f")),
    "DOUBLE": (("float", "double"), _packed("d")),
    "DATE": (("timestamp",), _MILLIS),
    "TIME": (("bigint",), _packed("q")),
    "TIMESTAMP": (("timestamp",), _MILLIS),
    "INSTANT": (("timestamp",), _instant),
    "LOCAL_DATE": (("date",), lambda value: struct.pack(">q", days(value))),
    "LOCAL_TIME": (("bigint",), _nanos_of_day),
    "LOCAL_DATE_TIME": (("timestamp_ntz",), _local_date_time),
}
"""By kind of schema, in the client's terms: the types of a column `value`, and its payload as written by Pulsar's Java client."""
PRIMITIVE_KINDS = frozenset(_PRIMITIVES)
VALUE_TYPES = frozenset(name for names, _ in _PRIMITIVES.values() for name in names)


class PrimitiveEncoder:
    """Encodes primitive values. Raises BadOptionError if the column `value` does not fit the kind of schema."""

    def __init__(self, kind: str, given: str) -> None:
        accepted, self.encode = _PRIMITIVES[kind]
        if given not in accepted:
            raise BadOptionError(
                f"column value must be {' or '.join(accepted)}, as the topic's schema {kind} says, and is {given}: cast it, or "
                "give payloads that are encoded already as binary",
                column="value",
            )
