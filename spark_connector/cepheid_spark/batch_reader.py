"""A batch read: planned once on the driver when the DataFrame is first used, then read by tasks.

partitions()   driver   plan ──► tasks by bytes ──► TaskPartition each
read()         worker   TaskPartition ──► record batches in the rows' schema

Spark pickles the reader before it calls `partitions()`: what planning finds out travels in the partitions.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from cepheid_scan import BadOptionError, ScanRequest, SchemaVersion
from cepheid_spark.brief_errors import brief_errors
from cepheid_spark.options import SourceOptions
from cepheid_spark.partitions import partitions_of, read_partition
from cepheid_spark.spark_schema import choose_columns

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

log = logging.getLogger("cepheid.spark")

MAX_TASKS = 50_000


class CepheidBatchReader(DataSourceReader):
    def __init__(self, schema: StructType, options: SourceOptions, schemas: tuple[SchemaVersion, ...] = ()) -> None:
        self._schema = schema
        self._options = options
        self._schemas = schemas
        self._layout = choose_columns(schema, options, schemas)

    @brief_errors
    def partitions(self) -> list[InputPartition]:
        from cepheid_scan.plan_scan import plan_scan

        tasks, spec, plan = plan_scan(self.request())
        if len(tasks) > MAX_TASKS:
            raise BadOptionError(
                f"{len(tasks)} tasks are more than the {MAX_TASKS} that a job may have: raise targetPartitionBytes, or read a part"
            )
        log.info(
            "scan.planned",
            extra={
                "topics": len(plan.topics),
                "ledgers": sum(len(topic.ledgers) for topic in plan.topics),
                "bytes": sum(task.size_bytes for task in tasks),
                "tasks": len(tasks),
            },
        )
        return partitions_of(tasks, spec, self._schemas)

    def request(self) -> ScanRequest:
        """What is planned: a subclass asks for less."""
        return self._options.request(self._layout.scan_columns)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_partition(partition, self._schemas, self._layout, self._schema, freeze_gc=self._options.freeze_gc)
