"""One subscription: its consumers, what they acknowledge, and its position in the topic.

    SUBSCRIBE ──► add_consumer ──► core for the subscription's type ◄── FLOW, redelivery, acknowledgements, sockets, appends
    SEEK ──► begin_seek: consumers are closed, new ones wait ──► reset ──► end_seek

Rules
1. All consumers connected at one time have one subscription type; without consumers the type may change (protocol.md §12.3).
2. If the client asked for an answer to an acknowledgement, it is answered once that is durable.
3. During a seek nothing is delivered and no consumer joins; commands of closed consumers are dropped with their ids (§17).
4. A non-durable subscription ends with its last consumer, but a seek keeps it for a while, as its reader reconnects (§17).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cepheid_broker.dispatch import (
    COMES_AGAIN_ON,
    EXCLUSIVE,
    KEY_SHARED,
    CountedGroup,
    Dispatcher,
    DispatchLimits,
    DispatchPolicies,
    HashRange,
    Idle,
    KeySharing,
    SharedDispatch,
    Why,
    new_core,
    type_name,
)
from cepheid_broker.errors import BrokerError, ConsumerBusyError, ServiceNotReadyError
from cepheid_broker.peer import Peer
from cepheid_broker.policies import TopicPolicies
from cepheid_broker.settings import BrokerSettings
from cepheid_broker.topics.ack_saver import AckSaver
from cepheid_broker.topics.backlog import known_backlog
from cepheid_broker.topics.subscription_figures import ConsumerFigures, SubscriptionFigures
from cepheid_broker.topics.unreadable_entries import UnreadableEntries, find_unreadable
from cepheid_broker.traffic import Activity, BrokerTraffic, Traffic
from cepheid_metadata import Position
from cepheid_ports import TaskOwner
from cepheid_wire import TopicName
from cepheid_wire import pulsar_api_pb2 as pb

if TYPE_CHECKING:
    from cepheid_managed_ledger import Cursor, ManagedLedger

log = logging.getLogger(__name__)

ANY_KEYS = KeySharing()
ACTIVE_CHANGE_VERSION = 12  # protocol version; older clients do not know the command


@dataclass(frozen=True, slots=True)
class BatchAck:
    """A part of a batch: the messages whose bit is 1 are *not* acknowledged yet; missing words are 0."""

    position: Position
    unacked_words: tuple[int, ...]
    batch_size: int


class Consumer:
    """`key` identifies the consumer in the core; unlike the client's `consumer_id` it is never reused."""

    def __init__(
        self,
        subscription: Subscription,
        peer: Peer,
        consumer_id: int,
        key: int,
        *,
        name: str = "",
        priority_level: int = 0,
        metadata: dict[str, str] | None = None,
        connected_at_ms: int = 0,
        epoch: int | None = None,
        key_sharing: KeySharing | None = None,
        on_closed_by_broker: Callable[[Consumer], None],
    ) -> None:
        self.subscription = subscription
        self.peer = peer
        self.consumer_id = consumer_id
        self.key = key
        self.name = name
        self.priority_level = priority_level
        self.metadata = metadata or {}
        self.connected_at_ms = connected_at_ms
        self.key_sharing = key_sharing or KeySharing()
        self.traffic = Traffic()
        self.epoch = epoch
        """Epoch of its last redelivery request, if the client counts them (protocol.md §16)."""
        self.redelivered_messages = 0
        self.redeliver_rate_per_s = 0.0
        self.acked_entries = 0
        self.acked_messages = 0.0
        self.ack_rate_per_s = 0.0
        self.activity = Activity()
        self._last_counts = (0, 0.0)
        self._knows_end = False
        self.closed = False
        self.moved_to: Mapping[str, str] | None = None
        """Addresses for the client after the broker closed the consumer; None: it looks the topic up."""
        self._on_closed_by_broker = on_closed_by_broker

    def __repr__(self) -> str:
        return f"<Consumer {self.consumer_id} ({self.name!r}) of {self.subscription!r}{', closed' if self.closed else ''}>"

    def detach(self) -> None:
        """Detach the consumer after the client closed it or disconnected: its unacknowledged entries can be redelivered at once."""
        if not self.closed:
            self.closed = True
            self.subscription.remove_consumer(self)

    def close_by_broker(self, reason: str, moved_to: Mapping[str, str] | None = None) -> None:
        """Tell the client to subscribe again, at `moved_to` (addresses by scheme) or after a lookup."""
        if not self.closed:
            self.moved_to = moved_to
            self.detach()
            extra = {
                "topic": str(self.subscription.topic),
                "subscription": self.subscription.name,
                "consumer": self.name,
                "reason": reason,
            }
            log.info("consumer.closed_by_broker", extra=extra)
            self._on_closed_by_broker(self)

    def announce(self, is_active: bool) -> None:
        """Tell a consumer of a Failover subscription whether it is the active one (protocol.md §19)."""
        if self.peer.protocol_version >= ACTIVE_CHANGE_VERSION:
            self.peer.send(pb.CommandActiveConsumerChange(consumer_id=self.consumer_id, is_active=is_active))

    def announce_end(self) -> None:
        """Report that the topic is terminated and everything is acknowledged, to Java clients only.

        Other clients close the connection on this command, reconnect, and close it again, endlessly (protocol.md §22).
        """
        if not self._knows_end and self.peer.client_version.startswith("Pulsar-Java"):
            self._knows_end = True
            self.peer.send(pb.CommandReachedEndOfTopic(consumer_id=self.consumer_id))

    def count_acked(self, entries: int, messages: int | None) -> None:
        """Count acknowledgements. `messages` None: not counted; estimate from this consumer's average messages per entry."""
        self.acked_entries += entries
        per_entry = self.traffic.messages / self.traffic.entries if self.traffic.entries else 1.0
        self.acked_messages += entries * per_entry if messages is None else messages

    def on_tick(self, window_s: float) -> None:
        self.traffic.on_tick(window_s)
        redelivered, acked = self._last_counts
        self.redeliver_rate_per_s = (self.redelivered_messages - redelivered) / window_s
        self.ack_rate_per_s = (self.acked_messages - acked) / window_s
        self._last_counts = self.redelivered_messages, self.acked_messages

    def figures(self) -> ConsumerFigures:
        subscription = self.subscription
        return ConsumerFigures(
            self.consumer_id,
            self.name,
            self.peer.address,
            self.peer.client_version,
            self.connected_at_ms,
            self.traffic.figures(),
            self.redelivered_messages,
            self.redeliver_rate_per_s,
            self.acked_entries,
            self.ack_rate_per_s,
            replace(self.activity),
            subscription.permits(self),
            subscription.unacked_messages(self),
            subscription.is_blocked(self),
            subscription.is_active(self),
            subscription.hash_ranges(self),
            self.priority_level,
            self.metadata,
        )


