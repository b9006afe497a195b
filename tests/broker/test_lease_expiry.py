"""Leases end when their time is over and nobody renews them; a clock that jumps takes none from a holder that lives."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from cepheid_broker.lease_expiry import LEASE_PROPERTY, LeaseExpiry
from cepheid_broker.managed_ledger import ManagedLedgerSettings
from cepheid_broker.persistent_topic import PersistentTopic
from cepheid_broker.position import EARLIEST
from cepheid_wire import TopicName
from tests.broker.broker_world import BrokerWorld
from tests.support import run_async, wait_until

NAME = "persistent://public/default/t"
FAR_MS = 3600_000


class Bench:
    """A topic with one subscription; looks at the times that a test says."""

    def __init__(self, world: BrokerWorld, topic: PersistentTopic, silence_s: float) -> None:
        self.world = world
        self.topic = topic
        self.expiry = LeaseExpiry(world.broker.topics.loaded, world.broker._tasks, 1000.0, silence_s)

    async def lease(self, name: str, expires_in_ms: int | str) -> None:
        text = expires_in_ms if isinstance(expires_in_ms, str) else str(self.topic.ledger.steady_ms() + expires_in_ms)
        await self.topic.create_subscription(name, EARLIEST, properties={LEASE_PROPERTY: text, "else": "x"})

    async def renew(self, name: str, expires_in_ms: int) -> None:
        await self.topic.set_subscription_properties(name, {LEASE_PROPERTY: str(self.topic.ledger.steady_ms() + expires_in_ms)})

    async def look(self) -> list[str]:
        await self.expiry.check()
        return sorted(self.topic.subscriptions)


def run(test: Callable[[Bench], Awaitable[None]], silence_s: float = 0.02) -> None:
    async def main() -> None:
        async with BrokerWorld() as world:
            topic = await world.broker.topics.get(TopicName.parse(NAME), may_create=True)
            assert isinstance(topic, PersistentTopic)
            await test(Bench(world, topic, silence_s))

    run_async(main())


async def looks_until_gone(bench: Bench, name: str) -> None:
    deadline = asyncio.get_running_loop().time() + 10
    while name in await bench.look():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.005)


def test_a_lease_whose_time_is_over_goes_and_others_stay() -> None:
    async def test(bench: Bench) -> None:
        await bench.lease("over", -1)
        await bench.lease("held", FAR_MS)
        await bench.lease("misspelt", "soon")
        await bench.topic.create_subscription("plain", EARLIEST)
        assert await bench.look() == ["held", "misspelt", "over", "plain"], "not at the first sight"
        await looks_until_gone(bench, "over")
        assert await bench.look() == ["held", "misspelt", "plain"]
        assert (bench.expiry.expired, bench.expiry.leases) == (1, 1)

    run(test)


def test_a_renewal_is_a_sign_of_life_even_when_by_the_brokers_clock_it_is_over() -> None:
    """The broker was started with a clock of the far future: every lease looks expired."""

    async def test(bench: Bench) -> None:
        await bench.lease("s", -FAR_MS)
        loop = asyncio.get_running_loop()
        end = loop.time() + 1.0
        renewals = 0
        while loop.time() < end:
            renewals += 1
            await bench.renew("s", -FAR_MS + renewals)
            assert await bench.look() == ["s"]
            await asyncio.sleep(0.005)
        assert renewals > 3

    run(test, silence_s=0.5)


def test_a_wall_clock_that_jumps_ahead_ends_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(bench: Bench) -> None:
        await bench.lease("s", 600_000)
        ports = bench.world.broker.ports
        was = ports.wall_ms
        monkeypatch.setattr(bench.topic.ledger._clock, "_wall_ms", lambda: was() + 10 * FAR_MS)
        await bench.look()
        await asyncio.sleep(0.05)
        assert await bench.look() == ["s"]

    run(test)


def test_a_lease_with_a_consumer_or_within_a_seek_stays() -> None:
    async def test(bench: Bench) -> None:
        await bench.lease("s", -1)
        await bench.look()
        await asyncio.sleep(0.05)
        bench.topic.subscriptions["s"].begin_seek()
        assert await bench.look() == ["s"]
        bench.topic.subscriptions["s"].end_seek()
        client = await bench.world.client()
        await client.subscribe(NAME, "s")
        assert await bench.look() == ["s"]
        await client.close()
        await wait_until(lambda: not bench.topic.subscriptions["s"].consumers)
        await looks_until_gone(bench, "s")

    run(test)


def test_a_consumer_that_is_away_for_a_moment_finds_its_lease() -> None:
    """A broker's restart, a network's hiccup: else it would find a new subscription at the end of the topic."""

    async def test(bench: Bench) -> None:
        await bench.lease("s", -1)
        client = await bench.world.client()
        await client.subscribe(NAME, "s")
        await bench.look()
        await asyncio.sleep(0.4)
        assert await bench.look() == ["s"]
        await client.close()
        await wait_until(lambda: not bench.topic.subscriptions["s"].consumers)
        assert await bench.look() == ["s"]
        await looks_until_gone(bench, "s")

    run(test, silence_s=0.3)


def test_a_reader_of_that_name_and_one_made_anew_are_not_taken_for_the_lease() -> None:
    async def test(bench: Bench) -> None:
        await bench.lease("s", -1)
        await bench.look()
        await asyncio.sleep(0.05)
        async with bench.topic._changing:  # somebody changes subscriptions just now
            look = asyncio.ensure_future(bench.look())
            await asyncio.sleep(0.01)
            found = bench.topic.subscriptions["s"]
            found.close("by somebody else")
            del bench.topic.subscriptions["s"]
            await bench.topic._delete_cursor("s", found.cursor)
            cursor = await bench.topic.ledger.create_cursor(
                "s", bench.topic.ledger.last_confirmed, properties=found.cursor.properties
            )
            assert bench.topic.subscriptions["s"].cursor is cursor
        assert await look == ["s"], "the new one has the same property, and its own time of silence"
        await looks_until_gone(bench, "s")

    run(test)


def test_a_renewal_at_the_last_moment_saves_the_lease() -> None:
    """Between the look that finds it over and the step that deletes."""

    async def test(bench: Bench) -> None:
        await bench.lease("s", -1)
        await bench.look()
        await asyncio.sleep(0.05)
        async with bench.topic._changing:  # somebody changes subscriptions just now
            look = asyncio.ensure_future(bench.look())
            await asyncio.sleep(0.01)
            await bench.renew("s", FAR_MS)
        assert await look == ["s"]
        assert bench.expiry.expired == 0

    run(test)


def test_the_broker_looks_by_itself_and_shows_what_it_did() -> None:
    async def main() -> None:
        async with BrokerWorld(lease_check_s=0.01, lease_silence_s=0.02, rate_window_s=0.01) as world:
            topic = await world.broker.topics.get(TopicName.parse(NAME), may_create=True)
            await topic.create_subscription("s", EARLIEST, properties={LEASE_PROPERTY: "1"})
            await wait_until(lambda: not topic.subscriptions)
            await wait_until(lambda: world.broker.leases.expired == 1)

    run_async(main())


def test_what_an_expired_lease_held_is_trimmed() -> None:
    async def main() -> None:
        ledgers = ManagedLedgerSettings(ledger_max_entries=2, ledger_min_age_s=0)
        async with BrokerWorld(ledgers=ledgers, lease_check_s=0.01, lease_silence_s=0.3, rate_window_s=0.01) as world:
            topic = await world.broker.topics.get(TopicName.parse(NAME), may_create=True)
            assert isinstance(topic, PersistentTopic)
            now_ms = topic.ledger.steady_ms()
            await topic.create_subscription("spark", EARLIEST, properties={LEASE_PROPERTY: str(now_ms + FAR_MS)})
            async with await world.client() as client:
                await client.produce_on(NAME)
                for number in range(9):
                    await client.publish(1, first_sequence_id=number)
            topic.ledger.tick()
            held = len(topic.ledger.chain.ledgers)
            assert held >= 4, "the lease holds all that was published"
            await topic.set_subscription_properties("spark", {LEASE_PROPERTY: str(now_ms - 1)})
            await wait_until(lambda: not topic.subscriptions)
            topic.ledger.tick()
            await wait_until(lambda: len(topic.ledger.chain.ledgers) <= 2)

    run_async(main())
