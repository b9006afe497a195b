"""Reads all values of a chunk side by side: one numpy step reads one item of every value, at a cursor for each.

    data    | value 0 | value 1   | value 2 | … | padding |
    cursor      ^          ^          ^

Values are adjacent, so reading past the end of one reads from the next: this is harmless if the caller compares the cursors with
the ends before using the result. The padding allows every cursor to read a whole word, also after the last value.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cepheid_decode.typed.records import Mask, value_span

Cursors = npt.NDArray[np.int64]
PADDING_BYTES = 32
BLOCK_LANES = 1 << 15
"""Number of lanes to read at a time, so that their cursors fit in the processor's cache."""

_STOPS = np.uint64(0x8080808080808080)
_ONES = np.uint64(0x0101010101010101)
_U = [np.uint64(number) for number in range(64)]
_SEVEN = np.uint64(0x7F)
_SEVENS = np.uint64(0x7F7F7F7F7F7F7F7F)


class BytesView:
    """The bytes of values, padded. `limit`: where runaway cursors stop, one after the last end, so that it is not an end."""

    def __init__(self, values: pa.BinaryArray) -> None:
        data, self.starts, self.ends = value_span(values)
        self.data = np.empty(len(data) + PADDING_BYTES, np.uint8)
        self.data[: len(data)] = data
        self.data[len(data) :] = 0
        self.limit = len(data) + 1
        self.buffer = pa.py_buffer(self.data)

    def words(self, code: str) -> npt.NDArray[Any]:
        """Return the bytes as numbers, one starting at every byte."""
        kind = np.dtype(code)
        return np.ndarray((len(self.data) - kind.itemsize + 1,), kind, self.data, strides=(1,))


class Lanes:
    """Some values of a view, and a cursor in each. `left`: the lanes whose results are no longer used."""

    def __init__(self, view: BytesView, cursor: Cursors, ends: Cursors) -> None:
        self.view = view
        self.count = len(cursor)
        self.cursor = cursor
        self.ends = ends
        self.left = np.zeros(self.count, np.bool_)
        self._words = view.words("<u8")

    @classmethod
    def of_rows(cls, view: BytesView, first: int, last: int) -> Lanes:
        """Return lanes for the values from `first` to before `last`, each at its start."""
        return cls(view, view.starts[first:last].copy(), view.ends[first:last])

    def subset(self, rows: npt.NDArray[np.intp]) -> Lanes:
        """Return some lanes, which advance independently until they are put back."""
        return Lanes(self.view, self.cursor[rows], self.ends[rows])

    def put_back(self, part: Lanes, rows: npt.NDArray[np.intp]) -> None:
        self.cursor[rows] = part.cursor
        self.left[rows] |= part.left

    def leave(self, lanes: Mask, active: Mask | None) -> None:
        self.left |= lanes if active is None else lanes & active

    def advance(self, steps: Cursors | int, active: Mask | None) -> None:
        self.cursor += steps if active is None else steps * active
        np.minimum(self.cursor, self.view.limit, out=self.cursor)

    def take_long(self, active: Mask | None) -> Cursors:
        """Read Avro's int or long at the cursors: a varint, zigzag. The values of inactive lanes have no meaning."""
        bits = self.take_varint(active)
        return ((bits >> _U[1]) ^ (~(bits & _U[1]) + _U[1])).view(np.int64)

    def take_varint(self, active: Mask | None) -> npt.NDArray[np.uint64]:
        """Read groups of seven bits, lowest first. The values of inactive lanes have no meaning."""
        first = self.view.data.take(self.cursor)
        if not (first & 0x80).any():
            self.advance(1, active)
            return first.astype(np.uint64)
        word = self._words[self.cursor]
        stops = ~word & _STOPS
        lowest = stops & (~stops + _U[1])
        within = (lowest << _U[1]) - _U[1]  # all bits up to the byte that ends the number
        bits = _pack_sevens(word & within & _SEVENS)
        self.advance((((within & _ONES) * _ONES) >> _U[56]).astype(np.int64), active)
        if (long := stops == 0).any():
            self._take_ninth(np.flatnonzero(long if active is None else long & active), bits)
        return bits

    def _take_ninth(self, lanes: npt.NDArray[np.intp], bits: npt.NDArray[np.uint64]) -> None:
        """Read the ninth byte, and the tenth, of numbers that do not end in the first eight."""
        cursor = self.cursor[lanes]
        ninth, tenth = (self.view.data.take(cursor + place).astype(np.uint64) for place in (0, 1))
        more = ninth >> _U[7]
        bits[lanes] |= ((ninth & _SEVEN) << _U[56]) | ((tenth * more) << _U[63])
        self.left[lanes] |= (more == 1) & (tenth > 1)
        self.cursor[lanes] = np.minimum(cursor + 1 + more.astype(np.int64), self.view.limit)


def _pack_sevens(word: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Convert eight groups of seven bits in bytes to 56 bits, in pairs."""
    word = (word & np.uint64(0x007F007F007F007F)) | ((word & np.uint64(0x7F007F007F007F00)) >> _U[1])
    word = (word & np.uint64(0x00003FFF00003FFF)) | ((word & np.uint64(0x3FFF00003FFF0000)) >> _U[2])
    return (word & np.uint64(0x000000000FFFFFFF)) | ((word & np.uint64(0x0FFFFFFF00000000)) >> _U[4])


def where_valid(numbers: npt.NDArray[Any], active: Mask | None) -> pa.Array:
    return pa.array(numbers) if active is None else pa.array(numbers, mask=~active)


def read_be32(view: BytesView, cursors: Cursors) -> Cursors:
    found: Cursors = view.words(">i4")[np.minimum(cursors, view.limit)].astype(np.int64)
    return found


def gather(view: BytesView, starts: Cursors, sizes: Cursors, valid: Mask | None) -> pa.BinaryArray:
    """Return the bytes `starts..starts+sizes` of every lane. They must not overlap and must be in order.

    It creates one array of all pieces and the gaps between them, without copying, and lets Arrow take every other one: several
    times faster than slices of bytes.
    """
    count = len(starts)
    if count == 0:
        return pa.array([], pa.binary())
    offsets = np.empty(2 * count, np.int32)
    offsets[0::2] = starts
    offsets[1::2] = starts + sizes
    every = pa.BinaryArray.from_buffers(pa.binary(), 2 * count - 1, [None, pa.py_buffer(offsets), view.buffer])
    mask = None if valid is None else ~valid
    return every.take(pa.array(np.arange(0, 2 * count, 2, dtype=np.int32), mask=mask))
