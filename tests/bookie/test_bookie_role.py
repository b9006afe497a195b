"""A storage node as a process has it: what it registers as and when, what its pages say, what it leaves behind."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from unittest import mock

import pytest

from cepheid_bookie import bookie_role
from cepheid_bookie.bookie_role import BookieRole, is_worth_reporting
from cepheid_bookie.bookie_role_settings import BookieNameError, BookieRoleSettings
from cepheid_bookie.disk import RealFile
from cepheid_bookie.errors import CookieError, DiskTooSmallError, PortInUseError
from cepheid_bookie.scans import accept_every_ticket
from cepheid_metadata import (
    BookieRegistration,
    ClusterIdentity,
    ClusterNotFoundedError,
    MemoryStore,
    MemoryTree,
    RegistrationTakenError,
    RestoredMetadata,
    available_bookies,
    bookie_reports,
    cluster_identity,
    found_cluster,
    readonly_bookies,
    restored_record,
)
from cepheid_metadata.store import Create, Op, OpResult, Put
from cepheid_metadata.upgrade import (
    NEWEST_STORAGE_FORMAT,
    NewerStorageFormatError,
    StorageFormat,
    finish_upgrade,
    storage_format_record,
)
from cepheid_ports import Ports, ProcessFailedError
from cepheid_rpc import LacRequest, ReadRequest, Status
from tests.bookie.bookie_support import KEY, add, added, entries_of, group_of, read_all
from tests.support import wait_until


class World:
    """A metadata server in memory, and roles that find it at any URL."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
        self.tree = MemoryTree()
        self.directory = directory
        self.stores: list[MemoryStore] = []

        async def open_patiently(url: str, ports: Ports, **_: object) -> MemoryStore:
            self.stores.append(MemoryStore(self.tree))
            return self.stores[-1]

        monkeypatch.setattr(bookie_role, "open_patiently", open_patiently)

    def role(self, **changes: object) -> BookieRole:
        authorize_read = changes.pop("authorize_read", accept_every_ticket)
        assert callable(authorize_read)
        fields = {"metadata": "zk://x", "data_dir": self.directory / "b1", "bookie_id": "b1", "port": 0, "http_port": 0}
        settings = BookieRoleSettings.model_validate({**fields, **changes})
        return BookieRole(settings, Ports(), authorize_read=authorize_read)

    @asynccontextmanager
    async def running(self, **changes: object) -> AsyncIterator[BookieRole]:
        role = self.role(**changes)
        await role.start()
        try:
            yield role
        finally:
            await role.aclose()

    async def found(self) -> None:
        await found_cluster(MemoryStore(self.tree), "test", Ports())

    def places(self) -> tuple[bool, bool]:
        return "/bookies/available/b1" in self.tree.nodes, "/bookies/readonly/b1" in self.tree.nodes

    async def registrations(self) -> tuple[BookieRegistration | None, BookieRegistration | None]:
        store = MemoryStore(self.tree)
        places = [await records(store).get("b1") for records in (available_bookies, readonly_bookies)]
        first, second = (None if place is None else place.record for place in places)
        return first, second


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    return World(monkeypatch, tmp_path)


