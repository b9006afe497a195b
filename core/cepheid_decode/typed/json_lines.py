"""Decodes JSON values of one schema with pyarrow.json: all in one text, one per line, into the columns of the schema.

    values ──► lines of about two megabytes ──► pyarrow.json ──► columns
                      └─ rejected: in halves, down to a few rows, which are left

pyarrow's parser ignores lines: it reads one object after the other. That each line resulted in exactly one row follows from this:
every line starts with `{` and ends with `}`; a text cannot contain a line feed, so none continues on the next line; and after the
end of a line, a parser that is still inside an object or array does not accept a `{`. So each line is at least one whole object;
and if there are as many rows as lines, exactly one.

It differs from JSON in accepting NaN and Infinity as numbers, as json_record.py does; it does not check for UTF-8, which is done
before. A row that it rejects (a duplicate field, 1.0 as int, times as text …) may still be valid for json_record.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pa_json

from cepheid_decode.typed.arrow_types import MAX_DAYS, MAX_MICROS, MIN_DAYS, MIN_MICROS, arrow_type, list_of
from cepheid_decode.typed.avro_schema import Array, Enum, Fixed, Logical, Node, Primitive, Record, Union, choices
from cepheid_decode.typed.records import value_span

CHUNK_BYTES = 2 << 20  # for smaller ones, starting the parser takes long; for larger ones, an unusual row costs more
MIN_ROWS = 64  # for fewer, one by one takes less time than starting the parser
RETRY_FACTOR = 8  # of a chunk's bytes: the limit for parsing again to find its unusual rows

Rows = npt.NDArray[np.intp]


class NoJsonLinesError(Exception):
    """The schema has a part that pyarrow.json cannot read."""


@dataclass(frozen=True, slots=True)
class _Column:
    """The type that the parser returns, and a function that makes the column of it (ArrowInvalid: a value does not fit)."""

    parsed: pa.DataType
    finish: Callable[[pa.Array], pa.Array]


class JsonLines:
    def __init__(self, record: Record, names: Collection[str] | None) -> None:
        """`names`: the needed fields; others are null in the result. Raises NoJsonLinesError."""
        self._type = arrow_type(record)
        wanted = [field for field in record.fields if names is None or field.name in names] or record.fields[:1]
        self._columns = {field.name: _column(field.node) for field in wanted}
        schema = pa.schema([pa.field(name, column.parsed) for name, column in self._columns.items()])
        self._options = pa_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")

    def decode(self, values: pa.BinaryArray) -> tuple[pa.StructArray, Rows]:
        """Return the records, and the rows that are left, in ascending order."""
        data, starts, ends = value_span(values)
        is_object = (ends - starts >= 2) & _has(data, starts, "{") & _has(data, ends - 1, "}")
        rows = np.flatnonzero(is_object)
        lines = values if len(rows) == len(values) else values.take(pa.array(rows))
        parts: list[pa.StructArray] = []
        left: list[int] = []
        for first, last in _chunks((ends - starts)[rows]):
            budget = [RETRY_FACTOR * int((ends - starts)[rows[first:last]].sum())]
            self._parse(lines[first:last], first, parts, left, budget)
        found = pa.concat_arrays(parts) if parts else pa.nulls(0, self._type)
        if len(rows) == len(values):
            return found, np.array(left, np.intp)
        places = np.full(len(values), -1)
        places[rows] = np.arange(len(rows))
        others = np.flatnonzero(~is_object)
        return found.take(pa.array(places, mask=places < 0)), np.sort(np.concatenate([rows[np.array(left, np.intp)], others]))

    def _parse(self, lines: pa.BinaryArray, first: int, parts: list[pa.StructArray], left: list[int], budget: list[int]) -> None:
        """Append the rows of `lines` to `parts`, null if they are `left`. `budget`: bytes that may still be parsed."""
        budget[0] -= lines.nbytes
        if budget[0] >= 0 and len(lines) >= MIN_ROWS:
            try:
                parts.append(self._records(lines))
                return
            except (pa.ArrowInvalid, UnicodeDecodeError):
                half = len(lines) // 2
                self._parse(lines[:half], first, parts, left, budget)
                self._parse(lines[half:], first + half, parts, left, budget)
                return
        parts.append(pa.nulls(len(lines), self._type))
        left.extend(range(first, first + len(lines)))

    def _records(self, lines: pa.BinaryArray) -> pa.StructArray:
        """Raises ArrowInvalid."""
        text = pc.binary_join(pa.ListArray.from_arrays(pa.array([0, len(lines)], pa.int32()), lines), b"\n")
        text.cast(pa.string())  # is it UTF-8?
        size = text.nbytes
        options = pa_json.ReadOptions(use_threads=False, block_size=size + 1)
        table = pa_json.read_json(pa.BufferReader(text.buffers()[2]), options, self._options)
        if table.num_rows != len(lines):
            raise pa.ArrowInvalid(f"{table.num_rows} objects in {len(lines)} lines")
        children = []
        for field in self._type:
            column = self._columns.get(field.name)
            if column is None:
                children.append(pa.nulls(len(lines), field.type))
            else:
                children.append(column.finish(pa.concat_arrays(table.column(field.name).chunks)))
        return pa.StructArray.from_arrays(children, fields=list(self._type))


def _has(data: npt.NDArray[np.uint8], places: npt.NDArray[np.int64], character: str) -> npt.NDArray[np.bool_]:
    if not len(data):
        return np.zeros(len(places), np.bool_)
    found: npt.NDArray[np.bool_] = data.take(places, mode="clip") == ord(character)
    return found


def _chunks(sizes: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return ranges of rows of about CHUNK_BYTES each."""
    if not len(sizes):
        return []
    ends = np.cumsum(sizes)
    cuts = np.unique(np.searchsorted(ends, np.arange(CHUNK_BYTES, ends[-1], CHUNK_BYTES), side="right"))
    edges = [0, *(int(cut) for cut in cuts if 0 < cut < len(sizes)), len(sizes)]
    return list(itertools.pairwise(edges))


