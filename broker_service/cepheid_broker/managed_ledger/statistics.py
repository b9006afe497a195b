"""What a managed ledger shows of itself: for stats, internal stats and the plan service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cepheid_metadata import ChainLedger, Position


@dataclass(frozen=True, slots=True)
class CursorStatistics:
    mark_delete: Position
    first_unacknowledged: Position
    backlog_entries: int
    acked_entries: int
    """Above the mark-delete position."""
    durable: bool
    active: bool
    refused_acks: int


@dataclass(frozen=True, slots=True)
class ManagedLedgerStatistics:
    state: str
    last_confirmed: Position
    ledgers: tuple[ChainLedger, ...]
    """As recorded: the one being written has neither entries nor size there."""
    waiting_deletions: int
    entries: int
    size_bytes: int
    current_ledger_entries: int
    current_ledger_bytes: int
    appended_entries: int
    """Since the topic was opened."""
    appended_bytes: int
    append_waiting_bytes: int
    rollovers: int
    trimmed_ledgers: int
    catch_up_reads: int
    catch_up_bytes: int
    cursors_rewound: int
    cursors: Mapping[str, CursorStatistics]
