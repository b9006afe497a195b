"""Finding places in a topic by what its entries say: the last message, and where a publish time begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cepheid_metadata import EARLIEST, Position
from cepheid_wire import BadTailError, MetadataView, read_metadata

if TYPE_CHECKING:
    from cepheid_managed_ledger import ManagedLedger


async def last_message(ledger: ManagedLedger) -> tuple[Position, int | None]:
    """The last entry, and the index of its last message when it is a batch (a batch of one has index 0, protocol.md §18).

    An empty topic has (-1, -1).
    """
    last = ledger.last_confirmed
    if not ledger.is_valid(last):
        return EARLIEST, None
    metadata = await _metadata_at(ledger, last)
    if metadata is None or metadata.num_messages_in_batch is None:
        return last, None
    return last, metadata.num_messages_in_batch - 1


async def position_at_time(ledger: ManagedLedger, time_ms: int) -> Position:
    """The entry after the last one whose publish time is below `time_ms`; the end when all are older.

    Binary search: publish times are the clients' clocks, so it is exact only as far as they rise (as in the reference broker).
    """
    ledgers = ledger.ledgers.copy()  # a trim meanwhile would renumber the entries
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
