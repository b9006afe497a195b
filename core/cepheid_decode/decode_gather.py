"""Copies pieces of one buffer to an Arrow array, without a loop over them.

    buffer    ░░░░payload░░payload░░░░payload          offsets   s0 e0 s1 e1 s2 e2
    a zero-copy array over it: payload, gap, payload, gap, payload  ──take 0, 2, 4──►  the payloads, copied once

Measured at 5-8 GB/s; slices of `bytes` in a list take ten times as long with 100 B.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cepheid_decode.decode_fields import Bools, Bytes, Ints


def gather(data: Bytes, starts: Ints, ends: Ints, present: Bools | None = None) -> pa.BinaryArray:
    """Return `data[starts[i]:ends[i]]` for every i, null if not `present`. The pieces may be in any order but must not overlap."""
    count = len(starts)
    if present is not None and not present.all():
        chosen = np.flatnonzero(present)
        if not len(chosen):
            return pa.nulls(count, pa.binary())
        indices = np.zeros(count, np.int64)
        indices[chosen] = np.arange(len(chosen))
        return gather(data, starts[chosen], ends[chosen]).take(pa.array(indices, mask=~present))
    if not count:
        return pa.array([], pa.binary())
    order: Ints | None = None
    if not (starts[1:] >= ends[:-1]).all():
        order = np.lexsort((ends, starts))  # an empty piece before the one that begins at the same position
        starts, ends = starts[order], ends[order]
        assert (starts[1:] >= ends[:-1]).all(), "pieces overlap"
    offsets = np.empty(2 * count, np.int32)
    offsets[0::2] = starts
    offsets[1::2] = ends
    pieces = pa.Array.from_buffers(pa.binary(), 2 * count - 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    if order is None:
        return pieces.take(pa.array(np.arange(0, 2 * count, 2)))
    places = np.empty(count, np.int64)
    places[order] = np.arange(0, 2 * count, 2)
    return pieces.take(pa.array(places))


def as_text(raw: pa.BinaryArray) -> tuple[pa.StringArray, list[int]]:
    """Return the same bytes as text, and the rows that are not UTF-8: they are null."""
    try:
        return raw.cast(pa.string()), []
    except pa.ArrowInvalid:
        broken = [row for row, value in enumerate(_values(raw)) if not _is_text(value)]
    mask = np.zeros(len(raw), bool)
    mask[broken] = True
    return pc.if_else(pa.array(mask), pa.scalar(None, pa.binary()), raw).cast(pa.string()), broken


def _values(raw: pa.BinaryArray) -> Iterator[bytes | None]:
    for value in raw:
        yield value.as_py()


def _is_text(value: bytes | None) -> bool:
    try:
        return value is None or bool(value.decode() or True)
    except UnicodeDecodeError:
        return False
