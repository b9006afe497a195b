"""Known mistakes about topics, their cursors and their owners, as in mutants.py: the simulator must notice each."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

from cepheid_bookie.admission import Admission
from cepheid_bookie.ledger_deletion import LedgerDeletion
from cepheid_broker.dispatch.forward_reader import ForwardReader
from cepheid_broker.publishing.deduplication import ProducerSequence
from cepheid_broker.publishing.topic_deduplication import DEDUP_CURSOR, TopicDeduplication
from cepheid_ledger import LedgerClient, LedgerError
from cepheid_ledger.add_pipeline import AddPipeline
from cepheid_ledger.writer_state import Confirm, WriterState
from cepheid_managed_ledger import (
    ManagedLedgerFailedError,
    ManagedLedgers,
    chain_keeper,
    cursor_store,
    opening,
    saved_cursor,
    trimmer,
)
from cepheid_managed_ledger.ack_set import AckSet
from cepheid_managed_ledger.appender import Appender
from cepheid_managed_ledger.chain_keeper import ChainKeeper
from cepheid_managed_ledger.cursor import Cursor
from cepheid_managed_ledger.cursor_state import CursorState
from cepheid_managed_ledger.cursor_store import CursorStore
from cepheid_managed_ledger.ledger_list import LedgerList
from cepheid_managed_ledger.saved_cursor import SavedCursor
from cepheid_managed_ledger.trim import Retention
from cepheid_managed_ledger.trimmer import Trimmer
from cepheid_metadata import Chain, ChainLedger, Check, LedgerIds, MetadataStore, Op, Position, StoreUnavailableError, keys
from cepheid_ports import SteadyClock
from cepheid_rpc import EntryGroup

Mutant = Callable[[], contextlib.AbstractContextManager[None]]


# The chain


@contextlib.contextmanager
def take_a_lost_answer_for_a_refusal() -> Iterator[None]:
    """What a write did is not looked up: no answer, no effect (scenario 8)."""

    async def believe(store: MetadataStore, ops: Sequence[Op], *_: Any, **__: Any) -> None:
        try:
            await store.multi(ops)
        except StoreUnavailableError as error:
            raise StoreUnavailableError(f"{error}; taken for a refusal") from error

    with mock.patch.object(chain_keeper, "write", believe):
        yield


@contextlib.contextmanager
def forget_fences_with_what_is_deleted() -> Iterator[None]:
    """A collected ledger leaves no tombstone: its writer, awake again, finds bookies that never heard of it (what
    apache/bookkeeper#4462 ended)."""
    delete = LedgerDeletion.delete

    async def delete_wholly(self: LedgerDeletion, ledger_ids: Iterable[int], now_ms: int) -> None:
        gone = list(ledger_ids)
        await delete(self, gone, now_ms)
        await self._flush_worker.run(lambda: self._index.delete_ledgers(dict.fromkeys(gone)))
        for ledger_id in gone:
            self._ledgers.forget(ledger_id)

    with mock.patch.object(LedgerDeletion, "delete", delete_wholly):
        yield


@contextlib.contextmanager
def open_a_terminated_topic_like_any_other() -> Iterator[None]:
    """Whoever takes it over begins a ledger behind its end."""
    load = ChainKeeper.load

    async def load_without_end(self: ChainKeeper) -> Chain | None:
        chain = await load(self)
        if chain is not None:
            self._chain = chain.replace(terminated_at=None)
        return self._chain

    with mock.patch.object(ChainKeeper, "load", load_without_end):
        yield


@contextlib.contextmanager
def terminate_before_the_last_entry() -> Iterator[None]:
    """An end that is one entry short of what producers were told OK for, in the record and in memory."""
    replace = Chain.replace

    def one_short(self: Chain, **changes: Any) -> Chain:
        end = changes.get("terminated_at")
        if end is not None and end.entry_id > 0:
            changes["terminated_at"] = Position(end.ledger_id, end.entry_id - 1)
        return replace(self, **changes)

    with mock.patch.object(Chain, "replace", one_short):
        yield


@contextlib.contextmanager
def drop_an_empty_ledger_without_fencing_it() -> Iterator[None]:
    """The next owner asks for its last entry, hears of none, and deletes it: its writer, about to write, is not stopped by anything
    (apache/bookkeeper#4462)."""
    ended = opening._ended

    async def take_it_for_empty(topic: Any, ledgers: Sequence[ChainLedger], client: LedgerClient, ports: Any) -> Any:
        seen = []
        for ledger in ledgers:
            if ledger.is_open and await (await client.open_reader(ledger.ledger_id)).read_lac() < 0:
                ledger = ledger.replace(entries=0, closed_at_ms=ports.wall_ms())
            seen.append(ledger)
        return await ended(topic, seen, client, ports)

    with (
        mock.patch.object(opening, "_ended", take_it_for_empty),
        mock.patch.object(LedgerClient, "_end_before_deletion"),
    ):
        yield


# Appends


@contextlib.contextmanager
def hear_late_answers_of_a_broken_ledger() -> Iterator[None]:
    """Its writer has failed, and goes on listening. When the answers that were under way make a quorum at last, whoever waits to be
    answered first is told of them, and that is somebody else by now (apache/pulsar#5588)."""
    finish, on_added = AddPipeline._finish, WriterState.on_added
    send, on_outcome = Appender._send, Appender.on_outcome
    of_topics: dict[AddPipeline, None] = {}

    def send_and_note(self: Appender, item: Any) -> None:
        of_topics[self._current.writer._pipeline] = None
        send(self, item)

    def fail_and_listen(self: AddPipeline, error: LedgerError) -> None:
        if self not in of_topics:
            finish(self, error)
            return
        self._on_failed(error)
        for _, _, on_done in list(self.unconfirmed._groups):
            on_done(error)

    def count_on(self: WriterState, bookie: str, last: int) -> Confirm | None:
        has_failed, self.failed_for_good = self.failed_for_good, False
        try:
            return on_added(self, bookie, last)
        finally:
            self.failed_for_good = has_failed

    def hear(self: Appender, segment: Any, outcome: EntryGroup | LedgerError) -> None:
        if segment.is_over and isinstance(outcome, EntryGroup) and self._pending and self.failure is None:
            self._answer(outcome)
        else:
            on_outcome(self, segment, outcome)

    with (
        mock.patch.object(AddPipeline, "_finish", fail_and_listen),
        mock.patch.object(WriterState, "on_added", count_on),
        mock.patch.multiple(Appender, _send=send_and_note, on_outcome=hear),
    ):
        yield


@contextlib.contextmanager
def give_up_one_append_and_go_on() -> Iterator[None]:
    """Of what a broken ledger did not take, the first is answered with an error and those behind it are stored
    (apache/pulsar#12570)."""
    settle = Appender.settle

    def give_up(self: Appender, confirmed: int, last: int) -> None:
        settle(self, confirmed, last)
        if self._unsent:
            item = self._unsent.popleft()
            self._pending.popleft()
            self.waiting_bytes -= item.size_bytes
            error = ManagedLedgerFailedError(f"{self._topic}: its ledger broke", topic=self._topic)
            self._call(item.on_done, error, item.entries)

    with mock.patch.object(Appender, "settle", give_up):
        yield


@contextlib.contextmanager
def look_for_lost_sequence_ids_behind_the_position_alone() -> Iterator[None]:
    """What a position has in front of it is in the sequence ids with which it was saved; but those are gone."""
    open_topic = TopicDeduplication.open

    async def trust_the_position(self: TopicDeduplication) -> None:
        cursor = self._ledger.cursors.get(DEDUP_CURSOR)
        if cursor is not None:
            cursor.is_rewound = False
        await open_topic(self)

    with mock.patch.object(TopicDeduplication, "open", trust_the_position):
        yield


@contextlib.contextmanager
def keep_as_pushed_what_was_never_appended() -> Iterator[None]:
    """A connection breaks while messages wait for their append: sent again, they are taken for repetitions."""
    with mock.patch.object(ProducerSequence, "abandon"):
        yield


@contextlib.contextmanager
def take_appends_behind_a_refusal_that_is_not_heard() -> Iterator[None]:
    """What fits is taken: the producer of what did not will send that again, behind it."""
    append = Appender.append

    def take(self: Appender, *call: Any) -> None:
        untold, self._untold_refusals = self._untold_refusals, 0
        append(self, *call)
        self._untold_refusals += untold

    with mock.patch.object(Appender, "append", take):
        yield


# Trimming


@contextlib.contextmanager
def trim_by_a_size_that_grows() -> Iterator[None]:
    """Each ledger is judged by the topic's size of that moment: one that stays may be followed by one that goes
    (apache/pulsar#20898)."""

    def may_go(self: Trimmer, ledger: ChainLedger, left_bytes: int, retention: Retention) -> bool:
        too_old = retention.time_ms >= 0 and self._clock.now_ms() - ledger.closed_at_ms > retention.time_ms
        return too_old or (retention.size_bytes >= 0 and left_bytes >= retention.size_bytes)

    async def run(self: Trimmer, retention: Callable[[], Retention]) -> int:
        async with self._positions:
            ranks = [self._ledgers.rank(position) for position in self._cursors.saved_mark_deletes]
            acknowledged, entries, gone_bytes = min(ranks, default=None), 0, 0
            going: list[ChainLedger] = []
            ledgers = self._keeper.chain.ledgers
            for ledger in ledgers[:-1]:
                entries += ledger.entries or 0
                if acknowledged is not None and entries > acknowledged:
                    break
                if may_go(self, ledger, self._ledgers.total_bytes - gone_bytes - ledger.size_bytes, retention()):
                    going.append(ledger)
                    gone_bytes += ledger.size_bytes
                await asyncio.sleep(0.05)
            if not going:
                return 0
            edge = Position(ledgers[ledgers.index(going[-1]) + 1].ledger_id, -1)
            moved = [cursor for cursor in self._cursors.cursors if cursor.leave_trimmed(edge)]
            await asyncio.gather(*(cursor.saved() for cursor in moved))

            def plan(chain: Chain) -> tuple[Chain, Sequence[Op]]:
                kept = tuple(ledger for ledger in chain.ledgers if ledger not in going)
                return chain.replace(ledgers=kept, deletions=(*chain.deletions, *(ledger.ledger_id for ledger in going))), ()

            await self._keeper.commit(plan)
        return len(going)

    with mock.patch.object(Trimmer, "run", run):
        yield


@contextlib.contextmanager
def trim_whatever_the_size() -> Iterator[None]:
    """A limit of size is taken for none to keep: everything that is consumed goes."""
    plan_trim = trimmer.plan_trim

    def greedy(ledgers: Sequence[ChainLedger], *, retention: Retention, **options: Any) -> int:
        limited = Retention(retention.time_ms, min(retention.size_bytes, 0))
        return plan_trim(ledgers, retention=limited, **options)

    with mock.patch.object(trimmer, "plan_trim", greedy):
        yield


@contextlib.contextmanager
def trim_by_what_is_not_saved_yet() -> Iterator[None]:
    """What cursors have acknowledged in memory goes; the records stand before it."""

    def in_memory(self: CursorStore) -> list[Position]:
        return [cursor.mark_delete for cursor in self.cursors]

    with mock.patch.object(CursorStore, "saved_mark_deletes", property(in_memory)):
        yield


@contextlib.contextmanager
def leave_cursors_in_what_is_trimmed() -> Iterator[None]:
    """Nobody moves them along: what they show, and are saved with, is a ledger that is gone (apache/pulsar#25087)."""
    with mock.patch.object(Cursor, "leave_trimmed", return_value=False):
        yield


@contextlib.contextmanager
def choose_positions_while_trimming() -> Iterator[None]:
    """A new cursor gets a place in a ledger that is on its way out (apache/pulsar#18651, #24855)."""
    alone = CursorStore._alone

    async def beside(self: CursorStore, name: str, work: Any, *, positions: bool = False) -> Any:
        return await alone(self, name, work)

    with mock.patch.object(CursorStore, "_alone", beside):
        yield


# Cursors


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


@contextlib.contextmanager
def close_without_saving_cursors() -> Iterator[None]:
    """A topic that is handed over in good order forgets what was acknowledged since the last round."""
    aclose = CursorStore.aclose

    async def forget(self: CursorStore) -> None:
        self._dirty.clear()
        await aclose(self)

    with mock.patch.object(CursorStore, "aclose", forget):
        yield


@contextlib.contextmanager
def reset_to_the_beginning_of_a_batch() -> Iterator[None]:
    """Whatever message of it was asked for."""
    starting_at = AckSet.starting_at

    def whole(ledgers: LedgerList, position: Position, unacked_words: Sequence[int] = ()) -> AckSet:
        return starting_at(ledgers, position)

    with mock.patch.object(AckSet, "starting_at", whole):
        yield


@contextlib.contextmanager
def save_a_reset_to_the_beginning_of_a_batch() -> Iterator[None]:
    """It is in memory that the message is known that was asked for."""
    encode_state = cursor_store.encode_state

    def wholly(ack_set: AckSet, **others: Any) -> bytes:
        return encode_state(AckSet(ack_set._ledgers, ack_set.mark_delete), **others)

    with mock.patch.object(cursor_store, "encode_state", wholly):
        yield


@contextlib.contextmanager
def delete_the_record_of_a_topic_alone() -> Iterator[None]:
    """What was in it is there again when somebody makes it anew."""

    async def spare(self: ManagedLedgers, *_: Any) -> None: ...

    with mock.patch.object(ManagedLedgers, "delete", spare):
        yield


@contextlib.contextmanager
def begin_a_topic_with_any_id() -> Iterator[None]:
    """It may be one that was deleted and is made anew, by a broker with an older block of ids (seed 0x15deb63b4)."""
    take = LedgerIds.take
    with mock.patch.object(LedgerIds, "take", lambda self, *, above=-1, newest=False: take(self, above=above)):
        yield


@contextlib.contextmanager
def write_by_versions_alone() -> Iterator[None]:
    """They begin again with a topic that is made anew: an owner of before writes over it (43)."""
    write = ChainKeeper._write

    async def unmarked(self: ChainKeeper, ops: Sequence[Op], **options: Any) -> None:
        await write(self, [op for op in ops if not (isinstance(op, Check) and op.key.startswith(keys.INCARNATIONS_KEY))], **options)

    with mock.patch.object(ChainKeeper, "_write", unmarked):
        yield


@contextlib.contextmanager
def deliver_what_was_read_before_a_seek() -> Iterator[None]:
    """The answer to a read is taken for what comes next, whatever became of the subscription meanwhile (apache/pulsar#26304)."""
    with mock.patch.object(ForwardReader, "awaits", return_value=True):
        yield


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


# Time and room


@contextlib.contextmanager
def believe_the_wall_clock() -> Iterator[None]:
    """Whoever sets the clock a year ahead ends every retention."""
    with mock.patch.object(SteadyClock, "now_ms", lambda self: self._wall_ms()):
        yield


@contextlib.contextmanager
def admit_adds_without_a_bound() -> Iterator[None]:
    """There is always room: a disk that is slow fills the memory."""
    with mock.patch.object(Admission, "_has_room", return_value=True):
        yield


TOPIC_MUTANTS: Iterable[Mutant] = (
    take_a_lost_answer_for_a_refusal,
    forget_fences_with_what_is_deleted,
    open_a_terminated_topic_like_any_other,
    terminate_before_the_last_entry,
    drop_an_empty_ledger_without_fencing_it,
    give_up_one_append_and_go_on,
    keep_as_pushed_what_was_never_appended,
    take_appends_behind_a_refusal_that_is_not_heard,
    trim_by_a_size_that_grows,
    trim_whatever_the_size,
    leave_cursors_in_what_is_trimmed,
    keep_what_was_acknowledged_during_a_reset,
    go_on_at_the_end_without_a_cursor_ledger,
    delete_the_record_of_a_topic_alone,
    begin_a_topic_with_any_id,
    reset_to_the_beginning_of_a_batch,
    save_a_reset_to_the_beginning_of_a_batch,
    deliver_what_was_read_before_a_seek,
    be_content_with_the_round_under_way,
    retire_a_cursor_ledger_before_its_record,
    close_without_saving_cursors,
    believe_the_wall_clock,
    admit_adds_without_a_bound,
)
