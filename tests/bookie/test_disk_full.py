"""Disks that fill up: adds are refused before and at the end, fences and recovery go on, service comes back with the space."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from cepheid_bookie import Bookie, BookieState, RealDisk, StorageSettings
from cepheid_bookie.block_index import BlockRef
from cepheid_bookie.disk import SyncFailedError
from cepheid_bookie.disk_space import DiskLevel, check_disk_size
from cepheid_bookie.errors import DiskFullError, DiskTooSmallError
from cepheid_bookie.rocks_index import RocksBlockIndex
from cepheid_bookie.settings import MiB
from cepheid_ports import Ports
from cepheid_rpc import LacRequest, ReadRequest, Status
from tests.bookie.bookie_support import (
    IDENTITY,
    KEY,
    KiB,
    Machine,
    add,
    added,
    entries_of,
    group_of,
    read_all,
    small_settings,
)
from tests.bookie.promises import Promises
from tests.simulation.world.sim_disk import SimDisk
from tests.support import wait_until


@pytest.mark.parametrize(
    ("free", "short", "low"),
    [
        ((400,), False, False),
        ((299,), False, True),
        ((299, 349), False, True),  # the margin holds for the warning as well
        ((299, 350), False, False),
        ((99,), True, True),
        ((99, 149), True, True),  # above the minimum again, and not by the margin
        ((99, 150), False, True),
        ((100,), False, True),
    ],
)
def test_a_disk_is_short_below_its_minimum_until_it_is_above_by_the_margin(free: tuple[int, ...], short: bool, low: bool) -> None:
    level = DiskLevel("data", minimum_bytes=100, margin_bytes=50, warn_bytes=300)
    for free_bytes in free:
        level.take(free_bytes)
    assert (level.short, level.low) == (short, low)


async def test_a_bookie_that_has_started_on_a_full_disk_becomes_writable_without_any_traffic() -> None:
    machine = Machine(settings=small_settings(min_free_data_bytes=512 * KiB, space_margin_bytes=512 * KiB))
    machine.disk.capacity_bytes = machine.disk.used_bytes() + 400 * KiB
    async with machine.bookie() as bookie:
        assert not bookie.writable
        machine.disk.capacity_bytes += 400 * KiB
        await wait_until(lambda: "must have 1,048,576 again" in bookie.read_only_reason)
        machine.disk.capacity_bytes += 1024 * KiB
        await wait_until(lambda: bookie.writable)


async def test_a_disk_that_both_share_is_full_for_the_data_too_when_the_journal_wants_more() -> None:
    """So that what was deleted is collected, whichever minimum is the higher one."""
    machine = Machine(settings=small_settings(min_free_journal_bytes=512 * KiB, space_margin_bytes=64 * KiB))
    machine.disk.capacity_bytes = machine.disk.used_bytes() + 400 * KiB
    async with machine.bookie() as bookie:
        assert bookie.data_full.is_set()
        assert 100 * KiB < bookie.lacking_data_bytes <= 576 * KiB
        machine.disk.capacity_bytes = 1 << 30
        await wait_until(lambda: bookie.writable)
        assert not bookie.data_full.is_set()
        assert bookie.lacking_data_bytes == 0


async def test_a_low_disk_is_warned_of_before_it_is_full() -> None:
    machine = Machine(settings=small_settings(warn_free_data_bytes=512 * KiB))
    async with machine.bookie() as bookie:
        assert bookie.space_warning == ""
        machine.disk.capacity_bytes = machine.disk.used_bytes() + 400 * KiB
        await added(bookie, group_of(7, 0))
        await wait_until(lambda: "fewer than storage.warn_free_data_bytes (524,288)" in bookie.space_warning)
        assert bookie.writable


async def test_a_disk_that_others_fill_is_noticed_without_any_traffic() -> None:
    machine = Machine(settings=small_settings(min_free_data_bytes=512 * KiB))
    async with machine.bookie() as bookie:
        assert bookie.writable
        machine.disk.capacity_bytes = machine.disk.used_bytes() + 400 * KiB
        await wait_until(lambda: not bookie.writable)
        assert bookie.statistics().free_data_bytes <= 400 * KiB


async def test_a_full_journal_disk_gets_its_space_back_without_any_traffic() -> None:
    """Two marks are saved, and files are kept from the older one on: no add comes that would move both."""
    settings = {"min_free_journal_bytes": 100 * KiB, "space_margin_bytes": 64 * KiB, "write_cache_bytes": MiB}
    machine = Machine(settings=small_settings(**settings))
    journal_disk = SimDisk(machine.random)
    journal_disk.capacity_bytes = 400 * KiB
    bookie = await open_with_journal(machine, journal_disk)
    refused, first = False, 0
    while not refused:
        answers = await add(bookie, group_of(7, first, size=3 * KiB))
        refused, first = answers[0].status is Status.NO_SPACE, first + 1
    await wait_until(lambda: bookie.writable)
    assert len(journal_disk.listdir("journal")) == 1
    await bookie.aclose()


async def test_much_that_is_admitted_at_once_is_noticed_before_the_next_look() -> None:
    machine = Machine(settings=small_settings(min_free_data_bytes=256 * KiB, disk_check_interval_s=3600.0))
    machine.disk.capacity_bytes = machine.disk.used_bytes() + 1024 * KiB
    async with machine.bookie() as bookie:
        await wait_until_refused(bookie, Status.NO_SPACE, size=8 * KiB)
        assert machine.disk.free_bytes() > 64 * KiB


async def test_below_the_minimum_regular_adds_are_refused_and_everything_else_goes_on() -> None:
    machine = Machine(settings=small_settings(min_free_data_bytes=512 * KiB))
    changes: list[bool] = []
    async with machine.bookie() as bookie:
        bookie.on_writable = changes.append
        await added(bookie, group_of(7, 0))
        machine.disk.capacity_bytes = machine.disk.used_bytes() + 400 * KiB
        await wait_until_refused(bookie, Status.NO_SPACE)
        assert not bookie.writable
        assert "its data disk has" in bookie.read_only_reason
        assert "fewer than storage.min_free_data_bytes (524,288)" in bookie.read_only_reason
        await added(bookie, group_of(7, 0), recovery=True)
        assert (await bookie.read_lac(LacRequest(7, KEY, fence=True))).status is Status.OK
        assert await read_all(bookie, 7, 0, 0) == (entries_of([group_of(7, 0)]), {})
        assert (await bookie.read_lac(LacRequest(8, KEY, fence=True))).status.certain_no
        machine.disk.capacity_bytes = 1 << 30
        await wait_until(lambda: bookie.writable)
        await added(bookie, group_of(9, 0))
        assert changes == [False, True]
        assert bookie.read_only_reason == ""


@pytest.mark.parametrize(("use", "setting"), [("journal", "journal_segment_bytes"), ("data", "block_bytes")])
def test_a_disk_that_could_not_take_one_entry_is_refused_with_the_settings_that_decide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: str, setting: str
) -> None:
    small, large = RealDisk(tmp_path / "small"), RealDisk(tmp_path / "large")
    settings = StorageSettings()
    needed = getattr(settings, f"min_free_{use}_bytes") + getattr(settings, setting)
    sizes = {small: needed - 1, large: 1 << 40}
    monkeypatch.setattr(RealDisk, "size_bytes", lambda disk: sizes[disk])
    journal, data = (small, large) if use == "journal" else (large, small)
    words = rf"the {use} disk of .*small has .*needs {needed:,} .*storage\.{setting}.*larger disk"
    with pytest.raises(DiskTooSmallError, match=words):
        check_disk_size(journal, data, settings)
    sizes[small] = needed
    check_disk_size(journal, data, settings)
    sizes[small] = 0  # as some network file systems say
    check_disk_size(journal, data, settings)
    sizes[small] = 1
    data.open("VERSION", create=True).close()  # it has data, which others read
    check_disk_size(journal, data, settings)


async def wait_until_refused(bookie: Bookie, status: Status, *, size: int = 10) -> None:
    """Adds to ever new ledgers until one is refused with `status`; all before are OK."""
    ledger_id, answers = 1_000, [Status.OK]
    while answers == [Status.OK]:
        ledger_id += 1
        answers = [answer.status for answer in await add(bookie, group_of(ledger_id, 0, size=size))]
    assert answers == [status]


async def test_a_bookie_that_starts_on_a_full_disk_refuses_adds_and_serves_reads() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        await added(bookie, group_of(7, 0))
    machine.settings = small_settings(min_free_journal_bytes=1 << 40)
    async with machine.bookie() as bookie:
        assert [a.status for a in await add(bookie, group_of(7, 1))] == [Status.NO_SPACE]
        assert await read_all(bookie, 7, 0, 0) == (entries_of([group_of(7, 0)]), {})


@pytest.mark.parametrize("seed", range(12))
async def test_a_journal_disk_that_fills_refuses_the_batch_and_serves_again_when_there_is_space(seed: int) -> None:
    machine, promises = Machine(seed), Promises()
    journal_disk = SimDisk(machine.random)
    bookie = await open_with_journal(machine, journal_disk)
    await promises.add(bookie, group_of(7, 0, size=900))
    journal_disk.capacity_bytes = journal_disk.used_bytes() + machine.random.randrange(0, 40_000)
    refused = False
    for first in range(1, 80):
        (status,) = await promises.add(bookie, group_of(7, first, size=9_000))
        refused = refused or status is Status.NO_SPACE
        if refused:
            break
    assert refused
    assert bookie.state is BookieState.SERVING
    status = (await bookie.read_lac(LacRequest(9, KEY, fence=True))).status
    assert status in (Status.NO_SPACE, Status.NO_ENTRY), "a fence is durable or not answered as one"
    if status is Status.NO_ENTRY:
        promises.fenced[9] = promises.fence_asked[9] = None
    journal_disk.capacity_bytes = 1 << 30
    await wait_until(lambda: bookie.writable)
    assert await promises.add(bookie, group_of(7, 500, 3)) == [Status.OK]
    await promises.fence(bookie, 9)
    assert 9 in promises.fenced
    machine.restart()
    bookie = await open_with_journal(machine, journal_disk.power_loss())
    await promises.check(bookie)
    await bookie.aclose()


async def test_a_check_of_copies_counts_what_the_journal_refused_once_it_is_in_the_entry_log() -> None:
    machine = Machine()
    journal_disk = SimDisk(machine.random)
    bookie = await open_with_journal(machine, journal_disk)
    await added(bookie, group_of(7, 0))
    journal_disk.full = True
    (first,) = [answer.status for answer in await add(bookie, group_of(7, 1, size=200_000))]
    assert first is Status.NO_SPACE
    assert (await read_all(bookie, 7, 0, 1))[1] == {}, "it is in the write cache"
    check = ReadRequest(7, 0, 1, 1 << 20, from_disk=True)
    assert [part.status for answer in [a async for a in bookie.read(check)] for part in answer.missing] == [Status.NO_SPACE]
    await bookie.checkpoint()
    assert [part.status for answer in [a async for a in bookie.read(check)] for part in answer.missing] == []
    await bookie.aclose()


async def open_with_journal(machine: Machine, journal_disk: SimDisk) -> Bookie:
    return await Bookie.open(IDENTITY, machine.settings, machine.disk, machine.index, machine.ports(), journal_disk=journal_disk)


@pytest.mark.parametrize("operation", ["create", "pwrite", "pwritev", "sync"])
async def test_a_flush_that_finds_the_data_disk_full_keeps_its_half_and_its_mark_until_it_gets_through(operation: str) -> None:
    machine, promises = Machine(operation), Promises()
    bookie = await machine.open()
    await promises.add(bookie, group_of(7, 0, 20, size=500))
    full = True

    def on_operation(name: str, path: str) -> None:
        if full and name == operation and path.startswith("entrylog"):
            raise OSError(errno.ENOSPC, "no space left")

    machine.disk.on_operation = on_operation
    with pytest.raises(OSError, match="no space"):
        await bookie.checkpoint()
    mark = bookie.statistics().mark_sequence
    await wait_until(lambda: bookie.statistics().failed_flushes > 3)  # it keeps trying
    assert bookie.statistics().mark_sequence == mark
    assert not bookie.writable
    assert [a.status for a in await add(bookie, group_of(7, 20))] == [Status.NO_SPACE]
    await promises.add(bookie, group_of(7, 21), recovery=True)
    await promises.check(bookie)  # reads see the half that is stuck
    copy = Machine(f"{operation}/copy", machine.settings, machine.disk.copy_after_power_loss(machine.random))
    copy.index._now, copy.index._synced = machine.index._synced.copy(), machine.index._synced.copy()
    async with copy.bookie() as other:
        await promises.check(other)
    full = False
    await wait_until(lambda: bookie.writable)
    await promises.add(bookie, group_of(7, 22))
    await bookie.aclose()
    machine.restart()
    async with machine.bookie() as bookie:
        await promises.check(bookie)


async def test_adds_that_wait_for_room_are_refused_as_soon_as_the_disk_is_full() -> None:
    machine = Machine()
    bookie = await machine.open()
    full = True

    def on_operation(name: str, path: str) -> None:
        if full and name == "pwritev" and path.startswith("entrylog"):
            raise OSError(errno.ENOSPC, "no space left")

    machine.disk.on_operation = on_operation
    answers = await add(bookie, *[group_of(7, i, size=2 * KiB) for i in range(30)])
    fates = [answer.status for answer in answers]
    assert fates == [Status.OK, Status.NO_SPACE]
    assert bookie.statistics().waiting_bytes == 0
    full = False
    await wait_until(lambda: bookie.writable)
    entries, _ = await read_all(bookie, 7, 0, 29)
    assert sorted(entries) == list(range(answers[0].last_entry_id + 1)), "a refused add left a trace"
    await bookie.aclose()


async def test_an_endless_shortage_does_not_fill_the_disk_with_copies() -> None:
    machine = Machine()
    bookie = await machine.open()
    await added(bookie, group_of(7, 0, 20, size=500))
    machine.disk.fail("sync", "entrylog", errno.ENOSPC)
    used = machine.disk.used_bytes()
    with pytest.raises(OSError, match="injected"):
        await bookie.checkpoint()
    for _ in range(5):
        machine.disk.fail("sync", "entrylog", errno.ENOSPC)
    await wait_until(lambda: bookie.statistics().failed_flushes == 6)
    assert machine.disk.used_bytes() <= used + 4 * KiB
    await wait_until(lambda: bookie.writable)
    await bookie.aclose()


async def test_a_close_on_a_full_disk_ends_and_the_journal_has_it_all() -> None:
    machine, promises = Machine(), Promises()
    bookie = await machine.open()
    await promises.add(bookie, group_of(7, 0, 20, size=500))

    def on_operation(name: str, path: str) -> None:
        if path.startswith("entrylog"):
            raise OSError(errno.ENOSPC, "no space left")

    machine.disk.on_operation = on_operation
    await bookie.aclose()
    assert bookie.statistics().failed_flushes > 0, "the close tried to write them out"
    machine.restart()
    machine.disk.on_operation = None
    async with machine.bookie() as bookie:
        assert await read_all(bookie, 7, 0, 19) == (entries_of([group_of(7, 0, 20, size=500)]), {})
        await promises.check(bookie)


async def test_requests_of_a_refused_batch_may_be_sent_again() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        machine.disk.fail("create", "journal/", errno.ENOSPC)
        assert [a.status for a in await add(bookie, group_of(7, 0, 2))] == [Status.NO_SPACE]
        await wait_until(lambda: bookie.writable)
        await added(bookie, group_of(7, 0, 2))


async def test_a_full_data_disk_is_tried_at_intervals_and_not_at_every_add() -> None:
    machine = Machine(settings=small_settings(retry_s=30.0, waiting_s=0.05))
    bookie = await machine.open()

    def on_operation(name: str, path: str) -> None:
        if path.startswith("entrylog"):
            raise OSError(errno.ENOSPC, "no space left")

    machine.disk.on_operation = on_operation
    for first in range(12):  # recovery adds come in all the same, until both halves are full
        await add(bookie, group_of(7, first, size=2 * KiB), recovery=True)
    assert bookie.statistics().adds_overloaded > 0
    assert bookie.statistics().failed_flushes == 1
    machine.disk.on_operation = None
    await bookie.aclose()


async def test_what_the_index_refuses_is_written_to_the_entry_log_once() -> None:
    """And a ledger that is deleted between two attempts does not come back with the second."""
    machine = Machine()
    bookie = await machine.open()
    await added(bookie, group_of(7, 0, 20, size=100))
    await added(bookie, group_of(8, 0, 20, size=100))
    full = True
    machine.index.before_sync = lambda: no_space() if full else None
    with pytest.raises(OSError, match="no space"):
        await bookie.checkpoint()
    written = log_bytes(machine)
    await wait_until(lambda: bookie.statistics().failed_flushes > 20)
    assert log_bytes(machine) == written
    await added(bookie, group_of(9, 0), recovery=True)  # it comes while the flush is tried again
    full = False
    await bookie.delete_ledgers([8])
    await wait_until(lambda: bookie.statistics().mark_sequence == bookie._journal.durable.sequence)
    assert {block.ledger_id for block in machine.index.blocks()} == {7, 9}
    assert await read_all(bookie, 7, 0, 19) == (entries_of([group_of(7, 0, 20, size=100)]), {})
    await bookie.aclose()


async def test_no_entry_log_goes_that_waits_for_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """A half in several logs: to none of them anything refers, until the index has room again."""
    machine = Machine()
    async with machine.bookie() as bookie:
        await added(bookie, group_of(7, 0, 20, size=10_000))
        monkeypatch.setattr(machine.index, "write", lambda *_: no_space())
        with pytest.raises(OSError, match="no space"):
            await bookie.checkpoint()
        logs = machine.disk.listdir("entrylog")
        assert len(logs) > 2
        assert await bookie.reclaim() == []
        monkeypatch.undo()
        await wait_until(lambda: bookie.statistics().mark_sequence == bookie._journal.durable.sequence)
        await bookie.delete_ledgers([7])
        assert len(await bookie.reclaim()) == len(logs)


async def test_starts_that_fail_leave_one_entry_log_behind() -> None:
    machine, promises = Machine(), Promises()
    bookie = await machine.open()
    await promises.add(bookie, group_of(7, 0, 20, size=500))
    for _ in range(5):
        machine.restart()
        machine.index.before_sync = fails
        with pytest.raises(OSError, match="no index"):
            await machine.open()
    assert len(machine.disk.listdir("entrylog")) == 1
    machine.restart()
    async with machine.bookie() as bookie:
        await promises.check(bookie)
        assert len(machine.disk.listdir("entrylog")) == 1


async def test_an_index_that_cannot_be_read_to_its_end_keeps_no_bookie_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be read then is unknown, and all logs stay."""
    machine, promises = Machine(), Promises()
    bookie = await machine.open()
    await promises.add(bookie, group_of(7, 0, 20, size=500))
    await bookie.checkpoint()
    await promises.add(bookie, group_of(8, 0, 20, size=500))
    machine.restart()
    before = machine.disk.listdir("entrylog")
    monkeypatch.setattr(machine.index, "blocks", fails)
    async with machine.bookie() as bookie:
        assert set(before) < set(machine.disk.listdir("entrylog"))
        await promises.check(bookie)


