"""The history of topics as Arrow tables, read directly from the bookies. Cheap to import: pyarrow and grpc are loaded on first use.

It exports `scan`, the types of its arguments, and the errors that callers handle. Other types are in cepheid_decode.
"""

from cepheid_decode import (
    BadOptionError,
    BadRecordError,
    DamagedEntryError,
    DataLossError,
    EntriesUnreadableError,
    MessagePosition,
    NoSuchTopicError,
    PlanUnavailableError,
    ReadSettings,
    ScanCounters,
    ScanError,
    StorageAccess,
)
from cepheid_scan.scan import scan

__all__ = [
    "BadOptionError",
    "BadRecordError",
    "DamagedEntryError",
    "DataLossError",
    "EntriesUnreadableError",
    "MessagePosition",
    "NoSuchTopicError",
    "PlanUnavailableError",
    "ReadSettings",
    "ScanCounters",
    "ScanError",
    "StorageAccess",
    "scan",
]
