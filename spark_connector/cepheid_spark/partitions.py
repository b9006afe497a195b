"""What a Spark task is told, and how it reads: the same for batch and stream."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pyspark.sql.datasource import InputPartition

from cepheid_ports import CepheidError, keep_large_buffers, share_one_arena
from cepheid_scan import ScanSpec, ScanTask, SchemaVersion
from cepheid_spark.column_styles import RowLayout

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from cepheid_spark.batch_lease import BatchLease

_is_frozen = False


class TaskPartition(InputPartition):
    """`spec` without the schemas that the reader has anyway: partitions are pickled one by one, readers once a query.

    `lease`: of a batch read, to be prolonged.
    """

    def __init__(self, task: ScanTask, spec: ScanSpec, lease: BatchLease | None = None) -> None:
        self.task = task
        self.spec = spec
        self.lease = lease

    def __repr__(self) -> str:
        """The base class shows every attribute, the ticket and the token too."""
        places = ", ".join(
            f"{piece.topic} {piece.ledger_id}:{piece.first_entry_id}..{piece.last_entry_id}" for piece in self.task.pieces[:3]
        )
        more = f" and {len(self.task.pieces) - 3} more" if len(self.task.pieces) > 3 else ""
        return f"TaskPartition({places}{more})"


def partitions_of(
    tasks: Sequence[ScanTask], spec: ScanSpec, known: Sequence[SchemaVersion], lease: BatchLease | None = None
) -> list[InputPartition]:
    """`known`: the schema versions of the reader. Only newer ones travel with each task."""
    newer = tuple(version for version in spec.schemas if version not in known)
    slim = replace(spec, schemas=newer)
    return [TaskPartition(task, slim, lease) for task in tasks]


def read_partition(
    partition: InputPartition, known: Sequence[SchemaVersion], layout: RowLayout, schema: StructType, *, freeze_gc: bool
) -> Iterator[pa.RecordBatch]:
    """A task's rows. Spark makes one partition of value None where there is nothing to read."""
    if not isinstance(partition, TaskPartition):
        return
    from pyspark.sql.pandas.types import to_arrow_schema

    from cepheid_scan.scan_task import scan_task

    share_one_arena()
    keep_large_buffers()
    spec = replace(partition.spec, schemas=(*known, *partition.spec.schemas))
    arrow_schema = to_arrow_schema(schema, timezone="UTC")
    try:
        for batch in scan_task(partition.task, spec):
            if freeze_gc:
                _freeze_once()
            yield layout.arrange(batch, arrow_schema)
    except CepheidError as error:
        raise error.with_traceback(None) from None  # as brief_errors: it says all there is to know


def _freeze_once() -> None:
    """Spark's worker runs a full collection after every task: 15-30 ms over the modules alone, unless they are frozen.

    With the first batch, since by then everything is imported that a task needs.
    """
    global _is_frozen
    if not _is_frozen:
        gc.collect()
        gc.freeze()
        _is_frozen = True
