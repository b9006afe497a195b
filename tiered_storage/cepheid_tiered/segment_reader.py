"""Decode entries of a segment: which bytes of the object are needed, and what they contain. segments.py fetches them.

object   │row group 0: entry_id raw_entry value_follows value batch_index …│row group 1: …│ … │footer│
              └──── one range, for one row group ────┘ ─► EntryGroups of about 1 MiB, their digests verified
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from crc32c import crc32c

from cepheid_ports import own_pages
from cepheid_rpc import HEADER_BYTES, Buffer, DigestMismatchError, EntryGroup, MalformedGroupError
from cepheid_tiered.segment import DamagedSegmentError, SegmentError
from cepheid_tiered.segment_format import GUARD_BYTES, RAW_COLUMNS, SHARED_VALUES_SINCE, SegmentMetadata, guard_of

TAIL_BYTES = 64 << 10
"""Bytes that are read first, from the end of the object: the whole footer of all but large segments."""
PIECE_BYTES = 1 << 20
_MAGIC = b"PAR1"
_END = struct.Struct("<I4s")
_NOTHING = pa.Array.from_buffers(pa.binary(), 1, [None, pa.py_buffer(bytes(8)), pa.py_buffer(b"")])[0]
"""An empty binary scalar. Like `to_numpy` of an array, `pa.scalar` would import pandas."""
_FOOTER_COPIES = 4  # of a footer's size, what its parsed form takes about


@dataclass(frozen=True, slots=True)
class Footer:
    """The parsed footer of a segment."""

    metadata: SegmentMetadata
    parquet: Any
    first_entries: tuple[int, ...]
    """Of each row group."""
    object_bytes: int
    held_bytes: int

    @property
    def row_groups(self) -> int:
        return len(self.first_entries)

    def row_group_of(self, entry_id: int) -> int:
        return bisect_right(self.first_entries, entry_id) - 1

    def last_entry(self, row_group: int) -> int:
        after = self.first_entries[row_group + 1] if row_group + 1 < self.row_groups else self.metadata.entries
        return after - 1

    def raw_columns(self, row_group: int) -> range:
        """Return the columns that entries of a row group consist of."""
        return raw_columns(self.metadata, self.parquet.row_group(row_group))

    def raw_range(self, row_group: int) -> tuple[int, int]:
        """Return the byte range of the columns that entries consist of."""
        group = self.parquet.row_group(row_group)
        ranges = [_range(group.column(index)) for index in self.raw_columns(row_group)]
        return min(start for start, _ in ranges), max(end for _, end in ranges)

    def entries_bytes(self, row_group: int) -> int:
        """Return the approximate size of a row group's entries in memory."""
        group = self.parquet.row_group(row_group)
        return sum(group.column(index).total_uncompressed_size for index in self.raw_columns(row_group))

    def whole_range(self, row_group: int) -> tuple[int, int]:
        group = self.parquet.row_group(row_group)
        ranges = [_range(group.column(index)) for index in range(group.num_columns)]
        return min(start for start, _ in ranges), max(end for _, end in ranges)


def footer_bytes(url: str, tail: Buffer) -> int:
    """Return the size of the footer at the end of the object, without its guard. Raises DamagedSegmentError."""
    if len(tail) < _END.size:
        raise DamagedSegmentError(f"{url} has {len(tail)} bytes and is not a Parquet file", url=url)
    size_bytes, magic = _END.unpack_from(tail, len(tail) - _END.size)
    if magic != _MAGIC:
        raise DamagedSegmentError(f"{url} does not end as a Parquet file: it was cut off or overwritten", url=url)
    return int(size_bytes) + _END.size


def parse_footer(url: str, ledger_id: int, tail: Buffer, object_bytes: int) -> Footer:
    """Parse the footer at the end of some bytes. Raises DamagedSegmentError and NewerSegmentError."""
    size_bytes = footer_bytes(url, tail)
    footer = memoryview(tail)[len(tail) - size_bytes :]
    guard = memoryview(tail)[max(len(tail) - size_bytes - GUARD_BYTES, 0) : len(tail) - size_bytes]
    if guard != guard_of(footer):
        raise DamagedSegmentError(f"the footer of {url} was changed, or the object is not a segment", url=url)
    try:
        parquet = pq.read_metadata(pa.PythonFile(_Sparse(object_bytes - len(tail), tail, object_bytes), mode="r"))
        metadata = SegmentMetadata.from_pairs(url, parquet.metadata)
        firsts = []
        for index in range(parquet.num_row_groups):
            statistics = parquet.row_group(index).column(0).statistics
            firsts.append(int(statistics.min))
        found = Footer(metadata, parquet, tuple(firsts), object_bytes, size_bytes * _FOOTER_COPIES)
        in_place = all(0 <= start < end <= object_bytes for start, end in map(found.raw_range, range(len(firsts))))
    except SegmentError:
        raise
    except Exception as error:
        raise DamagedSegmentError(f"the footer of {url} cannot be read: {error}", url=url) from error
    if metadata.ledger_id != ledger_id:
        raise DamagedSegmentError(f"{url} holds ledger {metadata.ledger_id}, not {ledger_id}", url=url, ledger_id=ledger_id)
    if not in_place or (firsts and firsts[0] != 0) or any(a >= b for a, b in pairwise(firsts)):
        raise DamagedSegmentError(f"the row groups of {url} are not in order", url=url)
    if not firsts and metadata.entries:
        raise DamagedSegmentError(f"{url} has no row groups, and says it has {metadata.entries} entries", url=url)
    if len(metadata.row_group_crc32c) != len(firsts):
        raise DamagedSegmentError(f"{url} has {len(firsts)} row groups, and checksums of {len(metadata.row_group_crc32c)}", url=url)
    return found


