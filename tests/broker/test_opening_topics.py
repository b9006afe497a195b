"""Many topics that are asked for at once: opened some at a time, in order, and none is held up by those that cannot be opened."""

from __future__ import annotations

import asyncio
from typing import Any, Self

import pytest

from cepheid_broker.errors import ServiceNotReadyError
from cepheid_broker.topics import opening_turns
from cepheid_broker.topics.opening_turns import LONGEST_S, OpeningTurns
from cepheid_wire import TopicName
from tests.broker.broker_world import BrokerWorld
from tests.support import wait_until


class Openings:
    """Asks for turns, and notes who has one."""

    def __init__(self, at_once: int) -> None:
        self.turns = OpeningTurns(at_once)
        self.begun: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)

    async def ask(self, names: str) -> None:
        for name in names:
            self._ends[name] = asyncio.Event()
            self.tasks[name] = asyncio.ensure_future(self._open(name))
        await asyncio.sleep(0.001)

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await asyncio.sleep(0.001)

    async def _open(self, name: str) -> None:
        turn = await self.turns.take(NAMES[0])
        self.begun.append(name)
        try:
            await self._ends[name].wait()
        finally:
            self.turns.give_back(turn)


@pytest.mark.virtual_time
async def test_turns_are_given_in_the_order_of_asking() -> None:
    async with Openings(2) as openings:
        await openings.ask("abcd")
        assert openings.begun == ["a", "b"]
        await openings.end("b")
        await openings.ask("e")
        assert openings.begun == ["a", "b", "c"]
        await openings.end("a")
        await openings.end("c")
        assert openings.begun == ["a", "b", "c", "d", "e"]


@pytest.mark.virtual_time
async def test_a_slow_opening_does_not_hold_up_the_next_ones() -> None:
    async with Openings(1) as openings:
        await openings.ask("abc")
        await asyncio.sleep(0.9 * LONGEST_S)
        assert openings.begun == ["a"]
        await asyncio.sleep(0.2 * LONGEST_S)
        assert openings.begun == ["a", "b"]
        await openings.end("a")  # it has had its turn already
        assert openings.begun == ["a", "b"]
        await openings.end("b")
        assert openings.begun == ["a", "b", "c"]


@pytest.mark.virtual_time
@pytest.mark.parametrize("has_turn", [False, True])
async def test_who_gives_up_leaves_the_turn_to_the_next(has_turn: bool) -> None:
    async with Openings(1) as openings:
        await openings.ask("abc")
        openings._ends["a"].set()
        if has_turn:
            await asyncio.sleep(0)  # it has got its turn, and did not hear of that yet
        openings.tasks["b"].cancel()
        await asyncio.sleep(0.001)
        assert openings.begun == ["a", "c"]


NAMES = [TopicName.parse(f"persistent://public/default/t-{number}") for number in range(6)]


@pytest.fixture
def two_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening_turns.OpeningTurns.__init__, "__defaults__", (2,))


