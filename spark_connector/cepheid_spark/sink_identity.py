"""Under which names and numbers a task sends, so that what it repeats is stored once. No I/O.

    producer name    spark-SINK-TASK[-pPARTITIONS]    one for each task of a write, on each topic partition that it sends to
                     spark-SINK-query                 claimed first by each task, where the user named the sink
    sequence id      batch × 2³² + row                rows are counted by topic partition, from 0 in each batch

A task that is repeated has the same name, and asks the broker for the last sequence id that is stored under it. What is stored of
its batch is the beginning of its rows: it goes on with the row after that.

Rules
1. The rows of a batch, their order, and the topic partition of each depend on nothing but the batch. Where a topic has got more
   partitions, row 17 of one of them is another row, and would be taken for stored: so their number is in the name. A batch that was
   interrupted while it changed is stored twice, in part.
2. The broker binds a name to an owner, and a batch to what it contains (docs/producers.md). Another checkpoint begins again at
   batch 0, and with another number of tasks a task has other rows: they would be taken for stored, so the producer is refused.
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

    hint: ClassVar[str] = "give the query a sinkName of its own, or leave sinkName out: then it is the query's id"


class RowsChangedError(CepheidError):
    """A batch that was interrupted has other rows when it is repeated, so what is stored of it cannot be told."""

    hint: ClassVar[str] = (
        "make the rows of a batch depend on its input alone (no rand(), uuid() or now()), or write with exactlyOnce=false; the "
        "query goes on with a new checkpoint"
    )


@dataclass(frozen=True, slots=True)
class TaskPlace:
    """Which task this is, as Spark says."""

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
    """Of one task of one batch."""

    sink: str
    owner: str
    batch: int
    task: int

    def producer_name(self, partitions: int) -> str:
        """Return the name on each topic partition of a topic with so many; 0: it is not partitioned."""
        return f"spark-{self.sink}-{self.task}" + (f"-p{partitions}" if partitions else "")

    @property
    def query_name(self) -> str:
        """The name that all tasks of the query claim, so that no other query writes under the sink's name meanwhile."""
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
                f"{self.sink!r}, or its checkpoint was deleted; every row would be taken for stored",
                sink=self.sink,
            )
        return last_sequence_id - self.first_sequence_id + 1 if stored_batch == self.batch else 0

    def check_rows(self, rows: int, stored: int, where: str) -> None:
        """Raises RowsChangedError when more is stored of the batch than it has."""
        if stored > rows:
            raise RowsChangedError(
                f"{where} has stored {stored:,} rows of batch {self.batch}, and the batch, repeated, has {rows:,}", sink=self.sink
            )


def new_job_name() -> str:
    """Return the name of a write that is not repeated as a whole; tasks of it are."""
    return uuid.uuid4().hex


def identity_of(options: SinkOptions, place: TaskPlace, job: str | None) -> SinkIdentity:
    """Return under what a task sends. `job`: the name of a batch write; None: this is a micro-batch. Raises BadOptionError."""
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
        raise BadOptionError(f"micro-batch {batch:,} is above {MOST_BATCHES:,}: begin with a new checkpoint", option="exactlyOnce")
    return SinkIdentity(options.name or query, query, batch, place.task)
