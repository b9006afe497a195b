"""A ledger that lacks copies is followed by the next one once there are enough healthy bookies: not at once, not in a loop."""

from __future__ import annotations

import asyncio

import pytest

from cepheid_managed_ledger import ManagedLedger, rollover
from cepheid_rpc import Status
from tests.managed_ledger.topic_world import THREE_BOOKIES, TOPIC, Broker, TopicWorld, append, append_all, read_all, topic_world
from tests.support import wait_until

pytestmark = pytest.mark.virtual_time


async def lose_copies(world: TopicWorld, *ledgers: ManagedLedger) -> None:
    world.cluster["c"].refuse = Status.READ_ONLY
    for ledger in ledgers:
        assert ledger._appender is not None
        writer = ledger._appender.writer
        while not writer.under_replicated:
            await append(ledger, b"m")
            await asyncio.sleep(0.001)


def forgive(broker: Broker) -> None:
    """As time does."""
    broker.client._placement._quarantines.clear()


async def test_it_rolls_over_when_the_bookies_are_well_again_and_then_not_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollover, "REPLICAS_SPREAD_S", 0.01)
    async with topic_world("a", "b", "c") as world:
        broker = world.broker()
        ledger = await broker.open(THREE_BOOKIES)
        await append_all(ledger, 3)
        await lose_copies(world, ledger)
        for _ in range(5):
            await append(ledger, b"m")
            ledger.tick()
            await asyncio.sleep(0.01)
        assert ledger.statistics().rollovers == 0, "nobody could hold the third copy"
        world.cluster["c"].refuse = None
        forgive(broker)
        await wait_until(lambda: ledger.tick() or ledger.statistics().rollovers == 1)
        await append(ledger, b"n")
        assert ledger._appender is not None
        assert ledger._appender.writer.under_replicated == ()
        following = ledger.ledgers.last_ledger_id
        await wait_until(lambda: len(world.cluster["c"].ids(following)) == 1)
        await lose_copies(world, ledger)
        world.cluster["c"].refuse = None
        forgive(broker)
        for _ in range(5):
            ledger.tick()
            await asyncio.sleep(0.01)
        assert ledger.statistics().rollovers == 1, "a bookie that comes and goes costs no ledger each time"
        assert (await read_all(ledger))[:3] == [b"m0", b"m1", b"m2"]


async def test_topics_do_it_at_moments_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    async with topic_world("a", "b", "c") as world:
        broker = world.broker()
        topics = [TOPIC.__class__.parse(f"persistent://public/default/t{number}") for number in range(8)]
        ledgers = [await broker.open(THREE_BOOKIES, topic) for topic in topics]
        for ledger in ledgers:
            await append(ledger, b"m")
        await lose_copies(world, *ledgers)
        for ledger in ledgers:
            ledger.tick()
        moments = [ledger._upkeep._rollover._replicas_at for ledger in ledgers if ledger._upkeep._rollover is not None]
        now = asyncio.get_running_loop().time()
        assert len(set(moments)) == 8
        assert max(moments) - min(moments) > rollover.REPLICAS_SPREAD_S / 10
        assert all(moment <= now + rollover.REPLICAS_SPREAD_S for moment in moments)
