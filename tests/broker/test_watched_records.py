"""Records kept fresh by watches: nothing is missed, nothing is read twice, and bad days pass."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from cepheid_metadata import (
    MemoryStore,
    MemoryTree,
    StoreUnavailableError,
    TenantRecord,
    Versioned,
    keys,
    tenant_records,
    watched_records,
)
from cepheid_metadata.watched_records import WatchedRecords
from cepheid_ports import TaskOwner
from tests.support import wait_until

KEY = keys.tenant_key("t")


class Store(MemoryStore):
    """Counts reads, and fails or delays them while told to."""

    reads = 0
    down = False
    on_read: Callable[[], None] | None = None
    gate: asyncio.Event | None = None

    async def get(self, key: str) -> Versioned | None:
        self.reads += 1
        if self.down:
            raise StoreUnavailableError("planted")
        found = await super().get(key)
        if self.gate is not None:
            await self.gate.wait()
        return found


class World:
    def __init__(self) -> None:
        self.store = Store(MemoryTree())
        self.tasks = TaskOwner("test", self._on_error)
        self.records = WatchedRecords(self.store, self.tasks)
        self.errors: list[BaseException] = []
        self.heard: list[str] = []

    def _on_error(self, error: BaseException) -> None:
        self.errors.append(error)

    async def write(self, *roles: str) -> None:
        found = await tenant_records(self.store).get("t")
        record = TenantRecord(admin_roles=roles)
        if found is None:
            await tenant_records(self.store).create("t", record)
        else:
            await tenant_records(self.store).replace("t", record, found.version)

    async def write_while_down(self, *roles: str) -> None:
        """By another process."""
        self.store.down = False
        await self.write(*roles)
        self.store.down = True

    async def use(self, user: str) -> watched_records.WatchedRecord[TenantRecord]:
        return await self.records.use(KEY, TenantRecord, user, lambda: self.heard.append(user))

    async def settle(self) -> None:
        for _ in range(1000):
            await asyncio.sleep(0)
            if not len(self.tasks):
                break
        assert not self.errors

    async def aclose(self) -> None:
        await self.tasks.aclose()
        await self.store.aclose()


def roles(watched: watched_records.WatchedRecord[TenantRecord]) -> tuple[str, ...] | None:
    return None if watched.record is None else watched.record.admin_roles


async def test_each_user_hears_of_each_change_and_the_record_is_read_once_for_all() -> None:
    world = World()
    await world.write("a")
    world.store.reads = 0
    users = await asyncio.gather(*(world.use(str(number)) for number in range(5)))
    assert world.store.reads == 1
    assert len(world.records) == 1
    await world.write("b")
    await world.settle()
    assert [roles(watched) for watched in users] == [("b",)] * 5
    assert sorted(world.heard) == ["0", "1", "2", "3", "4"]
    await world.write("c")  # armed again
    await world.settle()
    assert roles(users[0]) == ("c",)
    await world.aclose()


async def test_a_record_that_comes_later_is_heard_of_and_one_that_goes_stays_as_it_was() -> None:
    world = World()
    watched = await world.use("u")
    assert roles(watched) is None
    await world.write("a")
    await world.settle()
    assert roles(watched) == ("a",)
    await world.store.delete(KEY, None)
    await world.settle()
    assert roles(watched) == ("a",)
    await world.write("b")
    await world.settle()
    assert (roles(watched), world.heard) == (("b",), ["u", "u"])
    await world.aclose()


async def test_a_record_that_is_to_be_forgotten_is_gone_when_it_is_deleted() -> None:
    world = World()
    await world.write("a")
    watched = await world.records.use(KEY, TenantRecord, "u", lambda: world.heard.append("u"), forget_deleted=True)
    await world.store.delete(KEY, None)
    await world.settle()
    assert (watched.record, world.heard) == (None, ["u"])
    await world.write("b")
    await world.settle()
    assert roles(watched) == ("b",)
    await world.aclose()


async def test_a_record_is_stale_from_the_moment_that_it_may_have_changed_until_it_was_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watched_records, "RETRY_S", 0.01)
    world = World()
    suspected: list[None] = []
    world.records = WatchedRecords(world.store, world.tasks, on_suspected=lambda: suspected.append(None))
    await world.write("a")
    watched = await world.use("u")
    assert watched.stale_since is None
    world.store.down = True
    await world.write_while_down("b")
    await world.settle()
    since = watched.stale_since
    assert since is not None
    world.records.suspect_all()
    await world.settle()
    assert watched.stale_since == since, "counted from the first doubt"
    assert suspected
    world.store.down = False
    await wait_until(lambda: watched.stale_since is None)
    assert roles(watched) == ("b",)
    await world.aclose()


async def test_a_write_of_the_same_is_no_change() -> None:
    world = World()
    await world.write("a")
    await world.use("u")
    await world.write("a")
    await world.settle()
    assert world.heard == []
    await world.aclose()


async def test_a_change_during_the_read_is_not_missed() -> None:
    world = World()
    await world.write("a")
    watched = await world.use("u")
    world.store.gate = asyncio.Event()
    await tenant_records(world.store).replace("t", TenantRecord(admin_roles=("b",)), 0)
    await wait_until(lambda: world.store.reads == 3)  # the value is read, and on its way during the next write
    await tenant_records(world.store).replace("t", TenantRecord(admin_roles=("c",)), 1)
    world.store.gate.set()
    await world.settle()
    assert roles(watched) == ("c",)
    await world.aclose()


async def test_who_left_hears_nothing_and_the_last_one_takes_the_watch_along() -> None:
    world = World()
    first, second = await world.use("1"), await world.use("2")
    assert first is second
    world.records.leave(first, "1")
    await world.write("a")
    await world.settle()
    assert world.heard == ["2"]
    world.records.leave(first, "2")
    world.records.leave(first, "2")
    assert len(world.records) == 0
    reads = world.store.reads
    await tenant_records(world.store).replace("t", TenantRecord(), 0)
    await world.settle()
    assert world.store.reads == reads
    await world.aclose()


async def test_a_store_that_cannot_be_reached_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_records, "RETRY_S", 0.01)
    world = World()
    await world.write("a")
    watched = await world.use("u")
    world.store.down = True
    await tenant_records(world.store).replace("t", TenantRecord(admin_roles=("b",)), 0)
    asked = world.store.reads + 3
    await wait_until(lambda: world.store.reads >= asked)
    assert roles(watched) == ("a",)
    with pytest.raises(StoreUnavailableError):
        await world.records.use(keys.tenant_key("other"), TenantRecord, "u", lambda: None)
    assert len(world.records) == 1
    world.store.down = False
    await wait_until(lambda: roles(watched) == ("b",))
    await world.aclose()


async def test_garbage_changes_nothing_and_is_looked_at_again() -> None:
    world = World()
    await world.write("a")
    watched = await world.use("u")
    await world.store.put(KEY, b"garbage", 0)
    await world.settle()
    assert (roles(watched), world.heard) == (("a",), [])
    await world.store.put(KEY, TenantRecord(admin_roles=("b",)).encode(), 1)
    await world.settle()
    assert roles(watched) == ("b",)
    await world.aclose()


async def test_a_closed_store_ends_it_quietly() -> None:
    world = World()
    await world.use("u")
    await world.store.aclose()
    await world.settle()
    assert not len(world.tasks)
    await world.tasks.aclose()
