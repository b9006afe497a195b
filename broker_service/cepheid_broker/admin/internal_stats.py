"""What lies below a topic, in the shape of `PersistentTopicInternalStats` (docs/reference/shapes.md §4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cepheid_broker.admin.topic_stats import iso_time
from cepheid_metadata import ChainLedger

if TYPE_CHECKING:
    from cepheid_broker.managed_ledger import CursorStatistics, ManagedLedgerStatistics

_NO_LEDGER = {"ledgerId": -1, "entries": -1, "size": -1, "offloaded": False, "underReplicated": False}
_STATES = {"open": "LedgerOpened", "terminated": "Terminated", "failed": "Fenced", "closed": "Closed", "deleted": "Closed"}


def internal_stats(figures: ManagedLedgerStatistics, *, pending_entries: int, last_ledger_created_at_ms: int) -> dict[str, Any]:
    """Tools compute from the ledgers how much to offload: in order, with their sizes, the open one last with entries and size 0."""
    return {
        "entriesAddedCounter": figures.appended_entries,
        "numberOfEntries": figures.entries,
        "totalSize": figures.size_bytes,
        "currentLedgerEntries": figures.current_ledger_entries,
        "currentLedgerSize": figures.current_ledger_bytes,
        "lastLedgerCreatedTimestamp": iso_time(last_ledger_created_at_ms),
        "waitingCursorsCount": sum(cursor.active and cursor.backlog_entries == 0 for cursor in figures.cursors.values()),
        "pendingAddEntriesCount": pending_entries,
        "lastConfirmedEntry": str(figures.last_confirmed),
        "state": _STATES[figures.state],
        "ledgers": [_ledger(recorded) for recorded in figures.ledgers],
        "cursors": {name: _cursor(cursor, figures) for name, cursor in figures.cursors.items()},
        "schemaLedgers": [],
        "compactedLedger": _NO_LEDGER,
    }


def _ledger(recorded: ChainLedger) -> dict[str, Any]:
    return {
        "ledgerId": recorded.ledger_id,
        "entries": recorded.entries or 0,
        "size": recorded.size_bytes,
        "offloaded": False,
        "underReplicated": False,
        "properties": {},
    }


def _cursor(cursor: CursorStatistics, figures: ManagedLedgerStatistics) -> dict[str, Any]:
    return {
        "markDeletePosition": str(cursor.mark_delete),
        "readPosition": str(cursor.first_unacknowledged),
        "waitingReadOp": cursor.active and cursor.backlog_entries == 0,
        "pendingReadOps": 0,
        "messagesConsumedCounter": figures.appended_entries - cursor.backlog_entries,  # tools subtract it to get the backlog
        "cursorLedger": -1,
        "cursorLedgerLastEntry": -1,
        "individuallyDeletedMessages": "[]",
        "state": "Open",
        "active": cursor.active,
        "numberOfEntriesSinceFirstNotAckedMessage": cursor.backlog_entries + cursor.acked_entries,
        "totalNonContiguousDeletedMessagesRange": 0,
        "subscriptionHavePendingRead": False,
        "subscriptionHavePendingReplayRead": False,
        "properties": {},
    }
