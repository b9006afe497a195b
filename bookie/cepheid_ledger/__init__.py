"""Ledgers: append, close, fence and recover, read; and the rule for where readers of a chain stop."""

from cepheid_ledger.bookie_channel import ChannelStatistics
from cepheid_ledger.chain_end import check_end, readable_end
from cepheid_ledger.change_slots import EnsembleChangeStatistics
from cepheid_ledger.client import BookieConnections, BookieStates, LedgerClient, NewLedger
from cepheid_ledger.ensemble_names import bookies_of
from cepheid_ledger.entry_copy import CopyFailedError, CopyReport, CopyTask
from cepheid_ledger.errors import (
    BookieProtocolError,
    EntryBeyondEndError,
    EntryDamagedError,
    EntryUnavailableError,
    InvalidQuorumsError,
    LedgerClientClosedError,
    LedgerClosedError,
    LedgerError,
    LedgerFencedError,
    LedgerLostError,
    LedgerTooShortError,
    LedgerWriteError,
    NoSuchEntryError,
    NoSuchLedgerError,
    NotEnoughBookiesError,
    NotEnoughRacksError,
    RecoveryFailedError,
    TailDamagedError,
    UnauthorizedLedgerError,
    WriteBackFailedError,
    is_entry_gone,
)
from cepheid_ledger.ledger_reader import LedgerReader
from cepheid_ledger.ledger_writer import ClosedLedger, LedgerWriter, WriterPhase
from cepheid_ledger.master_key import master_key_of
from cepheid_ledger.metadata_edits import assert_legal_change, bookies_replaced, entries_of, is_finished
from cepheid_ledger.placement import Placement, RackAwarePlacement
from cepheid_ledger.rack_spread import PlacementMove, Vacancy, can_separate, placement_shortfall, repeated_racks
from cepheid_ledger.recovery import FoundEnd
from cepheid_ledger.settings import LedgerSettings
from cepheid_ledger.unconfirmed import GroupDone

__all__ = [
    "BookieConnections",
    "BookieProtocolError",
    "BookieStates",
    "ChannelStatistics",
    "ClosedLedger",
    "CopyFailedError",
    "CopyReport",
    "CopyTask",
    "EnsembleChangeStatistics",
    "EntryBeyondEndError",
    "EntryDamagedError",
    "EntryUnavailableError",
    "FoundEnd",
    "GroupDone",
    "InvalidQuorumsError",
    "LedgerClient",
    "LedgerClientClosedError",
    "LedgerClosedError",
    "LedgerError",
    "LedgerFencedError",
    "LedgerLostError",
    "LedgerReader",
    "LedgerSettings",
    "LedgerTooShortError",
    "LedgerWriteError",
    "LedgerWriter",
    "NewLedger",
    "NoSuchEntryError",
    "NoSuchLedgerError",
    "NotEnoughBookiesError",
    "NotEnoughRacksError",
    "Placement",
    "PlacementMove",
    "RackAwarePlacement",
    "RecoveryFailedError",
    "TailDamagedError",
    "UnauthorizedLedgerError",
    "Vacancy",
    "WriteBackFailedError",
    "WriterPhase",
    "assert_legal_change",
    "bookies_of",
    "bookies_replaced",
    "can_separate",
    "check_end",
    "entries_of",
    "is_entry_gone",
    "is_finished",
    "master_key_of",
    "placement_shortfall",
    "readable_end",
    "repeated_racks",
]
