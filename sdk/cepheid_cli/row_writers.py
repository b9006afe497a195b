"""Output formats of `cepheid read`: Arrow batches as lines or files.

json     one object per line; bytes as text if they are UTF-8, otherwise as base64 under the name `value_base64`
csv      a header, then one line per row; each column of bytes has a second one for bytes that are not UTF-8
parquet  the columns unchanged, zstd, row groups of about 64 MB
table    for reading: a line per row, cut to the terminal's width; control characters are shown, never sent

A writer takes batches of one schema; `close` ends the output and is not called after a failure.
"""

from __future__ import annotations

import base64
import csv
import io
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any, BinaryIO, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

ROWS_AT_ONCE = 1000  # as Python objects at the same time
ROW_GROUP_BYTES = 64 << 20
_WIDTHS_FROM_ROWS = 50
_MOST_COLUMN_WIDTH = 40
_BASE64 = "_base64"


class RowWriter(Protocol):
    def write(self, batch: pa.RecordBatch) -> None: ...

    def close(self) -> None: ...


def open_writer(kind: str, out: BinaryIO, schema: pa.Schema, *, width: int = 120) -> RowWriter:
    """Return the writer of a format (`kind`, listed above). `width`: of a table."""
    match kind:
        case "json":
            return JsonLines(out)
        case "csv":
            return CsvLines(out, schema)
        case "parquet":
            return ParquetRows(out, schema)
        case "table":
            return TableLines(out, schema, width)
    raise AssertionError(f"no writer for {kind}")


class JsonLines:
    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._encode = json.JSONEncoder(ensure_ascii=False, separators=(", ", ": "), allow_nan=False).encode

    def write(self, batch: pa.RecordBatch) -> None:
        for rows in _rows(batch):
            self._out.write("".join(f"{self._encode(_named(batch.schema.names, row))}\n" for row in rows).encode())
        self._out.flush()

    def close(self) -> None:
        self._out.flush()


class CsvLines:
    def __init__(self, out: BinaryIO, schema: pa.Schema) -> None:
        self._text = io.TextIOWrapper(out, encoding="utf-8", newline="", write_through=True)
        self._lines = csv.writer(self._text, lineterminator="\n")
        self._with_base64 = [_is_bytes(field.type) for field in schema]
        self._lines.writerow(
            [
                name
                for field, of_bytes in zip(schema, self._with_base64, strict=True)
                for name in ((field.name, field.name + _BASE64) if of_bytes else (field.name,))
            ]
        )

    def write(self, batch: pa.RecordBatch) -> None:
        for rows in _rows(batch):
            self._lines.writerows(self._cells(row) for row in rows)
        self._text.flush()

    def _cells(self, row: Sequence[Any]) -> list[Any]:
        cells: list[Any] = []
        for value, of_bytes in zip(row, self._with_base64, strict=True):
            if isinstance(value, bytes):
                cells += ["", _base64(value)]
            else:
                cells.append(_json(value) if isinstance(value, dict | list) else value)
                cells += [""] if of_bytes else []
        return cells

    def close(self) -> None:
        self._text.flush()
        self._text.detach()


class ParquetRows:
    def __init__(self, out: BinaryIO, schema: pa.Schema) -> None:
        self._writer = pq.ParquetWriter(out, schema, compression="zstd")
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0

    def write(self, batch: pa.RecordBatch) -> None:
        self._waiting.append(batch)
        self._waiting_bytes += batch.nbytes
        if self._waiting_bytes >= ROW_GROUP_BYTES:
            self._write_group()

    def close(self) -> None:
        if self._waiting:
            self._write_group()
        self._writer.close()

    def _write_group(self) -> None:
        self._writer.write_table(pa.Table.from_batches(self._waiting))
        self._waiting, self._waiting_bytes = [], 0


