"""Who of the other brokers is gone: signs without I/O, challenges over real registrations, and a link to a real broker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest

from cepheid_broker.ownership.broker_directory import BrokerDirectory
from cepheid_broker.ownership.broker_liveness import (
    ANSWER_S,
    FIRST_REST_S,
    RESTING_S,
    SILENCE_S,
    BrokerLiveness,
    PeerSigns,
    Sign,
)
from cepheid_broker.ownership.ownership import There
from cepheid_broker.ownership.peer_link import LinkRefusedError
from cepheid_metadata import BrokerRegistration, MemoryStore, MemoryTree, Registration, broker_records
from cepheid_ports import TaskOwner
from tests.simulation.world.virtual_loop import VirtualLoop


def test_a_late_timer_counts_as_our_own_pause() -> None:
    signs = PeerSigns(since_s=0.0)
    signs.on_timer(SILENCE_S + 0.3, due_s=0.2)
    assert signs.suspicion(SILENCE_S + 0.3) == ""
    signs.on_timer(2 * SILENCE_S + 0.31, due_s=2 * SILENCE_S + 0.3)
    assert signs.suspicion(2 * SILENCE_S + 0.31) == "silent"


def test_a_link_that_is_refused_for_days_is_still_watched() -> None:
    signs = PeerSigns(since_s=0.0)
    for attempt in range(2_000):
        signs.on_answered(float(attempt))
    assert signs.rest_until_s == 1_999.0 + 300.0


def test_a_broker_that_is_heard_again_is_not_left_alone_for_long() -> None:
    signs = PeerSigns(since_s=0.0)
    for _ in range(8):
        signs.on_answered(10.0)
    signs.on_heard(20.0)
    assert signs.suspicion(20.0 + FIRST_REST_S) == "silent"


def test_one_refusal_is_not_enough() -> None:
    signs = PeerSigns(since_s=0.0)
    signs.on_heard(1.0)
    signs.on_ended(refused=False)
    signs.on_ended(refused=True)
    assert (signs.suspicion(1.1), signs.sign) == ("", Sign.SUSPECT)
    signs.on_ended(refused=True)
    assert signs.suspicion(1.1) == "refused"


def test_who_answers_is_left_alone_for_longer_each_time() -> None:
    signs, now = PeerSigns(since_s=0.0), 0.0
    rests: list[float] = []
    for _ in range(8):
        signs.on_answered(now)
        rests.append(signs.rest_until_s - now)
        now = signs.rest_until_s
    assert rests[:3] == [FIRST_REST_S, 2 * FIRST_REST_S, 4 * FIRST_REST_S]
    assert max(rests) == 300.0
    signs.on_heard(now)
    signs.on_answered(now)
    assert signs.rest_until_s - now == FIRST_REST_S


PONG_TAKES_S = 0.01


class Other:
    """Another broker: its registration, and how it behaves on its connection."""

    def __init__(self, world: World, name: str) -> None:
        self.name = name
        self.pings = True
        self.listens = True
        self.lets_in = True
        self.connected: set[asyncio.Task[None]] = set()
        self.store = MemoryStore(world.tree)
        record = BrokerRegistration(broker_id=name, addresses={"pulsar": name}, started_at_ms=1)
        self.registration = Registration(
            self.store, name, (broker_records(self.store),), record, is_past=lambda _: False, patience_s=1.0, on_failed=_raise
        )

    async def kill(self) -> None:
        """The process ends, and its session goes on for a while."""
        self.listens = False
        await self.registration._tasks.aclose()
        for task in self.connected:
            task.cancel()

    async def pause(self) -> None:
        self.pings = False
        await self.registration._tasks.aclose()

    def cut(self) -> None:
        """It reaches the metadata store and nobody reaches it."""
        self.pings = False


class WatchedStore(MemoryStore):
    """Counts deletions, of which each is a challenge here, and may take long to list brokers."""

    def __init__(self, tree: MemoryTree, slow_lists_s: float) -> None:
        super().__init__(tree)
        self.deletions = 0
        self._slow_lists_s = slow_lists_s

    async def delete(self, key: str, expected_version: int | None) -> None:
        self.deletions += 1
        await super().delete(key, expected_version)

    async def children(self, key: str) -> list[str]:
        found = await super().children(key)
        await asyncio.sleep(self._slow_lists_s)
        return found


class World:
    def __init__(self, *, slow_lists_s: float = 0.0) -> None:
        self.tree = MemoryTree()
        self.others: dict[str, Other] = {}
        self.store = WatchedStore(self.tree, slow_lists_s)
        self.tasks = TaskOwner("test")
        self.directory = BrokerDirectory(self.store, self.tasks)
        self.liveness = BrokerLiveness(self.store, self.link)

    @property
    def challenges(self) -> int:
        return self.store.deletions

    async def add(self, name: str) -> Other:
        other = self.others[name] = Other(self, name)
        await other.registration.start()
        return other

    async def start(self) -> None:
        await self.directory.start()
        self.liveness.start("me", self.directory)
        await asyncio.sleep(0.6)

    async def link(self, addresses: Mapping[str, str], on_heard: Callable[[], None]) -> None:
        other = self.others[addresses["pulsar"]]
        if not other.listens:
            raise ConnectionRefusedError
        if not other.lets_in:
            raise LinkRefusedError("no token")
        task = asyncio.current_task()
        assert task is not None
        other.connected.add(task)
        try:
            while True:
                await asyncio.sleep(PONG_TAKES_S)
                if other.pings:
                    on_heard()
                await asyncio.sleep(0.5)
        except asyncio.CancelledError:
            if other.listens:
                raise
            raise EOFError from None
        finally:
            other.connected.discard(task)

    async def aclose(self) -> None:
        await self.liveness.aclose()
        await self.tasks.aclose()
        for other in self.others.values():
            await other.registration.aclose()

    async def gone_after_s(self, other: Other, limit_s: float = 30.0) -> float:
        now = asyncio.get_running_loop().time
        began = now()
        while not self.liveness.is_gone(other.name):
            assert now() - began < limit_s, f"{other.name} counts as living"
            await asyncio.sleep(0.01)
        return now() - began


@pytest.mark.virtual_time
async def test_a_killed_broker_is_gone_within_a_second() -> None:
    world = World()
    other = await world.add("a")
    await world.start()
    assert (world.liveness.sign_of("a"), world.liveness.heard) == (Sign.HEARD, 1)
    signs = [world.liveness.sign_at(There("a", {"pulsar": address})) for address in ("a", "where a process with its id was before")]
    assert signs == [Sign.HEARD, Sign.UNKNOWN]
    await other.kill()
    await asyncio.sleep(0.01)
    assert (world.liveness.sign_of("a"), world.liveness.heard) == (Sign.SUSPECT, 0)
    assert await world.gone_after_s(other) < 0.3 + ANSWER_S["refused"]
    assert (world.liveness.challenges, world.liveness.found_gone) == (1, 1)
    assert await broker_records(world.store).get("a") is None
    await world.aclose()


@pytest.mark.virtual_time
@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.15])
async def test_a_killed_broker_that_somebody_else_challenges_first_is_gone_here_as_well(after_s: float) -> None:
    """Otherwise only that one may take its bundles, and who asks here waits until the session ends."""
    world = World()
    other = await world.add("a")
    await world.start()
    await other.kill()
    await asyncio.sleep(after_s)
    records = broker_records(MemoryStore(world.tree))
    found = await records.get("a")
    assert found is not None
    await records.delete("a", found.version)
    assert await world.gone_after_s(other) < 0.3 + ANSWER_S["refused"]
    assert (world.liveness.challenges, world.liveness.found_gone) == (0, 0)  # one of all brokers counts it
    await world.aclose()


@pytest.mark.virtual_time
async def test_a_paused_broker_is_gone_within_two_and_a_half_seconds_and_is_believed_when_it_wakes() -> None:
    world = World()
    other = await world.add("a")
    await world.start()
    await other.pause()
    assert SILENCE_S < await world.gone_after_s(other) < 2.5
    other.pings = True
    await other.registration.start()
    await asyncio.sleep(0.7)
    assert (world.liveness.is_gone("a"), world.liveness.sign_of("a")) == (False, Sign.HEARD)
    await world.aclose()


@pytest.mark.virtual_time
async def test_a_broker_that_reaches_the_store_alone_is_not_gone() -> None:
    world = World()
    other = await world.add("a")
    await world.start()
    other.cut()
    await asyncio.sleep(15.0)
    assert not world.liveness.is_gone("a")
    assert world.liveness.sign_of("a") is Sign.UNKNOWN
    assert await broker_records(world.store).get("a") is not None
    await world.aclose()


@pytest.mark.virtual_time
async def test_a_broker_that_does_not_let_us_in_lives() -> None:
    world = World()
    other = await world.add("a")
    other.lets_in = False
    await world.start()
    await asyncio.sleep(10.0)
    assert not world.liveness.is_gone("a")
    await world.aclose()


@pytest.mark.virtual_time
async def test_a_name_that_another_process_has_by_now_is_not_gone() -> None:
    world = World()
    other = await world.add("a")
    await world.start()
    await other.kill()
    records = broker_records(world.store)
    found = await records.get("a")
    assert found is not None
    await records.replace("a", found.record.replace(started_at_ms=2), found.version)
    other.listens = True
    await asyncio.sleep(10.0)
    assert not world.liveness.is_gone("a")
    await world.aclose()


@pytest.mark.virtual_time
async def test_a_gone_broker_that_is_registered_when_its_bundle_is_to_be_taken_has_come_back() -> None:
    world = World()
    other = await world.add("a")
    await world.start()
    await other.pause()
    await world.gone_after_s(other)
    assert not await world.liveness.has_come_back("a")
    await broker_records(other.store).create("a", BrokerRegistration(broker_id="a", addresses={"pulsar": "a"}, started_at_ms=1))
    assert await world.liveness.has_come_back("a")
    assert not world.liveness.is_gone("a")
    await world.aclose()


@pytest.mark.virtual_time
async def test_a_broker_that_was_cut_off_is_heard_as_soon_as_it_is_back() -> None:
    """Connections are tried while it is left alone, and for long enough to hear something."""
    world = World()
    other = await world.add("a")
    await world.start()
    other.cut()
    await asyncio.sleep(10.0)
    answered = world.challenges
    other.pings = True
    await asyncio.sleep(SILENCE_S + RESTING_S + 0.5)
    assert (world.liveness.sign_of("a"), world.challenges) == (Sign.HEARD, answered)
    await world.aclose()


@pytest.mark.virtual_time
async def test_a_slow_list_of_brokers_does_not_forget_that_one_is_left_alone() -> None:
    """The list may be read while the challenged broker is not registered, and arrive after it answered."""
    world = World(slow_lists_s=0.3)
    other = await world.add("a")
    await world.start()
    other.cut()
    await asyncio.sleep(FIRST_REST_S + 3.0)
    assert world.challenges <= 2
    await world.aclose()


@pytest.mark.virtual_time
async def test_a_pause_of_our_own_challenges_no_broker() -> None:
    world = World()
    await world.add("a")
    await world.start()
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    for length_s in (1.0, 1.15, 1.25, 1.35, 3.0):
        await asyncio.sleep(2.0)
        loop._now += length_s
        await asyncio.sleep(0.2)
        assert world.challenges == 0, length_s
    await world.aclose()


def _raise(error: BaseException) -> None:
    raise error