def fill_database(index: RocksBlockIndex) -> Any:
    """From now on the database finds its disk full; return it as it was."""
    database: Any = index._db
    full: Any = FullDatabase(database, NO_SPACE)
    index._db = full
    return database


class FullDatabase:
    """Stands for the database of an index whose disk is full: writes fail as rocksdict lets them fail."""

    def __init__(self, database: Any, error: str) -> None:
        self._database = database
        self._error = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)

    def write(self, batch: object) -> None:
        raise Exception(self._error)

    def flush_wal(self, sync: bool) -> None:
        raise Exception("IO error: Writer has previous error.")

    def close(self) -> None:
        self._database.close()
        self.flush_wal(True)


NO_SPACE = "IO error: No space left on device: While appending to file: /data/index/000004.log: No space left on device"


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index.write([BlockRef(7, 0, 9, 1, 0, 100)], {}),
        lambda index: index.move([(BlockRef(7, 10, 19, 1, 0, 100), BlockRef(7, 10, 19, 2, 0, 100))]),
        lambda index: index.delete_ledgers({7: None}),
        lambda index: index.remove_blocks([BlockRef(7, 0, 9, 1, 0, 100)]),
    ],
)
def test_a_full_disk_of_the_index_is_named_as_one_also_by_the_syncs_that_follow(
    tmp_path: Path, change: Callable[[RocksBlockIndex], object]
) -> None:
    index = RocksBlockIndex(tmp_path / "index")
    database = fill_database(index)
    for work in (change, RocksBlockIndex.sync):
        with pytest.raises(OSError, match="is full") as raised:
            work(index)
        assert raised.value.errno == errno.ENOSPC
        assert not isinstance(raised.value, SyncFailedError)
    index._db = database
    change(index)
    index.close()


