"""The history of topics as Arrow tables, read straight from the bookies. Cheap to import: pyarrow and grpc come with first use."""

from cepheid_scan.counters import ScanCounters
from cepheid_scan.errors import (
    AdminRefusedError,
    BadOptionError,
    BadRecordError,
    DamagedEntryError,
    DataLossError,
    EntriesUnreadableError,
    NoSuchTopicError,
    PlanUnavailableError,
    ScanError,
)
from cepheid_scan.history import (
    NO_PARTITION,
    Fragment,
    HistoryPlan,
    LedgerHistory,
    Piece,
    ScanTask,
    SchemaVersion,
    TopicHistory,
)
from cepheid_scan.positions import WHOLE_ENTRY, MessagePosition
from cepheid_scan.scan import scan
from cepheid_scan.scan_request import (
    EARLIEST,
    LATEST,
    Edge,
    OnBadRecord,
    PlanSource,
    ReadMode,
    ReadSettings,
    RowFilter,
    ScanRequest,
    ScanSpec,
    TopicSelection,
)

__all__ = [
    "EARLIEST",
    "LATEST",
    "NO_PARTITION",
    "WHOLE_ENTRY",
    "AdminRefusedError",
    "BadOptionError",
    "BadRecordError",
    "DamagedEntryError",
    "DataLossError",
    "Edge",
    "EntriesUnreadableError",
    "Fragment",
    "HistoryPlan",
    "LedgerHistory",
    "MessagePosition",
    "NoSuchTopicError",
    "OnBadRecord",
    "Piece",
    "PlanSource",
    "PlanUnavailableError",
    "ReadMode",
    "ReadSettings",
    "RowFilter",
    "ScanCounters",
    "ScanError",
    "ScanRequest",
    "ScanSpec",
    "ScanTask",
    "SchemaVersion",
    "TopicHistory",
    "TopicSelection",
    "scan",
]
