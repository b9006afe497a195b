"""Searches and decisions that await while ledgers leave the topic, positions are moved or policies change under them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from cepheid_broker.policies.topic_policies import BacklogQuota, InactiveDeletion, InactiveTopics, QuotaAction
from cepheid_broker.topics.backlog_check import last_published_before
from cepheid_broker.topics.topic_positions import position_at_time
from cepheid_managed_ledger import ManagedLedger, ManagedLedgerSettings, Retention
from cepheid_metadata import Position, StoreUnavailableError
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


@pytest.mark.slow
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


def test_a_subscription_whose_deletion_failed_is_still_there_and_can_be_deleted_again() -> None:
    """Its cursor holds what it needs until it is gone: nobody may believe that it is."""

    async def test(world: BrokerWorld) -> None:
        bench = await Bench.on(world, "s")
        await bench.publish(entry(0))
        topic, ledger = bench.topic, bench.topic.ledger
        closed = bench["s"]
        delete = ledger.delete_cursor

        async def refuse(name: str) -> None:
            raise StoreUnavailableError("the store is away")

        ledger.delete_cursor = refuse  # type: ignore[method-assign]
        with pytest.raises(StoreUnavailableError):
            await topic.delete_subscription("s")
        assert closed.closed, "its consumers come back"
        assert bench["s"] is not closed
        assert bench.backlogs() == {"s": 1}
        ledger.delete_cursor = delete  # type: ignore[method-assign]
        await topic.delete_subscription("s")
        assert bench.backlogs() == {}
        assert ledger.cursors == {}

    run(test)


@pytest.mark.parametrize("given_up_by", ["message_ttl_s", "size_quota", "age_quota"])
def test_nothing_is_given_up_by_a_policy_that_changed_during_the_search(given_up_by: str) -> None:
    evicting = {
        "message_ttl_s": {"message_ttl_s": 60},
        "size_quota": {"size_quota": BacklogQuota(10, QuotaAction.EVICT)},
        "age_quota": {"age_quota": BacklogQuota(60, QuotaAction.EVICT)},
    }[given_up_by]

    async def test(world: BrokerWorld) -> None:
        bench = await Bench.on(world, "s", **evicting)
        await bench.publish(entry(300), entry(300))
        ledger: Any = bench.topic.ledger
        read, length_at = ledger.publish_times.at, ledger.counts.position_leaving

        def policy_changes_during(answer: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
            async def answered(*args: Any) -> Any:
                found = await answer(*args)
                bench.set(**{name: None if "quota" in name else 0 for name in evicting})
                return found

            return answered

        ledger.publish_times.at = policy_changes_during(read)
        ledger.counts.position_leaving = policy_changes_during(length_at)
        await bench.check()
        assert bench.backlogs() == {"s": 2}

    run(test)


def test_an_inactive_topic_that_was_closed_before_the_last_look_is_kept() -> None:
    """Its deletion waits for something; meanwhile a producer comes, publishes, and the topic is unloaded."""

    async def test(world: BrokerWorld) -> None:
        bench = await Bench.on(world)
        topics, name = world.broker.topics, bench.topic.name
        bench.set(inactive_topics=InactiveTopics(InactiveDeletion.NO_SUBSCRIPTIONS, 0), retention=Retention())
        settled = topics._wait_until_settled

        async def settled_late(asked: Any) -> None:
            await bench.publish(entry(0))
            await topics.unload(name)
            await settled(asked)

        await world.broker.inactive.check()
        topics._wait_until_settled = settled_late  # type: ignore[method-assign]
        await world.broker.inactive.check()
        topics._wait_until_settled = settled  # type: ignore[method-assign]
        assert (await topics.get(name, may_create=False)).ledger.last_confirmed == bench.topic.ledger.last_confirmed

    run(test)
