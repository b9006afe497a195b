"""A subscription of a non-persistent topic: its consumers, and which of the entries that arrive now they get.

    deliver ──► NonPersistentDispatch.plan ──► MESSAGE frames, in the same loop turn; the rest is dropped and counted

It has the interface of every subscription, so that connections need not distinguish them. What would need a stored entry does
nothing (acknowledgement, redelivery: clients do not even send them here) or is refused (seek).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from cepheid_broker.dispatch import (
    FAILOVER,
    MAX_REASONS,
    CatchUpTurns,
    Idle,
    NonPersistentDispatch,
    ReadAheadBudget,
    SharedDispatch,
    Why,
    new_dispatch,
)
from cepheid_broker.errors import NotAllowedError
from cepheid_broker.peer import Buffer
from cepheid_broker.policies import TopicPolicies
from cepheid_broker.settings import BrokerSettings
from cepheid_broker.topics.subscription import BatchAck, Consumer, Subscription
from cepheid_broker.traffic import BrokerTraffic
from cepheid_managed_ledger import AckSet, Cursor, LedgerList
from cepheid_metadata import ChainLedger, Position
from cepheid_ports import TaskOwner
from cepheid_wire import TopicName, encode_message_header

if TYPE_CHECKING:
    from collections.abc import Callable

    from cepheid_managed_ledger import ManagedLedger

ID = Position(0, 0)
"""Position of every entry (protocol.md §6)."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A group of arrived entries, parsed once for all subscriptions."""

    payloads: Sequence[Buffer]
    messages: Sequence[int]
    hashes: Sequence[int]


_NO_READS = SharedDispatch(ReadAheadBudget(0), CatchUpTurns(1.0, BrokerTraffic(), lambda: 0.0))


class NonPersistentSubscription(Subscription):
    def __init__(
        self,
        topic: TopicName,
        name: str,
        settings: BrokerSettings,
        tasks: TaskOwner,
        totals: BrokerTraffic,
        *,
        policies: Callable[[], TopicPolicies],
        durable: bool,
        on_unused: Callable[[Subscription], None],
    ) -> None:
        ledgers = LedgerList([ChainLedger(ledger_id=0)])  # without entries, so acknowledgements name unknown positions
        cursor = Cursor(name, AckSet(ledgers, ledgers.first_position), ledgers, None, {})
        ledger = cast("ManagedLedger", _NoLedger(topic))
        super().__init__(topic, name, ledger, cursor, settings, _NO_READS, tasks, totals, policies=policies, on_unused=on_unused)
        self.dropped_messages = 0
        self.drop_rate_per_s = 0.0
        self._last_dropped = 0
        self._kept = durable
        self._partition_index = topic.partition_index
        self._dispatch = NonPersistentDispatch()
        self._announced: int | None = None

    @property
    def durable(self) -> bool:
        """Whether it outlives its consumers, though only in memory."""
        return self._kept

    @property
    def needs_hashes(self) -> bool:
        return self._dispatch.by_key

    def deliver(self, arrived: Arrived) -> None:
        plan = self._dispatch.plan(arrived.messages, arrived.hashes)
        self.dropped_messages += plan.dropped_messages
        for key, indexes in plan.taken.items():
            consumer = self.consumers[key]
            buffers: list[Buffer] = []
            messages = size_bytes = 0
            for index in indexes:
                payload = arrived.payloads[index]
                buffers += (
                    encode_message_header(consumer.consumer_id, *ID, len(payload), partition=self._partition_index),
                    payload,
                )
                messages += arrived.messages[index]
                size_bytes += len(payload)
            consumer.traffic.count(len(indexes), messages, size_bytes)
            self.delivered.count(len(indexes), messages, size_bytes)
            consumer.peer.write_buffers(buffers)

    # Consumers

    def add_consumer(self, consumer: Consumer, kind: int) -> None:
        assert not self.closed
        if not self.consumers:
            self.kind = kind
            self._dispatch = new_dispatch(kind, self.topic.partition_index, consumer.key_sharing)
        self.consumers[consumer.key] = consumer
        self._dispatch.on_joined(
            consumer.key, priority=consumer.priority_level, name=consumer.name, ranges=consumer.key_sharing.ranges
        )
        self._dispatch.on_writable(consumer.key, consumer.peer.writable)
        self._announce_later(consumer)

    def remove_consumer(self, consumer: Consumer) -> None:
        if self.consumers.pop(consumer.key, None) is None:
            return
        self._dispatch.on_left(consumer.key)
        self._activity.include(consumer.activity)
        self._announce_later(None)
        if not self.consumers:
            self.kind = None
            self.end_if_unused()

    def _announce_later(self, newcomer: Consumer | None) -> None:
        """Announce the active consumer: a change to all, its role to a newcomer after the answer to its SUBSCRIBE (protocol.md
        §19)."""
        if self.kind == FAILOVER:
            asyncio.get_running_loop().call_soon(self._announce, newcomer)

    def _announce(self, newcomer: Consumer | None) -> None:
        active = self._dispatch.active
        changed = active is not None and active.key != self._announced
        self._announced = None if active is None else active.key
        for consumer in list(self.consumers.values()):
            if changed or consumer is newcomer:
                consumer.announce(consumer.key == self._announced)

    def on_flow(self, consumer: Consumer, messages: int) -> None:
        room = self._settings.dispatch.max_permits - self.permits(consumer)
        self._dispatch.on_permits(consumer.key, min(messages, room))

    def on_writable(self, consumer: Consumer, writable: bool) -> None:
        self._dispatch.on_writable(consumer.key, writable)

    def permits(self, consumer: Consumer) -> int:
        return self._dispatch.consumers[consumer.key].permits if consumer.key in self.consumers else 0

    def why(self) -> tuple[Why, ...]:
        """Return why entries that arrive now would be dropped."""
        if not self.consumers:
            return (Why(Idle.NO_CONSUMER),)
        taking = [self._dispatch.active] if self._dispatch.active else list(self._dispatch.consumers.values())
        if any(holder.can_take for holder in taking):
            return ()
        return tuple(
            Why(Idle.SOCKET_FULL if holder.permits > 0 else Idle.NO_PERMITS, consumer=holder.name)
            for holder in taking[:MAX_REASONS]
        )

    def on_tick(self, window_s: float) -> None:
        super().on_tick(window_s)
        self.drop_rate_per_s = (self.dropped_messages - self._last_dropped) / window_s
        self._last_dropped = self.dropped_messages

    # What needs stored entries

    def redeliver(self, consumer: Consumer, positions: list[Position] | None) -> None:
        """Do nothing: no entry can be sent twice."""

    def acknowledge(self, consumer: Consumer, positions: Sequence[Position], parts: Sequence[BatchAck]) -> None:
        """Do nothing: no entry is outstanding."""

    def acknowledge_cumulative(self, consumer: Consumer, position: Position, part: BatchAck | None) -> None:
        """Do nothing: no entry is outstanding."""

    def announce_end(self) -> None:
        """Do nothing: the topic has no end."""

    def begin_seek(self) -> None:
        raise NotAllowedError(f"topic {self.topic} is non-persistent: there is nothing to seek in", topic=str(self.topic))


class _NoLedger:
    """Stand-in for a managed ledger that refuses every call."""

    def __init__(self, topic: TopicName) -> None:
        self._topic = topic

    def __getattr__(self, name: str) -> Any:
        raise NotAllowedError(f"topic {self._topic} is non-persistent: it stores nothing", topic=str(self._topic))
