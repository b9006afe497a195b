"""Stored entries as rows: their bytes unchanged, for archive and export, and a few fields of their metadata.

If the metadata of an entry cannot be read, the columns from it are null. An entry is bad only if it is damaged on all of its
bookies: it has no bytes, and is left out or returned as a row whose `entry` is null.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa

from cepheid_decode import entry_metadata as entry_fields
from cepheid_decode.columns import ENTRY_COLUMNS, arrow_schema
from cepheid_decode.counters import ScanCounters
from cepheid_decode.decode_columns import times
from cepheid_decode.decode_fields import Bools, Ints
from cepheid_decode.decode_gather import as_text, gather
from cepheid_decode.entry_metadata import EntryTable, parse_entries
from cepheid_decode.history import Piece
from cepheid_decode.message_decoder import LookBack, bunches
from cepheid_decode.row_pruning import entries_wanted
from cepheid_decode.scan_request import OnBadRecord, ScanSpec
from cepheid_rpc import EntryGroup

_BATCH_BYTES = 16 << 20


class EntriesDecoder:
    """The interface of MessageDecoder, with one row per whole entry. A filter excludes entries by publish time."""

    def __init__(self, spec: ScanSpec, counters: ScanCounters, look_back: LookBack) -> None:
        self._spec = spec
        self._counters = counters
        self._schema = arrow_schema(spec)

    def decode(self, piece: Piece, groups: Iterable[EntryGroup]) -> Iterator[pa.RecordBatch]:
        for bunch in bunches(groups, _BATCH_BYTES):
            entries = parse_entries(bunch)
            bunch.clear()
            chosen = np.flatnonzero(self._without_damaged(entries) & entries_wanted(entries, self._spec.row_filter))
            if len(chosen):
                self._counters.messages += len(chosen)
                columns = [entry_column(name, piece, entries, chosen) for name in self._spec.columns]
                yield pa.record_batch(columns, self._schema)

    def _without_damaged(self, entries: EntryTable) -> Bools:
        is_whole = entries.stored_ends > entries.stored_starts
        if self._spec.on_bad_record is OnBadRecord.FAIL or is_whole.all():
            return np.ones(len(entries), bool)
        self._counters.bad_records += int((~is_whole).sum())
        return is_whole | (self._spec.on_bad_record is OnBadRecord.NULL)

    def finish(self, piece: Piece) -> Iterator[pa.RecordBatch]:
        return iter(())


def entry_column(name: str, piece: Piece, entries: EntryTable, chosen: Ints) -> pa.Array:
    """Return a column of ENTRY_COLUMNS for the `chosen` entries."""
    kind, count = ENTRY_COLUMNS[name], len(chosen)
    constants = {"topic": piece.topic, "partition": piece.partition, "ledger_id": piece.ledger_id}
    if name in constants:
        return pa.repeat(pa.scalar(constants[name], kind), count)
    if name == "entry_id":
        return pa.array(entries.entry_ids[chosen])
    if name == "entry":
        starts, ends = entries.stored_starts[chosen], entries.stored_ends[chosen]
        return gather(entries.data, starts, ends, ends > starts)
    fields = entries.fields
    if name == "publish_time":
        return times(fields.number(entry_fields.PUBLISH_TIME, default=-1)[chosen])
    if name == "producer_name":
        starts, ends = fields.span(entry_fields.PRODUCER_NAME)
        return as_text(gather(entries.data, starts[chosen], ends[chosen], fields.present(entry_fields.PRODUCER_NAME)[chosen]))[0]
    absent = ~entries.readable[chosen]
    number, default = (entry_fields.SEQUENCE_ID, 0) if name == "sequence_id" else (entry_fields.NUM_MESSAGES, 1)
    return pa.array(fields.number(number, default)[chosen], mask=absent if absent.any() else None).cast(kind)
