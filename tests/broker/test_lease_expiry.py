"""Leases end when their time is over and nobody renews them; a clock that jumps takes none from a holder that lives.

How long nothing was heard of a lease is counted by a clock that only these tests move (`Bench.look`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from cepheid_broker.admin.broker_metrics import broker_families
from cepheid_broker.topics.lease_expiry import LEASE_PROPERTY, LeaseExpiry, _Sight
from cepheid_broker.topics.persistent_topic import PersistentTopic
from cepheid_managed_ledger import ManagedLedgerSettings
from cepheid_metadata import EARLIEST
from cepheid_wire import TopicName
from tests.broker.broker_world import BrokerWorld
from tests.support import run_async, wait_until

NAME = "persistent://public/default/t"
FAR_MS = 3600_000
SILENCE_S = 300.0


class LeaseExpiryByHand(LeaseExpiry):
    """Its loop's clock stands at `now_s`."""

    now_s = 0.0

    def _due(self, now: float) -> list[tuple[PersistentTopic, _Sight]]:
        return super()._due(self.now_s)


class Bench:
    """A topic with one subscription; looks at the times that a test says."""

    def __init__(self, world: BrokerWorld, topic: PersistentTopic) -> None:
        self.world = world
        self.topic = topic
        self.expiry = LeaseExpiryByHand(world.broker.topics.loaded, world.broker._tasks, 1000.0, SILENCE_S)

    async def lease(self, name: str, expires_in_ms: int | str) -> None:
        text = expires_in_ms if isinstance(expires_in_ms, str) else str(self.topic.ledger.steady_ms() + expires_in_ms)
        await self.topic.create_subscription(name, EARLIEST, properties={LEASE_PROPERTY: text, "else": "x"})

    async def renew(self, name: str, expires_in_ms: int) -> None:
        await self.topic.set_subscription_properties(name, {LEASE_PROPERTY: str(self.topic.ledger.steady_ms() + expires_in_ms)})

    async def look(self, after_s: float = 0.0) -> list[str]:
        """What is left after the look that comes `after_s` later than the one before."""
        self.expiry.now_s += after_s
        await self.expiry.check()
        return sorted(self.topic.subscriptions)

    @asynccontextmanager
    async def look_that_waits(self, after_s: float) -> AsyncIterator[asyncio.Task[list[str]]]:
        """While the body runs the look has found what is due, and waits for somebody else who changes subscriptions."""
        async with self.topic._changing:
            look = asyncio.ensure_future(self.look(after_s))
            await wait_until(lambda: bool(self.topic._changing._waiters), what="a look that found something due")
            yield look


def run(test: Callable[[Bench], Awaitable[None]]) -> None:
    async def main() -> None:
        async with BrokerWorld() as world:
            topic = await world.broker.topics.get(TopicName.parse(NAME), may_create=True)
            assert isinstance(topic, PersistentTopic)
            await test(Bench(world, topic))

    run_async(main())


def test_a_lease_whose_time_is_over_goes_and_others_stay() -> None:
    async def test(bench: Bench) -> None:
        await bench.lease("over", -1)
        await bench.lease("held", FAR_MS)
        await bench.lease("misspelt", "soon")
        await bench.topic.create_subscription("plain", EARLIEST)
        assert await bench.look() == ["held", "misspelt", "over", "plain"], "not at the first sight"
        assert await bench.look(SILENCE_S - 1) == ["held", "misspelt", "over", "plain"], "nor before the silence is over"
        assert await bench.look(1) == ["held", "misspelt", "plain"]
        assert await bench.look(1) == ["held", "misspelt", "plain"]
        assert (bench.expiry.expired, bench.expiry.leases) == (1, 1)

    run(test)


def test_a_renewal_is_a_sign_of_life_even_when_by_the_brokers_clock_it_is_over() -> None:
    """The broker was started with a clock of the far future: every lease looks expired."""

    async def test(bench: Bench) -> None:
        await bench.lease("s", -FAR_MS)
        for renewal in range(5):
            await bench.renew("s", -FAR_MS + 1000 * renewal)
            assert await bench.look(SILENCE_S - 1) == ["s"]
        assert await bench.look(SILENCE_S - 1) == ["s"]
        assert await bench.look(1) == [], "the last one was a silence ago"

    run(test)


