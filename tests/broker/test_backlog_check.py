"""What happens to backlogs by time and size: expiry, quotas, and that each moves exactly what it must."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cepheid_broker.policies.topic_policies import BacklogQuota, QuotaAction, TopicPolicies
from cepheid_broker.topics.backlog_check import BacklogState, last_published_before, publish_action
from cepheid_broker.topics.persistent_topic import PersistentTopic
from cepheid_broker.topics.subscription import Subscription
from cepheid_managed_ledger import ManagedLedgerSettings, Retention
from cepheid_metadata import EARLIEST
from cepheid_ports import Ports
from cepheid_wire import TopicName, encode_tail
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.broker_world import BrokerWorld
from tests.support import run_async, wait_until

HOLD, REFUSE, EVICT = QuotaAction.HOLD, QuotaAction.REFUSE, QuotaAction.EVICT
KEEP = Retention(-1, -1)
NAME = "persistent://public/default/t"


def entry(age_s: float, size: int = 0, messages: int = 1) -> bytes:
    metadata = pb.MessageMetadata(producer_name="p", sequence_id=1, publish_time=Ports().wall_ms() - int(1000 * age_s))
    if messages > 1:
        metadata.num_messages_in_batch = messages
    return encode_tail(metadata, b"x" * size)


class Bench:
    """One topic with subscriptions, whose policies and entries a test chooses."""

    def __init__(self, world: BrokerWorld, topic: PersistentTopic) -> None:
        self.world = world
        self.topic = topic

    @classmethod
    async def on(cls, world: BrokerWorld, *names: str, **policies: Any) -> Bench:
        topic = await world.broker.topics.get(TopicName.parse(NAME), may_create=True)
        assert isinstance(topic, PersistentTopic)
        bench = cls(world, topic)
        for name in names:
            await topic.create_subscription(name, EARLIEST)
        bench.set(retention=KEEP, **policies)
        return bench

    def set(self, **policies: Any) -> None:
        self.topic.on_policies(replace(self.topic.policies, **policies))

    def __getitem__(self, name: str) -> Subscription:
        return self.topic.subscriptions[name]

    async def publish(self, *entries: bytes) -> None:
        done = asyncio.get_running_loop().create_future()
        self.topic.publish(entries, lambda outcome, _: done.set_result(outcome))
        assert not isinstance(await done, Exception)

    async def check(self) -> None:
        await self.world.broker.backlog_checks.check(self.topic)

    def backlogs(self) -> dict[str, int]:
        return {name: subscription.cursor.backlog_entries for name, subscription in self.topic.subscriptions.items()}


def run(test: Callable[[BrokerWorld], Any], **settings: Any) -> None:
    async def main() -> None:
        async with BrokerWorld(**{"backlog_check_s": 1000, **settings}) as world:
            await test(world)

    run_async(main())


# Time to live


def test_messages_past_their_time_to_live_expire_for_every_subscription() -> None:
    async def test(world: BrokerWorld) -> None:
        bench = await Bench.on(world, "behind", "ahead", message_ttl_s=60)
        await bench.publish(*(entry(age) for age in (300, 200, 100, 61, 59, 1)))
        bench["ahead"].cursor.acknowledge_cumulative(bench.topic.ledger.next_position(bench.topic.ledger.first_position()))
        await bench.check()
        assert bench.backlogs() == {"behind": 2, "ahead": 2}
        assert (bench["behind"].expired_entries, bench["ahead"].expired_entries) == (4, 3)
        await bench.check()
        assert world.broker.backlog_checks.expired_entries == 7, "nothing twice"

    run(test)


def test_expiry_stops_at_the_first_entry_that_is_young_enough() -> None:
    """Publish times are the clients' clocks: what lies behind an entry of the future waits for it."""

    async def test(world: BrokerWorld) -> None:
        bench = await Bench.on(world, "s", message_ttl_s=60)
        await bench.publish(entry(-3600), entry(300), entry(300))
        await bench.check()
        assert bench.backlogs() == {"s": 3}
        await bench.topic.delete_subscription("s")

    run(test)


