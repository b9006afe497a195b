"""The formats of `cepheid read`, on batches as a scan gives them."""

from __future__ import annotations

import csv
import io
import json
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cepheid_cli.row_writers import ROWS_AT_ONCE, open_writer

AT = datetime(2026, 3, 1, 8, 0, 0, 123000, tzinfo=UTC)
NESTED = pa.struct({"a": pa.binary(), "b": pa.list_(pa.binary())})
MESSAGES = pa.RecordBatch.from_pydict(
    {
        "key": ["a", None, "c"],
        "value": [b"hello", b"\xff\x00", None],
        "entry_id": [1, 2, 3],
        "publish_time": [AT, AT, None],
        "properties": [[("x", "1")], [], None],
    },
    schema=pa.schema(
        {
            "key": pa.string(),
            "value": pa.binary(),
            "entry_id": pa.int64(),
            "publish_time": pa.timestamp("us", tz="UTC"),
            "properties": pa.map_(pa.string(), pa.string()),
        }
    ),
)


def written(kind: str, *batches: pa.RecordBatch, width: int = 80) -> bytes:
    out = io.BytesIO()
    writer = open_writer(kind, out, batches[0].schema, width=width)
    for batch in batches:
        writer.write(batch)
    writer.close()
    return out.getvalue()


def test_json_is_an_object_a_line_and_bytes_that_are_no_text_have_another_name() -> None:
    lines = [json.loads(line) for line in written("json", MESSAGES).splitlines()]
    time = "2026-03-01T08:00:00.123Z"
    assert lines == [
        {"key": "a", "value": "hello", "entry_id": 1, "publish_time": time, "properties": {"x": "1"}},
        {"key": None, "value_base64": "/wA=", "entry_id": 2, "publish_time": time, "properties": {}},
        {"key": "c", "value": None, "entry_id": 3, "publish_time": None, "properties": None},
    ]


def test_csv_has_a_column_for_bytes_that_are_no_text() -> None:
    rows = list(csv.DictReader(io.StringIO(written("csv", MESSAGES).decode())))
    assert [(row["value"], row["value_base64"]) for row in rows] == [("hello", ""), ("", "/wA="), ("", "")]
    assert rows[0]["properties"] == '{"x": "1"}'
    assert rows[0]["publish_time"] == "2026-03-01T08:00:00.123Z"


def test_parquet_has_the_rows_as_they_are_in_few_groups() -> None:
    file = io.BytesIO(written("parquet", MESSAGES, MESSAGES))
    assert pq.read_table(file).equals(pa.Table.from_batches([MESSAGES, MESSAGES]))
    assert pq.ParquetFile(file).num_row_groups == 1


def test_parquet_without_rows_still_says_its_columns() -> None:
    table = pq.read_table(io.BytesIO(written("parquet", MESSAGES.slice(0, 0))))
    assert (table.schema, table.num_rows) == (MESSAGES.schema, 0)


def test_a_table_is_cut_to_its_width_and_sends_no_control_characters() -> None:
    evil = pa.RecordBatch.from_pydict({"n": [1, 20], "value": [b"\x1b[2J\nx", b"y" * 200]})
    lines = written("table", evil, width=40).decode().split("\n")
    assert lines[:2] == [" n  value", " 1  \\x1b[2J\\nx"]
    assert lines[2] == f"20  {'y' * 35}…"
    assert all(len(line) <= 40 for line in lines)


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        (NESTED, [{"a": b"\xff", "b": [b"x", None]}], {"a_base64": "/w==", "b": ["x", None]}),
        (pa.map_(pa.string(), pa.struct({"t": pa.date32()})), [[("k", {"t": AT.date()})]], {"k": {"t": "2026-03-01"}}),
        (pa.float64(), [float("nan")], "nan"),
        (pa.decimal128(10, 2), [Decimal("1.50")], "1.50"),
        (pa.timestamp("us", tz="UTC"), [AT.replace(microsecond=5)], "2026-03-01T08:00:00.000005Z"),
        (pa.bool_(), [True], True),
    ],
)  # fmt: skip
def test_values_of_typed_columns_become_json(kind: pa.DataType, values: list[Any], expected: Any) -> None:
    batch = pa.RecordBatch.from_arrays([pa.array(values, type=kind)], names=["v"])
    assert json.loads(written("json", batch)) == {"v": expected}
    assert written("csv", batch).count(b"\n") == 2


def test_more_rows_than_are_converted_at_once() -> None:
    count = 2 * ROWS_AT_ONCE + 1
    batch = pa.RecordBatch.from_pydict({"n": list(range(count))})
    assert [json.loads(line)["n"] for line in written("json", batch).splitlines()] == list(range(count))
