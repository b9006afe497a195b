"""Reads one entry of a topic's ledger, and messages of a batch in it."""

from __future__ import annotations

from cepheid_managed_ledger import ManagedLedger
from cepheid_metadata import Position
from cepheid_wire import BadTailError, read_metadata

_WORD_BITS = 64


async def read_entry(ledger: ManagedLedger, position: Position) -> memoryview | bytes | None:
    """Return the entry's tail; None if it does not exist or was trimmed."""
    if not ledger.is_valid(position):
        return None
    groups = ledger.read_cached(position, max_entries=1, max_bytes=1)
    if not groups:
        groups = await ledger.read(position, max_entries=1, max_bytes=1)
    if not groups or (groups[0].ledger_id, groups[0].first_entry_id) != position:
        return None
    return groups[0].payload(position.entry_id)


async def from_message(ledger: ManagedLedger, position: Position, index: int) -> tuple[Position, tuple[int, ...]]:
    """Return the entry from which delivery continues with message `index`, and the words of messages to deliver in it.

    No words: all of it, as for an entry that is not a batch.
    """
    tail = await read_entry(ledger, position)
    if tail is None:
        return position, ()
    messages = _messages_in(tail)
    if index >= messages:
        return Position(position.ledger_id, position.entry_id + 1), ()
    mask = (1 << messages) - (1 << index)
    words = (mask >> start & (1 << _WORD_BITS) - 1 for start in range(0, messages, _WORD_BITS))
    return position, tuple(words) if index > 0 else ()


def _messages_in(tail: memoryview | bytes) -> int:
    try:
        return read_metadata(tail).num_messages
    except BadTailError:
        return 1