def test_nothing_expires_without_a_policy_or_twice_after_a_restart() -> None:
    async def test(world: BrokerWorld) -> None:
        bench = await Bench.on(world, "s")
        await bench.publish(entry(300), entry(300))
        await bench.check()
        assert bench.backlogs() == {"s": 2}
        bench.set(message_ttl_s=60)
        await bench.check()
        await world.broker.topics.unload(TopicName.parse(NAME))
        bench = await Bench.on(world, "s")
        assert bench.backlogs() == {"s": 0}, "saved before it was reported"

    run(test)


def test_a_clock_that_jumps_ahead_expires_nothing() -> None:
    async def test(world: BrokerWorld) -> None:
        bench = await Bench.on(world, "s", message_ttl_s=60)
        await bench.publish(entry(0))
        jumped_ms = Ports().wall_ms() + 365 * 86_400_000
        bench.topic.ledger._clock._wall_ms = lambda: jumped_ms
        await bench.check()
        assert bench.backlogs() == {"s": 1}

    run(test)


@pytest.mark.slow
@given(ages=st.lists(st.integers(0, 100), min_size=1, max_size=200).map(sorted), ttl=st.integers(0, 100))
@settings(max_examples=30, deadline=None)
def test_where_publish_times_rise_the_search_is_exact(ages: list[int], ttl: int) -> None:
    async def test(world: BrokerWorld) -> None:
        bench = await Bench.on(world, "s")
        await bench.publish(*(entry(age) for age in reversed(ages)))
        ledger = bench.topic.ledger
        first = bench["s"].cursor.first_unacknowledged()
        last = await last_published_before(ledger, first, Ports().wall_ms() - 1000 * ttl - 500)
        expired = 0 if last is None else ledger.count_between(ledger.first_position(), last)
        assert expired == sum(age > ttl for age in ages)

    run(test)


# Quotas


@pytest.mark.parametrize(
    ("size", "age", "state", "action"),
    [
        (None, None, BacklogState(1 << 40, 1e9), None),
        (BacklogQuota(100, HOLD), None, BacklogState(100, 0), None),
        (BacklogQuota(100, HOLD), None, BacklogState(101, 0), HOLD),
        (BacklogQuota(100, REFUSE), BacklogQuota(5, HOLD), BacklogState(101, 6), REFUSE),
        (BacklogQuota(100, HOLD), BacklogQuota(5, REFUSE), BacklogState(101, 6), REFUSE),
        (BacklogQuota(100, EVICT), BacklogQuota(5, HOLD), BacklogState(101, 6), HOLD),
        (BacklogQuota(100, EVICT), None, BacklogState(101, 0), None),
        (BacklogQuota(0, HOLD), None, BacklogState(0, 0), None),
    ],
)
def test_what_a_quota_does_to_producers(
    size: BacklogQuota | None, age: BacklogQuota | None, state: BacklogState, action: QuotaAction | None
) -> None:
    assert publish_action(TopicPolicies(size_quota=size, age_quota=age), state) is action


def test_a_quota_by_size_holds_until_the_slowest_subscription_has_caught_up() -> None:
    async def test(world: BrokerWorld) -> None:
        bench = await Bench.on(world, "fast", "slow", size_quota=BacklogQuota(2_000, HOLD))
        await bench.publish(*(entry(0, 500) for _ in range(10)))
        bench["fast"].cursor.acknowledge_cumulative(bench.topic.ledger.last_confirmed)
        told = []
        bench.topic.on_publish_blocked.append(lambda: told.append(bench.topic.publish_blocked))
        await bench.check()
        assert bench.topic.publish_blocked is HOLD
        assert bench.backlogs() == {"fast": 0, "slow": 10}, "nobody loses anything"
        await bench.check()
        bench["slow"].cursor.acknowledge_cumulative(bench.topic.ledger.previous_position(bench.topic.ledger.last_confirmed))
        await bench.check()
        assert told == [HOLD, None], "told once each"

    run(test)


