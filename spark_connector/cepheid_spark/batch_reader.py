"""A batch read: planned once on the driver when the DataFrame is first used, then read by tasks.

partitions()   driver   plan ──► tasks by bytes ──► a lease, for a long read ──► TaskPartition each
read()         worker   TaskPartition ──► record batches in the rows' schema; an existing lease is renewed meanwhile

Spark pickles the reader before it calls `partitions()`, so the results of planning are in the partitions.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from cepheid_decode import SchemaVersion
from cepheid_spark.brief_errors import brief_errors
from cepheid_spark.options import SourceOptions
from cepheid_spark.partitions import TaskPartition, partitions_of, read_partition
from cepheid_spark.spark_schema import choose_columns

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType


log = logging.getLogger(__name__)


class CepheidBatchReader(DataSourceReader):
    def __init__(self, schema: StructType, options: SourceOptions, schemas: tuple[SchemaVersion, ...] = ()) -> None:
        self._schema = schema
        self._options = options
        self._schemas = schemas
        self._layout = choose_columns(schema, options, schemas)

    @brief_errors
    def partitions(self) -> list[InputPartition]:
        from cepheid_scan.plan_scan import plan_scan
        from cepheid_spark.batch_lease import hold_lease

        tasks, spec, _ = plan_scan(self._options.reading(self._layout.scan_columns, self._schemas))
        return partitions_of(tasks, spec, self._schemas, hold_lease(self._options, tasks))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        rows = read_partition(partition, self._schemas, self._layout, self._schema, freeze_gc=self._options.freeze_gc)
        if not isinstance(partition, TaskPartition) or partition.lease is None:
            return rows
        from cepheid_spark.batch_lease import prolonging

        return prolonging(partition.lease, partition.task.pieces[0].topic, self._options).rows(rows)
