"""Clients that do anything at any moment, while topics are unloaded, deleted, grown, terminated and ruled anew under them.

A `Player` is one connection that asks without waiting for answers; a `Storm` is what happens to the topics meanwhile. At the end:
every request was answered once, nothing is left running or half deleted, the log has no error, and the topics work.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.message import Message

from cepheid_broker.policies.topic_policies import InactiveDeletion, InactiveTopics
from cepheid_broker.topics.topic import Topic
from cepheid_metadata import StoreUnavailableError
from cepheid_ports import CepheidError
from cepheid_wire import TopicName
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.broker_world import BrokerWorld
from tests.broker.scripted_client import ScriptedClient, full, ident, message, send_frame, subscribe
from tests.broker.test_topic_deletion import WRITES, traces
from tests.support import run_async, wait_until

KINDS = (
    pb.CommandSubscribe.Exclusive,
    pb.CommandSubscribe.Shared,
    pb.CommandSubscribe.Failover,
    pb.CommandSubscribe.Key_Shared,
)
NEWS = (1 << 64) - 1  # the request id of what the broker says by itself
IDS = 4  # of producers and of consumers per player


class Orphans(logging.Handler):
    """Ledgers of which the log says that they could not be deleted: an outage may leave them, if it says so."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg == "ledger.orphaned":
            self.names.append(f"ledger {record.__dict__['ledger_id']}")


@pytest.fixture(autouse=True)
def no_errors_in_the_log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    found = [(record.message, record.__dict__.get("error")) for record in caplog.get_records("call") if record.levelname == "ERROR"]
    assert not found


class Player:
    """Asks at random, and keeps the books: what was asked, what was answered."""

    def __init__(self, client: ScriptedClient, rng: random.Random, topics: list[str]) -> None:
        self._client = client
        self._rng = rng
        self._topics = topics
        self._requests = 1000
        self.asked: dict[int, str] = {}
        self.answered: dict[int, Message] = {}
        self.twice: list[Message] = []
        self._open: dict[int, None] = {}  # producers that may send
        self._opening: dict[int, int] = {}  # request → producer id
        self._sequence_id = 0
        self.closed = False

    async def read(self) -> None:
        while (received := await self._client.receive(60)) is not None:
            self._take(received.body)
        self.closed = True

    def _take(self, body: Any) -> None:
        if isinstance(body, pb.CommandMessage):
            if self._rng.random() < 0.7:
                self._client.acknowledge((body.message_id.ledgerId, body.message_id.entryId), consumer_id=body.consumer_id)
        elif isinstance(body, pb.CommandCloseProducer):
            self._open.pop(body.producer_id, None)
        elif (request_id := getattr(body, "request_id", NEWS)) != NEWS:
            before = self.answered.get(request_id)
            if before is not None and not (isinstance(before, pb.CommandProducerSuccess) and not before.producer_ready):
                self.twice.append(body)  # only who waits for exclusive access gets a second one
            self.answered[request_id] = body
            producer_id = self._opening.pop(request_id, None)
            if producer_id is not None and isinstance(body, pb.CommandProducerSuccess) and body.producer_ready:
                self._open[producer_id] = None

    def ask(self, body: Message) -> None:
        self._requests += 1
        body.request_id = self._requests  # type: ignore[attr-defined]
        self.asked[self._requests] = type(body).__name__
        self._client.send(body)

    @property
    def unanswered(self) -> list[str]:
        return [what for request_id, what in self.asked.items() if request_id not in self.answered]

    def act(self) -> None:
        rng, number = self._rng, self._rng.randrange(IDS)
        topic = rng.choice(self._topics)
        match rng.randrange(16):
            case 0 | 1:
                self._produce(topic, number)
            case 2:
                self._open.pop(number, None)
                self._opening = {request: producer for request, producer in self._opening.items() if producer != number}
                self.ask(pb.CommandCloseProducer(producer_id=number))
            case 3 | 4 | 5:
                if self._open:
                    self._send(rng.choice(list(self._open)))
            case 6 | 7:
                self._subscribe(topic, number)
            case 8:
                self.ask(pb.CommandCloseConsumer(consumer_id=number))
            case 9 | 10:
                self._client.send(pb.CommandFlow(consumer_id=number, messagePermits=rng.randrange(1, 20)))
            case 11:
                target = rng.choice([{"message_publish_time": 5}, {"message_id": ident((-1, -1))}])
                self.ask(pb.CommandSeek(consumer_id=number, **target))
            case 12:
                self.ask(pb.CommandUnsubscribe(consumer_id=number, force=rng.random() < 0.3))
            case 13:
                self.ask(pb.CommandGetLastMessageId(consumer_id=number))
            case 14:
                self.ask(pb.CommandConsumerStats(consumer_id=number))
            case 15:
                self._client.send(pb.CommandRedeliverUnacknowledgedMessages(consumer_id=number))

    def _produce(self, topic: str, number: int) -> None:
        if number not in self._open and number not in self._opening.values():
            mode = self._rng.choice([0, 0, 0, 0, 1, 2, 3])
            self.ask(pb.CommandProducer(topic=full(topic), producer_id=number, request_id=0, producer_access_mode=mode))  # type: ignore[arg-type]
            self._opening[self._requests] = number

    def _subscribe(self, topic: str, number: int) -> None:
        rng = self._rng
        durable = rng.random() < 0.7
        name = f"s{rng.randrange(2)}" if durable else f"r{rng.randrange(2)}"
        self.ask(subscribe(topic, name, number, 0, subType=rng.choice(KINDS), durable=durable, priority_level=rng.randrange(2)))

    def _send(self, producer_id: int) -> None:
        self._sequence_id += 1
        tail = message(self._sequence_id, b"x" * self._rng.randrange(200), partition_key=f"k{self._rng.randrange(5)}")
        self._client.send_bytes(send_frame(pb.CommandSend(producer_id=producer_id, sequence_id=self._sequence_id), tail))


