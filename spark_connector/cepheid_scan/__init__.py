"""The history of topics as Arrow tables, read straight from the bookies. Cheap to import: pyarrow and grpc come with first use.

Besides `scan` there are the types that callers give to it, and the errors that they handle. The others are in cepheid_decode.
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
