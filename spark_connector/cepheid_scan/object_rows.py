"""Rows from the columns of a ledger's object: messages are not decoded again.

    piece ──► row groups ──┬─ statistics show that no row is wanted ──► skipped
                           ├─ complete in its columns ──► the requested columns, cast and filtered
                           └─ otherwise ──► its entries, for the decoder

Rule 1: the rows are those of the decoder, in its order and with its types.
Rule 2: only complete groups are skipped or read as columns. Entries that are not in the columns may be bad records or
markers, which are counted or raised.
Rule 3: typed columns are used if the file says that they have the requested version, and no message that failed to
decode. Otherwise the values are decoded from the column `value`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cepheid_decode.columns import ERROR_COLUMN, MESSAGE_COLUMNS, TYPED_PREFIX, arrow_schema
from cepheid_decode.counters import ScanCounters
from cepheid_decode.history import Piece
from cepheid_decode.scan_request import ReadMode, RowFilter, ScanSpec
from cepheid_decode.shared_schema import base_of
from cepheid_decode.typed.typed_columns import shown_schema
from cepheid_decode.typed_rows import TypedRows
from cepheid_scan.object_segments import Range, RowGroup, Segment

ENTRY_ID, BATCH_INDEX = "entry_id", "batch_index"
_OF_PIECE = ("topic", "partition", "ledger_id")
_DERIVED: Mapping[str, tuple[str, ...]] = {"message_id": (ENTRY_ID, BATCH_INDEX), "key_bytes": ("key", "key_bytes")}
_OF_VALUES = ("value", "key", "key_bytes", "schema_version")  # columns from which typed columns are decoded


@dataclass(frozen=True, slots=True)
class Step:
    """A part of a piece, in order. `group`: it is read from this row group's columns; None: its entries are decoded."""

    piece: Piece
    group: RowGroup | None


def plan_steps(piece: Piece, segment: Segment, row_filter: RowFilter) -> list[Step]:
    """Return the steps, without row groups that have nothing for the filter. Raises SegmentUnusableError."""
    steps: list[Step] = []
    decoded: list[RowGroup] = []

    def end_run() -> None:
        if decoded:
            steps.append(Step(_part(piece, decoded[0].first_entry_id, decoded[-1].last_entry_id), None))
            decoded.clear()

    for group in segment.within(piece.first_entry_id, piece.last_entry_id):
        if not segment.is_complete(group):
            decoded.append(group)
            continue
        end_run()
        if _may_want(group, row_filter):
            steps.append(Step(_part(piece, group.first_entry_id, group.last_entry_id), group))
    end_run()
    return steps


def _part(piece: Piece, first: int, last: int) -> Piece:
    first, last = max(first, piece.first_entry_id), min(last, piece.last_entry_id)
    return replace(
        piece,
        first_entry_id=first,
        last_entry_id=last,
        first_batch_index=piece.first_batch_index if first == piece.first_entry_id else 0,
        end_batch_index=piece.end_batch_index if last == piece.last_entry_id else -1,
    )


def _may_want(group: RowGroup, wanted: RowFilter) -> bool:
    if not _meets(group.publish_ms, wanted.publish_from_ms, wanted.publish_until_ms):
        return False
    by_event = wanted.event_from_ms is not None or wanted.event_until_ms is not None
    if by_event and (group.has_no_events or not _meets(group.event_ms, wanted.event_from_ms, wanted.event_until_ms)):
        return False
    if wanted.keys is None:
        return True
    if group.has_no_keys:
        return False
    return group.keys is None or any(
        _as_text(group.keys.low) <= key <= _as_text(group.keys.high) for key in map(_as_text, wanted.keys)
    )


def _meets(found: Range | None, from_ms: int | None, until_ms: int | None) -> bool:
    if found is None:
        return True
    return (from_ms is None or found.high >= from_ms) and (until_ms is None or found.low < until_ms)