async def page(role: BookieRole, path: str) -> tuple[int, str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", role._health.port)
    writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
    answer = (await reader.read()).decode()
    writer.close()
    await writer.wait_closed()
    return int(answer.split()[1]), answer.partition("\r\n\r\n")[2]


async def test_it_serves_then_registers_and_leaves_first(world: World) -> None:
    await world.found()
    async with world.running() as role:
        available, readonly = await world.registrations()
        assert available is not None
        assert available.addresses["grpc"] == role.address == f"127.0.0.1:{role._server.port}"
        assert available.incarnation == role.bookie.cookie.incarnation
        assert readonly is None
        assert await page(role, "/ready") == (200, "serving, metadata session connected, registered\n")
        assert await page(role, "/health") == (200, "serving\n")
        status, metrics = await page(role, "/metrics")
        assert status == 200
        assert 'cepheid_bookie_ready{bookie="b1"} 1' in metrics
        assert 'cepheid_bookie_writable{bookie="b1"} 1' in metrics
        assert "cepheid_metadata_connected 1" in metrics
    assert await world.registrations() == (None, None)


async def test_it_reports_after_a_restore_before_it_registers_and_lists_its_ledgers(world: World) -> None:
    await world.found()
    store = MemoryStore(world.tree)
    await restored_record(store).create(None, RestoredMetadata(backup_sha256="x", backup_created_at_ms=1, restored_at_ms=2))
    async with world.running() as role:
        assert await bookie_reports(store).get("b1") is not None
        await added(role.bookie, group_of(7, 0))
        await added(role.bookie, group_of(9, 0))
        status, text = await page(role, "/ledgers?above=7")
        assert (status, json.loads(text)) == (200, {"bookie_id": "b1", "ledgers": [9], "next": None})
        assert (await page(role, "/ledgers?above=x"))[0] == 400


async def test_the_journal_may_have_a_disk_of_its_own(world: World, tmp_path: Path) -> None:
    await world.found()
    async with world.running(journal_dir=tmp_path / "fast"):
        assert (tmp_path / "fast/journal").is_dir()
        assert not (tmp_path / "b1/journal").exists()
    with pytest.raises(CookieError, match=r"keeps its journal in .*/fast, and is started without that; name it: --journal"):
        await world.role().start()
    (tmp_path / "fast").rename(tmp_path / "moved")  # another path is another name for the same disk
    async with world.running(journal_dir=tmp_path / "moved") as role:
        assert role.ready


async def test_a_journal_directory_of_its_own_is_used_and_the_data_directory_may_be_named_twice(world: World) -> None:
    await world.found()
    for data, journal, has_journal in (("data", "journal", "journal"), ("both", "both/.", "both")):
        name = f"bookie-{data}"
        async with world.running(bookie_id=name, data_dir=world.directory / data, journal_dir=world.directory / journal) as role:
            await added(role.bookie, group_of(7, 0))
            assert list((world.directory / has_journal / "journal").glob("*.journal"))
            assert list((world.directory / data).glob("entrylog"))


async def test_the_old_journal_format_is_written_until_the_upgrade_is_finished_and_a_restart(world: World) -> None:
    store = MemoryStore(world.tree)
    await cluster_identity(store).create(None, ClusterIdentity(cluster_id="1", name="old", created_at_ms=1))

    def formats() -> list[int]:
        return [path.read_bytes()[8] for path in sorted((world.directory / "b1" / "journal").glob("*.journal"))]

    async with world.running() as role:
        await added(role.bookie, group_of(7, 0))
        assert formats() == [1]
        await finish_upgrade(store)
        await added(role.bookie, group_of(7, 1))
        assert formats() == [1]
    async with world.running() as role:
        await added(role.bookie, group_of(7, 2))
        assert formats()[-1] == 2
        assert await read_all(role.bookie, 7, 0, 2) == (entries_of([group_of(7, 0), group_of(7, 1), group_of(7, 2)]), {})
    await storage_format_record(store).replace(None, StorageFormat(storage_format=NEWEST_STORAGE_FORMAT + 1), None)
    with pytest.raises(NewerStorageFormatError, match="start a newer release"):
        await world.role().start()


async def test_a_full_bookie_is_registered_as_readonly_until_there_is_room(world: World) -> None:
    await world.found()
    async with world.running() as role:
        for full, expected in ((True, (False, True)), (False, (True, False))):
            role.bookie._space.on_flush_full(full)
            await wait_until(lambda expected=expected: world.places() == expected, what=f"{expected}")
            assert role.ready


async def test_a_bookie_whose_disk_hangs_is_not_registered_until_the_write_ends(world: World) -> None:
    """So that other bookies take its place, and repair its ledgers if it stays so."""
    await world.found()
    storage = {"stalled_disk_s": 0.1, "slow_disk_for_s": 0.2, "disk_check_interval_s": 0.05}
    async with world.running(storage=storage) as role:
        hanging, sync = threading.Event(), RealFile.sync

        def hang(file: RealFile) -> None:
            hanging.wait(20)
            sync(file)

        with mock.patch.object(RealFile, "sync", hang):
            adding = asyncio.ensure_future(add(role.bookie, group_of(7, 0)))
            await wait_until(lambda: world.places() == (False, False), what="not registered")
            status, text = await page(role, "/health")
            assert (status, text) == (
                200,
                "serving, its journal disk hangs: a write has not finished for storage.stalled_disk_s (0.1 s)\n",
            )
            assert (await page(role, "/ready"))[0] == 503
            hanging.set()
        await adding
        await wait_until(lambda: world.places() == (True, False), what="registered again")
        assert role.ready


async def test_a_disk_that_is_full_at_the_start_takes_no_ledgers(world: World) -> None:
    await world.found()
    too_much = {"min_free_data_bytes": 2**60}
    with pytest.raises(DiskTooSmallError, match="b1 has"):  # a new bookie would never be of use
        await world.role(storage=too_much).start()
    async with world.running():
        pass
    async with world.running(storage=too_much) as role:
        await wait_until(lambda: world.places() == (False, True), what="registered as read-only")
        assert role.ready
        status, text = await page(role, "/ready")
        assert (status, text.partition(", read-only: ")[0]) == (200, "serving, metadata session connected, registered")
        assert "fewer than storage.min_free_data_bytes" in text


async def test_garbage_in_its_registration_does_not_end_it(world: World) -> None:
    await world.found()
    async with world.running() as role:
        key = available_bookies(world.stores[0]).key_of("b1")
        await MemoryStore(world.tree).put(key, b"garbage", 0)
        await wait_until(lambda: key in world.tree.nodes and world.tree.nodes[key].value != b"garbage", what="replaced")
        assert role.ready
        assert world.places() == (True, False)


async def test_a_lost_session_makes_it_unready_until_it_is_registered_again(world: World) -> None:
    await world.found()
    async with world.running() as role:
        await role.bookie.read_lac(LacRequest(7, KEY, fence=True))
        world.stores[0].expire_session()
        assert await page(role, "/ready") == (503, "serving, metadata session lost, not registered\n")
        assert (await page(role, "/health"))[0] == 200  # a restart would not help
        world.stores[0].renew_session()
        await wait_until(lambda: role.ready, what="ready again")
        assert (await world.registrations())[0] is not None
        assert [answer.status for answer in await add(role.bookie, group_of(7, 0), group_of(8, 0))] == [Status.FENCED, Status.OK]


async def test_the_next_run_takes_the_place_of_one_that_was_killed(world: World) -> None:
    """Its session lives on for a while; the directory's lock and the address prove that it is dead."""
    await world.found()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    async with world.running(port=port) as role:
        registration = (await world.registrations())[0]
        assert registration is not None
    dead = MemoryStore(world.tree)
    await available_bookies(dead).create("b1", registration, ephemeral=True)
    async with world.running(port=port) as role:
        found = (await world.registrations())[0]
        assert found is not None
        assert found.process != registration.process
        assert role.ready


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("left", [(True, False), (True, True), (False, True)])
async def test_one_that_was_killed_while_it_changed_places_looks_at_its_disk_before_it_registers(
    world: World, monkeypatch: pytest.MonkeyPatch, left: tuple[bool, bool], full: bool
) -> None:
    """The session of the killed process may still hold one registration or both: none of them says how much room there is."""
    await world.found()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    async with world.running(port=port):
        old = (await world.registrations())[0]
        assert old is not None
    dead = MemoryStore(world.tree)
    for records, is_left in zip((available_bookies, readonly_bookies), left, strict=True):
        if is_left:
            await records(dead).create("b1", old, ephemeral=True)
    registered: list[int] = []
    apply = world.tree.apply

    def watched(ops: Sequence[Op], session_id: int) -> list[OpResult]:
        results = apply(ops, session_id)
        keys = [op.key for op in ops if isinstance(op, Create | Put)]
        registered.extend(index for index, place in enumerate(("available", "readonly")) if f"/bookies/{place}/b1" in keys)
        return results

    monkeypatch.setattr(world.tree, "apply", watched)
    async with world.running(port=port, storage={"min_free_data_bytes": 2**60 if full else 0}) as role:
        assert role.ready
        assert registered == [1 if full else 0]
        assert world.places() == (not full, full)
        assert [found is not None and found != old for found in await world.registrations()] == [not full, full]


@pytest.mark.parametrize("copied", [False, True], ids=["other disks", "a copy of the disks"])
async def test_a_living_process_of_the_same_id_is_an_error(world: World, copied: bool) -> None:
    await world.found()
    async with world.running() as role:
        incarnation = role.bookie.cookie.incarnation if copied else "other"
    stranger = BookieRegistration(bookie_id="b1", incarnation=incarnation, addresses={"grpc": "elsewhere:1"}, process="p")
    await available_bookies(MemoryStore(world.tree)).create("b1", stranger, ephemeral=True)
    role = world.role(metadata_session_timeout_s=0.01)
    with pytest.raises(RegistrationTakenError, match="elsewhere:1"):
        await role.start()
    assert (await world.registrations())[0] == stranger


async def test_a_store_without_a_cluster_is_refused(world: World) -> None:
    with pytest.raises(ClusterNotFoundedError, match="cepheid init"):
        await world.role().start()


async def test_another_cluster_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.found()
    async with world.running():
        pass
    world.tree = MemoryTree()
    await world.found()
    with pytest.raises(CookieError, match="belongs to cluster"):
        await world.role().start()


async def test_a_port_in_use_is_named_and_nothing_is_left(world: World) -> None:
    await world.found()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError, match=f"{port}.*--port"):
            await world.role(port=port).start()
    async with world.running() as role:  # no lock is held, nobody is registered
        assert role.ready


