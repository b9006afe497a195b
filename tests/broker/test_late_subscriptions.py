"""The metadata store is away while a subscription is created, deleted or reset: the client is told so, and it is done later."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from cepheid_broker.topics.persistent_topic import PersistentTopic
from cepheid_managed_ledger import ManagedLedgerSettings
from cepheid_metadata import EARLIEST, Op, OpResult, StoreUnavailableError
from cepheid_wire import TopicName
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.broker_world import BrokerWorld
from tests.broker.scripted_client import ident
from tests.support import wait_until

IMPATIENT = ManagedLedgerSettings(metadata_timeout_s=0.5)


async def open_topic(world: BrokerWorld) -> PersistentTopic:
    topic = await world.broker.topics.get(TopicName.parse("t"), may_create=True)
    assert isinstance(topic, PersistentTopic)
    return topic


def hold_writes(world: BrokerWorld) -> asyncio.Event:
    """Nothing is written until it is set."""
    back, multi = asyncio.Event(), world.store.multi

    async def later(ops: Sequence[Op]) -> list[OpResult]:
        await back.wait()
        return await multi(ops)

    world.store.multi = later  # type: ignore[method-assign]
    return back


@pytest.mark.parametrize("retried", ["meanwhile", "later", "never"])
async def test_a_subscription_that_is_created_late_is_there(retried: str) -> None:
    async with BrokerWorld(ledgers=IMPATIENT) as world:
        topic = await open_topic(world)
        back = hold_writes(world)
        with pytest.raises(StoreUnavailableError):
            await topic.create_subscription("sub", EARLIEST)
        again = None
        if retried == "meanwhile":
            again = asyncio.ensure_future(topic.create_subscription("sub", EARLIEST))
            await asyncio.sleep(0.01)
        back.set()
        await wait_until(lambda: "sub" in topic.ledger.cursors)
        if retried == "later":
            again = asyncio.ensure_future(topic.create_subscription("sub", EARLIEST))
        found = topic.subscriptions["sub"] if again is None else await again
        assert found.cursor is topic.ledger.cursors["sub"]
        assert list(topic.subscriptions) == ["sub"]
        await topic.delete_subscription("sub")
        assert not topic.ledger.cursors


@pytest.mark.parametrize("retried", ["meanwhile", "later", "never"])
async def test_a_subscription_that_is_deleted_late_is_gone(retried: str) -> None:
    async with BrokerWorld(ledgers=IMPATIENT) as world:
        topic = await open_topic(world)
        await topic.create_subscription("sub", EARLIEST)
        back = hold_writes(world)
        with pytest.raises(StoreUnavailableError):
            await topic.delete_subscription("sub")
        assert "sub" in topic.subscriptions, "nobody knows yet"
        again = None
        if retried == "meanwhile":
            again = asyncio.ensure_future(topic.delete_subscription("sub"))
            await asyncio.sleep(0.01)
        back.set()
        await wait_until(lambda: not topic.ledger.cursors)
        if retried == "later":
            again = asyncio.ensure_future(topic.delete_subscription("sub"))
        if again is not None:
            await again
        assert not topic.subscriptions
        new = await topic.create_subscription("sub", EARLIEST)
        assert new.cursor is topic.ledger.cursors["sub"]


async def test_consumers_of_a_subscription_that_is_reset_late_get_what_is_owed_from_there() -> None:
    """Who asked was told that it takes too long, and consumers came again meanwhile."""
    async with BrokerWorld(ledgers=IMPATIENT) as world, await world.client() as client:
        await client.produce_on("t")
        await client.publish(3)
        await client.subscribe("t", "sub", permits=10)
        first = (await client.expect_messages(3))[0].position
        await client.acknowledge_saved(first, cumulative=True)
        back = hold_writes(world)
        seek = pb.CommandSeek(consumer_id=0, request_id=client.request_id(), message_id=ident(first))
        client.send(seek)
        await client.expect(pb.CommandCloseConsumer)
        await client.expect(pb.CommandError)
        await client.subscribe("t", "sub", 1, permits=10)
        assert [got.position[1] for got in await client.expect_messages(2)] == [1, 2], "nobody knows yet"
        back.set()
        assert (await client.expect(pb.CommandCloseConsumer)).consumer_id == 1
        await client.subscribe("t", "sub", 2, permits=10)
        assert [got.position[1] for got in await client.expect_messages(3)] == [0, 1, 2]
