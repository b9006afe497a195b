"""Topics that nobody uses: who counts as inactive, how long it takes, and races with clients that come back."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from cepheid_broker.errors import ServiceNotReadyError
from cepheid_broker.policies.topic_policies import InactiveDeletion, InactiveTopics, TopicPolicies
from cepheid_broker.topics import inactive_topics
from cepheid_broker.topics.inactive_topics import inactive_for_s
from cepheid_broker.topics.topics import Topics
from cepheid_managed_ledger import Retention
from cepheid_metadata import list_chains, list_ledgers, list_topics
from cepheid_wire import ServerError, TopicName
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.broker_world import BrokerWorld
from tests.broker.scripted_client import ScriptedClient, full

NO_SUBSCRIPTIONS, CAUGHT_UP = InactiveDeletion.NO_SUBSCRIPTIONS, InactiveDeletion.CAUGHT_UP


def at_once(world: BrokerWorld, when: InactiveDeletion = NO_SUBSCRIPTIONS, after_s: int = 0) -> None:
    for topic in world.broker.topics.loaded():
        topic.on_policies(replace(topic.policies, inactive_topics=InactiveTopics(when, after_s)))


async def check(world: BrokerWorld, times: int = 2) -> list[str]:
    """What is left after so many looks; the first only notes since when a topic is inactive."""
    for _ in range(times):
        await world.broker.inactive.check()
    return [topic.local_name for topic in await list_topics(world.store, "public", "default", "persistent")]


async def leave(client: ScriptedClient, *, producer: int | None = None, consumer: int | None = None) -> None:
    if producer is not None:
        await client.ask(pb.CommandCloseProducer(producer_id=producer, request_id=90), pb.CommandSuccess)
    if consumer is not None:
        await client.ask(pb.CommandCloseConsumer(consumer_id=consumer, request_id=91), pb.CommandSuccess)


async def test_nothing_is_deleted_unless_a_policy_says_so() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await leave(client, producer=0)
        assert await check(world) == ["t"]
        at_once(world)
        assert await check(world) == []
        assert await list_chains(world.store, "public", "default", "persistent") == []
        assert [ledger_id async for ledger_id in list_ledgers(world.store)] == []
        assert world.broker.inactive.deleted == 1


async def test_what_could_not_be_deleted_is_tried_again_at_a_random_later_look() -> None:
    """Two brokers in step would be in each other's way for ever."""
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await leave(client, producer=0)
        at_once(world)
        inactive, tries = world.broker.inactive, 0

        async def refuses(_: TopicName) -> None:
            nonlocal tries
            tries += 1
            raise ServiceNotReadyError("another broker is at it")

        deletes, inactive._delete = inactive._delete, refuses  # type: ignore[method-assign]
        inactive._check_s, inactive._random = 60.0, random.Random(1)
        assert await check(world, 5) == ["t"]
        assert tries == 1
        assert 0 < inactive._not_before[TopicName.parse(full("t"))] - asyncio.get_running_loop().time() < 300
        inactive._not_before.clear()
        inactive._delete = deletes  # type: ignore[method-assign]
        assert await check(world, 1) == []


async def test_producers_consumers_and_subscriptions_keep_a_topic() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("produced")
        await client.subscribe("read", "r", 1, durable=False)
        await client.subscribe("subscribed", "s", 2)
        await leave(client, consumer=2)
        await client.produce_on("unused", 3)
        await leave(client, producer=3)
        at_once(world)
        assert await check(world) == ["produced", "read", "subscribed"]
        await leave(client, producer=0)
        await leave(client, consumer=1)
        assert await check(world) == ["subscribed"]


async def test_with_caught_up_subscriptions_only_a_backlog_keeps_a_topic() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        for index, topic in enumerate(("behind", "caught-up")):
            await client.subscribe(topic, "s", index)
            await client.produce_on(topic, index)
        await client.publish(1, producer_id=0)
        for index in (0, 1):
            await leave(client, producer=index, consumer=index)
        at_once(world, CAUGHT_UP)
        assert await check(world) == ["behind"]


async def test_the_time_starts_again_with_every_sign_of_life() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await leave(client, producer=0)
        at_once(world, after_s=0)
        assert await check(world, 1) == ["t"], "inactive since this moment"
        await client.produce_on("t")
        await client.publish(1)
        await leave(client, producer=0)
        assert await check(world, 1) == ["t"], "somebody published between two looks"
        assert await check(world, 1) == []
        await client.produce_on("u")
        await leave(client, producer=0)
        at_once(world, after_s=3600)
        assert await check(world, 3) == ["u"]


async def test_partitions_go_together() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await world.create_topic("split", 3)
        for index in (0, 1):
            await client.produce_on(f"split-partition-{index}", index)
        await leave(client, producer=0)
        at_once(world)
        assert await check(world) == ["split"], "one partition has a producer"
        await leave(client, producer=1)
        assert await check(world) == [], "the third was never opened"


