"""Exports of topics to tables, each message exactly once: Parquet files in a folder or bucket, or an Iceberg table."""

from cepheid_lake.errors import ConcurrentExportError, LakeError, LakeTargetError
from cepheid_lake.export import ExportReport, export

__all__ = ["ConcurrentExportError", "ExportReport", "LakeError", "LakeTargetError", "export"]
