"""Avro arrays and maps in lockstep: the first item of every value, then the second of those that have one, and so on.

    count ──► item ──► item ──► … ──► count ──► … ──► 0        lanes that are not at their end take part in the next round
    rounds, each with the rows that took part ──► items in the order of their rows ──► lists

A round takes the same few numpy calls however few lanes it has, so the last lanes, with the longest values, are left to Python.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cepheid_decode.typed.lanes import Lanes
from cepheid_decode.typed.records import Mask

MIN_LANES = 24  # in a round; fewer are faster one by one

Step = Callable[[Lanes, Mask | None, bool], pa.Array | None]
"""(lanes, the active ones or None for all, whether the array is needed)"""

Rows = npt.NDArray[np.intp]


def array_step(item: Step, kind: pa.DataType) -> Step:
    def step(lanes: Lanes, active: Mask | None, wanted: bool) -> pa.Array | None:
        items, rows = _rounds(lanes, active, item, wanted)
        if not wanted:
            return None
        found = pa.concat_arrays(items) if items else pa.array([], kind.value_type)
        order, offsets = _in_row_order(rows, lanes.count)
        return pa.ListArray.from_arrays(offsets, found.take(order), type=kind, mask=None if active is None else pa.array(~active))

    return step


def map_step(key: Step, value: Step, kind: pa.DataType) -> Step:
    pair = pa.struct([pa.field("key", kind.key_type), pa.field("value", kind.item_type)])

    def item(lanes: Lanes, active: Mask | None, wanted: bool) -> pa.Array | None:
        keys, values = key(lanes, active, True), value(lanes, active, wanted)
        return pa.StructArray.from_arrays([keys, values], fields=list(pair)) if wanted else None

    def step(lanes: Lanes, active: Mask | None, wanted: bool) -> pa.Array | None:
        items, rows = _rounds(lanes, active, item, wanted)
        if not wanted:
            return None
        pairs = pa.concat_arrays(items) if items else pa.array([], pair)
        order, offsets = _in_row_order(rows, lanes.count)
        found = pairs.take(order)
        keys = found.field(0).fill_null("")  # null: not UTF-8, in a lane that is marked as left
        lanes.left[_with_equal_keys(keys, rows[order.to_numpy()])] = True
        mask = None if active is None else pa.array(~active)
        return pa.MapArray.from_arrays(offsets, keys, found.field(1), type=kind, mask=mask)

    return step


def _rounds(lanes: Lanes, active: Mask | None, item: Step, wanted: bool) -> tuple[list[pa.Array], Rows]:
    """Return the items in the order in which they were read, and the row of each."""
    rows = np.arange(lanes.count) if active is None else np.flatnonzero(active)
    to_come = np.zeros(len(rows), np.int64)  # items of the block that each lane is in
    items: list[pa.Array] = []
    item_rows: list[Rows] = [np.empty(0, np.intp)]
    while len(rows):
        _next_blocks(lanes, rows, to_come)
        goes_on = (to_come > 0) & ~lanes.left[rows]
        rows, to_come = rows[goes_on], to_come[goes_on]
        if len(rows) < MIN_LANES:
            lanes.left[rows] = True
            break
        part = lanes.subset(rows)
        found = item(part, None, wanted)
        lanes.put_back(part, rows)
        to_come -= 1
        if found is not None:
            items.append(found)
            item_rows.append(rows)
    return items, np.concatenate(item_rows)


def _next_blocks(lanes: Lanes, rows: Rows, to_come: npt.NDArray[np.int64]) -> None:
    """For lanes at the end of a block, set `to_come` to the next block's count: 0 after the last one."""
    over = np.flatnonzero(to_come == 0)
    if not len(over):
        return
    part = lanes.subset(rows[over])
    counts = part.take_long(None)
    with_size = counts < 0  # then the count is followed by the block's size in bytes, which allows skipping it
    if with_size.any():
        part.take_long(with_size)
        counts = np.abs(counts)
    # More items than bytes: only empty items could be so many, and the decoder for single records limits these.
    part.leave((counts > part.ends - part.cursor) | (counts < 0), None)
    lanes.put_back(part, rows[over])
    to_come[over] = counts


def _in_row_order(rows: Rows, count: int) -> tuple[pa.Array, pa.Array]:
    """Return the indices of the items, row by row, and where those of each row begin."""
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(np.bincount(rows, minlength=count), out=offsets[1:])
    return pa.array(np.argsort(rows, kind="stable")), pa.array(offsets)


def _with_equal_keys(keys: pa.Array, rows: Rows) -> Rows:
    """Return the rows that have a key twice: the last value counts, which the decoder for single records handles."""
    encoded = pc.dictionary_encode(keys)
    both = np.sort(rows.astype(np.int64) * (len(encoded.dictionary) + 1) + encoded.indices.to_numpy())
    twice: Rows = both[1:][both[1:] == both[:-1]] // (len(encoded.dictionary) + 1)
    return twice