def decode_row_group(url: str, footer: Footer, row_group: int, start: int, data: Buffer) -> Iterator[EntryGroup]:
    """Yield the verified entries of a row group, in pieces of about PIECE_BYTES, from bytes of the object that begin at `start`.

    Raises DamagedSegmentError.
    """
    next_entry, last = footer.first_entries[row_group], footer.last_entry(row_group)
    for table in _whole_entries(_batches(url, footer, row_group, start, data)):
        try:
            entry_ids, bounds, entries = stored_entries(table)
        except ValueError as error:
            raise DamagedSegmentError(f"row group {row_group} of {url}: {error}", url=url) from error
        if not len(entry_ids) or entry_ids[0] != next_entry or entry_ids[-1] > last:
            found = f"entries {entry_ids[0]} to {entry_ids[-1]}" if len(entry_ids) else "no entries"
            raise DamagedSegmentError(
                f"row group {row_group} of {url} has {found}, where {next_entry} to {last} are expected", url=url
            )
        begin = int(bounds[0])
        relative = array("I", (bounds[1:] - begin).astype(np.uint32).tobytes())
        group = EntryGroup(footer.metadata.ledger_id, next_entry, relative, entries[begin : int(bounds[-1])])
        try:
            group.verify()
        except (DigestMismatchError, MalformedGroupError) as error:
            raise DamagedSegmentError(f"row group {row_group} of {url}: {error.args[0]}", url=url) from error
        next_entry = group.last_entry_id + 1
        yield group
    if next_entry <= last:
        raise DamagedSegmentError(f"row group {row_group} of {url} ends before entry {next_entry}, and {last} is its last", url=url)


def load_row_group(url: str, footer: Footer, row_group: int, start: int, data: Buffer) -> tuple[EntryGroup, ...]:
    """Return the same pieces for a cache, in memory that returns to the system when a piece is dropped.

    In the heap they would lie between small long-lived objects, and a broker that once served many readers would stay large.
    """
    return tuple(map(_in_own_pages, decode_row_group(url, footer, row_group, start, data)))


def _in_own_pages(group: EntryGroup) -> EntryGroup:
    pages = own_pages(group.size_bytes)
    pages[:] = memoryview(group.data)
    return EntryGroup(group.ledger_id, group.first_entry_id, group.ends, pages)


def check_row_group(url: str, footer: Footer, row_group: int, start: int, data: Buffer, crc: int) -> tuple[int, int]:
    """Check the bytes of a whole row group, and its entries. Returns their payload bytes, and `crc` continued over the digests."""
    if crc32c(data) != footer.metadata.row_group_crc32c[row_group]:
        raise DamagedSegmentError(f"the bytes of row group {row_group} of {url} were changed", url=url)
    entry_bytes = 0
    for group in decode_row_group(url, footer, row_group, start, data):
        ends = np.asarray(group.ends, np.int64)
        starts = np.concatenate(([0], ends[:-1]))
        digests = np.frombuffer(group.data, np.uint8)[(starts + HEADER_BYTES - 4)[:, None] + np.arange(4)]
        crc = crc32c(digests.tobytes(), crc)
        entry_bytes += len(group.data) - HEADER_BYTES * len(ends)
    return entry_bytes, crc


def _batches(url: str, footer: Footer, row_group: int, start: int, data: Buffer) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a row group, in the columns that entries consist of, a few at a time."""
    columns = footer.raw_columns(row_group)
    names = [footer.parquet.schema.column(index).path for index in columns]
    group = footer.parquet.row_group(row_group)
    size_bytes = sum(group.column(index).total_uncompressed_size for index in columns)
    rows = max(1, group.num_rows * PIECE_BYTES // max(size_bytes, 1))
    try:
        file = pq.ParquetFile(
            pa.PythonFile(_Sparse(start, data, footer.object_bytes), mode="r"),
            metadata=footer.parquet,
            page_checksum_verification=True,
            pre_buffer=False,
        )
        yield from file.iter_batches(batch_size=rows, row_groups=[row_group], columns=names, use_threads=False)
    except (MemoryError, pa.ArrowMemoryError, GeneratorExit):
        raise
    except Exception as error:
        raise DamagedSegmentError(f"row group {row_group} of {url} cannot be read: {error}", url=url) from error


def _whole_entries(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Yield the same rows, cut where an entry begins, since a batch of messages has many rows."""
    waiting: list[pa.RecordBatch] = []
    for batch in batches:
        if not batch.num_rows:
            continue
        ids = _entry_ids(batch.column(0))
        begin = int(np.searchsorted(ids, ids[-1]))  # damage may have them in any order: then a later check fails
        if begin == 0 and (not waiting or waiting[-1].column(0)[-1].as_py() == ids[0]):
            waiting.append(batch)
            continue
        yield pa.Table.from_batches([*waiting, batch.slice(0, begin)] if begin else waiting)
        waiting = [batch.slice(begin)]
    if waiting:
        yield pa.Table.from_batches(waiting)


