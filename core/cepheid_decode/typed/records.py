"""What all decoders of stored values return, and the code that they share.

    values (one kind, one schema version, no nulls) ──► fast path: numpy or pyarrow over all values ──► array, rows that it leaves
                                                    ──► those rows one by one, in Python            ──► values, or errors

The one-by-one decoder defines what a value means. A fast path may leave any row to it, and must never return a different value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Mask = npt.NDArray[np.bool_]
MAX_ERROR_TEXT = 300
MIN_LOCKSTEP_ROWS = 16  # for fewer, the steps of a lockstep decoder take longer than decoding one by one


class RecordError(ValueError):
    """A value that does not match its schema; the message names the field."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """`errors` by row; the array is null there."""

    array: pa.Array
    errors: Mapping[int, str] = field(default_factory=dict)


class ValueDecoder(Protocol):
    """Decodes the values of one schema version."""

    @property
    def type(self) -> pa.DataType: ...

    @property
    def is_record(self) -> bool:
        """Whether the fields of the type are shown as columns of their own."""

    def decode(self, values: pa.BinaryArray) -> Decoded:
        """Decode values without nulls."""


def decode_each(values: pa.BinaryArray, decode: Callable[[bytes], Any], kind: pa.DataType) -> Decoded:
    """Decode one by one; `decode` returns what `pa.array` accepts for `kind`."""
    found: list[Any] = []
    errors: dict[int, str] = {}
    for row, value in enumerate(values.to_pylist()):
        try:
            found.append(decode(value))
        except RecordError as error:
            found.append(None)
            errors[row] = str(error)[:MAX_ERROR_TEXT]
        except RecursionError:
            found.append(None)
            errors[row] = "it is nested too deeply"
    return Decoded(pa.array(found, kind), errors)


def complete(array: pa.Array, left: npt.NDArray[np.intp], values: pa.BinaryArray, decode: Callable[[bytes], Any]) -> Decoded:
    """Return `array` with the rows `left` decoded one by one."""
    if not len(left):
        return Decoded(array)
    rest = decode_each(values.take(pa.array(left)), decode, array.type)
    errors = {int(left[row]): text for row, text in rest.errors.items()}
    return Decoded(replace_rows(array, left, rest.array), errors)


def replace_rows(array: pa.Array, rows: npt.NDArray[np.intp], replacements: pa.Array) -> pa.Array:
    """`rows` are in ascending order."""
    if len(rows) == len(array):
        return replacements
    places = np.arange(len(array))
    places[rows] = len(array) + np.arange(len(rows))
    return pa.concat_arrays([array, replacements]).take(pa.array(places))


def decode_present(decoder: ValueDecoder, values: pa.BinaryArray) -> Decoded:
    """Decode values of which some are null: these stay null and are not errors."""
    if values.null_count == 0:
        return decoder.decode(values)
    present = np.flatnonzero(values.is_valid().to_numpy(zero_copy_only=False))
    found = decoder.decode(values.take(pa.array(present)))
    places = np.full(len(values), -1)
    places[present] = np.arange(len(present))
    array = found.array.take(pa.array(places, mask=places < 0))
    return Decoded(array, {int(present[row]): text for row, text in found.errors.items()})


def value_span(values: pa.BinaryArray) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the bytes of all values as in memory, and where each starts and ends in them."""
    if not len(values):  # may be without buffers
        return np.empty(0, np.uint8), np.empty(0, np.int64), np.empty(0, np.int64)
    _, offsets_buffer, data_buffer = values.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int32, len(values) + 1, values.offset * 4).astype(np.int64)
    data = np.frombuffer(data_buffer, np.uint8) if data_buffer is not None and data_buffer.size else np.empty(0, np.uint8)
    data = data[offsets[0] : offsets[-1]]
    offsets -= offsets[0]
    return data, offsets[:-1], offsets[1:]
