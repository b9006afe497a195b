"""Power loss and process crash at every disk operation: the rows of the crash matrix, by name and as a sweep.

| crash | test, in this module unless a file is named |
|---|---|
| before the journal is written; written, not synced | `test_a_batch_that_was_not_synced_…` |
| synced, not answered | `test_synced_and_not_answered_is_there` |
| fence not synced | `test_a_fence_that_was_not_synced_…` |
| fence answered, also of a ledger without entries | `test_an_answered_fence_survives_…` |
| checkpoint, each step from C0 to C7 | `test_a_checkpoint_cut_at_each_step` |
| the same in the flush of a start | `test_a_start_cut_anywhere_replays_again` |
| new journal segment without a durable name | `test_a_new_journal_segment_…` |
| journal segment made a spare one, and written again | `test_a_recycled_journal_segment_cut_at_each_step` |
| no crash, but the journal's files are lost | `test_a_journal_that_is_lost_before_the_first_checkpoint_…` |
| compaction, before and after the sync of the index | `test_a_compaction_cut_at_each_step` (`test_log_collection.py`) |
| ledger deleted, its log not yet | `test_a_deleted_ledger_stays_deleted_or_is_deleted_again` |
| between writable and read-only | `test_one_that_was_killed_while_it_changed_places_…` (`test_bookie_role.py`) |
| first start, cookies half stamped | `test_the_first_start_cut_anywhere_…`, and with metadata in `test_cookie.py` |
| rebirth on an empty disk; acceptance of an old copy | `test_limbo.py`; `test_bookie_life.py` |
| no crash, but a pause that ends the session | `test_a_lost_session_…` (`test_bookie_role.py`), `test_lac_waits.py` |
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from cepheid_bookie import Bookie, BookieState
from cepheid_bookie.errors import CookieError, JournalMissingError
from cepheid_bookie.journal_mark import FILES as MARK_FILES
from cepheid_bookie.journal_mark import MarkFile
from cepheid_rpc import LacRequest, Status
from tests.bookie.bookie_support import KEY, KiB, Machine, add, added, group_of, read_all, settle, small_settings
from tests.bookie.promises import Promises
from tests.simulation.world.node import NodeCrashed
from tests.support import run_async, wait_until

Scenario = Callable[[Bookie, Promises], Awaitable[None]]


async def crash_and_check(scenario: Scenario, operation: int, seed: int, *, power_loss: bool) -> tuple[bool, Promises, Machine]:
    """Runs a scenario, takes the power at one operation, restarts twice, and checks all promises both times."""
    machine, promises = Machine(f"{operation}/{seed}"), Promises()
    machine.crash_at(operation)
    crashed = await machine.run_until_crash(lambda bookie: scenario(bookie, promises))
    for _ in range(2):
        machine.restart(power_loss=power_loss)
        async with machine.bookie() as bookie:
            await promises.check(bookie)
    return crashed, promises, machine


async def sweep(scenario: Scenario, *, seeds: int = 2) -> int:
    """Every operation, until the scenario gets through; returns how many there were."""
    operation = 0
    while True:
        for seed in range(seeds):
            crashed, _, _ = await crash_and_check(scenario, operation, seed, power_loss=seed % 3 != 2)
        if not crashed:
            return operation
        operation += 1


async def a_life(bookie: Bookie, promises: Promises) -> None:
    """Adds to three ledgers, fences, LACs, checkpoints between, rolls of segment and log, recovery adds, a close."""
    await promises.add(bookie, group_of(7, 0, 5), group_of(8, 0, 2, size=900))
    await promises.fence(bookie, 9)  # a ledger without entries
    await promises.write_lac(bookie, 8, 1)
    await bookie.checkpoint()
    await promises.add(bookie, group_of(7, 5, 3), group_of(8, 2, 2, size=900))
    await promises.fence_by_read(bookie, 8, 4)
    await promises.add(bookie, group_of(8, 4, size=900))
    await bookie.checkpoint()
    for first in range(8, 20, 3):
        await promises.add(bookie, group_of(7, first, 3, size=4 * KiB))
    await promises.add(bookie, group_of(8, 1, 5, size=900), recovery=True)
    await bookie.checkpoint()
    await promises.add(bookie, group_of(7, 20, 2))
    await promises.fence(bookie, 10)
    await bookie.aclose()


@pytest.mark.slow
def test_every_operation_of_a_life() -> None:
    operations = run_async(sweep(a_life, seeds=3))
    assert operations > 60


@pytest.mark.parametrize("operation", range(30))
def test_the_first_start_cut_anywhere_is_provably_new_and_starts(operation: int) -> None:
    """Cookie stamping half done; new segment created and directory not synced."""

    async def scenario(bookie: Bookie, promises: Promises) -> None:
        await promises.add(bookie, group_of(7, 0))

    for seed in range(4):
        run_async(crash_and_check(scenario, operation, seed, power_loss=seed != 3))


async def test_a_start_cut_anywhere_replays_again() -> None:
    """C0 to C7 of the replay's own flush, over a journal with torn tail."""
    for operation in range(60):
        machine, promises = Machine(f"replay/{operation}"), Promises()
        bookie = await machine.open()
        for first in range(0, 30, 3):
            await promises.add(bookie, group_of(7, first, 3, size=KiB), group_of(8, first, 3))
        await promises.fence(bookie, 8)
        machine.restart()
        machine.crash_at(operation)
        crashed = await machine.run_until_crash(promises.check)
        machine.restart()
        async with machine.bookie() as bookie:
            await promises.check(bookie)
        if not crashed:
            return
    raise AssertionError("the start never got through")


