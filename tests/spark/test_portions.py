"""Large rows go to the JVM about 1 MB at a time: the same rows, whatever columns they have."""

from __future__ import annotations

import io

import pyarrow as pa
import pytest

from cepheid_spark.partitions import LARGE_ROW_BYTES, PORTION_BYTES, portions


def batch_of(rows: int, value_bytes: int) -> pa.RecordBatch:
    """A column of each shape that rows have, with nulls."""
    numbers = range(rows)
    columns = {
        "value": pa.array([None if n % 7 == 3 else bytes([n % 256]) * value_bytes for n in numbers], pa.binary()),
        "key": pa.array([None if n % 3 == 0 else f"key {n}" for n in numbers], pa.string()),
        "sequence_id": pa.array([None if n % 5 == 0 else n for n in numbers], pa.int64()),
        "flag": pa.array([None if n % 11 == 0 else n % 2 == 0 for n in numbers], pa.bool_()),
        "properties": pa.array([[("n", str(n))] * (n % 3) or None for n in numbers], pa.map_(pa.string(), pa.string())),
        "nested": pa.array([{"list": [n] * (n % 4)} for n in numbers], pa.struct([("list", pa.list_(pa.int32()))])),
    }
    return pa.RecordBatch.from_pydict(columns)


def sent(batches: list[pa.RecordBatch]) -> pa.Table:
    """As Spark's worker sends them, and the JVM gets them."""
    wire = io.BytesIO()
    with pa.ipc.new_stream(wire, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    table = pa.ipc.open_stream(wire.getvalue()).read_all()
    table.validate(full=True)
    return table


@pytest.mark.slow
def test_large_rows_are_the_same_in_portions() -> None:
    batch = batch_of(10_001, 1000)
    parts = list(portions(batch))
    assert len(parts) > 8
    assert max(part.nbytes for part in parts) < 1.2 * PORTION_BYTES
    assert sent(parts).to_pylist() == batch.to_pylist()


def test_a_row_larger_than_a_portion_is_one() -> None:
    batch = batch_of(3, 2 * PORTION_BYTES)
    parts = list(portions(batch))
    assert [part.num_rows for part in parts] == [1, 1, 1]
    assert sent(parts).to_pylist() == batch.to_pylist()


@pytest.mark.slow
def test_small_rows_stay_together() -> None:
    batch = batch_of(50_000, 100)
    assert batch.nbytes > 5 * PORTION_BYTES
    assert batch.nbytes / batch.num_rows < LARGE_ROW_BYTES
    assert [part is batch for part in portions(batch)] == [True]
