"""Text from bytes that may not be UTF-8: Spark would accept invalid strings, so every value is checked."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa


def text_array(values: pa.BinaryArray) -> tuple[pa.StringArray, npt.NDArray[np.intp]]:
    """Return the same bytes as text, null if they are not UTF-8; and those rows."""
    try:
        return values.cast(pa.string()), np.empty(0, np.intp)
    except pa.ArrowInvalid:
        wrong = np.array(list(_broken(values, 0)), np.intp)
        keep = np.ones(len(values), np.bool_)
        keep[wrong] = False
        places = np.arange(len(values))
        return values.take(pa.array(places, mask=~keep)).cast(pa.string()), wrong


def _broken(values: pa.BinaryArray, first: int) -> list[int]:
    """Search in halves, because usually very few values are invalid."""
    try:
        values.cast(pa.string())
    except pa.ArrowInvalid:
        if len(values) == 1:
            return [first]
        half = len(values) // 2
        return _broken(values[:half], first) + _broken(values[half:], first + half)
    return []
