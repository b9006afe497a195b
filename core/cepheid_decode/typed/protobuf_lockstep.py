"""Decodes Protobuf values of one flat message type all at once: field by field in the order of their numbers.

    lanes at the tag of field 1 ──► its value ──► lanes at the tag of field 2 ──► …        others: absent

Encoders write fields in the order of their numbers (protobuf.dev, "Field Order": usual, not guaranteed). If a field is late,
duplicate or unknown, the lane is not at its end after all fields, and is left to the library, like one with anything unusual.
Message types with repeated fields or nested messages are not supported here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from cepheid_decode.typed.lanes import BLOCK_LANES, BytesView, Lanes, gather, where_valid
from cepheid_decode.typed.protobuf_record import UINT64, field_type
from cepheid_decode.typed.records import Mask
from cepheid_decode.typed.utf8 import text_array

_F = FieldDescriptor
Step = Callable[[Lanes, Mask, bool], pa.Array | None]
"""(lanes, those that have the field, whether the array is needed): the others are null, or zero if presence is not tracked"""

_VARINTS = {
    _F.TYPE_INT32,
    _F.TYPE_INT64,
    _F.TYPE_UINT32,
    _F.TYPE_UINT64,
    _F.TYPE_BOOL,
    _F.TYPE_ENUM,
    _F.TYPE_SINT32,
    _F.TYPE_SINT64,
}
_WORDS = {
    _F.TYPE_FIXED32: "<u4",
    _F.TYPE_SFIXED32: "<i4",
    _F.TYPE_FLOAT: "<f4",
    _F.TYPE_FIXED64: "<u8",
    _F.TYPE_SFIXED64: "<i8",
    _F.TYPE_DOUBLE: "<f8",
}
_LENGTHS = {_F.TYPE_STRING, _F.TYPE_BYTES}
_WIRE_VARINT, _WIRE_64, _WIRE_LENGTH, _WIRE_32 = 0, 1, 2, 5


class NoLockstepError(Exception):
    """The message type has a part that cannot be read in lockstep."""


class ProtobufLockstep:
    def __init__(self, descriptor: Descriptor, names: Collection[str] | None) -> None:
        """`names`: the needed fields; others are null in the result. Raises NoLockstepError."""
        inside = (descriptor.full_name,)
        self._fields = list(descriptor.fields)
        self._type = pa.struct([pa.field(field.name, field_type(field, inside)) for field in self._fields])
        self._steps = sorted(
            ((field.number, place, _tag(field), _step(field)) for place, field in enumerate(self._fields)), key=lambda step: step[0]
        )
        self._wanted = [names is None or field.name in names for field in self._fields]

    def decode(self, values: pa.BinaryArray) -> tuple[pa.StructArray, npt.NDArray[np.intp]]:
        """Return the messages, and the rows that are left, in ascending order."""
        view = BytesView(values)
        blocks, left = [], []
        for first in range(0, len(values), BLOCK_LANES):
            lanes = Lanes.of_rows(view, first, min(first + BLOCK_LANES, len(values)))
            blocks.append(self._block(lanes))
            left.append(np.flatnonzero(lanes.left | (lanes.cursor != lanes.ends)) + first)
        return pa.concat_arrays(blocks), np.concatenate(left)

    def _block(self, lanes: Lanes) -> pa.StructArray:
        children = [pa.nulls(0)] * len(self._fields)
        for _, place, tag, step in self._steps:
            array = step(lanes, _take_tag(lanes, tag), self._wanted[place])
            children[place] = pa.nulls(lanes.count, self._type.field(place).type) if array is None else array
        return pa.StructArray.from_arrays(children, fields=list(self._type))


def _tag(field: FieldDescriptor) -> bytes:
    if field.type in _VARINTS:
        wire = _WIRE_VARINT
    elif field.type in _WORDS:
        wire = _WIRE_32 if _WORDS[field.type].endswith("4") else _WIRE_64
    else:
        wire = _WIRE_LENGTH
    number, encoded = field.number << 3 | wire, bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*encoded, number))


def _take_tag(lanes: Lanes, tag: bytes) -> Mask:
    """Return the lanes that are at this tag, and advance them."""
    here = lanes.cursor < lanes.ends
    for place, byte in enumerate(tag):
        here &= lanes.view.data.take(lanes.cursor + place) == byte
    lanes.advance(len(tag), here)
    return here


def _step(field: FieldDescriptor) -> Step:
    if field.is_repeated or field.type not in _VARINTS | _WORDS.keys() | _LENGTHS:
        raise NoLockstepError
    if field.type in _LENGTHS:
        return _bytes_step(field)
    if field.type in _WORDS:
        return _word_step(field)
    return _varint_step(field)


def _finish(numbers: npt.NDArray[Any], here: Mask, field: FieldDescriptor) -> pa.Array:
    if field.has_presence:
        return where_valid(numbers, None if here.all() else here)
    return pa.array(numbers if here.all() else np.where(here, numbers, numbers.dtype.type(0)))


def _word_step(field: FieldDescriptor) -> Step:
    code = _WORDS[field.type]
    kind = field_type(field, ())

    def step(lanes: Lanes, here: Mask, wanted: bool) -> pa.Array | None:
        numbers = lanes.view.words(code)[lanes.cursor] if wanted else None
        lanes.advance(int(code[-1]), here)
        if numbers is None:
            return None
        if field.type == _F.TYPE_FIXED64:
            return _decimals(numbers, here, field)
        return _finish(numbers.astype(np.int64) if kind == pa.int64() else numbers, here, field)

    return step


def _varint_step(field: FieldDescriptor) -> Step:
    convert = _enum_names(field) if field.enum_type is not None else _VARINT_COLUMNS[field.type]

    def step(lanes: Lanes, here: Mask, wanted: bool) -> pa.Array | None:
        bits = lanes.take_varint(here)
        return convert(lanes, bits, here, field) if wanted else None

    return step


Bits = npt.NDArray[np.uint64]


def _integer(kind: str) -> Callable[[Lanes, Bits, Mask, FieldDescriptor], pa.Array]:
    """Numbers of 32 bits are the low half of the varint."""
    return lambda lanes, bits, here, field: _finish(bits.astype(kind), here, field)


def _unsigned_32(lanes: Lanes, bits: Bits, here: Mask, field: FieldDescriptor) -> pa.Array:
    return _finish((bits & np.uint64(0xFFFFFFFF)).astype(np.int64), here, field)


def _zigzag(kind: str) -> Callable[[Lanes, Bits, Mask, FieldDescriptor], pa.Array]:
    def convert(lanes: Lanes, bits: Bits, here: Mask, field: FieldDescriptor) -> pa.Array:
        own = bits.astype(kind)
        signed = (own >> own.dtype.type(1)) ^ (~(own & own.dtype.type(1)) + own.dtype.type(1))
        return _finish(signed.view(kind.replace("u", "i")), here, field)

    return convert


def _decimals(bits: Bits, here: Mask, field: FieldDescriptor) -> pa.Array:
    wide = np.zeros((len(bits), 2), np.uint64)  # little-endian: the low half first, and no sign
    wide[:, 0] = np.where(here, bits, 0)
    validity = pa.py_buffer(np.packbits(here, bitorder="little")) if field.has_presence else None
    return pa.Array.from_buffers(UINT64, len(bits), [validity, pa.py_buffer(wide)])


_VARINT_COLUMNS: dict[int, Callable[[Lanes, Bits, Mask, FieldDescriptor], pa.Array]] = {
    _F.TYPE_INT32: _integer("i4"),
    _F.TYPE_INT64: _integer("i8"),
    _F.TYPE_UINT32: _unsigned_32,
    _F.TYPE_UINT64: lambda lanes, bits, here, field: _decimals(bits, here, field),
    _F.TYPE_BOOL: lambda lanes, bits, here, field: _finish(bits != 0, here, field),
    _F.TYPE_SINT32: _zigzag("u4"),
    _F.TYPE_SINT64: _zigzag("u8"),
}


def _enum_names(field: FieldDescriptor) -> Callable[[Lanes, Bits, Mask, FieldDescriptor], pa.Array]:
    """A lane with a number that has no name is left, because its meaning depends on the kind of enum."""
    assert field.enum_type is not None
    by_number = {value.number: value.name for value in reversed(field.enum_type.values)}
    numbers = np.array(sorted(by_number), np.int32)
    names = pa.array([by_number[int(number)] for number in numbers], pa.string())
    zero = names[int(np.searchsorted(numbers, 0))] if 0 in by_number else None

    def convert(lanes: Lanes, bits: Bits, here: Mask, field: FieldDescriptor) -> pa.Array:
        own = bits.astype(np.int32)
        places = np.minimum(np.searchsorted(numbers, own), len(numbers) - 1)
        known = numbers[places] == own
        lanes.leave(~known, here)
        found = names.take(pa.array(places, mask=~(known & here)))
        return found if field.has_presence or here.all() else found.fill_null(zero)

    return convert


def _bytes_step(field: FieldDescriptor) -> Step:
    is_text = field.type == _F.TYPE_STRING

    def step(lanes: Lanes, here: Mask, wanted: bool) -> pa.Array | None:
        sizes = np.where(here, lanes.take_varint(here).view(np.int64), 0)
        wrong = (sizes < 0) | (sizes > lanes.ends - lanes.cursor)
        if wrong.any():
            lanes.leave(wrong, here)
            sizes = np.where(wrong, 0, sizes)
        valid = here if field.has_presence and not here.all() else None
        found = gather(lanes.view, np.minimum(lanes.cursor, lanes.ends), sizes, valid) if wanted else None
        lanes.advance(sizes, None)  # 0 if absent
        if found is None or not is_text:
            return found
        text, broken = text_array(found)
        lanes.left[broken] = True
        return text

    return step