@pytest.mark.parametrize("written", [False, True])
async def test_a_batch_that_was_not_synced_was_not_answered_and_is_never_half_there(written: bool) -> None:
    for seed in range(60 if written else 4):
        machine, promises = Machine(seed), Promises()
        bookie = await machine.open()
        await promises.add(bookie, group_of(7, 0))
        machine.disk.on_operation = None
        machine.crash_at(1 if written else 0)  # the first operation is the write, the second one its sync
        pending = asyncio.ensure_future(promises.add(bookie, group_of(7, 1, 40, size=300), group_of(8, 0)))
        await machine.crashed.wait()
        assert not pending.done(), "answered before the sync"
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)
        machine.restart()
        async with machine.bookie() as bookie:
            await promises.check(bookie)
            entries, _ = await read_all(bookie, 7, 0, 40)
            assert len(entries) in ((1, 41) if written else (1,)), "half a batch"


async def test_synced_and_not_answered_is_there() -> None:
    machine = Machine()
    bookie = await machine.open()
    machine.workers["journal"].crash_before_report = True
    pending = asyncio.ensure_future(add(bookie, group_of(7, 0, 3)))
    await machine.crashed.wait()
    assert not pending.done()
    pending.cancel()
    await asyncio.gather(pending, return_exceptions=True)
    machine.restart()
    async with machine.bookie() as bookie:
        entries, _ = await read_all(bookie, 7, 0, 2)
        assert len(entries) == 3
        await added(bookie, group_of(7, 0, 3))  # and may be sent again


@pytest.mark.parametrize("operation", [0, 1])
async def test_a_fence_that_was_not_synced_was_not_answered_and_takes_no_add_with_it(operation: int) -> None:
    for seed in range(4):
        machine, promises = Machine(seed), Promises()
        bookie = await machine.open()
        await promises.add(bookie, group_of(7, 0, 3))
        machine.crash_at(operation)
        pending = asyncio.ensure_future(promises.fence(bookie, 7))
        await machine.crashed.wait()
        assert not pending.done(), "answered before the sync"
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)
        machine.restart()
        async with machine.bookie() as bookie:
            await promises.check(bookie)


@pytest.mark.parametrize("operation", ["create", "sync_dir"])
async def test_a_new_journal_segment_without_a_durable_name_holds_nothing_that_was_answered(operation: str) -> None:
    for seed in range(4):
        machine, promises = Machine(seed, small_settings(write_cache_bytes=1 << 20)), Promises()
        bookie = await machine.open()

        segments = 0

        def on_operation(name: str, path: str, machine: Machine = machine) -> None:
            nonlocal segments
            if name == operation and path.startswith("journal"):
                segments += 1
                if segments == 2:
                    machine.crash_at(0)
                    raise NodeCrashed

        machine.disk.on_operation = on_operation
        first = 0
        while not machine.crashed.is_set():
            adding = asyncio.ensure_future(promises.add(bookie, group_of(7, first, 3, size=4 * KiB)))
            await wait_until(lambda adding=adding, machine=machine: adding.done() or machine.crashed.is_set())
            first += 3
        assert first > 3, "the first segment has answered batches"
        adding.cancel()
        await asyncio.gather(adding, return_exceptions=True)
        machine.restart()
        async with machine.bookie() as bookie:
            await promises.check(bookie)


