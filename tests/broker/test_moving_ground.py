"""Searches and decisions that await while ledgers leave the topic, positions are moved or policies change under them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from cepheid_broker.backlog_check import last_published_before
from cepheid_broker.managed_ledger import ManagedLedger, ManagedLedgerSettings, Retention
from cepheid_broker.position import Position
from cepheid_broker.topic_positions import position_at_time
from cepheid_ports import Ports
from tests.broker.broker_world import BrokerWorld
from tests.broker.test_backlog_check import Bench, entry, run
from tests.support import wait_until

SMALL_LEDGERS = ManagedLedgerSettings(ledger_max_bytes=500, ledger_min_age_s=0, housekeeping_s=1000)
OLD, YOUNG = 25, 25
Reading = Callable[..., Awaitable[Any]]


async def half_old(world: BrokerWorld) -> tuple[Bench, list[Position]]:
    """A topic of many ledgers, the first half of its entries an hour old; everything is kept until it is consumed."""
    bench = await Bench.on(world, "s")
    bench.set(retention=Retention())
    positions: list[Position] = []
    for number in range(OLD + YOUNG):
        await bench.publish(entry(3600 if number < OLD else 0, 100))
        positions.append(bench.topic.ledger.last_confirmed)
    assert len(bench.topic.ledger.ledgers) > 8
    return bench, positions


def trimming_once(bench: Bench, upto: Position, answer: Reading, at_call: int) -> Reading:
    """`answer`, and while the caller waits for one of its calls what was acknowledged up to there is trimmed."""
    calls = 0

    async def answered(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        found = await answer(*args, **kwargs)
        if calls == at_call:
            ledgers = bench.topic.ledger.ledgers
            before = len(ledgers)
            bench["s"].cursor.acknowledge_cumulative(upto)
            await bench["s"].cursor.saved()
            await wait_until(lambda: len(ledgers) < before, what="a trim")
        return found

    return answered


def test_expiry_ends_at_the_same_entry_when_ledgers_are_trimmed_during_its_search() -> None:
    async def test(world: BrokerWorld) -> None:
        for at_call in range(1, 9):
            bench, positions = await half_old(world)
            ledger = bench.topic.ledger
            times: Any = ledger.publish_times
            times.at = trimming_once(bench, positions[12], times.at, at_call)
            last = await last_published_before(ledger, positions[13], Ports().wall_ms() - 1_800_000)
            assert last == positions[OLD - 1], f"trimmed at call {at_call}"
            await world.broker.topics.delete(bench.topic.name, force=True)

    run(test, ledgers=SMALL_LEDGERS)


def test_a_seek_by_time_finds_the_same_entry_when_ledgers_are_trimmed_during_its_search() -> None:
    async def test(world: BrokerWorld) -> None:
        for at_call in range(1, 6):
            bench, positions = await half_old(world)
            ledger: ManagedLedger = bench.topic.ledger
            ledger.read_cached = lambda *args, **kwargs: None  # type: ignore[method-assign]
            ledger.read = trimming_once(bench, positions[12], ledger.read, at_call)  # type: ignore[method-assign]
            found = await position_at_time(ledger, Ports().wall_ms() - 1_800_000)
            assert found == positions[OLD], f"trimmed at call {at_call}"
            await world.broker.topics.delete(bench.topic.name, force=True)

    run(test, ledgers=SMALL_LEDGERS)
