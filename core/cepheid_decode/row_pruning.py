"""Which rows a filter wants. Entries whose metadata says enough are left out before their payload is unpacked.

A batch has one publish time, so that decides about all of its messages; its keys and event times are its messages'.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cepheid_decode import entry_metadata as entry_fields
from cepheid_decode.decode_fields import Bools, Ints
from cepheid_decode.decode_gather import gather
from cepheid_decode.decode_rows import ALONE, COMPACTED_OUT, EVENT_TIME, KEY, NULL_KEY, MessageRows
from cepheid_decode.entry_metadata import EntryTable
from cepheid_decode.history import Piece
from cepheid_decode.scan_request import MAX_TIME_MS, RowFilter


def entries_wanted(entries: EntryTable, row_filter: RowFilter) -> Bools:
    """By publish time, of the entries that are readable; whether the others are wanted cannot be said: they are."""
    wanted = np.ones(len(entries), bool)
    if row_filter.publish_from_ms is None and row_filter.publish_until_ms is None:
        return wanted
    wanted = _within(entries.fields.number(entry_fields.PUBLISH_TIME), row_filter.publish_from_ms, row_filter.publish_until_ms)
    wanted[list(entries.refused)] = True
    return wanted


def keep_wanted(rows: MessageRows, row_filter: RowFilter) -> None:
    """Leave out what the piece's borders and the filter do not want. A row without a key matches no key, and a row whose event time
    is shown as null (none, or none that a timestamp can hold) matches no time."""
    _keep_inside(rows, rows.piece)
    if row_filter.event_from_ms is not None or row_filter.event_until_ms is not None:
        event_ms = rows.numbers(EVENT_TIME)
        rows.keep(
            _within(event_ms, row_filter.event_from_ms, row_filter.event_until_ms) & (event_ms > 0) & (event_ms <= MAX_TIME_MS)
        )
    if row_filter.keys is not None:
        present = rows.present(KEY) & (rows.numbers(NULL_KEY) == 0)
        keys = gather(rows.data, *rows.spans(KEY), present)
        wanted = pa.array([key.encode() for key in sorted(row_filter.keys)], pa.binary())
        rows.keep(pc.is_in(keys, wanted).to_numpy(zero_copy_only=False) & present)


def keep_not_compacted(rows: MessageRows) -> int:
    """Leaves out what compaction took out of batches; returns how many messages that were."""
    if COMPACTED_OUT not in rows.batch.fields.numbers:
        return 0
    before = len(rows)
    alone = np.zeros(len(rows.alone.entries), np.int64)
    rows.keep(rows.picked(rows.batch.fields.number(COMPACTED_OUT), alone) == 0)
    return before - len(rows)


def _keep_inside(rows: MessageRows, piece: Piece) -> None:
    if piece.first_batch_index > 0:
        at_start = rows.entries.entry_ids[rows.entry_rows()] == piece.first_entry_id
        rows.keep(~at_start | (_order(rows) >= piece.first_batch_index))
    if piece.end_batch_index >= 0:
        at_end = rows.entries.entry_ids[rows.entry_rows()] == piece.last_entry_id
        rows.keep(~at_end | (_order(rows) < piece.end_batch_index))


def _order(rows: MessageRows) -> Ints:
    """The index in a batch; a message alone is the first of its entry."""
    index = rows.batch_index()
    return np.where(index == ALONE, 0, index)


def _within(times_ms: Ints, from_ms: int | None, until_ms: int | None) -> Bools:
    wanted = np.ones(len(times_ms), bool)
    if from_ms is not None:
        wanted &= times_ms >= from_ms
    if until_ms is not None:
        wanted &= times_ms < until_ms
    return wanted
