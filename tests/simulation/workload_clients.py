"""Applications: producers and consumers of several topics, on machines of their own, that speak the binary protocol to the brokers.

    SimClient "anna", "ben" ── producers: single messages, batches, chunks, keys ──► topics ──► subscriptions of all four types
         │                                                                                         │
         └── consumers: join, take, acknowledge one by one, up to here, in part, with an answer, give back, seek, hang, leave
    operators: unload, trim, reset and skip, at whichever broker serves

When all is well again every subscription is drained, and tests/history judges what was noted (`judge`). A topic keeps everything,
so that the audit reads all of it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cepheid_broker.broker import Broker
from cepheid_broker.persistent_topic import PersistentTopic
from cepheid_broker.subscription import Subscription
from cepheid_metadata import MemoryStore, RetentionPolicy, TopicRecord, topic_records
from cepheid_metadata import Position as Place
from cepheid_wire import TopicName, count_messages, decode_batch, parse_metadata, split_tail
from tests.history.checker import check
from tests.history.verdict import Promises
from tests.simulation.client_notes import ClientNotes
from tests.simulation.sim_broker import SimBroker
from tests.simulation.sim_client import CLIENT_ERRORS, SimClient
from tests.simulation.sim_consumer import Delivery, SimConsumer
from tests.simulation.sim_producer import SimProducer
from tests.simulation.wire_tap import WireTap
from tests.simulation.workload_ledgers import EXPECTED

if TYPE_CHECKING:
    from tests.simulation.world import World

KINDS = ("Exclusive", "Failover", "Shared", "Key_Shared")
_RULES = {
    "Exclusive": ("H5", "H6", "H7", "H8", "H13"),
    "Failover": ("H5", "H6", "H7", "H8"),
    "Shared": ("H5", "H6", "H7", "H9"),
    "Key_Shared": ("H5", "H6", "H7", "H9", "H10"),
}
_MOST_UNANSWERED = 6
_KEYS = 4


@dataclass(slots=True)
class Subscribed:
    topic: TopicName
    name: str
    kind: str
    consumers: list[SimConsumer] = field(default_factory=list)


class ClientWorkload:
    def __init__(self, world: World, brokers: Sequence[str]) -> None:
        rng = self._random = random.Random(f"{world.seed}/clients")
        self._world = world
        self._history = world.history
        self.notes = ClientNotes(world.history)
        self.clients = [
            SimClient(name, brokers, rng, world.history) for name in ("anna", "ben", "carl")[: rng.choice((1, 2, 2, 3))]
        ]
        self.deduplicated = f"persistent://public/default/{'payments'}" if rng.random() < 0.4 else ""
        names = ["payments", "events", "mails"][: rng.choice((1, 2, 2, 3))]
        self.topics = [TopicName.parse(f"persistent://public/default/{name}") for name in names]
        self.producers: list[SimProducer] = []
        self.subscriptions: list[Subscribed] = []
        for topic in self.topics:
            for kind in rng.sample(KINDS, rng.choice((1, 1, 2))):
                self.subscriptions.append(Subscribed(topic, kind.lower(), kind))
        self.stopped = False
        """No new messages, and nobody is capricious any more: everything that comes is acknowledged."""
        self._names = 0

    # The set

    async def found(self) -> None:
        """Topics with their policies, in the namespace that there is."""
        store = MemoryStore(self._world.tree)
        for topic in self.topics:
            record = TopicRecord(
                created_at_ms=1,
                deduplication=str(topic) == self.deduplicated,
                retention=RetentionPolicy(time_limit_min=-1, size_limit_mb=-1),
            )
            await topic_records(store).create(topic, record)

    def tap(self, protocol: asyncio.Protocol, broker: SimBroker) -> WireTap:
        """Listens at the broker's end of a connection."""

        process, topics = broker.process, broker.broker.topics

        def opening_of(topic: str) -> tuple[str, int]:
            found: Any = topics.find(TopicName.parse(topic))
            return process, found.ledger.chain.epoch

        return WireTap(protocol, self.notes, opening_of)

    def start(self) -> None:
        rng = self._random
        for topic in self.topics:
            for _ in range(rng.choice((1, 2))):
                self._add_producer(rng.choice(self.clients), topic)
        for subscribed in self.subscriptions:
            for _ in range(1 if subscribed.kind == "Exclusive" else rng.choice((1, 2, 3))):
                client = rng.choice(self.clients)
                self._run(client, self._consume(client, subscribed), f"consume {subscribed.name}")
        self._world.start_outside(self._operate(), "operate on topics")

    def _run(self, client: SimClient, work: Any, name: str) -> None:
        self._world.spawn(client.node, work, name)

    def _new_name(self, kind: str) -> str:
        self._names += 1
        return f"{kind}{self._names}"

    # Producers

    def _add_producer(self, client: SimClient, topic: TopicName) -> SimProducer:
        producer = SimProducer(client, topic, self._new_name("p"), self.notes)
        self.producers.append(producer)
        self._run(client, producer.stay_connected(), f"connect {producer.name}")
        self._run(client, self._produce(producer), f"produce {producer.name}")
        return producer

    async def _produce(self, producer: SimProducer) -> None:
        rng, chunked = self._random, str(producer.topic) == self.deduplicated
        pace_s = rng.choice((0.01, 0.02, 0.08))
        while not self.stopped:
            await asyncio.sleep(rng.random() * 2 * pace_s)
            if len(producer.unanswered) >= _MOST_UNANSWERED:
                await asyncio.sleep(0.3)  # not at its own pace: nobody may answer for many simulated seconds
                continue
            if self.stopped:
                break
            key = f"k{rng.randrange(_KEYS)}" if rng.random() < 0.9 else ""
            kind = rng.random()
            if kind < 0.25:
                producer.publish(rng.choice((1, 2, 3, 5)), key, batch=True)
            elif kind < 0.4 and chunked:
                producer.publish(1, key, batch=False, chunks=3)
            else:
                producer.publish(rng.choice((1, 1, 2, 3)), key, batch=False, padding=rng.choice((0, 0, 0, 400)))

    # Consumers

    async def _consume(self, client: SimClient, subscribed: Subscribed) -> None:
        """One life after the other, until it is time to drain."""
        rng = self._random
        while True:
            consumer = SimConsumer(
                client, subscribed.topic, subscribed.name, subscribed.kind, self._new_name("c"), queue=rng.choice((1, 4, 20))
            )
            subscribed.consumers.append(consumer)
            self._run(client, consumer.stay_connected(), f"connect {consumer.name}")
            ends_s = self._history.now_s + rng.choice((0.5, 2.0, 8.0))
            held: list[Delivery] = []
            while self._history.now_s < ends_s and not self.stopped:
                await self._one_act(consumer, held)
            if self.stopped:
                await self._drain(consumer)
            subscribed.consumers.remove(consumer)
            consumer.close()
            await asyncio.sleep(rng.random() * 0.3)

    async def _one_act(self, consumer: SimConsumer, held: list[Delivery]) -> None:
        rng = self._random
        if rng.random() < 0.02:
            await asyncio.sleep(rng.choice((0.5, 2.0)))  # it hangs
        if not consumer.waiting:
            await _arrives(consumer, 0.6)
        for _ in range(rng.choice((1, 3, 10))):
            delivery = consumer.take()
            if delivery is None:
                break
            held.append(delivery)
        else:
            await asyncio.sleep(0.005)
        if held and rng.random() < 0.8:
            held[:] = [delivery for delivery in held if delivery.connection is consumer.connection]
            if held:
                await self._settle(consumer, held)

    async def _settle(self, consumer: SimConsumer, held: list[Delivery]) -> None:
        """What an application does with messages that it has seen."""
        rng, draw = self._random, self._random.random()
        some = rng.sample(held, rng.randrange(1, len(held) + 1))
        response = rng.random() < 0.3
        answer: Any = None
        if draw < 0.2:
            last = max(some, key=lambda delivery: delivery.position)
            answer = consumer.acknowledge([last], cumulative=True, response=response)
            if consumer.ordered:
                held[:] = [delivery for delivery in held if delivery.position > last.position]
        elif draw < 0.3 and some[0].is_batch:
            keep = some[0].left & rng.randrange(1, 1 << some[0].messages)
            if keep:
                answer = consumer.acknowledge(some[:1], keep=keep, response=response)
                some[0].left &= keep
        elif draw < 0.38:
            consumer.give_back(some)
            held[:] = [delivery for delivery in held if delivery not in some]
        elif draw < 0.39 and consumer.kind == "Exclusive":
            await consumer.seek(rng.choice(some).position)
            held.clear()
        else:
            answer = consumer.acknowledge(some, response=response)
            held[:] = [delivery for delivery in held if delivery not in some]
        if answer is not None:
            try:
                async with asyncio.timeout(3.0):
                    await answer
            except CLIENT_ERRORS:
                pass  # it is unknown whether it counts

    async def _drain(self, consumer: SimConsumer) -> None:
        """For the rest of its life: everything is taken and acknowledged. What it held before comes again: it reconnects."""
        if consumer.connection is not None:
            consumer.give_back([])
        while True:
            await _arrives(consumer, 1.0)
            taken = []
            while (delivery := consumer.take()) is not None:
                taken.append(delivery)
            if taken:
                consumer.acknowledge(taken)

    # Operators

    async def _operate(self) -> None:
        rng = self._random
        while not self.stopped:
            await asyncio.sleep(rng.expovariate(1.0))
            if self.stopped or not self._world.does():
                continue
            served = [broker for broker in self._world.brokers.values() if broker.ready]
            subscribed = rng.choice(self.subscriptions)
            if not served:
                continue
            sim_broker = rng.choice(served)
            act = rng.choice((self._unload, self._unload, self._trim, self._reset, self._skip))
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
            self._history.did("trim")
            await topic.ledger.trim()

    def _find(self, broker: Broker, subscribed: Subscribed) -> tuple[PersistentTopic, Subscription] | None:
        topic: Any = broker.topics.find(subscribed.topic)
        if topic is None or topic.closed:
            return None
        subscription = topic.subscriptions.get(subscribed.name)
        return None if subscription is None else (topic, subscription)

    async def _reset(self, broker: Broker, subscribed: Subscribed) -> None:
        """As admin/cursor_operations.py does."""
        found = self._find(broker, subscribed)
        if found is None or found[1].in_seek or self._random.random() < 0.5:
            return
        topic, subscription = found
        places = [place for place in self._told(subscribed.topic) if topic.ledger.is_valid(Place(*place))]
        if not places:
            return
        self._history.did("reset")
        place = self._random.choice(places)
        opening = self._opening(topic)
        subscription.begin_seek()
        self.notes.note("moving", subscribed.topic, subscription=subscribed.name)
        try:
            await topic.reset_subscription(subscription, Place(*place), ())
            self.notes.note(
                "moved",
                subscribed.topic,
                subscription=subscribed.name,
                position=(*place, -1),
                details={"reset": True, "opening": opening},
            )
        finally:
            subscription.end_seek()

    async def _skip(self, broker: Broker, subscribed: Subscribed) -> None:
        found = self._find(broker, subscribed)
        if found is None or found[1].in_seek or self._random.random() < 0.5:
            return
        topic, subscription = found
        self._history.did("skip")
        opening, count = self._opening(topic), self._random.choice((1, 3))
        last = subscription.cursor.nth_unacknowledged(count) or topic.ledger.last_confirmed
        self.notes.note("moving", subscribed.topic, subscription=subscribed.name)
        await subscription.skip(count)
        self.notes.note(
            "moved",
            subscribed.topic,
            subscription=subscribed.name,
            position=(last.ledger_id, last.entry_id, -1),
            details={"opening": opening},
        )

    def _opening(self, topic: PersistentTopic) -> tuple[str, int]:
        for broker in self._world.brokers.values():
            if broker.ready and broker.broker.topics.find(topic.name) is topic:
                return broker.process, topic.ledger.chain.epoch
        return "", -1

    def _told(self, topic: TopicName) -> list[tuple[int, int]]:
        events = self.notes.events.get(str(topic), ())
        return [event.position[:2] for event in events if event.kind == "sent" and event.position and event.position[0] >= 0]

    # Afterwards

    @property
    def unanswered(self) -> list[SimProducer]:
        return [producer for producer in self.producers if producer.unanswered and producer.client.node.alive]

    def publish_once_more(self) -> None:
        for producer in self.producers:
            if producer.client.node.alive:
                producer.publish(1, "", batch=False)

    def owed(self) -> list[str]:
        """Subscriptions that have not yet acknowledged everything, and why nothing comes."""
        return [owed for subscribed in self.subscriptions if (owed := self._owed(subscribed))]

    def _owed(self, subscribed: Subscribed) -> str:
        told = f"{subscribed.name} of {subscribed.topic.local_name}"
        for broker in self._world.brokers.values():
            found = self._find(broker.broker, subscribed) if broker.ready else None
            if found is not None and found[1].consumers:
                subscription = found[1]
                if subscription.cursor.backlog_entries == 0:
                    return ""
                told += f", {subscription.cursor!r} at {broker.process}: {'; '.join(map(str, subscription.why()))}"
        return f"{told}; consumers {subscribed.consumers}"

    def note_audit(self, topic: TopicName, entries: list[tuple[Place, bytes]]) -> None:
        """What a reader found: all of it, in order."""
        for position, tail in entries:
            place = (position.ledger_id, position.entry_id)
            given = self.notes.delivered.get((str(topic), *place), tail)
            self._history.check("M9", given == tail, lambda p=place: f"{topic}: consumers got other bytes at {p} than are stored")
            metadata = parse_metadata(tail)
            payload = split_tail(tail)[1]
            key = metadata.partition_key
            if metadata.HasField("num_messages_in_batch"):
                for index, (_, body) in enumerate(decode_batch(payload, count_messages(tail))):
                    self.notes.note("audit", topic, uid=_uid(body), key=key, position=(*place, index))
            else:
                self.notes.note("audit", topic, uid=_uid(payload), key=key, position=(*place, -1))

    def judge(self) -> None:
        """H1 to H10 and H13."""
        history = self._history
        for subscribed in self.subscriptions:
            for rule in _RULES[subscribed.kind]:
                history.check(rule, True, "")
        for topic in self.topics:
            events = self.notes.events.get(str(topic), [])
            promises = Promises(deduplication=str(topic) == self.deduplicated, noted_at_servers=True)
            violations = check(events, promises)
            for rule in ("H1", "H2", "H4", *(("H3",) if promises.deduplication else ())):
                history.check(rule, True, "")
            for violation in violations[:1]:
                history.violated(violation.rule, f"{topic}: {violation}")


async def _arrives(consumer: SimConsumer, patience_s: float) -> None:
    consumer.arrived.clear()
    if not consumer.waiting:
        try:
            async with asyncio.timeout(patience_s):
                await consumer.arrived.wait()
        except TimeoutError:
            pass


def _uid(body: memoryview) -> str:
    return bytes(body).rstrip(b".").decode()
