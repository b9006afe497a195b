"""A topic's ledgers with its cursors: append in order, read, acknowledge, trim. README.md has the rules."""

from cepheid_broker.managed_ledger.appender import AppendDone, SplitPosition
from cepheid_broker.managed_ledger.cursor import Cursor
from cepheid_broker.managed_ledger.errors import (
    ChainDamagedError,
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
    NoSuchCursorError,
    TooManyAppendsError,
    TooManyCursorsError,
    TopicTerminatedError,
)
from cepheid_broker.managed_ledger.ledger_list import LedgerList
from cepheid_broker.managed_ledger.managed_ledger import ManagedLedger, State
from cepheid_broker.managed_ledger.managed_ledgers import ManagedLedgers
from cepheid_broker.managed_ledger.settings import ManagedLedgerConfig, ManagedLedgerSettings
from cepheid_broker.managed_ledger.statistics import CursorStatistics, ManagedLedgerStatistics
from cepheid_broker.managed_ledger.tail_cache import TailCache, TailCacheStatistics
from cepheid_broker.managed_ledger.trim import Retention

__all__ = [
    "AppendDone",
    "ChainDamagedError",
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
    "NoSuchCursorError",
    "Retention",
    "SplitPosition",
    "State",
    "TailCache",
    "TailCacheStatistics",
    "TooManyAppendsError",
    "TooManyCursorsError",
    "TopicTerminatedError",
]
