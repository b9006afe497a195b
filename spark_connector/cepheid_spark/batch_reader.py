"""A batch read: planned once on the driver when the DataFrame is first used, then read by tasks.

partitions()   driver   plan ──► tasks by bytes ──► a lease, for a long read ──► TaskPartition each
read()         worker   TaskPartition ──► record batches in the rows' schema; a lease that is there is prolonged meanwhile

Spark pickles the reader before it calls `partitions()`: what planning finds out travels in the partitions.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from cepheid_ports import CepheidError
from cepheid_scan import MessagePosition, ScanTask, SchemaVersion
from cepheid_spark.brief_errors import brief_errors
from cepheid_spark.options import SourceOptions
from cepheid_spark.partitions import TaskPartition, partitions_of, read_partition
from cepheid_spark.spark_schema import choose_columns

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from cepheid_spark.batch_lease import BatchLease

log = logging.getLogger(__name__)

LEASE_BYTES = 1 << 30
"""A read of less than this holds no lease of its own accord. It is over in seconds, and a subscription that stays for hours after
each small query would count against a topic's backlog quota and its cursors."""


class CepheidBatchReader(DataSourceReader):
    def __init__(self, schema: StructType, options: SourceOptions, schemas: tuple[SchemaVersion, ...] = ()) -> None:
        self._schema = schema
        self._options = options
        self._schemas = schemas
        self._layout = choose_columns(schema, options, schemas)

    @brief_errors
    def partitions(self) -> list[InputPartition]:
        from cepheid_scan.plan_scan import plan_scan

        tasks, spec, _ = plan_scan(self._options.request(self._layout.scan_columns, self._schemas))
        return partitions_of(tasks, spec, self._schemas, hold_lease(self._options, tasks))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        rows = read_partition(partition, self._schemas, self._layout, self._schema, freeze_gc=self._options.freeze_gc)
        if not isinstance(partition, TaskPartition) or partition.lease is None:
            return rows
        from cepheid_spark.batch_lease import prolonging

        return prolonging(partition.lease, partition.task.pieces[0].topic, self._options).rows(rows)


def hold_lease(options: SourceOptions, tasks: Sequence[ScanTask]) -> BatchLease | None:
    """Keeps what the tasks will read from being trimmed until `lease_ttl_s` has passed, or tasks prolong it.

    Raises CepheidError only for a lease that was asked for by name: of its own accord a read goes on without.
    """
    source = options.source
    name = options.subscription
    if not options.has_lease or not tasks or (source.service_url or source.admin_url) is None:
        return None
    if name is None and sum(task.size_bytes for task in tasks) < LEASE_BYTES:
        return None
    from cepheid_spark.batch_lease import BatchLease
    from cepheid_spark.lease import pin_batch
    from cepheid_spark.lease_holder import wall_ms

    pinned_at_ms = wall_ms()
    try:
        firsts = first_positions(tasks)
        held = pin_batch(source, firsts, ttl_s=options.lease_ttl_s, name=name)
        return BatchLease(held, options.lease_ttl_s, pinned_at_ms, len(firsts))
    except CepheidError as error:
        if name is not None:
            raise
        log.warning("scan.without_lease: nothing but retention keeps what is read: %s", error)
        return None


def first_positions(tasks: Sequence[ScanTask]) -> dict[str, MessagePosition]:
    """By topic partition."""
    firsts: dict[str, MessagePosition] = {}
    for task in tasks:
        for piece in task.pieces:
            place = MessagePosition(piece.ledger_id, piece.first_entry_id)
            firsts[piece.topic] = min(place, firsts.get(piece.topic, place))
    return firsts