async def test_a_closed_partition_with_a_backlog_keeps_all() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await world.create_topic("split", 2)
        for index in (0, 1):
            await client.subscribe(f"split-partition-{index}", "s", index)
            await client.produce_on(f"split-partition-{index}", index)
        await client.publish(1, producer_id=1)
        for index in (0, 1):
            await leave(client, producer=index, consumer=index)
        await world.broker.topics.unload(TopicName.parse("split-partition-1"))
        at_once(world, CAUGHT_UP)
        assert await check(world, 3) == ["split"]
        at_once(world, CAUGHT_UP)  # also for the partition that was opened to be looked at
        assert await check(world, 3) == ["split"]
        await client.subscribe("split-partition-1", "s", 1, permits=1)
        await client.acknowledge_saved((await client.expect_message()).position, consumer_id=1)
        await leave(client, consumer=1)
        assert await check(world, 3) == []


@pytest.mark.parametrize(
    ("topic", "owner", "step"),
    [("t", Topics, "_wait_until_settled"), ("split-partition-0", inactive_topics.InactiveTopics, "_open_missing")],
)
async def test_who_connects_during_the_last_look_saves_the_topic(topic: str, owner: type, step: str) -> None:
    """The producer comes after the look that found it due, before the step in which it is closed to newcomers."""
    async with BrokerWorld() as world, await world.client() as client:
        if topic != "t":
            await world.create_topic("split", 2)
        await client.produce_on(topic)
        await leave(client, producer=0)
        at_once(world)
        await check(world, 1)
        then = getattr(owner, step)

        async def connect_first(*args: Any) -> Any:
            await client.produce_on(topic, 1)
            return await then(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, step, connect_first)
            assert len(await check(world, 1)) == 1
        await client.publish(1, producer_id=1)
        assert world.broker.inactive.deleted == 0


@pytest.mark.parametrize("partitions", [0, 2])
async def test_clients_that_come_and_go_never_lose_what_they_published(partitions: int) -> None:
    """A topic is deleted again and again while a client publishes now and then: whatever was confirmed on a topic that had a
    subscription stays until it is delivered, and every attempt ends well."""
    async with BrokerWorld() as world, await world.client() as client:
        name = "t"
        if partitions:
            await world.create_topic("t", partitions)
            name = "t-partition-0"
        stop = False

        async def keep_checking() -> None:
            while not stop:
                at_once(world, CAUGHT_UP)
                await world.broker.inactive.check()
                await asyncio.sleep(0.002)

        checking = asyncio.ensure_future(keep_checking())
        try:
            for round_ in range(30):
                await retry(client, pb.CommandProducer(topic=full(name), producer_id=round_), pb.CommandProducerSuccess)
                ask = pb.CommandSubscribe(topic=full(name), subscription="s", consumer_id=round_, subType=0, initialPosition=1)
                await retry(client, ask, pb.CommandSuccess)
                await client.publish(1, producer_id=round_, first_sequence_id=round_)
                client.send(pb.CommandFlow(consumer_id=round_, messagePermits=1))
                position = (await client.expect_message()).position
                await client.acknowledge_saved(position, consumer_id=round_)
                await leave(client, producer=round_, consumer=round_)
                await asyncio.sleep(0.003 * (round_ % 4))  # back at once, during a deletion, or after it
        finally:
            stop = True
            await checking
        assert world.broker.inactive.deleted > 0, "the race was never run"


async def retry(client: ScriptedClient, ask: Any, kind: Any) -> None:
    """As clients do: until it is not 'not ready' any more."""
    while True:
        ask.request_id = client.request_id()
        client.send(ask)
        received = await client.receive()
        assert received is not None
        if isinstance(received.body, kind):
            return
        if isinstance(received.body, pb.CommandError):
            assert received.body.error == ServerError.SERVICE_NOT_READY, received.body
        else:
            assert isinstance(received.body, pb.CommandCloseConsumer), received.body  # what C++ needs behind such an error
        await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("after_s", "retention", "for_s"),
    [
        (60, Retention(0, 0), 60),
        (60, Retention(3_600_000, 1), 3600),  # until then it is kept
        (7200, Retention(3_600_000, 1), 7200),
        (60, Retention(-1, 0), float("inf")),
        (60, Retention(0, -1), float("inf")),
    ],
)
def test_what_retention_keeps_is_not_deleted(after_s: int, retention: Retention, for_s: float) -> None:
    policies = TopicPolicies(retention=retention, inactive_topics=InactiveTopics(NO_SUBSCRIPTIONS, after_s))
    assert inactive_for_s(policies) == for_s


async def test_a_deletion_that_a_crash_interrupted_is_finished_when_somebody_asks() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await world.create_topic("split", 2)
        found = await world.broker.catalog.find(TopicName.parse("split"))
        assert found is not None
        await world.broker.catalog.replace(TopicName.parse("split"), found, deleted=True)  # … and the broker was gone
        await retry(client, pb.CommandProducer(topic=full("split-partition-0"), producer_id=0), pb.CommandProducerSuccess)
        assert await check(world) == ["split-partition-0"], "made anew by use, as every topic"
