"""Partitioned topics that grow and go while clients are connected, and steps that are interrupted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from cepheid_broker.errors import NotAllowedError, ServiceNotReadyError, TopicChangedError, TopicNotFoundError
from cepheid_broker.topics.partitioned_topics import PartitionedTopics
from cepheid_broker.topics.topics import Topics
from cepheid_metadata import (
    StoreUnavailableError,
    TopicRecord,
    list_chains,
    list_cursors,
    list_ledgers,
    list_topics,
    topic_records,
)
from cepheid_wire import ServerError, TopicName
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.broker_world import BrokerWorld
from tests.broker.scripted_client import ScriptedClient, full

TOPIC = TopicName.parse("split")
PART = [f"split-partition-{index}" for index in range(8)]


async def count(client: ScriptedClient, topic: str = "split") -> int:
    ask = pb.CommandPartitionedTopicMetadata(topic=full(topic), request_id=client.request_id())
    return (await client.ask(ask, pb.CommandPartitionedTopicMetadataResponse)).partitions


async def traces(world: BrokerWorld) -> list[str]:
    """Everything that metadata still has of any topic."""
    found = [f"record {name}" for name in await list_topics(world.store, "public", "default", "persistent")]
    for name in await list_chains(world.store, "public", "default", "persistent"):
        found += [f"chain {name}", *(f"cursor {name} {cursor}" for cursor in await list_cursors(world.store, name))]
    return found + [f"ledger {ledger_id}" async for ledger_id in list_ledgers(world.store)]


def failing_once(method: Callable[..., Awaitable[Any]], when: Callable[..., bool]) -> Callable[..., Awaitable[Any]]:
    failed = False

    async def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal failed
        if not failed and when(*args):
            failed = True
            raise StoreUnavailableError("planted")
        return await method(*args, **kwargs)

    return call


async def test_a_new_partition_has_the_subscriptions_before_anybody_knows_of_it() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await world.create_topic("split", 1)
        await client.subscribe(PART[0], "s", subscription_properties=[pb.KeyValue(key="k", value="v")])
        await client.subscribe(PART[0], "reader", 1, durable=False)
        seen: list[int] = []
        prepare = Topics.prepare

        async def watched(self: Topics, name: TopicName, *args: Any) -> None:
            await prepare(self, name, *args)
            seen.append(await count(client))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Topics, "prepare", watched)
            await world.broker.partitioned.grow(TOPIC, 3)
        assert seen == [1, 1], "the count was visible before the subscriptions"
        assert await count(client) == 3, "at once"
        await client.produce_on(PART[2])
        await client.publish(3)
        subscriptions = world.topic(PART[2]).subscriptions
        assert list(subscriptions) == ["s"], "a reader's is not taken along"
        assert subscriptions["s"].cursor.properties == {"k": "v"}
        await client.subscribe(PART[2], "s", 2, permits=10, initialPosition=pb.CommandSubscribe.Latest)
        await client.expect_messages(3)


async def test_a_subscription_made_during_the_growth_misses_nothing_either() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await world.create_topic("split", 1)
        await client.subscribe(PART[0], "early")
        prepare, late = Topics.prepare, True

        async def then_subscribe(self: Topics, name: TopicName, *args: Any) -> None:
            nonlocal late
            await prepare(self, name, *args)
            if late:
                late = False
                await client.subscribe(PART[0], "late", 1)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Topics, "prepare", then_subscribe)
            await world.broker.partitioned.grow(TOPIC, 2)
        assert await list_cursors(world.store, TOPIC.partition(1)) == ["early", "late"]


async def test_an_interrupted_growth_is_not_seen_and_can_be_repeated() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await world.create_topic("split", 1)
        await client.subscribe(PART[0], "s")
        key = topic_records(world.store).key_of(TOPIC)
        world.store.put = failing_once(world.store.put, lambda changed, *_: changed == key)  # type: ignore[method-assign]
        with pytest.raises(StoreUnavailableError):
            await world.broker.partitioned.grow(TOPIC, 3)
        assert await count(client) == 1
        await world.broker.partitioned.grow(TOPIC, 3)
        assert await count(client) == 3
        assert await list_cursors(world.store, TOPIC.partition(2)) == ["s"]


async def test_what_an_interrupted_growth_left_goes_with_the_topic() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await world.create_topic("split", 1)
        await client.subscribe(PART[0], "s")
        key = topic_records(world.store).key_of(TOPIC)
        world.store.put = failing_once(world.store.put, lambda changed, *_: changed == key)  # type: ignore[method-assign]
        with pytest.raises(StoreUnavailableError):
            await world.broker.partitioned.grow(TOPIC, 3)
        assert any("chain" in trace and PART[2] in trace for trace in await traces(world))
        await world.broker.partitioned.delete(TOPIC, force=True)
        assert await traces(world) == []


async def test_of_two_growths_at_one_time_the_second_is_told() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await world.create_topic("split", 2)
        grow = world.broker.partitioned.grow
        outcomes = await asyncio.gather(grow(TOPIC, 4), grow(TOPIC, 6), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [type(None), TopicChangedError]
        assert await count(client) == 4
        for partitions in (3, 1, 0):
            with pytest.raises(NotAllowedError, match="only"):
                await grow(TOPIC, partitions)
        await grow(TOPIC, 4)  # nothing to do
        with pytest.raises(TopicNotFoundError):
            await grow(TopicName.parse("none"), 2)
        await world.create_topic("plain")
        with pytest.raises(NotAllowedError, match="not partitioned"):
            await grow(TopicName.parse("plain"), 2)


async def test_another_change_of_the_record_does_not_stop_a_growth() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await world.create_topic("split", 1)
        await client.subscribe(PART[0], "s")
        records, prepare = topic_records(world.store), Topics.prepare

        async def then_change(self: Topics, name: TopicName, *args: Any) -> None:
            await prepare(self, name, *args)
            found = await records.get(TOPIC)
            assert found is not None
            await records.replace(TOPIC, found.record.replace(properties={"a": "b"}), found.version)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Topics, "prepare", then_change)
            await world.broker.partitioned.grow(TOPIC, 2)
        found = await records.get(TOPIC)
        assert found is not None
        assert (found.record.partitions, found.record.properties) == (2, {"a": "b"})


async def test_missed_partitions_are_made_with_the_subscriptions() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await world.create_topic("split", 3)
        await client.subscribe(PART[0], "s")
        await client.subscribe(PART[1], "other", 1)
        await world.broker.partitioned.create_missing(TOPIC)
        assert await list_cursors(world.store, TOPIC.partition(1)) == ["other"], "it was there already"
        assert await list_cursors(world.store, TOPIC.partition(2)) == ["s"]


async def test_nothing_of_a_deleted_topic_stays() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await world.create_topic("split", 3)
        for index in (0, 1):
            await client.produce_on(PART[index], index)
            await client.publish(5, producer_id=index)
            await client.subscribe(PART[index], "s", index)
        with pytest.raises(NotAllowedError, match="1 producers and 1 consumers"):
            await world.broker.partitioned.delete(TOPIC)
        await client.ping()  # nobody was thrown out
        await world.broker.partitioned.delete(TOPIC, force=True)
        closed = [type((await client.receive()).body) for _ in range(4)]  # type: ignore[union-attr]
        assert sorted(kind.__name__ for kind in closed) == ["CommandCloseConsumer"] * 2 + ["CommandCloseProducer"] * 2
        assert await traces(world) == []
        with pytest.raises(TopicNotFoundError):
            await world.broker.partitioned.delete(TOPIC, force=True)


async def test_who_comes_back_at_once_makes_no_plain_topic_of_a_deleted_partition() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await world.create_topic("split", 2)
        await client.produce_on(PART[0])
        remove, held = Topics.remove, asyncio.Event()

        async def slow(self: Topics, name: TopicName, owned: TopicName) -> None:
            await remove(self, name, owned)
            if name == TOPIC.partition(1):
                await held.wait()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Topics, "remove", slow)
            deleting = asyncio.ensure_future(world.broker.partitioned.delete(TOPIC, force=True))
            await client.expect(pb.CommandCloseProducer)
            for kind in (pb.CommandProducer(producer_id=0), pb.CommandSubscribe(consumer_id=0, subType=0, subscription="s")):
                kind.topic, kind.request_id = full(PART[0]), 9
                refused = await client.ask(kind, pb.CommandError)
                assert refused.error == ServerError.SERVICE_NOT_READY, "the client must try again, not give up"
                assert "is being unloaded" in refused.message, "the words that spare its connection (protocol.md §7.2)"
            await client.expect(pb.CommandCloseConsumer)
            ask = pb.CommandPartitionedTopicMetadata(topic=full("split"), request_id=3)
            answer = await client.ask(ask, pb.CommandPartitionedTopicMetadataResponse)
            assert answer.error == ServerError.SERVICE_NOT_READY
            for name in (TOPIC, TOPIC.partition(0)):
                with pytest.raises(ServiceNotReadyError):
                    await world.broker.topics.get(name, may_create=True)
            with pytest.raises(ServiceNotReadyError):
                await world.broker.partitioned.grow(TOPIC, 4)
            held.set()
            await deleting
        assert await traces(world) == []


async def test_a_partition_that_is_closed_to_newcomers_is_not_opened_a_second_time() -> None:
    """Between the look that finds it idle and the mark in the record, which is a write away."""
    async with BrokerWorld() as world, await world.client() as client:
        await world.create_topic("split", 2)
        await client.produce_on(PART[0])
        await client.ask(pb.CommandCloseProducer(producer_id=0, request_id=5), pb.CommandSuccess)
        mark = PartitionedTopics._mark

        async def knock_first(self: PartitionedTopics, topic: TopicName) -> None:
            for part in PART[:2]:  # one is open, one is not
                refused = await client.ask(pb.CommandProducer(topic=full(part), producer_id=1, request_id=6), pb.CommandError)
                assert refused.error == ServerError.SERVICE_NOT_READY
            await mark(self, topic)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PartitionedTopics, "_mark", knock_first)
            await world.broker.partitioned.delete(TOPIC)
        assert await traces(world) == []


async def test_a_deletion_that_cannot_be_marked_leaves_the_topic_usable() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await world.create_topic("split", 1)
        await client.produce_on(PART[0])
        await client.ask(pb.CommandCloseProducer(producer_id=0, request_id=5), pb.CommandSuccess)
        key = topic_records(world.store).key_of(TOPIC)
        world.store.put = failing_once(world.store.put, lambda changed, *_: changed == key)  # type: ignore[method-assign]
        with pytest.raises(StoreUnavailableError):
            await world.broker.partitioned.delete(TOPIC)
        await client.produce_on(PART[0], 1)
        await client.publish(1, producer_id=1)


async def test_an_interrupted_deletion_is_repeated_and_nobody_gets_in_between() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await world.create_topic("split", 3)
        for index in range(3):
            await client.produce_on(PART[index], index)
            await client.publish(2, producer_id=index)
        remove = Topics.remove

        async def fails(self: Topics, name: TopicName, owned: TopicName) -> None:
            if name == TOPIC.partition(1):
                raise StoreUnavailableError("planted")
            await remove(self, name, owned)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Topics, "remove", fails)
            with pytest.raises(StoreUnavailableError):
                await world.broker.partitioned.delete(TOPIC, force=True)
            for index in (0, 2):
                with pytest.raises(ServiceNotReadyError):
                    await world.broker.topics.get(TOPIC.partition(index), may_create=True)
            for _ in (0, 2):
                await client.expect(pb.CommandCloseProducer)
            ask = pb.CommandGetTopicsOfNamespace(request_id=1, namespace="public/default")
            assert list((await client.ask(ask, pb.CommandGetTopicsOfNamespaceResponse)).topics) == []
            while "0 being deleted" not in repr(world.broker.partitioned):  # asking for it had it tried again
                await client.ping()
        await world.broker.partitioned.delete(TOPIC)  # nobody is asked again whether it is in use
        await client.expect(pb.CommandCloseProducer)
        assert await traces(world) == []
        await world.create_topic("split", 2)
        await client.produce_on(PART[1], 9)


async def test_whoever_asks_while_it_runs_waits_with_it() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await world.create_topic("split", 5)
        await client.produce_on(PART[0])
        delete = world.broker.partitioned.delete
        await asyncio.gather(*(delete(TOPIC, force=True) for _ in range(5)))
        assert await traces(world) == []
        assert repr(world.broker.partitioned) == "<PartitionedTopics 0 being deleted>"


@pytest.mark.slow
async def test_a_deletion_that_takes_long_answers_and_goes_on() -> None:
    async with BrokerWorld(request_timeout_s=1.0) as world:
        await world.create_topic("split", 2)
        remove, held = Topics.remove, asyncio.Event()

        async def slow(self: Topics, name: TopicName, owned: TopicName) -> None:
            await held.wait()
            await remove(self, name, owned)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Topics, "remove", slow)
            with pytest.raises(ServiceNotReadyError, match="still being deleted"):
                await world.broker.partitioned.delete(TOPIC)
            held.set()
            await world.broker.partitioned.delete(TOPIC)
        assert await traces(world) == []


async def test_growing_and_deleting_take_turns() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await world.create_topic("split", 1)
        await client.subscribe(PART[0], "s")
        grow, delete = world.broker.partitioned.grow(TOPIC, 4), world.broker.partitioned.delete(TOPIC, force=True)
        outcomes = await asyncio.gather(grow, delete, return_exceptions=True)
        assert outcomes[1] is None
        assert await traces(world) == []


async def test_a_plain_topic_that_looks_like_a_partition_is_left_alone() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on(PART[7])
        await topic_records(world.store).create(TOPIC, TopicRecord(partitions=2, created_at_ms=1))
        await world.broker.partitioned.delete(TOPIC)
        await client.publish(1)
        assert [trace for trace in await traces(world) if "record" in trace] == [f"record {full(PART[7])}"]
