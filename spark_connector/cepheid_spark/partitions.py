"""The input of a Spark task, and its reading: the same for batch and stream."""

from __future__ import annotations

import gc
import pickle
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from pyspark.sql.datasource import InputPartition

from cepheid_decode import ScanSpec, ScanTask, SchemaVersion
from cepheid_ports import CepheidError, keep_large_buffers, share_one_arena
from cepheid_spark.column_styles import RowLayout

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from cepheid_spark.batch_lease import BatchLease

PORTION_BYTES = 1 << 20
LARGE_ROW_BYTES = 512

_is_frozen = False

PackedHistory = tuple[SchemaVersion | int, ...]


class TaskPartition(InputPartition):
    """One task. `spec` is without schemas: partitions are pickled one by one, readers once per query, and a topic's history may be
    large.

    `lease`: of a batch read, to be renewed. `histories`: as packed by `partitions_of`; empty: all topics of the task have
    the reader's.
    """

    def __init__(self, task: ScanTask, spec: ScanSpec, lease: BatchLease | None = None, histories: bytes = b"") -> None:
        self.task = task
        self.spec = spec
        self.lease = lease
        self.histories = histories

    def carried(self) -> tuple[SchemaVersion, ...]:
        """Return the versions of the rows' schema, if the reader does not know it."""
        return _unpack_histories(self.histories)[0]

    def unpacked(self, known: Sequence[SchemaVersion]) -> ScanSpec:
        """Return the spec with schemas. `known`: the schema versions of the reader."""
        writers = tuple(
            (topic, tuple(known[each] if isinstance(each, int) else each for each in versions))
            for topic, versions in _unpack_histories(self.histories)[1].items()
        )
        return replace(self.spec, schemas=tuple(known), writers=writers)

    def __repr__(self) -> str:
        """Return the topics only: the base class shows every attribute, including the ticket and the token."""
        from cepheid_scan.scan_task import places

        return f"TaskPartition({places(self.task.pieces)})"


def partitions_of(
    tasks: Sequence[ScanTask],
    spec: ScanSpec,
    known: Sequence[SchemaVersion],
    lease: BatchLease | None = None,
    *,
    is_known: bool = True,
) -> list[InputPartition]:
    """Return the partitions. `known`: the history of the rows' schema. `is_known`: the tasks' reader has it, too."""
    slim = replace(spec, schemas=(), writers=())
    carried = () if is_known else tuple(known)
    packed = {
        topic: tuple(known.index(version) if version in known else version for version in versions)
        for topic, versions in spec.writers
    }

    @cache
    def pack(topics: tuple[str, ...]) -> bytes:
        """Compress, since versions of one schema differ little. A version in `known` is replaced by its index there."""
        histories = {topic: packed[topic] for topic in topics}
        return zlib.compress(pickle.dumps((carried, histories))) if carried or histories else b""

    return [TaskPartition(task, slim, lease, pack(_topics_of(task, packed))) for task in tasks]


def _topics_of(task: ScanTask, packed: Mapping[str, PackedHistory]) -> tuple[str, ...]:
    """Return the topics of the task that have their own history."""
    if not packed:
        return ()
    from cepheid_decode.shared_schema import base_of

    return tuple(sorted(packed.keys() & {base_of(piece.topic) for piece in task.pieces}))


def _unpack_histories(packed: bytes) -> tuple[tuple[SchemaVersion, ...], dict[str, PackedHistory]]:
    return pickle.loads(zlib.decompress(packed)) if packed else ((), {})


def read_partition(
    partition: InputPartition, known: Sequence[SchemaVersion], layout: RowLayout, schema: StructType, *, freeze_gc: bool
) -> Iterator[pa.RecordBatch]:
    """Yield a task's rows. Spark creates one partition of value None if there is nothing to read. `known`: as for `unpacked`."""
    if not isinstance(partition, TaskPartition):
        return
    from pyspark.sql.pandas.types import to_arrow_schema

    from cepheid_scan.scan_task import scan_task

    share_one_arena()
    keep_large_buffers()
    spec = partition.unpacked(known)
    arrow_schema = to_arrow_schema(schema, timezone="UTC")
    try:
        for batch in scan_task(partition.task, spec):
            if freeze_gc:
                _freeze_once()
            yield from portions(layout.arrange(batch, arrow_schema))
    except CepheidError as error:
        raise error.with_traceback(None) from None  # like brief_errors: it is complete without the stack


def portions(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield the same rows; large ones about `PORTION_BYTES` at a time, without copying them.

    The JVM copies each row's bytes three times: from batches that fit the processor's cache, rows of 1 KB take it a seventh less
    work than from those of 16 MB that are best for decoding. Small rows gain less there than more batches cost here.
    """
    row_bytes = batch.nbytes // max(1, batch.num_rows)
    if row_bytes < LARGE_ROW_BYTES:
        yield batch
        return
    rows = max(1, PORTION_BYTES // row_bytes)
    for first in range(0, batch.num_rows, rows):
        yield batch.slice(first, rows)


def _freeze_once() -> None:
    """Freeze existing objects: Spark's worker runs a full collection after every task, 15-30 ms over the modules alone.

    At the first batch, when everything that a task needs is imported.
    """
    global _is_frozen
    if not _is_frozen:
        gc.collect()
        gc.freeze()
        _is_frozen = True
