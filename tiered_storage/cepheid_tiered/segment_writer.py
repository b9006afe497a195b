"""Convert entries into the bytes of a Parquet file, without I/O and in bounded memory.

groups ──► ≤ 4 MiB of whole entries ──► buffers of about 1 MiB ──► decoder ──► rows ─┐
                                                  │                                ├─► row group ──► bytes
                                                  └─ what is not in `value` ───────┘
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from crc32c import crc32c

from cepheid_decode import OnBadRecord, Piece, ReadMode, ScanCounters, ScanSpec, SchemaVersion
from cepheid_decode.decode_columns import DecodedMessages
from cepheid_decode.decode_gather import gather
from cepheid_decode.decode_payloads import joined
from cepheid_decode.message_decoder import MessageDecoder
from cepheid_decode.typed import TypedColumns
from cepheid_rpc import HEADER_BYTES, EntryGroup
from cepheid_tiered import segment_format as layout
from cepheid_tiered.segment import SegmentSummary
from cepheid_wire import TopicName

_BUFFER_BYTES = 1 << 20
_DIGEST_OFFSET = HEADER_BYTES - 4
Ints = npt.NDArray[np.int64]


class SegmentWriter:
    """Writes one segment. `add` groups in order from entry 0, then `finish`; both return the next bytes of the file. Not
    thread-safe."""

    def __init__(self, topic: TopicName, ledger_id: int, schemas: Sequence[SchemaVersion] = (), cluster: str = "") -> None:
        self._topic = topic
        self._ledger_id = ledger_id
        self._cluster = cluster
        self._schemas = tuple(schemas)
        self._typed_fields = layout.typed_fields_of(schemas)
        self._typed: TypedColumns | None = None
        if self._typed_fields:
            self._typed = TypedColumns(schemas, None, OnBadRecord.NULL, ScanCounters())
        self._schema = layout.file_schema(self._typed_fields)
        self._sink = _Sink()
        self._file: pq.ParquetWriter | None = None
        self._decoder = MessageDecoder(_spec(), ScanCounters(), lambda _piece, _count: iter(()))
        self._piece = Piece(str(topic), topic.partition_index, ledger_id, 0, (1 << 62), 1, 1, ())
        self._row_group_crcs: list[int] = []
        self._waiting: list[EntryGroup] = []
        self._waiting_bytes = 0
        self._batches: list[pa.RecordBatch] = []  # rows of the current row group
        self._unpacked_bytes = 0
        self._row_group_bytes = 0  # of entries, those that wait as well
        self._next_entry = 0
        self._entries = self._messages = self._entry_bytes = self._crc = self._raw_only = self._errors = 0

    def add(self, groups: Sequence[EntryGroup]) -> list[bytes]:
        for group in groups:
            if group.ledger_id != self._ledger_id or group.first_entry_id != self._next_entry:
                expected = f"{self._ledger_id}:{self._next_entry}"
                raise ValueError(f"entries of a segment come in order: {expected} was expected, got {group!r}")
            self._next_entry = group.last_entry_id + 1
            for part in self._fitting(group):
                self._waiting.append(part)
                self._waiting_bytes += part.size_bytes
                self._row_group_bytes += part.size_bytes
                if self._waiting_bytes >= _BUFFER_BYTES:
                    self._decode_waiting()
        return self._sink.take()

    def finish(self) -> tuple[list[bytes], SegmentSummary]:
        self._write_row_group()
        metadata = layout.SegmentMetadata(
            topic=str(self._topic),
            ledger_id=self._ledger_id,
            entries=self._entries,
            messages=self._messages,
            entry_bytes=self._entry_bytes,
            crc32c=self._crc,
            cluster=self._cluster,
            schema_versions=tuple(schema.version.hex() for schema in self._schemas),
            typed_columns=tuple(field.name for field in self._typed_fields),
            raw_only=self._raw_only,
            errors=self._errors,
            row_group_crc32c=tuple(self._row_group_crcs),
        )
        file = self._opened(self._schema.empty_table())
        file.add_key_value_metadata(metadata.to_pairs())
        parts = self._sink.take()
        file.close()
        footer = b"".join(self._sink.take())
        guard = layout.guard_of(footer)
        object_bytes = self._sink.size_bytes + len(guard)
        summary = SegmentSummary(self._entries, self._messages, self._entry_bytes, object_bytes, self._crc)
        return [*parts, guard, footer], summary

    def _fitting(self, group: EntryGroup) -> Iterator[EntryGroup]:
        """Yield the group in pieces that fit into the current row group, and write full row groups between them."""
        while True:
            room = layout.ROW_GROUP_ENTRY_BYTES - self._row_group_bytes
            if group.size_bytes <= room:
                yield group
                return
            count = bisect_right(group.ends, room)
            if not count and not self._row_group_bytes:
                count = 1  # an entry larger than a row group is one of its own
            if count:
                last = group.first_entry_id + count - 1
                yield group.slice(group.first_entry_id, last)
                if count == len(group):
                    return
                group = group.slice(last + 1, group.last_entry_id)
            self._write_row_group()

    def _decode_waiting(self) -> None:
        """Convert waiting entries into rows, a few at a time, while more entries arrive."""
        if not self._waiting:
            return
        some = _one_buffer(self._waiting)
        self._waiting, self._waiting_bytes = [], 0
        self._count(some)
        rows = _Rows(some, self._topic, self._columns_of_nothing)
        for messages in self._decoder.decode_messages(self._piece, [some]):
            first = self._take(messages, rows)
            if first is None:
                continue
            # Decompressed entries may be much larger than stored ones: a row group then ends early, at an entry.
            if self._unpacked_bytes > layout.ROW_GROUP_UNPACKED_BYTES and first > rows.last_entry:
                self._write_batches()
            columns = self._columns(messages)
            places = messages.column("entry_id").to_numpy(), messages.value_places()
            self._batches.append(rows.batch(*places, columns, self._schema))
            self._unpacked_bytes += columns["value"].nbytes
            self._messages += len(messages)
        if (rest := rows.rest(self._schema)) is not None:
            self._batches.append(rest)
        self._raw_only += rows.raw_only
        self._errors += len(rows.reasons)

    def _write_row_group(self) -> None:
        self._decode_waiting()
        self._row_group_bytes = 0
        if self._batches:
            self._write_batches()

    def _take(self, messages: DecodedMessages, rows: _Rows) -> int | None:
        """Drop rows of entries that could not be decoded, which become raw only. Return the first entry that has a row."""
        bad = messages.undecoded()
        if bad is not None:
            mask, reasons = bad
            rows.reasons |= reasons
            messages.keep(~mask)
        return messages.column("entry_id")[0].as_py() if len(messages) else None

    def _write_batches(self) -> None:
        table = pa.Table.from_batches(self._batches, self._schema)
        self._batches, self._unpacked_bytes = [], 0
        file = self._opened(table)
        before = self._sink.mark()
        file.write_table(table, row_group_size=max(len(table), 1))
        self._row_group_crcs.append(self._sink.crc_since(before))

    def _opened(self, sample: pa.Table) -> pq.ParquetWriter:
        """Return the file, opened with the first rows, which determine how columns are encoded."""
        if self._file is None:
            options = layout.writer_options(self._schema, self._typed_fields, sample)
            self._file = pq.ParquetWriter(pa.PythonFile(self._sink, mode="w"), self._schema, **options)
        return self._file

    def _columns(self, messages: DecodedMessages) -> dict[str, pa.Array]:
        """Return the columns of messages by name: those of the layout that come from messages, and the typed ones."""
        columns = {name: messages.column(name) for name in layout.FROM_DECODER}
        for name in ("publish_time", "event_time"):
            columns[name] = columns[name].cast(layout.COLUMNS[name])
        key_bytes, key = columns["key_bytes"], columns["key"].cast(pa.binary())
        if key_bytes.equals(key):
            columns["key_bytes"] = pa.nulls(len(key), pa.binary())
        else:
            shown = pc.fill_null(pc.equal(key_bytes, key), False)
            columns["key_bytes"] = pc.if_else(shown, pa.scalar(None, pa.binary()), key_bytes)
        errors = [text for text in (messages.errors(),) if text is not None]
        if self._typed is not None:
            typed = self._typed.columns(messages.readable_values(), key_bytes, messages.version_codes, messages.versions)
            columns |= {_typed_name(field): array for field, array in zip(self._typed_fields, typed.arrays, strict=True)}
            if typed.errors is not None:
                errors.append(typed.errors)
        if errors:
            columns[layout.ERROR] = pc.coalesce(*errors)
            self._errors += len(messages) - columns[layout.ERROR].null_count
        else:
            columns[layout.ERROR] = pa.nulls(len(messages), pa.string())
        return columns

    def _columns_of_nothing(self, count: int) -> dict[str, pa.Array]:
        names = {name: layout.COLUMNS[name] for name in (*layout.FROM_DECODER, layout.ERROR)}
        names |= {_typed_name(field): field.type for field in self._typed_fields}
        return {name: pa.nulls(count, kind) for name, kind in names.items()}

    def _count(self, group: EntryGroup) -> None:
        ends = np.asarray(group.ends, np.int64)
        starts = np.concatenate(([0], ends[:-1]))
        data = np.frombuffer(group.data, np.uint8)
        digests = data[(starts + _DIGEST_OFFSET)[:, None] + np.arange(4)]
        self._crc = crc32c(digests.tobytes(), self._crc)
        self._entries += len(ends)
        self._entry_bytes += int(ends[-1]) - HEADER_BYTES * len(ends)


class _Rows:
    """Rows of one buffer of entries, created in order. They contain all its bytes, including entries without a message."""

    def __init__(self, group: EntryGroup, topic: TopicName, columns_of_nothing: Callable[[int], dict[str, pa.Array]]) -> None:
        self._first_id = group.first_entry_id
        self._group_last = group.last_entry_id
        self._bounds = np.concatenate(([0], np.asarray(group.ends, np.int64)))
        self._data = np.frombuffer(group.data, np.uint8)
        self._constants = {"topic": str(topic), "partition": topic.partition_index, "ledger_id": group.ledger_id}
        self._columns_of_nothing = columns_of_nothing
        self.last_entry = self._first_id - 1  # the last one that has a row
        self.reasons: dict[int, str] = {}  # by entry id: why it has no message, where it should have one
        self.raw_only = 0

    def batch(
        self, entry_ids: Ints, value_places: tuple[Ints, Ints], columns: dict[str, pa.Array], schema: pa.Schema
    ) -> pa.RecordBatch:
        """Return rows of messages in the entries `entry_ids`, and of entries without a message before the last of them."""
        starts, ends = value_places
        between = np.ones(max(int(entry_ids[-1]) - self.last_entry, 0), bool)
        between[entry_ids[entry_ids > self.last_entry] - self.last_entry - 1] = False
        missing = np.flatnonzero(between) + self.last_entry + 1
        if len(missing):
            order = np.argsort(np.concatenate((entry_ids, missing)), kind="stable")
            alone = self._without_message(missing)
            columns = {
                name: pa.concat_arrays((column, alone[name].cast(column.type))).take(pa.array(order))
                for name, column in columns.items()
            }
            entry_ids = np.concatenate((entry_ids, missing))[order]
            nowhere = np.full(len(missing), -1)
            starts, ends = (np.concatenate((places, nowhere))[order] for places in (starts, ends))
        return self._assemble(entry_ids, starts, ends, columns, schema)

    def rest(self, schema: pa.Schema) -> pa.RecordBatch | None:
        """Return rows of the entries after the last one that has a row."""
        missing = np.arange(self.last_entry + 1, self._group_last + 1)
        nowhere = np.full(len(missing), -1)
        return self._assemble(missing, nowhere, nowhere, self._without_message(missing), schema) if len(missing) else None

    def _without_message(self, entry_ids: Ints) -> dict[str, pa.Array]:
        self.raw_only += len(entry_ids)
        columns = self._columns_of_nothing(len(entry_ids))
        if self.reasons:
            columns[layout.ERROR] = pa.array([self.reasons.get(entry) for entry in entry_ids.tolist()], pa.string())
        return columns

    def _assemble(
        self, entry_ids: Ints, starts: Ints, ends: Ints, columns: dict[str, pa.Array], schema: pa.Schema
    ) -> pa.RecordBatch:
        count = len(entry_ids)
        raw, follows = self._raw(entry_ids, starts, ends)
        own = {"entry_id": pa.array(entry_ids, pa.int64()), "raw_entry": raw, "value_follows": pa.array(follows), **columns}
        for name, value in self._constants.items():
            own[name] = pa.repeat(pa.scalar(value, layout.COLUMNS[name]), count)
        typed = [name for name in columns if name not in layout.COLUMNS]
        self.last_entry = int(entry_ids[-1])
        return pa.RecordBatch.from_arrays([own[name] for name in (*layout.COLUMNS, *typed)], schema=schema)

    def _raw(self, entry_ids: Ints, starts: Ints, ends: Ints) -> tuple[pa.BinaryArray, npt.NDArray[np.bool_]]:
        """Return the columns `raw_entry` and `value_follows` of rows with values at `starts` to `ends`, -1 for no value."""
        is_first = np.empty(len(entry_ids), bool)
        is_first[0] = entry_ids[0] != self.last_entry
        is_first[1:] = entry_ids[1:] != entry_ids[:-1]
        is_last = np.ones(len(entry_ids), bool)
        is_last[:-1] = entry_ids[1:] != entry_ids[:-1]
        places = entry_ids - self._first_id
        entry_starts, entry_ends = self._bounds[places], self._bounds[places + 1]
        # An entry ends with the value of its last row, and its values follow each other; otherwise it is kept as a whole.
        begins = entry_starts.copy()
        begins[1:][~is_first[1:]] = ends[:-1][~is_first[1:]]
        fits = (begins <= starts) & (starts <= ends) & (ends <= entry_ends) & (~is_last | (ends == entry_ends))
        fits[0] &= is_first[0]  # the first rows of the entry are in the batch before
        heads = np.flatnonzero(is_first | (np.arange(len(entry_ids)) == 0))
        follows = np.repeat(np.logical_and.reduceat(fits, heads), np.diff(np.append(heads, len(entry_ids))))
        stops = np.where(follows, starts, entry_ends)
        return gather(self._data, np.where(follows, begins, entry_starts), stops, follows | is_first), follows


class _Sink:
    """A write-only file with the bytes written since the last `take`."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self.size_bytes = 0
        self.closed = False

    def write(self, data: bytes) -> int:
        self._parts.append(bytes(data))
        self.size_bytes += len(data)
        return len(data)

    def tell(self) -> int:
        return self.size_bytes

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    def mark(self) -> int:
        return len(self._parts)

    def crc_since(self, mark: int) -> int:
        """Return the CRC of the bytes written since `mark` returned, with no `take` in between."""
        crc = 0
        for part in self._parts[mark:]:
            crc = crc32c(part, crc)
        return int(crc)

    def take(self) -> list[bytes]:
        parts, self._parts = self._parts, []
        return parts


def _spec() -> ScanSpec:
    return ScanSpec(ReadMode.MESSAGES, ("entry_id", *layout.FROM_DECODER), on_bad_record=OnBadRecord.NULL)


def _typed_name(field: pa.Field) -> str:
    """Return a key that no column of the layout has, since users choose the names of fields."""
    return f"typed:{field.name}"


def _one_buffer(groups: Sequence[EntryGroup]) -> EntryGroup:
    """Join adjacent groups in a buffer with the padding that the decoder needs, so that it does not copy the bytes again."""
    sizes = np.array([group.size_bytes for group in groups], np.int64)
    bases = np.cumsum(sizes) - sizes
    ends = np.concatenate([np.asarray(group.ends, np.int64) + base for group, base in zip(groups, bases, strict=True)])
    data = joined([group.data for group in groups])
    first = groups[0]
    return EntryGroup(
        first.ledger_id,
        first.first_entry_id,
        array("I", ends.astype(np.uint32).tobytes()),
        memoryview(data)[: int(ends[-1])],  # type: ignore[arg-type]
    )