async def test_where_it_stands_is_registered_and_who_may_scan_is_asked(world: World) -> None:
    await world.found()
    async with world.running(rack="east", authorize_read=lambda *_: Status.UNAUTHORIZED) as role:
        registered, _ = await world.registrations()
        assert registered is not None
        assert (registered.rack, registered.format) == ("east", 3)
        (answer,) = [chunk async for chunk in role.bookie.read(ReadRequest(1, 0, 9, scan=True))]
        assert answer.missing[0].status is Status.UNAUTHORIZED
        assert "cepheid_bookie_refused_scans_total" in (await page(role, "/metrics"))[1]
    async with world.running() as role:
        registered, _ = await world.registrations()
        assert registered is not None
        assert (registered.rack, registered.format) == (None, 2), "what older releases read"


async def test_free_space_is_reported_where_a_setting_asks_for_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cepheid_bookie.bookie_role._SPACE_INTERVAL_S", 0.01)
    await world.found()
    async with world.running(report_free_space=True) as role:
        registered, _ = await world.registrations()
        assert registered is not None
        assert (registered.free_bytes, registered.format) == (role.bookie.look_at_free_space(), 4)
        assert registered.total_bytes
        monkeypatch.setattr(role.bookie, "look_at_free_space", lambda: 7)

        async def reported() -> bool:
            found, _ = await world.registrations()
            return found == registered.replace(free_bytes=7)

        deadline = asyncio.get_running_loop().time() + 60
        while not await reported():
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("reported", "total", "free", "worth"),
    [(500, 1000, 550, False), (500, 1000, 551, True), (500, 1000, 449, True), (500, 0, 500, False), (500, 0, 501, True)],
)
def test_small_changes_of_free_space_are_not_reported(reported: int, total: int, free: int, worth: bool) -> None:
    record = BookieRegistration(bookie_id="b", incarnation="i", addresses={}, free_bytes=reported, total_bytes=total)
    assert is_worth_reporting(record, free) is worth


