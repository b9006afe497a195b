"""An opened Parquet object of one ledger: its row groups with their statistics, and reads of them.

    footer, once per process ──► RowGroup: entries first..last, ranges of times and keys, whether columns are complete
                                    ├─► `columns`: some columns of one row group, a batch at a time
                                    └─► `entry_groups`: from the columns with their bytes, verified, as from bookies

Rule 1: a row group never splits an entry, and the groups are in the order of the ledger.
Rule 2: a row without a message has no sequence id, and `_error` says what the columns of a row lack. A group with such a row
is not complete in its columns: its entries are decoded like those from bookies, so that markers, chunks, encrypted messages
and unreadable entries are handled as elsewhere.
The format is that of cepheid_tiered.segment_format.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cepheid_decode.counters import ScanCounters
from cepheid_decode.scan_request import ReadSettings, StorageAccess
from cepheid_rpc import DigestMismatchError, EntryGroup, MalformedGroupError
from cepheid_scan.object_files import ObjectFile, SegmentUnusableError, open_object
from cepheid_tiered.segment import DamagedSegmentError, SegmentError
from cepheid_tiered.segment_format import GUARD_BYTES, SegmentMetadata, file_names
from cepheid_tiered.segment_reader import TAIL_BYTES, footer_bytes, parse_footer, raw_columns, stored_entries

_MOST_FOOTERS = 128  # kept by a process; one for a ledger of 1 GB takes about 100 KB
_BATCH_BYTES = 4 << 20  # of columns built at once
_MOST_ROWS = 1 << 17
_GROUP_BYTES = 1 << 20  # of entries in one EntryGroup

_footers: OrderedDict[tuple[str, int], pq.FileMetaData] = OrderedDict()
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Range:
    """Least and greatest value of a column."""

    low: Any
    high: Any


@dataclass(frozen=True, slots=True)
class RowGroup:
    """A row group. `complete`: every row is a message. A range is None if there are no statistics, or no values."""

    index: int
    first_entry_id: int
    last_entry_id: int
    rows: int
    complete: bool
    publish_ms: Range | None
    event_ms: Range | None
    has_no_events: bool
    keys: Range | None
    has_no_keys: bool


class Segment:
    """An opened object, for one thread at a time. Every method raises SegmentUnusableError."""

    def __init__(self, url: str, file: ObjectFile, parquet: pq.ParquetFile, ledger_id: int) -> None:
        self._file = file
        self._parquet = parquet
        self.ledger_id = ledger_id
        self.schema: pa.Schema = parquet.schema_arrow
        self.metadata = SegmentMetadata.from_pairs(url, parquet.metadata.metadata)
        if self.metadata.ledger_id != ledger_id:
            raise SegmentUnusableError(f"it holds ledger {self.metadata.ledger_id}, not {ledger_id}", is_damaged=True)
        fields = [self.schema.field(name) for name in self.metadata.typed_columns]
        self.names: Mapping[str, str] = file_names(fields)
        """Names of COLUMNS in this file, by column."""
        self._places = _column_places(parquet.metadata)
        self.groups = [self._row_group(index) for index in range(parquet.metadata.num_row_groups)]
        self._whole: dict[int, bool] = {}
        self._firsts = [group.first_entry_id for group in self.groups]

    def within(self, first: int, last: int) -> list[RowGroup]:
        """Return the row groups that have any of these entries. Raises SegmentUnusableError if some of them are missing."""
        start = max(0, int(np.searchsorted(self._firsts, first, side="right")) - 1)
        found = [group for group in self.groups[start:] if group.first_entry_id <= last and group.last_entry_id >= first]
        ends = [first - 1, *(group.last_entry_id for group in found)]
        gap = any(group.first_entry_id > end + 1 for group, end in zip(found, ends, strict=False))
        if gap or ends[-1] < last:
            raise SegmentUnusableError(f"it does not have all of the entries {first}..{last}", is_damaged=True)
        return found

    def columns(self, group: RowGroup, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield all rows of the group, in batches of about 4 MB of values."""
        metadata = self._parquet.metadata.row_group(group.index)
        places = [place for name in names for place in self._places.get(name, ())]
        size_bytes = sum(metadata.column(place).total_uncompressed_size for place in places)
        rows = max(1, min(_MOST_ROWS, _BATCH_BYTES * max(1, group.rows) // max(1, size_bytes)))
        yield from self._read(group, names, rows)

    def publish_times(self, group: RowGroup) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return the entry id and the publish time in ms of each row, -1 if it has none."""
        table = pa.Table.from_batches(list(self._read(group, [self.names["entry_id"], self.names["publish_time"]], _MOST_ROWS)))
        times = table.column(1).cast(pa.timestamp("ms", "UTC")).cast(pa.int64()).fill_null(-1)
        return table.column(0).to_numpy(), times.to_numpy()

    def is_complete(self, group: RowGroup) -> bool:
        """Return whether the columns describe every row of the group completely."""
        if not group.complete or self.metadata.errors == 0:
            return group.complete
        found = self._whole.get(group.index)
        if found is None:
            batches = self._read(group, [self.names["_error"]], _MOST_ROWS)
            found = self._whole[group.index] = all(batch.column(0).null_count == batch.num_rows for batch in batches)
        return found

    def entry_groups(self, first: int, last: int) -> Iterator[EntryGroup]:
        """Yield exactly these entries, in order, verified."""
        for group in self.within(first, last):
            metadata = self._parquet.metadata
            names = [self.schema.names[index] for index in raw_columns(self.metadata, metadata.row_group(group.index))]
            try:
                ids, bounds, data = stored_entries(pa.Table.from_batches(list(self._read(group, names, max(1, group.rows)))))
            except ValueError as error:
                raise SegmentUnusableError(str(error), is_damaged=True) from None
            if not len(ids) or (ids[0], ids[-1]) != (group.first_entry_id, group.last_entry_id):
                reason = f"its entries {group.first_entry_id} to {group.last_entry_id} are not where they are expected"
                raise SegmentUnusableError(reason, is_damaged=True)
            begin, end = max(first, group.first_entry_id) - ids[0], min(last, group.last_entry_id) - ids[0] + 1
            yield from self._verified(int(ids[begin]), bounds[begin : end + 1], data)

    def _verified(self, first_entry_id: int, bounds: np.ndarray[Any, Any], data: memoryview) -> Iterator[EntryGroup]:
        """Yield groups over the memory of the entries."""
        start, count = 0, len(bounds) - 1
        while start < count:
            end = int(np.searchsorted(bounds, bounds[start] + _GROUP_BYTES, side="right")) - 1
            end = min(max(end, start + 1), count)
            ends = array("I", (bounds[start + 1 : end + 1] - bounds[start]).astype(np.uint32).tobytes())
            group = EntryGroup(self.ledger_id, first_entry_id + start, ends, data[bounds[start] : bounds[end]])
            try:
                group.verify()
            except (DigestMismatchError, MalformedGroupError) as error:
                raise SegmentUnusableError(str(error.args[0]), is_damaged=True) from None
            yield group
            start = end

    def _read(self, group: RowGroup, names: Sequence[str], rows: int) -> Iterator[pa.RecordBatch]:
        self._file.failure = None
        columns = list(names)
        try:
            for batch in self._parquet.iter_batches(rows, row_groups=[group.index], columns=columns, use_threads=False):
                yield batch.select(columns)
        except Exception as error:  # of pyarrow, which has several kinds
            raise (self._file.failure or _damaged(error)) from None

    def _row_group(self, index: int) -> RowGroup:
        metadata = self._parquet.metadata.row_group(index)
        ids = self._range(metadata, "entry_id")
        if ids is None:
            raise SegmentUnusableError(f"its row group {index} has no statistics of entry ids", is_damaged=True)
        return RowGroup(
            index=index,
            first_entry_id=int(ids.low),
            last_entry_id=int(ids.high),
            rows=metadata.num_rows,
            complete=self._nulls(metadata, "sequence_id") == 0 and self._nulls(metadata, "publish_time") == 0,
            publish_ms=_as_ms(self._range(metadata, "publish_time")),
            event_ms=_as_ms(self._range(metadata, "event_time")),
            has_no_events=self._nulls(metadata, "event_time") == metadata.num_rows,
            keys=self._range(metadata, "key"),
            has_no_keys=self._nulls(metadata, "key") == metadata.num_rows,
        )

    def _statistics(self, metadata: Any, name: str) -> Any:
        places = self._places.get(self.names[name], ())
        return metadata.column(places[0]).statistics if len(places) == 1 else None

    def _range(self, metadata: Any, name: str) -> Range | None:
        statistics = self._statistics(metadata, name)
        return Range(statistics.min, statistics.max) if statistics is not None and statistics.has_min_max else None

    def _nulls(self, metadata: Any, name: str) -> int | None:
        statistics = self._statistics(metadata, name)
        return int(statistics.null_count) if statistics is not None and statistics.has_null_count else None


def open_segment(url: str, ledger_id: int, access: StorageAccess, settings: ReadSettings, counters: ScanCounters) -> Segment:
    """Open an object. Raises SegmentUnusableError, BadOptionError."""
    file = open_object(url, access, settings, counters)
    known = (url, file.size_bytes)
    with _lock:
        footer = _footers.get(known)
    try:
        if footer is None:
            footer = _read_footer(url, file, ledger_id)
        parquet = pq.ParquetFile(pa.PythonFile(file, "r"), metadata=footer, pre_buffer=True, page_checksum_verification=True)
        segment = Segment(url, file, parquet, ledger_id)
    except SegmentUnusableError:
        raise
    except SegmentError as error:
        reason = str(error.args[0]).removeprefix(url).strip()
        raise SegmentUnusableError(reason, is_damaged=isinstance(error, DamagedSegmentError)) from None
    except Exception as error:  # of pyarrow, which has several kinds
        raise (file.failure or _damaged(error)) from None
    with _lock:
        _footers[known] = footer
        _footers.move_to_end(known)
        while len(_footers) > _MOST_FOOTERS:
            _footers.popitem(last=False)
    return segment


def _read_footer(url: str, file: ObjectFile, ledger_id: int) -> pq.FileMetaData:
    """Return the footer, checked before pyarrow parses it, which may crash the process on a changed one. Raises SegmentError."""
    tail = file.tail(TAIL_BYTES)
    size_bytes = footer_bytes(url, tail) + GUARD_BYTES
    if size_bytes > len(tail):
        tail = file.tail(size_bytes)
    return parse_footer(url, ledger_id, tail, file.size_bytes).parquet


def _damaged(error: Exception) -> SegmentUnusableError:
    reason = str(error).strip().split("\n", 1)[0][:300] or type(error).__name__
    return SegmentUnusableError(f"it is damaged: {reason}", is_damaged=True)


def _column_places(metadata: pq.FileMetaData) -> dict[str, tuple[int, ...]]:
    """Return the leaves in the file, by top-level column."""
    places: dict[str, list[int]] = {}
    for place in range(metadata.num_columns):
        path = metadata.schema.column(place).path
        places.setdefault(path.partition(".")[0], []).append(place)
    return {name: tuple(found) for name, found in places.items()}


def _as_ms(found: Range | None) -> Range | None:
    """Return statistics of datetimes in whole milliseconds since 1970."""
    if found is None:
        return None
    low, high = (value if isinstance(value, int) else round(value.timestamp() * 1000) for value in (found.low, found.high))
    return Range(low, high)