def take_away(machine: Machine, *paths: str) -> None:
    for path in paths:
        machine.disk.take_away(path)


def journal_files(machine: Machine) -> list[str]:
    return [f"journal/{name}" for name in machine.disk.listdir("journal")]


async def test_a_journal_that_is_lost_before_the_first_checkpoint_is_missed() -> None:
    machine = Machine()
    await added(await machine.open(), group_of(7, 0))
    machine.restart()
    take_away(machine, *journal_files(machine))
    with pytest.raises(JournalMissingError, match=r"0000000000000001\.journal is missing"):
        await machine.open()


async def test_a_journal_of_an_older_release_without_a_mark_is_replayed() -> None:
    machine, promises = Machine(), Promises()
    await promises.add(await machine.open(), group_of(7, 0, 3))
    machine.restart()
    take_away(machine, *filter(machine.disk.exists, MARK_FILES))
    for _ in range(2):
        async with machine.bookie() as bookie:
            await promises.check(bookie)


async def test_a_full_data_disk_refuses_the_first_add_and_its_mark_is_saved_before_the_next() -> None:
    machine = Machine()
    bookie = await machine.open()
    machine.disk.fail("create", "mark.new", errno.ENOSPC)
    assert [answer.status for answer in await add(bookie, group_of(7, 0))] == [Status.NO_SPACE]
    await wait_until(lambda: bookie.writable)
    await added(bookie, group_of(7, 0))
    machine.restart()
    take_away(machine, *journal_files(machine))
    with pytest.raises(JournalMissingError):
        await machine.open()


RECYCLED = "journal/0000000000000004.journal"


async def fill_segments(bookie: Bookie, promises: Promises, first: int, segments: int) -> None:
    """Batches of one block each; fifteen fill a segment."""
    for entry_id in range(first, first + 15 * segments):
        await promises.add(bookie, group_of(7, entry_id, size=100))


@pytest.mark.parametrize(
    ("operation", "path", "named"),
    [
        ("rename", "journal/0000000000000001.journal.spare", False),  # the mark has passed it
        ("rename", RECYCLED + ".new", False),
        ("pwrite", RECYCLED + ".new", False),  # its header, and zeros behind it
        ("sync", RECYCLED + ".new", False),
        ("rename", RECYCLED, False),
        ("sync_dir", "journal", True),
        ("pwritev", RECYCLED + ".new", True),  # the first batch, with old ones behind it; the disk knows the file as it was opened
        ("pwrite", RECYCLED + ".new", True),  # zeros ahead
        ("sync", RECYCLED + ".new", True),
    ],
)
@pytest.mark.parametrize("seed", range(4))
async def test_a_recycled_journal_segment_cut_at_each_step(operation: str, path: str, named: bool, seed: int) -> None:
    machine, promises = Machine(seed, small_settings(write_cache_bytes=1 << 20, journal_spare_segments=2)), Promises()
    bookie = await machine.open()

    def on_operation(name: str, where: str) -> None:
        if (name, where) == (operation, path) and machine.disk.exists(RECYCLED) == named:
            machine.crash_at(0)
            raise NodeCrashed

    machine.disk.on_operation = on_operation

    async def life() -> None:
        await fill_segments(bookie, promises, 0, 2)
        await bookie.checkpoint()
        await promises.add(bookie, group_of(7, 30))
        await bookie.checkpoint()
        await fill_segments(bookie, promises, 31, 2)

    living = asyncio.ensure_future(life())
    await wait_until(lambda: machine.crashed.is_set() or living.done())
    assert machine.crashed.is_set(), f"nothing does a {operation} of {path}"
    living.cancel()
    await asyncio.gather(living, return_exceptions=True)
    for _ in range(2):
        machine.restart(power_loss=seed != 3)
        async with machine.bookie() as again:
            await promises.check(again)
            assert again.cookie.limbo_below == 0
            assert all(file.endswith(".journal") for file in journal_files(machine))


