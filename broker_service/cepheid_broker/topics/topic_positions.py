"""Finds positions in a topic by its entries: the last message, and where a publish time begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cepheid_metadata import EARLIEST, Position
from cepheid_wire import BadTailError, MetadataView, read_metadata

if TYPE_CHECKING:
    from cepheid_managed_ledger import ManagedLedger


async def last_message(ledger: ManagedLedger) -> tuple[Position, int | None]:
    """Return the last entry, and if it is a batch the index of its last message (a batch of one has index 0, protocol.md §18).

    For an empty topic the position is (-1, -1).
    """
    last = ledger.last_confirmed
    if not ledger.is_valid(last):
        return EARLIEST, None
    metadata = await _metadata_at(ledger, last)
    if metadata is None or metadata.num_messages_in_batch is None:
        return last, None
    return last, metadata.num_messages_in_batch - 1


async def position_at_time(ledger: ManagedLedger, time_ms: int) -> Position:
    """Return the entry after the last one published before `time_ms`; the end if all are older.

    Binary search: publish times come from clients' clocks, so it is exact only where they rise (as in the reference broker).
    """
    ledgers = ledger.ledgers.copy()  # a concurrent trim would renumber the entries
    start, end = 0, ledgers.total_entries
    while start < end:  # entries before `start` are older; entries from `end` on are not
        middle = (start + end) // 2
        metadata = await _metadata_at(ledger, ledgers.at_rank(middle + 1))
        if metadata is not None and metadata.publish_time_ms < time_ms:
            start = middle + 1
        else:
            end = middle
    return ledgers.next_position(ledgers.at_rank(start))


async def _metadata_at(ledger: ManagedLedger, position: Position) -> MetadataView | None:
    groups = ledger.read_cached(position, max_entries=1, max_bytes=1)
    if not groups:
        groups = await ledger.read(position, max_entries=1, max_bytes=1)
    for group in groups:
        try:
            return read_metadata(group.payload(group.first_entry_id))
        except BadTailError:
            return None
    return None
