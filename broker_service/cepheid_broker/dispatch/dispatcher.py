"""Drives one dispatch core: wakes it once per loop turn, performs its sends and reads.

    event ──wake──► call_soon(_pass), once ──► core.next_effect() ─┬► Send: headers and stored bytes to the consumer's socket
                                                                   └► Read: tail cache in the same turn, else one read task
    core.wake_at_ms ──► one timer ──► wake
A subscription that lags takes turns with others instead (`CatchUpTurns`), so that it leaves the loop to clients that publish.
At most one forward read and one read back are pending, whatever the core requests meanwhile. A failed read is repeated after pauses
that double. Acknowledged entries need not be readable: a forward read that fails at one continues after it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from cepheid_broker.dispatch.catch_up_turns import CatchUpTurns
from cepheid_broker.dispatch.counted_group import CountedGroup, count_group
from cepheid_broker.dispatch.delivery import encode_send
from cepheid_broker.dispatch.effects import Announce, DispatchCore, Effect, Idle, Read, ReadBack, Send, SendAll, Why
from cepheid_broker.peer import Peer
from cepheid_broker.settings import DispatchSettings
from cepheid_broker.traffic import Activity, Traffic
from cepheid_managed_ledger import is_entry_gone
from cepheid_metadata import Position
from cepheid_ports import CepheidError, TaskOwner
from cepheid_rpc import EntryGroup
from cepheid_tiered import SegmentError
from cepheid_wire import MetadataShape

if TYPE_CHECKING:
    from cepheid_managed_ledger import Cursor, ManagedLedger

log = logging.getLogger(__name__)

READ_ENTRIES = 500
"""Most entries of one read. Verifying and counting them takes 0.4 ms, sending them 0.8 ms; the loop does nothing else meanwhile."""
ENTRY_COST_BYTES = 16384
"""Added to the size of each entry when a pass is bounded in bytes: a small entry takes as long to send as a large one."""
PACED_ENTRIES = 100
"""Entries after which a pass ends, and of one read from the tail cache, if a subscription catches up while clients publish. Reading
and sending them takes a quarter of a millisecond. Reads from storage are not smaller: each is a round trip."""
SMALL_READ_BYTES = 64 << 10  # when the budget of the process is used up
RETRY_MAX_S = 30.0
READS_PER_PASS = 4  # from the tail cache; for a reader of some keys there may be nothing to send in them
_AT_READS = (Idle.READING, Idle.READ_FAILED)
MAX_SLEEP_S = 30.0  # until the clock is read again: it may be set meanwhile


class ReadAheadBudget:
    """Bytes read and not yet sent by all subscriptions. A gauge: a subscription that finds it used up makes small reads."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0

    def __repr__(self) -> str:
        return f"<ReadAheadBudget {self.used_bytes} of {self.limit_bytes} B>"


@dataclass(frozen=True, slots=True)
class SharedDispatch:
    """What the subscriptions of one broker share."""

    budget: ReadAheadBudget
    turns: CatchUpTurns


@dataclass(frozen=True, slots=True)
class ReadFailure:
    """A failure to read the entry at `position` since `since_s` (loop time). `asked`: start of the read, there or before it."""

    asked: Position
    position: Position
    error: CepheidError
    since_s: float

    @property
    def is_unreadable(self) -> bool:
        """Whether the entry certainly has no valid copy."""
        return is_entry_gone(self.error)

    def why(self, now_s: float) -> Why:
        idle = Idle.READ_FAILED
        if self.is_unreadable:
            idle = Idle.UNREADABLE
        elif isinstance(self.error, SegmentError):
            idle = Idle.OBJECT_FAILED
        return Why(idle, position=self.position, since_s=now_s - self.since_s, details=str(self.error))


