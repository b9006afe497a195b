"""Producers, Shared consumers and failures at random; afterwards the history is checked against what was promised.

Checked: every answered send is stored, per producer first occurrences are in order (H1, H2, H4); every stored entry is delivered
until it is acknowledged (H5); an acknowledgement that was answered is final (H7); no entry is held by two at once (H9).
"""

from __future__ import annotations

import asyncio
import random

import pytest

from cepheid_ledger.errors import RecoveryFailedError
from cepheid_metadata import EARLIEST
from cepheid_wire import TopicName, parse_metadata, split_tail
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.broker_world import BrokerWorld
from tests.broker.scripted_client import Received, ScriptedClient, full, ident, message, subscribe

pytestmark = pytest.mark.slow

SHARED = pb.CommandSubscribe.Shared
WINDOW = 40
TOPIC = TopicName.parse("t")
Position = tuple[int, int]


class History:
    def __init__(self) -> None:
        self.sent_ok: dict[str, list[int]] = {}
        self.held: dict[Position, object] = {}
        self.suspects: dict[object, Position] = {}  # holders of what somebody else got; cleared when their CLOSE_CONSUMER is read
        self.final: set[Position] = set()
        self.delivered: dict[Position, tuple[str, int]] = {}

    def on_delivered(self, consumer: object, received: Received) -> None:
        position = received.position
        assert position not in self.final, f"{position} came again after its acknowledgement was answered"
        if (holder := self.held.get(position)) not in (None, consumer):
            self.suspects[holder] = position
        self.held[position] = consumer
        self.delivered[position] = sent_as(received)

    def on_silence(self, consumer: object) -> None:
        """Everything on its way to this consumer was read: it is not closed, so what it holds is its own."""
        assert consumer not in self.suspects, f"{self.suspects[consumer]} is outstanding at two consumers"

    def release(self, consumer: object) -> list[Position]:
        self.suspects.pop(consumer, None)
        released = [position for position, holder in self.held.items() if holder is consumer]
        for position in released:
            del self.held[position]
        return released


def sent_as(received: Received) -> tuple[str, int]:
    producer, sequence_id = bytes(split_tail(received.tail)[1]).decode().split(":")
    assert parse_metadata(received.tail).sequence_id == int(sequence_id)
    return producer, int(sequence_id)


async def produce(world: BrokerWorld, name: str, count: int, history: History, rng: random.Random) -> None:
    """As an official client: resends from the first unanswered message on, after every close and every lost connection."""
    answered, epoch = history.sent_ok.setdefault(name, []), 0
    while len(answered) < count:
        async with await world.client() as client:
            while len(answered) < count and await open_producer(client, name, epoch):
                epoch += 1
                if not await publish_until_closed(client, name, count, answered, rng):
                    break


async def open_producer(client: ScriptedClient, name: str, epoch: int) -> bool:
    for attempt in range(200):
        ask = pb.CommandProducer(topic=full("t"), producer_id=0, request_id=attempt, producer_name=name, epoch=epoch)
        client.send(ask)
        while (received := await client.receive(10)) is not None:
            if isinstance(received.body, pb.CommandProducerSuccess):
                return True
            if isinstance(received.body, pb.CommandError):
                break
        else:
            return False
        await asyncio.sleep(0.01)  # the client's backoff
    raise AssertionError("the producer was refused 200 times")


async def publish_until_closed(client: ScriptedClient, name: str, count: int, answered: list[int], rng: random.Random) -> bool:
    """False: the connection is gone."""
    next_id = len(answered)
    while len(answered) < count:
        while next_id < count and next_id - len(answered) < WINDOW:
            client.send_message(next_id, tail=message(next_id, f"{name}:{next_id}".encode()))
            next_id += 1
        if rng.random() < 0.002:
            client.abort()
            return False
        received = await client.receive(10)
        if received is None:
            return False
        if isinstance(received.body, pb.CommandCloseProducer):
            return True
        assert isinstance(received.body, pb.CommandSendReceipt), received.body
        assert received.body.sequence_id == len(answered), "receipts come in order, none is left out"
        answered.append(received.body.sequence_id)
    return True


