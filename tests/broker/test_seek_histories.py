"""Seeks at any moment of delivery, by id, by time, to both ends, with acknowledgements in flight and entries coming in.

The first delivery after each is the first entry at or after the target (H13), also when the topic is reopened in between."""

from __future__ import annotations

import random

import pytest

from cepheid_metadata import Position
from cepheid_wire import TopicName
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.broker_world import BrokerWorld
from tests.broker.scripted_client import PUBLISH_TIME_MS, Received, ScriptedClient, ident, message

pytestmark = pytest.mark.slow

TOPIC = TopicName.parse("persistent://public/default/t")
EARLIEST, LATEST = (-1, -1), ((1 << 63) - 1, (1 << 63) - 1)
STEP_MS = 10


class Reader:
    """One consumer that seeks. `stored` is the audit: positions in order; publish times rise by `STEP_MS`."""

    def __init__(self, world: BrokerWorld, client: ScriptedClient, rng: random.Random) -> None:
        self.world, self.client, self.rng = world, client, rng
        self.durable = rng.random() < 0.6
        self.kind = rng.choice((pb.CommandSubscribe.Exclusive, pb.CommandSubscribe.Shared)) if self.durable else 0
        self.stored: list[tuple[int, int]] = []
        self.got: list[Received] = []
        self.requests = 100

    async def publish(self, count: int) -> None:
        first = len(self.stored)
        for number in range(first, first + count):
            self.client.send_message(number, tail=message(number, b"x", publish_time=PUBLISH_TIME_MS + STEP_MS * number))
        while len(self.stored) < first + count:
            received = await self.take()
            if isinstance(received.body, pb.CommandSendReceipt):
                self.stored.append(received.position)

    async def take(self) -> Received:
        received = await self.client.receive()
        assert received is not None
        if isinstance(received.body, pb.CommandMessage):
            self.got.append(received)
        return received

    async def take_until(self, kind: type, request_id: int | None = None) -> None:
        while True:
            body = (await self.take()).body
            if isinstance(body, kind) and request_id in (None, getattr(body, "request_id", None)):
                return

    async def subscribe(self) -> None:
        """What arrives before is of the old incarnation."""
        self.requests += 1
        self.client.send(
            pb.CommandSubscribe(
                topic=str(TOPIC), subscription="s", subType=self.kind, consumer_id=0, request_id=self.requests,
                durable=self.durable, initialPosition=pb.CommandSubscribe.Earliest, start_message_id=ident(EARLIEST),
            )
        )  # fmt: skip
        await self.take_until(pb.CommandSuccess, self.requests)
        self.got.clear()
        self.client.send(pb.CommandFlow(consumer_id=0, messagePermits=1000))

    def acknowledge(self) -> None:
        """Some of what was delivered, and nobody asks for an answer."""
        chosen = [self.rng.choice(self.got).position for _ in range(self.rng.randrange(4)) if self.got]
        if chosen and self.kind == 0 and self.rng.random() < 0.5:
            self.client.acknowledge(max(chosen), cumulative=True)
        elif chosen:
            self.client.acknowledge(*chosen)

    async def seek(self) -> int:
        """The index in the audit of what must come first."""
        rng, count = self.rng, len(self.stored)
        self.requests += 1
        ask = pb.CommandSeek(consumer_id=0, request_id=self.requests)
        draw = rng.random()
        index = rng.randrange(count)
        if draw < 0.5:
            ask.message_id.CopyFrom(ident(self.stored[index]))
        elif draw < 0.8:
            ask.message_publish_time = PUBLISH_TIME_MS + STEP_MS * index - rng.randrange(STEP_MS)
        elif draw < 0.9:
            index = 0
            ask.message_id.CopyFrom(ident(EARLIEST))
        else:
            index = count
            ask.message_id.CopyFrom(ident(LATEST))
        self.acknowledge()  # in flight in front of it
        self.client.send(ask)
        self.acknowledge()  # and behind: void
        await self.take_until(pb.CommandCloseConsumer)
        self.acknowledge()
        await self.take_until(pb.CommandSuccess, self.requests)
        self.acknowledge()
        return index

    async def expect_from(self, index: int) -> None:
        """Everything from there on, in order, and nothing else."""
        try:
            while len(self.got) < len(self.stored) - index:
                await self.take()
        except TimeoutError:
            pass  # what is missing is said below
        assert [received.position for received in self.got] == self.stored[index:]


@pytest.mark.deadline(60)
@pytest.mark.parametrize("seed", range(30))
async def test_h13_the_first_delivery_after_a_seek_is_the_first_entry_at_or_after_its_target(seed: int) -> None:
    rng = random.Random(seed)
    async with BrokerWorld() as world, await world.client() as client:
        reader = Reader(world, client, rng)
        await client.produce_on("t")
        await world.topic("t").create_subscription("keeps all", Position(*EARLIEST))
        await reader.publish(rng.randrange(5, 40))
        await reader.subscribe()
        for _ in range(8):
            for _ in range(rng.randrange(5)):
                reader.acknowledge()
                await reader.publish(rng.randrange(1, 5))
            index = await reader.seek()
            await reader.publish(rng.randrange(3))
            if reader.durable and rng.random() < 0.3:
                await world.broker.topics.unload(TOPIC)
                await reader.take_until(pb.CommandCloseProducer)
                client.send(pb.CommandProducer(topic=str(TOPIC), producer_id=0, request_id=99))
                await reader.take_until(pb.CommandProducerSuccess, 99)
            await reader.subscribe()
            await reader.publish(rng.randrange(3))
            await reader.expect_from(index)
