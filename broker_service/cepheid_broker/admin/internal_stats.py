"""What lies below a topic, in the shape of `PersistentTopicInternalStats` (docs/reference/shapes.md §4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cepheid_broker.admin.topic_stats import iso_time
from cepheid_broker.topic import Topic
from cepheid_metadata import Chain, ChainLedger

if TYPE_CHECKING:
    from cepheid_broker.managed_ledger import Cursor

_NO_LEDGER = {"ledgerId": -1, "entries": -1, "size": -1, "offloaded": False, "underReplicated": False}


def internal_stats(topic: Topic, chain: Chain, last_ledger_created_at_ms: int) -> dict[str, Any]:
    """Tools compute from the ledgers how much to offload: in order, with their sizes, the open one last with entries and size 0."""
    ledger = topic.ledger
    figures = ledger.statistics()
    ended_entries = sum(recorded.entries or 0 for recorded in chain.ledgers)
    ended_bytes = sum(recorded.size_bytes for recorded in chain.ledgers)
    return {
        "entriesAddedCounter": figures.entries_added,
        "numberOfEntries": figures.entries,
        "totalSize": figures.size_bytes,
        "currentLedgerEntries": max(0, figures.entries - ended_entries),
        "currentLedgerSize": max(0, figures.size_bytes - ended_bytes),
        "lastLedgerCreatedTimestamp": iso_time(last_ledger_created_at_ms),
        "waitingCursorsCount": 0,
        "pendingAddEntriesCount": sum(producer.pending_entries for producer in topic.producers.values()),
        "lastConfirmedEntry": str(ledger.last_confirmed),
        "state": "LedgerOpened" if chain.terminated_at is None else "Terminated",
        "ledgers": [_ledger(recorded) for recorded in chain.ledgers],
        "cursors": {name: _cursor(cursor, figures.entries_added) for name, cursor in ledger.cursors.items()},
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


def _cursor(cursor: Cursor, entries_added: int) -> dict[str, Any]:
    return {
        "markDeletePosition": str(cursor.mark_delete),
        "readPosition": str(cursor.first_unacknowledged()),
        "waitingReadOp": False,
        "pendingReadOps": 0,
        "messagesConsumedCounter": entries_added - cursor.backlog_entries,  # backlog = added - consumed, for who computes it
        "cursorLedger": -1,
        "cursorLedgerLastEntry": -1,
        "individuallyDeletedMessages": "[]",
        "state": "Open",
        "active": cursor.active_from is not None,
        "numberOfEntriesSinceFirstNotAckedMessage": 0,
        "totalNonContiguousDeletedMessagesRange": 0,
        "subscriptionHavePendingRead": False,
        "subscriptionHavePendingReplayRead": False,
        "properties": {},
    }