def test_a_quota_that_is_taken_away_holds_nobody() -> None:
    async def test(world: BrokerWorld) -> None:
        bench = await Bench.on(world, "s", size_quota=BacklogQuota(10, REFUSE))
        await bench.publish(entry(0, 500))
        await bench.check()
        assert bench.topic.publish_blocked is REFUSE
        bench.set(size_quota=None)
        await world.broker.backlog_checks.check_all()
        assert bench.topic.publish_blocked is None

    run(test)


def test_without_subscriptions_there_is_no_backlog() -> None:
    async def test(world: BrokerWorld) -> None:
        bench = await Bench.on(world, size_quota=BacklogQuota(10, REFUSE), age_quota=BacklogQuota(1, REFUSE))
        reader = await bench.topic.open_reader("r", EARLIEST)
        await bench.publish(entry(100, 500))
        await bench.check()
        assert bench.topic.publish_blocked is None, "readers hold nothing"
        assert reader.cursor.backlog_entries == 1

    run(test)


def test_eviction_by_size_moves_exactly_far_enough() -> None:
    async def test(world: BrokerWorld) -> None:
        bench = await Bench.on(world, "slow", "fast")
        entries = [entry(0, size) for size in (900, 100, 400, 300, 200, 100)]
        await bench.publish(*entries)
        kept = entries[3:]
        bench.set(size_quota=BacklogQuota(sum(map(len, kept)), EVICT))
        bench["fast"].cursor.acknowledge_cumulative(bench.topic.ledger.previous_position(bench.topic.ledger.last_confirmed))
        await bench.check()
        assert bench.backlogs() == {"slow": 3, "fast": 1}
        assert bench.topic.publish_blocked is None
        bench.set(size_quota=BacklogQuota(sum(map(len, kept)) - 1, EVICT))
        await bench.check()
        assert bench.backlogs() == {"slow": 2, "fast": 1}, "one byte less is one entry less"
        assert world.broker.backlog_checks.evicted_entries == 4

    run(test)


def test_eviction_by_size_across_ledgers_and_openings() -> None:
    async def test(world: BrokerWorld) -> None:
        bench = await Bench.on(world, "s")
        entries = [entry(0, 100) for _ in range(30)]
        for one in entries:
            await bench.publish(one)
        await world.broker.topics.unload(TopicName.parse(NAME))
        bench = await Bench.on(world, "s", size_quota=BacklogQuota(sum(map(len, entries[17:])), EVICT))
        assert len(bench.topic.ledger.ledgers) > 3
        await bench.check()
        assert bench.backlogs() == {"s": 13}

    run(test, ledgers=ManagedLedgerSettings(ledger_max_bytes=500, ledger_min_age_s=0))


def test_eviction_by_time_moves_past_what_is_too_old() -> None:
    async def test(world: BrokerWorld) -> None:
        bench = await Bench.on(world, "s", age_quota=BacklogQuota(60, EVICT))
        await bench.publish(*(entry(age) for age in (300, 61, 59)))
        await bench.check()
        assert bench.backlogs() == {"s": 1}
        assert world.broker.backlog_checks.evicted_entries == 2

    run(test)


def test_a_quota_by_time_blocks_and_unblocks_with_the_oldest_message() -> None:
    async def test(world: BrokerWorld) -> None:
        bench = await Bench.on(world, "s", age_quota=BacklogQuota(60, REFUSE))
        await bench.publish(entry(300), entry(10))
        await bench.check()
        assert bench.topic.publish_blocked is REFUSE
        bench["s"].cursor.acknowledge([bench["s"].cursor.first_unacknowledged()])
        await bench.check()
        assert bench.topic.publish_blocked is None

    run(test)


# Retention