async def test_a_bookie_whose_index_finds_the_disk_full_is_read_only_until_there_is_room(tmp_path: Path) -> None:
    index = RocksBlockIndex(tmp_path / "data" / "index")
    bookie = await Bookie.open(IDENTITY, small_settings(), RealDisk(tmp_path / "data"), index, Ports())
    await added(bookie, group_of(7, 0))
    database = fill_database(index)
    with pytest.raises(OSError, match="is full"):
        await bookie.checkpoint()
    assert (bookie.state, bookie.read_only_reason) == (BookieState.SERVING, "a write found its data disk full")
    assert (await bookie.read_lac(LacRequest(7, KEY, fence=True))).status is Status.OK
    index._db = database
    await wait_until(lambda: bookie.writable)
    await bookie.aclose()


async def test_a_bookie_gives_its_directories_back_although_the_index_cannot_be_closed(tmp_path: Path) -> None:
    index = RocksBlockIndex(tmp_path / "data" / "index")
    bookie = await Bookie.open(IDENTITY, small_settings(), RealDisk(tmp_path / "data"), index, Ports())
    await added(bookie, group_of(7, 0))
    fill_database(index)
    await bookie.aclose()
    assert bookie.state is BookieState.CLOSED
    again = RocksBlockIndex(tmp_path / "data" / "index")
    bookie = await Bookie.open(IDENTITY, small_settings(), RealDisk(tmp_path / "data"), again, Ports())
    assert await read_all(bookie, 7, 0, 0) == (entries_of([group_of(7, 0)]), {})
    await bookie.aclose()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MB of its own."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(path)], check=False, capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


