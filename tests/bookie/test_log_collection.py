"""Entry logs: dead ones are deleted, sparse ones compacted; on a full disk, with damage, beside flushes, reads and crashes."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from cepheid_bookie import Bookie, log_collection
from cepheid_bookie.block_index import BlockRef
from cepheid_bookie.disk import SyncFailedError
from cepheid_bookie.entry_log import CopiedLog, EntryLogReader, list_logs, log_path
from cepheid_rpc import Status
from tests.bookie.bookie_support import KiB, Machine, added, entries_of, group_of, read_all, settle, small_settings
from tests.bookie.promises import Promises
from tests.simulation.world.node import NodeCrashed
from tests.support import wait_until

LEDGERS = range(1, 11)
KEPT = 10
ROUNDS = 12
ENTRIES = 3 * ROUNDS


async def fill(bookie: Bookie, promises: Promises | None = None) -> None:
    """Ten ledgers, side by side in several closed logs; then a log that is being written."""
    for first in range(0, ENTRIES, 3):
        groups = [group_of(ledger_id, first, 3, size=KiB) for ledger_id in LEDGERS]
        for group in groups:
            if promises is not None and group.ledger_id == KEPT:
                await promises.add(bookie, group)
            else:
                await added(bookie, group)
        await bookie.checkpoint()


async def sparse(machine: Machine, **changes: Any) -> Bookie:
    """A bookie of whose logs one tenth is live."""
    bookie = await machine.open(**changes)
    await fill(bookie)
    await bookie.delete_ledgers(LEDGERS[:-1])
    return bookie


async def check_kept(bookie: Bookie) -> None:
    expected = entries_of([group_of(KEPT, 0, ENTRIES, size=KiB)])
    entries, missing = await read_all(bookie, KEPT, 0, ENTRIES - 1)
    assert not missing
    assert {i: entry[-KiB:] for i, entry in entries.items()} == {i: entry[-KiB:] for i, entry in expected.items()}


def space(machine: Machine) -> int:
    return sum(len(machine.disk.durable_content(log_path(log_id))) for log_id in list_logs(machine.disk))


def blocks_of(machine: Machine, ledger_id: int = KEPT) -> list[BlockRef]:
    return [block for block in machine.index.blocks() if block.ledger_id == ledger_id]


def on_operation(machine: Machine, name: str, path: str, act: Callable[[], None]) -> None:
    """Act before each operation of that name on the disk, or on the index ("sync", "index")."""

    def operation(found: str, where: str) -> None:
        if found == name and where.startswith(path):
            act()

    machine.disk.on_operation = operation
    machine.index.before_sync = lambda: operation("sync", "index")


def no_space() -> None:
    raise OSError(errno.ENOSPC, "no space")


async def test_sparse_logs_are_merged_and_their_space_comes_back() -> None:
    machine = Machine()
    bookie = await sparse(machine)
    logs, size = list_logs(machine.disk), space(machine)
    deleted = await bookie.reclaim()
    assert deleted == logs, "with the one that was being written"
    assert len(list_logs(machine.disk)) == 1
    assert space(machine) < size / 5
    await check_kept(bookie)
    figures = bookie.statistics()
    assert (figures.compactions, figures.logs_deleted, figures.quarantined_logs) == (1, len(deleted), 0)
    assert figures.log_live_bytes < figures.log_bytes
    assert figures.reclaimed_bytes > figures.compacted_bytes > 0
    assert await bookie.reclaim() == [], "nothing is compacted twice"
    await bookie.aclose()
    machine.restart()
    async with machine.bookie() as bookie:
        await check_kept(bookie)


async def test_a_small_bookie_whose_data_is_all_in_the_log_being_written_gets_its_space_back() -> None:
    machine = Machine(settings=small_settings(log_bytes=1 << 20))
    bookie = await sparse(machine)
    assert len(list_logs(machine.disk)) == 1
    assert await bookie.reclaim() == [1]
    assert space(machine) < 60 * KiB
    await check_kept(bookie)
    await added(bookie, group_of(77, 0))
    await bookie.checkpoint()
    assert list_logs(machine.disk) == [2, 3]
    assert await bookie.reclaim() == [], "a log that has just begun is not closed"
    await bookie.aclose()


async def test_the_blocks_of_a_ledger_are_neighbours_in_the_new_log() -> None:
    machine = Machine()
    bookie = await sparse(machine)
    await bookie.reclaim()
    blocks = [block for block in blocks_of(machine) if block.log_id == max(list_logs(machine.disk))]
    assert len(blocks) > 3
    assert all(block.offset + block.length == after.offset for block, after in pairwise(blocks))
    await bookie.aclose()


async def test_a_log_of_which_more_is_live_waits_for_a_major_compaction() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        await fill(bookie)
        await bookie.delete_ledgers(LEDGERS[:3])
        assert await bookie.reclaim() == []
        assert bookie.statistics().compactions == 0
        await bookie.reclaim(urgent=True)
        assert bookie.statistics().compactions > 0
        assert set(bookie.ledgers()) == set(LEDGERS[3:])
        await check_kept(bookie)


async def test_a_ledger_that_is_deleted_while_it_is_copied_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    bookie = await sparse(machine)
    move, deletions = machine.index.move, []

    def delete_first(moves: Sequence[tuple[BlockRef, BlockRef]]) -> int:
        machine.index.delete_ledgers({KEPT: machine.index.record(KEPT)})
        deletions.append(len(moves))
        return move(moves)

    monkeypatch.setattr(machine.index, "move", delete_first)
    await bookie.reclaim()
    assert deletions
    assert blocks_of(machine) == []
    await bookie.reclaim()
    assert list_logs(machine.disk) == []
    await bookie.aclose()


async def test_the_log_being_written_and_logs_that_a_flush_needs_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        await added(bookie, group_of(7, 0, 20, size=10_000))
        write = machine.index.write
        monkeypatch.setattr(machine.index, "write", lambda *_: no_space())
        with pytest.raises(OSError, match="no space"):
            await bookie.checkpoint()
        needed = list_logs(machine.disk)
        assert len(needed) > 2
        assert await bookie.reclaim(urgent=True) == []
        monkeypatch.setattr(machine.index, "write", write)
        await wait_until(lambda: bookie.statistics().mark_sequence == bookie._journal.durable.sequence)
        assert {block.log_id for block in blocks_of(machine, 7)} == set(needed)


async def test_a_failed_flush_deletes_no_log_of_compaction() -> None:
    """Ids of both writers are mixed: each gives up its own files."""
    machine = Machine()
    bookie = await sparse(machine)
    before = list_logs(machine.disk)
    copies: list[CopiedLog] = []

    def copy_meanwhile() -> None:
        """When the flush has begun its second log, the next id is taken; in the third log the disk is full."""
        new = [log_id for log_id in list_logs(machine.disk) if log_id not in before]
        machine.disk.on_operation = None
        if new and not copies:
            copies.append(CopiedLog(machine.disk, bookie._logs.ids.take()))
        on_operation(machine, "pwritev", "entrylog/", no_space if len(new) > 2 else copy_meanwhile)

    await added(bookie, group_of(77, 0, 20, size=10_000))
    copy_meanwhile()
    with pytest.raises(OSError, match="no space"):
        await bookie.checkpoint()
    (copy,) = copies
    assert list_logs(machine.disk) == [*before, copy.log_id]
    machine.disk.on_operation = None
    await wait_until(lambda: bookie.statistics().mark_sequence == bookie._journal.durable.sequence)
    await bookie.aclose()


# -- damage ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["flipped bit", "EIO"])
async def test_a_damaged_block_stays_where_it_is_and_hinders_no_other(how: str, caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    bookie = await sparse(machine)
    reported: list[tuple[int, int, int]] = []
    bookie.collection.on_damaged = lambda *entries: reported.append(entries)
    hurt = blocks_of(machine)[1]
    if how == "EIO":
        machine.disk.on_read = lambda path, offset: (
            (_ for _ in ()).throw(OSError(errno.EIO, "bad sector"))
            if (path, offset) == (log_path(hurt.log_id), hurt.offset)
            else None
        )
    else:
        machine.disk.flip_bit(log_path(hurt.log_id), hurt.offset + hurt.length - 5)
    logs = list_logs(machine.disk)
    deleted = await bookie.reclaim()
    assert deleted == [log_id for log_id in logs if log_id != hurt.log_id]
    assert [block for block in blocks_of(machine) if block.log_id == hurt.log_id] == [hurt]
    assert bookie.statistics().quarantined_logs == 1
    entries, missing = await read_all(bookie, KEPT, 0, ENTRIES - 1)
    assert set(missing) <= set(range(hurt.first_entry_id, hurt.last_entry_id + 1))
    assert all(not status.certain_no for status in missing.values())
    assert entries.keys() | missing.keys() == set(range(ENTRIES))
    for urgent in (False, True):
        await bookie.reclaim(urgent=urgent)
    assert reported == [hurt[:3]], "once"
    (record,) = (record for record in caplog.records if record.message == "compaction.block_damaged")
    assert (record.__dict__["file"], record.__dict__["offset"]) == (log_path(hurt.log_id), hurt.offset)
    if how == "EIO":  # it passes
        machine.disk.on_read = None
        await bookie.reclaim(urgent=True)
        await check_kept(bookie)
    else:
        await bookie.delete_ledgers([KEPT])
        await bookie.reclaim()
    assert hurt.log_id not in list_logs(machine.disk)
    assert bookie.statistics().quarantined_logs == 0
    await bookie.aclose()


# -- full disk ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "path"), [("create", "entrylog/"), ("pwrite", "entrylog/"), ("pwritev", "entrylog/"), ("sync", "entrylog/")]
)
async def test_a_copy_that_does_not_fit_is_given_up_and_tried_again(operation: str, path: str) -> None:
    machine = Machine()
    bookie = await sparse(machine)
    logs = list_logs(machine.disk)
    on_operation(machine, operation, path, no_space)
    assert await bookie.reclaim() == []
    await settle()
    assert list_logs(machine.disk) == logs, "nothing half is left"
    machine.disk.on_operation = None
    assert await bookie.reclaim() == logs
    await check_kept(bookie)
    await bookie.aclose()


@pytest.mark.parametrize(("operation", "path"), [("sync", "index"), ("sync", "entrylog"), ("sync_dir", "entrylog")])
async def test_a_failed_sync_stops_the_bookie_and_deletes_no_log(operation: str, path: str) -> None:
    """The next sync would succeed, although the index on the disk still refers to the log."""
    machine = Machine()
    bookie = await sparse(machine)
    logs, failed = list_logs(machine.disk), []

    def fail_once() -> None:
        if not failed:
            failed.append(path)
            raise OSError(errno.EIO, "the disk does not answer")

    on_operation(machine, operation, path, fail_once)
    with pytest.raises(OSError, match="does not answer"):
        await bookie.reclaim()
    assert isinstance(bookie.failure, SyncFailedError)
    await bookie.reclaim()
    assert set(logs) <= set(list_logs(machine.disk)), "the next pass was refused"
    await bookie.aclose()
    machine.restart()
    async with machine.bookie() as bookie:
        await bookie.reclaim()
        await check_kept(bookie)


async def test_on_a_full_disk_dead_logs_are_deleted_first_and_make_the_room_to_compact_others() -> None:
    machine = Machine(settings=small_settings(compaction_reserve_bytes=0))
    bookie = await machine.open()
    await fill(bookie)
    for first in range(0, 200, 5):  # logs of one ledger alone
        await added(bookie, group_of(30, first, 5, size=KiB))
        await bookie.checkpoint()
    await bookie.delete_ledgers([*LEDGERS[:-1], 30])
    machine.disk.capacity_bytes = machine.disk.used_bytes()
    assert machine.disk.free_bytes() == 0
    await bookie.reclaim(urgent=True)
    assert len(list_logs(machine.disk)) == 1
    await check_kept(bookie)
    await bookie.aclose()


async def test_compaction_uses_the_space_that_adds_leave_but_not_its_reserve(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(settings=small_settings(compaction_reserve_bytes=100 * KiB))
    bookie = await sparse(machine, min_free_data_bytes=1 << 20)
    logs = list_logs(machine.disk)
    machine.disk.capacity_bytes = machine.disk.used_bytes() + 50 * KiB
    assert await bookie.reclaim(urgent=True) == []
    (warning,) = (record for record in caplog.records if record.message == "compaction.no_room")
    assert warning.levelno == logging.WARNING
    assert warning.__dict__["free_bytes"] < warning.__dict__["needed_bytes"]
    machine.disk.capacity_bytes += 100 * KiB
    assert await bookie.reclaim(urgent=True) == logs
    await check_kept(bookie)
    await bookie.aclose()


async def test_compaction_does_not_make_the_bookie_read_only() -> None:
    """While the disk is not full, it leaves what adds must leave, and the margin above it."""
    machine = Machine()
    bookie = await sparse(machine, min_free_data_bytes=1 << 20, space_margin_bytes=100 * KiB)
    logs = list_logs(machine.disk)
    machine.disk.capacity_bytes = machine.disk.used_bytes() + (1 << 20) + 100 * KiB
    assert await bookie.reclaim() == []
    assert bookie.writable
    machine.disk.capacity_bytes += 100 * KiB
    assert await bookie.reclaim() == logs
    await check_kept(bookie)
    await bookie.aclose()


async def test_a_start_without_room_deletes_what_a_killed_compaction_left() -> None:
    """Its log is not the newest one: the log of the flushes was rolled after it."""
    machine = Machine()
    bookie = await machine.open()
    left = CopiedLog(machine.disk, bookie._logs.ids.take())
    left.append([(BlockRef(1, 0, 0, 1, 0, 64 * KiB), bytes(64 * KiB))])
    left.finish()
    await added(bookie, group_of(7, 0, 3, size=KiB))
    await bookie.checkpoint()  # into a newer log
    await added(bookie, group_of(7, 3, 20, size=KiB))  # in the journal alone
    machine.restart()
    machine.disk.capacity_bytes = machine.disk.used_bytes() + 4 * KiB
    bookie = await machine.open()
    assert left.log_id not in list_logs(machine.disk)
    assert set((await read_all(bookie, 7, 0, 22))[0]) == set(range(23))
    await bookie.aclose()


async def test_a_pass_makes_way_for_an_urgent_one_when_the_disk_fills(monkeypatch: pytest.MonkeyPatch) -> None:
    """The urgent one purges, deletes and compacts more."""
    machine = Machine()
    bookie = await machine.open(compaction_minor_share=0.9, compaction_major_share=0.9)
    await fill(bookie)
    await bookie.delete_ledgers(LEDGERS[:3])
    merge = log_collection.LogCollection._merge

    async def fills(self: log_collection.LogCollection, *args: Any) -> bool:
        bookie.data_full.set()
        return await merge(self, *args)

    monkeypatch.setattr(log_collection.LogCollection, "_merge", fills)
    await bookie.reclaim()
    assert bookie.statistics().compactions == 1
    await bookie.reclaim(urgent=True)
    assert bookie.statistics().compactions > 2
    await check_kept(bookie)
    await bookie.aclose()


# -- pace, pauses, stops --------------------------------------------------------------------------------------------------


@pytest.mark.virtual_time
async def test_the_rate_is_limited_until_the_pass_becomes_urgent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_collection, "_PIECE_BYTES", 4 * KiB)
    bookie = await sparse(Machine(), compaction_bytes_s=64 * KiB)
    collection = asyncio.ensure_future(bookie.reclaim())
    await wait_until(lambda: bookie.statistics().compacted_bytes > 0)
    await asyncio.sleep(0.1)
    assert not collection.done()
    assert bookie.statistics().compacted_bytes <= 20 * KiB
    urgent = asyncio.ensure_future(bookie.reclaim(urgent=True))
    await asyncio.wait_for(collection, 0.4)
    await urgent
    await bookie.aclose()


async def test_a_pass_that_takes_long_goes_on_in_the_next_one_unless_it_is_urgent() -> None:
    """The collector deletes ledgers between two passes. Each has time for one new log here."""
    machine = Machine()
    bookie = await machine.open(gc_interval_s=1e-9, compaction_minor_share=0.9, compaction_major_share=0.9)
    await fill(bookie)
    await bookie.delete_ledgers(LEDGERS[:3])
    for passes in (1, 2):
        assert await bookie.reclaim()
        assert bookie.statistics().compactions == passes
    assert await bookie.reclaim(urgent=True)
    assert bookie.statistics().compactions > 3
    await check_kept(bookie)
    await bookie.aclose()


async def test_a_pass_that_is_cancelled_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_collection, "_PIECE_BYTES", 4 * KiB)
    machine = Machine()
    bookie = await sparse(machine, compaction_bytes_s=64 * KiB)
    logs = list_logs(machine.disk)
    collection = asyncio.ensure_future(bookie.reclaim())
    await wait_until(lambda: list_logs(machine.disk) != logs)
    collection.cancel()
    await asyncio.gather(collection, return_exceptions=True)
    await settle()
    assert list_logs(machine.disk) == logs
    assert await bookie.reclaim(urgent=True) == logs
    await bookie.aclose()


async def test_a_bookie_that_closes_ends_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_collection, "_PIECE_BYTES", 4 * KiB)
    machine = Machine()
    bookie = await sparse(machine, compaction_bytes_s=64 * KiB)
    collection = asyncio.ensure_future(bookie.reclaim())
    await wait_until(lambda: bookie.statistics().compacted_bytes > 0)
    await bookie.aclose()
    assert await collection == []
    machine.restart()
    async with machine.bookie() as bookie:
        await check_kept(bookie)


async def test_an_index_that_cannot_be_read_to_its_end_condemns_no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    bookie = await sparse(machine)
    logs = list_logs(machine.disk)

    def fails(*_: object) -> list[BlockRef]:
        raise OSError(errno.EIO, "the index")

    monkeypatch.setattr(machine.index, "blocks_after", fails)
    with pytest.raises(OSError, match="the index"):
        await bookie.reclaim()
    assert list_logs(machine.disk) == logs
    monkeypatch.undo()
    assert await bookie.reclaim()
    await bookie.aclose()


# -- reads ----------------------------------------------------------------------------------------------------------------


async def test_a_read_whose_log_is_deleted_under_it_asks_the_index_again(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    bookie = await sparse(machine)
    read_block, collecting = EntryLogReader.read_block, []

    def after_a_collection(self: EntryLogReader, block: BlockRef, **options: bool) -> Any:
        if not collecting:
            collecting.append(asyncio.ensure_future(bookie.reclaim()))
            raise FileNotFoundError(errno.ENOENT, "the log was deleted in this moment")
        return read_block(self, block, **options)

    monkeypatch.setattr(EntryLogReader, "read_block", after_a_collection)
    await check_kept(bookie)
    await asyncio.gather(*collecting)
    await check_kept(bookie)
    await bookie.aclose()


async def test_entries_of_a_log_that_is_gone_for_good_are_unknown() -> None:
    machine = Machine()
    bookie = await sparse(machine)
    lost = blocks_of(machine)[0]
    machine.disk.unlink(log_path(lost.log_id))
    bookie._log_reader.forget(lost.log_id)
    _, missing = await read_all(bookie, KEPT, 0, ENTRIES - 1)
    assert set(missing.values()) == {Status.IO_ERROR}
    assert set(range(lost.first_entry_id, lost.last_entry_id + 1)) <= set(missing)
    await bookie.aclose()


# -- crashes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "path", "moved"),
    [
        ("create", "entrylog/", False),
        ("sync_dir", "entrylog", False),  # a new log without a durable name
        ("pwritev", "entrylog/", False),
        ("sync", "entrylog/", False),  # copied, not synced
        ("sync", "index", False),  # a log to which nothing refers, the old ones whole
        ("unlink", "entrylog/", True),  # the new places are synced, the old logs still there
    ],
)
@pytest.mark.parametrize("seed", range(4))
async def test_a_compaction_cut_at_each_step(operation: str, path: str, moved: bool, seed: int) -> None:
    machine, promises = Machine(seed), Promises()
    bookie = await machine.open()
    await fill(bookie, promises)
    await bookie.delete_ledgers(LEDGERS[:-1])
    logs = list_logs(machine.disk)

    def crash() -> None:
        machine.crash_at(0)
        raise NodeCrashed

    on_operation(machine, operation, path, crash)
    collection = asyncio.ensure_future(bookie.reclaim())
    await wait_until(lambda: machine.crashed.is_set() or collection.done())
    assert machine.crashed.is_set(), f"a compaction has no {operation} of {path}"
    collection.cancel()
    await asyncio.gather(collection, return_exceptions=True)
    machine.restart(power_loss=seed != 3)
    assert any(block.log_id > max(logs) for block in blocks_of(machine)) is moved
    async with machine.bookie() as bookie:
        await promises.check(bookie)
        await bookie.reclaim()
        await promises.check(bookie)
        referenced = {block.log_id for block in machine.index.blocks()}
        assert set(list_logs(machine.disk)) <= referenced | {bookie._logs.current_log_id}


@pytest.mark.slow
async def test_a_compaction_cut_at_every_operation() -> None:
    """Power is lost while adds, a flush and a deletion of what is being copied run beside the compaction."""

    async def life(bookie: Bookie, machine: Machine, promises: Promises, operation: int) -> None:
        machine.disk.on_operation = None
        machine.index.before_sync = lambda: None
        await fill(bookie, promises)
        await bookie.delete_ledgers(LEDGERS[:-2])
        machine.crash_at(operation)
        await asyncio.gather(
            bookie.reclaim(urgent=True),
            promises.add(bookie, group_of(KEPT, ENTRIES, 3, size=KiB), group_of(21, 0, 9, size=KiB)),
            bookie.checkpoint(),
            bookie.delete_ledgers([LEDGERS[-2]]),
        )
        await bookie.reclaim()

    for operation in range(200):
        machine, promises = Machine(f"compact/{operation}"), Promises()
        crashed = await machine.run_until_crash(partial(life, machine=machine, promises=promises, operation=operation))
        for _ in range(2):
            machine.restart(power_loss=operation % 3 != 2)
            async with machine.bookie() as bookie:
                await promises.check(bookie)
                await bookie.reclaim()
                await promises.check(bookie)
        if not crashed:
            assert operation > 12
            return
    raise AssertionError("the life never ended")
