"""Option freezeGc: what is imported by a task's first batch is out of the collector's sight from then on."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pyarrow as pa
import pytest

from cepheid_decode import Fragment, Piece, ReadMode, ScanSpec, ScanTask
from cepheid_spark import partitions
from cepheid_spark.options import parse_options
from cepheid_spark.partitions import TaskPartition, read_partition
from cepheid_spark.spark_schema import choose_columns, rows_schema

BATCH = pa.record_batch([pa.array([b"x"])], ["value"])


@pytest.fixture(autouse=True)
def as_in_a_new_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(partitions, "_is_frozen", False)
    monkeypatch.setattr("cepheid_scan.scan_task.scan_task", lambda task, spec: iter([BATCH, BATCH]))
    gc.unfreeze()  # what other tests of this process have read
    yield
    gc.unfreeze()


def read(**given: str) -> Iterator[pa.RecordBatch]:
    options = parse_options({"serviceUrl": "pulsar://b:1", "topic": "t", "columns": "value", **given}, streaming=False)
    schema = rows_schema(options)
    piece = Piece("persistent://public/default/t", -1, 1, 0, 1, 1, 1, (Fragment(0, ("b",)),))
    task = TaskPartition(ScanTask((piece,), (("b", "b:1"),)), ScanSpec(ReadMode.MESSAGES, ("value",)))
    return read_partition(task, (), choose_columns(schema, options), schema, freeze_gc=options.freeze_gc)


@pytest.mark.slow
def test_modules_are_frozen_with_the_first_batch_of_a_worker_and_once() -> None:
    rows = read()
    assert gc.get_freeze_count() == 0
    next(rows)
    frozen = gc.get_freeze_count()
    assert frozen > 10_000, "of the modules that a task needs"
    assert len(gc.get_objects()) < frozen, "the rest is what a collection still goes over"
    kept = [[] for _ in range(1000)]  # type: ignore[var-annotated]
    assert (len(list(rows)), len(list(read()))) == (1, 2)
    assert gc.get_freeze_count() <= frozen, "no batch later freezes what rows and queries left behind"
    assert len(kept) == 1000


def test_nothing_is_frozen_where_that_is_not_wanted() -> None:
    assert len(list(read(freezeGc="false"))) == 2
    assert gc.get_freeze_count() == 0
