"""Decodes Avro values of one schema all at once: each field is read from every value before the next field.

A schema becomes a tree of steps; a step reads one value at the cursor of every lane (lanes.py) and returns an Arrow array.
In a union, lanes with null or with another branch are not active: the step's result is null there, and their cursor does not move.

A lane with anything unusual is left: a length beyond the end, an unknown branch or symbol, text that is not UTF-8, too large a
number, bytes after the value. avro_record.py decodes its row and returns the right value or error message.
A recursive record can have any depth: schemas with one are not supported here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cepheid_decode.typed.arrow_types import MAX_DAYS, MAX_MICROS, MIN_DAYS, MIN_MICROS, arrow_type
from cepheid_decode.typed.avro_collections import Step, array_step, map_step
from cepheid_decode.typed.avro_schema import Array, Enum, Fixed, Logical, Map, Node, Primitive, Record, Union, choices, is_null
from cepheid_decode.typed.lanes import BLOCK_LANES, BytesView, Cursors, Lanes, gather, where_valid
from cepheid_decode.typed.records import Mask
from cepheid_decode.typed.utf8 import text_array


class AvroLockstep:
    def __init__(self, record: Record, names: Collection[str] | None) -> None:
        """`names`: the needed fields; others are null in the result. Raises NoLockstepError."""
        self._fields = [
            (_step(field.node, (record,)), arrow_type(field.node, (record,)), names is None or field.name in names)
            for field in record.fields
        ]
        self._type = arrow_type(record)

    def decode(self, values: pa.BinaryArray) -> tuple[pa.StructArray, npt.NDArray[np.intp]]:
        """Return the records, and the rows that are left, in ascending order."""
        view = BytesView(values)
        blocks, left = [], []
        for first in range(0, len(values), BLOCK_LANES):
            lanes = Lanes.of_rows(view, first, min(first + BLOCK_LANES, len(values)))
            blocks.append(self._block(lanes))
            left.append(np.flatnonzero(lanes.left | (lanes.cursor != lanes.ends)) + first)
        return pa.concat_arrays(blocks), np.concatenate(left)

    def _block(self, lanes: Lanes) -> pa.StructArray:
        children = [
            array if (array := step(lanes, None, wanted)) is not None else pa.nulls(lanes.count, kind)
            for step, kind, wanted in self._fields
        ]
        return pa.StructArray.from_arrays(children, fields=list(self._type))


class NoLockstepError(Exception):
    """The schema has a part that cannot be read in lockstep."""


def _step(node: Node, inside: tuple[Node, ...]) -> Step:
    match node:
        case Primitive(name, logical):
            return _primitive(name, logical)
        case Fixed(size=size, logical=logical):
            return _fixed(size, logical)
        case Enum():
            return _enum(node)
        case Union():
            return _union(node, inside)
        case Array(items):
            return array_step(_step(items, inside), arrow_type(node, inside))
        case Map(values):
            return map_step(_read_text, _step(values, inside), arrow_type(node, inside))
        case Record() if node not in inside:
            return _record(node, inside)
    raise NoLockstepError


def _primitive(name: str, logical: Logical | None) -> Step:
    match name:
        case "null":
            return lambda lanes, active, wanted: pa.nulls(lanes.count, pa.string()) if wanted else None
        case "boolean":
            return _read_boolean
        case "int" | "long":
            return _integer(name, logical)
        case "float":
            return _number("<f4", pa.float32())
        case "double":
            return _number("<f8", pa.float64())
        case "string":
            return _read_text
    if logical is not None:
        return _decimal(_read_size, logical)
    return _read_bytes


def _integer(name: str, logical: Logical | None) -> Step:
    kind = arrow_type(Primitive(name, logical))
    rescale = _rescale(logical)

    def step(lanes: Lanes, active: Mask | None, wanted: bool) -> pa.Array | None:
        numbers = lanes.take_long(active)
        if name == "int":
            lanes.leave((numbers < -(1 << 31)) | (numbers >= 1 << 31), active)
            numbers = numbers.astype(np.int32)
        if not wanted:
            return None
        if rescale is not None:
            numbers = rescale(lanes, active, numbers)
        array = where_valid(numbers, active)
        return array if array.type == kind else array.view(kind)

    return step


def _rescale(logical: Logical | None) -> Callable[[Lanes, Mask | None, Cursors], Cursors] | None:
    """Return a function that converts the stored number to microseconds or days, and leaves what is outside the years 1 to 9999."""
    if logical is None or (logical.name != "date" and "timestamp-" not in logical.name):
        return None
    if logical.name == "date":
        times, parts, first, last = 1, 1, MIN_DAYS, MAX_DAYS
    else:
        times, parts = {"millis": (1000, 1), "micros": (1, 1), "nanos": (1, 1000)}[logical.name.rpartition("-")[2]]
        first = max(-(-MIN_MICROS * parts // times), -(2**63))
        last = min((MAX_MICROS + 1) * parts // times, 2**63) - 1

    def rescale(lanes: Lanes, active: Mask | None, numbers: Cursors) -> Cursors:
        lanes.leave((numbers < first) | (numbers > last), active)
        if parts != 1:
            return numbers // parts
        return numbers if times == 1 else numbers * times  # may overflow in lanes that are left

    return rescale


def _read_boolean(lanes: Lanes, active: Mask | None, wanted: bool) -> pa.Array | None:
    found = lanes.view.data.take(lanes.cursor)
    lanes.leave(found > 1, active)
    lanes.advance(1, active)
    return where_valid(found.astype(np.bool_), active) if wanted else None


def _number(code: str, kind: pa.DataType) -> Step:
    size = kind.bit_width // 8

    def step(lanes: Lanes, active: Mask | None, wanted: bool) -> pa.Array | None:
        found = where_valid(lanes.view.words(code)[lanes.cursor], active) if wanted else None
        lanes.advance(size, active)
        return found

    return step


Sizes = Callable[[Lanes, Mask | None], Cursors]
"""The sizes of the bytes at the cursors; 0 if the lane is not active or is left."""


def _read_size(lanes: Lanes, active: Mask | None) -> Cursors:
    sizes = lanes.take_long(active)
    if active is not None:
        sizes = np.where(active, sizes, 0)
    wrong = (sizes < 0) | (sizes > lanes.ends - lanes.cursor)
    if wrong.any():
        lanes.leave(wrong, None)
        sizes = np.where(wrong, 0, sizes)
    return sizes


def _fixed_size(size: int) -> Sizes:
    def sizes(lanes: Lanes, active: Mask | None) -> Cursors:
        wrong = lanes.ends - lanes.cursor < size
        lanes.leave(wrong, active)
        return np.where(wrong if active is None else wrong | ~active, 0, size)

    return sizes


def _read_bytes(lanes: Lanes, active: Mask | None, wanted: bool) -> pa.Array | None:
    return _take_bytes(lanes, _read_size(lanes, active), active, wanted)


def _take_bytes(lanes: Lanes, sizes: Cursors, active: Mask | None, wanted: bool) -> pa.BinaryArray | None:
    # The cursor of a lane that is left may be after its end, and the pieces must not overlap.
    found = gather(lanes.view, np.minimum(lanes.cursor, lanes.ends), sizes, active) if wanted else None
    lanes.advance(sizes, None)  # 0 if not active
    return found


def _read_text(lanes: Lanes, active: Mask | None, wanted: bool) -> pa.Array | None:
    found = _read_bytes(lanes, active, wanted)
    if found is None:
        return None
    text, wrong = text_array(found)
    lanes.left[wrong] = True
    return text


def _fixed(size: int, logical: Logical | None) -> Step:
    sizes = _fixed_size(size)
    if logical is not None and logical.name == "decimal":
        return _decimal(sizes, logical)
    if logical is not None:
        return _uuid

    return lambda lanes, active, wanted: _take_bytes(lanes, sizes(lanes, active), active, wanted)


def _decimal(size_of: Sizes, logical: Logical) -> Step:
    """For decimals of up to eight bytes, which hold eighteen digits; longer ones are left."""
    kind = pa.decimal128(logical.precision, logical.scale)
    bound = min(10**logical.precision, 2**63) - 1

    def step(lanes: Lanes, active: Mask | None, wanted: bool) -> pa.Array | None:
        sizes = size_of(lanes, active)
        if wanted:
            lanes.leave(sizes > 8, active)
            starts = np.minimum(lanes.cursor, lanes.ends)
            unscaled = lanes.view.words(">i8")[starts] >> (64 - 8 * np.clip(sizes, 0, 8))
            unscaled = np.where(sizes == 0, 0, unscaled)
            lanes.leave((unscaled > bound) | (unscaled < -bound), active)
        lanes.advance(sizes, None)
        return _decimals(unscaled, active, kind) if wanted else None

    return step


def _decimals(unscaled: Cursors, active: Mask | None, kind: pa.DataType) -> pa.Array:
    wide = np.empty((len(unscaled), 2), np.int64)  # little-endian: the low half first
    wide[:, 0] = unscaled
    wide[:, 1] = unscaled >> 63
    validity = None if active is None else pa.py_buffer(np.packbits(active, bitorder="little"))
    return pa.Array.from_buffers(kind, len(unscaled), [validity, pa.py_buffer(wide)])


_HEX = np.array([f"{byte:02x}".encode() for byte in range(256)], "S2")
_UUID_PLACES = [place for place in range(36) if place not in (8, 13, 18, 23)]


def _uuid(lanes: Lanes, active: Mask | None, wanted: bool) -> pa.Array | None:
    lanes.leave(lanes.ends - lanes.cursor < 16, active)
    if not wanted:
        lanes.advance(16, active)
        return None
    raw = lanes.view.data[np.minimum(lanes.cursor, lanes.view.limit)[:, None] + np.arange(16)]
    text = np.full((lanes.count, 36), ord("-"), np.uint8)
    text[:, _UUID_PLACES] = _HEX[raw].view(np.uint8).reshape(lanes.count, 32)
    lanes.advance(16, active)
    offsets = np.arange(0, 36 * (lanes.count + 1), 36, dtype=np.int32)
    validity = None if active is None else pa.py_buffer(np.packbits(active, bitorder="little"))
    return pa.Array.from_buffers(pa.string(), lanes.count, [validity, pa.py_buffer(offsets), pa.py_buffer(text)])


def _enum(node: Enum) -> Step:
    symbols = pa.array(node.symbols, pa.string())

    def step(lanes: Lanes, active: Mask | None, wanted: bool) -> pa.Array | None:
        indexes = lanes.take_long(active)
        unknown = (indexes < 0) | (indexes >= len(symbols))
        lanes.leave(unknown, active)
        if not wanted:
            return None
        without = unknown if active is None else unknown | ~active
        return symbols.take(pa.array(indexes, mask=without if without.any() else None))

    return step


def _record(node: Record, inside: tuple[Node, ...]) -> Step:
    steps = [_step(field.node, (*inside, node)) for field in node.fields]
    kind = arrow_type(node, inside)

    def step(lanes: Lanes, active: Mask | None, wanted: bool) -> pa.Array | None:
        children = [step(lanes, active, wanted) for step in steps]
        if not wanted:
            return None
        if not children:
            validity = None if active is None else pa.py_buffer(np.packbits(active, bitorder="little"))
            return pa.Array.from_buffers(kind, lanes.count, [validity])
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=None if active is None else pa.array(~active))

    return step


def _union(node: Union, inside: tuple[Node, ...]) -> Step:
    """One branch after the other: the lanes that have this branch are active."""
    steps = [None if is_null(branch) else _step(branch, inside) for branch in node.branches]
    kind = arrow_type(node, inside)
    several = len(choices(node)) > 1

    def step(lanes: Lanes, active: Mask | None, wanted: bool) -> pa.Array | None:
        branches = lanes.take_long(active)
        lanes.leave((branches < 0) | (branches >= len(steps)), active)
        children: list[pa.Array | None] = []
        has_value = np.zeros(lanes.count, np.bool_)
        for index, branch in enumerate(steps):
            if branch is not None:
                here = branches == index if active is None else (branches == index) & active
                has_value |= here
                children.append(branch(lanes, None if here.all() else here, wanted))
        if not wanted:
            return None
        if not children:
            return pa.nulls(lanes.count, kind)
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=pa.array(~has_value)) if several else children[0]

    return step
