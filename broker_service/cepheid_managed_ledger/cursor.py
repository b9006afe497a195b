"""The position of a subscription in a topic: what it has acknowledged, kept in memory, and when that is saved.

    acknowledge ───────► AckSet ─────────┐
    count_redelivery ──► DeliveryCounts ─┼─► changed ──► CursorStore: saved within cursor_flush_s, or before `saved()` returns
    set_sequence_ids ────────────────────┘

A save covers one moment of all three. A non-durable cursor belongs to a reader: it is never saved, it does not hold back trimming,
and trimming moves it forward.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from cepheid_managed_ledger.ack_set import AckSet, mask_of, words_of
from cepheid_managed_ledger.cursor_state import MAX_SEQUENCE_ID, CursorState, EncodedBatches, encode_state
from cepheid_managed_ledger.delivery_counts import DeliveryCounts
from cepheid_managed_ledger.ledger_list import LedgerList
from cepheid_metadata import Position

_BATCHES_IN_ONE_GO = 5_000  # encoded in about 2 ms


class CursorHome(Protocol):
    """Where durable cursors are saved."""

    def on_changed(self, cursor: Cursor) -> None: ...

    async def wait_saved(self, cursor: Cursor) -> None: ...

    async def reset(self, cursor: Cursor, position: Position, unacked_words: Sequence[int]) -> None: ...

    async def set_properties(self, cursor: Cursor, properties: Mapping[str, str]) -> None: ...


class Cursor:
    """A subscription's position. Created by `ManagedLedger`. Acknowledging is synchronous and in memory."""

    def __init__(
        self, name: str, ack_set: AckSet, ledgers: LedgerList, home: CursorHome | None, properties: Mapping[str, str]
    ) -> None:
        self.name = name
        self.properties = properties
        self.ack_set = ack_set
        self.active_from: Position | None = None
        """Where its consumers read next; None: no consumer keeps up. The tail cache keeps what active cursors need."""
        self.sequence_ids: Mapping[str, int] = {}
        """By producer: what deduplication knows about the entries up to the mark-delete position. Never changed in place."""
        self.is_rewound = False
        """Whether state was lost: sequence ids, and acknowledgements above a position that was saved earlier."""
        self.refused_acks = 0
        self.properties_changing = 0
        """Calls of `set_properties` under way: `properties` does not have their values yet."""
        self._counts = DeliveryCounts()
        self._changes = 0  # changes of counts and sequence ids
        self._ledgers = ledgers
        self._home = home

    def __repr__(self) -> str:
        return f"<Cursor {self.name}{'' if self.durable else ' (not durable)'}: {self.ack_set!r}>"

    @property
    def durable(self) -> bool:
        return self._home is not None

    @property
    def revision(self) -> int:
        """Counts changes, so that a save knows which state it saved. Starts over with `restart` and `restore`."""
        return self.ack_set.revision + self._changes

    async def encoded(self) -> tuple[int, Position, bytes]:
        """Return a revision, with a mark-delete position and state that have all of it, perhaps more.

        If many batches are partly acknowledged, they are encoded in steps while other tasks run.
        """
        revision, batches = self.revision, None
        if sum(map(len, self.ack_set.batches.values())) > _BATCHES_IN_ONE_GO:
            batches = await self._encoded_batches()
        others = () if batches is None else (batches,)
        return revision, self.mark_delete, encode_state(self.ack_set, self._counts, self.sequence_ids, *others)

    async def _encoded_batches(self) -> EncodedBatches:
        """Encode the present batches. What is acknowledged meanwhile is in the rest of the state, which takes precedence when
        read."""
        encoded = EncodedBatches()
        for ledger_id, batches in [(ledger_id, list(some.items())) for ledger_id, some in self.ack_set.batches.items()]:
            for start in range(0, len(batches), _BATCHES_IN_ONE_GO):
                encoded.add(ledger_id, batches[start : start + _BATCHES_IN_ONE_GO])
                await asyncio.sleep(0)
        return encoded

    @property
    def mark_delete(self) -> Position:
        return self.ack_set.mark_delete

    @property
    def backlog_entries(self) -> int:
        return self.ack_set.backlog_entries

    def acknowledge(self, positions: Iterable[Position]) -> list[Position]:
        """Acknowledge whole entries. Return those refused because they do not exist in this topic."""
        revision = self.ack_set.revision
        if self._counts:
            positions = list(positions)
            self._counts.forget(positions)
        refused = self.ack_set.acknowledge(positions)
        self.refused_acks += len(refused)
        self._note(revision)
        return refused

    def acknowledge_cumulative(self, position: Position, unacked_words: Sequence[int] | None = None, batch_size: int = 0) -> bool:
        """Acknowledge everything up to the entry; with words, everything before it and the messages of it whose bit is not set.

        False: refused, there is no such entry.
        """
        revision, before = self.ack_set.revision, self.ack_set.mark_delete
        if unacked_words is None:
            accepted = self.ack_set.acknowledge_cumulative(position)
        else:
            accepted = self.ack_set.acknowledge_messages_cumulative(position, mask_of(unacked_words), batch_size)
        self.refused_acks += not accepted
        self._forget_counts_since(before)
        self._note(revision)
        return accepted

    def acknowledge_indexes(self, position: Position, unacked_words: Sequence[int], batch_size: int) -> bool:
        """Acknowledge the messages of a batch whose bit is not set. False: refused."""
        revision = self.ack_set.revision
        accepted = self.ack_set.acknowledge_messages(position, mask_of(unacked_words), batch_size)
        self.refused_acks += not accepted
        if self._counts and self.ack_set.is_acknowledged(position):
            self._counts.forget((position,))
        self._note(revision)
        return accepted

    def is_acknowledged(self, position: Position) -> bool:
        return self.ack_set.is_acknowledged(position)

    def unacknowledged_from(self, position: Position) -> Position:
        """Return the first entry at or after `position` that is still to be delivered. It may not be written yet."""
        return self.ack_set.unacknowledged_from(position)

    def unacknowledged_runs(self, ledger_id: int, first: int, last: int) -> list[tuple[int, int]]:
        """Return the runs of entries in `first..last` (inclusive) that are still to be delivered."""
        return self.ack_set.unacknowledged_runs(ledger_id, first, last)

    def unacked_words(self, position: Position) -> tuple[int, ...] | None:
        """Return the mask of a partly acknowledged batch; None: the batch is not partly acknowledged."""
        batch = self.ack_set.unacked_messages(position)
        return None if batch is None else words_of(batch)

    def first_unacknowledged(self) -> Position:
        """Return the first entry that is not acknowledged, which may be the one that is written next."""
        return self.ack_set.first_unacknowledged()

    # Delivery counts

    def redelivery_counts_in(self, ledger_id: int) -> Mapping[int, int]:
        """Return how often entries of this ledger were redelivered, only counts above 0. The live mapping, not a copy."""
        return self._counts.in_ledger(ledger_id)

    def count_redelivery(self, ledger_id: int, entry_id: int) -> None:
        """Count a redelivery. It is saved in the next round, and dropped when the entry is acknowledged. `MAX_COUNTS` are kept."""
        if not self.ack_set.is_acknowledged(Position(ledger_id, entry_id)):
            self._counts.add(ledger_id, entry_id)
            self._note_change()

    # Sequence ids

    def set_sequence_ids(self, sequence_ids: Mapping[str, int]) -> None:
        """Replace all sequence ids. They are saved together with the cursor's present mark-delete position (C6)."""
        if not all(0 <= sequence_id <= MAX_SEQUENCE_ID for sequence_id in sequence_ids.values()):
            raise ValueError("sequence ids must be unsigned 64-bit numbers")
        self.sequence_ids = dict(sequence_ids)
        self._note_change()

    # Moving

    async def reset(self, position: Position, unacked_words: Sequence[int] = ()) -> None:
        """Start delivery at this entry, or at the first one after it. Durable before it returns.

        With words, the messages of that entry whose bit is not set are left out, if the entry exists. Acknowledgements that arrive
        meanwhile are void. Disconnect consumers first.
        """
        if self._home is not None:
            await self._home.reset(self, position, unacked_words)
        else:
            self.restart(AckSet.starting_at(self._ledgers, position, unacked_words))

    def restart(self, ack_set: AckSet) -> None:
        """Start delivery again: what was acknowledged and counted is void."""
        self.ack_set = ack_set
        self._counts.clear()

    def restore(self, state: CursorState) -> None:
        """Restore the saved state, as far as the chain still has its entries."""
        self.ack_set = state.ack_set(self._ledgers)
        self._counts = state.counts(self.ack_set)
        self.sequence_ids = state.sequence_ids

    def advance_to(self, position: Position) -> int:
        """Acknowledge everything up to `position` on behalf of the consumers; return how many entries that adds.

        Never moves back, or beyond the end.
        """
        before = self.ack_set.backlog_entries
        self.acknowledge_cumulative(self._ledgers.normalise(position))
        return before - self.ack_set.backlog_entries

    def nth_unacknowledged(self, number: int) -> Position | None:
        """Return the entry with `number - 1` unacknowledged ones before it. None: there are fewer."""
        return self.ack_set.nth_unacknowledged(number)

    def leave_trimmed(self, edge: Position) -> bool:
        """Move the cursor out of the ledgers before this edge, which leave the chain. Return whether it moved."""
        revision, before = self.ack_set.revision, self.ack_set.mark_delete
        self.ack_set.skip_to(edge)
        self._forget_counts_since(before)
        self._note(revision)
        return self.ack_set.mark_delete != before

    async def saved(self) -> None:
        """Return once everything acknowledged so far is durable. Raises ManagedLedgerError, MetadataError, LedgerError."""
        if self._home is not None:
            await self._home.wait_saved(self)

    async def set_properties(self, properties: Mapping[str, str]) -> None:
        """Replace all properties. Durable before it returns."""
        if self._home is None:
            self.properties = dict(properties)
            return
        self.properties_changing += 1
        try:
            await self._home.set_properties(self, properties)
        finally:
            self.properties_changing -= 1

    def _forget_counts_since(self, mark_delete_before: Position) -> None:
        if self._counts:
            self._counts.forget_between(mark_delete_before, self.ack_set.mark_delete)

    def _note_change(self) -> None:
        self._changes += 1
        if self._home is not None:
            self._home.on_changed(self)

    def _note(self, revision_before: int) -> None:
        if self._home is not None and self.ack_set.revision != revision_before:
            self._home.on_changed(self)
