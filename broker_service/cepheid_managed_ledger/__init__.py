"""A topic's ledgers and cursors: append in order, read, acknowledge, trim. The rules are in README.md."""

from cepheid_managed_ledger.ack_set import MAX_BATCH_MESSAGES, AckSet
from cepheid_managed_ledger.appender import AppendDone, SplitPosition
from cepheid_managed_ledger.closed_work import ClosedWork, Reason, closed_work
from cepheid_managed_ledger.cursor import Cursor
from cepheid_managed_ledger.errors import (
    ChainDamagedError,
    ChainNotDeletableError,
    CursorExistsError,
    CursorLedgerError,
    CursorStateDamagedError,
    CursorStateNewerError,
    EntryTrimmedError,
    ManagedLedgerClosedError,
    ManagedLedgerDeletedError,
    ManagedLedgerError,
    ManagedLedgerFailedError,
    ManagedLedgerFencedError,
    NoObjectStoreError,
    NoOpenLedgerError,
    NoSuchCursorError,
    OffloadError,
    OffloadOffError,
    OffloadRunningError,
    TooManyAppendsError,
    TooManyCursorsError,
    TopicTerminatedError,
)
from cepheid_managed_ledger.finish import finish
from cepheid_managed_ledger.ledger_list import LedgerList
from cepheid_managed_ledger.managed_ledger import ManagedLedger, State
from cepheid_managed_ledger.managed_ledgers import ManagedLedgers
from cepheid_managed_ledger.offload_plan import due_ledgers
from cepheid_managed_ledger.offload_pool import OffloadPool
from cepheid_managed_ledger.offloader import OffloadState, OffloadStatus
from cepheid_managed_ledger.settings import ManagedLedgerConfig, ManagedLedgerSettings, OffloadConfig
from cepheid_managed_ledger.statistics import CursorStatistics, ManagedLedgerStatistics, OffloadStatistics
from cepheid_managed_ledger.stored_copies import is_entry_gone
from cepheid_managed_ledger.tail_cache import TailCache, TailCacheStatistics
from cepheid_managed_ledger.trim import Retention
from cepheid_managed_ledger.under_replicated import UnderReplicatedFigures

__all__ = [
    "MAX_BATCH_MESSAGES",
    "AckSet",
    "AppendDone",
    "ChainDamagedError",
    "ChainNotDeletableError",
    "ClosedWork",
    "Cursor",
    "CursorExistsError",
    "CursorLedgerError",
    "CursorStateDamagedError",
    "CursorStateNewerError",
    "CursorStatistics",
    "EntryTrimmedError",
    "LedgerList",
    "ManagedLedger",
    "ManagedLedgerClosedError",
    "ManagedLedgerConfig",
    "ManagedLedgerDeletedError",
    "ManagedLedgerError",
    "ManagedLedgerFailedError",
    "ManagedLedgerFencedError",
    "ManagedLedgerSettings",
    "ManagedLedgerStatistics",
    "ManagedLedgers",
    "NoObjectStoreError",
    "NoOpenLedgerError",
    "NoSuchCursorError",
    "OffloadConfig",
    "OffloadError",
    "OffloadOffError",
    "OffloadPool",
    "OffloadRunningError",
    "OffloadState",
    "OffloadStatistics",
    "OffloadStatus",
    "Reason",
    "Retention",
    "SplitPosition",
    "State",
    "TailCache",
    "TailCacheStatistics",
    "TooManyAppendsError",
    "TooManyCursorsError",
    "TopicTerminatedError",
    "UnderReplicatedFigures",
    "closed_work",
    "due_ledgers",
    "finish",
    "is_entry_gone",
]
