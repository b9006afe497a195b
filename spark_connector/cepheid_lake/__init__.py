"""Exports of topics to tables: Parquet files in a folder or bucket, or an Iceberg table. Each message is there exactly once."""

from cepheid_lake.errors import ConcurrentExportError, LakeError, LakeTargetError
from cepheid_lake.export import ExportReport, export

__all__ = ["ConcurrentExportError", "ExportReport", "LakeError", "LakeTargetError", "export"]