def raw_columns(metadata: SegmentMetadata, row_group: Any) -> range:
    """Return the columns that entries of a row group consist of: without `value` if no entry continues in it."""
    if metadata.version < SHARED_VALUES_SINCE:
        return range(2)
    follows = row_group.column(2).statistics
    none = follows is not None and follows.has_min_max and follows.max is False
    return range(2) if none else range(RAW_COLUMNS)


def stored_entries(table: pa.Table) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], memoryview]:
    """The entries in rows of the columns that `raw_columns` names: their ids, without gaps, and where they begin and end in the
    bytes that are returned, one after the other. Raises ValueError."""
    columns = [_one_chunk(column) for column in table.columns]
    row_ids = _entry_ids(columns[0])
    if not len(row_ids):
        return np.empty(0, np.int64), np.zeros(1, np.int64), memoryview(b"")
    steps = np.diff(row_ids)
    if ((steps != 0) & (steps != 1)).any():
        raise ValueError("its entries are not in order")
    raw = columns[1]
    if len(columns) == RAW_COLUMNS:
        follows, value = columns[2:]
        if follows.false_count or follows.null_count:
            value = pc.if_else(follows, value, _NOTHING)
        raw = pc.binary_join_element_wise(raw, value, _NOTHING, null_handling="replace", null_replacement=b"")
    _, offsets, values = raw.buffers()
    bounds = np.frombuffer(offsets, np.int32)[raw.offset : raw.offset + len(raw) + 1].astype(np.int64)
    starts = np.flatnonzero(np.concatenate(([True], steps != 0)))
    data = memoryview(b"") if values is None else memoryview(values).cast("B")
    return row_ids[starts], np.append(bounds[starts], bounds[-1]), data


def _entry_ids(column: pa.Array) -> npt.NDArray[np.int64]:
    """Return the values of a column of entry ids, or -1 for each row if it is not one.

    Its `to_numpy` would import pandas where that is installed, which takes 37 MB.
    """
    if not len(column) or column.null_count or column.type != pa.int64():
        return np.full(len(column), -1, np.int64)
    return np.frombuffer(column.buffers()[1], np.int64, len(column), 8 * column.offset)


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _range(column: Any) -> tuple[int, int]:
    start = column.data_page_offset
    if column.has_dictionary_page and column.dictionary_page_offset is not None:
        start = min(start, column.dictionary_page_offset)
    return start, start + column.total_compressed_size


def cut(groups: Sequence[EntryGroup], first: int, last: int, max_bytes: int) -> Iterator[EntryGroup]:
    """Yield entries from `first` to at most `last` out of consecutive groups: about `max_bytes`, at least one entry."""
    left = max_bytes
    for group in groups:
        if group.last_entry_id < first:
            continue
        begin = max(first, group.first_entry_id)
        end = min(last, group.last_entry_id)
        if begin > end or (left <= 0 and begin > first):
            return
        place = begin - group.first_entry_id
        base = group.ends[place - 1] if place else 0
        fitting = bisect_right(group.ends, base + left) - place
        end = min(end, begin + max(fitting, 1 if begin == first else 0) - 1)
        if end < begin:
            return
        part = group.slice(begin, end)
        left -= part.size_bytes
        if part is not group and 2 * part.size_bytes < group.size_bytes:
            # A small part would keep the whole group in memory for as long as its reader keeps it.
            part = EntryGroup(part.ledger_id, part.first_entry_id, part.ends, bytes(part.data))
        yield part
        if end < group.last_entry_id:
            return


class _Sparse:
    """A file of which only one range is in memory, as pyarrow reads nothing else."""

    def __init__(self, start: int, data: Buffer, size_bytes: int) -> None:
        self._start = start
        self._data = memoryview(data)
        self._size_bytes = size_bytes
        self._at = 0
        self.closed = False

    def read(self, count: int = -1) -> memoryview:
        begin = self._at - self._start
        end = self._size_bytes - self._start if count < 0 else begin + count
        if begin < 0 or end > len(self._data):
            raise OSError(f"bytes {self._at} to {self._start + end} are outside of what was read")
        self._at = self._start + end
        return self._data[begin:end]

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size_bytes)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True
