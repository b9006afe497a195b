"""One position of one subscription in a topic: what it has acknowledged, in memory, and when that is saved.

    acknowledge ──► AckSet ──► changed ──► CursorStore: saved within cursor_flush_s, or before `saved()` returns

A non-durable cursor is a reader's: nothing of it is saved, it does not hold trimming, and trimming moves it forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from cepheid_broker.managed_ledger.ack_set import AckSet, mask_of, words_of
from cepheid_broker.managed_ledger.ledger_list import LedgerList
from cepheid_metadata import Position


class CursorHome(Protocol):
    """Where durable cursors are saved."""

    def on_changed(self, cursor: Cursor) -> None: ...

    async def wait_saved(self, cursor: Cursor) -> None: ...

    async def reset(self, cursor: Cursor, position: Position) -> None: ...


class Cursor:
    """Made by `ManagedLedger`. Acknowledging is synchronous and in memory."""

    def __init__(
        self, name: str, ack_set: AckSet, ledgers: LedgerList, home: CursorHome | None, properties: Mapping[str, str]
    ) -> None:
        self.name = name
        self.properties = properties
        self.ack_set = ack_set
        self.active_from: Position | None = None
        """Where its consumers read next; None: it has none that keep up. The tail cache keeps what active cursors need."""
        self.refused_acks = 0
        self._ledgers = ledgers
        self._home = home

    def __repr__(self) -> str:
        return f"<Cursor {self.name}{'' if self.durable else ' (not durable)'}: {self.ack_set!r}>"

    @property
    def durable(self) -> bool:
        return self._home is not None

    @property
    def mark_delete(self) -> Position:
        return self.ack_set.mark_delete

    @property
    def backlog_entries(self) -> int:
        return self.ack_set.backlog_entries

    def acknowledge(self, positions: Iterable[Position]) -> list[Position]:
        """Returns those refused: no such entries exist in this topic."""
        revision = self.ack_set.revision
        refused = self.ack_set.acknowledge(positions)
        self.refused_acks += len(refused)
        self._note(revision)
        return refused

    def acknowledge_cumulative(self, position: Position, unacked_words: Sequence[int] | None = None, batch_size: int = 0) -> bool:
        """Everything up to the entry; with words: everything before it, and the messages of it whose bit is not set.
        False: refused, there is no such entry."""
        revision = self.ack_set.revision
        if unacked_words is None:
            accepted = self.ack_set.acknowledge_cumulative(position)
        else:
            accepted = self.ack_set.acknowledge_messages_cumulative(position, mask_of(unacked_words), batch_size)
        self.refused_acks += not accepted
        self._note(revision)
        return accepted

    def acknowledge_indexes(self, position: Position, unacked_words: Sequence[int], batch_size: int) -> bool:
        """The messages of a batch whose bit is not set. False: refused."""
        revision = self.ack_set.revision
        accepted = self.ack_set.acknowledge_messages(position, mask_of(unacked_words), batch_size)
        self.refused_acks += not accepted
        self._note(revision)
        return accepted

    def is_acknowledged(self, position: Position) -> bool:
        return self.ack_set.is_acknowledged(position)

    def unacknowledged_runs(self, ledger_id: int, first: int, last: int) -> list[tuple[int, int]]:
        """What of the entries `first..last` (inclusive) is still to be delivered."""
        return self.ack_set.unacknowledged_runs(ledger_id, first, last)

    def unacked_words(self, position: Position) -> tuple[int, ...] | None:
        """Of a partly acknowledged batch; None: no message of it was acknowledged apart from the others."""
        batch = self.ack_set.unacked_messages(position)
        return None if batch is None else words_of(batch)

    def first_unacknowledged(self) -> Position:
        """May be the entry that will be written next."""
        return self.ack_set.first_unacknowledged()

    async def reset(self, position: Position) -> None:
        """Delivery starts at this entry, or at the first one after it. Durable before it returns.

        Acknowledgements that arrive meanwhile are void. Disconnect consumers first."""
        if self._home is not None:
            await self._home.reset(self, position)
        else:
            self.ack_set = AckSet(self._ledgers, self._ledgers.previous_position(position))

    def leave_trimmed(self, edge: Position) -> None:
        """Ledgers before this edge leave the chain: the cursor does not stay in one of them."""
        revision = self.ack_set.revision
        self.ack_set.skip_to(edge)
        self._note(revision)

    async def saved(self) -> None:
        """Returns when everything acknowledged so far is durable. Raises ManagedLedgerError, MetadataError, LedgerError."""
        if self._home is not None:
            await self._home.wait_saved(self)

    def _note(self, revision_before: int) -> None:
        if self._home is not None and self.ack_set.revision != revision_before:
            self._home.on_changed(self)
