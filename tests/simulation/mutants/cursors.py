"""Mistakes in what cursors save, load and reset."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from cepheid_managed_ledger import cursor, cursor_store, saved_cursor
from cepheid_managed_ledger.ack_set import AckSet
from cepheid_managed_ledger.cursor_state import CursorState, encode_state
from cepheid_managed_ledger.cursor_store import CursorStore
from cepheid_managed_ledger.delivery_counts import DeliveryCounts
from cepheid_managed_ledger.ledger_list import LedgerList
from cepheid_managed_ledger.saved_cursor import SavedCursor
from cepheid_metadata import Op, Position
from tests.simulation.mutants.registry import mutant


@mutant("C2")
@contextlib.contextmanager
def save_no_part_of_a_batch() -> Iterator[None]:
    """Part of a batch is acknowledged in memory and does not count as a change (apache/pulsar#26498)."""
    acknowledge_messages = AckSet.acknowledge_messages

    def uncounted(self: AckSet, position: Position, unacked_mask: int, messages: int) -> bool:
        before = self.revision
        accepted = acknowledge_messages(self, position, unacked_mask, messages)
        if not self.is_acknowledged(position):
            self.revision = before
        return accepted

    with mock.patch.object(AckSet, "acknowledge_messages", uncounted):
        yield


@mutant("C4", "C2", "C3", "H6", "H13")
@contextlib.contextmanager
def reset_within_the_first_64_messages_of_a_batch_alone() -> Iterator[None]:
    """A reset into a batch counts 64 messages in it, however many words say what is left: those after them are acknowledged."""
    starting_at = AckSet.starting_at

    def of_64(ledgers: LedgerList, position: Position, unacked_words: Sequence[int] = ()) -> AckSet:
        return starting_at(ledgers, position, unacked_words[:1])

    with mock.patch.object(AckSet, "starting_at", of_64):
        yield


@mutant("C2", "H7")
@contextlib.contextmanager
def drop_holes_when_saving_a_cursor() -> Iterator[None]:
    """Beyond a few, acknowledged entries above the mark-delete position are left out of what is saved."""

    def encode_few(ack_set: AckSet, *others: Any) -> bytes:
        few = AckSet(ack_set._ledgers, ack_set.mark_delete)
        for ledger_id, entries in ack_set.acked.items():
            few.acknowledge([Position(ledger_id, entry_id) for entry_id in list(entries)[:2]])
        return encode_state(few, *others)

    with mock.patch.object(cursor, "encode_state", encode_few):
        yield


@mutant("C8")
@contextlib.contextmanager
def save_no_delivery_counts() -> Iterator[None]:
    """How often entries were delivered again is forgotten with the process."""

    def encode_without(ack_set: AckSet, counts: DeliveryCounts, sequence_ids: Mapping[str, int]) -> bytes:
        return encode_state(ack_set, DeliveryCounts(), sequence_ids)

    with mock.patch.object(cursor, "encode_state", encode_without):
        yield


@mutant("C6", "H3", "H2")  # H2: a message is stored twice
@contextlib.contextmanager
def save_sequence_ids_of_another_moment() -> Iterator[None]:
    """The mark-delete position is saved with the sequence ids that the cursor had the time before."""
    before: dict[AckSet, Mapping[str, int]] = {}  # keeps them: an address that is used again would change the course of a seed

    def encode_with_old(ack_set: AckSet, counts: DeliveryCounts, sequence_ids: Mapping[str, int]) -> bytes:
        old = before.get(ack_set, {})
        before[ack_set] = sequence_ids
        return encode_state(ack_set, counts, old)

    with mock.patch.object(cursor, "encode_state", encode_with_old):
        yield


@mutant("C4", "H13", "H5", "H6", "M6")  # M6: what counts as acknowledged may be trimmed
@contextlib.contextmanager
def keep_what_was_acknowledged_during_a_reset() -> Iterator[None]:
    """Acknowledgements that arrive while a reset is being saved are added to what it leaves (apache/pulsar#26304)."""
    reset = CursorStore._reset

    async def keep(self: CursorStore, name: str, position: Position, unacked_words: Sequence[int]) -> None:
        cursor = self._known(name).cursor
        began_at = cursor.revision
        ack_set = cursor.ack_set
        await reset(self, name, position, unacked_words)
        if ack_set.revision + cursor._changes != began_at:
            cursor.acknowledge_cumulative(ack_set.mark_delete)

    with mock.patch.object(CursorStore, "_reset", keep):
        yield


@mutant("C3", "C6", "H5", "H6", "M6")
@contextlib.contextmanager
def go_on_at_the_end_without_a_cursor_ledger() -> Iterator[None]:
    """What a cursor had acknowledged is lost, so it starts where a new one would: nobody gets what is before."""
    restore = saved_cursor._restore

    def at_the_end(
        topic: Any, saved: SavedCursor, state: CursorState | None, ledgers: LedgerList, recovered: saved_cursor.RecoveredCursors
    ) -> None:
        restore(topic, saved, CursorState(ledgers.last_position) if state is None else state, ledgers, recovered)

    with mock.patch.object(saved_cursor, "_restore", at_the_end):
        yield


@mutant("C2", "H7")
@contextlib.contextmanager
def close_without_saving_cursors() -> Iterator[None]:
    """A topic that is handed over in good order forgets what was acknowledged since the last round."""
    aclose = CursorStore.aclose

    async def forget(self: CursorStore) -> None:
        self._dirty.clear()
        await aclose(self)

    with mock.patch.object(CursorStore, "aclose", forget):
        yield


@mutant("C4", "H7", "H13")
@contextlib.contextmanager
def reset_to_the_beginning_of_a_batch() -> Iterator[None]:
    """Whatever message of it was asked for."""
    starting_at = AckSet.starting_at

    def whole(ledgers: LedgerList, position: Position, unacked_words: Sequence[int] = ()) -> AckSet:
        return starting_at(ledgers, position)

    with mock.patch.object(AckSet, "starting_at", whole):
        yield


@mutant("C2", "H7")
@contextlib.contextmanager
def save_a_reset_to_the_beginning_of_a_batch() -> Iterator[None]:
    """It is in memory that the message is known that was asked for."""
    encode_state = cursor_store.encode_state

    def wholly(ack_set: AckSet, **others: Any) -> bytes:
        return encode_state(AckSet(ack_set._ledgers, ack_set.mark_delete), **others)

    with mock.patch.object(cursor_store, "encode_state", wholly):
        yield


@mutant("C2", "C8", "H7")
@contextlib.contextmanager
def be_content_with_the_round_under_way() -> Iterator[None]:
    """Who waits for a save joins the round that runs, and what it asks for came after that one had begun."""
    join_round, run_round = CursorStore._join_round, CursorStore._round
    running: dict[CursorStore, asyncio.Future[Exception | None]] = {}

    async def run_and_tell(self: CursorStore) -> Exception | None:
        told = running[self] = asyncio.get_running_loop().create_future()
        outcome = await run_round(self)
        told.set_result(outcome)
        del running[self]
        return outcome

    async def join(self: CursorStore) -> None:
        if self not in running:
            await join_round(self)
            return
        self._check_open()
        if (error := await asyncio.shield(running[self])) is not None:
            raise error

    with mock.patch.object(CursorStore, "_round", run_and_tell), mock.patch.object(CursorStore, "_join_round", join):
        yield


@mutant("C2")
@contextlib.contextmanager
def retire_a_cursor_ledger_before_its_record() -> Iterator[None]:
    """It goes to the deletion queue in one write, and the records cease to name it in the next."""

    async def commit_twice(self: CursorStore, ops: Sequence[Op], changed: Any, *, retire: bool = True) -> None:
        retired = await self._cursor_ledgers.retire(self._named_ledgers(changed)) if retire else ()
        if retired:
            await self._keeper.commit(lambda chain: (chain.replace(deletions=chain.deletions + retired), ()))
        await self._keeper.commit(lambda chain: (None, ops))
        self._cursor_ledgers.forget(retired)

    with mock.patch.object(CursorStore, "_commit", commit_twice):
        yield
