"""Ledgers and cursors of a topic as `PersistentTopicInternalStats` (docs/reference/shapes.md §4)."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any

from cepheid_broker.publishing import sequence_ids_of
from cepheid_metadata import ChainLedger, Position
from cepheid_ports import iso_time

if TYPE_CHECKING:
    from pyroaring import BitMap

    from cepheid_managed_ledger import CursorStatistics, ManagedLedgerStatistics

_NO_LEDGER = {"ledgerId": -1, "entries": -1, "size": -1, "offloaded": False, "underReplicated": False}
_MAX_SHOWN_ENTRIES = 1000  # acknowledged out of order, per cursor: the text is for people
_STATES = {"open": "LedgerOpened", "terminated": "Terminated", "failed": "Fenced", "closed": "Closed", "deleted": "Closed"}


def internal_stats(
    figures: ManagedLedgerStatistics,
    acked: Mapping[str, Mapping[int, BitMap]],
    *,
    read_positions: Mapping[str, Position],
    pending_entries: int,
    last_ledger_created_at_ms: int,
    ledger_metadata: Mapping[int, str],
    offloaded: Container[int] = (),
) -> dict[str, Any]:
    """Return the statistics. By cursor: `acked`, acknowledged entries above its mark-delete position, and `read_positions`.

    `offloaded`: ledgers with a complete copy in an object store. Tools compute from the ledgers how much to offload: in order, with
    their sizes, the open one last with entries and size 0.
    """
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
        "state": _STATES[figures.state] if figures.lacking is None else "ClosedLedger",
        **({} if figures.lacking is None else {"notPublishing": figures.lacking}),
        "ledgers": [
            _ledger(recorded, ledger_metadata.get(recorded.ledger_id), recorded.ledger_id in offloaded)
            for recorded in figures.ledgers
        ],
        "cursors": {
            name: _cursor(cursor, figures, acked_ranges(acked.get(name, {})), read_positions.get(name))
            for name, cursor in figures.cursors.items()
        },
        "schemaLedgers": [],
        "compactedLedger": _NO_LEDGER,
    }


def acked_ranges(acked: Mapping[int, BitMap]) -> list[str]:
    """Return ranges as Pulsar writes them: `(12:3..12:5]` is entries 4 and 5 of ledger 12. A shortened list ends with `…`."""
    ranges: list[str] = []
    shown = 0
    for ledger_id, entries in acked.items():
        first = last = None
        for entry_id in entries:
            if last is not None and entry_id == last + 1:
                last = entry_id
            else:
                if first is not None:
                    ranges.append(f"({ledger_id}:{first - 1}..{ledger_id}:{last}]")
                first = last = entry_id
            shown += 1
            if shown == _MAX_SHOWN_ENTRIES:
                return [*ranges, "…"]
        if first is not None:
            ranges.append(f"({ledger_id}:{first - 1}..{ledger_id}:{last}]")
    return ranges


def _ledger(recorded: ChainLedger, metadata: str | None, offloaded: bool) -> dict[str, Any]:
    return {
        "ledgerId": recorded.ledger_id,
        "entries": recorded.entries or 0,
        "size": recorded.size_bytes,
        "offloaded": offloaded,
        "underReplicated": False,
        "properties": {},
        **({} if metadata is None else {"metadata": metadata}),
    }


def _cursor(
    cursor: CursorStatistics, figures: ManagedLedgerStatistics, acked: list[str], read_position: Position | None
) -> dict[str, Any]:
    return {
        "markDeletePosition": str(cursor.mark_delete),
        "readPosition": str(read_position or cursor.first_unacknowledged),
        "waitingReadOp": cursor.active and cursor.backlog_entries == 0,
        "pendingReadOps": 0,
        "messagesConsumedCounter": figures.appended_entries - cursor.backlog_entries,  # tools subtract it to get the backlog
        "cursorLedger": -1 if cursor.cursor_ledger_id is None else cursor.cursor_ledger_id,
        "cursorLedgerLastEntry": -1,
        "individuallyDeletedMessages": f"[{','.join(acked)}]",
        "state": "NoLedger" if cursor.cursor_ledger_id is None else "Open",
        "active": cursor.active,
        "numberOfEntriesSinceFirstNotAckedMessage": cursor.backlog_entries + cursor.acked_entries,
        "totalNonContiguousDeletedMessagesRange": len(acked),
        "subscriptionHavePendingRead": False,
        "subscriptionHavePendingReplayRead": False,
        "properties": sequence_ids_of(cursor.sequence_ids),  # of deduplication: highest sequence id by producer
    }
