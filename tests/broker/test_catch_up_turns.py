"""How subscriptions that catch up share the loop with clients that publish."""

from __future__ import annotations

import asyncio
from itertools import accumulate

import pytest

from cepheid_broker.dispatch.catch_up_turns import (
    FASTER,
    FULL_RATE_PER_S,
    MAX_PAUSE_S,
    TIMER_S,
    UNUSED_ENTRIES,
    Allowance,
    CatchUpPace,
    CatchUpTurns,
)
from cepheid_broker.dispatch.dispatcher import PACED_ENTRIES, READ_ENTRIES, Dispatcher
from cepheid_broker.traffic import BrokerTraffic
from cepheid_managed_ledger import ManagedLedger
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.broker_world import BrokerWorld
from tests.support import wait_until

BEFORE = 1_000_000
"""Entries published until time 0."""


def publishing(share: float = 0.2, *, per_s: float = 10 * FULL_RATE_PER_S) -> CatchUpPace:
    """A pace at time 0, after a minute in which clients published at this rate."""
    pace = CatchUpPace(share)
    for ms in range(0, 60_000, 50):
        pace.is_paced(ms / 1000 - 60, BEFORE + int(per_s * (ms / 1000 - 60)))
    assert pace.is_paced(0.0, BEFORE) is (share < 1 and per_s > 0)
    return pace


def step(pace: CatchUpPace, took_s: float, *, published: int = 0, sent: int = 100, allowance: Allowance | None = None) -> float:
    """End a step at time 0; return how long the next one waits. `published` since the allowance began."""
    allowance = allowance or Allowance(BEFORE)
    allowance.took_s += took_s
    pace.on_step(allowance, 0.0, sent=sent, published=BEFORE + published)
    return pace.delay_s(0.0, BEFORE + published)


def test_a_step_is_followed_by_a_pause_in_proportion() -> None:
    pace = publishing(share=0.2)
    assert step(pace, took_s=0.002) == pytest.approx(0.008)
    assert pace.delay_s(0.005, BEFORE) == pytest.approx(0.003)
    assert pace.delay_s(0.008, BEFORE) == 0


def test_work_for_a_step_counts_with_it() -> None:
    assert step(publishing(share=0.5), took_s=0.002, allowance=Allowance(BEFORE, took_s=0.003)) == pytest.approx(0.005)


def test_pauses_too_short_for_a_timer_are_added_up() -> None:
    pace = publishing(share=0.5)
    assert [step(pace, took_s=0.4 * TIMER_S) for _ in range(3)] == [0, 0, pytest.approx(1.2 * TIMER_S)]


def test_one_pause_is_bounded() -> None:
    assert step(publishing(), took_s=10.0) == pytest.approx(MAX_PAUSE_S)


