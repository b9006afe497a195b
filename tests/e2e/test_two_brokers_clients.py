"""The official client and two brokers: it is sent to the right one, and follows when topics move, whatever makes them move."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pulsar
import pytest

from cepheid_wire import TopicName
from tests.broker.brokers_world import BrokersWorld, OneBroker
from tests.broker.scripted_client import full
from tests.e2e.official_client import EARLIEST, TIMEOUT_MS, client_of, publish, receive
from tests.support import wait_until

COUNT = 3000


def service_url(world: BrokersWorld) -> str:
    return "pulsar://" + ",".join(f"127.0.0.1:{broker.port}" for broker in world.brokers)


async def test_partitions_at_both_brokers_are_one_topic() -> None:
    async with BrokersWorld() as world:
        await world.brokers[0].broker.catalog.create(TopicName.parse(full("p")), 8)
        payloads = [b"%d" % number for number in range(80)]

        def use() -> list[bytes]:
            with client_of(service_url(world)) as client:
                consumer = client.subscribe(full("p"), "s", initial_position=EARLIEST)
                publish(client, full("p"), payloads)
                return [message.data() for message in receive(consumer, len(payloads))]

        assert sorted(await asyncio.to_thread(use)) == sorted(payloads)
        for broker in world.brokers:
            assert any(broker.has_open(f"p-partition-{index}") for index in range(8)), "each serves some"


async def test_any_single_broker_is_enough_to_find_everything() -> None:
    async with BrokersWorld() as world:
        topics = [await world.topic_on(broker) for broker in world.brokers]

        def use(url: str, topic: str) -> bytes:
            with client_of(url) as client:
                consumer = client.subscribe(full(topic), f"s-{url[-5:]}", initial_position=EARLIEST)
                publish(client, full(topic), [url.encode()])
                return bytes(receive(consumer, 1)[0].data())

        for broker in world.brokers:
            for topic in topics:
                assert await asyncio.to_thread(use, broker.service_url, topic)


@pytest.mark.slow
async def test_lookups_over_http_follow_to_the_owner() -> None:
    async with BrokersWorld(admin=True) as world:
        topics = [await world.topic_on(broker) for broker in world.brokers]

        def use(url: str, topic: str) -> bytes:
            with client_of(url) as client:
                consumer = client.subscribe(full(topic), f"s-{url[-5:]}", initial_position=EARLIEST)
                publish(client, full(topic), [url.encode()])
                return bytes(receive(consumer, 1)[0].data())

        for broker in world.brokers:
            for topic in topics:
                assert await asyncio.to_thread(use, broker.admin_url, topic)


async def published_while(
    world: BrokersWorld, topic: str, disturb: Callable[[OneBroker], Awaitable[None]], *, times: int
) -> tuple[list[object], list[int]]:
    """Results of all sends, and what a subscription from the beginning gets, while the topic's owner is disturbed."""
    results: list[object] = []

    def produce() -> None:
        with client_of(service_url(world)) as client:
            producer = client.create_producer(full(topic), block_if_queue_full=True, max_pending_messages=100)
            for number in range(COUNT):
                producer.send_async(b"%d" % number, lambda result, _: results.append(result))
            producer.flush()

    def consume() -> list[int]:
        found: list[int] = []
        with client_of(service_url(world)) as client:
            consumer = client.subscribe(full(topic), "s", initial_position=EARLIEST)
            try:
                while True:
                    message = consumer.receive(TIMEOUT_MS if len(set(found)) < COUNT else 1500)  # for one too many to come
                    consumer.acknowledge(message)
                    found.append(int(message.data()))
            except pulsar.Timeout:
                return found

    producing = asyncio.ensure_future(asyncio.to_thread(produce))
    for time in range(1, times + 1):
        await wait_until(lambda share=time: len(results) >= share * COUNT // (times + 1) or producing.done())  # type: ignore[misc]
        owner = next((broker for broker in world.brokers if broker.has_open(topic)), None)
        if owner is not None:
            await disturb(owner)
    await producing
    return results, await asyncio.to_thread(consume)


@pytest.mark.slow
async def test_unloading_its_bundle_again_and_again_while_a_client_publishes() -> None:
    async with BrokersWorld() as world:
        topic = await world.topic_on(world.brokers[0])
        owners: list[str] = []

        async def unload(owner: OneBroker) -> None:
            owners.append(owner.id)
            await owner.ownership.release(await owner.ownership.bundle_of(TopicName.parse(full(topic))))

        results, found = await published_while(world, topic, unload, times=6)
        assert results == [pulsar.Result.Ok] * COUNT
        assert found == list(range(COUNT)), "in order, nothing missing, nothing twice"
        assert set(owners) == {"broker-1", "broker-2"}, "it went to and fro"


@pytest.mark.slow
async def test_owners_that_lose_their_session_while_a_client_publishes() -> None:
    """With deduplication on: receipts that were lost with their broker are no reason to store anything twice."""
    async with BrokersWorld(policies={"deduplication": True}) as world:
        topic = await world.topic_on(world.brokers[0])

        async def expire(owner: OneBroker) -> None:
            owner.session.expire()
            other = world.other_than(owner)
            await wait_until(lambda: other.has_open(topic), what="the other broker took it over")
            owner.session.renew()
            await wait_until(lambda: len(other.ownership.directory.brokers) == 2)

        results, found = await published_while(world, topic, expire, times=3)
        assert results == [pulsar.Result.Ok] * COUNT
        assert found == list(range(COUNT)), "in order, nothing missing, nothing twice"


@pytest.mark.slow
async def test_an_owner_that_sleeps_beyond_its_session_while_a_client_publishes() -> None:
    """It goes on believing, and takes what the client sends; not one of these is confirmed (scenario 26)."""
    async with BrokersWorld(policies={"deduplication": True}) as world:
        topic = await world.topic_on(world.brokers[0])

        async def sleep(owner: OneBroker) -> None:
            owner.session.sleep()
            other = world.other_than(owner)
            await wait_until(lambda: list(other.ownership.directory.brokers) == [other.id])
            await other.broker.topics.get(TopicName.parse(full(topic)), may_create=False)  # fences the one that sleeps
            owner.session.wake()
            owner.session.renew()
            await wait_until(lambda: len(other.ownership.directory.brokers) == 2)

        results, found = await published_while(world, topic, sleep, times=2)
        assert results == [pulsar.Result.Ok] * COUNT
        assert found == list(range(COUNT)), "in order, nothing missing, nothing twice"


@pytest.mark.slow
async def test_a_broker_that_stops_while_a_client_publishes() -> None:
    async with BrokersWorld() as world:
        topic = await world.topic_on(world.brokers[0])

        async def stop(owner: OneBroker) -> None:
            await owner.stop()

        results, found = await published_while(world, topic, stop, times=1)
        assert results == [pulsar.Result.Ok] * COUNT
        assert found == list(range(COUNT)), "in order, nothing missing, nothing twice"