class Consumer:
    """Acknowledges, refuses, forgets, closes, vanishes; comes back as long as there is something to do."""

    def __init__(self, world: BrokerWorld, history: History, rng: random.Random) -> None:
        self._world, self._history, self._rng = world, history, rng
        self._acks: dict[int, Position] = {}
        self._requests = 1000

    async def run(self, done: asyncio.Event) -> None:
        while not done.is_set():
            client = await self._world.client()
            try:
                while not done.is_set() and await self._join(client):
                    if not await self._consume(client, done):
                        break
            finally:
                self._history.release(self)
                self._acks.clear()
                client.abort()

    async def _join(self, client: ScriptedClient) -> bool:
        for attempt in range(200):
            client.send(subscribe("t", "s", 0, attempt, subType=SHARED, initialPosition=pb.CommandSubscribe.Earliest))
            while (received := await client.receive(10)) is not None:
                if isinstance(received.body, pb.CommandSuccess):
                    client.send(pb.CommandFlow(consumer_id=0, messagePermits=self._rng.randint(1, 30)))
                    return True
                if isinstance(received.body, pb.CommandError):
                    break
            else:
                return False
            await asyncio.sleep(0.01)
        raise AssertionError("the consumer was refused 200 times")

    async def _consume(self, client: ScriptedClient, done: asyncio.Event) -> bool:
        """False: another connection is wanted."""
        while not done.is_set():
            try:
                received = await client.receive(0.2)
            except TimeoutError:
                self._history.on_silence(self)
                self._ask_again(client)
                continue
            if received is None:
                return False
            match received.body:
                case pb.CommandMessage():
                    if not self._on_message(client, received):
                        return False
                case pb.CommandAckResponse():
                    position = self._acks.pop(received.body.request_id)
                    if not received.body.HasField("error"):
                        self._history.final.add(position)
                case pb.CommandCloseConsumer():
                    self._history.release(self)
                    self._acks.clear()
                    return True
                case other:
                    raise AssertionError(f"unexpected {other!r}")
        return False

    def _ask_again(self, client: ScriptedClient) -> None:
        """For what it forgot to acknowledge; by name, since something else may be on its way."""
        forgotten = self._history.release(self)
        if forgotten:
            ids = [ident(position) for position in forgotten]
            client.send(pb.CommandRedeliverUnacknowledgedMessages(consumer_id=0, message_ids=ids))
        client.send(pb.CommandFlow(consumer_id=0, messagePermits=5))

    def _on_message(self, client: ScriptedClient, received: Received) -> bool:
        self._history.on_delivered(self, received)
        position, choice = received.position, self._rng.random()
        client.send(pb.CommandFlow(consumer_id=0, messagePermits=1))
        if choice < 0.7:
            self._requests += 1
            self._acks[self._requests] = position
            client.acknowledge(position, request_id=self._requests)
            self._history.held.pop(position, None)
        elif choice < 0.9:
            self._history.held.pop(position, None)
            client.send(pb.CommandRedeliverUnacknowledgedMessages(consumer_id=0, message_ids=[ident(position)]))
        elif choice < 0.92:
            return False  # vanishes
        return True


async def disturb(world: BrokerWorld, rng: random.Random, done: asyncio.Event) -> int:
    """Unloads the topic, or takes its ledger away as another broker would. How often."""
    times = 0
    while not done.is_set():
        await asyncio.sleep(rng.uniform(0.02, 0.3))
        topic = world.broker.topics.find(TOPIC)
        if topic is None or topic.closed:
            continue
        if rng.random() < 0.5:
            await world.broker.topics.unload(TOPIC)
        else:
            try:
                await world.ledger_client.recover(topic.ledger.ledgers.last_ledger_id)
            except RecoveryFailedError:  # a bookie has not answered in time: the machine is busy
                continue
        times += 1
    return times


@pytest.mark.parametrize("seed", range(4))
async def test_what_was_promised_holds_whatever_happens(seed: int) -> None:
    rng, count, producers = random.Random(seed), 400, 3
    history, published, done = History(), asyncio.Event(), asyncio.Event()
    async with BrokerWorld() as world:
        first = await world.broker.topics.get(TOPIC, may_create=True)
        await first.create_subscription("s", EARLIEST)
        await first.create_subscription("audit", EARLIEST)
        async with asyncio.TaskGroup() as tasks:
            publishing = [tasks.create_task(produce(world, f"p{n}", count, history, rng)) for n in range(producers)]
            consumers = [tasks.create_task(Consumer(world, history, rng).run(done)) for _ in range(3)]
            disturbing = tasks.create_task(disturb(world, rng, published))
            await asyncio.wait(publishing)
            published.set()
            await disturbing
            await until_everything_is_acknowledged(world)  # in peace: nothing starts over any more, so nothing may be forgotten
            done.set()
            await asyncio.wait(consumers)
        stored = await audit(world)
    assert disturbing.result() > 0
    for name in (f"p{n}" for n in range(producers)):
        mine = [sequence_id for producer, sequence_id in stored if producer == name]
        assert list(dict.fromkeys(mine)) == list(range(count)), f"{name}: lost or swapped"
        assert history.sent_ok[name] == list(range(count))
    assert sorted(history.delivered.values()) == sorted(stored), "every entry was delivered, and nothing that is not stored"


async def until_everything_is_acknowledged(world: BrokerWorld) -> None:
    async with asyncio.timeout(100):
        while True:
            topic = world.broker.topics.find(TOPIC)
            if topic is not None and not topic.closed and topic.subscriptions["s"].cursor.backlog_entries == 0:
                return
            await asyncio.sleep(0.02)


async def audit(world: BrokerWorld) -> list[tuple[str, int]]:
    async with await world.client() as client:
        await client.subscribe("t", "audit", permits=1_000_000)
        topic = await world.broker.topics.get(TOPIC, may_create=False)
        return [sent_as(await client.expect_message()) for _ in range(topic.ledger.ledgers.total_entries)]
