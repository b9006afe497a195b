"""Applies the filter to rows. Entries that it excludes by their metadata are skipped before their payload is decompressed.

A batch has one publish time, which decides about all of its messages; keys and event times are those of its messages.
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
    """Return which entries are wanted by publish time; unreadable ones are, because their publish time is unknown."""
    wanted = np.ones(len(entries), bool)
    if row_filter.publish_from_ms is None and row_filter.publish_until_ms is None:
        return wanted
    wanted = _within(entries.fields.number(entry_fields.PUBLISH_TIME), row_filter.publish_from_ms, row_filter.publish_until_ms)
    wanted[list(entries.refused)] = True
    return wanted


def keep_wanted(rows: MessageRows, row_filter: RowFilter) -> None:
    """Leave out rows that are outside the piece or excluded by the filter. A row without a key matches no key, and a row whose
    event time is shown as null (absent, or not valid as a timestamp) matches no time."""
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
    """Leave out the messages of batches that compaction removed; return their number."""
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
    """The index in a batch; a message that is not in a batch is the first of its entry."""
    index = rows.batch_index()
    return np.where(index == ALONE, 0, index)


def _within(times_ms: Ints, from_ms: int | None, until_ms: int | None) -> Bools:
    wanted = np.ones(len(times_ms), bool)
    if from_ms is not None:
        wanted &= times_ms >= from_ms
    if until_ms is not None:
        wanted &= times_ms < until_ms
    return wanted