async def test_a_bookie_lives_through_a_disk_that_is_full_to_the_last_byte(small_disk: Path, tmp_path: Path) -> None:
    """Fences make ledger records until the index finds no room."""
    settings = small_settings(min_free_data_bytes=MiB, space_margin_bytes=MiB, checkpoint_interval_s=0.1, write_cache_bytes=MiB)

    async def open_bookie() -> Bookie:
        index = RocksBlockIndex(small_disk / "data" / "index")
        disk, journal = RealDisk(small_disk / "data"), RealDisk(tmp_path / "journal")
        return await Bookie.open(IDENTITY, settings, disk, index, Ports(), journal_disk=journal)

    bookie = await open_bookie()
    await added(bookie, group_of(7, 0, 10))
    await bookie.checkpoint()
    with suppress(OSError), (small_disk / "other").open("wb", buffering=0) as other:
        while True:
            other.write(bytes(4096))
    for ledger_id in range(100, 300):
        assert (await bookie.read_lac(LacRequest(ledger_id, KEY, fence=True))).status is Status.NO_ENTRY
    await wait_until(lambda: bookie.statistics().failed_flushes > 0)
    assert bookie.state is BookieState.SERVING
    assert not bookie.writable
    assert await read_all(bookie, 7, 0, 9) == (entries_of([group_of(7, 0, 10)]), {})
    await bookie.aclose()
    with pytest.raises(DiskFullError, match="is full"):
        await open_bookie()
    (small_disk / "other").unlink()
    bookie = await open_bookie()
    assert bookie.writable
    assert bookie.ledger_count == 201
    await bookie.aclose()


def no_space() -> None:
    raise OSError(errno.ENOSPC, "no space left")


def fails() -> None:
    raise OSError(errno.EIO, "no index")


def log_bytes(machine: Machine) -> int:
    return sum(machine.disk.open(f"entrylog/{name}").size() for name in machine.disk.listdir("entrylog"))
