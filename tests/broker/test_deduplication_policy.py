"""Deduplication as a policy that comes and goes, and the cursor that keeps its snapshots."""

from __future__ import annotations

import asyncio

import pytest

from cepheid_broker.policies.topic_policies import TopicPolicies
from cepheid_broker.publishing.topic_deduplication import DEDUP_CURSOR
from cepheid_broker.topics.persistent_topic import PersistentTopic
from cepheid_metadata import EARLIEST
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.broker_world import BrokerWorld
from tests.broker.deduplicated_world import NAME, REPEATED, TOPIC, connect, deduplicating, deduplication, publish, stored
from tests.support import wait_until

ON = TopicPolicies(deduplication=True, dedup_snapshot_entries=10)


async def test_the_policy_may_change_while_producers_are_connected() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await connect(client)
        await publish(client, 0, 1, 2)
        topic = world.topic("t")
        topic.on_policies(ON)
        await wait_until(lambda: deduplication(world).active)
        assert REPEATED not in await publish(client, 3, 4)
        assert await publish(client, 4) == [REPEATED]
        topic.on_policies(TopicPolicies())
        await wait_until(lambda: not deduplication(world).active)
        assert DEDUP_CURSOR not in topic.ledger.cursors
        assert REPEATED not in await publish(client, 4, 0, 1)
        # Back on: what is known from before would call 2, 3 and 4 duplicates, and they would be lost.
        topic.on_policies(ON)
        await wait_until(lambda: deduplication(world).active)
        assert REPEATED not in await publish(client, 2, 3, 4)
        assert await publish(client, 3) == [REPEATED]


async def test_a_policy_that_flips_faster_than_the_store_ends_as_it_says_last() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await connect(client)
        topic = world.topic("t")
        for policies in (ON, TopicPolicies(), ON, TopicPolicies(), ON):
            topic.on_policies(policies)
            await asyncio.sleep(0)
        await wait_until(lambda: deduplication(world).active and deduplication(world)._switching is None)
        assert DEDUP_CURSOR in topic.ledger.cursors


async def test_a_cursor_from_before_is_deleted_when_the_topic_opens_without_the_policy() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await connect(client)
        await publish(client, 0)
        ledger = world.topic("t").ledger
        cursor = await ledger.create_cursor(DEDUP_CURSOR, ledger.last_confirmed)
        cursor.set_sequence_ids({NAME: 100})
        await cursor.saved()
        await world.broker.topics.unload(TOPIC)
        await client.expect(pb.CommandCloseProducer)
        assert await connect(client, epoch=1) == -1
        assert DEDUP_CURSOR not in world.topic("t").ledger.cursors


async def test_the_internal_cursor_is_nobody_elses() -> None:
    async with deduplicating() as (world, client):
        await connect(client)
        await publish(client, 0)
        topic = world.topic("t")
        assert isinstance(topic, PersistentTopic)
        assert list(topic.subscriptions) == []
        await client.subscribe("t", "mine")
        await world.broker.topics.unload(TOPIC)
        topic = await world.broker.topics.get(TOPIC, may_create=False)
        assert list(topic.subscriptions) == ["mine"]
        with pytest.raises(Exception, match="used by the broker itself"):
            await topic.create_subscription(DEDUP_CURSOR, EARLIEST)


async def test_snapshots_come_after_so_many_entries_and_after_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async with deduplicating() as (world, client):
        await connect(client)
        cursor = world.topic("t").ledger.cursors[DEDUP_CURSOR]
        await publish(client, *range(9))
        assert cursor.sequence_ids == {}
        await publish(client, 9)
        assert cursor.sequence_ids == {NAME: 9}
        assert cursor.mark_delete.entry_id == 9
        await publish(client, 10)
        assert cursor.sequence_ids == {NAME: 9}
        found = deduplication(world)
        found.on_tick()
        assert cursor.sequence_ids == {NAME: 9}
        monkeypatch.setattr(found, "_now", lambda: asyncio.get_running_loop().time() + 121)
        found.on_tick()
        assert cursor.sequence_ids == {NAME: 10}


@pytest.mark.parametrize("how", ["trim", "truncate"])
async def test_its_cursor_keeps_nothing_that_is_to_go(how: str) -> None:
    async with BrokerWorld(policies={"deduplication": True}) as world, await world.client() as client:
        await client.subscribe("t", "s")
        await connect(client)
        await publish(client, 0, 1, 2)
        topic = world.topic("t")
        if how == "trim":
            await topic.subscriptions["s"].clear_backlog()
            await topic.ledger.truncate()  # the ledger is not the last one any more
            await topic.trim()
        else:
            await topic.truncate()
        assert await stored(world) == []
        assert await publish(client, 2) == [REPEATED]
