"""Producer names and sequence ids of tasks, with which repeated rows are stored once. No I/O.

    producer name    spark-SINK-TASK[-pPARTITIONS]    one per task of a write, on each topic partition that it sends to
                     spark-SINK-query                 claimed first by each task, if the user named the sink
    sequence id      batch × 2³² + row                rows are counted by topic partition, from 0 in each batch

A repeated task has the same name, and asks the broker for the last sequence id stored under it. The stored part of
its batch is the beginning of its rows: it continues with the next row.

Rules
1. The rows of a batch, their order, and the topic partition of each depend only on the batch. If a topic gets more
   partitions, row 17 of one of them is another row, and would count as stored: so their number is in the name. A batch that was
   interrupted while it changed is stored twice, in part.
2. The broker binds a name to an owner, and a batch to what it contains (docs/producers.md). Another checkpoint begins again at
   batch 0, and with another number of tasks a task has other rows: they would count as stored, so the producer is refused.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from cepheid_decode import BadOptionError
from cepheid_ports import CepheidError
from cepheid_spark.sink_options import MOST_BATCHES, SinkOptions

MOST_ROWS = 1 << 32
_QUERY_ID, _BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"
"""Local properties that Spark sets for the tasks of a micro-batch."""


class SinkNameTakenError(CepheidError):
    """The name under which this sink sends was used by another query, or by this one with another checkpoint."""

    hint: ClassVar[str] = "give the query its own sinkName, or leave sinkName out: it is then the query's id"


class RowsChangedError(CepheidError):
    """An interrupted batch has other rows when it is repeated, so its stored part cannot be determined."""

    hint: ClassVar[str] = (
        "make the rows of a batch depend on its input alone (no rand(), uuid() or now()), or write with exactlyOnce=false; the "
        "query continues with a new checkpoint"
    )


@dataclass(frozen=True, slots=True)
class TaskPlace:
    """The task, according to Spark."""

    task: int
    properties: Mapping[str, str]

    @classmethod
    def of_this_task(cls) -> TaskPlace:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None, "asked in a task"
        found = {name: context.getLocalProperty(name) for name in (_QUERY_ID, _BATCH_ID)}
        return cls(context.partitionId(), {name: text for name, text in found.items() if text is not None})


@dataclass(frozen=True, slots=True)
class SinkIdentity:
    """Identity of one task in one batch."""

    sink: str
    owner: str
    batch: int
    task: int

    def producer_name(self, partitions: int) -> str:
        """Return the name on each partition of a topic with this many; 0: it is not partitioned."""
        return f"spark-{self.sink}-{self.task}" + (f"-p{partitions}" if partitions else "")

    @property
    def query_name(self) -> str:
        """The name claimed by all tasks of the query, so that no other query writes under the sink's name meanwhile."""
        return f"spark-{self.sink}-query"

    @property
    def first_sequence_id(self) -> int:
        return self.batch << 32

    def stored_rows(self, last_sequence_id: int, where: str) -> int:
        """Return how many rows of this batch are stored. `where` names topic and producer. Raises SinkNameTakenError."""
        stored_batch = last_sequence_id >> 32  # -1: nothing is stored
        if stored_batch > self.batch:
            raise SinkNameTakenError(
                f"{where} has stored batch {stored_batch}, and this is batch {self.batch}: another query writes as sink "
                f"{self.sink!r}, or its checkpoint was deleted; every row would count as stored",
                sink=self.sink,
            )
        return last_sequence_id - self.first_sequence_id + 1 if stored_batch == self.batch else 0

    def check_rows(self, rows: int, stored: int, where: str) -> None:
        """Raise RowsChangedError if more rows are stored of the batch than it has."""
        if stored > rows:
            raise RowsChangedError(
                f"{where} has stored {stored:,} rows of batch {self.batch}, and the batch, repeated, has {rows:,}", sink=self.sink
            )


def new_job_name() -> str:
    """Return the name of a write that is not repeated as a whole; its tasks are."""
    return uuid.uuid4().hex


def identity_of(options: SinkOptions, place: TaskPlace, job: str | None) -> SinkIdentity:
    """Return the identity of a task. `job`: the name of a batch write; None: this is a micro-batch. Raises BadOptionError."""
    query = place.properties.get(_QUERY_ID)
    if job is not None:
        sink, batch = options.name or job, options.batch_id or 0
        return SinkIdentity(sink, query or sink, batch, place.task)
    number = place.properties.get(_BATCH_ID)
    if query is None or number is None:
        raise BadOptionError(
            "Spark does not tell the tasks which micro-batch they are of, so it cannot be written exactly once: use Spark 4.2 or "
            "newer, or exactlyOnce=false",
            option="exactlyOnce",
        )
    batch = int(number)
    if batch > MOST_BATCHES:
        raise BadOptionError(f"micro-batch {batch:,} is above {MOST_BATCHES:,}: start with a new checkpoint", option="exactlyOnce")
    return SinkIdentity(options.name or query, query, batch, place.task)
