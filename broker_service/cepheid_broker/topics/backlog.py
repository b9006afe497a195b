"""A subscription's backlog: entries, messages, bytes, and the age of the oldest entry.

    known_backlog    at once, from memory; None where memory does not have it
    exact_backlog    exact, by reading if needed: the header of one entry, or the counts of a ledger once (message_counts.py)

Entries acknowledged out of order and acknowledged parts of batches do not count. The age is that of the first entry not (fully)
acknowledged, by its producer's clock; an entry dated in the future is 0 s old.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cepheid_managed_ledger import Cursor, ManagedLedger


@dataclass(frozen=True, slots=True)
class Backlog:
    """Exact backlog of a subscription. `oldest_…` None: there is no backlog."""

    entries: int
    messages: int
    bytes: int
    oldest_publish_time_ms: int | None
    oldest_age_s: float | None


@dataclass(frozen=True, slots=True)
class KnownBacklog:
    """Backlog as far as memory has it, exact. None: unknown without reading; for `oldest_…` also: there is no backlog."""

    entries: int
    messages: int | None
    bytes: int | None
    oldest_publish_time_ms: int | None
    oldest_age_s: float | None


def known_backlog(ledger: ManagedLedger, cursor: Cursor) -> KnownBacklog:
    entries = cursor.backlog_entries
    if entries == 0:
        return KnownBacklog(0, 0, 0, None, None)
    amount = ledger.counts.unacknowledged_known(cursor.ack_set)
    oldest_ms = ledger.publish_times.known(cursor.first_unacknowledged())
    return KnownBacklog(
        entries,
        None if amount is None else amount.messages,
        None if amount is None else amount.size_bytes,
        oldest_ms,
        age_s(ledger, oldest_ms),
    )


async def exact_backlog(ledger: ManagedLedger, cursor: Cursor) -> Backlog:
    """Return the exact backlog. Raises ManagedLedgerError, LedgerError, MetadataError if a needed read fails."""
    amount = await ledger.counts.unacknowledged(cursor.ack_set)
    oldest_ms = await oldest_publish_time_ms(ledger, cursor) if amount.entries else None
    return Backlog(amount.entries, amount.messages, amount.size_bytes, oldest_ms, age_s(ledger, oldest_ms))


async def oldest_publish_time_ms(ledger: ManagedLedger, cursor: Cursor) -> int | None:
    """Return the publish time of the first unacknowledged entry; None if no such entry is readable."""
    while cursor.backlog_entries and (first := cursor.first_unacknowledged()) <= ledger.last_confirmed:
        published_ms = await ledger.publish_times.at(first)
        if published_ms is not None:
            return published_ms
    return None


def age_s(ledger: ManagedLedger, published_ms: int | None) -> float | None:
    return None if published_ms is None else max(0, ledger.wall_ms() - published_ms) / 1000


@dataclass(frozen=True, slots=True)
class MeasuredBacklog:
    """Backlog for statistics, always with a figure in bytes; `is_exact`: it excludes what was acknowledged out of order.

    `kept_bytes`: everything after the mark-delete position, which must be kept.
    """

    entries: int
    messages: int | None
    bytes: int
    kept_bytes: int
    is_exact: bool
    oldest_publish_time_ms: int | None
    oldest_age_s: float | None


async def measure_backlog(ledger: ManagedLedger, cursor: Cursor, *, precise: bool, oldest: bool) -> MeasuredBacklog:
    """Return what memory knows, reading at most one header and (`oldest`) one entry; with `precise`, as `exact_backlog`."""
    known = known_backlog(ledger, cursor)
    messages, size_bytes = known.messages, known.bytes
    kept_bytes = await ledger.counts.bytes_after(cursor.mark_delete)
    if size_bytes is None and not cursor.ack_set.acked_entries:
        size_bytes = kept_bytes
    if precise and (messages is None or size_bytes is None):
        exact = await exact_backlog(ledger, cursor)
        messages, size_bytes = exact.messages, exact.bytes
    oldest_ms = known.oldest_publish_time_ms
    if oldest_ms is None and oldest:
        oldest_ms = await oldest_publish_time_ms(ledger, cursor)
    return MeasuredBacklog(
        cursor.backlog_entries,
        messages,
        kept_bytes if size_bytes is None else size_bytes,
        kept_bytes,
        size_bytes is not None,
        oldest_ms,
        age_s(ledger, oldest_ms),
    )
