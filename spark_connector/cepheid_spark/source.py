"""Spark's data source "cepheid": spark.read.format("cepheid") and spark.readStream.format("cepheid").

Spark imports this module whenever it looks up any Python source (through pyspark_cepheid): whatever is heavy, or may be missing, is
imported by the method that needs it. Every method runs in a Python worker of the driver's JVM, with the driver's PYSPARK_PYTHON.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING

try:
    from pyspark.sql.datasource import DataSource
except ImportError:
    raise ImportError("format 'cepheid' needs Spark 4.2 or newer: pip install 'pyspark>=4.2', on the cluster too") from None

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader
    from pyspark.sql.types import StructType

    from cepheid_scan import SchemaVersion
    from cepheid_spark.options import SourceOptions


class CepheidDataSource(DataSource):
    def __init__(self, options: MutableMapping[str, str]) -> None:
        self.options = options
        self._schemas: tuple[SchemaVersion, ...] | None = None  # asked for once; pickled along with the source

    @classmethod
    def name(cls) -> str:
        return "cepheid"

    def schema(self) -> StructType:
        from cepheid_spark.spark_schema import rows_schema

        options = self._parsed(streaming=True)  # which of the two comes is not known yet
        return rows_schema(options, self._topic_schemas(options))

    def reader(self, schema: StructType) -> DataSourceReader:
        from cepheid_spark.batch_reader import CepheidBatchReader
        from cepheid_spark.pushdown_reader import PushdownBatchReader

        options = self._parsed(streaming=False)
        kind = PushdownBatchReader if options.filter_pushdown else CepheidBatchReader
        return kind(schema, options, self._topic_schemas(options))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from cepheid_spark.stream_reader import CepheidStreamReader

        return CepheidStreamReader(schema, self._parsed(streaming=True))

    def _parsed(self, *, streaming: bool) -> SourceOptions:
        from cepheid_spark.options import parse_options
        from cepheid_spark.versions import require_spark

        require_spark()
        return parse_options(self.options, streaming=streaming)

    def _topic_schemas(self, options: SourceOptions) -> tuple[SchemaVersion, ...]:
        if self._schemas is None:
            from cepheid_spark.topic_schemas import load_topic_schemas

            self._schemas = load_topic_schemas(options)
        return self._schemas
