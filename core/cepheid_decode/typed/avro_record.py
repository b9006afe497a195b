"""Decodes Avro values one by one, in Python: for rows that the lockstep decoder leaves, and for schemas that it does not support.

A schema becomes a tree of functions (bytes, position) -> (value, position after it). Values are what `pa.array` accepts for the
type that arrow_types gives the node. Invalid bytes raise RecordError; lengths are checked before they are used.
"""

from __future__ import annotations

import json
import struct
import uuid
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from cepheid_decode.typed.arrow_types import MAX_DAYS, MAX_MICROS, MIN_DAYS, MIN_MICROS, arrow_type
from cepheid_decode.typed.avro_schema import Array, Enum, Fixed, Logical, Map, Node, Primitive, Record, Union, choices, is_null
from cepheid_decode.typed.records import RecordError

Reader = Callable[[bytes, int], tuple[Any, int]]
Inside = tuple[Node, ...] | dict[Node, Reader]
"""The records around a node, as in arrow_types; or, in a record that becomes JSON text, the readers of records so far."""

MAX_EMPTY_ITEMS = 1 << 16
"""Limit for all items of an array, in addition to one item per byte: with empty items, ten bytes could claim 10^18 of them."""

_FLOAT, _DOUBLE = struct.Struct("<f"), struct.Struct("<d")


class AvroRecordDecoder:
    def __init__(self, node: Node) -> None:
        self.type = arrow_type(node)
        self._read = _reader(node, ())

    def decode(self, record: bytes) -> Any:
        """Raises RecordError."""
        value, end = self._read(record, 0)
        if end != len(record):
            raise RecordError(f"it has {len(record)} bytes, of which its schema takes {end}")
        return value


def _reader(node: Node, inside: Inside) -> Reader:
    match node:
        case Primitive(name, logical):
            return _PRIMITIVES[name] if logical is None else _logical_reader(logical, _PRIMITIVES[name])
        case Fixed(size=size, logical=logical):
            return _fixed(size) if logical is None else _logical_reader(logical, _fixed(size))
        case Enum(symbols=symbols):
            return _enum(symbols)
        case Array(items):
            return _array(_reader(items, inside))
        case Map(values):
            return _map(_reader(values, inside), in_text=isinstance(inside, dict))
        case Union():
            return _union(node, inside)
        case Record() if isinstance(inside, dict):
            return _record_in_text(node, inside)
        case Record():
            return _as_json(node) if node in inside else _record(node, (*inside, node))


