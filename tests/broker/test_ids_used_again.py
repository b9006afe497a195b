"""Clients that use an id again before the command before it has ended: each request gets one answer, and no producer or consumer
is left of which the client does not know."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from google.protobuf.message import Message

from cepheid_broker.settings import ConnectionSettings
from cepheid_wire import ServerError, TopicName
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.broker_world import BrokerWorld
from tests.broker.deduplicated_world import HeldAppends
from tests.broker.scripted_client import ScriptedClient, full, subscribe
from tests.support import wait_until

SHARED = pb.CommandSubscribe.Shared
EXCLUSIVE = pb.CommandSubscribe.Exclusive
LARGE = bytes(3_000_000)
"""A payload whose append takes so long that other commands come before its receipt."""


def producer(producer_id: int, request_id: int, topic: str = "t", **fields: Any) -> pb.CommandProducer:
    return pb.CommandProducer(topic=full(topic), producer_id=producer_id, request_id=request_id, **fields)


@asynccontextmanager
async def slow_openings(world: BrokerWorld) -> AsyncIterator[None]:
    """Meanwhile topics are found, but not yet."""
    topics, held = world.broker.topics, asyncio.Event()
    get = topics.get

    async def get_later(*args: Any, **kwargs: Any) -> Any:
        found = await get(*args, **kwargs)
        await held.wait()
        return found

    topics.get = get_later  # type: ignore[method-assign]
    try:
        yield
    finally:
        topics.get = get  # type: ignore[method-assign]
        held.set()


async def answers(client: ScriptedClient, count: int) -> dict[int, Message]:
    """By request id; what the broker says of itself is left out."""
    found: dict[int, Message] = {}
    while len(found) < count:
        received = await client.receive()
        assert received is not None
        request_id = getattr(received.body, "request_id", None)
        if request_id is not None and request_id < 1 << 63:
            assert request_id not in found, f"a second answer: {received.body}"
            found[request_id] = received.body
    return found


async def test_a_producer_closed_while_it_is_opened_and_opened_again_is_one_producer() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        async with slow_openings(world):
            client.send(producer(0, 1), pb.CommandCloseProducer(producer_id=0, request_id=2), producer(0, 3))
            assert sorted(await answers(client, 2)) == [1, 2]
            client.send(producer(0, 4))  # the first one's end must not make room for a third
            assert "is being opened" in (await client.expect(pb.CommandError)).message
            client.send(pb.CommandCloseProducer(producer_id=0, request_id=5))
            assert sorted(await answers(client, 2)) == [3, 5]
        await client.ping()
        await client.expect_nothing(0.05)
        assert not world.topic("t").producers


@pytest.mark.parametrize(
    ("ask", "close"),
    [
        (producer(0, 1), pb.CommandCloseProducer(producer_id=0, request_id=2)),
        (subscribe("t", "s", 0, 1, subType=EXCLUSIVE), pb.CommandCloseConsumer(consumer_id=0, request_id=2)),
    ],
    ids=["producer", "consumer"],
)
async def test_what_is_closed_while_it_is_opened_is_answered_too(ask: Message, close: Message) -> None:
    async with BrokerWorld() as world, await world.client() as client:
        async with slow_openings(world):
            client.send(ask)
            await client.ping()
            client.send(close)
            found = await answers(client, 2)
        assert isinstance(found[2], pb.CommandSuccess)
        assert isinstance(found[1], pb.CommandError)
        assert found[1].error == ServerError.SERVICE_NOT_READY
        assert "before it was open" in found[1].message
        await client.expect_nothing(0.05)


@pytest.mark.parametrize("again", [True, False], ids=["asked for anew", "closed"])
@pytest.mark.parametrize("mode", [pb.WaitForExclusive, pb.ExclusiveWithFencing], ids=["waiting", "saving"])
async def test_who_asks_for_exclusive_access_and_goes_is_answered(mode: Any, again: bool) -> None:
    """Told to wait, or waiting for the topic's epoch to be saved."""
    async with BrokerWorld() as world, await world.client() as client, await world.client() as holder:
        await holder.produce_on("t")
        held, ledger = asyncio.Event(), world.topic("t").ledger
        save = ledger.save_topic_epoch

        async def save_later(epoch: int) -> None:
            await held.wait()
            await save(epoch)

        world.topic("t").admission._save_epoch = save_later
        client.send(producer(0, 1, producer_access_mode=mode))
        if mode == pb.WaitForExclusive:
            assert not (await client.expect(pb.CommandProducerSuccess)).producer_ready
        else:
            await holder.expect(pb.CommandCloseProducer)
        close = pb.CommandCloseProducer(producer_id=0, request_id=2)
        client.send(producer(0, 2, epoch=1, producer_access_mode=mode) if again else close)
        error = await client.expect(pb.CommandError)
        assert (error.request_id, error.error) == (1, ServerError.SERVICE_NOT_READY)
        if again and mode == pb.WaitForExclusive:
            assert not (await client.expect(pb.CommandProducerSuccess)).producer_ready
        held.set()
        await holder.ask(pb.CommandCloseProducer(producer_id=0, request_id=9), pb.CommandSuccess)
        assert isinstance((await client.answers(2))[2], pb.CommandProducerSuccess if again else pb.CommandSuccess)
        assert len(world.topic("t").admission) == (1 if again else 0)


