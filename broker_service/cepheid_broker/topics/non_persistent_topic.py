"""A topic that stores nothing: entries are sent to the consumers that can take them at that moment, and then dropped.

    publish ──► read once: messages, key hashes ──► each subscription with consumers ──► receipts, 0:0 for every entry

Memory bound: nothing is queued here. What was sent and not yet read by a client lies in its socket's buffer, up to
`write_high_bytes` plus one group of SENDs per producer; beyond that its consumers get nothing, and their messages are dropped and
counted. A producer is read as fast as its entries are passed on, so none is dropped on arrival: the receipt −1:−1 by which Pulsar
reports that does not occur.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from cepheid_broker.dispatch import hash_of_metadata
from cepheid_broker.errors import NotAllowedError, ServiceNotReadyError, TooManyError
from cepheid_broker.peer import Buffer
from cepheid_broker.policies import TopicPolicies
from cepheid_broker.publishing import TopicProducers
from cepheid_broker.settings import BrokerSettings
from cepheid_broker.topics.non_persistent_subscription import ID, Arrived, NonPersistentSubscription
from cepheid_broker.topics.subscription import Subscription
from cepheid_broker.topics.topic import Topic
from cepheid_broker.traffic import BrokerTraffic
from cepheid_metadata import Position
from cepheid_ports import CepheidError, TaskOwner
from cepheid_wire import TopicName, parse_metadata


class NonPersistentTopic(Topic):
    entry_ids_rise: ClassVar[bool] = False

    def __init__(
        self, name: TopicName, policies: TopicPolicies, settings: BrokerSettings, tasks: TaskOwner, totals: BrokerTraffic
    ) -> None:
        super().__init__(name, policies, settings, totals, TopicProducers(str(name), tasks))
        self._tasks = tasks
        self._totals = totals

    def publish(
        self,
        payloads: Sequence[Buffer],
        on_done: Callable[[Position | CepheidError, int], None],
        messages: Sequence[int] | None = None,
    ) -> None:
        """Deliver payloads to consumers; `on_done` is called before this returns."""
        if self.closed:
            on_done(ServiceNotReadyError(f"topic {self.name} is being unloaded"), len(payloads))
            return
        listening = [found for found in self._subscriptions_here() if found.consumers]
        if listening:
            by_key = any(found.needs_hashes for found in listening)
            hashes = [hash_of_metadata(parse_metadata(memoryview(payload))) for payload in payloads] if by_key else ()
            arrived = Arrived(payloads, messages or [1] * len(payloads), hashes)
            for subscription in listening:
                subscription.deliver(arrived)
        on_done(ID, len(payloads))

    # Subscriptions

    async def create_subscription(self, name: str, position: Position, *, properties: dict[str, str] | None = None) -> Subscription:
        """Return the subscription, which lasts until it is deleted or the topic is unloaded; `position` and `properties` are
        ignored."""
        return self._find_or_create(name, durable=True)

    async def open_reader(
        self, name: str, position: Position | None, *, properties: Mapping[str, str] | None = None
    ) -> Subscription:
        return self._find_or_create(name, durable=False)

    def _find_or_create(self, name: str, *, durable: bool) -> Subscription:
        self.check_open()
        if (found := self.subscriptions.get(name)) is not None:
            if found.durable != durable:
                raise NotAllowedError(f"subscription {name!r} of {self.name} has a different durability; choose another name")
            return found
        limit = self._settings.max_subscriptions_per_topic
        most = min(self.policies.max_subscriptions or limit, limit)
        if len(self.subscriptions) >= most:
            raise TooManyError(f"topic {self.name} has {len(self.subscriptions)} subscriptions, {most} are allowed")
        subscription = NonPersistentSubscription(
            self.name,
            name,
            self._settings,
            self._tasks,
            self._totals,
            policies=lambda: self.policies,
            durable=durable,
            on_unused=self._on_unused,
        )
        self.subscriptions[name] = subscription
        return subscription

    def _on_unused(self, subscription: Subscription) -> None:
        subscription.close("its reader is gone")
        if self.subscriptions.get(subscription.name) is subscription:
            del self.subscriptions[subscription.name]

    async def reset_subscription(self, subscription: Subscription, position: Position, unacked_words: Sequence[int] = ()) -> None:
        raise NotAllowedError(f"topic {self.name} is non-persistent: there is nothing to seek in", topic=str(self.name))

    async def delete_subscription(self, name: str) -> None:
        if (subscription := self.subscriptions.pop(name, None)) is not None:
            subscription.close("the subscription is deleted")

    def _subscriptions_here(self) -> list[NonPersistentSubscription]:
        return [found for found in self.subscriptions.values() if isinstance(found, NonPersistentSubscription)]
