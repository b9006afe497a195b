"""What a managed ledger shows of itself: for stats, internal stats and the plan service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cepheid_managed_ledger.cursor import Cursor
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
    cursor_ledger_id: int | None
    """None: its state is in its record."""
    sequence_ids: Mapping[str, int]

    @classmethod
    def of(cls, cursor: Cursor, cursor_ledger_id: int | None = None) -> CursorStatistics:
        return cls(
            mark_delete=cursor.mark_delete,
            first_unacknowledged=cursor.first_unacknowledged(),
            backlog_entries=cursor.backlog_entries,
            acked_entries=cursor.ack_set.acked_entries,
            durable=cursor.durable,
            active=cursor.active_from is not None,
            refused_acks=cursor.refused_acks,
            cursor_ledger_id=cursor_ledger_id,
            sequence_ids=cursor.sequence_ids,
        )


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
    lacking: str | None
    """Why there is no open ledger; None: there is one, or the topic is terminated."""
    append_waiting_bytes: int
    rollovers: int
    failovers: int
    """Ledgers that broke and were replaced."""
    trimmed_ledgers: int
    catch_up_reads: int
    catch_up_bytes: int
    cursors_rewound: int
    cursors: Mapping[str, CursorStatistics]