async def test_a_producer_opened_while_it_is_closing_comes_behind_its_predecessor() -> None:
    """Its receipts and the answer to its end first; then the new one, which is not closed with the old."""
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        client.send_message(0, LARGE)
        client.send(pb.CommandCloseProducer(producer_id=0, request_id=2), producer(0, 3))
        await client.expect(pb.CommandSendReceipt)
        assert (await client.expect(pb.CommandSuccess)).request_id == 2
        assert (await client.expect(pb.CommandProducerSuccess)).request_id == 3
        await client.publish(1, first_sequence_id=1)
        assert len(world.topic("t").producers) == 1


async def test_a_producer_that_closes_while_its_topic_is_unloaded_is_answered_and_holds_nobody_up() -> None:
    for close_first in (True, False):
        async with BrokerWorld(close_timeout_s=60) as world, await world.client() as client:
            await client.produce_on("t")
            client.send_message(0, LARGE)
            await client.drain()
            await wait_until(lambda world=world: any(p.pending_entries for p in world.topic("t").producers.values()))
            closes = [pb.CommandCloseProducer(producer_id=0, request_id=request_id) for request_id in (2, 3)]
            if close_first:
                client.send(*closes)
                producers = world.topic("t").producers  # none is left if the disk was quick
                await wait_until(lambda producers=producers: "closing" in repr(producers) or not producers)
            began = asyncio.get_running_loop().time()
            unloading = asyncio.ensure_future(world.broker.topics.unload(TopicName.parse("t")))
            if not close_first:
                await asyncio.sleep(0)
                client.send(*closes)
            assert sorted(await answers(client, 2)) == [2, 3]
            await unloading
            assert asyncio.get_running_loop().time() - began < 30, "it waited for a producer that had ended"


async def test_closes_that_wait_are_bounded() -> None:
    connection = ConnectionSettings(max_waiting_requests=10)
    async with BrokerWorld(connection=connection) as world, await world.client() as client:
        await client.produce_on("t")
        client.send_message(0, LARGE)
        client.send(*(pb.CommandCloseProducer(producer_id=0, request_id=request_id) for request_id in range(12)))
        await client.expect_closed()


@pytest.mark.parametrize(
    "ask",
    [
        pb.CommandGetLastMessageId(consumer_id=0, request_id=1),
        pb.CommandUnsubscribe(consumer_id=0, request_id=1),
        pb.CommandGetSchema(request_id=1, topic="t"),
    ],
    ids=lambda ask: type(ask).__name__,
)
async def test_requests_that_never_begin_leave_no_trace(ask: Message) -> None:
    """Above the limit, or the connection is lost in the same turn: warnings of work that nobody awaited are errors here."""
    async with BrokerWorld(connection=ConnectionSettings(max_waiting_requests=1)) as world:
        async with await world.client() as client:
            await client.subscribe("t", "s")
            client.send(ask, ask, ask)
            await client.expect_closed()
        await wait_until(lambda: world.broker.statistics().requests_running == 0)


async def test_a_consumer_id_means_one_subscription_at_a_time() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        await client.subscribe("t", "s")
        for topic, subscription in (("other", "s"), ("t", "other"), ("://", "s")):
            error = await client.ask(subscribe(topic, subscription, 0, 9, subType=EXCLUSIVE), pb.CommandError)
            assert error.error == ServerError.NOT_ALLOWED_ERROR
        assert (
            "is on subscription 's' of persistent://public/default/t"
            in (await client.ask(subscribe("t", "other", 0, 9, subType=EXCLUSIVE), pb.CommandError)).message
        )
        await client.subscribe("t", "s")  # the same again is the same
        await client.ask(pb.CommandCloseConsumer(consumer_id=0, request_id=10), pb.CommandSuccess)
        await client.subscribe("t", "other")


async def test_a_new_incarnation_of_a_producer_hears_nothing_of_what_the_old_one_had_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client sends that again: a receipt for each would be one too many (protocol.md §9.3)."""
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t", producer_name="p")
        appends = HeldAppends(monkeypatch, world.topic("t").ledger)
        client.send_message(0)
        await wait_until(lambda: bool(appends.held))
        async with slow_openings(world):
            client.send(producer(0, 100, producer_name="p", epoch=1))
            await client.ping()
            appends.let_go()
            await wait_until(lambda: world.topic("t").ledger.last_confirmed.entry_id == 0)
            await client.expect_nothing(0.05)
        assert (await client.expect(pb.CommandProducerSuccess)).request_id == 100
        client.send_message(0)
        await wait_until(lambda: bool(appends.held))
        appends.let_go()
        assert (await client.expect(pb.CommandSendReceipt)).sequence_id == 0
        await client.ping()
        await client.expect_nothing(0.05)