Stroke = Callable[[BrokerWorld, TopicName, random.Random], Awaitable[object]]


async def unload(world: BrokerWorld, topic: TopicName, rng: random.Random) -> None:
    await world.broker.topics.unload(topic)


async def delete(world: BrokerWorld, topic: TopicName, rng: random.Random) -> None:
    if topic.is_partition:
        await world.broker.partitioned.delete(topic.base, force=rng.random() < 0.5)
    else:
        await world.broker.topics.delete(topic, force=rng.random() < 0.5)


async def delete_inactive(world: BrokerWorld, topic: TopicName, rng: random.Random) -> None:
    policy = InactiveTopics(InactiveDeletion.CAUGHT_UP, after_s=0)
    for opened in world.broker.topics.loaded():
        opened.on_policies(replace(opened.policies, inactive_topics=policy))
    for _ in range(2):
        await world.broker.inactive.check()


async def change_policies(world: BrokerWorld, topic: TopicName, rng: random.Random) -> None:
    opened = world.broker.topics.find(topic)
    if opened is not None:
        changes: list[dict[str, Any]] = [
            {"deduplication": True},
            {"deduplication": False},
            {"max_unacked_per_consumer": 2, "max_unacked_per_subscription": 1},
            {"max_producers": 1},
            {"max_consumers_per_subscription": 1},
            {"subscription_types": frozenset({"Shared"})},
            {"auto_subscription_creation": False},
            {"encryption_required": True},
        ]
        normal = await world.broker.catalog.policies(topic)
        opened.on_policies(replace(normal, **rng.choice([*changes, {}])))


async def delete_subscription(world: BrokerWorld, topic: TopicName, rng: random.Random) -> None:
    opened = world.broker.topics.find(topic)
    if opened is not None:
        await opened.delete_subscription(f"s{rng.randrange(2)}")


async def grow(world: BrokerWorld, topic: TopicName, rng: random.Random) -> None:
    if topic.is_partition and (partitions := await world.broker.catalog.partitions(topic.base)) and partitions < 4:
        await world.broker.partitioned.grow(topic.base, partitions + 1)


async def terminate(world: BrokerWorld, topic: TopicName, rng: random.Random) -> None:
    opened = world.broker.topics.find(topic)
    if opened is not None and rng.random() < 0.3:
        await opened.terminate()


async def fence(world: BrokerWorld, topic: TopicName, rng: random.Random) -> None:
    opened = world.broker.topics.find(topic)
    if opened is not None and rng.random() < 0.3:
        await world.ledger_client.recover(opened.ledger.ledgers.last_ledger_id)


class Outages:
    """Strokes during which the metadata store answers nobody, or nobody who writes."""

    def __init__(self) -> None:
        self.refused = 0
        self._sound: dict[str, Any] = {}

    async def strike(self, world: BrokerWorld, topic: TopicName, rng: random.Random) -> None:
        if self._sound:
            return
        names = WRITES if rng.random() < 0.5 else (*WRITES, "get", "children", "watch")
        self._sound = {name: getattr(world.store, name) for name in names}
        for name in names:
            setattr(world.store, name, self._refuse)
        await asyncio.sleep(rng.choice([0.001, 0.01, 0.05]))
        for name, sound in self._sound.items():
            setattr(world.store, name, sound)
        self._sound = {}

    async def _refuse(self, *args: Any, **kwargs: Any) -> None:
        self.refused += 1
        await asyncio.sleep(0)
        raise StoreUnavailableError("planted")


async def storm(
    seed: int, strokes: tuple[Stroke, ...], *, partitions: int = 0, domain: str = "persistent", steps: int = 250
) -> None:
    rng = random.Random(seed)
    orphans = Orphans()
    logging.getLogger("cepheid_managed_ledger").addHandler(orphans)
    try:
        await play(rng, strokes, orphans, partitions, domain, steps)
    finally:
        logging.getLogger("cepheid_managed_ledger").removeHandler(orphans)