def test_a_wall_clock_that_jumps_ahead_ends_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(bench: Bench) -> None:
        await bench.lease("s", 600_000)
        ports = bench.world.broker.ports
        was = ports.wall_ms
        monkeypatch.setattr(bench.topic.ledger._clock, "_wall_ms", lambda: was() + 10 * FAR_MS)
        assert await bench.look() == ["s"]
        assert await bench.look(2 * SILENCE_S) == ["s"]

    run(test)


def test_a_lease_with_a_consumer_or_within_a_seek_stays() -> None:
    async def test(bench: Bench) -> None:
        await bench.lease("s", -1)
        await bench.look()
        bench.topic.subscriptions["s"].begin_seek()
        assert await bench.look(2 * SILENCE_S) == ["s"]
        bench.topic.subscriptions["s"].end_seek()
        client = await bench.world.client()
        await client.subscribe(NAME, "s")
        assert await bench.look(2 * SILENCE_S) == ["s"]
        await client.close()
        await wait_until(lambda: not bench.topic.subscriptions["s"].consumers)
        assert await bench.look(SILENCE_S) == []

    run(test)


def test_a_consumer_that_is_away_for_a_moment_finds_its_lease() -> None:
    """A broker's restart, a network's hiccup: else it would find a new subscription at the end of the topic."""

    async def test(bench: Bench) -> None:
        await bench.lease("s", -1)
        client = await bench.world.client()
        await client.subscribe(NAME, "s")
        await bench.look()
        assert await bench.look(2 * SILENCE_S) == ["s"]
        await client.close()
        await wait_until(lambda: not bench.topic.subscriptions["s"].consumers)
        assert await bench.look(SILENCE_S - 1) == ["s"], "the consumer was a sign of life"
        assert await bench.look(1) == []

    run(test)


def test_a_reader_of_that_name_and_one_made_anew_are_not_taken_for_the_lease() -> None:
    async def test(bench: Bench) -> None:
        await bench.lease("s", -1)
        await bench.look()
        async with bench.look_that_waits(SILENCE_S) as look:
            found = bench.topic.subscriptions["s"]
            found.close("by somebody else")
            del bench.topic.subscriptions["s"]
            await bench.topic._delete_cursor("s", found.cursor)
            cursor = await bench.topic.ledger.create_cursor(
                "s", bench.topic.ledger.last_confirmed, properties=found.cursor.properties
            )
            assert bench.topic.subscriptions["s"].cursor is cursor
        assert await look == ["s"], "the new one has the same property, and its own time of silence"
        assert await bench.look() == ["s"], "which begins at the first look at it"
        assert await bench.look(SILENCE_S) == []

    run(test)


def test_a_renewal_at_the_last_moment_saves_the_lease() -> None:
    """Between the look that finds it over and the step that deletes."""

    async def test(bench: Bench) -> None:
        await bench.lease("s", -1)
        await bench.look()
        async with bench.look_that_waits(SILENCE_S) as look:
            await bench.renew("s", FAR_MS)
        assert await look == ["s"]
        assert bench.expiry.expired == 0

    run(test)


def test_a_renewal_that_waits_for_its_record_saves_the_lease() -> None:
    """It is acknowledged: nobody would make the subscription again before the next one."""

    async def test(bench: Bench) -> None:
        await bench.lease("s", -1)
        await bench.look()
        async with bench.topic.ledger._cursors._writing:  # the metadata store is slow
            renewal = asyncio.ensure_future(bench.renew("s", FAR_MS))
            await wait_until(lambda: bool(bench.topic.ledger._cursors._writing._waiters), what="the renewal")
            assert await bench.look(SILENCE_S) == ["s"]
        await renewal
        assert await bench.look() == ["s"]

    run(test)


async def test_the_broker_looks_by_itself_and_shows_what_it_did() -> None:
    async with BrokerWorld(lease_check_s=0.01, lease_silence_s=0.02, rate_window_s=0.01) as world:
        topic = await world.broker.topics.get(TopicName.parse(NAME), may_create=True)
        await topic.create_subscription("held", EARLIEST, properties={LEASE_PROPERTY: str(10**15)})
        await topic.create_subscription("over", EARLIEST, properties={LEASE_PROPERTY: "1"})
        leases = world.broker.leases
        await wait_until(lambda: (leases.leases, leases.expired) == (1, 1), what="the look behind the deletion")
        assert list(topic.subscriptions) == ["held"]
        shown = {family.name: [sample.value for sample in family.samples] for family in broker_families(world.broker)}
        assert shown["cepheid_broker_leases"] == shown["cepheid_broker_leases_expired_total"] == [1]


async def test_what_an_expired_lease_held_is_trimmed() -> None:
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
