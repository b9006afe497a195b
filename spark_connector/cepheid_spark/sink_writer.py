"""The classes that Spark calls to write: planned on the driver for each job or micro-batch, then written by tasks.

writer(), streamWriter()  driver   plan_sink: columns, topic, schema ──► the writer, pickled for the tasks
write()                   worker   rows ──► sorted ──► messages ──► TaskSender ──► TaskReceipt
commit(), abort()         driver   nothing to do: consumers may have seen what tasks have stored

Spark creates a writer for a micro-batch twice: for its tasks, and in another process for the commit.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from cepheid_decode import BadOptionError
from cepheid_spark.brief_errors import brief_errors
from cepheid_spark.sink_identity import TaskPlace, identity_of, new_job_name
from cepheid_spark.sink_options import SinkOptions
from cepheid_spark.sink_plan import SinkPlan, plan_sink

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from cepheid_spark.sink_sender import TaskSender

log = logging.getLogger(__name__)

SLICE_ROWS = 10_000
"""Number of rows converted at a time; also that of Spark's batches."""


@dataclass(frozen=True, slots=True)
class TaskReceipt(WriterCommitMessage):
    """What a task has stored. `stored_before` of its rows were stored by an earlier attempt."""

    rows: int
    stored_before: int


class CepheidBatchWriter(DataSourceArrowWriter):
    def __init__(self, schema: StructType, options: SinkOptions, *, overwrite: bool) -> None:
        if overwrite:
            raise BadOptionError("a topic is only appended to: write with mode('append')")
        self._plan = plan_sink(schema, options)
        self._job = new_job_name()  # pickled: all attempts of all tasks have it

    @brief_errors
    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskReceipt:
        return write_task(self._plan, iterator, self._job)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        stored = sum(message.rows for message in messages if isinstance(message, TaskReceipt))
        log.warning("sink.job_failed: at least %d rows of the failed write are stored, and stay", stored)


class CepheidStreamWriter(DataSourceStreamArrowWriter):
    def __init__(self, schema: StructType, options: SinkOptions, *, overwrite: bool) -> None:
        if overwrite:
            raise BadOptionError(
                "a topic is only appended to: outputMode('complete') writes the whole result again; use update or append"
            )
        self._plan = plan_sink(schema, options)

    @brief_errors
    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskReceipt:
        return write_task(self._plan, iterator, None)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        log.warning("sink.batch_failed: micro-batch %d is written again when the query is restarted", batchId)


def write_task(plan: SinkPlan, batches: Iterator[pa.RecordBatch], job: str | None) -> TaskReceipt:
    """Write the rows of this task. Raises CepheidError."""
    from cepheid_spark.sink_sender import TaskSender

    options, place = plan.options, TaskPlace.of_this_task()
    identity = identity_of(options, place, job) if options.exactly_once else None
    encode = plan.encoder()
    first_row = 0
    with closing(TaskSender(options, identity, plan.payload_schema(), dict(plan.counts), place.task)) as sender:
        for batch in _sorted(plan, batches, sender) if options.is_sorted else batches:
            sender.send(plan.rows.messages(batch, encode, first_row))
            first_row += batch.num_rows
        return TaskReceipt(*sender.finish())


def _sorted(plan: SinkPlan, batches: Iterator[pa.RecordBatch], sender: TaskSender) -> Iterator[pa.RecordBatch]:
    """Yield the task's rows in a repeatable order. All of them are in memory at once."""
    import pyarrow as pa
    import pyarrow.compute as pc

    collected = list(batches)
    if not any(batch.num_rows for batch in collected):
        return
    table = plan.rows.in_order(pa.Table.from_batches(collected))
    del collected
    sender.announce(plan.rows.content(table))
    if "topic" in plan.rows.parts:
        sender.prepare([topic for topic in pc.unique(table.column(plan.rows.parts["topic"])).to_pylist() if topic])
    yield from table.to_batches(max_chunksize=SLICE_ROWS)