def test_a_change_of_retention_is_in_force_at_once() -> None:
    async def test(world: BrokerWorld) -> None:
        bench = await Bench.on(world, "s")
        ledgers = bench.topic.ledger.ledgers
        for _ in range(30):
            await bench.publish(entry(0, 100))
        bench["s"].cursor.acknowledge_cumulative(bench.topic.ledger.last_confirmed)
        await bench["s"].cursor.saved()
        before = len(ledgers)
        assert before > 4, "everything is kept"
        bench.set(retention=Retention(-1, 1500))
        await wait_until(lambda: len(ledgers) < before, what="a trim by size")
        await wait_until(lambda: ledgers.total_bytes < 2500, what="a trim down to the limit")
        assert ledgers.total_bytes >= 1500, "acknowledged data within the size is kept"
        bench.set(retention=Retention())
        await wait_until(lambda: len(ledgers) == 1, what="a trim of all that is consumed")

    run(test, ledgers=ManagedLedgerSettings(ledger_max_bytes=500, ledger_min_age_s=0, housekeeping_s=1000))


def test_retention_keeps_what_a_subscription_needs() -> None:
    async def test(world: BrokerWorld) -> None:
        bench = await Bench.on(world, "s")
        for _ in range(30):
            await bench.publish(entry(0, 100))
        bench.set(retention=Retention())
        await bench.topic.ledger.trim()
        assert bench.backlogs() == {"s": 30}
        assert bench.topic.ledger.ledgers.total_entries == 30
        await bench.topic.delete_subscription("s")
        await wait_until(lambda: len(bench.topic.ledger.ledgers) == 1, what="without subscriptions nothing is held")

    run(test, ledgers=ManagedLedgerSettings(ledger_max_bytes=500, ledger_min_age_s=0, housekeeping_s=1000))


# Driving it


def test_checks_go_on_by_themselves_and_survive_a_topic_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    async def test(world: BrokerWorld) -> None:
        bench = await Bench.on(world, "s", message_ttl_s=60)
        await bench.publish(entry(300))
        await wait_until(lambda: bench.backlogs() == {"s": 0}, what="the background check")
        checks = world.broker.backlog_checks
        bench["s"].begin_seek()  # nobody may move it now
        await bench.publish(entry(300))
        await wait_until(lambda: checks.failures > 0, what="a check that failed")
        bench["s"].end_seek()
        await wait_until(lambda: bench.backlogs() == {"s": 0}, what="the check after it")

    run(test, backlog_check_s=0.01)


def test_a_defect_in_one_topic_stops_no_other(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    async def test(world: BrokerWorld) -> None:
        bench = await Bench.on(world, "s", message_ttl_s=60)
        other = await world.broker.topics.get(TopicName.parse(NAME + "-other"), may_create=True)
        await other.create_subscription("s", EARLIEST)
        other.on_policies(replace(other.policies, message_ttl_s=60))
        monkeypatch.setattr(other, "subscriptions", None)
        await bench.publish(entry(300))
        await world.broker.backlog_checks.check_all()
        assert bench.backlogs() == {"s": 0}
        assert world.broker.backlog_checks.failures == 1
        monkeypatch.undo()

    run(test)
    assert "backlog.check_defect" in caplog.text


def test_a_tailing_topic_with_quotas_causes_no_reads() -> None:
    async def test(world: BrokerWorld) -> None:
        bench = await Bench.on(
            world, "s", message_ttl_s=60, size_quota=BacklogQuota(1 << 20, HOLD), age_quota=BacklogQuota(60, HOLD)
        )
        await bench.topic.open_reader("r", None)
        bench.topic.ledger.read_cached(bench.topic.ledger.last_confirmed, max_entries=1, max_bytes=1)  # somebody is interested
        for _ in range(5):
            await bench.publish(entry(0, 100), entry(0, 100))
            await bench.check()
        statistics = bench.topic.ledger.statistics()
        assert statistics.catch_up_reads == 0
        assert bench.topic.ledger.publish_times.reads <= 1

    run(test)