async def test_spare_journal_segments_are_deleted_when_the_disk_is_low_and_kept_again_when_there_is_room() -> None:
    machine = Machine(
        settings=small_settings(
            write_cache_bytes=1 << 20, journal_spare_segments=2, warn_free_journal_bytes=1 << 20, space_margin_bytes=0
        )
    )
    machine.disk.capacity_bytes = 4 << 20

    def spares() -> int:
        return sum(file.endswith(".spare") for file in journal_files(machine))

    async def make_spares(first: int) -> None:
        for part in range(3):
            await fill_segments(bookie, promises, first + 30 * part, 2)
            await bookie.checkpoint()

    promises = Promises()
    async with machine.bookie() as bookie:
        await make_spares(0)
        assert spares() == 2
        machine.disk.capacity_bytes = machine.disk.used_bytes() + (1 << 20) - 1
        await wait_until(lambda: not spares())
        await make_spares(100)
        assert spares() == 0
        machine.disk.capacity_bytes = 4 << 20
        await wait_until(lambda: bookie._spares.keeps)
        await make_spares(200)
        assert spares() == 2


@pytest.mark.parametrize("by_read", [False, True])
@pytest.mark.parametrize("checkpoints", [0, 1, 2])
async def test_an_answered_fence_survives_checkpoint_and_power_loss_also_without_entries(by_read: bool, checkpoints: int) -> None:
    """An empty cache is no empty checkpoint: BookKeeper forgot such fences."""
    for seed in range(6):
        machine, promises = Machine(seed), Promises()
        bookie = await machine.open()
        await promises.add(bookie, group_of(5, 0))
        await bookie.checkpoint()
        if by_read:
            await promises.fence_by_read(bookie, 7, 0)
        else:
            await promises.fence(bookie, 7)
        for _ in range(checkpoints):
            await bookie.checkpoint()
            await promises.add(bookie, group_of(5, 1))
        machine.restart()
        async with machine.bookie() as bookie:
            await promises.check(bookie)
            assert bookie.ledgers() == [5, 7]


@pytest.mark.parametrize(
    ("operation", "path", "marks"),
    [
        ("pwritev", "entrylog/", {"old"}),  # C2 under way
        ("sync", "entrylog/", {"old"}),  # C2 done, C3 not
        ("sync_dir", "entrylog", {"old"}),  # a new log without a durable name
        ("sync", "index", {"old"}),  # C3 done, C4 and C5 not: log bytes nobody refers to
        ("create", "mark.new", {"old"}),  # C5 done, C6 not: full replay, idempotent
        ("rename", "mark", {"old"}),
        ("sync_dir", ".", {"old", "new"}),  # during C6: one or the other, never a mixture
        ("unlink", "journal/", {"new"}),  # C6 done, C7 not
    ],
)
@pytest.mark.parametrize("seed", range(4))
async def test_a_checkpoint_cut_at_each_step(operation: str, path: str, marks: set[str], seed: int) -> None:
    machine, promises = Machine(seed, small_settings(write_cache_bytes=1 << 20)), Promises()
    bookie = await machine.open()
    for part in range(3):  # two checkpoints before, so that there are segments to delete
        for first in range(part * 100, part * 100 + 100, 5):
            await promises.add(bookie, group_of(7, first, 5, size=KiB))
        if part < 2:
            await bookie.checkpoint()
    await promises.fence(bookie, 9)
    await promises.write_lac(bookie, 7, 100)

    def on_operation(name: str, where: str) -> None:
        if name == operation and where.startswith(path):
            machine.crash_at(0)
            raise NodeCrashed

    machine.disk.on_operation = on_operation
    machine.index.before_sync = lambda: on_operation("sync", "index")
    checkpoint = asyncio.ensure_future(bookie.checkpoint())
    await wait_until(lambda: machine.crashed.is_set() or checkpoint.done())
    assert machine.crashed.is_set(), f"a checkpoint has no {operation} of {path}"
    checkpoint.cancel()
    await asyncio.gather(checkpoint, return_exceptions=True)
    mark = MarkFile(machine.disk.copy_after_power_loss(machine.random))
    mark.load()
    assert ("new" if mark.current.sequence > 45 else "old") in marks
    machine.restart()
    async with machine.bookie() as bookie:
        await promises.check(bookie)