def _as_text(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


class ObjectRows:
    """Reads the rows of one piece. `typed`: the decoder of values, in typed mode."""

    def __init__(self, spec: ScanSpec, piece: Piece, segment: Segment, counters: ScanCounters, typed: TypedRows | None) -> None:
        self._spec = spec
        self._segment = segment
        self._counters = counters
        self._schema = arrow_schema(spec)
        of_schema = [name for name in spec.columns if typed is not None and not _is_beside(name)]
        self._of_schema = frozenset(of_schema)
        needed = [ENTRY_ID, BATCH_INDEX, *self._filter_columns(), *self._message_columns()]
        self._decoded_by = None if typed is None or self._has_typed(piece, of_schema) else typed
        stored = list(of_schema)
        if self._decoded_by is not None:
            needed, stored = [*needed, *_OF_VALUES], []
        self._file_columns = {name: segment.names[name] for each in needed for name in _stored(each)}
        self._read_columns = list(dict.fromkeys((*self._file_columns.values(), *stored)))

    def _message_columns(self) -> list[str]:
        """Return the columns of messages from which the rows are built."""
        if self._spec.mode is ReadMode.MESSAGES:
            return list(self._spec.columns)
        beside = [name.removeprefix(TYPED_PREFIX) for name in self._spec.columns if name not in self._of_schema]
        return [name for name in beside if name != ERROR_COLUMN]

    def _filter_columns(self) -> list[str]:
        wanted = self._spec.row_filter
        times = {
            "publish_time": (wanted.publish_from_ms, wanted.publish_until_ms),
            "event_time": (wanted.event_from_ms, wanted.event_until_ms),
        }
        names = [name for name, bounds in times.items() if bounds != (None, None)]
        return names if wanted.keys is None else [*names, "key"]

    def _has_typed(self, piece: Piece, of_schema: Sequence[str]) -> bool:
        """Return whether the file's typed columns have the requested version."""
        spec, metadata = self._spec, self._segment.metadata
        if not metadata.schema_versions or not set(of_schema) <= set(metadata.typed_columns):
            return False
        history = dict(spec.writers).get(base_of(piece.topic), spec.schemas)
        version = bytes.fromhex(metadata.schema_versions[-1])
        written = next((each for each in history if each.version == version), None)
        if written is None or written.content != shown_schema(spec.schemas, spec.reader_version).content:
            return False
        return all(self._segment.schema.field(name).type == self._schema.field(name).type for name in of_schema)

    def read(self, step: Step) -> Iterator[tuple[pa.RecordBatch, int, int]]:
        """Yield rows, and the message with which they end: its entry and its index in the batch, -1: the whole entry."""
        assert step.group is not None
        for batch in self._segment.columns(step.group, self._read_columns):
            rows = ColumnMessages(batch, step.piece, self._file_columns)
            entry_id = rows.column(ENTRY_ID)[-1].as_py()
            index = rows.column(BATCH_INDEX)[-1].as_py()
            keep_wanted(rows, self._spec.row_filter)
            if not len(rows):
                continue
            self._counters.messages += len(rows)
            if self._decoded_by is None:
                yield self._arranged(rows), entry_id, -1 if index is None else index
                continue
            parts = self._decoded_by.rows(step.piece, rows)  # one batch, or one before an error
            for part in parts:
                yield part, entry_id, -1 if index is None else index

    def _arranged(self, rows: ColumnMessages) -> pa.RecordBatch:
        return pa.record_batch([self._column(name, rows) for name in self._spec.columns], self._schema)

    def _column(self, name: str, rows: ColumnMessages) -> pa.Array:
        if self._spec.mode is ReadMode.MESSAGES:
            return rows.column(name)
        if name in self._of_schema:
            return rows.stored(name)
        if name == ERROR_COLUMN:
            return pa.nulls(len(rows), pa.string())
        return rows.column(name.removeprefix(TYPED_PREFIX))


def _is_beside(name: str) -> bool:
    """Return whether a column of typed rows is not one of the schema."""
    return name == ERROR_COLUMN or (name.startswith(TYPED_PREFIX) and name.removeprefix(TYPED_PREFIX) in MESSAGE_COLUMNS)


def _stored(name: str) -> Sequence[str]:
    if name in _OF_PIECE:
        return ()
    return _DERIVED.get(name, (name,))


class ColumnMessages:
    """Messages of a row group, with the interface of DecodedMessages. `file_columns`: names of the columns in the file."""

    def __init__(self, batch: pa.RecordBatch, piece: Piece, file_columns: Mapping[str, str]) -> None:
        self._batch = batch
        self.piece = piece
        self._file_columns = file_columns
        self._columns: dict[str, pa.Array] = {}
        self.broken: dict[int, str] = {}

    def __len__(self) -> int:
        return int(self._batch.num_rows)

    def keep(self, wanted: npt.NDArray[np.bool_]) -> None:
        if not wanted.all():
            self._batch = self._batch.filter(pa.array(wanted))
            self._columns = {}

    def stored(self, name: str) -> pa.Array:
        """Return a column of the file, unchanged."""
        return self._batch.column(self._batch.schema.names.index(name))

    def column(self, name: str) -> pa.Array:
        """Return a column with its type in MESSAGE_COLUMNS."""
        if (found := self._columns.get(name)) is None:
            found = self._columns[name] = self._column(name)
        return found

    def _column(self, name: str) -> pa.Array:
        kind = MESSAGE_COLUMNS[name]
        if name in _OF_PIECE:
            return pa.repeat(pa.scalar(getattr(self.piece, name), kind), len(self))
        if name == "message_id":
            return self._message_id()
        found = self.stored(self._file_columns[name])
        if name == "key_bytes":  # null if `key` shows the same bytes
            found = pc.coalesce(found, self.stored(self._file_columns["key"]).cast(kind))
        return found if found.type == kind else found.cast(kind)

    def _message_id(self) -> pa.Array:
        index = self.column(BATCH_INDEX).fill_null(-1).cast(pa.string())
        entry_id = self.column(ENTRY_ID).cast(pa.string())
        return pc.binary_join_element_wise(str(self.piece.ledger_id), entry_id, str(self.piece.partition), index, ":")

    def position(self, row: int) -> str:
        index = self.column(BATCH_INDEX)[row].as_py()
        place = f"{self.piece.ledger_id}:{self.column(ENTRY_ID)[row].as_py()}"
        return place if index is None else f"{place}:{index}"

    def readable_values(self) -> pa.Array:
        return self.column("value")

    def errors(self) -> None:
        return None

    @property
    def versions(self) -> list[bytes]:
        return list(self._versions().dictionary.to_pylist())

    @property
    def version_codes(self) -> npt.NDArray[np.int32]:
        return np.asarray(self._versions().indices.to_numpy(zero_copy_only=False).astype(np.int32))

    def _versions(self) -> Any:
        return self.column("schema_version").fill_null(b"").dictionary_encode()


def keep_wanted(rows: ColumnMessages, wanted: RowFilter) -> None:
    """Keep the wanted rows, like cepheid_decode.row_pruning.keep_wanted, over columns."""
    piece = rows.piece
    entry_ids = rows.column(ENTRY_ID).to_numpy()
    kept = (entry_ids >= piece.first_entry_id) & (entry_ids <= piece.last_entry_id)
    if piece.first_batch_index > 0 or piece.end_batch_index >= 0:
        index = rows.column(BATCH_INDEX).fill_null(0).to_numpy()  # a single message is the first of its entry
        if piece.first_batch_index > 0:
            kept &= (entry_ids != piece.first_entry_id) | (index >= piece.first_batch_index)
        if piece.end_batch_index >= 0:
            kept &= (entry_ids != piece.last_entry_id) | (index < piece.end_batch_index)
    for name, from_ms, until_ms in (
        ("publish_time", wanted.publish_from_ms, wanted.publish_until_ms),
        ("event_time", wanted.event_from_ms, wanted.event_until_ms),
    ):
        if from_ms is not None or until_ms is not None:
            kept &= _within(rows.column(name), from_ms, until_ms)
    if wanted.keys is not None:
        keys = rows.column("key")
        found = pc.is_in(keys, pa.array(sorted(wanted.keys), pa.string())).to_numpy(zero_copy_only=False)
        kept &= found & keys.is_valid().to_numpy(zero_copy_only=False)
    rows.keep(kept)


def _within(times: pa.TimestampArray, from_ms: int | None, until_ms: int | None) -> npt.NDArray[np.bool_]:
    ms = times.cast(pa.timestamp("ms", "UTC")).cast(pa.int64()).fill_null(-1).to_numpy()
    kept = times.is_valid().to_numpy(zero_copy_only=False)
    if from_ms is not None:
        kept &= ms >= from_ms
    if until_ms is not None:
        kept &= ms < until_ms
    return np.asarray(kept)