class TableLines:
    """A table whose column widths are those of the first rows; longer values are cut."""

    def __init__(self, out: BinaryIO, schema: pa.Schema, width: int) -> None:
        self._out = out
        self._width = width
        self._names = list(schema.names)
        self._right = [pa.types.is_integer(field.type) or pa.types.is_floating(field.type) for field in schema]
        self._widths: list[int] | None = None

    def write(self, batch: pa.RecordBatch) -> None:
        for rows in _rows(batch):
            cells = [[_shown(value) for value in row] for row in rows]
            if self._widths is None:
                self._widths = self._measure(cells[:_WIDTHS_FROM_ROWS])
                self._write_line(self._names)
            for line in cells:
                self._write_line(line)
        self._out.flush()

    def close(self) -> None:
        self._out.flush()

    def _measure(self, lines: Sequence[Sequence[str]]) -> list[int]:
        longest = [max(len(line[index]) for line in [self._names, *lines]) for index in range(len(self._names))]
        if sum(longest) + 2 * (len(longest) - 1) <= self._width:
            return longest
        return [min(width, _MOST_COLUMN_WIDTH) for width in longest[:-1]] + longest[-1:]

    def _write_line(self, cells: Sequence[str]) -> None:
        assert self._widths is not None
        padded = [
            _cut(cell, width).rjust(width) if right else _cut(cell, width).ljust(width)
            for cell, width, right in zip(cells, self._widths, self._right, strict=True)
        ]
        self._out.write(f"{_cut('  '.join(padded).rstrip(), self._width)}\n".encode())


def _rows(batch: pa.RecordBatch) -> Iterator[list[tuple[Any, ...]]]:
    """Yield rows of plain values in batches. Remaining bytes are not UTF-8."""
    plain = [_plain_values(field.type) for field in batch.schema]
    for start in range(0, batch.num_rows, ROWS_AT_ONCE):
        columns = batch.slice(start, ROWS_AT_ONCE).columns
        yield list(
            zip(
                *(
                    [None if value is None else convert(value) for value in column.to_pylist()] if convert else column.to_pylist()
                    for column, convert in zip(columns, plain, strict=True)
                ),
                strict=True,
            )
        )


def _plain_values(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """Return the conversion of a type's Python values to JSON values; bytes that are not UTF-8 stay. None: none is needed."""
    if _is_bytes(kind):
        return _text_or_bytes
    if pa.types.is_map(kind):
        inner = _plain_values(kind.item_type) or _same
        return lambda pairs: {str(key): None if item is None else inner(item) for key, item in pairs}
    if pa.types.is_struct(kind):
        fields = [(kind.field(index).name, _plain_values(kind.field(index).type) or _same) for index in range(kind.num_fields)]
        return lambda value: _named(*zip(*((name, _or_none(inner, value[name])) for name, inner in fields), strict=True))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        item = _plain_values(kind.value_type) or _same
        return lambda values: [_without_bytes(_or_none(item, value)) for value in values]
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_string(kind):
        return None
    return _scalar


def _named(names: Sequence[str], row: Sequence[Any]) -> dict[str, Any]:
    """Return a row by names; bytes get another name."""
    return {
        (name + _BASE64 if isinstance(value, bytes) else name): _without_bytes(value)
        for name, value in zip(names, row, strict=True)
    }


def _without_bytes(value: Any) -> Any:
    return _base64(value) if isinstance(value, bytes) else value


def _text_or_bytes(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _scalar(value: Any) -> Any:
    if isinstance(value, datetime):
        precision = "microseconds" if value.microsecond % 1000 else "milliseconds"
        return value.isoformat(timespec=precision).replace("+00:00", "Z")
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON cannot express such numbers
    return str(value) if isinstance(value, Decimal) else value


def _or_none(convert: Callable[[Any], Any], value: Any) -> Any:
    return None if value is None else convert(value)


def _same(value: Any) -> Any:
    return value


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind))


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(", ", ": "))


def _shown(value: Any) -> str:
    """Return text for a terminal: the content of a message must not move its cursor."""
    if value is None:
        return "-"
    if isinstance(value, bytes):
        return f"0x{value[:32].hex()}{'…' if len(value) > 32 else ''}"
    text = _json(value) if isinstance(value, dict | list) else str(value)
    return text if text.isprintable() else "".join(char if char.isprintable() else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode()


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: max(0, width - 1)]}…"


def terminal_width(default: int = 120) -> int:
    try:
        return os.get_terminal_size().columns or default  # 0: a terminal without a known size
    except OSError:
        return default
