"""A topic's ledgers and cursors: append, read, and the background work that maintains them.

    append ──► Appender ──► LedgerWriter            read_cached ──► TopicTail
                  └─confirmed─► LedgerList, TopicTail, on_appended      read ──► CatchUpReads ──► StoredCopies
    cursors ──► CursorStore ──────────────────────────┐
    Rollover, Failover, Trimmer, Offloader, terminate ┴──► ChainKeeper ──► metadata

A topic is also OPEN while there are too few bookies for a new ledger: `lacking` holds the reason, and appends are refused with
it until a tick, or a producer that asks, finds enough bookies.

States: OPEN ──► TERMINATED; either ──► FAILED (another broker opened the topic, the session expired, a broken ledger could not be
replaced in time), CLOSED, DELETED. Only OPEN appends. From FAILED on this object is unusable: open the topic again from its
records.

Rules:
1. An append is answered after its entries are durable and readable, in the order of the calls; `on_appended` is called after that.
2. No read returns an entry above `last_confirmed`.
3. A new ledger is recorded in the same write that records the end of the ledger before it.
4. A ledger that breaks is replaced in place (`Failover`): recovery decides which entries are stored, and nothing is sent twice.
5. FAILED is final: the next opening continues from the records.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from cepheid_ledger import LedgerError, LedgerWriter
from cepheid_managed_ledger.ack_set import AckSet
from cepheid_managed_ledger.appender import AppendDone, Appender, AppendHooks
from cepheid_managed_ledger.catch_up import CatchUpReads
from cepheid_managed_ledger.chain_deletion import delete_chain
from cepheid_managed_ledger.chain_keeper import ChainKeeper
from cepheid_managed_ledger.cursor import Cursor
from cepheid_managed_ledger.cursor_store import CursorStore
from cepheid_managed_ledger.ending import Ending
from cepheid_managed_ledger.errors import (
    CursorExistsError,
    EntryTrimmedError,
    ManagedLedgerClosedError,
    ManagedLedgerDeletedError,
    ManagedLedgerError,
    ManagedLedgerFailedError,
    NoOpenLedgerError,
    TopicTerminatedError,
)
from cepheid_managed_ledger.failover import Failover
from cepheid_managed_ledger.finish import finish
from cepheid_managed_ledger.ledger_list import LedgerList
from cepheid_managed_ledger.message_counts import MessageCounts
from cepheid_managed_ledger.object_deletion import ObjectDeletions
from cepheid_managed_ledger.offloader import Offloader, OffloadStatus
from cepheid_managed_ledger.opening import start_late, take_over_chain
from cepheid_managed_ledger.publish_times import PublishTimes
from cepheid_managed_ledger.rollover import Rollover
from cepheid_managed_ledger.settings import ManagedLedgerConfig
from cepheid_managed_ledger.statistics import CursorStatistics, ManagedLedgerStatistics, OffloadStatistics
from cepheid_managed_ledger.stored_copies import StoredCopies
from cepheid_managed_ledger.surroundings import Surroundings
from cepheid_managed_ledger.trimmer import Trimmer
from cepheid_managed_ledger.upkeep import Upkeep
from cepheid_metadata import Chain, ChainLedger, MetadataError, Position
from cepheid_ports import CepheidError, SteadyClock, TaskOwner
from cepheid_rpc import HEADER_BYTES, Buffer, EntryGroup
from cepheid_wire import TopicName

log = logging.getLogger(__name__)

_TOPIC_EPOCH = "topic_epoch"  # key in the chain's properties


class State(enum.Enum):
    OPEN = "open"
    TERMINATED = "terminated"
    FAILED = "failed"
    CLOSED = "closed"
    DELETED = "deleted"


class ManagedLedger:
    """An open topic: appends, reads and cursors. Created by `ManagedLedgers.open`."""

    def __init__(
        self,
        topic: TopicName,
        config: ManagedLedgerConfig,
        shared: Surroundings,
        on_closed: Callable[[ManagedLedger], None],
    ) -> None:
        self.topic = topic
        self.config = config
        self.state = State.OPEN
        self.failure: ManagedLedgerError | None = None
        self.on_appended: list[Callable[[], None]] = []
        """Called once per answered group of appends."""
        self.on_failed: list[Callable[[ManagedLedgerError], None]] = []
        """Called once. The owner then closes this object and opens the topic again."""
        self.on_cursor_created: list[Callable[[Cursor], None]] = []
        self.on_cursor_deleted: list[Callable[[Cursor], None]] = []
        self.on_cursor_reset: list[Callable[[Cursor], None]] = []
        """Called for durable cursors, also when the request that reset the cursor has already timed out."""
        self._shared = shared
        self._on_closed = on_closed
        self._tasks = TaskOwner(f"managed-ledger {topic}", self._on_defect)
        self._keeper = ChainKeeper(shared.store, topic, shared.tasks, shared.settings, self._fail, shared.page_limits)
        self._clock = SteadyClock(shared.ports)
        self._positions = asyncio.Lock()
        self._terminating = asyncio.Lock()
        self._readers: dict[str, Cursor] = {}
        self._appender: Appender | None = None  # None: opened terminated, or there is no open ledger
        self._ending: Ending | None = None  # None: opened terminated
        self._offloader: Offloader | None = None  # None: not opened yet
        self.lacking: CepheidError | None = None
        """Why there is no open ledger, so that appends are refused. None: there is one, or the topic is terminated."""
        self._untold_refusals = 0
        self._verifying: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._appended_entries = self._appended_bytes = 0
        self.last_appended_at_ms = 0
        """Wall clock; 0: nothing was appended since the topic was opened."""

    def __repr__(self) -> str:
        return f"<ManagedLedger {self.topic} {self.state.value}, last {self.last_confirmed}, {self._cursors!r}>"

    async def open(self) -> None:
        """Open the topic; if it raises, nothing stays open. `ManagedLedgers` calls it once, and then `tick`."""
        shared = self._shared
        taken_over = await take_over_chain(
            self.topic, self._keeper, shared.client, self.config, shared.tasks, shared.unfinished, shared.ports
        )
        try:
            await self._read_records()
        except BaseException:
            if taken_over.writer is not None:
                await taken_over.writer.aclose()
            raise
        self.lacking = taken_over.lacking
        self._start_upkeep()
        if taken_over.writer is not None:
            self._start_appends(taken_over.writer)
        elif self.lacking is None:
            self.state = State.TERMINATED

    async def _read_records(self) -> None:
        """Build the parts that depend on the chain, which has been taken over, and recover the cursors."""
        shared = self._shared
        self._ledgers = LedgerList(self._keeper.chain.ledgers)
        self._keeper.on_ledgers = self._on_chain_changed
        self.last_confirmed = self._ledgers.last_position
        self._copies = StoredCopies(
            str(self.topic), shared.client, shared.segments, self._ledgers, lambda: self.chain,
            lambda: self.config.offload.reads_objects, shared.settings.max_ledger_readers,
        )  # fmt: skip
        self._reads = CatchUpReads(str(self.topic), self._copies, self._ledgers, shared.catch_up, shared.settings)
        self.counts = MessageCounts(
            self._ledgers, lambda: self.chain.messages or {}, self._read_back, shared.counts, shared.lengths
        )
        self._keeper.annotate = self.counts.annotate
        self._cursors = CursorStore(
            self.topic, shared.store, self._keeper, shared.client, self._ledgers, shared.flusher, lambda: self.config,
            shared.settings, shared.ports, self._positions, self._on_cursors_saved, self._on_defect,
        )  # fmt: skip
        self._cursors.on_created = partial(_tell, self.on_cursor_created)
        self._cursors.on_deleted = partial(_tell, self.on_cursor_deleted)
        self._cursors.on_reset = partial(_tell, self.on_cursor_reset)
        await self._cursors.recover()
        self._tail = shared.tail_cache.open_tail(self._needed_from)
        self.publish_times = PublishTimes(self._tail.peek, self._read_one, shared.publish_times)

    def _start_upkeep(self) -> None:
        topic, keeper, ledgers, shared = self.topic, self._keeper, self._ledgers, self._shared
        object_deletions = ObjectDeletions(topic, keeper, shared.segments)
        offloader = self._offloader = Offloader(
            topic, keeper, shared.client, shared.segments, ledgers, self._copies, object_deletions, shared.offload_pool,
            lambda: self.config.offload, shared.settings, self._clock, shared.ports, self._tasks, shared.tasks,
        )  # fmt: skip
        trimmer = Trimmer(
            topic, keeper, ledgers, self._cursors, self._readers.values, self._reads.is_reading, self._positions, self._clock,
            offloader.held,
        )  # fmt: skip
        self._upkeep = Upkeep(
            topic, keeper, shared.client, trimmer, offloader, object_deletions, shared.deletion_turns, lambda: self.config,
            self._tasks,
        )  # fmt: skip
        keeper.is_patient = True
        if self.chain.terminated_at is None:
            self._ending = Ending(topic, keeper, shared.client, self._upkeep, shared.settings, self._clock)

    def _start_appends(self, writer: LedgerWriter) -> None:
        """Accept appends to `writer`, which writes the chain's last ledger."""
        topic, keeper, ledgers, shared = self.topic, self._keeper, self._ledgers, self._shared
        settings, ports, ending = shared.settings, shared.ports, self._ending
        assert ending is not None, f"{topic} is terminated, and has a new ledger"
        hooks = AppendHooks(self._on_stored, self._on_confirmed, self._on_answered, self._on_broken, self._fail)
        appender = Appender(str(topic), writer, settings.append_window_bytes, hooks)
        rollover = Rollover(topic, keeper, shared.client, ledgers, appender, settings, ports, self._clock, self._fail)
        failover = Failover(topic, keeper, shared.client, ledgers, appender, settings, self._clock, self._reads.forget, self._fail)
        self._upkeep.begin_appends(rollover, failover)
        self._appender = ending.appender = appender
        self.lacking = None

    async def _start_ledger(self) -> None:
        """Try once to create the open ledger that was missing when the topic was opened. A failure is kept in `lacking`."""
        shared = self._shared
        try:
            async with shared.start_turns:
                writer = await start_late(self.topic, self._keeper, shared.client, self.config)
        except (CepheidError, TimeoutError) as error:
            if isinstance(error, CepheidError):
                self.lacking = error
            if self._verifying is None:
                self._verifying = self._tasks.start(self._verify(), name="verify")
            return
        if self.state is State.FAILED:
            await writer.aclose()
            return
        self._start_appends(writer)
        log.info("managed_ledger.ledger_started", extra={"topic": str(self.topic), "ledger_id": writer.ledger_id})

    async def _verify(self) -> None:
        """Check whether another broker has opened the topic: without an open ledger, no bookie reports that to this owner."""
        try:
            with suppress(ManagedLedgerError, MetadataError):  # `_fail` is called if another broker has
                await self._keeper.verify()
        finally:
            self._verifying = None

    @property
    def not_saving(self) -> Exception | None:
        """Why acknowledgements could not be saved at the last attempt; None: they were saved."""
        return self._cursors.failure

    @property
    def near_limit(self) -> str | None:
        """The limit that the topic's records are close to, with numbers; None: none."""
        return self._keeper.near_limit

    async def require_open_ledger(self) -> None:
        """Return when appends are accepted, after one attempt to create a missing ledger. Raises ManagedLedgerError."""
        if self._appender is None and self.state is State.OPEN:
            self._upkeep.start_ledger(self._start_ledger)
            await self._upkeep.wait_rolled()
        if self._appender is None or self.state is not State.OPEN:
            raise self._refusal()

    # Appending

    def append(self, payloads: Sequence[Buffer], on_done: AppendDone, messages: Sequence[int] | None = None) -> None:
        """Store a group of entries at consecutive entry ids of one ledger.

        Calls `on_done(first position, count)` once it is durable and readable, or `on_done(error, count)`: it may be stored or not.
        `messages`: the number of messages in each payload; None: one in each.
        """
        assert payloads, "a group has at least one entry"
        # Until a refusal is delivered no append is accepted, even if there is a ledger by then (as in Appender.append, M5).
        if self._appender is None or self.state is not State.OPEN or self._untold_refusals:
            self._untold_refusals += 1
            asyncio.get_running_loop().call_soon(self._tell_refusal, on_done, self._refusal(), len(payloads))
            return
        self._appender.append(payloads, on_done, messages)

    def _tell_refusal(self, on_done: AppendDone, error: ManagedLedgerError, count: int) -> None:
        self._untold_refusals -= 1
        on_done(error, count)

    def _on_stored(self, group: EntryGroup, messages: Sequence[int] | None) -> None:
        entries = len(group.ends)
        size_bytes = len(group.data) - HEADER_BYTES * entries
        self._ledgers.confirm(group.last_entry_id, size_bytes)
        self.counts.on_confirmed(group, messages)
        self._appended_entries += entries
        self._appended_bytes += size_bytes

    def _on_confirmed(self, group: EntryGroup) -> None:
        before, self.last_confirmed = self.last_confirmed, Position(group.ledger_id, group.last_entry_id)
        self._tail.add(group, before)

    def _on_answered(self) -> None:
        self.last_appended_at_ms = self._shared.ports.wall_ms()
        for hook in self.on_appended:
            hook()
        self._roll_if_due()

    # Failing

    def _on_broken(self) -> None:
        self._upkeep.fail_over()

    def _on_chain_changed(self, ledgers: Sequence[ChainLedger]) -> None:
        had_ledgers = self._ledgers.has_ledgers
        self._ledgers.update(ledgers)
        if ledgers and not had_ledgers:  # what cursors and clients are shown exists from now on
            self.last_confirmed = self._ledgers.last_position
            for cursor in self._all_cursors():
                cursor.leave_trimmed(self._ledgers.first_position)
        self.counts.drop_trimmed()
        self._copies.on_chain_changed()
        if self._offloader is not None:
            self._offloader.on_chain_changed()

    def _on_defect(self, error: BaseException) -> None:
        failure = ManagedLedgerFailedError(f"{self.topic}: a defect: {error!r}", topic=str(self.topic))
        failure.__cause__ = error
        self._fail(failure)

    def _fail(self, error: ManagedLedgerError) -> None:
        """Stop for good (rule 5): answer all appends with the error, and call the hooks once."""
        was_usable = self.is_usable
        if was_usable:
            self.state, self.failure = State.FAILED, error
            self._keeper.is_patient = False
            log.warning("managed_ledger.failed", extra={"topic": str(self.topic), "error": str(error)})
            if self._offloader is not None:
                self._offloader.stop()
        if self._appender is not None:
            self._appender.fail(error)
        if was_usable:
            for hook in self.on_failed:
                hook(error)

    def _refusal(self) -> ManagedLedgerError:
        topic = str(self.topic)
        match self.state:
            case State.TERMINATED:
                return TopicTerminatedError(f"{topic} was terminated at {self.last_confirmed}", topic=topic)
            case State.DELETED:
                return ManagedLedgerDeletedError(f"{topic} was deleted", topic=topic)
            case State.FAILED if self.failure is not None:
                return self.failure
            case State.OPEN:
                why = self.lacking or "it has just been created; publish again"
                return NoOpenLedgerError(f"{topic} has no open ledger, so nothing can be published now: {why}", topic=topic)
            case _:
                return ManagedLedgerClosedError(f"{topic} is closed", topic=topic)

    @property
    def is_usable(self) -> bool:
        """Whether reads and cursors work. Appends need `State.OPEN` as well."""
        return self.state in (State.OPEN, State.TERMINATED)

    @property
    def is_terminated(self) -> bool:
        """Whether the topic accepts no appends any more, now or after it is opened again."""
        return self.state is State.TERMINATED

    def _check_usable(self) -> None:
        if not self.is_usable:
            raise self._refusal()

    # Reading

    def read_cached(self, position: Position, *, max_entries: int, max_bytes: int) -> list[EntryGroup] | None:
        """Read from the first entry at or after `position`. None: it is not in the tail cache; []: there is none yet."""
        entry = None if position > self.last_confirmed else self._entry_at(position)
        if entry is None:
            self._tail.note_reader()
            return []
        return self._tail.read(entry, max_entries=max_entries, max_bytes=max_bytes)

    async def read(self, position: Position, *, max_entries: int, max_bytes: int) -> list[EntryGroup]:
        """Read in order from the first entry at or after `position`, at least one entry; [] if there is none yet.

        Raises ManagedLedgerError, LedgerError, MetadataError; `retriable` says whether to try again.
        """
        while True:
            self._check_usable()
            entry = self._entry_at(position)
            if entry is None or entry > self.last_confirmed:
                return []
            in_view = min(max_entries, self._in_view_from(entry))
            try:
                return await self._reads.read(entry, max_entries=in_view, max_bytes=max_bytes)
            except EntryTrimmedError:
                continue

    async def _read_back(self, position: Position, max_entries: int, max_bytes: int) -> list[EntryGroup]:
        """Read from exactly this entry on, for counting."""
        self._check_usable()
        return await self._reads.read(position, max_entries=max_entries, max_bytes=max_bytes)

    def _in_view_from(self, entry: Position) -> int:
        """Return how many entries from `entry` on may be read (rule 2).

        If the end of a ledger splits a group, the first half is in the chain before the second half is stored, and may have been
        read ahead, after the ledger of the last confirmed entry.
        """
        ledgers, last = self._ledgers, self.last_confirmed
        return 1 << 31 if ledgers.last_position == last else ledgers.rank(last) - ledgers.rank(entry) + 1

    async def _read_one(self, position: Position) -> list[EntryGroup]:
        return await self.read(position, max_entries=1, max_bytes=1)

    def _entry_at(self, position: Position) -> Position | None:
        """Return the first existing entry at or after `position`; None if there is none."""
        ledgers = self._ledgers
        if ledgers.is_valid(position):
            return position
        rank = ledgers.rank(Position(position.ledger_id, position.entry_id - 1))
        return ledgers.at_rank(rank + 1) if rank < ledgers.total_entries else None

    def _needed_from(self) -> Position | None:
        """Return the position that the slowest active cursor reads next, for the tail cache."""
        return min((cursor.active_from for cursor in self._all_cursors() if cursor.active_from), default=None)

    # Positions (rules in LedgerList)

    @property
    def ledgers(self) -> LedgerList:
        return self._ledgers

    def stored_ledger_ids(self) -> list[int]:
        """Return the ledgers on bookies that hold entries of the topic or states of its cursors."""
        chain = self.chain
        stored = [
            ledger_id for ledger_id, entries, _ in self._ledgers.from_ledger(-1) if entries and chain.is_on_bookies(ledger_id)
        ]
        return [*stored, *dict.fromkeys(self._cursors.ledger_ids.values())]

    @property
    def chain(self) -> Chain:
        """The chain's record as last committed."""
        return self._keeper.chain

    def first_position(self) -> Position:
        """Return the position just before the first entry."""
        return self._ledgers.first_position

    def next_position(self, position: Position) -> Position:
        return self._ledgers.next_position(position)

    def previous_position(self, position: Position) -> Position:
        return self._ledgers.previous_position(position)

    def is_valid(self, position: Position) -> bool:
        """Whether there is an entry at this position."""
        return self._ledgers.is_valid(position)

    def count_between(self, after: Position, last: Position) -> int:
        """Return the number of entries in (after, last]."""
        return self._ledgers.count_between(after, last)

    # Cursors

    @property
    def cursors(self) -> Mapping[str, Cursor]:
        """The durable cursors by name."""
        return self._cursors.by_name

    async def create_cursor(self, name: str, mark_delete: Position, *, properties: Mapping[str, str] | None = None) -> Cursor:
        """Create a durable cursor that has acknowledged everything up to `mark_delete`.

        Raises CursorExistsError, TooManyCursorsError, and the errors of the metadata store.
        """
        self._check_usable()
        return await self._cursors.create(name, mark_delete, properties or {})

    async def delete_cursor(self, name: str) -> None:
        """Delete a durable cursor. Raises NoSuchCursorError and the errors of the metadata store."""
        self._check_usable()
        await self._cursors.delete(name)

    def new_non_durable_cursor(self, name: str, mark_delete: Position, *, properties: Mapping[str, str] | None = None) -> Cursor:
        """Create a cursor that is not saved; release it with `drop_cursor`. Raises CursorExistsError."""
        if name in self._readers:
            raise CursorExistsError(f"{self.topic} has a reader {name} already", cursor=name)
        ack_set = AckSet(self._ledgers, self._ledgers.normalise(mark_delete))
        cursor = self._readers[name] = Cursor(name, ack_set, self._ledgers, None, dict(properties or {}))
        return cursor

    def drop_cursor(self, cursor: Cursor) -> None:
        """Release a non-durable cursor."""
        if self._readers.get(cursor.name) is cursor:
            del self._readers[cursor.name]

    # Maintenance

    def tick(self) -> None:
        """Start what has become due by the passage of time. Called periodically."""
        self._reads.drop_idle()  # also after a failure: it may be closed late, and other topics need the memory
        if self.is_usable:
            if self._appender is None and self.state is State.OPEN:
                self._upkeep.start_ledger(self._start_ledger)
            self._roll_if_due()
            self._upkeep.clean()
            self._upkeep.offload_if_due()

    @property
    def has_maintenance(self) -> bool:
        """Whether work that needs no client is running or could start: closing, trimming, offloading or deleting ledgers."""
        return self.is_usable and self._upkeep.has_work

    @property
    def uploading_ledger_id(self) -> int | None:
        """The ledger that is being copied to an object store; None: none is."""
        return None if self._offloader is None else self._offloader.uploading_ledger_id

    async def trim(self) -> int:
        """Remove ledgers that retention allows to remove; return how many. Raises ManagedLedgerError, LedgerError,
        MetadataError."""
        self._check_usable()
        return await self._upkeep.trim()

    async def truncate(self) -> int:
        """Remove all ledgers that every cursor has acknowledged, whatever retention says; return how many. Raises as `trim`
        does."""
        self._check_usable()
        return await self._upkeep.truncate()

    def offload(self, before: Position) -> None:
        """Start to copy all closed ledgers whose entries lie before this position to the object store of the topic's policies.

        `offload_status` reports the progress. Raises OffloadRunningError (another request is running), OffloadOffError (no store is
        configured), NoObjectStoreError, and other ManagedLedgerErrors when the topic is closed.
        """
        self._check_usable()
        assert self._offloader is not None, f"{self.topic} is not open"
        self._offloader.start(before)

    @property
    def offload_status(self) -> OffloadStatus:
        """The state of the last `offload`, with the first entry that has no copy in an object store."""
        return OffloadStatus() if self._offloader is None else self._offloader.status

    async def delete_unnamed(self, ledger_id: int) -> bool:
        """Queue an unreferenced ledger (found by OrphanScan) for deletion. False: a record refers to it after all.

        Raises ManagedLedgerError, MetadataError.
        """
        unnamed = False

        def plan(chain: Chain) -> tuple[Chain | None, tuple[()]]:
            nonlocal unnamed
            named = (*(ledger.ledger_id for ledger in chain.ledgers), *chain.deletions, *self._cursors.ledger_ids.values())
            unnamed = ledger_id not in named
            return (chain.replace(deletions=(*chain.deletions, ledger_id)) if unnamed else None), ()

        await self._keeper.commit(plan)
        self._upkeep.clean()
        return unnamed

    def _roll_if_due(self) -> None:
        if self.state is State.OPEN:
            self._upkeep.roll_if_due()

    def _on_cursors_saved(self) -> None:
        self._upkeep.clean()

    def wall_ms(self) -> int:
        return self._shared.ports.wall_ms()

    def steady_ms(self) -> int:
        """Return the wall-clock time that decides when data may be deleted."""
        return self._clock.now_ms()

    # The topic's epoch (producer_access.py) is kept where no other owner of the topic can change it

    @property
    def topic_epoch(self) -> int | None:
        """The epoch of exclusive producers; None: the topic never had one."""
        epoch = self.chain.properties.get(_TOPIC_EPOCH)
        return None if epoch is None else int(epoch)

    async def save_topic_epoch(self, epoch: int) -> None:
        """Save the epoch; it is durable when this returns. Raises ManagedLedgerError, MetadataError."""
        self._check_usable()

        def plan(chain: Chain) -> tuple[Chain, tuple[()]]:
            return chain.replace(properties={**chain.properties, _TOPIC_EPOCH: str(epoch)}), ()

        await self._keeper.commit(plan)

    # Ending

    async def terminate(self) -> Position:
        """End the topic for good. Return the position of its last entry (entry -1 of a ledger if it has none)."""
        self._check_usable()
        return await finish(self._tasks, self._terminate(), name="terminate")

    async def _terminate(self) -> Position:
        async with self._terminating:  # a second caller returns only after the end is recorded
            if self.chain.terminated_at is None:
                self._check_usable()
                self.state = State.TERMINATED
                assert self._ending is not None, "a chain without an end has an ending"
                try:
                    await self._ending.terminate()
                except (ManagedLedgerError, LedgerError, MetadataError, TimeoutError) as error:
                    failure = ManagedLedgerFailedError(f"{self.topic} could not be terminated: {error}", topic=str(self.topic))
                    self._fail(failure)
                    raise failure from error
                self.last_confirmed, self.lacking = self._ledgers.last_position, None
        return self.last_confirmed

    def fail(self, error: ManagedLedgerError) -> None:
        """Fail the topic from outside, for a broker that has lost its ownership."""
        self._fail(error)

    async def delete(self) -> None:
        """Delete the topic with all its ledgers and cursors. Repeat it (or `ManagedLedgers.delete`) if it fails."""
        await self.aclose(State.DELETED)
        shared = self._shared
        if self._keeper.lost is not None:
            raise self._keeper.lost
        self._keeper.on_ledgers = lambda _: None
        work = delete_chain(self.topic, self._keeper, shared.store, shared.client, shared.segments)
        await finish(shared.tasks, work, name="delete-topic")

    async def aclose(self, state: State = State.CLOSED) -> None:
        """Wait for pending appends, save the cursors and close the ledger. What fails is left to the next opening."""
        if self._closing is None:
            usable, self.state = self.is_usable, state
            self._upkeep.stop()
            self._closing = self._shared.tasks.start(self._close(usable), name="close")
        await asyncio.shield(self._closing)

    async def _close(self, usable: bool) -> None:
        try:
            if self._ending is not None:
                await self._ending.end_appends(self._refusal())
            self._keeper.is_patient = False
            await self._cursors.aclose()
            if self._ending is not None:
                await self._ending.end_ledger(usable=usable)
            await self._reads.aclose()
            await self._tasks.aclose()
        finally:
            self._shared.tail_cache.close_tail(self._tail)
            self.counts.close()
            self._on_closed(self)

    def statistics(self) -> ManagedLedgerStatistics:
        ledgers, ledger_ids = self._ledgers, self._cursors.ledger_ids
        return ManagedLedgerStatistics(
            state=self.state.value,
            last_confirmed=self.last_confirmed,
            ledgers=self.chain.ledgers,
            waiting_deletions=len(self._keeper.waiting_deletions()),
            entries=ledgers.total_entries,
            size_bytes=ledgers.total_bytes,
            current_ledger_entries=ledgers.entries_of(ledgers.last_ledger_id) or 0,
            current_ledger_bytes=ledgers.last_size_bytes,
            appended_entries=self._appended_entries,
            appended_bytes=self._appended_bytes,
            lacking=None if self.lacking is None else str(self.lacking),
            append_waiting_bytes=self._appender.waiting_bytes if self._appender else 0,
            rollovers=self._upkeep.rollovers,
            failovers=self._upkeep.failovers,
            trimmed_ledgers=self._upkeep.trimmed_ledgers,
            catch_up_reads=self._reads.reads,
            catch_up_bytes=self._reads.read_bytes,
            cursors_rewound=self._cursors.rewound,
            offload=self.offload_statistics(),
            cursors={cursor.name: CursorStatistics.of(cursor, ledger_ids.get(cursor.name)) for cursor in self._all_cursors()},
        )

    def offload_statistics(self) -> OffloadStatistics:
        """Return the part of `statistics` about object stores. It costs little if nothing is offloaded."""
        return OffloadStatistics() if self._offloader is None else self._offloader.statistics()

    def _all_cursors(self) -> Iterable[Cursor]:
        return [*self._cursors.by_name.values(), *self._readers.values()]


def _tell(hooks: Sequence[Callable[[Cursor], None]], cursor: Cursor) -> None:
    for hook in hooks:
        hook(cursor)
