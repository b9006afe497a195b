"""Statistics of a managed ledger, for stats, internal stats and the plan service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cepheid_managed_ledger.cursor import Cursor
from cepheid_metadata import ChainLedger, Position


@dataclass(frozen=True, slots=True)
class CursorStatistics:
    mark_delete: Position
    first_unacknowledged: Position
    backlog_entries: int
    acked_entries: int
    """Acknowledged entries above the mark-delete position."""
    durable: bool
    active: bool
    refused_acks: int
    cursor_ledger_id: int | None
    """The ledger with the cursor's state; None: the state is in its record."""
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
class OffloadStatistics:
    """The ledgers of one topic in object stores."""

    ledgers: int = 0
    """Ledgers with a complete copy in an object store."""
    size_bytes: int = 0
    """Bytes of their entries."""
    object_bytes: int = 0
    """Bytes of their objects."""
    off_bookies_ledgers: int = 0
    """Those of these ledgers that are not on bookies any more."""
    off_bookies_bytes: int = 0
    uploading_ledger_id: int | None = None
    due_ledgers: int = 0
    """Ledgers that are due to be offloaded, and not complete yet."""
    refused_ledgers: int = 0
    """Those of the due ledgers whose offload failed for a lasting reason."""
    refused: Mapping[int, str] = field(default_factory=dict)
    """The reasons by ledger id, for the oldest ledgers."""
    not_held_ledgers: int = 0
    """Due ledgers that retention no longer waits for, because their offload has failed for too long."""
    oldest_due_age_ms: int | None = None
    """Time since the oldest due ledger was closed; None: none is due. It grows while offloading fails, or cannot keep up."""
    last_success_at_ms: int = 0
    """Wall clock, since the topic was opened; 0: never."""
    last_failure_at_ms: int = 0
    failing_since_ms: int = 0
    """Wall clock of the first failure after the last success; 0: the last offload succeeded."""
    last_error: str | None = None
    """Why the last offload failed; None: it succeeded."""
    uploaded_ledgers: int = 0
    """Ledgers uploaded since the topic was opened."""
    uploaded_bytes: int = 0
    failures: int = 0
    waiting_object_deletions: int = 0
    object_deletion_error: str | None = None
    object_reads: int = 0
    object_read_bytes: int = 0
    other_copy_reads: int = 0
    """Reads answered from bookies because the object failed, or the other way round."""


@dataclass(frozen=True, slots=True)
class ManagedLedgerStatistics:
    state: str
    last_confirmed: Position
    ledgers: tuple[ChainLedger, ...]
    """The ledgers as recorded: the one being written has neither entries nor size there."""
    waiting_deletions: int
    entries: int
    size_bytes: int
    current_ledger_entries: int
    current_ledger_bytes: int
    appended_entries: int
    """Entries appended since the topic was opened."""
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
    offload: OffloadStatistics
