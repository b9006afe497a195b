"""Spark's data source and sink "cepheid": read, readStream, write and writeStream with format("cepheid").

Spark imports this module whenever it looks up any Python source (through pyspark_cepheid): anything heavy or optional is
imported by the method that needs it. Every method runs in a Python worker of the driver's JVM, with the driver's PYSPARK_PYTHON.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from cepheid_spark.brief_errors import brief_errors

try:
    from pyspark.sql.datasource import DataSource
except ImportError:
    raise ImportError("format 'cepheid' needs Spark 4.2 or newer: pip install 'pyspark>=4.2', on the cluster too") from None

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceArrowWriter,
        DataSourceReader,
        DataSourceStreamArrowWriter,
        DataSourceStreamReader,
    )
    from pyspark.sql.types import StructType

    from cepheid_decode import SchemaVersion
    from cepheid_spark.options import SourceOptions


class CepheidDataSource(DataSource):
    def __init__(self, options: Mapping[str, str]) -> None:
        self._given = dict(options)
        self._schemas: tuple[SchemaVersion, ...] | None = None  # fetched once; pickled along with the source

    @classmethod
    def name(cls) -> str:
        return "cepheid"

    @brief_errors
    def schema(self) -> StructType:
        from cepheid_spark.spark_schema import rows_schema
        from cepheid_spark.table_options import is_table_made, keep, written_options

        written = written_options(self._given)
        options = _parse(written, streaming=True)  # it is not known yet whether it is a batch or a stream
        schema = rows_schema(options, self._topic_schemas(options))
        return keep(schema, written) if is_table_made(self._given) else schema

    @brief_errors
    def reader(self, schema: StructType) -> DataSourceReader:
        from cepheid_spark.batch_reader import CepheidBatchReader
        from cepheid_spark.spark_schema import with_reader_version
        from cepheid_spark.table_options import recall

        options = _parse(recall(schema, self._given), streaming=False)
        schemas = self._topic_schemas(options)
        return CepheidBatchReader(schema, with_reader_version(options, schemas), schemas)

    @brief_errors
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from cepheid_spark.stream_reader import CepheidStreamReader
        from cepheid_spark.table_options import recall

        return CepheidStreamReader(schema, _parse(recall(schema, self._given), streaming=True), self._schemas)

    @brief_errors
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        from cepheid_spark.sink_options import parse_sink_options
        from cepheid_spark.sink_writer import CepheidBatchWriter
        from cepheid_spark.versions import require_spark

        require_spark()
        return CepheidBatchWriter(schema, parse_sink_options(self._given, streaming=False), overwrite=overwrite)

    @brief_errors
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        from cepheid_spark.sink_options import parse_sink_options
        from cepheid_spark.sink_writer import CepheidStreamWriter
        from cepheid_spark.versions import require_spark

        require_spark()
        return CepheidStreamWriter(schema, parse_sink_options(self._given, streaming=True), overwrite=overwrite)

    def _topic_schemas(self, options: SourceOptions) -> tuple[SchemaVersion, ...]:
        if self._schemas is None:
            from cepheid_spark.spark_schema import load_topic_schemas

            self._schemas = load_topic_schemas(options)
        return self._schemas


def _parse(options: Mapping[str, str], *, streaming: bool) -> SourceOptions:
    from cepheid_spark.options import parse_options
    from cepheid_spark.versions import require_spark

    require_spark()
    return parse_options(options, streaming=streaming)
