"""Where bookies are, as their registrations say: comings and goings, moves, outages. Connections here are only names."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cepheid_ledger import LedgerSettings
from cepheid_ledger.bookie_directory import BookieDirectory, KnownBookie
from cepheid_metadata import (
    BookieCookie,
    BookieRegistration,
    DrainingBookie,
    MemoryStore,
    MemoryTree,
    Records,
    StoreUnavailableError,
    available_bookies,
    bookie_cookies,
    draining_bookies,
    readonly_bookies,
)
from cepheid_ports import Ports
from cepheid_rpc import BookieUnavailableError
from tests.support import wait_until


class Connection:
    def __init__(self, bookie_id: str, address: str) -> None:
        self.bookie_id, self.address = bookie_id, address
        self.abandoned = ""
        self.is_adding = False
        self.is_outdated = False
        self.closed = False

    async def abandon(self, reason: str) -> None:
        self.abandoned = reason

    async def aclose(self) -> None:
        self.closed = True


class World:
    def __init__(self, settings: LedgerSettings | None = None) -> None:
        self.tree = MemoryTree()
        self.store = MemoryStore(self.tree)
        self.connections: list[Connection] = []
        self.directory = BookieDirectory(self.store, Ports(), settings, connect=self._connect)

    def _connect(self, bookie_id: str, address: str) -> Any:
        self.connections.append(Connection(bookie_id, address))
        return self.connections[-1]

    async def bookie(self, name: str, address: str | None = None, *, writable: bool = True) -> MemoryStore:
        """The session of a bookie that is registered."""
        session = MemoryStore(self.tree)
        await self.register(session, name, address, writable=writable)
        return session

    async def register(
        self, session: MemoryStore, name: str, address: str | None = None, *, writable: bool = True, **fields: Any
    ) -> None:
        addresses = {"grpc": address or f"{name}:3181"}
        record = BookieRegistration(bookie_id=name, incarnation=f"of-{name}", addresses=addresses, **fields)
        await _place(session, writable=writable).create(name, record, ephemeral=True)


def _place(session: MemoryStore, *, writable: bool) -> Records[str, BookieRegistration]:
    return available_bookies(session) if writable else readonly_bookies(session)


@asynccontextmanager
async def started(*names: str) -> AsyncIterator[tuple[World, dict[str, MemoryStore]]]:
    world = World()
    sessions = {name: await world.bookie(name) for name in names}
    await world.directory.start()
    try:
        yield world, sessions
    finally:
        await world.directory.aclose()


async def test_it_knows_who_is_registered_and_as_what() -> None:
    async with started("b1", "b2") as (world, _):
        await world.bookie("b3", writable=False)
        await wait_until(lambda: "b3" in world.directory.known(), what="the newcomer")
        assert world.directory.writable() == ["b1", "b2"]
        assert world.directory.known()["b3"] == KnownBookie("b3", "b3:3181", "of-b3", registered=True, writable=False)


async def test_one_connection_for_each_bookie() -> None:
    async with started("b1", "b2") as (world, _):
        first = world.directory.get("b1")
        assert world.directory.get("b1") is first
        assert world.directory.get("b2") is not first
        assert [connection.address for connection in world.connections] == ["b1:3181", "b2:3181"]
    assert all(connection.closed for connection in world.connections)


async def test_an_unknown_bookie_is_named_with_those_that_are_known() -> None:
    async with started("b1") as (world, _):
        with pytest.raises(BookieUnavailableError, match="bookie b9 is not registered; known are b1"):
            world.directory.get("b9")


async def test_asking_for_unknown_bookies_in_a_loop_lists_them_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async with started("b1") as (world, _):
        children, listings = world.store.children, 0

        async def counted(key: str) -> list[str]:
            nonlocal listings
            listings += 1
            return await children(key)

        world.store.children = counted  # type: ignore[method-assign]
        for retry_s, expected in ((60.0, 0), (0.0, 4)):  # both kinds of registration are listed, draining bookies, and cookies
            monkeypatch.setattr("cepheid_ledger.bookie_directory.RETRY_S", retry_s)
            for _ in range(3):
                with pytest.raises(BookieUnavailableError):
                    world.directory.get("b9")
            await wait_until(lambda expected=expected: listings == expected and not world.directory._due.is_set())


async def test_a_bookie_that_is_gone_gets_no_ledgers_but_can_still_be_asked() -> None:
    async with started("b1", "b2") as (world, sessions):
        before = world.directory.get("b1")
        sessions["b1"].expire_session()
        await wait_until(lambda: world.directory.writable() == ["b2"], what="b1 gone")
        assert world.directory.get("b1") is before
        assert not world.directory.known()["b1"].registered


async def test_a_bookie_that_comes_back_elsewhere_is_found_there() -> None:
    async with started("b1") as (world, sessions):
        before = world.connections[:] or [world.directory.get("b1")]
        sessions["b1"].expire_session()
        await world.bookie("b1", "elsewhere:4000")
        await wait_until(lambda: world.directory.known()["b1"].address == "elsewhere:4000", what="the move")
        after = world.directory.get("b1")
        assert after is not before[0]
        await wait_until(lambda: bool(world.connections[0].abandoned), what="the old connection given up")
        assert world.connections[0].abandoned == "bookie b1 moved from b1:3181 to elsewhere:4000"
        assert world.directory.get("b1") is after


@pytest.mark.parametrize("is_adding", [False, True])
async def test_a_bookie_that_runs_anew_gets_a_connection_that_knows_no_failures(is_adding: bool) -> None:
    async with started("b1") as (world, _):
        before = world.directory.get("b1")
        (connection,) = world.connections
        connection.is_adding = is_adding
        record = BookieRegistration(bookie_id="b1", incarnation="of-b1", addresses={"grpc": "b1:3181"}, process="another")
        await available_bookies(world.store).replace("b1", record, 0)
        world.directory._due.set()  # a listing does not show it
        await wait_until(lambda: world.directory.known()["b1"].process == "another")
        assert (world.directory.get("b1") is before) == is_adding
        connection.is_adding = False
        after = world.directory.get("b1")
        assert after is not before
        assert world.directory.get("b1") is after
        await wait_until(lambda: connection.abandoned == "bookie b1 was restarted")


async def test_a_registration_that_cannot_be_read_hides_no_other_bookie(caplog: pytest.LogCaptureFixture) -> None:
    async with started("b1", "b2") as (world, sessions):
        key = "/bookies/available/b1"
        await sessions["b1"].put(key, b"garbage", 0)
        await MemoryStore(world.tree).create("/bookies/available/b9", b"garbage", ephemeral=True)
        await world.bookie("b3")
        await wait_until(lambda: world.directory.writable() == ["b1", "b2", "b3"], what="the newcomer")
        assert "b9" not in world.directory.known()
        assert world.directory.registered() == ["b1", "b2", "b3", "b9"], "b9 runs, so nothing of it is repaired"
        assert world.directory.problems() == ["b9 is not reachable: its registration is damaged, or of a newer release"]
        assert {record.key for record in caplog.records if record.message == "record.unreadable"} == {key, "/bookies/available/b9"}
        sessions["b1"].expire_session()
        await wait_until(lambda: world.directory.writable() == ["b2", "b3"], what="b1 gone")


async def test_a_bookie_whose_disk_fills_takes_no_new_ledgers_and_comes_back() -> None:
    async with started("b1", "b2") as (world, sessions):
        session = sessions["b1"]
        for writable, expected in ((False, ["b2"]), (True, ["b1", "b2"])):
            await world.register(session, "b1", writable=writable)
            await _place(session, writable=not writable).delete("b1", None)
            await wait_until(lambda expected=expected: world.directory.writable() == expected, what=f"{expected}")
        assert world.directory.known()["b1"].registered


async def test_it_says_what_is_wrong_with_each_bookie() -> None:
    async with started("b1", "b2") as (world, sessions):
        await world.bookie("b3", writable=False)
        cookie = BookieCookie(layout_version=1, bookie_id="b1", incarnation="i", cluster_id="c", directories={})
        await bookie_cookies(world.store).create("b1", cookie)
        sessions["b1"].expire_session()
        await wait_until(lambda: len(world.directory.problems()) == 2, what="both known")
        gone, read_only = world.directory.problems()
        assert (gone.partition(":")[0], read_only.partition(":")[0]) == ("b1 is not registered", "b3 is read-only")
        assert world.directory.registered() == ["b2", "b3"]


async def test_a_bookie_that_was_down_before_this_process_began_is_expected_all_the_same() -> None:
    world = World()
    for name in ("b1", "b2"):
        cookie = BookieCookie(layout_version=1, bookie_id=name, incarnation="i", cluster_id="c", directories={})
        await bookie_cookies(world.store).create(name, cookie)
    session = await world.bookie("b2")
    await world.directory.start()
    assert (world.directory.expected(), world.directory.registered()) == (["b1", "b2"], ["b2"])
    assert [problem.partition(":")[0] for problem in world.directory.problems()] == ["b1 is not registered"]
    await world.register(session, "b1")
    await wait_until(lambda: world.directory.problems() == [], what="both run")
    await world.directory.aclose()


async def test_an_outage_changes_nothing_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cepheid_ledger.bookie_directory.SETTLE_S", 0.01)
    async with started("b1", "b2") as (world, sessions):
        world.store.expire_session()  # ours, not theirs
        assert world.directory.writable() == ["b1", "b2"]
        sessions["b2"].expire_session()
        await world.bookie("b3")
        assert world.directory.writable() == ["b1", "b2"]
        world.store.renew_session()
        await wait_until(lambda: world.directory.writable() == ["b1", "b3"], what="the new state")


async def test_bookies_that_lost_their_sessions_with_us_get_a_moment_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ZooKeeper that stood still ends all sessions at once: ledgers are made before every bookie is registered again."""
    monkeypatch.setattr("cepheid_ledger.bookie_directory.SETTLE_S", 0.2)
    async with started("b1", "b2") as (world, sessions):
        for session in (*sessions.values(), world.store):
            session.expire_session()
        world.store.renew_session()
        sessions["b1"].renew_session()
        await world.register(sessions["b1"], "b1", "elsewhere:1")
        await wait_until(lambda: world.directory.known()["b1"].address == "elsewhere:1", what="b1 back")
        assert world.directory.writable() == ["b1", "b2"]
        await wait_until(lambda: world.directory.writable() == ["b1"], what="b2 given up")


