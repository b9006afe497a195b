"""How subscriptions that catch up share the loop with clients that publish."""

from __future__ import annotations

import asyncio

import pytest

from cepheid_broker.dispatch import dispatcher
from cepheid_broker.dispatch.catch_up_turns import ACTIVE_S, FASTER, MAX_PAUSE_S, TIMER_S, CatchUpPace, CatchUpTurns
from cepheid_broker.dispatch.dispatcher import PACED_ENTRIES, READ_ENTRIES, Dispatcher
from cepheid_broker.traffic import BrokerTraffic
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.broker_world import BrokerWorld
from tests.support import wait_until


def publishing(share: float = 0.2) -> CatchUpPace:
    """A pace at time 0, at which a client has published its first entry."""
    pace = CatchUpPace(share)
    assert pace.is_paced(0.0, 1) is (share < 1)
    pace.on_step(0.0, sent=0, published=1, subscriptions=1)
    return pace


def step(pace: CatchUpPace, now_s: float, took_s: float, *, sent: int = 100, published: int = 1, subscriptions: int = 1) -> None:
    pace.on_work(took_s)
    pace.on_step(now_s, sent=sent, published=published, subscriptions=subscriptions)


def test_a_step_is_followed_by_a_pause_in_proportion() -> None:
    pace = publishing(share=0.2)
    step(pace, 0.01, took_s=0.002)
    assert pace.delay_s(0.01, 1) == pytest.approx(0.008)
    assert pace.delay_s(0.015, 1) == pytest.approx(0.003)
    assert pace.delay_s(0.018, 1) == 0


def test_work_for_a_step_counts_with_it() -> None:
    pace = publishing(share=0.5)
    pace.on_work(0.003)
    step(pace, 0.01, took_s=0.002)
    assert pace.delay_s(0.01, 1) == pytest.approx(0.005)


def test_pauses_too_short_for_a_timer_are_added_up() -> None:
    pace = publishing(share=0.5)
    for _ in range(3):
        step(pace, 0.01, took_s=0.4 * TIMER_S)
    assert pace.delay_s(0.01, 1) == pytest.approx(1.2 * TIMER_S)


def test_one_pause_is_bounded() -> None:
    pace = publishing()
    step(pace, 0.01, took_s=10.0)
    assert pace.delay_s(0.01, 1) == pytest.approx(MAX_PAUSE_S)


def test_without_publishing_there_are_no_pauses() -> None:
    pace = publishing()
    step(pace, ACTIVE_S, took_s=0.01)
    assert not pace.is_paced(ACTIVE_S, 1)
    assert pace.delay_s(ACTIVE_S, 1) == 0
    assert pace.delay_s(ACTIVE_S, 2) > 0, "a client has published again"


def test_a_share_of_1_is_no_limit() -> None:
    pace = publishing(share=1.0)
    step(pace, 0.01, took_s=0.01)
    assert pace.delay_s(0.01, 1) == 0


@pytest.mark.parametrize("subscriptions", [1, 3])
def test_each_subscription_may_send_some_times_as_many_entries_as_are_published(subscriptions: int) -> None:
    pace = publishing(share=0.5)
    step(pace, 0.01, took_s=0.004, sent=100, published=1 + 100 // FASTER, subscriptions=subscriptions)
    assert pace.delay_s(0.01, 51) == 0
    step(pace, 0.02, took_s=0.004, sent=100, published=51 + 10, subscriptions=subscriptions)
    assert pace.delay_s(0.02, 61) == pytest.approx(0.004 * (1 - FASTER * subscriptions * 10 / 100))


class Steps:
    """Subscriptions that submit a step of 1 ms again and again, beside a client that publishes all the time."""

    def __init__(self, share: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._worked_s = 0.0
        self.traffic = BrokerTraffic()
        self.turns = CatchUpTurns(share, self.traffic, lambda: self._loop.time() + self._worked_s)
        self.ran: list[str] = []

    def submit(self, name: str) -> None:
        self.turns.submit(lambda: self._step(name))

    def _step(self, name: str) -> None:
        self._worked_s += 0.001
        self.traffic.delivered.count(100, 100, 100)
        self.ran.append(name)
        self.submit(name)

    async def run(self, seconds: float, *, publishes: bool) -> None:
        for _ in range(int(seconds / 0.01)):
            self.traffic.published.count(publishes, publishes, publishes)
            await asyncio.sleep(0.01)


@pytest.mark.virtual_time
async def test_subscriptions_take_turns_and_keep_to_their_share_together() -> None:
    steps = Steps(share=0.2)
    await steps.run(0.01, publishes=True)
    for name in ("a", "b", "c"):
        steps.submit(name)
    await steps.run(1.0, publishes=True)
    assert steps.ran[:6] == ["a", "b", "c"] * 2
    assert len(steps.ran) * 0.001 == pytest.approx(0.25, rel=0.1)  # of 1 s of pauses and 0.25 s of work
    assert steps.turns.paused_s == pytest.approx(1.0, rel=0.1)


async def test_a_consumer_that_catches_up_makes_small_steps_while_clients_publish(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []  # entries of each pass
    one_pass = Dispatcher._pass

    def counted(self: Dispatcher) -> None:
        before = self._turns._delivered.entries
        one_pass(self)
        sent.append(self._turns._delivered.entries - before)

    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.subscribe("t", "s")
        await client.publish(3 * READ_ENTRIES)
        monkeypatch.setattr(Dispatcher, "_pass", counted)
        monkeypatch.setattr(CatchUpTurns, "is_paced", property(lambda _: True))
        monkeypatch.setattr(dispatcher, "SMALL_READ_BYTES", 0)  # these entries are tiny
        client.send(pb.CommandFlow(consumer_id=0, messagePermits=10 * READ_ENTRIES))
        await wait_until(lambda: sum(sent) == 3 * READ_ENTRIES, what="all messages")
    assert sum(entries > PACED_ENTRIES for entries in sent) == 1, "after the first read it is known to lag"


async def test_a_consumer_that_keeps_up_takes_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    async with BrokerWorld() as world, await world.client() as producer, await world.client() as client:
        await producer.produce_on("t")
        await client.subscribe("t", "s")
        client.send(pb.CommandFlow(consumer_id=0, messagePermits=1000))
        monkeypatch.setattr(CatchUpTurns, "submit", lambda *_: pytest.fail("it need not wait"))
        for _ in range(3):
            await producer.publish(2)
        await wait_until(lambda: world.topic("t").subscriptions["s"].delivered.entries == 6)
