"""Converts rows to messages, without I/O: roles of columns, the order of rows, and the parts of each message.

plan_rows(schema) ──► RowPlan          on the driver: a column or a type that cannot be written is an error before any task runs
RowPlan.in_order(table) ──► table      in a task: an order that depends only on the rows, so that a repeated task has the same
RowPlan.messages(batch) ──► Messages   in a task: payloads, keys, … as lists, one item a row

There are two kinds of rows. *Raw* rows have a column `value` with the payload, or a value of the topic's primitive schema, and
columns for the other parts of a message.
*Records* have a column for each field of the topic's schema; names of the parts of a message then begin with two underscores, as in
typed rows of the source.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from cepheid_decode import BadOptionError
from cepheid_ports import CepheidError
from cepheid_spark.sink_values import VALUE_TYPES

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import DataType, StructType

Encoder = Callable[[Any], bytes]
"""Converts a record or a value from pyarrow's `to_pylist` to a payload. Raises ValueError, which says what does not fit."""

_TIMES = ("timestamp", "bigint")
_TYPES: Mapping[str, tuple[str, ...]] = {
    "value": ("binary", "string"),
    "key": ("string",),
    "topic": ("string",),
    "properties": ("map<string,string>",),
    "event_time": _TIMES,
    "deliver_at": _TIMES,
    "ordering_key": ("binary", "string"),
}
"""The parts of a message by the name of their column, and their accepted types."""

_OTHER_STYLE = {
    "__eventTime": "event_time",
    "__messageProperties": "properties",
    "__orderingKey": "ordering_key",
    "__deliverAt": "deliver_at",
}
"""Names of pulsar-spark, and names of that form."""

_ADVICE = {
    "key": "cast it to string (bytes: base64(key))",
    "event_time": "give a timestamp, or milliseconds since 1970 as bigint",
    "deliver_at": "give a timestamp, or milliseconds since 1970 as bigint",
    "properties": "give map<string,string>, such as map('lang', lang)",
    "value": "cast it, or leave the column out and give the fields of a record as columns",
}
_READ_ONLY = frozenset(
    {
        "publish_time", "partition", "ledger_id", "entry_id", "batch_index", "producer_name", "sequence_id", "message_id",
        "schema_version", "replicated_from", "key_bytes", "_error", "messageId", "publishTime",
    }
)  # fmt: skip
"""Columns that the source shows but only the cluster sets."""


class SinkRowError(CepheidError):
    """A row cannot become a message. Nothing after it in its task's part of the write is sent."""

    hint: ClassVar[str] = "correct or filter the row; rows before it may be stored"


