"""Mistakes about topics: their chains of ledgers, who owns them, what is appended, what is trimmed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

from cepheid_bookie.admission import Admission
from cepheid_bookie.ledger_deletion import LedgerDeletion
from cepheid_broker.dispatch.forward_reader import ForwardReader
from cepheid_ledger import ClosedLedger, LedgerClient, LedgerError, LedgerWriter
from cepheid_ledger.add_pipeline import AddPipeline
from cepheid_ledger.writer_state import Confirm, WriterState
from cepheid_managed_ledger import (
    ManagedLedgerConfig,
    ManagedLedgerFailedError,
    ManagedLedgers,
    chain_deletion,
    chain_keeper,
    managed_ledger,
    opening,
    rollover,
    trimmer,
)
from cepheid_managed_ledger.appender import Appender
from cepheid_managed_ledger.catch_up import CatchUpReads
from cepheid_managed_ledger.chain_keeper import ChainKeeper
from cepheid_managed_ledger.cursor import Cursor
from cepheid_managed_ledger.cursor_store import CursorStore
from cepheid_managed_ledger.opening import TakenOver
from cepheid_managed_ledger.trim import Retention
from cepheid_managed_ledger.trimmer import Trimmer
from cepheid_metadata import (
    Chain,
    ChainLedger,
    ChainPage,
    Check,
    Create,
    LedgerIds,
    MetadataStore,
    Op,
    Position,
    Put,
    StoredChain,
    StoreUnavailableError,
    keys,
)
from cepheid_ports import SteadyClock
from cepheid_rpc import EntryGroup
from cepheid_wire import TopicName
from tests.simulation.mutants.cluster import keep_what_is_open_when_the_session_is_lost
from tests.simulation.mutants.registry import mutant, scenario_mutant


@mutant("M2")
@contextlib.contextmanager
def record_an_end_without_closing() -> Iterator[None]:
    """A rollover takes the writer's word for the end of its ledger."""

    async def take_its_word(writer: Any, *_: Any) -> ClosedLedger:
        return ClosedLedger(writer.last_add_confirmed, writer.length)

    with mock.patch.object(rollover, "end_writer", take_its_word):
        yield


@scenario_mutant
@contextlib.contextmanager
def empty_a_chain_before_its_ledgers_are_closed() -> Iterator[None]:
    """A topic of which a ledger cannot be closed loses its chain and its subscriptions, and its deletion is refused after that.

    Random worlds miss it: there a deletion that fails is one that has begun, and is repeated.
    """
    with mock.patch.object(chain_deletion, "_end_ledgers", mock.AsyncMock()):
        yield


@mutant("M1", "M2", "M3", "M6", "C2", "C3", "C6", "C7", "C8")
@contextlib.contextmanager
def write_the_chain_again_after_a_conflict() -> Iterator[None]:
    """A deposed owner reads the version that is there, and goes on."""
    write = ChainKeeper._write

    async def insist(self: ChainKeeper, ops: Any, **options: Any) -> None:
        found = await self._records.get(self._topic)
        if found is not None:
            self._version = found.version
            ops = [Put(op.key, op.value, found.version) if isinstance(op, Put) and op.key == self._key else op for op in ops]
        await write(self, ops, **options)

    with mock.patch.object(ChainKeeper, "_write", insist):
        yield


@mutant("M7")
@contextlib.contextmanager
def forget_the_page_that_has_changed() -> Iterator[None]:
    """When the ledgers of a page change, only the record is written: a page of this number, it believes, is there already."""
    changes = chain_keeper.changes

    def forgetful(key: str, version: int, before: StoredChain, after: StoredChain) -> list[Op]:
        kept = {ledger.ledger_id for page in before.pages for ledger in page.ledgers}
        ops = changes(key, version, before, after)
        return [op for op in ops if not isinstance(op, Create) or ChainPage.decode(op.value, key).ledgers[0].ledger_id not in kept]

    with mock.patch.object(chain_keeper, "changes", forgetful):
        yield


@mutant("M3", "M6", "M7")
@contextlib.contextmanager
def open_a_chain_without_its_pages() -> Iterator[None]:
    """An opening takes the record for the whole chain, as a release would that knows no pages."""
    read = chain_keeper.read_stored_chain

    async def short(store: MetadataStore, topic: TopicName) -> tuple[StoredChain, int] | None:
        found = await read(store, topic)
        if found is None:
            return None
        record = found[0].record.replace(pages=None)
        return StoredChain(record, record), found[1]

    with mock.patch.object(chain_keeper, "read_stored_chain", short):
        yield


