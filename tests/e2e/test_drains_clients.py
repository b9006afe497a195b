"""The official client while brokers are drained and restarted: no error, nothing twice without deduplication, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import pulsar
import pytest

from tests.broker.brokers_world import BrokersWorld, OneBroker
from tests.broker.scripted_client import full
from tests.e2e.official_client import EARLIEST, TIMEOUT_MS, client_of
from tests.support import wait_until

COUNT = 2000
TOPICS = 6


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a step takes is not the subject: a busy machine must not turn a hand-over into a plain unload."""
    for limit in ("PREPARE_LIMIT_S", "OPEN_LIMIT_S", "TAKE_LIMIT_S"):
        monkeypatch.setattr(f"cepheid_broker.ownership.hand_over.{limit}", 20.0)
    monkeypatch.setattr("cepheid_broker.topics.topics.OPEN_LIMIT_S", 20.0)


class Load:
    """Producers and Shared consumers on some topics, until `COUNT` messages each are sent and received."""

    def __init__(self, world: BrokersWorld) -> None:
        self.url = "pulsar://" + ",".join(f"127.0.0.1:{broker.port}" for broker in world.brokers)
        self.results: list[object] = []
        self.received: dict[int, list[int]] = {index: [] for index in range(TOPICS)}

    @property
    def share(self) -> float:
        return len(self.results) / (COUNT * TOPICS)

    def produce(self) -> None:
        with client_of(self.url) as client:
            producers = [
                client.create_producer(full(f"t-{index}"), block_if_queue_full=True, max_pending_messages=20)
                for index in range(TOPICS)
            ]
            for number in range(COUNT):
                for producer in producers:
                    producer.send_async(b"%d" % number, lambda result, _: self.results.append(result))
            for producer in producers:
                producer.flush()

    def consume(self, index: int) -> None:
        found = self.received[index]
        with client_of(self.url) as client:
            consumer = client.subscribe(
                full(f"t-{index}"), "s", consumer_type=pulsar.ConsumerType.Exclusive, initial_position=EARLIEST
            )
            try:
                while True:
                    message = consumer.receive(TIMEOUT_MS if len(set(found)) < COUNT else 500)
                    consumer.acknowledge_cumulative(message)
                    found.append(int(message.data()))
            except pulsar.Timeout:
                return

    async def run_while(self, disturb: Callable[[], Awaitable[None]]) -> None:
        # The loop's own threads are too few on a machine with few processors, and consumers wait in theirs.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(4 * TOPICS))
        consuming = [asyncio.ensure_future(asyncio.to_thread(self.consume, index)) for index in range(TOPICS)]
        producing = asyncio.ensure_future(asyncio.to_thread(self.produce))
        await wait_until(lambda: self.share > 0.05 or producing.done(), timeout_s=120)
        await disturb()
        assert not producing.done(), "it was over before the last of it"
        await asyncio.gather(producing, *consuming)
        assert self.results == [pulsar.Result.Ok] * COUNT * TOPICS
        for found in self.received.values():
            assert first_times(found) == list(range(COUNT)), "in order, and nothing is missing"


def first_times(numbers: list[int]) -> list[int]:
    """Each number where it came first: what was received and not acknowledged when its topic moved comes again."""
    return list(dict.fromkeys(numbers))


async def stored(world: BrokersWorld) -> list[int]:
    """Messages of each topic, as a new subscription gets them: entries are batches of the client's choice."""

    def count(url: str, index: int) -> int:
        found = 0
        with client_of(url) as client:
            consumer = client.subscribe(full(f"t-{index}"), "again", initial_position=EARLIEST)
            try:
                while True:
                    consumer.receive(TIMEOUT_MS if found < COUNT else 500)
                    found += 1
            except pulsar.Timeout:
                return found

    url = world.brokers[-1].service_url
    return list(await asyncio.gather(*(asyncio.to_thread(count, url, index) for index in range(TOPICS))))


async def drained(broker: OneBroker) -> None:
    broker.ownership.drain()
    await wait_until(lambda: not broker.ownership.bundles_held, timeout_s=120)


@pytest.mark.slow
async def test_brokers_that_are_drained_one_after_the_other_while_clients_publish() -> None:
    async with BrokersWorld(2, admin=True) as world:
        load = Load(world)

        async def drain_both() -> None:
            for broker in world.brokers:
                await drained(broker)
                broker.ownership.undrain()
                await wait_until(lambda: not any(b.ownership.directory.draining for b in world.brokers))

        await load.run_while(drain_both)
        assert await stored(world) == [COUNT] * TOPICS, "nothing twice, without deduplication"


@pytest.mark.slow
async def test_a_rolling_restart_of_all_brokers_while_clients_publish() -> None:
    async with BrokersWorld(3, admin=True) as world:
        load = Load(world)

        async def restart_all() -> None:
            for index, broker in enumerate(list(world.brokers)):
                port = broker.port
                await broker.stop()
                restarted = world.brokers[index] = OneBroker(world, broker.id)
                world._opened.push_async_callback(restarted.stop)
                await restarted.start(port)
                await wait_until(lambda: all(len(other.ownership.directory.brokers) == 3 for other in world.brokers))

        await load.run_while(restart_all)
        assert await stored(world) == [COUNT] * TOPICS, "nothing twice, without deduplication"
