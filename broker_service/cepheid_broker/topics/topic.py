"""One open topic: its policies, producers and subscriptions, and how it is closed. Everything else is in modules behind these.

    Topic ◄── PersistentTopic       a managed ledger, durable subscriptions        (persistent_topic.py)
          ◄── NonPersistentTopic    nothing is stored                              (non_persistent_topic.py)

Rules
1. A closed topic is never used again; a caller that still holds it gets ServiceNotReadyError, which clients retry.
2. What a kind of topic cannot do raises NotAllowedError, so callers need not check its kind.
3. Policies are read when they are needed; no object keeps a copy.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from cepheid_broker.errors import (
    BacklogQuotaExceededError,
    BacklogQuotaHoldError,
    NotAllowedError,
    ServiceNotReadyError,
)
from cepheid_broker.peer import Buffer
from cepheid_broker.policies import QuotaAction, TopicPolicies
from cepheid_broker.publishing import Producer, ProducerFigures, TopicDeduplication, TopicProducers
from cepheid_broker.settings import BrokerSettings
from cepheid_broker.topics.backlog import Backlog, exact_backlog
from cepheid_broker.topics.subscription import Subscription
from cepheid_broker.topics.subscription_figures import SubscriptionFigures
from cepheid_broker.traffic import BrokerTraffic, Traffic, TrafficFigures
from cepheid_metadata import Position
from cepheid_ports import CepheidError
from cepheid_wire import TopicName

if TYPE_CHECKING:
    from cepheid_managed_ledger import ManagedLedger

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TopicFigures:
    name: str
    published: TrafficFigures
    producers: tuple[ProducerFigures, ...]
    subscriptions: tuple[SubscriptionFigures, ...]
    has_chunks: bool = False
    """Whether a chunk of a chunked message was published since the topic was opened."""


class Topic(ABC):
    """What both kinds of topic share; created by `Topics.get`."""

    entry_ids_rise: ClassVar[bool] = True
    """Whether each entry has its own id; else all entries of a topic have the same one."""

    def __init__(
        self,
        name: TopicName,
        policies: TopicPolicies,
        settings: BrokerSettings,
        totals: BrokerTraffic,
        admission: TopicProducers,
    ) -> None:
        self.name = name
        self.policies = policies
        self.admission = admission
        self.deduplication: TopicDeduplication | None = None
        """None if nothing is stored, so that nothing can be stored twice."""
        self.subscriptions: dict[str, Subscription] = {}
        self.published = Traffic(totals.published)
        self.chunks = Traffic()
        self.publish_blocked: QuotaAction | None = None
        """Why publishing is blocked: the backlog is above its quota. Set by `set_publish_blocked`."""
        self.on_publish_blocked: list[Callable[[], None]] = []
        self.closed = False
        self.settling = False
        """True while the topic refuses new requests but still writes and answers those accepted before."""
        self._settings = settings
        self.on_publish_blocked.append(lambda: admission.on_publish_blocked(self.publish_blocked))

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return (
            f"<{type(self).__name__} {self.name}, {len(self.producers)} producers, {len(self.subscriptions)} subscriptions{state}>"
        )

    @property
    def in_use(self) -> bool:
        """Whether clients are connected or expected back after a seek."""
        subscriptions = self.subscriptions.values()
        return len(self.admission) > 0 or any(found.consumers or found.in_seek for found in subscriptions)

    @property
    def clients(self) -> str:
        """Number of clients, as text for messages."""
        consumers = sum(len(subscription.consumers) for subscription in self.subscriptions.values())
        return f"{len(self.producers)} producers and {consumers} consumers"

    @property
    def ledger(self) -> ManagedLedger:
        """The managed ledger. Raises NotAllowedError if the topic is not stored."""
        raise NotAllowedError(
            f"topic {self.name} is non-persistent: nothing is stored, so this cannot be done", topic=str(self.name)
        )

    def check_open(self) -> None:
        if self.closed:
            # Clients look for these words, and then keep their other producers and consumers on the connection (protocol.md §7.2).
            raise ServiceNotReadyError(f"topic {self.name} is being unloaded", topic=str(self.name))

    def on_policies(self, policies: TopicPolicies) -> None:
        """Apply policies that changed in metadata."""
        self.policies = policies
        self.admission.on_policies(policies)
        if self.deduplication is not None:
            self.deduplication.on_policies()
        for subscription in self.subscriptions.values():
            subscription.on_policies()

    def set_publish_blocked(self, action: QuotaAction | None) -> None:
        if action is not self.publish_blocked:
            self.publish_blocked = action
            for hook in self.on_publish_blocked:
                hook()

    # Producers

    @property
    def producers(self) -> Mapping[str, Producer]:
        """Producers that may publish, by name; those waiting for exclusive access are not included."""
        return self.admission.connected

    async def check_publishing(self, *, encrypted: bool, reconnecting: bool) -> None:
        """Raise the error that refuses any new producer, if there is one. While the backlog quota holds producers back,
        reconnecting ones wait here."""
        while self.publish_blocked is QuotaAction.HOLD and reconnecting and not self.closed:
            await self.admission.wait_quota_changed()
        self.check_open()
        facts = {"topic": str(self.name)}
        if self.publish_blocked is QuotaAction.HOLD:
            raise BacklogQuotaHoldError(f"the backlog of topic {self.name} is above its quota", **facts)
        if self.publish_blocked is QuotaAction.REFUSE:
            raise BacklogQuotaExceededError(f"the backlog of topic {self.name} is above its quota", **facts)
        if self.policies.encryption_required and not encrypted:
            raise NotAllowedError(f"topic {self.name} accepts only encrypted messages", **facts)

    @abstractmethod
    def publish(
        self,
        payloads: Sequence[Buffer],
        on_done: Callable[[Position | CepheidError, int], None],
        messages: Sequence[int] | None = None,
    ) -> None:
        """Publish payloads; `on_done` is called once, with the first entry's position when all are accepted, or with the error.

        `messages`: number in each payload; None: one each.
        """

    # Subscriptions

    @abstractmethod
    async def create_subscription(self, name: str, position: Position, *, properties: dict[str, str] | None = None) -> Subscription:
        """Return the durable subscription of this name, created at `position` (its first entry) if it does not exist."""

    @abstractmethod
    async def open_reader(
        self, name: str, position: Position | None, *, properties: Mapping[str, str] | None = None
    ) -> Subscription:
        """Return the non-durable subscription of this name; an existing one keeps its position and properties (protocol.md §17)."""

    @abstractmethod
    async def reset_subscription(self, subscription: Subscription, position: Position, unacked_words: Sequence[int] = ()) -> None:
        """Make `position` the next delivered entry; durable when this returns. Call it within a seek or without consumers.

        `unacked_words`: of that entry, a batch, only messages whose bit is set are delivered.
        """

    async def set_subscription_properties(self, name: str, properties: Mapping[str, str]) -> None:
        """Replace all properties; durable when this returns."""
        raise NotAllowedError(f"topic {self.name} is non-persistent: its subscriptions have no properties", topic=str(self.name))

    @abstractmethod
    async def delete_subscription(self, name: str) -> None:
        """Delete the subscription and close its consumers; succeeds if it does not exist."""

    async def exact_backlog(self, subscription: Subscription) -> Backlog:
        """Return the exact backlog, read from storage where memory does not have it. Raises read errors."""
        return await exact_backlog(self.ledger, subscription.cursor)

    # Giving up what is stored

    async def trim(self) -> None:
        """Delete ledgers that all subscriptions have acknowledged and retention does not keep. Raises its ledger's errors."""
        if self.deduplication is not None:
            await self.deduplication.save()
        await self.ledger.trim()

    async def truncate(self) -> None:
        """Delete everything published so far despite retention: every subscription moves to the end. Raises as `trim`."""
        for subscription in list(self.subscriptions.values()):
            await subscription.clear_backlog()
        if self.deduplication is not None:
            await self.deduplication.save(everything_goes=True)
        await self.ledger.truncate()

    # The end

    async def terminate(self) -> Position:
        """End the topic for good: producers are closed and refused, consumers continue to the end.

        Return the last entry's position, or entry -1 of a ledger if there is none.
        """
        raise NotAllowedError(f"topic {self.name} is non-persistent: it has no end", topic=str(self.name))

    def close_clients(self, reason: str, moved_to: Mapping[str, str] | None = None) -> None:
        """Tell producers and consumers to reconnect (protocol.md §25), at `moved_to` (addresses by scheme) or after a lookup."""
        self.closed = True
        self.admission.on_topic_closed()
        for producer in list(self.producers.values()):
            producer.close_by_broker(reason, moved_to)
        for subscription in list(self.subscriptions.values()):
            subscription.close(reason, moved_to)

    async def unload(self, reason: str) -> None:
        """Close the topic in order: answer pending publishes, disconnect clients, save state."""
        await self._settle()
        self.close_clients(reason)

    async def stop(self) -> None:
        """Stop as `unload` does, but without notifying clients: their requests stay unanswered until `close_clients`, so that
        another broker can serve the topic first."""
        await self._settle()
        for subscription in list(self.subscriptions.values()):
            subscription.stop()

    async def _settle(self) -> None:
        """Refuse new publishes; wait until accepted ones are written and answered."""
        producers = list(self.producers.values())
        settled = [asyncio.Event() for _ in producers]
        self.settling = True
        for producer, event in zip(producers, settled, strict=True):
            producer.close_when_settled(event.set)
        self.closed = True
        self.admission.on_topic_closed()
        try:
            async with asyncio.timeout(self._settings.close_timeout_s):
                for event in settled:
                    await event.wait()
        except TimeoutError:
            log.warning("topic.unload_did_not_settle", extra={"topic": str(self.name), "waited_s": self._settings.close_timeout_s})
        finally:
            self.settling = False

    # Figures

    def on_tick(self, window_s: float) -> None:
        self.published.on_tick(window_s)
        if self.deduplication is not None:
            self.deduplication.on_tick()
        for producer in self.producers.values():
            producer.on_tick(window_s)
        for subscription in self.subscriptions.values():
            subscription.on_tick(window_s)

    def figures(self) -> TopicFigures:
        return TopicFigures(
            str(self.name),
            self.published.figures(),
            tuple(producer.figures() for producer in self.producers.values()),
            tuple(subscription.figures() for subscription in self.subscriptions.values()),
            has_chunks=self.chunks.entries > 0,
        )
