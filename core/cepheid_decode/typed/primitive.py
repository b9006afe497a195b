"""Values of primitive schemas as Pulsar's Java client writes them (its impl.schema): big-endian, of a fixed length.

INT8 1 byte · INT16 2 · INT32, FLOAT 4 · INT64, DOUBLE 8 · BOOLEAN one byte, 0 or not · STRING UTF-8 · BYTES as they are
DATE, TIME, TIMESTAMP         8: milliseconds since 1970 (LongSchema of java.util.Date and its children)
INSTANT                      12: seconds (8), nanoseconds of the second (4)
LOCAL_DATE                    8: days since 1970
LOCAL_TIME                    8: nanoseconds of the day
LOCAL_DATE_TIME              16: days since 1970, nanoseconds of the day
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cepheid_decode.typed.arrow_types import LOCAL_TIMESTAMP, MAX_DAYS, MAX_MICROS, MIN_DAYS, MIN_MICROS, TIMESTAMP
from cepheid_decode.typed.records import Decoded, Mask, value_span
from cepheid_decode.typed.utf8 import text_array

Matrix = npt.NDArray[np.uint8]  # one value per row
NANOS_A_DAY = 86_400 * 10**9
_MIN_MILLIS, _MAX_MILLIS = MIN_MICROS // 1000, MAX_MICROS // 1000
_MIN_SECONDS, _MAX_SECONDS = MIN_MICROS // 10**6, MAX_MICROS // 10**6


@dataclass(frozen=True, slots=True)
class _Shape:
    type: pa.DataType
    length: int
    convert: Callable[[Matrix], tuple[npt.NDArray[Any], Mask | None]]
    """Returns numbers in the column's unit, and the rows whose number does not fit."""


def _plain(code: str) -> Callable[[Matrix], tuple[npt.NDArray[Any], Mask | None]]:
    return lambda raw: (_numbers(raw, code), None)


def _numbers(raw: Matrix, code: str) -> npt.NDArray[Any]:
    big_endian = np.dtype(code).newbyteorder(">")
    return np.ascontiguousarray(raw).view(big_endian)[:, 0].astype(code)


def _boolean(raw: Matrix) -> tuple[npt.NDArray[Any], Mask | None]:
    return raw[:, 0] != 0, None


def _from_millis(raw: Matrix) -> tuple[npt.NDArray[Any], Mask | None]:
    millis = _numbers(raw, "i8")
    wrong = (millis < _MIN_MILLIS) | (millis > _MAX_MILLIS)
    return np.where(wrong, 0, millis) * 1000, wrong


def _instant(raw: Matrix) -> tuple[npt.NDArray[Any], Mask | None]:
    seconds, nanos = _numbers(raw[:, :8], "i8"), _numbers(raw[:, 8:], "i4").astype(np.int64)
    wrong = (nanos < 0) | (nanos >= 10**9) | (seconds < _MIN_SECONDS) | (seconds > _MAX_SECONDS)
    return np.where(wrong, 0, seconds) * 10**6 + nanos // 1000, wrong


def _local_date(raw: Matrix) -> tuple[npt.NDArray[Any], Mask | None]:
    days = _numbers(raw, "i8")
    wrong = (days < MIN_DAYS) | (days > MAX_DAYS)
    return np.where(wrong, 0, days).astype(np.int32), wrong


def _local_time(raw: Matrix) -> tuple[npt.NDArray[Any], Mask]:
    nanos = _numbers(raw, "i8")
    return nanos, (nanos < 0) | (nanos >= NANOS_A_DAY)


def _local_date_time(raw: Matrix) -> tuple[npt.NDArray[Any], Mask | None]:
    days, (nanos, wrong) = _numbers(raw[:, :8], "i8"), _local_time(raw[:, 8:])
    wrong = wrong | (days < MIN_DAYS) | (days > MAX_DAYS)
    return np.where(wrong, 0, days) * (86_400 * 10**6) + nanos // 1000, wrong


_SHAPES = {
    "INT8": _Shape(pa.int8(), 1, _plain("i1")),
    "INT16": _Shape(pa.int16(), 2, _plain("i2")),
    "INT32": _Shape(pa.int32(), 4, _plain("i4")),
    "INT64": _Shape(pa.int64(), 8, _plain("i8")),
    "FLOAT": _Shape(pa.float32(), 4, _plain("f4")),
    "DOUBLE": _Shape(pa.float64(), 8, _plain("f8")),
    "BOOLEAN": _Shape(pa.bool_(), 1, _boolean),
    "DATE": _Shape(TIMESTAMP, 8, _from_millis),
    "TIME": _Shape(pa.int64(), 8, _plain("i8")),
    "TIMESTAMP": _Shape(TIMESTAMP, 8, _from_millis),
    "INSTANT": _Shape(TIMESTAMP, 12, _instant),
    "LOCAL_DATE": _Shape(pa.date32(), 8, _local_date),
    "LOCAL_TIME": _Shape(pa.int64(), 8, _local_time),
    "LOCAL_DATE_TIME": _Shape(LOCAL_TIMESTAMP, 16, _local_date_time),
}
PRIMITIVE_KINDS = frozenset({*_SHAPES, "STRING", "BYTES", "NONE"})


class PrimitiveDecoder:
    is_record = False

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._shape = _SHAPES.get(kind)
        self.type: pa.DataType = self._shape.type if self._shape else (pa.string() if kind == "STRING" else pa.binary())

    def decode(self, values: pa.BinaryArray) -> Decoded:
        if self._shape is not None:
            return self._decode_fixed(values, self._shape)
        if self._kind != "STRING":
            return Decoded(values)
        array, wrong = text_array(values)
        return Decoded(array, {int(row): "it is not UTF-8 text" for row in wrong})

    def _decode_fixed(self, values: pa.BinaryArray, shape: _Shape) -> Decoded:
        data, starts, ends = value_span(values)
        lengths = ends - starts
        off = lengths != shape.length
        if off.any():
            good = np.flatnonzero(~off)
            raw = np.zeros((len(values), shape.length), np.uint8)
            raw[good] = data[starts[good, None] + np.arange(shape.length)]
        else:
            raw = data.reshape(len(values), shape.length)
        numbers, wrong = shape.convert(raw)
        errors = {int(row): f"{self._kind} has {shape.length} bytes, not {lengths[row]}" for row in np.flatnonzero(off)}
        if wrong is not None:
            errors |= {int(row): f"its {self._kind} is out of range" for row in np.flatnonzero(wrong & ~off)}
            off = off | wrong
        plain = pa.array(numbers, mask=off)
        return Decoded(plain if plain.type == shape.type else plain.view(shape.type), errors)