async def test_a_failed_bookie_ends_the_process_with_its_reason(world: World) -> None:
    await world.found()
    async with world.running() as role:
        role.bookie._fail(OSError("the disk is gone"))
        with pytest.raises(ProcessFailedError, match="the disk is gone"):
            await role.wait_until_stopped(asyncio.Event())
        status, text = await page(role, "/health")
        assert (status, text) == (503, "failed: the disk is gone\n")


@pytest.mark.parametrize(
    ("fields", "shown", "name"),
    [
        ({"advertised_host": "b.example"}, "b.example", "b.example:3181"),
        ({"advertised_host": "b.example", "advertised_port": 9}, "b.example", "b.example:9"),
        ({"host": "10.0.0.7", "port": 4000}, "10.0.0.7", f"{socket.gethostname()}:4000"),
        ({"host": "0.0.0.0"}, socket.gethostname(), f"{socket.gethostname()}:3181"),
        ({"bookie_id": "b7"}, "127.0.0.1", "b7"),
    ],
)
def test_its_name_and_where_it_is_reached(fields: dict[str, object], shown: str, name: str) -> None:
    settings = BookieRoleSettings.model_validate({"metadata": "zk://x", **fields})
    assert (settings.shown_host, settings.name) == (shown, name)


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, "127.0.0.1"),
        ({"http_host": "10.0.0.8"}, "10.0.0.8"),
        ({"http_host": "0.0.0.0", "advertised_host": "b.example"}, "b.example"),
        ({"host": "0.0.0.0"}, socket.gethostname()),
    ],
)
def test_where_its_health_is_asked_for(fields: dict[str, object], shown: str) -> None:
    assert BookieRoleSettings.model_validate({"metadata": "zk://x", **fields}).shown_http_host == shown


def test_a_bookie_on_any_port_needs_a_name() -> None:
    with pytest.raises(BookieNameError, match="--id"):
        _ = BookieRoleSettings(metadata="zk://x", port=0).name