async def test_a_listing_that_fails_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cepheid_ledger.bookie_directory.RETRY_S", 0.001)
    async with started("b1") as (world, _):
        children, failures = world.store.children, 3

        async def flaky(key: str) -> list[str]:
            nonlocal failures
            if failures:
                failures -= 1
                raise StoreUnavailableError("away")
            return await children(key)

        world.store.children = flaky  # type: ignore[method-assign]
        await world.bookie("b2")
        await wait_until(lambda: world.directory.writable() == ["b1", "b2"], what="both")
        assert failures == 0


def test_grpc_is_imported_by_who_uses_it_only() -> None:
    """The face of the package and this module stay cheap for commands that only look."""
    import subprocess

    code = "import sys, cepheid_ledger.bookie_directory; print('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


async def test_bookies_that_came_back_are_said_once_they_are_writable() -> None:
    async with started("a", "b") as (world, sessions):
        told: list[str] = []

        def on_back(bookie_id: str) -> None:
            assert bookie_id in world.directory.writable()
            told.append(bookie_id)

        world.directory.on_back = on_back
        await sessions["a"].aclose()
        await wait_until(lambda: world.directory.writable() == ["b"])
        readonly = await world.bookie("a", writable=False)
        await wait_until(lambda: world.directory.known()["a"].registered)
        assert told == []
        await world.register(readonly, "a")
        await wait_until(lambda: told == ["a"])
        record = BookieRegistration(bookie_id="b", incarnation="of-b", addresses={"grpc": "b:3181"}, process="another")
        b = available_bookies(world.store)
        await b.replace("b", record, 0)  # so soon that nobody saw it gone
        await world.bookie("c")
        await wait_until(lambda: told == ["a", "b", "c"])


