"""A client that disappears in the middle of something: whatever takes time, nothing of it stays, and the next one is served."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from cepheid_broker.policies.topic_policies import QuotaAction
from cepheid_wire import TopicName
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.broker_world import BrokerWorld
from tests.broker.scripted_client import ScriptedClient, full, ident, subscribe
from tests.support import wait_until

EXCLUSIVE = pb.CommandSubscribe.Exclusive
SHARED = pb.CommandSubscribe.Shared


@pytest.fixture(autouse=True)
def no_errors_in_the_log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    found = [(record.message, record.__dict__.get("error")) for record in caplog.get_records("call") if record.levelname == "ERROR"]
    assert not found


@dataclass
class Scene:
    world: BrokerWorld
    rude: ScriptedClient  # will vanish
    held: asyncio.Event  # what is slow goes on when it is set
    slowed: int = 0

    def slow(self, owner: Any, name: str) -> None:
        """The next calls of this method wait."""
        method = getattr(owner, name)

        async def later(*args: Any, **kwargs: Any) -> Any:
            self.slowed += 1
            await self.held.wait()
            return await method(*args, **kwargs)

        setattr(owner, name, later)

    async def wait_slowed(self) -> None:
        await wait_until(lambda: self.slowed > 0, what="the slow step")


Play = Callable[[Scene], Awaitable[None]]


async def a_topic_for_its_producer(scene: Scene) -> None:
    scene.slow(scene.world.broker.topics, "_load_topic")
    scene.rude.send(producer())
    await scene.wait_slowed()


async def a_topic_for_its_consumer(scene: Scene) -> None:
    scene.slow(scene.world.broker.topics, "_load_topic")
    scene.rude.send(subscribe("t", "s", 0, 1, subType=EXCLUSIVE))
    await scene.wait_slowed()


async def its_subscription(scene: Scene) -> None:
    topic = await scene.world.broker.topics.get(TopicName.parse("t"), may_create=True)
    scene.slow(topic.ledger, "create_cursor")
    scene.rude.send(subscribe("t", "s", 0, 1, subType=EXCLUSIVE))
    await scene.wait_slowed()


async def exclusive_access(scene: Scene) -> None:
    async with await scene.world.client() as holder:
        await holder.produce_on("t", producer_access_mode=pb.Exclusive)
        scene.rude.send(producer(producer_access_mode=pb.WaitForExclusive))
        await scene.rude.expect(pb.CommandProducerSuccess)
        scene.rude.abort()
        await wait_until(lambda: len(scene.world.topic("t").admission) == 1)


async def the_epoch_of_the_topic(scene: Scene) -> None:
    topic = await scene.world.broker.topics.get(TopicName.parse("t"), may_create=True)
    scene.slow(topic.admission, "_save_epoch")
    scene.rude.send(producer(producer_access_mode=pb.Exclusive))
    await scene.wait_slowed()


async def an_answer_of_who_holds_its_place(scene: Scene) -> None:
    async with await scene.world.client() as holder:
        holder.answer_pings = False
        await holder.subscribe("t", "s")
        await holder.produce_on("t", producer_name="p")
        scene.rude.send(subscribe("t", "s", 0, 1, subType=EXCLUSIVE), producer(producer_name="p"))
        await holder.expect(pb.CommandPing)
        scene.rude.abort()
        await wait_until(lambda: scene.world.broker.statistics().connections == 1)


async def a_seek(scene: Scene) -> None:
    await scene.rude.subscribe("t", "s")
    scene.slow(scene.world.topic("t").subscriptions["s"].cursor, "reset")
    scene.rude.send(pb.CommandSeek(consumer_id=0, request_id=2, message_id=ident((-1, -1))))
    await scene.wait_slowed()
    scene.rude.send(subscribe("t", "s", 0, 3, subType=EXCLUSIVE))  # and it waits for the end of it
    await scene.rude.expect(pb.CommandCloseConsumer)


async def a_seek_of_a_reader(scene: Scene) -> None:
    await scene.rude.subscribe("t", "r", durable=False)
    scene.slow(scene.world.topic("t").subscriptions["r"].cursor, "reset")
    scene.rude.send(pb.CommandSeek(consumer_id=0, request_id=2, message_id=ident((-1, -1))))
    await scene.wait_slowed()


async def the_end_of_its_subscription(scene: Scene) -> None:
    await scene.rude.subscribe("t", "s")
    scene.slow(scene.world.topic("t").ledger, "delete_cursor")
    scene.rude.send(pb.CommandUnsubscribe(consumer_id=0, request_id=2))
    await scene.wait_slowed()


async def a_list_of_topics(scene: Scene) -> None:
    scene.slow(scene.world.broker.topic_watches, "_list_topics")
    watch = pb.CommandWatchTopicList(request_id=1, watcher_id=0, namespace="public/default", topics_pattern=".*")
    scene.rude.send(watch, pb.CommandGetTopicsOfNamespace(request_id=2, namespace="public/default"))
    await scene.wait_slowed()


async def news_of_topics(scene: Scene) -> None:
    scene.rude.send(pb.CommandWatchTopicList(request_id=1, watcher_id=0, namespace="public/default", topics_pattern=".*"))
    await scene.rude.expect(pb.CommandWatchTopicListSuccess)
    scene.slow(next(iter(scene.world.broker.topic_watches._namespaces.values())), "_list_topics")
    await scene.world.create_topic("another")
    await scene.wait_slowed()


async def an_acknowledgement_to_be_saved(scene: Scene) -> None:
    await scene.rude.subscribe("t", "s")
    scene.slow(scene.world.topic("t").subscriptions["s"].cursor, "saved")
    scene.rude.acknowledge((1, 1), request_id=2)
    await scene.wait_slowed()


async def receipts(scene: Scene) -> None:
    await scene.rude.produce_on("t")
    for sequence_id in range(20):
        scene.rude.send_message(sequence_id, bytes(100_000))
    scene.rude.send(pb.CommandCloseProducer(producer_id=0, request_id=2))
    await scene.rude.drain()
    await wait_until(lambda: any(p.pending_entries for p in scene.world.topic("t").producers.values()))


async def room_in_the_backlog(scene: Scene) -> None:
    topic = await scene.world.broker.topics.get(TopicName.parse("t"), may_create=True)
    topic.set_publish_blocked(QuotaAction.HOLD)
    scene.rude.send(producer(epoch=1))
    await scene.rude.ping()


async def the_last_message(scene: Scene) -> None:
    await scene.rude.produce_on("t")
    await scene.rude.publish(3)
    await scene.rude.subscribe("t", "s")
    ledger: Any = scene.world.topic("t").ledger
    ledger.read_cached = lambda *args, **kwargs: None
    scene.slow(ledger, "read")
    scene.rude.send(pb.CommandGetLastMessageId(consumer_id=0, request_id=2))
    await scene.wait_slowed()


async def a_schema(scene: Scene) -> None:
    scene.slow(scene.world.broker.schemas, "register")
    schema = pb.Schema(name="s", type=pb.Schema.String, schema_data=b"")
    scene.rude.send(producer(schema=schema), subscribe("t", "s", 0, 2, subType=SHARED, schema=schema))
    await scene.wait_slowed()


def producer(**fields: Any) -> pb.CommandProducer:
    return pb.CommandProducer(topic=full("t"), producer_id=0, request_id=1, **fields)


PLAYS: list[Play] = [
    a_topic_for_its_producer,
    a_topic_for_its_consumer,
    its_subscription,
    exclusive_access,
    the_epoch_of_the_topic,
    an_answer_of_who_holds_its_place,
    a_seek,
    a_seek_of_a_reader,
    the_end_of_its_subscription,
    a_list_of_topics,
    news_of_topics,
    an_acknowledgement_to_be_saved,
    receipts,
    room_in_the_backlog,
    the_last_message,
    a_schema,
]


@pytest.mark.parametrize("play", PLAYS, ids=lambda play: play.__name__)
async def test_a_client_that_vanishes_while_it_waits_for(play: Play) -> None:
    settings = {"reader_seek_grace_s": 0.05, "connection": {"liveness_probe_s": 0.2}}
    async with BrokerWorld(**settings) as world:
        scene = Scene(world, await world.client(), asyncio.Event())
        await play(scene)
        scene.rude.abort()
        broker = world.broker
        await wait_until(lambda: broker.statistics().connections == 0)
        scene.held.set()
        await wait_until(lambda: broker.statistics().requests_running == 0, what="the end of its requests")
        await wait_until(lambda: broker.statistics().publish_buffer_bytes == 0)
        assert len(broker.topic_watches) == 0
        if (topic := broker.topics.find(TopicName.parse("t"))) is not None:
            topic.set_publish_blocked(None)
            await wait_until(lambda: not any(not s.durable for s in topic.subscriptions.values()), what="the end of readers")
            assert not topic.producers
            assert not len(topic.admission)
            assert not any(subscription.consumers for subscription in topic.subscriptions.values())
        async with await world.client() as heir:  # gets all that the other one wanted
            await heir.produce_on("t", producer_name="p", producer_access_mode=pb.Exclusive)
            await heir.subscribe("t", "s", permits=100)
            heir.send_message(77, b"new")
            await heir.skim_until(lambda received: received.tail.endswith(b"new"))