def _column(node: Node) -> _Column:
    """Supports nested records, and lists of types without a `finish`."""
    match node:
        case Primitive("null") | Primitive(is_number=True):
            raise NoJsonLinesError
        case Primitive(_, logical) | Fixed(logical=logical):
            return _scalar(logical, arrow_type(node))
        case Enum():
            return _Column(pa.string(), _as_is)
        case Union() if len(choices(node)) == 1:
            return _column(choices(node)[0])
        case Array(items):
            inner = _column(items)
            if inner.finish is _as_is:
                return _Column(list_of(inner.parsed), _as_is)
        case Record():
            return _record(node)
    raise NoJsonLinesError


def _as_is(array: pa.Array) -> pa.Array:
    return array


def _scalar(logical: Logical | None, kind: pa.DataType) -> _Column:
    if logical is None or not (pa.types.is_temporal(kind) or pa.types.is_decimal(kind)):
        return _Column(kind, _as_is)
    if pa.types.is_decimal(kind):
        raise NoJsonLinesError  # its digits would be converted to a double
    if pa.types.is_date32(kind):
        return _Column(pa.int32(), lambda array: _within(array, MIN_DAYS, MAX_DAYS).cast(kind))
    unit = logical.name.rpartition("-")[2]
    if unit == "millis":
        return _Column(pa.int64(), lambda array: _within(pc.multiply_checked(array, 1000), MIN_MICROS, MAX_MICROS).cast(kind))
    if unit == "micros":
        return _Column(pa.int64(), lambda array: _within(array, MIN_MICROS, MAX_MICROS).cast(kind))
    raise NoJsonLinesError


def _within(numbers: pa.Array, first: int, last: int) -> pa.Array:
    """Return the same array. Raises ArrowInvalid if a number is outside the allowed years."""
    found = pc.min_max(numbers).as_py()
    if found["min"] is not None and (found["min"] < first or found["max"] > last):
        raise pa.ArrowInvalid("a time outside the years 1 to 9999")
    return numbers


def _record(node: Record) -> _Column:
    try:
        columns = [(field.name, _column(field.node)) for field in node.fields]
    except RecursionError:  # a recursive record
        raise NoJsonLinesError from None
    if not columns:
        raise NoJsonLinesError
    parsed = pa.struct([pa.field(name, column.parsed) for name, column in columns])
    if all(column.finish is _as_is for _, column in columns):
        return _Column(parsed, _as_is)
    kind = [pa.field(field.name, arrow_type(field.node)) for field in node.fields]

    def finish(array: pa.Array) -> pa.Array:
        children = [column.finish(child) for (_, column), child in zip(columns, array.flatten(), strict=True)]
        return pa.StructArray.from_arrays(children, fields=kind, mask=array.is_null())

    return _Column(parsed, finish)
