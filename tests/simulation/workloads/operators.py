"""Operators of topics that clients use: what the admin API does, at whichever broker serves, and what is to be expected of it.

unload, trim, hand over  clients notice a pause; of a topic that is handed over, another broker
split a bundle           clients notice nothing
drain a broker           all of its topics go to others, unless it crashes on the way; it takes bundles again afterwards
examine                  the oldest messages are read, over and over, also while retention trims
delete a topic           with force: its clients come again, and make it anew; what was in it is gone
reset, skip, delete      a subscription moves: `moving` and `moved` frame it in the history (tests/history/rules_served.py)
limit                    policies of the topic change: how much may be unacknowledged
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.policy_change import change_topic
from cepheid_broker.admin.stored_entries import from_message
from cepheid_broker.broker import Broker
from cepheid_broker.topics.persistent_topic import PersistentTopic
from cepheid_broker.topics.subscription import Subscription
from cepheid_metadata import Position as Place
from cepheid_metadata import keys
from cepheid_wire import TopicName
from tests.history.events import Position
from tests.simulation.checks.client_notes import BEGINNING, ClientNotes
from tests.simulation.checks.client_trims import ClientTrims
from tests.simulation.workloads.ledgers import EXPECTED
from tests.simulation.world.node import Node
from tests.simulation.world.sim_broker import SimBroker
from tests.simulation.world.sim_operator import Operator, ask

if TYPE_CHECKING:
    from tests.simulation.workloads.clients import Subscribed
    from tests.simulation.world.world import World

_HAND_OVERS_PER_S = 0.4
_SPLITS_PER_S = 0.4
_WORLDS_THAT_SPLIT = 0.3
_DRAINS_PER_S = 0.6
_WORLDS_THAT_DRAIN = 0.3
_INTERRUPTED_DRAINS = 0.3
_DRAIN_PATIENCE_S = 6.0
_LIMITS = (None, None, 1, 3, 10)


def serving(broker: SimBroker, subscribed: Subscribed) -> Subscription | None:
    found = _found(broker.broker, subscribed) if broker.ready else None
    return None if found is None else found[1]


def _found(broker: Broker, subscribed: Subscribed) -> tuple[PersistentTopic, Subscription] | None:
    topic: Any = broker.topics.find(subscribed.topic)
    if topic is None or topic.closed:
        return None
    subscription = topic.subscriptions.get(subscribed.name)
    return None if subscription is None else (topic, subscription)


async def _drain(context: AdminContext) -> None:
    context.broker.ownership.drain()


async def _undrain(context: AdminContext) -> None:
    context.broker.ownership.undrain()


class TopicOperators:
    def __init__(
        self, world: World, notes: ClientNotes, trims: ClientTrims, subscriptions: Sequence[Subscribed], rng: random.Random
    ) -> None:
        self._world = world
        self._history = world.history
        self._notes = notes
        self._subscriptions = subscriptions
        self._random = rng
        self._trims = trims
        self.stopped = False
        self.spared = ""
        """The topic that nobody deletes: with it the sequence ids would go, and what is sent again be stored again."""
        self.ends: dict[TopicName, Place] = {}
        """Of topics that were terminated: the last position, as whoever asked was told."""
        self._splits = random.Random(f"{world.seed}/split")
        self.splits_bundles = self._splits.random() < _WORLDS_THAT_SPLIT
        self._drains = random.Random(f"{world.seed}/drain")
        self.drains_brokers = self._drains.random() < _WORLDS_THAT_DRAIN
        self._acts: dict[Callable[[Broker, Subscribed], Any], float] = {
            self._unload: 2.0,
            self._trim: 1.0,
            self._examine: 1.5,
            self._reset: 1.5,
            self._skip: 1.5,
            self._delete: 0.5,
            self._limit: 1.0,
            self._delete_topic: 1.0,
        }

    async def run(self) -> None:
        rng = self._random
        while not self.stopped:
            await asyncio.sleep(rng.expovariate(1.0))
            if self.stopped or not self._world.does():
                continue
            served = [broker for broker in self._world.brokers.values() if broker.ready]
            subscribed = rng.choice(self._subscriptions)
            if not served:
                continue
            sim_broker = rng.choice(served)
            (act,) = rng.choices(list(self._acts), list(self._acts.values()))
            self._world.spawn(sim_broker.node, self._try(act, sim_broker.broker, subscribed), "operate")

    async def _try(self, act: Callable[[Broker, Subscribed], Any], broker: Broker, subscribed: Subscribed) -> None:
        try:
            await act(broker, subscribed)
        except EXPECTED as error:
            self._history.note(lambda error=error: f"an operator fails: {error!r}")

    async def _unload(self, broker: Broker, subscribed: Subscribed) -> None:
        if broker.topics.find(subscribed.topic) is not None:
            self._history.did("unload")
            await broker.topics.unload(subscribed.topic)

    async def _trim(self, broker: Broker, subscribed: Subscribed) -> None:
        topic = broker.topics.find(subscribed.topic)
        if topic is not None:
            await topic.ledger.trim()

    async def _examine(self, broker: Broker, subscribed: Subscribed) -> None:
        """Looks at the oldest messages for a while, as a peek does: read from bookies, also while retention trims the topic."""
        topic = broker.topics.find(subscribed.topic)
        for _ in range(self._random.choice((1, 10, 30))):
            if topic is None or self.stopped:
                return
            self._history.did("examine")
            await topic.ledger.read(topic.ledger.first_position(), max_entries=5, max_bytes=2_000)
            await asyncio.sleep(self._random.choice((0.0, 0.001, 0.02)))

    def _find(self, broker: Broker, subscribed: Subscribed) -> tuple[PersistentTopic, Subscription] | None:
        found = _found(broker, subscribed)
        return None if found is None or found[1].in_seek else found

    async def _reset(self, broker: Broker, subscribed: Subscribed) -> None:
        """To a message, also of a batch, as admin/cursor_operations.py does."""
        found = self._find(broker, subscribed)
        if found is None or self._random.random() < 0.5:
            return
        topic, subscription = found
        places = [place for place in self._told_messages(subscribed.topic) if topic.ledger.is_valid(Place(*place[:2]))]
        if not places:
            return
        self._history.did("reset")
        place = self._random.choice(places)
        target = await from_message(topic.ledger, Place(*place[:2]), max(0, place[2]))
        subscription.begin_seek()
        try:
            with self._moving(subscribed, topic, place):
                await topic.reset_subscription(subscription, *target)
        finally:
            subscription.end_seek()

    async def _skip(self, broker: Broker, subscribed: Subscribed) -> None:
        found = self._find(broker, subscribed)
        if found is None or self._random.random() < 0.5:
            return
        topic, subscription = found
        self._history.did("skip")
        count, last = self._random.choice((1, 3)), topic.ledger.last_confirmed
        with self._moving(subscribed, topic, (*last, -1), skips=count):
            skipped = await subscription.skip(count)
        what = f"{subscribed.name} of {subscribed.topic}"
        self._history.check("C3", skipped <= count, f"{what} was to skip {count} entries, and skipped {skipped}")

    async def _delete(self, broker: Broker, subscribed: Subscribed) -> None:
        """With force: its consumers come again, and with them a subscription of that name, which begins at the beginning."""
        found = self._find(broker, subscribed)
        if found is None:
            return
        topic, _ = found
        self._history.did("delete a subscription")
        with self._moving(subscribed, topic, BEGINNING):
            await topic.delete_subscription(subscribed.name)

    async def hand_over(self) -> None:
        """Where brokers ask whose a topic is: now and then one gives a bundle to another, and both go on."""
        rng = random.Random(f"{self._world.seed}/hand over")
        operator = Operator(self._world.brokers, rng)
        while not self.stopped:
            await asyncio.sleep(rng.expovariate(_HAND_OVERS_PER_S))
            topic, to = rng.choice(self._subscriptions).topic, rng.choice(list(self._world.brokers))
            if self.stopped or not self._world.does():
                continue
            try:
                await operator.unload_bundle(topic, to=to)
                self._history.did("hand over")
            except EXPECTED as error:
                self._history.note(f"an operator cannot give {topic} to {to}: {error!r}")

    async def split(self) -> None:
        """In some of these worlds: a bundle is cut in two while clients use its topics, and they notice nothing."""
        rng = self._splits
        operator = Operator(self._world.brokers, rng)
        while not self.stopped:
            await asyncio.sleep(rng.expovariate(_SPLITS_PER_S))
            topic, share = rng.choice(self._subscriptions).topic, rng.random()
            if self.stopped or not self._world.does():
                continue
            try:
                await operator.split_bundle(topic, share)
                self._history.did("split a bundle")
            except EXPECTED as error:
                self._history.note(f"an operator cannot split the bundle of {topic}: {error!r}")

    async def drain(self) -> None:
        """In some of these worlds: a broker is drained while clients use its topics, and some of these drains end with a crash."""
        rng, world = self._drains, self._world
        while not self.stopped:
            await asyncio.sleep(rng.expovariate(_DRAINS_PER_S))
            crash_s, is_interrupted = rng.choice((0.005, 0.02, 0.1)), rng.random() < _INTERRUPTED_DRAINS
            owners = [broker for broker in world.brokers.values() if broker.ready and broker.broker.ownership.owned_bundles()]
            if self.stopped or not owners or not world.does():
                continue
            broker = rng.choice(owners)
            node = broker.node
            try:
                await ask(broker, _drain)
                if is_interrupted:
                    await asyncio.sleep(crash_s)
                    self._crash(broker, node)
                elif await self._is_drained(broker, node):
                    self._history.did("drain a broker")
            except EXPECTED as error:
                self._history.note(f"an operator cannot drain {broker.process}: {error!r}")
            await self._undrain(broker, node)

    def _crash(self, broker: SimBroker, node: Node) -> None:
        world, is_same = self._world, broker.node is node and node.alive
        is_draining = is_same and broker.broker.ownership.draining and world.plan.active
        if is_draining and world.plan.deals("broker crash in a drain"):
            broker.crash()
            world.later(0.5, lambda: world.come_back(broker))

    async def _is_drained(self, broker: SimBroker, node: Node) -> bool:
        """Wait until it has no bundles. False: it did not become that far in time."""
        deadline = self._world.loop.time() + _DRAIN_PATIENCE_S
        while broker.node is node and broker.ready and not self.stopped and self._world.loop.time() < deadline:
            if not broker.broker.ownership.bundles_held:
                return True
            await asyncio.sleep(0.05)
        return False

    async def _undrain(self, broker: SimBroker, node: Node) -> None:
        """Again and again: it may sleep. With its process the drain has ended."""
        while broker.node is node and node.alive:
            try:
                await ask(broker, _undrain)
                return
            except EXPECTED:
                await asyncio.sleep(0.3)

    async def _delete_topic(self, broker: Broker, subscribed: Subscribed) -> None:
        """Once it is done nothing of what was in it is in it (M3)."""
        topic, history = subscribed.topic, self._history
        if str(topic) == self.spared or broker.topics.find(topic) is None:
            return
        self._trims.deleting.append(topic)
        before = self._listed(topic)
        await broker.topics.delete(topic, force=True)
        left = [ledger_id for ledger_id in self._listed(topic) if ledger_id in before]
        history.check("M3", not left, lambda: f"{topic} was deleted, and still has the ledgers {left}")
        self._trims.deleting.remove(topic)

    def _listed(self, topic: TopicName) -> list[int]:
        chain = self._history.chains.get(keys.chain_key(topic))
        return [] if chain is None else [ledger.ledger_id for ledger in chain.ledgers]

    async def terminate(self, topic: TopicName) -> None:
        """Again and again, until somebody says that it is done."""
        operator = Operator(self._world.brokers, self._random)
        while topic not in self.ends:
            try:
                self.ends[topic] = await operator.terminate(topic)
                self._history.did("terminate")
            except EXPECTED as error:
                self._history.note(lambda error=error: f"an operator cannot terminate {topic}: {error!r}")
                await asyncio.sleep(0.3)

    async def _limit(self, broker: Broker, subscribed: Subscribed) -> None:
        rng = self._random
        changes = {"max_unacked_per_consumer": rng.choice(_LIMITS), "max_unacked_per_subscription": rng.choice(_LIMITS)}
        self._history.did("change policies")
        await change_topic(AdminContext(broker), subscribed.topic, changes)

    @contextlib.contextmanager
    def _moving(self, subscribed: Subscribed, topic: PersistentTopic, position: Position, *, skips: int = 0) -> Iterator[None]:
        """Around the move: it has moved unless something is raised. Of a skip, the judge finds out how far it may have gone."""
        details = {"opening": self._opening(topic), **({"skips": skips} if skips else {"reset": True})}
        self._notes.note("moving", subscribed.topic, subscription=subscribed.name, position=position, details=details)
        yield
        self._notes.note("moved", subscribed.topic, subscription=subscribed.name, position=position, details=details)

    def _opening(self, topic: PersistentTopic) -> tuple[str, int]:
        serving = (broker for broker in self._world.brokers.values() if broker.ready)
        process = next((broker.process for broker in serving if broker.broker.topics.find(topic.name) is topic), "")
        return process, self._history.epoch_of(topic.ledger.chain)

    def told(self, topic: TopicName) -> list[tuple[int, int]]:
        return [position[:2] for position in self._told_messages(topic)]

    def _told_messages(self, topic: TopicName) -> list[Position]:
        events = self._notes.events.get(str(topic), ())
        return [event.position for event in events if event.kind == "sent" and event.position and event.position[0] >= 0]