class Subscription:
    def __init__(
        self,
        topic: TopicName,
        name: str,
        ledger: ManagedLedger,
        cursor: Cursor,
        settings: BrokerSettings,
        shared: SharedDispatch,
        tasks: TaskOwner,
        totals: BrokerTraffic,
        *,
        policies: Callable[[], TopicPolicies],
        on_unused: Callable[[Subscription], None],
    ) -> None:
        self.topic = topic
        self.name = name
        self.cursor = cursor
        self.kind: int | None = None  # CommandSubscribe.SubType, while consumers are connected
        self.consumers: dict[int, Consumer] = {}
        self.delivered = Traffic(totals.delivered)
        self.acked_entries = 0
        self.expired_entries = 0
        self.expire_rate_per_s = 0.0
        self._last_expired = 0
        self._redelivered_messages = 0
        self._activity = Activity()  # of consumers that left, and of the subscription itself
        self._noted_mark_delete = cursor.mark_delete
        self._ledger = ledger
        self._settings = settings
        self._shared = shared
        self._tasks = tasks
        self._policies = policies
        self._on_unused = on_unused
        self._dispatcher: Dispatcher | None = None
        self._dispatch_kind: tuple[int, str] | None = None  # kind and key sharing of the dispatcher, which outlives its consumers
        self._next_key = 1
        self._seek_done: asyncio.Event | None = None  # while a seek is pending
        self._grace: asyncio.TimerHandle | None = None  # rule 4
        self.answers = AckSaver(cursor, tasks)  # rule 2
        self._storage_reads = self._cached_reads = 0
        self.closed = False

    def __repr__(self) -> str:
        return f"<Subscription {self.name!r} of {self.topic}, {len(self.consumers)} consumers>"

    @property
    def durable(self) -> bool:
        return self.cursor.durable

    @property
    def type_name(self) -> str:
        return type_name(self.kind)

    # Consumers

    async def wait_until_free(self, kind: int, peer: Peer, sharing: KeySharing = ANY_KEYS) -> None:
        """Return when a consumer of this type may join; the caller must not await between this and joining.

        Raises ConsumerBusyError and ConsumerAssignError, after checking that the holder is alive: after a client's crash the old
        socket may look open for long.
        """
        while True:
            if self.closed:
                raise ServiceNotReadyError(f"subscription {self.name!r} of {self.topic} is being closed")
            if self._seek_done is not None:
                await self._seek_done.wait()
                continue
            if (conflict := self._conflict(kind, sharing)) is None:
                return
            holder, refusal = conflict
            alive = holder.peer is peer or await holder.peer.is_alive()
            if alive and self.consumers.get(holder.key) is holder:
                raise refusal

    def _conflict(self, kind: int, sharing: KeySharing) -> tuple[Consumer, BrokerError] | None:
        """Return a connected consumer that excludes the new one, with the error."""
        for holder in self.consumers.values():
            if kind != self.kind or kind == EXCLUSIVE:
                return holder, self._busy(kind)
            if kind != KEY_SHARED:
                return None
            if (refusal := sharing.conflict(holder.key_sharing, holder.name)) is not None:
                return holder, refusal
        return None

    def _busy(self, kind: int) -> ConsumerBusyError:
        wanted, found = type_name(kind), type_name(self.kind)
        message = f"subscription {self.name!r} of {self.topic} has {len(self.consumers)} consumers of type {found}"
        if kind != self.kind:
            message += f"; a consumer of type {wanted} cannot join them"
        return ConsumerBusyError(message, topic=str(self.topic), subscription=self.name)

    def new_key(self) -> int:
        self._next_key += 1
        return self._next_key

    @property
    def joins(self) -> int:
        """Number of consumers that have joined so far."""
        return self._next_key

    def add_consumer(self, consumer: Consumer, kind: int) -> None:
        assert not self.closed
        assert self._seek_done is None
        self._end_grace_timer()
        if not self.consumers:
            self.kind = kind
            self._start_dispatch(kind, consumer.key_sharing)
        assert kind == self.kind, "rule 1"
        assert self._dispatcher is not None
        self.consumers[consumer.key] = consumer
        ranges, core = consumer.key_sharing.ranges or None, self._dispatcher.core
        try:
            core.on_consumer_joined(consumer.key, name=consumer.name, priority=consumer.priority_level, hash_ranges=ranges)
            core.on_writable(consumer.key, consumer.peer.writable)
        except Exception as error:
            self._on_dispatch_failed(error)
            raise ServiceNotReadyError(f"subscription {self.name!r} of {self.topic} is being restarted") from error
        self._dispatcher.wake()

    def remove_consumer(self, consumer: Consumer) -> None:
        if self.consumers.pop(consumer.key, None) is None:
            return
        self._redelivered_messages += consumer.redelivered_messages
        self._activity.include(consumer.activity)
        if self._dispatcher is not None:
            try:
                self._dispatcher.core.on_consumer_left(consumer.key)
            except Exception as error:  # the caller still has to free the rest of a lost connection
                self._on_dispatch_failed(error)
            else:
                self._dispatcher.wake()
        if not self.consumers:
            self.kind = None
            self.cursor.active_from = None
            self.end_if_unused()

    def end_if_unused(self) -> None:
        """Report a non-durable subscription without consumers as unused, unless a seek keeps it."""
        if not (self.durable or self.consumers or self.in_seek or self._grace is not None or self.closed):
            self._on_unused(self)

    def _start_dispatch(self, kind: int, sharing: KeySharing) -> None:
        """Start or reuse the dispatcher; reused while the type stays the same, so that it has one pending read however often
        consumers change."""
        if self._dispatcher is not None and self._dispatch_kind == (kind, str(sharing)):
            self._dispatcher.core.on_rewind()
            return
        self._stop_dispatch()
        self._dispatch_kind = kind, str(sharing)
        dispatch = self._settings.dispatch
        limits = DispatchLimits(dispatch.read_ahead_bytes)
        self._dispatcher = Dispatcher(
            new_core(kind, self.cursor, limits, self._dispatch_policies(), self.topic.partition_index, sharing),
            self._ledger,
            self.consumers,
            self.cursor,
            dispatch,
            self._shared,
            self._tasks,
            with_hashes=kind == KEY_SHARED or sharing.sticky,
            partition_index=self.topic.partition_index,
            log_fields={"topic": str(self.topic), "subscription": self.name},
            on_sent=self.delivered.count,
            on_failed=self._on_dispatch_failed,
        )

    def _dispatch_policies(self) -> DispatchPolicies:
        policies = self._policies()
        return DispatchPolicies(policies.max_unacked_per_consumer, policies.max_unacked_per_subscription, policies.delayed_delivery)

    def _stop_dispatch(self) -> None:
        if self._dispatcher is not None:
            self._storage_reads += self._dispatcher.storage_reads
            self._cached_reads += self._dispatcher.cached_reads
            self._dispatcher.close()
            self._dispatcher = None

    def _on_dispatch_failed(self, error: BaseException) -> None:
        """Restart the dispatch of this subscription after an internal error; other subscriptions are not affected."""
        extra = {"topic": str(self.topic), "subscription": self.name, "error": repr(error)}
        log.error("dispatch.failed", extra=extra, exc_info=error)
        self._stop_dispatch()
        self.close_consumers("internal error in dispatch")

    def close_consumers(self, reason: str, moved_to: Mapping[str, str] | None = None) -> None:
        for consumer in list(self.consumers.values()):
            consumer.close_by_broker(reason, moved_to)

    def stop(self) -> None:
        """Stop delivery and refuse consumers. Connected consumers may acknowledge until they are closed: what the cursor saves
        last is not redelivered."""
        self.closed = True
        self._stop_dispatch()

    def close(self, reason: str, moved_to: Mapping[str, str] | None = None) -> None:
        """Close consumers and dispatch, because the topic is closed or failed or the subscription is deleted."""
        self.closed = True
        self.close_consumers(reason, moved_to)
        self._stop_dispatch()
        self._end_grace_timer()
        if self._seek_done is not None:
            self._seek_done.set()

    # Events for the core

    def on_appended(self, tail: CountedGroup | None, now_ms: int) -> None:
        """Dispatch appended entries. `tail`: the new entries, if they form one group."""
        if self._dispatcher is not None and self.consumers:
            self._dispatcher.on_appended(tail, now_ms)

    def on_policies(self) -> None:
        """Pass changed policies to the core; the subscription itself keeps no copy."""
        if self._dispatcher is not None:
            self._dispatcher.core.on_policies(self._dispatch_policies())
            self._dispatcher.wake()

    def on_cursor_moved(self) -> None:
        """Notify the core of entries acknowledged without a consumer (skipped, expired, cleared), as it may hold or await them."""
        if self._dispatcher is not None:
            self._dispatcher.core.on_cursor_moved()
            self._dispatcher.wake()

    def on_flow(self, consumer: Consumer, messages: int) -> None:
        if self._dispatcher is not None:
            self._dispatcher.on_permits(consumer.key, messages)

    def on_writable(self, consumer: Consumer, writable: bool) -> None:
        if self._dispatcher is not None:
            self._dispatcher.core.on_writable(consumer.key, writable)
            if writable:
                self._dispatcher.wake()

    def redeliver(self, consumer: Consumer, positions: list[Position] | None) -> None:
        if self._dispatcher is not None:
            self._dispatcher.core.on_redeliver(consumer.key, positions)
            self._dispatcher.wake()

    # Acknowledgements

    def acknowledge(self, consumer: Consumer, positions: Sequence[Position], parts: Sequence[BatchAck]) -> None:
        """Acknowledge whole entries and parts of batches. Unknown or already acknowledged ones are ignored (protocol.md §15)."""
        backlog = self.cursor.backlog_entries
        self.cursor.acknowledge(positions)
        done = list(positions)
        for part in parts:
            self.cursor.acknowledge_indexes(part.position, part.unacked_words, part.batch_size)
            if self.cursor.is_acknowledged(part.position):
                done.append(part.position)
        messages = None
        if self._dispatcher is not None:
            core = self._dispatcher.core
            before = core.unacked_messages(consumer.key)
            core.on_acked(consumer.key, done)
            self._dispatcher.wake()
            if before is not None:
                messages = before - (core.unacked_messages(consumer.key) or 0)
        self._count_acked(consumer, max(0, backlog - self.cursor.backlog_entries), messages)

    def acknowledge_cumulative(self, consumer: Consumer, position: Position, part: BatchAck | None) -> None:
        """Acknowledge everything up to and including `position`; with `part`, up to the entry before it and that part."""
        before = self.cursor.backlog_entries
        if part is None:
            self.cursor.acknowledge_cumulative(position)
        else:
            self.cursor.acknowledge_cumulative(position, part.unacked_words, part.batch_size)
        if self._dispatcher is not None and self.cursor.mark_delete >= self._dispatcher.core.read_position:
            self.on_cursor_moved()  # beyond what was delivered
        self._count_acked(consumer, max(0, before - self.cursor.backlog_entries), None)

    def _count_acked(self, consumer: Consumer, entries: int, messages: int | None) -> None:
        consumer.count_acked(entries, messages)
        self.acked_entries += entries
        self._note_mark_delete()
        self.announce_end()

    def _note_mark_delete(self) -> None:
        if self.cursor.mark_delete != self._noted_mark_delete:
            self._noted_mark_delete = self.cursor.mark_delete
            self._activity.last_mark_delete_at_ms = self._ledger.wall_ms()

    def announce_end(self) -> None:
        """Tell consumers that the end is reached if the topic is terminated and has no backlog (protocol.md §22)."""
        if self._ledger.is_terminated and self.cursor.backlog_entries == 0:
            for consumer in self.consumers.values():
                consumer.announce_end()

    # Moves without acknowledgements: durable when they return, and consumers stay. Each returns the number of entries passed.

    async def skip(self, entries: int) -> int:
        """Skip the next `entries` unacknowledged entries."""
        if entries <= 0:
            return 0
        return await self._advance(self.cursor.nth_unacknowledged(entries) or self._ledger.last_confirmed)

    async def clear_backlog(self) -> int:
        return await self._advance(self._ledger.last_confirmed)

    async def expire_until(self, position: Position) -> int:
        """Expire everything up to `position`; never moves back."""
        expired = await self._advance(position)
        self.expired_entries += expired
        self._activity.last_expired_at_ms = self._ledger.wall_ms()
        return expired

    async def _advance(self, position: Position) -> int:
        """Advance at most to the last confirmed entry: while a failed ledger is replaced, more may be stored than was confirmed."""
        self._check_at_rest()
        moved = self.cursor.advance_to(min(position, self._ledger.last_confirmed))
        if moved:
            self.on_cursor_moved()
            self._note_mark_delete()
            self.announce_end()
        await self.cursor.saved()
        return moved

    async def skip_unreadable(self) -> UnreadableEntries:
        """Give up the entries that certainly have no valid copy, where delivery waits for them. Durable when it returns.

        Raises CepheidError if reading fails in another way; then nothing was skipped.
        """
        self._check_at_rest()
        failures = [] if self._dispatcher is None else self._dispatcher.read_failures
        starts = [failure.position for failure in failures] or [self.cursor.first_unacknowledged()]
        found = await find_unreadable(self._ledger, self.cursor, starts)
        if not found.positions:
            return found
        self._check_at_rest()
        self.cursor.acknowledge(found.positions)
        extra = {"topic": str(self.topic), "subscription": self.name, "entries": len(found.positions), "runs": str(found)}
        log.warning("subscription.unreadable_skipped", extra=extra)
        self.on_cursor_moved()
        if self._dispatcher is not None:
            self._dispatcher.retry_reads()
        self._note_mark_delete()
        self.announce_end()
        await self.cursor.saved()
        return found

    @property
    def is_unreadable(self) -> bool:
        """Whether delivery waits for an entry that has no valid copy."""
        return self._dispatcher is not None and any(failure.is_unreadable for failure in self._dispatcher.read_failures)

    def _check_at_rest(self) -> None:
        if self._seek_done is not None or self.closed:
            raise ServiceNotReadyError(f"subscription {self.name!r} of {self.topic} is being moved or closed already")

    # Seek

    def begin_seek(self) -> None:
        """Close the consumers and hold new ones back. Raises ServiceNotReadyError while another seek is pending."""
        self._check_at_rest()
        self._end_grace_timer()
        self._seek_done = asyncio.Event()
        self.close_consumers("seek")

    @property
    def in_seek(self) -> bool:
        return self._seek_done is not None

    def end_seek(self) -> None:
        """Let consumers join again; call it after the seek's answer was written, so that theirs follow it (protocol.md §17)."""
        assert self._seek_done is not None, "begun before"
        self._seek_done.set()
        self._seek_done = None
        if not self.durable and not self.closed:
            loop = asyncio.get_running_loop()
            self._grace = loop.call_later(self._settings.reader_seek_grace_s, self._end_grace)

    def _end_grace_timer(self) -> None:
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None

    def _end_grace(self) -> None:
        self._grace = None
        self.end_if_unused()

    # Figures

    def permits(self, consumer: Consumer) -> int:
        return 0 if self._dispatcher is None else self._dispatcher.core.permits(consumer.key)

    def unacked_messages(self, consumer: Consumer) -> int:
        """Return the consumer's unacknowledged messages; for Exclusive, unacknowledged entries before the read position."""
        if self._dispatcher is None:
            return 0
        counted = self._dispatcher.core.unacked_messages(consumer.key)
        if counted is not None:
            return counted
        last_sent = self._ledger.previous_position(self._dispatcher.core.read_position)
        unsent = self._ledger.count_between(last_sent, self._ledger.last_confirmed)
        return max(0, self.cursor.backlog_entries - unsent)

    def is_blocked(self, consumer: Consumer) -> bool:
        return self._dispatcher is not None and self._dispatcher.core.is_blocked(consumer.key)

    def hash_ranges(self, consumer: Consumer) -> tuple[HashRange, ...]:
        return () if self._dispatcher is None else self._dispatcher.core.hash_ranges(consumer.key)

    def is_active(self, consumer: Consumer) -> bool:
        """Return whether the consumer receives messages: in Failover, whether it is the active one; otherwise always."""
        return self._dispatcher is not None and self._dispatcher.core.is_active(consumer.key)

    def why(self) -> tuple[Why, ...]:
        """Return what holds up delivery; empty while there are entries to deliver and a consumer that takes them."""
        if self._seek_done is not None:
            return (Why(Idle.SEEKING),)
        if self._dispatcher is None:
            return (Why(Idle.NO_CONSUMER),)
        reasons = self._dispatcher.why()
        if self._ledger.is_terminated:
            ended = f"a consumer seeks, or sent entries are redelivered on {COMES_AGAIN_ON}; the topic is terminated"
            reasons = [replace(why, until=ended) if why.idle is Idle.AT_END else why for why in reasons]
        return tuple(reasons)

    def on_tick(self, window_s: float) -> None:
        self.delivered.on_tick(window_s)
        for consumer in self.consumers.values():
            consumer.on_tick(window_s)
        self.expire_rate_per_s = (self.expired_entries - self._last_expired) / window_s
        self._last_expired = self.expired_entries

    def _all_activity(self) -> Activity:
        activity = replace(self._activity)
        for consumer in self.consumers.values():
            activity.include(consumer.activity)
        return activity

    def figures(self) -> SubscriptionFigures:
        consumers = tuple(consumer.figures() for consumer in self.consumers.values())
        dispatcher = self._dispatcher
        backlog, reasons = known_backlog(self._ledger, self.cursor), self.why()
        return SubscriptionFigures(
            self.name,
            self.durable,
            self.type_name,
            backlog.entries,
            backlog.messages,
            backlog.bytes,
            backlog.oldest_age_s,
            self.cursor.mark_delete,
            None if dispatcher is None else dispatcher.core.read_position,
            self.delivered.figures(),
            self._redelivered_messages + sum(consumer.redelivered_messages for consumer in self.consumers.values()),
            self.acked_entries,
            self.expired_entries,
            self.expire_rate_per_s,
            sum(consumer.unacked_messages for consumer in consumers),
            any(each.idle is Idle.SUBSCRIPTION_UNACKED for each in reasons),
            0 if dispatcher is None else dispatcher.core.delayed_entries,
            0 if dispatcher is None else dispatcher.core.replay_entries,
            next((consumer.key_sharing for consumer in self.consumers.values()), None) if self.kind == KEY_SHARED else None,
            self.cursor.properties,
            self._all_activity(),
            "; ".join(map(str, reasons[:3])) or "busy",
            consumers,
            self._storage_reads + (dispatcher.storage_reads if dispatcher else 0),
            self._cached_reads + (dispatcher.cached_reads if dispatcher else 0),
        )