def test_without_publishing_there_are_no_pauses() -> None:
    pace = publishing(share=0.2)
    assert step(pace, took_s=0.002) > 0
    assert not pace.is_paced(1.0, BEFORE)
    pace.on_step(Allowance(BEFORE, took_s=0.01), 1.0, sent=100, published=BEFORE)
    assert pace.delay_s(1.0, BEFORE) == 0
    assert pace.is_paced(1.01, BEFORE + FULL_RATE_PER_S // 20), "clients publish again"


def test_a_share_of_1_is_no_limit() -> None:
    assert step(publishing(share=1.0), took_s=0.01) == 0


@pytest.mark.parametrize("part", [0.2, 0.5, 1])
def test_pauses_are_in_proportion_to_the_rate_of_publishing(part: float) -> None:
    pace = publishing(share=0.2, per_s=part * FULL_RATE_PER_S)
    assert step(pace, took_s=0.005) == pytest.approx(part * 0.020, rel=0.05)


def test_a_subscription_may_send_some_times_as_many_entries_as_are_published() -> None:
    allowance = Allowance(BEFORE)
    assert step(publishing(share=0.5), took_s=0.004, published=100 // FASTER, allowance=allowance) == 0
    waits_s = step(publishing(share=0.5), took_s=0.004, published=100 // FASTER + 10, allowance=allowance)
    assert waits_s == pytest.approx(0.004 * (1 - FASTER * 10 / 100))


def test_what_was_published_is_not_forgotten_by_a_step_that_sends_nothing() -> None:
    """A step finds nothing to send when its read is not done yet."""
    pace, allowance = publishing(share=0.5), Allowance(BEFORE)
    assert step(pace, took_s=0, sent=0, published=100 // FASTER, allowance=allowance) == 0
    assert step(pace, took_s=0.004, sent=100, published=100 // FASTER, allowance=allowance) == 0


def test_a_subscription_that_sends_little_does_not_save_up_for_later() -> None:
    pace, allowance = publishing(share=0.5), Allowance(0)
    assert step(pace, took_s=0.004, sent=1, allowance=allowance) == 0
    assert step(pace, took_s=0.004, sent=2 * UNUSED_ENTRIES, allowance=allowance) == pytest.approx(0.002)


def sent_per_s(share: float, *, published_per_s: float, took_s: float, read_s: float, subscriptions: int) -> float:
    """Return the entries that the slowest of some subscriptions sends in a second: 100 in a step, after which it reads on."""
    pace, now_s = CatchUpPace(share), 0.0
    allowances = [Allowance(0) for _ in range(subscriptions)]
    sent = [0] * subscriptions
    ready_at_s = dict.fromkeys(range(subscriptions), 0.0)
    while now_s < 5.0:
        one = min(ready_at_s, key=lambda each: ready_at_s[each])
        now_s = max(now_s, ready_at_s[one])
        now_s += pace.delay_s(now_s, int(published_per_s * now_s)) + took_s
        allowances[one].took_s += took_s
        pace.on_step(allowances[one], now_s, sent=100, published=int(published_per_s * now_s))
        sent[one] += 100
        ready_at_s[one] = now_s + read_s
    return min(sent) / now_s


def test_subscriptions_that_wait_for_reads_keep_up_with_a_client_that_publishes() -> None:
    """A read takes longer than the steps of the others, so those that wait for a turn are fewer than those that catch up."""
    assert sent_per_s(0.1, published_per_s=30_000, took_s=0.0005, read_s=0.002, subscriptions=4) > 30_000


def test_a_client_that_publishes_ten_messages_a_second_does_not_hold_up_a_catch_up() -> None:
    alone, beside = (sent_per_s(0.1, published_per_s=rate, took_s=0.0005, read_s=0.0001, subscriptions=1) for rate in (0.0, 11.0))
    assert beside > 0.9 * alone


class Steps:
    """Subscriptions that submit a step of 1 ms again and again, beside a client that publishes all the time."""

    def __init__(self, share: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._worked_s = 0.0
        self.traffic = BrokerTraffic()
        self.turns = CatchUpTurns(share, self.traffic, lambda: self._loop.time() + self._worked_s)
        self.ran: list[str] = []
        self._allowances = {name: self.turns.join() for name in ("a", "b", "c")}

    def submit(self, name: str) -> None:
        self.turns.submit(self._allowances[name], lambda: self._step(name))

    def _step(self, name: str) -> None:
        self._worked_s += 0.001
        self.traffic.delivered.count(10_000, 10_000, 10_000)  # far more than may be sent without a pause
        self.ran.append(name)
        self.submit(name)

    async def run(self, seconds: float, *, publishes: bool) -> None:
        for _ in range(int(seconds / 0.01)):
            entries = publishes * FULL_RATE_PER_S // 50
            self.traffic.published.count(entries, entries, entries)
            await asyncio.sleep(0.01)


@pytest.mark.virtual_time
async def test_subscriptions_take_turns_and_keep_to_their_share_together() -> None:
    steps = Steps(share=0.2)
    assert not steps.turns.is_paced
    await steps.run(1.0, publishes=True)
    assert steps.turns.is_paced
    for name in ("a", "b", "c"):
        steps.submit(name)
    await steps.run(1.0, publishes=True)
    assert steps.ran[:6] == ["a", "b", "c"] * 2
    assert len(steps.ran) * 0.001 == pytest.approx(0.25, rel=0.1)  # of 1 s of pauses and 0.25 s of work
    assert steps.turns.paused_s == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("where", ["tail cache", "storage"])
async def test_a_consumer_that_catches_up_makes_small_steps_while_clients_publish(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    sent: list[int] = []  # entries of each pass
    reads = 0
    one_pass = Dispatcher._pass

    def counted(self: Dispatcher) -> None:
        nonlocal reads
        before = self._turns._delivered.entries
        one_pass(self)
        reads = self.storage_reads
        sent.append(self._turns._delivered.entries - before)

    one_read_ahead = {"read_ahead_bytes": 1}  # else it reads all of these tiny entries before it sends any
    async with BrokerWorld(dispatch=one_read_ahead) as world, await world.client() as client:
        await client.produce_on("t")
        await client.subscribe("t", "s")
        await client.publish(4 * READ_ENTRIES)
        monkeypatch.setattr(Dispatcher, "_pass", counted)
        monkeypatch.setattr(CatchUpTurns, "is_paced", property(lambda _: True))
        if where == "storage":
            monkeypatch.setattr(ManagedLedger, "read_cached", lambda *_, **__: None)
        client.send(pb.CommandFlow(consumer_id=0, messagePermits=10 * READ_ENTRIES))
        await wait_until(lambda: sum(sent) == 4 * READ_ENTRIES, what="all messages")
    until_last_read = [entries for entries, total in zip(sent, accumulate(sent), strict=True) if total <= 3 * READ_ENTRIES]
    large = sum(entries >= 2 * PACED_ENTRIES for entries in until_last_read)
    if where == "storage":
        assert not large
        assert reads <= 4 + 1, "round trips are not smaller, and the last one finds the end"
    else:
        assert large <= 1, "after the first read it is known to lag"


async def test_a_consumer_that_keeps_up_takes_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    async with BrokerWorld() as world, await world.client() as producer, await world.client() as client:
        await producer.produce_on("t")
        await client.subscribe("t", "s")
        client.send(pb.CommandFlow(consumer_id=0, messagePermits=1000))
        monkeypatch.setattr(CatchUpTurns, "submit", lambda *_: pytest.fail("it need not wait"))
        for _ in range(3):
            await producer.publish(2)
        await wait_until(lambda: world.topic("t").subscriptions["s"].delivered.entries == 6)


async def test_a_consumer_with_few_permits_for_large_messages_takes_no_turn_while_it_keeps_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with BrokerWorld() as world, await world.client() as producer, await world.client() as client:
        await producer.produce_on("t")
        await client.subscribe("t", "s")
        monkeypatch.setattr(CatchUpTurns, "submit", lambda *_: pytest.fail("it need not wait"))
        for sequence_id in range(4):
            producer.send_message(sequence_id, bytes(100_000))
            assert await producer.receive() is not None
        for sent in range(1, 5):
            client.send(pb.CommandFlow(consumer_id=0, messagePermits=1))
            await wait_until(lambda sent=sent: world.topic("t").subscriptions["s"].delivered.entries == sent)
