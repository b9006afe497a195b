"""Applications: producers and consumers of several topics, on machines of their own, that speak the binary protocol to the brokers.

    SimClient "anna", "ben" ── producers: single messages, batches, chunks, keys ──► topics ──► subscriptions of all four types
         │                                                                                         │
         ├── readers: all of a topic, from its beginning
         └── consumers: join, take, acknowledge one by one, up to here, in part, with an answer, give back, seek, hang, leave
    operators: unload, trim, delete, reset, skip and more, at whichever broker serves (operators.py)

When all is well again every subscription is drained, and tests/history judges what was noted (`judge`), with what left the topics
meanwhile (client_trims.py).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from cepheid_broker.dispatch.effects import HashRange
from cepheid_broker.ownership.bundle_split import SPLITS_SINCE
from cepheid_metadata import MemoryStore, TopicRecord, keys, topic_records
from cepheid_metadata import Position as Place
from cepheid_metadata.upgrade import StorageFormat, storage_format_record
from cepheid_wire import TopicName, count_messages, decode_batch, parse_metadata, split_tail
from tests.history.checker import judge
from tests.history.verdict import Promises
from tests.simulation.checks.client_notes import ClientNotes
from tests.simulation.checks.client_trims import ClientTrims
from tests.simulation.checks.wire_tap import WireTap
from tests.simulation.workloads.operators import TopicOperators, serving
from tests.simulation.world.sim_broker import SimBroker
from tests.simulation.world.sim_client import CLIENT_ERRORS, SimClient
from tests.simulation.world.sim_consumer import Delivery, SimConsumer
from tests.simulation.world.sim_producer import SimProducer
from tests.simulation.world.sim_reader import SimReader

if TYPE_CHECKING:
    from tests.simulation.world.world import World

KINDS = ("Exclusive", "Failover", "Shared", "Key_Shared")
_MOST_UNANSWERED = 6
_KEYS = 4
_HASHES = 1 << 16
_STICKY = 0.3
"""Of Key_Shared subscriptions have consumers that each ask for a range of hashes."""
_READERS = 0.35
"""Of topics have one."""
_TERMINATED = 0.25
"""Of orderly worlds have a topic that is terminated at the end. Where brokers fight, one that was deposed never hears of it: nobody
can write to make it notice."""
_DELAYS_MS = (50, 400, 3_000)
_LARGE_BATCH = 70
"""Messages: more than one word of an acknowledgement has bits."""
_LARGE = 0.05
"""Of batches are large. Each costs as many events as all other messages of its producer in a second."""
_DAMAGED = 0.02
"""Of what producers send, chunks apart, has a wrong checksum: it is refused, and nothing else."""


@dataclass(slots=True)
class Subscribed:
    topic: TopicName
    name: str
    kind: str
    sticky: bool = False
    consumers: list[SimConsumer] = field(default_factory=list)
    held: dict[str, list[Delivery]] = field(default_factory=dict)  # taken and not settled, by consumer


class ClientWorkload:
    def __init__(self, world: World, brokers: Sequence[str]) -> None:
        rng = self._random = random.Random(f"{world.seed}/clients")
        self._world = world
        self._history = world.history
        self._brokers = list(brokers)
        self.notes = ClientNotes(world.history)
        self.clients = [self._new_client(name) for name in ("anna", "ben", "carl")[: rng.choice((1, 2, 2, 3))]]
        self._roles: dict[str, list[Callable[[SimClient], object]]] = {client.name: [] for client in self.clients}
        self.deduplicated = "persistent://public/default/payments" if rng.random() < 0.4 else ""
        names = ["payments", "events", "mails"][: rng.choice((1, 2, 2, 3))]
        self.topics = [TopicName.parse(f"persistent://public/default/{name}") for name in names]
        self.trims = ClientTrims(world.history, self.notes, self.topics, random.Random(f"{world.seed}/retention"))
        self.producers: list[SimProducer] = []
        self.readers: list[SimReader] = []
        self.ending: TopicName | None = None
        """The topic that is terminated, once all is to come to its end: its producers go on until they hear of it."""
        self._stored: dict[TopicName, list[tuple[tuple[int, int], bytes]]] = {}
        self.subscriptions: list[Subscribed] = []
        for topic in self.topics:
            for kind in rng.sample(KINDS, rng.choice((1, 2, 2))):
                self.subscriptions.append(Subscribed(topic, kind.lower(), kind, kind == "Key_Shared" and rng.random() < _STICKY))
        self._operators = TopicOperators(world, self.notes, self.trims, self.subscriptions, rng)
        self._operators.spared = self.deduplicated
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
                retention=self.trims.retention[topic],
            )
            await topic_records(store).create(topic, record)
        if self._world.orderly and self._operators.splits_bundles:
            await storage_format_record(store).create(None, StorageFormat(storage_format=SPLITS_SINCE))

    def tap(self, protocol: asyncio.Protocol, broker: SimBroker) -> WireTap:
        """Listens at the broker's end of a connection."""

        process, topics = broker.process, broker.broker.topics

        def opening_of(topic: str) -> tuple[str, int]:
            name = TopicName.parse(topic)
            found: Any = topics.find(name)
            if found is None:  # closed in the turn in which this was said
                return process, self._history.last_epochs[keys.chain_key(name), process]
            return process, self._history.epoch_of(found.ledger.chain)

        return WireTap(protocol, self.notes, opening_of)

    def start(self) -> None:
        rng = self._random
        for topic in self.topics:
            for _ in range(rng.choice((1, 2))):
                self._give_role(rng.choice(self.clients), partial(self._add_producer, topic))
            if rng.random() < _READERS:
                self._give_role(rng.choice(self.clients), partial(self._add_reader, topic))
        for subscribed in self.subscriptions:
            several = 1 if subscribed.kind == "Exclusive" else rng.choice((1, 2, 3, 3))
            for index in range(several):
                ranges = ((index * _HASHES // several, (index + 1) * _HASHES // several - 1),) if subscribed.sticky else ()
                self._give_role(rng.choice(self.clients), partial(self._add_consumer, subscribed, ranges))
        self._world.start_outside(self._operators.run(), "operate on topics")
        if self._world.orderly:
            self._world.start_outside(self._operators.hand_over(), "hand topics over")
            if self._operators.splits_bundles:
                self._world.start_outside(self._operators.split(), "split bundles")
            if self._operators.drains_brokers:
                self._world.start_outside(self._operators.drain(), "drain brokers")

    # Machines

    def _new_client(self, name: str) -> SimClient:
        return SimClient(name, self._brokers, self._random, self._history)

    def _give_role(self, client: SimClient, role: Callable[[SimClient], object]) -> None:
        """What the application on that machine does, again after each start of it."""
        self._roles[client.name].append(role)
        role(client)

    def crash(self, client: SimClient, *, power: bool) -> None:
        """What it was not answered nobody will send again; what it held must come to others. `power`: nobody is told."""
        if power:
            self._world.sockets.lose_power(client.name)
        client.node.crash()
        for subscribed in self.subscriptions:
            subscribed.consumers[:] = [consumer for consumer in subscribed.consumers if consumer.client is not client]

    def restart(self, client: SimClient) -> None:
        """The same applications, which remember nothing."""
        again = self.clients[self.clients.index(client)] = self._new_client(client.name)
        for role in self._roles[client.name]:
            role(again)

    def _run(self, client: SimClient, work: Any, name: str) -> None:
        self._world.spawn(client.node, work, name)

    def _new_name(self, kind: str) -> str:
        self._names += 1
        return f"{kind}{self._names}"

    # Producers

    def _add_producer(self, topic: TopicName, client: SimClient) -> None:
        producer = SimProducer(client, topic, self._new_name("p"), self.notes)
        self.producers.append(producer)
        self._run(client, producer.stay_connected(), f"connect {producer.name}")
        self._run(client, self._produce(producer), f"produce {producer.name}")

    async def _produce(self, producer: SimProducer) -> None:
        rng, chunked = self._random, str(producer.topic) == self.deduplicated
        damage = random.Random(f"{self._world.seed}/damage/{producer.name}")
        large = random.Random(f"{self._world.seed}/large batches/{producer.name}")
        pace_s = rng.choice((0.01, 0.02, 0.08))
        while not self._may_rest(producer):
            await asyncio.sleep(rng.random() * 2 * pace_s)
            if len(producer.unanswered) >= _MOST_UNANSWERED:
                await asyncio.sleep(0.3)  # not at its own pace: nobody may answer for many simulated seconds
                continue
            if self._may_rest(producer):
                break
            key = f"k{rng.randrange(_KEYS)}" if rng.random() < 0.9 else ""
            kind, damaged = rng.random(), damage.random() < _DAMAGED
            if kind < 0.25:
                messages = _LARGE_BATCH if large.random() < _LARGE else rng.choice((1, 2, 3, 5))
                producer.publish(messages, key, batch=True, damaged=damaged)
            elif kind < 0.4 and chunked:
                producer.publish(1, key, batch=False, chunks=3)
            elif kind < 0.5 and not key:
                producer.publish(1, "", batch=False, delay_ms=rng.choice(_DELAYS_MS))
            else:
                messages, padding = rng.choice((1, 1, 2, 3)), rng.choice((0, 0, 0, 400))
                producer.publish(messages, key, batch=False, padding=padding, damaged=damaged)

    def _may_rest(self, producer: SimProducer) -> bool:
        return producer.terminated or (self.stopped and producer.topic != self.ending)

    # Readers

    def _add_reader(self, topic: TopicName, client: SimClient) -> None:
        name = self._new_name("r")
        reader = SimReader(client, topic, name, queue=self._random.choice((1, 4, 20)))
        self.readers.append(reader)
        self._run(client, reader.stay_connected(), f"connect {name}")
        self._run(client, self._read(reader), f"read {name}")

    async def _read(self, reader: SimReader) -> None:
        while True:
            await _arrives(reader, 1.0)
            last = None
            while (delivery := reader.next()) is not None:
                last = delivery
            if last is not None:
                reader.acknowledge([last], cumulative=True)
            if not self.stopped or last is None:  # at the end it keeps nobody waiting: with a queue of one it reads ten a second
                await asyncio.sleep(0.1)

    # Consumers

    def _add_consumer(self, subscribed: Subscribed, ranges: tuple[HashRange, ...], client: SimClient) -> None:
        self._run(client, self._consume(client, subscribed, ranges), f"consume {subscribed.name}")

    async def _consume(self, client: SimClient, subscribed: Subscribed, ranges: tuple[HashRange, ...]) -> None:
        """One life after the other, until it is time to drain."""
        rng = self._random
        while True:
            name, queue = self._new_name("c"), rng.choice((1, 4, 20))
            consumer = SimConsumer(client, subscribed.topic, subscribed.name, subscribed.kind, name, queue=queue, ranges=ranges)
            subscribed.consumers.append(consumer)
            self._run(client, consumer.stay_connected(), f"connect {consumer.name}")
            ends_s = self._history.now_s + rng.choice((0.5, 2.0, 8.0))
            held = subscribed.held[name] = []
            while self._history.now_s < ends_s and not (self.stopped or consumer.ended):
                await self._one_act(subscribed, consumer, held)
            if self.stopped and not consumer.ended:
                await self._drain(consumer)
            subscribed.consumers.remove(consumer)
            del subscribed.held[name]
            consumer.close()
            await asyncio.sleep(rng.random() * 0.3)

    async def _one_act(self, subscribed: Subscribed, consumer: SimConsumer, held: list[Delivery]) -> None:
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
            others = [delivery for name, of_other in subscribed.held.items() if name != consumer.name for delivery in of_other]
            if others and rng.random() < 0.05:
                consumer.acknowledge([rng.choice(others)])  # its application has it by another way, and is done with it
            if held:
                await self._settle(consumer, held)

    async def _settle(self, consumer: SimConsumer, held: list[Delivery]) -> None:
        """What an application does with messages that it has seen."""
        rng, draw = self._random, self._random.random()
        some = rng.sample(held, rng.randrange(1, len(held) + 1))
        large = next((delivery for delivery in held if delivery.left >> 64), None)
        response = rng.random() < 0.3
        answer: Any = None
        if draw < 0.2:
            batches = [delivery for delivery in held if delivery.is_batch and consumer.ordered]
            last = rng.choice(batches) if batches else max(some, key=lambda delivery: delivery.position)
            keep = _from(last, rng.randrange(1, last.messages)) if batches and rng.random() < 0.7 else 0
            answer = consumer.acknowledge([last], cumulative=True, keep=keep, response=response)
            if consumer.ordered:
                held[:] = [delivery for delivery in held if delivery.position > last.position or (keep and delivery is last)]
                last.left = keep or last.left
        elif draw < (0.3 if large is None else 0.7) and (batch := large or some[0]).is_batch:
            keep = batch.left & rng.randrange(1, 1 << batch.messages)
            if keep:
                answer = consumer.acknowledge([batch], keep=keep, response=response)
                batch.left &= keep
        elif draw < 0.38:
            consumer.give_back(some)
            held[:] = [delivery for delivery in held if delivery not in some]
        elif draw < 0.4 and consumer.kind == "Exclusive":
            target = rng.choice(some)
            index = rng.randrange(target.messages) if target.is_batch else 0
            await consumer.seek(target.position, index=index, messages=target.messages)
            held.clear()
        elif draw < 0.408 and consumer.kind == "Exclusive":
            await consumer.unsubscribe()
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

    # Afterwards

    def stop(self) -> None:
        stay = [topic for topic in self.topics if topic not in self.trims.deleting]
        if self._world.orderly and self._random.random() < _TERMINATED and stay:
            self.ending = self._random.choice(stay)
            self._world.start_outside(self._operators.terminate(self.ending), f"terminate {self.ending}")
        self.stopped = self._operators.stopped = True

    @property
    def unanswered(self) -> list[SimProducer]:
        """Who still waits: for answers, or for the end of its topic."""
        living = [producer for producer in self.producers if producer.client.node.alive]
        return [
            producer for producer in living if not producer.terminated and (producer.unanswered or producer.topic == self.ending)
        ]

    def publish_once_more(self) -> None:
        for producer in self.producers:
            if producer.client.node.alive:
                producer.publish(1, "", batch=False)

    def owed(self) -> list[str]:
        """Subscriptions that have not yet acknowledged everything, and why nothing comes; readers that are behind."""
        behind = [
            f"{reader!r} is owed {last}"
            for reader in self.readers
            if reader.client.node.alive and self.trims.edge(reader.topic) <= (last := self._last_told(reader.topic)) > reader.last
        ]
        return [owed for subscribed in self.subscriptions if (owed := self._owed(subscribed))] + behind

    def _last_told(self, topic: TopicName) -> tuple[int, int]:
        return max(self._operators.told(topic), default=(-1, -1))

    def _owed(self, subscribed: Subscribed) -> str:
        told = f"{subscribed.name} of {subscribed.topic.local_name}"
        for broker in self._world.brokers.values():
            subscription = serving(broker, subscribed)
            if subscription is not None and subscription.consumers:
                if subscription.cursor.backlog_entries == 0:
                    waiting = [] if subscribed.topic != self.ending else [each for each in subscribed.consumers if not each.at_end]
                    return f"{waiting} are not told that nothing more comes" if waiting else ""
                told += f", {subscription.cursor!r} at {broker.process}: {'; '.join(map(str, subscription.why()))}"
        return f"{told}; consumers {subscribed.consumers}"

    def note_audit(self, topic: TopicName, entries: list[tuple[Place, bytes]]) -> None:
        """What a reader found: all that has not left the topic, in order."""
        end = self._operators.ends.get(topic)
        if topic == self.ending and end is not None:  # else whoever terminated it was told of no end
            last = entries[-1][0] if entries else end
            self._history.check("M10", last <= end, lambda: f"{topic} ends at {last}, and was terminated at {end}")
        stored = self.trims.entries(topic) + entries
        self._stored[topic] = [((position.ledger_id, position.entry_id), bytes(tail)) for position, tail in stored]
        for position, tail in stored:
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
        """H1 to H10 and H13; what could not fail in this world does not count as checked."""
        history = self._history
        for reader in self.readers:
            self._judge_reader(reader)
        for topic in self.topics:
            self._judge_last(topic)
            events = self.notes.events.get(str(topic), [])
            promises = Promises(deduplication=str(topic) == self.deduplicated, noted_at_servers=True)
            judgement = judge(events, promises)
            for rule in judgement.asked.elements():
                history.check(rule, True, "")
            for violation in judgement.violations:  # the first one that is not muted ends the run
                history.violated(violation.rule, f"{topic}: {violation}")

    def _judge_last(self, topic: TopicName) -> None:
        """What was told to be the last message is the last one of an entry that is, or was, there."""
        for place, tail in self._stored[topic]:
            told = self._history.told_last.get((str(topic), place), {})
            if told:
                metadata = parse_metadata(tail)
                last = metadata.num_messages_in_batch - 1 if metadata.HasField("num_messages_in_batch") else -1
                right = list(told) == [last]
                self._history.check("M9", right, lambda p=place, t=told, n=last: f"{topic}: {p} ends with {n}, and told was {t}")

    def _judge_reader(self, reader: SimReader) -> None:
        """It read what is stored from the beginning on, in order; but what had gone when it came there."""
        history, stored = self._history, iter(self._stored[reader.topic])
        for place, tail in reader.read.items():
            edge = self.trims.edge(reader.topic, reader.read_at_s[place])
            due = next((each for each in stored if each[0] == place or each[0] >= edge), None)
            read = place, tail
            history.check("H8", read == due, lambda read=read, due=due: f"{reader!r} read {read}, and {due} was next")


def _from(delivery: Delivery, message: int) -> int:
    """Of what is left of a batch, this message and all behind it."""
    return delivery.left >> message << message


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
