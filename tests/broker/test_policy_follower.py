"""Policies of open topics: a change of a record is in force at once, whoever wrote it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from cepheid_managed_ledger import Retention
from cepheid_metadata import (
    MemoryStore,
    PersistencePolicy,
    RetentionPolicy,
    namespace_records,
    topic_records,
)
from cepheid_wire import TopicName
from tests.broker.broker_world import BrokerWorld
from tests.support import wait_until

PLAIN = "persistent://public/default/plain"
PARTITIONED = "persistent://public/default/split"


async def within_a_second(condition: Callable[[], bool]) -> None:
    """What is promised, on a machine that runs: a second in small steps, however long one of them is held up."""
    for _ in range(100):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("it did not hold within a second")


async def change_namespace(store: MemoryStore, **changes: object) -> None:
    found = await namespace_records(store).get(("public", "default"))
    assert found is not None
    await namespace_records(store).replace(("public", "default"), found.record.replace(**changes), found.version)


async def change_topic(store: MemoryStore, name: str, **changes: object) -> None:
    found = await topic_records(store).get(TopicName.parse(name))
    assert found is not None
    await topic_records(store).replace(TopicName.parse(name), found.record.replace(**changes), found.version)


async def open_topics(world: BrokerWorld) -> None:
    await world.create_topic(PLAIN)
    await world.create_topic(PARTITIONED, partitions=2)
    for name in (PLAIN, f"{PARTITIONED}-partition-0", f"{PARTITIONED}-partition-1"):
        await world.broker.topics.get(TopicName.parse(name), may_create=False)


async def test_a_namespace_changes_all_its_topics_and_a_topic_only_itself() -> None:
    async with BrokerWorld() as world:
        await open_topics(world)
        plain, split = world.topic(PLAIN), world.topic(f"{PARTITIONED}-partition-1")
        other = world.topic(f"{PARTITIONED}-partition-0")
        await change_namespace(world.store, message_ttl_s=60, max_producers=5)
        await within_a_second(lambda: {topic.policies.message_ttl_s for topic in (plain, split, other)} == {60})
        await change_topic(world.store, PLAIN, message_ttl_s=7)
        await within_a_second(lambda: plain.policies.message_ttl_s == 7)
        assert (plain.policies.max_producers, split.policies.message_ttl_s) == (5, 60)
        await change_topic(world.store, PARTITIONED, max_producers=2)
        await within_a_second(lambda: split.policies.max_producers == other.policies.max_producers == 2)
        assert plain.policies.max_producers == 5
        await change_topic(world.store, PLAIN, message_ttl_s=None)
        await within_a_second(lambda: plain.policies.message_ttl_s == 60)
        assert plain.policies == await world.broker.catalog.policies(plain.name)
        assert split.policies == await world.broker.catalog.policies(split.name)


async def test_what_another_broker_wrote_is_in_force_too() -> None:
    async with BrokerWorld() as world:
        await open_topics(world)
        other = MemoryStore(world.tree)
        await change_namespace(other, max_consumers=3)
        await within_a_second(lambda: world.topic(PLAIN).policies.max_consumers == 3)
        await other.aclose()


async def test_a_topic_is_opened_with_what_holds() -> None:
    async with BrokerWorld() as world:
        await change_namespace(world.store, deduplication=True)
        await world.create_topic(PLAIN)
        await change_topic(world.store, PLAIN, retention=RetentionPolicy(time_limit_min=1, size_limit_mb=2))
        topic = await world.broker.topics.get(TopicName.parse(PLAIN), may_create=False)
        assert topic.policies.deduplication
        assert topic.ledger.config.retention == topic.policies.retention == Retention(60_000, 2 << 20)


async def test_the_ledger_of_an_open_topic_hears_of_retention_and_quorums() -> None:
    async with BrokerWorld() as world:
        await open_topics(world)
        topic = world.topic(PLAIN)
        await change_namespace(
            world.store,
            retention=RetentionPolicy(time_limit_min=-1, size_limit_mb=-1),
            persistence=PersistencePolicy(ensemble_size=3, write_quorum=3, ack_quorum=2),
        )
        await within_a_second(lambda: topic.ledger.config.retention == Retention(-1, -1))
        config = topic.ledger.config
        assert (config.ensemble_size, config.write_quorum, config.ack_quorum) == (3, 3, 2)


@pytest.mark.parametrize("end", ["unload", "delete", "fail"])
async def test_a_closed_topic_holds_no_watch(end: str) -> None:
    async with BrokerWorld() as world:
        await world.create_topic(PLAIN)
        name = TopicName.parse(PLAIN)
        await world.broker.topics.get(name, may_create=False)
        assert world.broker.policies.watches == 2
        match end:
            case "unload":
                await world.broker.topics.unload(name)
            case "delete":
                await world.broker.topics.delete(name)
            case _:
                await world.fence(PLAIN)
                topic = world.topic(PLAIN)
                topic.publish([b"x"], lambda *_: None)
                await wait_until(lambda: topic.closed)
        assert world.broker.policies.watches == 0
        if end != "delete":
            await change_namespace(world.store, max_consumers=3)
            topic = await world.broker.topics.get(name, may_create=False)
            assert topic.policies.max_consumers == 3


async def test_a_topic_that_cannot_be_opened_holds_no_watch() -> None:
    async with BrokerWorld() as world:
        await world.create_topic(PLAIN)
        world.refuse_opening_topics(True)
        with pytest.raises(Exception, match="planted"):
            await world.broker.topics.get(TopicName.parse(PLAIN), may_create=False)
        assert world.broker.policies.watches == 0
        world.refuse_opening_topics(False)
        await world.broker.topics.get(TopicName.parse(PLAIN), may_create=False)
        assert world.broker.policies.watches == 2


async def test_all_partitions_share_two_watches() -> None:
    async with BrokerWorld() as world:
        await world.create_topic(PARTITIONED, partitions=50)
        names = [TopicName.parse(f"{PARTITIONED}-partition-{index}") for index in range(50)]
        topics = await asyncio.gather(*(world.broker.topics.get(name, may_create=False) for name in names))
        assert world.broker.policies.watches == 2
        await change_namespace(world.store, max_subscriptions=9)
        await within_a_second(lambda: all(topic.policies.max_subscriptions == 9 for topic in topics))


async def test_a_partition_named_topic_of_its_own_has_its_own_policies() -> None:
    async with BrokerWorld() as world:
        name = f"{PLAIN}-partition-7"
        await world.create_topic(name)
        topic = await world.broker.topics.get(TopicName.parse(name), may_create=False)
        await change_topic(world.store, name, max_producers=1)
        await within_a_second(lambda: topic.policies.max_producers == 1)


async def test_namespaces_that_are_being_deleted_open_no_topics() -> None:
    async with BrokerWorld() as world:
        await world.create_topic(PLAIN)
        await change_namespace(world.store, deleted=True)
        with pytest.raises(Exception, match="does not exist"):
            await world.broker.topics.get(TopicName.parse(PLAIN), may_create=False)
        assert world.broker.policies.watches == 0