async def test_a_bookie_with_other_disks_is_said_before_it_is_writable_again() -> None:
    async with started("a", "b") as (world, sessions):
        told: list[list[str]] = []
        world.directory.on_new_incarnation = lambda: told.append(world.directory.writable())
        await sessions["a"].aclose()
        await wait_until(lambda: world.directory.writable() == ["b"])
        await world.bookie("a")
        await wait_until(lambda: world.directory.writable() == ["a", "b"])
        assert told == [], "it came back with what it had"
        await sessions["b"].aclose()
        await wait_until(lambda: world.directory.writable() == ["a"])
        record = BookieRegistration(bookie_id="b", incarnation="blank", addresses={"grpc": "b:3181"})
        await available_bookies(MemoryStore(world.tree)).create("b", record, ephemeral=True)
        await wait_until(lambda: world.directory.writable() == ["a", "b"])
        assert told == [["a"]]


async def test_a_draining_bookie_gets_no_ledgers_until_that_is_taken_back() -> None:
    async with started("b1", "b2") as (world, _):
        back: list[str] = []
        world.directory.on_back = back.append
        draining = draining_bookies(world.store)
        await draining.create("b2", DrainingBookie(bookie_id="b2", since_ms=1))
        await wait_until(lambda: world.directory.draining() == ["b2"], what="b2 is draining")
        assert world.directory.writable() == ["b1"]
        assert world.directory.registered() == ["b1", "b2"]
        assert world.directory.problems() == ["b2 is draining: it is being decommissioned, and it gets no new ledgers"]
        await draining.delete("b2", None)
        await wait_until(lambda: world.directory.writable() == ["b1", "b2"], what="b2 is writable again")
        assert world.directory.draining() == world.directory.problems() == []
        assert back == ["b2"]


async def test_a_draining_bookie_that_is_gone_is_named_as_both() -> None:
    async with started("b1", "b2") as (world, sessions):
        await draining_bookies(world.store).create("b2", DrainingBookie(bookie_id="b2", since_ms=1))
        cookie = BookieCookie(layout_version=1, bookie_id="b2", incarnation="i", cluster_id="c", directories={})
        await bookie_cookies(world.store).create("b2", cookie)
        sessions["b2"].expire_session()
        await wait_until(lambda: world.directory.registered() == ["b1"], what="b2 is gone")
        assert world.directory.draining() == ["b2"]
        assert world.directory.problems() == ["b2 is draining: it is being decommissioned, and it is not registered"]