def read_long(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if position >= len(data):
            raise RecordError("it ends inside a number")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
        if shift > 63:
            raise RecordError("a number has more than ten bytes")
    if value >= 1 << 64:
        raise RecordError("a number is larger than 64 bits")
    return (value >> 1) ^ -(value & 1), position


def _read_int(data: bytes, position: int) -> tuple[int, int]:
    value, position = read_long(data, position)
    if not -(1 << 31) <= value < 1 << 31:
        raise RecordError(f"{value} is not an int of 32 bits")
    return value, position


def _read_boolean(data: bytes, position: int) -> tuple[bool, int]:
    if position >= len(data):
        raise RecordError("it ends before a boolean")
    if data[position] > 1:
        raise RecordError(f"{data[position]} is not a boolean")
    return data[position] == 1, position + 1


def _read_float(data: bytes, position: int) -> tuple[float, int]:
    return _FLOAT.unpack(_cut(data, position, 4))[0], position + 4


def _read_double(data: bytes, position: int) -> tuple[float, int]:
    return _DOUBLE.unpack(_cut(data, position, 8))[0], position + 8


def _cut(data: bytes, position: int, size: int) -> bytes:
    if size < 0 or size > len(data) - position:
        raise RecordError(f"{size} bytes at {position} of {len(data)}")
    return data[position : position + size]


def _read_bytes(data: bytes, position: int) -> tuple[bytes, int]:
    size, position = read_long(data, position)
    return _cut(data, position, size), position + size


def _read_string(data: bytes, position: int) -> tuple[str, int]:
    raw, position = _read_bytes(data, position)
    try:
        return raw.decode(), position
    except UnicodeDecodeError:
        raise RecordError("a string is not UTF-8 text") from None


_PRIMITIVES: dict[str, Reader] = {
    "null": lambda data, position: (None, position),
    "boolean": _read_boolean,
    "int": _read_int,
    "long": read_long,
    "float": _read_float,
    "double": _read_double,
    "bytes": _read_bytes,
    "string": _read_string,
}


def _fixed(size: int) -> Reader:
    return lambda data, position: (_cut(data, position, size), position + size)


def _enum(symbols: tuple[str, ...]) -> Reader:
    def read(data: bytes, position: int) -> tuple[str, int]:
        index, position = read_long(data, position)
        if not 0 <= index < len(symbols):
            raise RecordError(f"{index} is not one of the {len(symbols)} symbols")
        return symbols[index], position

    return read


def _blocks(data: bytes, position: int, item: Callable[[int], int]) -> int:
    """Call `item` with the position of each item; it returns the next one. A negative count is followed by a size in bytes."""
    budget = len(data) + MAX_EMPTY_ITEMS
    while True:
        count, position = read_long(data, position)
        if count == 0:
            return position
        if count < 0:
            count, (_, position) = -count, read_long(data, position)
        budget -= count
        if budget < 0:
            raise RecordError(f"a block of {count} items in a value of {len(data)} bytes")
        for _ in range(count):
            position = item(position)


def _array(items: Reader) -> Reader:
    def read(data: bytes, position: int) -> tuple[list[Any], int]:
        found: list[Any] = []

        def item(at: int) -> int:
            value, at = items(data, at)
            found.append(value)
            return at

        return found, _blocks(data, position, item)

    return read


def _map(values: Reader, *, in_text: bool) -> Reader:
    def read(data: bytes, position: int) -> tuple[Any, int]:
        found: dict[str, Any] = {}  # if a key occurs twice, the last one counts, because Spark's maps have each key once

        def item(at: int) -> int:
            key, at = _read_string(data, at)
            found[key], at = values(data, at)
            return at

        position = _blocks(data, position, item)
        return (found if in_text else list(found.items())), position

    return read


def _union(node: Union, inside: Inside) -> Reader:
    readers = [_reader(branch, inside) for branch in node.branches]
    several = choices(node)
    names = (
        {id(branch): f"member{index}" for index, branch in enumerate(several)}
        if len(several) > 1 and not isinstance(inside, dict)
        else {}
    )

    def read(data: bytes, position: int) -> tuple[Any, int]:
        index, position = read_long(data, position)
        if not 0 <= index < len(readers):
            raise RecordError(f"{index} is not one of the {len(readers)} branches of a union")
        value, position = readers[index](data, position)
        branch = node.branches[index]
        return (value if not names or is_null(branch) else {names[id(branch)]: value}), position

    return read


def _record(node: Record, inside: Inside) -> Reader:
    fields = [(field.name, _reader(field.node, inside)) for field in node.fields]

    def read(data: bytes, position: int) -> tuple[dict[str, Any], int]:
        value: dict[str, Any] = {}
        name = ""
        try:
            for name, reader in fields:
                value[name], position = reader(data, position)
        except RecordError as error:
            raise RecordError(f"field '{name}': {error}") from None
        return value, position

    return read


def _as_json(node: Record) -> Reader:
    """For a recursive record."""
    plain = _record_in_text(node, {})

    def read(data: bytes, position: int) -> tuple[str, int]:
        value, position = plain(data, position)
        return json.dumps(value, default=_json_value, ensure_ascii=False), position

    return read


def _record_in_text(node: Record, made: dict[Node, Reader]) -> Reader:
    """Return the only reader for each record, which its own fields find in `made`."""
    if node not in made:
        readers: list[Reader] = []
        made[node] = lambda data, position: readers[0](data, position)
        readers.append(_record(node, made))
    return made[node]


def _json_value(value: Any) -> Any:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def _logical_reader(logical: Logical, plain: Reader) -> Reader:
    convert = logical_converter(logical)

    def read(data: bytes, position: int) -> tuple[Any, int]:
        value, position = plain(data, position)
        return convert(value), position

    return read if convert is not _unchanged else plain


def logical_converter(logical: Logical) -> Callable[[Any], Any]:
    """Return a function that converts the plain Avro value to what `pa.array` accepts for the logical type."""
    match logical.name:
        case "timestamp-millis" | "local-timestamp-millis":
            return lambda value: checked_micros(value * 1000)
        case "timestamp-micros" | "local-timestamp-micros":
            return checked_micros
        case "timestamp-nanos" | "local-timestamp-nanos":
            return lambda value: checked_micros(value // 1000)
        case "date":
            return checked_days
        case "decimal":
            return _decimal_converter(logical)
        case "uuid":
            return lambda value: str(uuid.UUID(bytes=value)) if isinstance(value, bytes) else value
    return _unchanged


def _unchanged(value: Any) -> Any:
    return value


def checked_micros(value: int) -> int:
    if not MIN_MICROS <= value <= MAX_MICROS:
        raise RecordError(f"{value} µs since 1970 is not within the years 1 to 9999")
    return value


def checked_days(value: int) -> int:
    if not MIN_DAYS <= value <= MAX_DAYS:
        raise RecordError(f"{value} days since 1970 is not within the years 1 to 9999")
    return value


def _decimal_converter(logical: Logical) -> Callable[[bytes], Decimal]:
    bound = 10**logical.precision

    def convert(value: bytes) -> Decimal:
        unscaled = int.from_bytes(value, "big", signed=True)
        if abs(unscaled) >= bound:
            raise RecordError(f"a decimal has more than {logical.precision} digits")
        sign, digits = (1 if unscaled < 0 else 0), tuple(map(int, str(abs(unscaled))))
        return Decimal((sign, digits, -logical.scale))

    return convert