@dataclass(frozen=True, slots=True)
class Messages:
    """The messages of some rows, in order. A list that is None has no values. Times are ms since 1970."""

    payloads: Sequence[bytes | None]
    topics: Sequence[str] | None
    keys: Sequence[str | None] | None
    ordering_keys: Sequence[bytes | None] | None
    properties: Sequence[Mapping[str, str] | None] | None
    event_times: Sequence[int | None] | None
    deliver_at: Sequence[int | None] | None

    def __len__(self) -> int:
        return len(self.payloads)


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Roles of columns. `parts`: columns by part of the message. `fields`: columns of the record; none for raw rows, whose column
    `value` has the type `value_type`.
    """

    parts: Mapping[str, int]
    fields: tuple[int, ...] = ()
    value_type: str = ""

    @property
    def has_records(self) -> bool:
        return bool(self.fields)

    def in_order(self, table: pa.Table) -> pa.Table:
        """Return the rows sorted: by topic, then event time, then everything else.

        Equal rows are equal messages, so their order does not matter. Sorting uses the original rows,
        not payloads, whose order would change with the schema between two attempts.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        table = table.cast(pa.schema([field.with_type(_without_limit(field.type)) for field in table.schema]))
        leading = [self.parts[name] for name in ("topic", "event_time") if name in self.parts]
        columns = [*leading, *(index for index in range(table.num_columns) if index not in leading)]
        keys = pa.table({str(rank): _sortable(table.column(index)) for rank, index in enumerate(columns)})
        return table.take(pc.sort_indices(keys, [(name, "ascending") for name in keys.column_names]))

    def content(self, table: pa.Table) -> str:
        """Return a text that distinguishes these rows, in their order, from others: their number, sizes, and some of them."""
        import pyarrow as pa
        import pyarrow.compute as pc

        # The zone of times is that of the session: the query may continue in another one.
        is_time = [pa.types.is_timestamp(column.type) for column in table.columns]
        plain = [column.cast(pa.int64()) if timed else column for column, timed in zip(table.columns, is_time, strict=True)]
        table = pa.table(plain, table.column_names)
        sizes = [
            pc.sum(pc.binary_length(column)).as_py()
            for column in table.columns
            if pa.types.is_large_binary(column.type) or pa.types.is_large_string(column.type)
        ]
        samples = [table.slice(row, 1).to_pylist() for row in (0, table.num_rows // 2, table.num_rows - 1)]
        digest = hashlib.sha256(repr((sizes, _ordered(samples))).encode()).hexdigest()[:16]
        return f"{table.num_rows} rows, {digest}"

    def messages(self, batch: pa.RecordBatch, encode: Encoder | None, first_row: int = 0) -> Messages:
        """Return the messages of some rows. `first_row` is the number of the first one in its task, for errors.

        Raises SinkRowError.
        """
        keys = self._texts(batch, "key")
        payloads = self._payloads(batch, encode, first_row)
        for row, payload in enumerate(payloads):
            if payload is None and (keys is None or keys[row] is None):
                raise SinkRowError(
                    f"row {first_row + row} of its task has neither value nor key: a null value needs a key, whose value it deletes"
                )
        topics = self._texts(batch, "topic")
        if topics is not None:
            for row, topic in enumerate(topics):
                if not topic:
                    raise SinkRowError(f"row {first_row + row} of its task has no topic: the column topic is {topic!r}")
        return Messages(
            payloads,
            topics,  # type: ignore[arg-type]  # none is None, as just seen
            keys,
            self._bytes(batch, "ordering_key"),
            self._properties(batch, first_row),
            self._times(batch, "event_time", first_row),
            self._times(batch, "deliver_at", first_row),
        )

    def _payloads(self, batch: pa.RecordBatch, encode: Encoder | None, first_row: int) -> Sequence[bytes | None]:
        if encode is None:
            found = self._bytes(batch, "value")
            assert found is not None, "raw rows have a value"
            return found
        import pyarrow as pa

        if self.has_records:
            names = [batch.schema.field(index).name for index in self.fields]
            values = pa.RecordBatch.from_arrays([batch.column(index) for index in self.fields], names).to_pylist()
        else:
            values = batch.column(self.parts["value"]).to_pylist()
        payloads: list[bytes | None] = []
        for value in values:
            try:
                payloads.append(None if value is None else encode(value))
            except ValueError as error:
                raise SinkRowError(
                    f"row {first_row + len(payloads)} of its task does not fit the topic's schema: {error}"
                ) from None
        return payloads

    def _column(self, batch: pa.RecordBatch, part: str) -> pa.Array | None:
        return batch.column(self.parts[part]) if part in self.parts else None

    def _texts(self, batch: pa.RecordBatch, part: str) -> list[str | None] | None:
        column = self._column(batch, part)
        return None if column is None else column.to_pylist()

    def _bytes(self, batch: pa.RecordBatch, part: str) -> list[bytes | None] | None:
        import pyarrow as pa

        column = self._column(batch, part)
        if column is None:
            return None
        if pa.types.is_string(column.type):
            column = column.cast(pa.binary())
        elif pa.types.is_large_string(column.type):
            column = column.cast(pa.large_binary())
        return column.to_pylist()  # type: ignore[no-any-return]  # pyarrow has no types

    def _times(self, batch: pa.RecordBatch, part: str, first_row: int) -> list[int | None] | None:
        import pyarrow as pa
        import pyarrow.compute as pc

        column = self._column(batch, part)
        if column is None:
            return None
        if pa.types.is_timestamp(column.type):
            column = pc.divide(column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64()), 1000)
        times: list[int | None] = column.to_pylist()
        for row, at_ms in enumerate(times):
            if at_ms is not None and at_ms < 0:
                raise SinkRowError(f"row {first_row + row} of its task: {part} is before 1970 ({at_ms} ms)")
        return times

    def _properties(self, batch: pa.RecordBatch, first_row: int) -> list[Mapping[str, str] | None] | None:
        column = self._column(batch, "properties")
        if column is None:
            return None
        found: list[Mapping[str, str] | None] = []
        for row, pairs in enumerate(column.to_pylist()):
            properties = None if pairs is None else dict(sorted(pairs))
            if properties and None in properties.values():
                name = next(name for name, text in properties.items() if text is None)
                raise SinkRowError(f"row {first_row + row} of its task: the property {name!r} is null; a property is a text")
            found.append(properties)
        return found


def plan_rows(schema: StructType, *, has_topic: bool, encode: str | None) -> RowPlan:
    """Return the roles of columns. `has_topic`: the write has the option topic. Raises BadOptionError."""
    names = [field.name for field in schema.fields]
    has_records = encode is not None or "value" not in names
    parts: dict[str, int] = {}
    fields: list[int] = []
    unknown: list[str] = []
    for index, field in enumerate(schema.fields):
        part = _part_of(field.name, has_records=has_records)
        if part is not None:
            if part in parts:
                raise BadOptionError(
                    f"the columns {names[parts[part]]} and {field.name} are both the {part} of a message: drop one"
                )
            if part == "value" and has_topic:
                _check_value(field.dataType)
            else:
                _check_type(field.name, part, field.dataType)
            parts[part] = index
        elif has_records and not field.name.startswith("__"):
            fields.append(index)
        else:
            unknown.append(field.name)
    if unknown:
        raise BadOptionError(_of_unknown(unknown, has_records=has_records))
    if has_records and not fields:
        raise BadOptionError("there is nothing to write: give a column value, or the fields of a record as columns")
    if not has_topic and "topic" not in parts:
        name = "__topic" if has_records else "topic"
        raise BadOptionError(f"which topic? give the option topic, or a column {name} with a topic for each row", option="topic")
    if has_topic:
        parts.pop("topic", None)  # the option takes precedence, as with Kafka's sink
    value_type = "" if has_records else schema.fields[parts["value"]].dataType.simpleString()
    return RowPlan(parts, tuple(fields), value_type)


def _part_of(name: str, *, has_records: bool) -> str | None:
    if name in _OTHER_STYLE:
        return _OTHER_STYLE[name]
    bare = name.removeprefix("__")
    if has_records and bare == name:
        return None  # a field of the record, whatever its name
    return bare if bare in _TYPES and not (has_records and bare == "value") else None


def _check_type(name: str, part: str, given: DataType) -> None:
    if given.simpleString() not in _TYPES[part]:
        wanted = " or ".join(_TYPES[part])
        advice = f": {_ADVICE[part]}" if part in _ADVICE else ""
        raise BadOptionError(f"column {name} must be {wanted}, and is {given.simpleString()}{advice}", column=name)


def _check_value(given: DataType) -> None:
    """Check the type of a value: refuse types without a primitive schema.

    The topic's schema decides whether it is the right one.
    """
    if given.simpleString() not in VALUE_TYPES | {"binary"}:
        raise BadOptionError(
            f"column value is {given.simpleString()}, which is neither a payload (binary or string) nor a type of a primitive "
            f"schema: {_ADVICE['value']}",
            column="value",
        )


def _of_unknown(unknown: Sequence[str], *, has_records: bool) -> str:
    listed = ", ".join(unknown)
    if read_only := [name for name in unknown if name.removeprefix("__") in _READ_ONLY]:
        return f"columns that a write cannot set: {', '.join(read_only)}; drop them (df.drop({', '.join(map(repr, read_only))}))"
    known = [f"__{name}" if has_records else name for name in _TYPES if not (has_records and name == "value")]
    near = difflib.get_close_matches(unknown[0], known, n=1, cutoff=0.7)
    advice = f"did you mean {near[0]}?" if near else f"a message has {', '.join(known)}"
    more = "" if has_records else ". To write records with these fields give encode=avro or encode=json"
    return f"a message has no part for the column {listed}; {advice}{more}"


def _without_limit(kind: pa.DataType) -> pa.DataType:
    """Return the type with large offsets: Arrow's small strings have up to 2 GiB in all rows, which a task may exceed."""
    import pyarrow as pa

    if pa.types.is_string(kind):
        return pa.large_string()
    return pa.large_binary() if pa.types.is_binary(kind) else kind


def _sortable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return nested values as texts that distinguish any two; Arrow does not sort them."""
    import pyarrow as pa

    if not pa.types.is_nested(column.type):
        return column
    return pa.chunked_array([pa.array((_canonical(value) for value in column.to_pylist()), pa.large_string())])


def _canonical(value: Any) -> str | None:
    return None if value is None else repr(_ordered(value))


def _ordered(value: Any) -> Any:
    """Return a value in canonical order.

    Maps are lists of pairs in any order, so such a list is sorted. Structs are not tuples here.
    """
    if isinstance(value, dict):
        return {name: _ordered(inner) for name, inner in value.items()}
    if isinstance(value, list):
        inner = [_ordered(each) for each in value]
        return sorted(inner, key=repr) if _is_map(value) else inner
    return value


def _is_map(value: Iterable[Any]) -> bool:
    return all(isinstance(each, tuple) for each in value)