class Receiver(Protocol):
    """The part of a consumer that dispatch uses."""

    @property
    def consumer_id(self) -> int: ...

    @property
    def epoch(self) -> int | None: ...

    @property
    def peer(self) -> Peer: ...

    @property
    def traffic(self) -> Traffic: ...

    @property
    def activity(self) -> Activity: ...

    redelivered_messages: int

    def announce(self, is_active: bool) -> None:
        """Tell the client whether it is the active consumer of a Failover subscription."""


class Dispatcher:
    def __init__(
        self,
        core: DispatchCore,
        ledger: ManagedLedger,
        consumers: Mapping[int, Receiver],
        cursor: Cursor,
        settings: DispatchSettings,
        shared: SharedDispatch,
        tasks: TaskOwner,
        *,
        with_hashes: bool,
        partition_index: int,
        log_fields: Mapping[str, str],
        on_sent: Callable[[int, int, int], None],
        on_failed: Callable[[BaseException], None],
    ) -> None:
        self.core = core
        self._shape = MetadataShape()  # what most entries of the topic look like
        self._with_hashes = with_hashes  # whether to compute key hashes of all that is read
        self._partition_index = partition_index
        self._log_fields = log_fields
        self._wall_ms = ledger.wall_ms
        self._ledger = ledger
        self._consumers = consumers
        self._cursor = cursor
        self._settings = settings
        self._budget = shared.budget
        self._turns = shared.turns
        self._allowance = shared.turns.join()
        self._tasks = tasks
        self._on_sent = on_sent
        self._on_failed = on_failed
        self._loop = asyncio.get_running_loop()
        self._pass_due = False
        self._closed = False
        self._accounted_bytes = 0
        self._now_ms = 0  # at the last pass
        self._read_to_end = True  # whether there was nothing more after the last forward read
        self._keeps_up = False  # whether reads hit the tail cache, which then keeps what comes next
        self._running: dict[type, Read | ReadBack] = {}  # by kind: at most one each
        self._next: dict[type, Read | ReadBack] = {}  # requested while another of the kind runs
        self._failures: dict[type, ReadFailure] = {}  # by kind of read, until one of that kind succeeds or is for another position
        self._retry_delay_s = settings.read_retry_s
        self._retry: asyncio.TimerHandle | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self.storage_reads = 0
        self.cached_reads = 0

    def __repr__(self) -> str:
        return f"<Dispatcher {self.core!r}>"

    def why(self) -> list[Why]:
        self.core.on_clock(self._wall_ms())
        reasons = self.core.why()
        if not self._failures or not any(why.idle in _AT_READS for why in reasons):
            return reasons
        now_s = self._loop.time()
        return [
            *(failure.why(now_s) for failure in self._failures.values()),
            *(why for why in reasons if why.idle not in _AT_READS),
        ]

    @property
    def read_failures(self) -> list[ReadFailure]:
        """Failed reads whose entries are still needed."""
        return list(self._failures.values())

    def retry_reads(self) -> None:
        """Repeat failed reads at once, after a change that may let them succeed."""
        if self._retry is not None:
            self._retry.cancel()
            self._retry_delay_s = self._settings.read_retry_s
            self._try_again()

    def on_appended(self, tail: CountedGroup | None, now_ms: int) -> None:
        """Send appended entries at once if possible. `tail`: the new entries, if they form one group."""
        try:
            send = self.core.on_appended(tail)
            if send is None:
                self.wake()
                return
            self._now_ms = now_ms
            self._send(send)
        except Exception as error:
            self._on_failed(error)
            return
        self.cached_reads += 1
        self._keeps_up = self._read_to_end = True
        self._cursor.active_from = send.counted.after

    def on_permits(self, consumer: int, messages: int) -> None:
        room = self._settings.max_permits - self.core.permits(consumer)
        if self.core.on_permits(consumer, min(messages, room)):
            self.wake()

    def wake(self) -> None:
        if not self._pass_due and not self._closed:
            self._pass_due = True
            if self._lags:
                self._turns.submit(self._allowance, self._pass)
            else:
                self._loop.call_soon(self._pass)

    @property
    def _lags(self) -> bool:
        """Whether it catches up, from storage or from the tail cache: its last read ended before the topic's end. What waits for
        permits says nothing about that: a consumer that takes few large messages at a time keeps up too."""
        return not self._read_to_end

    def close(self) -> None:
        self._closed = True
        self._cursor.active_from = None
        for timer in (self._retry, self._alarm):
            if timer is not None:
                timer.cancel()
        self._budget.used_bytes -= self._accounted_bytes
        self._accounted_bytes = 0

    def _pass(self) -> None:
        self._pass_due = False
        if self._closed:
            return
        try:
            self._now_ms = self._wall_ms()
            self.core.on_clock(self._now_ms)
            cost_bytes, limit_bytes = 0, self._settings.pass_bytes
            if self._lags and self._turns.is_paced:
                limit_bytes = min(limit_bytes, PACED_ENTRIES * ENTRY_COST_BYTES)
            reads_before = self.cached_reads
            while (effect := self.core.next_effect()) is not None:
                cost_bytes += self._perform(effect)
                if cost_bytes >= limit_bytes or self.cached_reads - reads_before >= READS_PER_PASS:
                    self.wake()  # let other tasks run
                    break
            self._set_alarm()
        except Exception as error:
            self._on_failed(error)
            return
        self._cursor.active_from = self.core.read_position if self._keeps_up and self._consumers else None
        pending_bytes = self.core.pending_bytes
        self._budget.used_bytes += pending_bytes - self._accounted_bytes
        self._accounted_bytes = pending_bytes

    def _perform(self, effect: Effect) -> int:
        """Perform the effect; return its cost: bytes sent, plus a fixed cost for each entry."""
        match effect:
            case Send():
                return self._send(effect)
            case SendAll(sends):
                return sum(map(self._send, sends))
            case Announce(consumer, is_active):
                self._consumers[consumer].announce(is_active)
            case _:
                self._read(effect)
        return 0

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if (wake_at_ms := self.core.wake_at_ms) is not None:
            delay_s = max(0, wake_at_ms - self._wall_ms()) / 1000
            self._alarm = self._loop.call_later(min(delay_s, MAX_SLEEP_S), self.wake)

    def _send(self, send: Send) -> int:
        consumer = self._consumers[send.consumer]
        buffers, entries, size_bytes = encode_send(
            consumer.consumer_id, send, self._cursor.unacked_words, partition=self._partition_index, epoch=consumer.epoch
        )
        consumer.peer.write_buffers(buffers)
        consumer.traffic.count(entries, send.messages, size_bytes)
        consumer.activity.on_sent(self._now_ms)
        if send.redelivery_counts:
            consumer.redelivered_messages += sum(send.counted.messages_in(e, e) for e in send.redelivery_counts)
        self._on_sent(entries, send.messages, size_bytes)
        return size_bytes + ENTRY_COST_BYTES * entries

    # Reads

    def _read(self, read: Read | ReadBack) -> None:
        position, max_entries, max_bytes = self._range_of(read)
        if isinstance(read, Read) and self._lags and self._turns.is_paced:
            max_entries = PACED_ENTRIES
        if self._failures and (failure := self._failures.get(type(read))) is not None and failure.asked != position:
            del self._failures[type(read)]
        groups = self._ledger.read_cached(position, max_entries=max_entries, max_bytes=max_bytes)
        if groups is not None:
            self.cached_reads += 1
            self._keeps_up = True
            self._answer(read, self._count(groups))
        elif type(read) in self._running:
            self._next[type(read)] = read  # the running read was requested before a rewind; its answer will be ignored
        else:
            self._running[type(read)] = read
            self._tasks.start(self._read_storage(read), name="read")

    async def _read_storage(self, read: Read | ReadBack) -> None:
        try:
            await self._read_and_answer(read)
        except Exception as error:
            if not self._closed:  # else the core would wait for this read forever
                self._on_failed(error)

    async def _read_and_answer(self, read: Read | ReadBack) -> None:
        position, max_entries, max_bytes = self._range_of(read)
        self.storage_reads += 1
        self._keeps_up = False
        try:
            groups = await self._read_unacknowledged(position, max_entries, max_bytes, may_pass=isinstance(read, Read))
        except CepheidError as error:
            self._on_read_failed(read, position, error)
        else:
            self._failures.pop(type(read), None)
            self._retry_delay_s = self._settings.read_retry_s
            if not self._closed:
                self._turns.run(self._allowance, lambda: self._answer(read, self._count(self._in_parts(groups))))
        finally:
            del self._running[type(read)]
        if (following := self._next.pop(type(read), None)) is not None and not self._closed:
            self._read(following)
        self.wake()

    async def _read_unacknowledged(
        self, position: Position, max_entries: int, max_bytes: int, *, may_pass: bool
    ) -> list[EntryGroup]:
        while True:
            try:
                return await self._ledger.read(position, max_entries=max_entries, max_bytes=max_bytes)
            except CepheidError:
                further = self._cursor.unacknowledged_from(position)
                if not may_pass or further == position:
                    raise
                position = further

    def _range_of(self, read: Read | ReadBack) -> tuple[Position, int, int]:
        has_room = self._budget.used_bytes < self._budget.limit_bytes
        max_bytes = self._settings.read_bytes if has_room else SMALL_READ_BYTES
        if isinstance(read, Read):
            return read.position, READ_ENTRIES, max_bytes
        return Position(read.ledger_id, read.first), read.last - read.first + 1, max_bytes

    def _in_parts(self, groups: list[EntryGroup]) -> list[EntryGroup]:
        """Split groups into parts of `PACED_ENTRIES` while clients publish: a core sends a whole group if permits suffice."""
        if not self._turns.is_paced:
            return groups
        return [
            group.slice(first, min(first + PACED_ENTRIES - 1, group.last_entry_id))
            for group in groups
            for first in range(group.first_entry_id, group.last_entry_id + 1, PACED_ENTRIES)
        ]

    def _count(self, groups: list[EntryGroup]) -> list[CountedGroup]:
        return [count_group(group, with_hashes=self._with_hashes, shape=self._shape) for group in groups]

    def _answer(self, read: Read | ReadBack, groups: list[CountedGroup]) -> None:
        to_end = not groups or (groups[-1].ledger_id, groups[-1].last) >= self._ledger.last_confirmed
        if isinstance(read, Read):
            self._read_to_end = to_end
        self.core.on_read(read, groups, to_end=to_end)

    def _on_read_failed(self, read: Read | ReadBack, position: Position, error: CepheidError) -> None:
        must_retry = self.core.on_read_failed(read)
        if not must_retry or self._closed:
            return
        before = self._failures.get(type(read))
        since_s = self._loop.time() if before is None else before.since_s
        entry = self._cursor.unacknowledged_from(position)
        failure = self._failures[type(read)] = ReadFailure(position, entry, error, since_s)
        extra = {**self._log_fields, "position": str(entry), "retry_s": self._retry_delay_s, "error": str(error)}
        if not failure.is_unreadable:
            log.warning("dispatch.read_failed", extra=extra)
        elif before is None or not before.is_unreadable:
            hint = "delivery waits there: cepheid subscriptions skip TOPIC SUBSCRIPTION --unreadable skips such entries"
            log.error("dispatch.unreadable", extra={**extra, "hint": hint})
        if self._retry is None:
            self._retry = self._loop.call_later(self._retry_delay_s, self._try_again)
            self._retry_delay_s = min(2 * self._retry_delay_s, RETRY_MAX_S)

    def _try_again(self) -> None:
        self._retry = None
        self.core.on_retry()
        self.wake()