async def play(rng: random.Random, strokes: tuple[Stroke, ...], orphans: Orphans, partitions: int, domain: str, steps: int) -> None:
    async with BrokerWorld(close_timeout_s=2, reader_seek_grace_s=0.05) as world:
        topics = [f"{domain}://public/default/t{number}" for number in range(2)]
        if partitions:
            await world.create_topic(topics[0], partitions)
            topics = [f"{topics[0]}-partition-{index}" for index in range(3)]
        clients = [await world.client() for _ in range(4)]
        players = [Player(client, rng, topics) for client in clients]
        reading = [asyncio.ensure_future(player.read()) for player in players]
        striking: list[asyncio.Future[object]] = []
        for _ in range(steps):
            for _ in range(rng.randrange(4)):
                rng.choice(players).act()
            if rng.random() < 0.15:
                striking.append(asyncio.ensure_future(rng.choice(strokes)(world, TopicName.parse(rng.choice(topics)), rng)))
            await asyncio.sleep(rng.choice([0, 0, 0, 0.001, 0.003]))
            assert not any(player.closed for player in players), "a connection was closed"
        for outcome in await asyncio.wait_for(asyncio.gather(*striking, return_exceptions=True), 100):
            assert outcome is None or isinstance(outcome, CepheidError | str) or not isinstance(outcome, BaseException), repr(
                outcome
            )
        await end_players(players)
        for client in clients:
            await client.close()
        await asyncio.gather(*reading)
        await check_rest(world, topics, orphans)


async def end_players(players: list[Player]) -> None:
    for player in players:
        for number in range(IDS):  # whoever waits for exclusive access has been answered once, and gets no more
            player.ask(pb.CommandCloseProducer(producer_id=number))
            player.ask(pb.CommandCloseConsumer(consumer_id=number))
    await wait_until(lambda: not any(player.unanswered for player in players), what=f"{[p.unanswered for p in players]} answered")
    for player in players:
        assert not player.twice


async def check_rest(world: BrokerWorld, topics: list[str], orphans: Orphans) -> None:
    broker = world.broker
    await wait_until(lambda: broker.statistics().connections == 0)
    for name in topics:
        parsed = TopicName.parse(name)
        await broker.topics.wait_until_settled([parsed])
        if (topic := broker.topics.find(parsed)) is not None:
            await wait_until(lambda topic=topic: is_at_rest(topic), what=f"rest of {topic!r}")
    await wait_until(lambda: broker.statistics().requests_running == 0, what=f"the end of {broker._tasks._tasks}")
    await wait_until(lambda: broker.statistics().publish_buffer_bytes == 0, what="an empty publish buffer")
    assert broker.statistics().read_ahead_bytes == 0
    for parsed in map(TopicName.parse, topics):
        found = await broker.catalog.find(parsed.base)
        if found is not None and found.record.partitions:
            await broker.partitioned.delete(parsed.base, force=True)
        if await broker.catalog.find(parsed) is not None:  # a plain one, perhaps with the name of a partition
            await broker.topics.delete(parsed, force=True)
    assert [trace for trace in await traces(world) if trace not in orphans.names] == []
    assert broker.policies.watches == 0
    assert broker.statistics().requests_running == 0


def is_at_rest(topic: Topic) -> bool:
    subscriptions = topic.subscriptions.values()
    return not topic.producers and not len(topic.admission) and all(s.durable and not s.consumers for s in subscriptions)


SEEDS = pytest.mark.parametrize("seed", range(4))


@SEEDS
def test_unloading_and_deleting_under_clients(seed: int) -> None:
    run_async(storm(seed, (unload, delete, delete_inactive, delete_subscription)))


@SEEDS
def test_growing_and_deleting_partitions_under_clients(seed: int) -> None:
    run_async(storm(seed, (unload, delete, grow, grow), partitions=1))


@SEEDS
def test_policies_that_change_while_topics_open_and_close(seed: int) -> None:
    run_async(storm(seed, (unload, change_policies, change_policies), steps=300))


@SEEDS
def test_ends_and_takeovers_of_topics_under_clients(seed: int) -> None:
    run_async(storm(seed, (terminate, fence, delete, unload)))


@SEEDS
def test_non_persistent_topics_under_clients(seed: int) -> None:
    run_async(
        storm(seed, (unload, delete, delete_inactive, delete_subscription, change_policies), domain="non-persistent"), timeout_s=60
    )


@SEEDS
def test_outages_of_the_metadata_store_under_clients(seed: int) -> None:
    outages = Outages()
    run_async(storm(seed, (unload, delete, outages.strike, outages.strike, delete_subscription, fence)))
    assert outages.refused > 0