# C4: a cursor was reset into what had gone. H2: the sequence ids of what had gone were not saved.
# H8: what had gone is left out.
@mutant("M6", "C3", "C4", "C6", "H2", "H8")
@contextlib.contextmanager
def trim_without_asking_the_cursors() -> Iterator[None]:
    plan_trim = trimmer.plan_trim

    def greedy(ledgers: Any, **options: Any) -> int:
        return plan_trim(ledgers, **{**options, "acknowledged_entries": None})

    with mock.patch.object(trimmer, "plan_trim", greedy):
        yield


@mutant("V10")
@contextlib.contextmanager
def refuse_topics_without_a_new_ledger() -> Iterator[None]:
    """An opening fails when no new ledger can be created, so nothing of the topic can be read either."""
    take_over = opening._take_over

    async def insist(*args: Any, **how: Any) -> TakenOver:
        taken_over = await take_over(*args, **how)
        if taken_over.lacking is not None:
            raise taken_over.lacking
        return taken_over

    with mock.patch.object(opening, "_take_over", insist):
        yield


@mutant("M2")
@contextlib.contextmanager
def take_a_chain_over_without_its_last_end() -> Iterator[None]:
    """The chain says where its last ledger ends; the ledger's own record, which belongs into the same write, is left as it is."""
    take_over = ChainKeeper.take_over

    async def take_over_alone(self: ChainKeeper, chain: Chain, ledgers: Sequence[Op] = ()) -> None:
        await take_over(self, chain, [op for op in ledgers if isinstance(op, Create)])

    with mock.patch.object(ChainKeeper, "take_over", take_over_alone):
        yield


# H1, H3, H5: what was in it is not found again. AssertionError: its end would become that of another ledger.
@mutant("M3", "M7", "M8", "H1", "H3", "H5", "AssertionError")
@contextlib.contextmanager
def write_to_a_late_ledger_that_is_not_recorded() -> Iterator[None]:
    """The ledger that an opening could not create takes appends before the chain names it."""

    async def start_unrecorded(
        topic: TopicName, keeper: ChainKeeper, client: LedgerClient, config: ManagedLedgerConfig
    ) -> LedgerWriter:
        writer = await opening.create_ledger(topic, keeper.chain, client, config)
        keeper.on_ledgers((*keeper.chain.ledgers, ChainLedger(ledger_id=writer.ledger_id)))
        return writer

    with mock.patch.object(managed_ledger, "start_late", start_unrecorded):
        yield


@scenario_mutant
@contextlib.contextmanager
def write_on_to_what_was_collected() -> Iterator[None]:
    """An owner keeps its handle through the loss of its session; bookies have forgotten the ledger, its fence as well, and take
    what it writes for the beginning of another (apache/pulsar#20094).

    Random worlds miss it: in most of them one half of it is caught before the other is needed.
    """
    with keep_what_is_open_when_the_session_is_lost(), forget_fences_with_what_is_deleted():
        yield


@mutant("M1", "M3", "M7", "L14", "C6")  # C6: the record of a cursor was written after all, too
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


@mutant("S3", "L13")
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


@mutant("M10")
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


@mutant("M10")
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


@mutant("L13", "M2", "M3", "M6")
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


@scenario_mutant
@contextlib.contextmanager
def hear_late_answers_of_a_broken_ledger() -> Iterator[None]:
    """Its writer has failed, and goes on listening. When the answers that were under way make a quorum at last, whoever waits to be
    answered first is told of them, and that is somebody else by now (apache/pulsar#5588).

    Random worlds miss it: late answers have to arrive between one ledger and the next.
    """
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


@mutant("M5", "H2", "H3", "H4", "V7", "V9")
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


@scenario_mutant
@contextlib.contextmanager
def trim_by_a_size_that_grows() -> Iterator[None]:
    """Each ledger is judged by the topic's size of that moment: one that stays may be followed by one that is deleted
    (apache/pulsar#20898).

    Random worlds notice it after 67 seeds in the median, up to 502.
    """

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
                if (acknowledged is not None and entries > acknowledged) or self._is_in_use(ledger.ledger_id):
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