async def test_a_flush_that_fails_stops_the_bookie_and_loses_nothing() -> None:
    """EIO in the index, and the next flush would have succeeded: the mark must not pass what was never written."""
    for where in ("index", "entrylog/"):
        machine, promises = Machine(where), Promises()
        bookie = await machine.open()
        failures: list[BaseException] = []
        bookie.on_failed = failures.append
        await promises.add(bookie, group_of(7, 0, 5))
        if where == "index":

            def fail_once(machine: Machine = machine) -> None:
                machine.index.before_sync = lambda: None
                raise OSError(errno.EIO, "injected")

            machine.index.before_sync = fail_once
        else:
            machine.disk.fail("sync", where)
        with pytest.raises(OSError):
            await bookie.checkpoint()
        assert bookie.state is BookieState.FAILED
        assert len(failures) == 1
        assert await promises.add(bookie, group_of(7, 5)) == [Status.STOPPED]
        await bookie.aclose()
        machine.restart()
        async with machine.bookie() as bookie:
            await promises.check(bookie)


async def test_a_failed_journal_sync_stops_the_bookie_and_nothing_is_answered_ok_any_more() -> None:
    machine, promises = Machine(), Promises()
    bookie = await machine.open()
    failures: list[BaseException] = []
    bookie.on_failed = failures.append
    await promises.add(bookie, group_of(7, 0))
    machine.disk.fail("sync", "journal/")
    first = asyncio.ensure_future(promises.add(bookie, group_of(7, 1)))
    await asyncio.sleep(0)
    fence = asyncio.ensure_future(bookie.read_lac(LacRequest(9, KEY, fence=True)))
    await wait_until(lambda: bool(failures))
    assert await first == [Status.IO_ERROR]
    assert not (await fence).status.certain_no
    assert await promises.add(bookie, group_of(7, 2)) == [Status.STOPPED]
    _, missing = await read_all(bookie, 7, 5, 5)
    assert missing == {5: Status.STOPPED}
    await bookie.aclose()
    machine.restart()
    async with machine.bookie() as bookie:
        await promises.check(bookie)


async def test_entries_admitted_during_a_checkpoint_are_not_below_its_mark() -> None:
    """The mark is taken before the swap: what comes between swap and mark file is in the other half and in the journal."""
    for seed in range(10):
        machine, promises = Machine(seed), Promises()
        bookie = await machine.open()
        await promises.add(bookie, group_of(7, 0, 5))
        machine.workers["flush"].hold()
        checkpoint = asyncio.ensure_future(bookie.checkpoint())
        await settle()
        await promises.add(bookie, group_of(7, 5, 5))
        await promises.fence(bookie, 9)
        machine.workers["flush"].release()
        await checkpoint
        machine.restart()
        async with machine.bookie() as bookie:
            await promises.check(bookie)


async def test_a_deleted_ledger_stays_deleted_or_is_deleted_again() -> None:
    async def scenario(bookie: Bookie, promises: Promises) -> None:
        await promises.add(bookie, group_of(8, 0, 5))
        await add(bookie, group_of(7, 0, 5))
        await bookie.checkpoint()
        await add(bookie, group_of(7, 5, 5))
        await bookie.delete_ledgers([7])
        await bookie.reclaim()
        promises.fenced[7] = promises.fence_asked[7] = None  # whoever wrote it is refused from now on
        await bookie.checkpoint()

    operation = 0
    while True:
        machine, promises = Machine(f"delete/{operation}"), Promises()
        machine.crash_at(operation)
        crashed = await machine.run_until_crash(partial(scenario, promises=promises))
        machine.restart()
        async with machine.bookie() as bookie:
            deleted = 7 in promises.fenced
            if deleted:
                assert bookie.ledgers() == [8]
                _, missing = await read_all(bookie, 7, 0, 9)
                assert set(missing.values()) == {Status.NO_LEDGER}
            await promises.check(bookie)
            if 7 in bookie.ledgers():  # garbage collection finds it again
                await bookie.delete_ledgers([7])
            assert 7 not in bookie.ledgers()
        if not crashed:
            return
        operation += 1


async def test_losing_the_data_directory_or_the_journal_or_the_index_is_refused() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        await added(bookie, group_of(7, 0))
    machine.index.__init__()  # type: ignore[misc]
    with pytest.raises(CookieError, match=r"block index .* not stamped"):
        await machine.open()