class SlowLedgers:
    """Managed ledgers whose openings end when they are told to."""

    def __init__(self, world: BrokerWorld, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opening: list[TopicName] = []
        self.go_on = asyncio.Event()
        ledgers = world.broker.topics._managed_ledgers
        self._open = ledgers.open
        monkeypatch.setattr(ledgers, "open", self.open)

    async def open(self, topic: TopicName, config: Any = None) -> Any:
        self.opening.append(topic)
        await self.go_on.wait()
        return await self._open(topic, config)


@pytest.mark.usefixtures("two_at_once")
async def test_few_topics_are_opened_at_once_but_those_of_a_hand_over_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    async with BrokerWorld() as world:
        topics = world.broker.topics
        await topics.get(NAMES[5], may_create=True)
        await topics.unload(NAMES[5])
        slow = SlowLedgers(world, monkeypatch)
        asked = [asyncio.ensure_future(topics.get(name, may_create=True)) for name in NAMES[:5]]
        await wait_until(lambda: len(slow.opening) == 2)
        taken = asyncio.ensure_future(topics.take_in([NAMES[5]]))
        await wait_until(lambda: NAMES[5] in slow.opening)
        assert len(slow.opening) == 3
        slow.go_on.set()
        assert await taken == [NAMES[5]]
        assert [topic.name for topic in await asyncio.gather(*asked)] == NAMES[:5]


@pytest.mark.usefixtures("two_at_once")
async def test_a_topic_that_went_to_another_broker_meanwhile_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    async with BrokerWorld() as world:
        topics = world.broker.topics
        slow = SlowLedgers(world, monkeypatch)
        asked = [asyncio.ensure_future(topics.get(name, may_create=True)) for name in NAMES[:3]]
        await wait_until(lambda: len(topics._opening) == 3 and len(slow.opening) == 2)
        monkeypatch.setattr(topics.ownership, "owns", lambda name: name != NAMES[2])
        slow.go_on.set()
        with pytest.raises(ServiceNotReadyError, match="its bundle moved"):
            await asked[2]
        assert NAMES[2] not in slow.opening
        await asyncio.gather(*asked[:2])


@pytest.mark.usefixtures("two_at_once")
async def test_a_broker_that_stops_opens_nothing_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    async with BrokerWorld() as world:
        topics = world.broker.topics
        slow = SlowLedgers(world, monkeypatch)
        asked = [asyncio.ensure_future(topics.get(name, may_create=True)) for name in NAMES]
        await wait_until(lambda: len(topics._opening) == len(NAMES) and len(slow.opening) == 2)
        stopping = asyncio.ensure_future(topics.aclose())
        await asyncio.sleep(0)
        slow.go_on.set()
        await stopping
        assert len(slow.opening) == 2
        assert all(isinstance(found, ServiceNotReadyError) for found in await asyncio.gather(*asked, return_exceptions=True))


@pytest.mark.usefixtures("two_at_once")
async def test_a_bundle_that_is_released_does_not_wait_for_the_turns_of_its_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    async with BrokerWorld() as world:
        topics = world.broker.topics
        slow = SlowLedgers(world, monkeypatch)
        asked = [asyncio.ensure_future(topics.get(name, may_create=True)) for name in NAMES[:4]]
        await wait_until(lambda: len(topics._opening) == 4 and len(slow.opening) == 2)
        topics._turns.hurry(lambda name: name == NAMES[3])
        await wait_until(lambda: NAMES[3] in slow.opening)
        assert NAMES[2] not in slow.opening
        slow.go_on.set()
        await asyncio.gather(*asked)


@pytest.mark.usefixtures("two_at_once")
async def test_topics_that_failed_before_take_no_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    async with BrokerWorld() as world:
        topics = world.broker.topics
        slow = SlowLedgers(world, monkeypatch)
        topics._retry.update(dict.fromkeys(NAMES[:3], (0.0, 0.1)))
        asked = [asyncio.ensure_future(topics.get(name, may_create=True)) for name in NAMES[:5]]
        await wait_until(lambda: len(slow.opening) == 5)
        slow.go_on.set()
        await asyncio.gather(*asked)


async def test_newcomers_do_not_overtake_those_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening_turns, "LONGEST_S", 0.05)
    turns, order = opening_turns.OpeningTurns(at_once=1), []

    async def take(name: TopicName) -> None:
        await turns.take(name)
        order.append(name)

    await turns.take(NAMES[0])
    first = asyncio.ensure_future(take(NAMES[1]))
    await asyncio.sleep(0)
    monkeypatch.setattr(opening_turns, "LONGEST_S", 0.0)  # the opening under way has taken too long, and the timer is not due
    second = asyncio.ensure_future(take(NAMES[2]))
    await asyncio.gather(first, second)
    assert order == [NAMES[1], NAMES[2]]
