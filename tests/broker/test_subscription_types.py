"""Failover and Key_Shared over the wire: announcements, refusals, live policies, and why nothing comes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from cepheid_broker.dispatch.effects import Idle
from cepheid_broker.protocol.connection import Connection
from cepheid_broker.topics.subscription import Subscription
from cepheid_metadata import Position
from cepheid_wire import ServerError
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.broker_world import BrokerWorld
from tests.broker.scripted_client import ScriptedClient, message, subscribe

FAILOVER = pb.CommandSubscribe.Failover
KEY_SHARED = pb.CommandSubscribe.Key_Shared
SHARED = pb.CommandSubscribe.Shared


def sticky(*ranges: tuple[int, int]) -> pb.KeySharedMeta:
    return pb.KeySharedMeta(keySharedMode=pb.STICKY, hashRanges=[pb.IntRange(start=a, end=b) for a, b in ranges])


async def expect_active(client: ScriptedClient, consumer_id: int, is_active: bool) -> None:
    change = await client.expect(pb.CommandActiveConsumerChange)
    assert (change.consumer_id, change.is_active) == (consumer_id, is_active)


async def test_consumers_of_a_failover_subscription_hear_who_is_active() -> None:
    async with BrokerWorld() as world, await world.client() as first, await world.client() as second:
        await first.subscribe("t", "s", 1, subType=FAILOVER, consumer_name="b")
        await expect_active(first, 1, True)
        await second.subscribe("t", "s", 2, subType=FAILOVER, consumer_name="c")
        await expect_active(second, 2, False)
        await first.expect_nothing(0.05)
        await second.subscribe("t", "s", 3, subType=FAILOVER, consumer_name="a")
        await expect_active(first, 1, False)
        await expect_active(second, 2, False)
        await expect_active(second, 3, True)
        second.abort()
        await expect_active(first, 1, True)


async def test_nobody_is_deposed_for_a_consumer_whose_connection_breaks_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed 0x152cf3df7: the active consumer was told so once more, and got everything again."""
    async with BrokerWorld() as world, await world.client() as first, await world.client() as second:
        await first.produce_on("t")
        await first.subscribe("t", "s", 1, permits=10, subType=FAILOVER, consumer_name="b")
        await expect_active(first, 1, True)
        await first.publish(1)
        await first.expect_messages(1)
        asked = asyncio.Event()

        async def break_meanwhile(self: Subscription, kind: int, peer: Connection, sharing: object) -> None:
            peer._transport.abort()
            asked.set()

        monkeypatch.setattr(Subscription, "wait_until_free", break_meanwhile)
        second.send(subscribe("t", "s", 1, 99, subType=FAILOVER, consumer_name="a"))
        await asked.wait()
        await first.expect_nothing(0.05)
        assert [consumer.name for consumer in world.topic("t").subscriptions["s"].consumers.values()] == ["b"]


async def test_old_clients_are_not_told_of_active_consumers() -> None:
    async with BrokerWorld() as world, await world.client(handshake=False) as old:
        await old.ask(pb.CommandConnect(client_version="old", protocol_version=11), pb.CommandConnected)
        await old.subscribe("t", "s", 1, subType=FAILOVER)
        await old.expect_nothing(0.1)


async def refusal(client: ScriptedClient, **fields: Any) -> pb.CommandError:
    return await client.ask(subscribe("t", "s", 9, 99, subType=KEY_SHARED, **fields), pb.CommandError)


async def test_hash_ranges_that_overlap_are_refused_and_a_dead_holder_is_not_in_the_way() -> None:
    async with BrokerWorld(connection={"liveness_probe_s": 0.05}) as world, await world.client() as client:
        async with await world.client() as holder:
            await holder.subscribe("t", "s", 1, subType=KEY_SHARED, consumer_name="h", keySharedMeta=sticky((0, 99)))
            error = await refusal(holder, keySharedMeta=sticky((50, 150)))
            assert error.error == ServerError.CONSUMER_ASSIGN_ERROR
            assert "50..150 overlaps 0..99 of consumer 'h'" in error.message
            error = await refusal(holder, keySharedMeta=sticky((7, 3)))
            assert error.error == ServerError.CONSUMER_ASSIGN_ERROR
            assert "7..3" in error.message
            error = await refusal(holder)
            assert (error.error, "auto-split" in error.message) == (ServerError.CONSUMER_ASSIGN_ERROR, True)
            # From now on it reads nothing, and answers no PING: as after a crash of which nobody heard.
            await client.subscribe("t", "s", 2, subType=KEY_SHARED, keySharedMeta=sticky((50, 150)))


async def test_why_names_the_consumer_and_the_message_that_a_key_waits_for() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.subscribe("t", "s", 1, subType=KEY_SHARED, consumer_name="old", permits=100)
        for sequence_id in range(40):
            client.send_message(sequence_id, tail=message(sequence_id, partition_key=f"key-{sequence_id % 20}"))
        received = [await client.receive() for _ in range(80)]
        places = [r.position for r in received if r is not None and isinstance(r.body, pb.CommandMessage)]
        assert len(places) == 40
        await client.subscribe("t", "s", 2, subType=KEY_SHARED, consumer_name="new", permits=100)
        for sequence_id in range(40, 60):
            client.send_message(sequence_id, tail=message(sequence_id, partition_key=f"key-{sequence_id % 20}"))
        for _ in range(20):
            await client.receive()
        (topic,) = world.broker.topics.loaded()
        subscription = topic.subscriptions["s"]
        reasons = [why for why in subscription.why() if why.idle is Idle.KEY_DRAINING]
        assert reasons, "about half of the keys moved"
        for why in reasons:
            assert why.consumer == "old"
            assert why.key is not None
            assert why.key.startswith("'key-")
            index = int(why.key.split("'")[1].removeprefix("key-"))
            assert why.position == Position(*places[index]), "the oldest message of that key"
            assert "acknowledges" in why.until


async def test_a_change_of_the_limit_of_unacknowledged_messages_is_in_force_at_once() -> None:
    async with BrokerWorld() as world, await world.client() as publisher, await world.client() as client:
        await publisher.produce_on("t")
        await publisher.publish(20)
        await client.subscribe("t", "s", 1, subType=SHARED)
        (topic,) = world.broker.topics.loaded()
        topic.on_policies(replace(topic.policies, max_unacked_per_subscription=1))
        client.send(pb.CommandFlow(consumer_id=1, messagePermits=5))
        await client.expect_messages(5)  # the limit is soft by one group
        client.send(pb.CommandFlow(consumer_id=1, messagePermits=5))
        await client.expect_nothing(0.1)
        (why,) = topic.subscriptions["s"].why()
        assert (why.idle, "the limit is 1" in why.details) == (Idle.SUBSCRIPTION_UNACKED, True)
        topic.on_policies(replace(topic.policies, max_unacked_per_subscription=0))
        await client.expect_messages(5)
