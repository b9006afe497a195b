"""The ephemeral record of a process: what it does about sessions, earlier runs, strangers, and whoever deletes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from cepheid_metadata import (
    BookieRegistration,
    ClusterNotFoundedError,
    MemoryStore,
    MemoryTree,
    OtherClusterError,
    Registration,
    RegistrationTakenError,
    StoreUnavailableError,
    available_bookies,
    found_cluster,
    readonly_bookies,
    require_cluster,
)
from cepheid_ports import Ports
from tests.support import wait_until

NAME = "b1"
AVAILABLE, READONLY = 0, 1


def record(process: str, incarnation: str = "disk", address: str = "host:3181") -> BookieRegistration:
    return BookieRegistration(bookie_id=NAME, incarnation=incarnation, addresses={"grpc": address}, process=process)


class World:
    def __init__(self) -> None:
        self.tree = MemoryTree()
        self.store = MemoryStore(self.tree)
        self.failures: list[BaseException] = []

    def registration(self, process: str = "p1", *, store: MemoryStore | None = None, patience_s: float = 5.0):
        store = store or self.store
        mine = record(process)
        return Registration(
            store,
            NAME,
            (available_bookies(store), readonly_bookies(store)),
            mine,
            is_past=lambda found: (found.incarnation, found.addresses) == (mine.incarnation, mine.addresses),
            patience_s=patience_s,
            on_failed=self.failures.append,
        )

    async def found(self, store: MemoryStore | None = None) -> tuple[str | None, str | None]:
        """The process registered as available, and the one as read-only."""
        store = store or MemoryStore(self.tree)
        places = [await records(store).get(NAME) for records in (available_bookies, readonly_bookies)]
        first, second = (None if place is None else place.record.process for place in places)
        return first, second


@asynccontextmanager
async def started(world: World, place: int = AVAILABLE) -> AsyncIterator[Registration[BookieRegistration]]:
    registration = world.registration()
    await registration.start(place)
    try:
        yield registration
    finally:
        await registration.aclose()


@pytest.mark.parametrize("place", [AVAILABLE, READONLY])
async def test_it_registers_and_leaves(place: int) -> None:
    world = World()
    async with started(world, place) as registration:
        assert registration.registered
        assert (await world.found())[place] == "p1"
    assert await world.found() == (None, None)
    assert not registration.registered


async def test_a_move_is_never_nowhere_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    world = World()
    async with started(world) as registration:
        seen: list[tuple[str | None, str | None]] = []
        apply = world.tree.apply

        def watched(ops, session_id):
            results = apply(ops, session_id)
            nodes = world.tree.nodes
            seen.append(tuple(f"/bookies/{place}/{NAME}" in nodes for place in ("available", "readonly")))
            return results

        world.tree.apply = watched  # type: ignore[method-assign]
        registration.move(READONLY)
        await wait_until(lambda: seen[-1:] == [(False, True)], what="the move")
        registration.move(AVAILABLE)
        await wait_until(lambda: seen[-1:] == [(True, False)], what="the way back")
        assert (False, False) not in seen
        assert registration.registered
    made = [record.key for record in caplog.records if record.message == "registration.made"]
    assert made == [f"/bookies/{place}/{NAME}" for place in ("available", "readonly", "available")]


async def test_a_lost_session_is_followed_by_a_new_registration() -> None:
    world = World()
    async with started(world) as registration:
        world.store.expire_session()
        assert not registration.registered
        assert await world.found() == (None, None)
        world.store.renew_session()
        await wait_until(lambda: registration.registered, what="registered again")
        assert await world.found() == ("p1", None)


async def test_a_move_while_the_session_is_lost_holds_afterwards() -> None:
    world = World()
    async with started(world) as registration:
        world.store.expire_session()
        registration.move(READONLY)
        world.store.renew_session()
        await wait_until(lambda: registration.registered, what="registered again")
        assert await world.found() == (None, "p1")


@pytest.mark.parametrize("place", [AVAILABLE, READONLY])
async def test_it_can_be_nowhere_for_a_while_also_across_sessions(place: int) -> None:
    world = World()
    async with started(world, place) as registration:
        registration.move(None)
        await wait_until(lambda: not registration.registered, what="nowhere")
        assert await world.found() == (None, None)
        world.store.expire_session()
        world.store.renew_session()
        await asyncio.sleep(0.05)
        assert await world.found() == (None, None)
        registration.move(AVAILABLE)
        await wait_until(lambda: registration.registered, what="registered again")
        assert await world.found() == ("p1", None)


async def test_what_somebody_deleted_is_made_again() -> None:
    world = World()
    async with started(world):
        other = MemoryStore(world.tree)
        await available_bookies(other).delete(NAME, None)
        await wait_until(lambda: f"/bookies/available/{NAME}" in world.tree.nodes, what="made again")


async def test_the_registration_of_an_earlier_run_is_replaced_at_once() -> None:
    """Its session may live for as long as the timeout says, although the process is dead."""
    world = World()
    dead = MemoryStore(world.tree)
    await readonly_bookies(dead).create(NAME, record("p0"), ephemeral=True)
    await available_bookies(dead).create(NAME, record("p0"), ephemeral=True)
    async with started(world):
        assert await world.found() == ("p1", None)
        dead.expire_session()
        assert await world.found() == ("p1", None)


async def test_a_stranger_is_waited_for() -> None:
    world = World()
    stranger = MemoryStore(world.tree)
    await available_bookies(stranger).create(NAME, record("other", address="elsewhere:3181"), ephemeral=True)
    registration = world.registration()
    tasks = registration._tasks
    starting = tasks.start(registration.start(), name="start")
    await wait_until(lambda: registration._watch is not None, what="waiting")
    assert not starting.done()
    stranger.expire_session()
    await starting
    assert await world.found() == ("p1", None)
    await registration.aclose()


async def test_a_stranger_that_stays_is_an_error_that_says_who() -> None:
    world = World()
    stranger = MemoryStore(world.tree)
    await available_bookies(stranger).create(NAME, record("other", address="elsewhere:3181"), ephemeral=True)
    registration = world.registration(patience_s=0.05)
    with pytest.raises(RegistrationTakenError, match=r"elsewhere:3181.*stop the other process"):
        await registration.start()
    await registration.aclose()
    assert await world.found() == ("other", None)


async def test_a_stranger_that_comes_after_a_lost_session_ends_the_process() -> None:
    world = World()
    registration = world.registration(patience_s=0.05)
    await registration.start()
    world.store.expire_session()
    stranger = MemoryStore(world.tree)
    await available_bookies(stranger).create(NAME, record("other", address="elsewhere:3181"), ephemeral=True)
    world.store.renew_session()
    await wait_until(lambda: bool(world.failures), what="the failure")
    assert isinstance(world.failures[0], RegistrationTakenError)
    await registration.aclose()


GARBAGE = [b"", b"\xff\x00", b"{}", b"[1]", b'{"format": "x"}']


@pytest.mark.parametrize("garbage", GARBAGE)
async def test_a_registration_that_becomes_garbage_is_replaced_and_named(garbage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    async with started(world) as registration:
        key = f"/bookies/available/{NAME}"
        for _ in range(2):
            await MemoryStore(world.tree).put(key, garbage, 0)
            await wait_until(lambda: key in world.tree.nodes and world.tree.nodes[key].value != garbage, what="replaced")
        assert await world.found() == ("p1", None)
        assert registration.registered
    assert world.failures == []
    (first, _) = [record for record in caplog.records if record.message == "registration.damaged"]
    assert (first.levelname, first.key) == ("ERROR", f"/bookies/available/{NAME}")
    assert "replaced" in first.hint


async def test_garbage_that_was_there_before_does_not_keep_a_process_from_starting() -> None:
    world = World()
    other = MemoryStore(world.tree)
    for place in ("available", "readonly"):
        await other.create(f"/bookies/{place}/{NAME}", b"garbage", ephemeral=True)
    async with started(world):
        assert await world.found() == ("p1", None)


async def test_a_registration_of_a_newer_release_is_another_process_s() -> None:
    world = World()
    await MemoryStore(world.tree).create(f"/bookies/available/{NAME}", b'{"format": 99}', ephemeral=True)
    registration = world.registration(patience_s=0.05)
    with pytest.raises(RegistrationTakenError, match=r"format 99.*stop the other process"):
        await registration.start()
    await registration.aclose()


async def test_an_outage_at_the_start_is_waited_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cepheid_metadata.registration._RETRY_S", 0.001)
    world = World()
    create, attempts = world.store.create, 0

    async def lossy(key: str, value: bytes, *, ephemeral: bool = False, sequential: bool = False) -> str:
        """The first creation happens, and its answer is lost."""
        nonlocal attempts
        attempts += 1
        made = await create(key, value, ephemeral=ephemeral, sequential=sequential)
        if attempts == 1:
            raise StoreUnavailableError("lost", outcome_unknown=True)
        return made

    world.store.create = lossy  # type: ignore[method-assign]
    async with started(world):
        assert attempts == 1
        assert await world.found() == ("p1", None)


async def test_a_cluster_is_founded_once() -> None:
    tree = MemoryTree()
    store = MemoryStore(tree)
    with pytest.raises(ClusterNotFoundedError, match="cepheid init"):
        await require_cluster(store)
    first = await found_cluster(store, "east", Ports())
    assert await found_cluster(MemoryStore(tree), "east", Ports()) == first
    assert await require_cluster(store) == first
    with pytest.raises(OtherClusterError, match="holds cluster 'east', not 'west'"):
        await found_cluster(store, "west", Ports())


async def test_who_loses_the_race_to_found_a_cluster_gets_the_winners() -> None:
    tree = MemoryTree()
    late, early = MemoryStore(tree), MemoryStore(tree)
    get, looked = late.get, 0

    async def look(key: str):
        nonlocal looked
        looked += 1
        found = await get(key)
        if looked == 1:
            await found_cluster(early, "east", Ports())
        return found

    late.get = look  # type: ignore[method-assign]
    assert await found_cluster(late, "east", Ports()) == await require_cluster(early)


async def test_an_update_is_made_in_place_and_stays_after_a_move() -> None:
    world = World()
    async with started(world) as registration:
        seen: list[bool] = []
        apply = world.tree.apply

        def watched(ops, session_id):
            results = apply(ops, session_id)
            seen.append(f"/bookies/available/{NAME}" in world.tree.nodes)
            return results

        world.tree.apply = watched  # type: ignore[method-assign]
        for process in ("p2", "p3"):  # the second while the first one is on its way
            registration.update(record(process, incarnation="changed"))
        await wait_until(lambda: bool(seen), what="the update")
        assert await world.found() == ("p3", None)
        assert all(seen)
        registration.move(READONLY)
        await wait_until(lambda: f"/bookies/available/{NAME}" not in world.tree.nodes, what="the move")
        assert await world.found() == (None, "p3")
    assert await world.found() == (None, None)


async def test_an_update_while_the_session_is_lost_is_registered_with_the_next_one() -> None:
    world = World()
    async with started(world) as registration:
        world.store.expire_session()
        registration.update(record("p2"))
        world.store.renew_session()
        await wait_until(lambda: registration.registered, what="registered again")
        assert await world.found() == ("p2", None)