async def test_racks_outlive_registrations_and_free_space_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cepheid_ledger.bookie_directory.REFRESH_S", 0.02)
    async with started("b1") as (world, _):
        session = MemoryStore(world.tree)
        await world.register(session, "b2", rack="eu/r1", free_bytes=10, total_bytes=100)
        await wait_until(lambda: world.directory.free_bytes() == {"b2": 10}, what="the newcomer")
        assert world.directory.racks() == {"b2": "eu/r1"}
        registrations = available_bookies(session)
        found = await registrations.get("b2")
        assert found is not None
        await registrations.replace("b2", found.record.replace(free_bytes=5), found.version)
        await wait_until(lambda: world.directory.free_bytes() == {"b2": 5}, what="the change, which no watch shows")
        session.expire_session()
        await wait_until(lambda: world.directory.registered() == ["b1"], what="b2 is gone")
        assert world.directory.racks() == {"b2": "eu/r1"}


GONE_S = 0.2


@asynccontextmanager
async def watching_for_gone(*names: str) -> AsyncIterator[tuple[World, dict[str, MemoryStore], list[tuple[float, str]]]]:
    """With what is reported as gone, and when."""
    world = World(LedgerSettings(unregistered_bookie_s=GONE_S))
    loop = asyncio.get_running_loop()
    gone: list[tuple[float, str]] = []
    world.directory.on_gone = lambda bookie_id: gone.append((loop.time(), bookie_id))
    sessions = {name: await world.bookie(name) for name in names}
    await world.directory.start()
    try:
        yield world, sessions, gone
    finally:
        await world.directory.aclose()


@pytest.mark.virtual_time
async def test_a_bookie_that_stays_away_is_reported_again_and_again() -> None:
    async with watching_for_gone("b1", "b2") as (world, sessions, gone):
        began = asyncio.get_running_loop().time()
        sessions["b1"].expire_session()
        await asyncio.sleep(GONE_S - 0.01)
        assert gone == []
        await asyncio.sleep(2 * GONE_S)
        assert [(round((at - began) / GONE_S, 1), bookie) for at, bookie in gone] == [(1.0, "b1"), (2.0, "b1")]
        await world.bookie("b1")
        await asyncio.sleep(3 * GONE_S)
        assert len(gone) == 2, "it is back"


@pytest.mark.virtual_time
async def test_a_bookie_that_restarts_in_time_is_not_gone() -> None:
    async with watching_for_gone("b1", "b2") as (world, sessions, gone):
        for _ in range(5):
            sessions["b1"].expire_session()
            await asyncio.sleep(GONE_S / 2)
            sessions["b1"] = await world.bookie("b1")
            await asyncio.sleep(GONE_S)
        await world.bookie("b1", writable=False)
        await asyncio.sleep(2 * GONE_S)
        assert gone == [], "a read-only bookie is registered, too"


@pytest.mark.virtual_time
async def test_a_bookie_with_other_disks_is_reported_as_gone_after_it_is_reported_as_back() -> None:
    """What `on_back` ends for bookies that are back as they were begins for this one."""
    async with watching_for_gone("b1") as (world, sessions, _):
        told: list[str] = []
        world.directory.on_gone = lambda bookie_id: told.append("gone")
        world.directory.on_back = lambda bookie_id: told.append("back")
        sessions["b1"].expire_session()
        record = BookieRegistration(bookie_id="b1", incarnation="others", addresses={"grpc": "b1:3181"}, process="2")
        await available_bookies(MemoryStore(world.tree)).create("b1", record, ephemeral=True)
        await wait_until(lambda: bool(told), what="the news")
        assert told == ["back", "gone"]


@pytest.mark.virtual_time
async def test_nothing_is_gone_while_metadata_is_away_or_sessions_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    settle_s = 3 * GONE_S
    monkeypatch.setattr("cepheid_ledger.bookie_directory.SETTLE_S", settle_s)
    async with watching_for_gone("b1", "b2") as (world, sessions, gone):
        sessions["b1"].expire_session()
        await asyncio.sleep(GONE_S / 2)
        world.store.expire_session()
        await asyncio.sleep(3 * GONE_S)
        assert gone == []
        world.store.renew_session()
        began = asyncio.get_running_loop().time()
        await asyncio.sleep(settle_s + GONE_S / 2)
        assert gone == []
        await asyncio.sleep(GONE_S)
        assert [(round(at - began, 2), bookie) for at, bookie in gone] == [(settle_s + GONE_S, "b1")]