@mutant("M6")
@contextlib.contextmanager
def trim_whatever_the_size() -> Iterator[None]:
    """A limit of size is taken for none to keep: everything that is consumed goes."""
    plan_trim = trimmer.plan_trim

    def greedy(ledgers: Sequence[ChainLedger], *, retention: Retention, **options: Any) -> int:
        limited = Retention(retention.time_ms, min(retention.size_bytes, 0))
        return plan_trim(ledgers, retention=limited, **options)

    with mock.patch.object(trimmer, "plan_trim", greedy):
        yield


@mutant("M6")
@contextlib.contextmanager
def trim_what_is_being_read() -> Iterator[None]:
    """A ledger leaves its chain, and is deleted, under a read that is under way."""
    with mock.patch.object(CatchUpReads, "is_reading", return_value=False):
        yield


@scenario_mutant
@contextlib.contextmanager
def trim_by_what_is_not_saved_yet() -> Iterator[None]:
    """What cursors have acknowledged in memory goes; the records stand before it.

    Random worlds miss it: a trim has to come in the tenth of a second in which acknowledgements wait to be saved.
    """

    def in_memory(self: CursorStore) -> list[Position]:
        return [cursor.mark_delete for cursor in self.cursors]

    with mock.patch.object(CursorStore, "saved_mark_deletes", property(in_memory)):
        yield


@mutant("M7")
@contextlib.contextmanager
def leave_cursors_in_what_is_trimmed() -> Iterator[None]:
    """Nobody moves them along: what they show, and are saved with, is a ledger that is gone (apache/pulsar#25087)."""
    with mock.patch.object(Cursor, "leave_trimmed", return_value=False):
        yield


@scenario_mutant
@contextlib.contextmanager
def choose_positions_while_trimming() -> Iterator[None]:
    """A new cursor gets a place in a ledger that is on its way out (apache/pulsar#18651, #24855).

    Random worlds miss it: a subscription has to be made in the moment in which a trim is recorded.
    """
    alone = CursorStore._alone

    async def beside(self: CursorStore, name: str, work: Any, *, positions: bool = False) -> Any:
        return await alone(self, name, work)

    with mock.patch.object(CursorStore, "_alone", beside):
        yield


@mutant("M3")
@contextlib.contextmanager
def delete_the_record_of_a_topic_alone() -> Iterator[None]:
    """What was in it is there again when somebody makes it anew."""

    async def spare(self: ManagedLedgers, *_: Any) -> None: ...

    with mock.patch.object(ManagedLedgers, "delete", spare):
        yield


@mutant("H2")
@contextlib.contextmanager
def begin_a_topic_with_any_id() -> Iterator[None]:
    """It may be one that was deleted and is made anew, by a broker with an older block of ids (seed 0x15deb63b4)."""
    take = LedgerIds.take
    with mock.patch.object(LedgerIds, "take", lambda self, *, above=-1, newest=False: take(self, above=above)):
        yield


@scenario_mutant
@contextlib.contextmanager
def write_by_versions_alone() -> Iterator[None]:
    """They begin again with a topic that is made anew: an owner of before writes over it (43).

    Random worlds miss it: a deposed owner that has not heard of it has to meet a chain that has been written as often as the one
    that it knows, and write to it.
    """
    write = ChainKeeper._write

    async def unmarked(self: ChainKeeper, ops: Sequence[Op], **options: Any) -> None:
        await write(self, [op for op in ops if not (isinstance(op, Check) and op.key.startswith(keys.INCARNATIONS_KEY))], **options)

    with mock.patch.object(ChainKeeper, "_write", unmarked):
        yield


@mutant("H5", "H6", "H8", "H13", "V7")
@contextlib.contextmanager
def deliver_what_was_read_before_a_seek() -> Iterator[None]:
    """The answer to a read is taken for what comes next, whatever became of the subscription meanwhile (apache/pulsar#26304)."""
    with mock.patch.object(ForwardReader, "awaits", return_value=True):
        yield


@mutant("M6")
@contextlib.contextmanager
def believe_the_wall_clock() -> Iterator[None]:
    """Whoever sets the clock a year ahead ends every retention."""
    with mock.patch.object(SteadyClock, "now_ms", lambda self: self._wall_ms()):
        yield


@mutant("S12")
@contextlib.contextmanager
def admit_adds_without_a_bound() -> Iterator[None]:
    """There is always room: a disk that is slow fills the memory."""
    with mock.patch.object(Admission, "_has_room", return_value=True):
        yield
