"""Courses of events in which an earlier version of repair lost sight of copies, or stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest.mock import AsyncMock

import pytest

from cepheid_bookie.metadata_records import MetadataCookies
from cepheid_ledger import can_separate
from cepheid_metadata import (
    BookieRegistration,
    DeletedLedgers,
    EntryRun,
    LedgerState,
    MemoryStore,
    MemoryTree,
    RepairMark,
    ShortReason,
    StoreUnavailableError,
    available_bookies,
    draining_bookies,
    keys,
    ledger_records,
    readonly_bookies,
    repair_marks,
)
from cepheid_metadata.repair_views import (
    RepairRefusedError,
    StrictRacks,
    cancel_decommission,
    damaged_entries,
    decommission,
    decommission_status,
    mark_damaged,
    repair_status,
)
from cepheid_metadata.upgrade import StorageFormat, storage_format_record
from cepheid_recovery import BookiesSeen
from cepheid_recovery.auditor import _Walk
from cepheid_recovery.replication_worker import _not_in
from cepheid_recovery.shortage import measure, new_mark
from tests.ledger.ledger_world import append
from tests.recovery.repair_world import QUICK, repair_world

_NO_SAMPLES = QUICK.model_copy(update={"walk_ledgers_per_s": 10**9})
_IDLE = QUICK.model_copy(update={"enabled": False})

pytestmark = [pytest.mark.virtual_time, pytest.mark.deadline(2000)]


@pytest.mark.parametrize(
    ("runs", "known", "left"),
    [
        ([(5, 9)], [(5, 5)], [(6, 9)]),
        ([(0, 9)], [(2, 3), (7, 7)], [(0, 1), (4, 6), (8, 9)]),
        ([(0, 1), (8, 9)], [(0, 9)], []),
        ([(0, 1)], [], [(0, 1)]),
    ],
)
def test_entries_that_are_newly_lost_are_told_from_known_ones(
    runs: list[tuple[int, int]], known: list[tuple[int, int]], left: list[tuple[int, int]]
) -> None:
    assert _not_in(runs, [EntryRun(first=first, last=last) for first, last in known]) == left


async def test_more_entries_that_are_lost_beside_known_ones_are_noted_with_who_may_have_them() -> None:
    async with repair_world(*"abcdef") as world:
        ledger_id = await world.closed_ledger("abc")
        for name in "ac":
            world.ledgers.cluster[name].damage(ledger_id, 4)
        await world.start()
        world.kill("b")
        await asyncio.sleep(QUICK.grace_s + 10)
        assert [(run.first, run.last) for run in (await world.marks())[ledger_id].lost] == [(4, 4)]
        moved = next(name for name in (await world.ledgers.record(ledger_id)).fragments[0].ensemble if name not in "ac")
        for name in (moved, "c"):
            for entry_id in (5, 6):
                world.ledgers.cluster[name].damage(ledger_id, entry_id)
        world.kill("a")  # it alone has 5 and 6
        await asyncio.sleep(QUICK.grace_s + 10)
        world.processes[0].on_bookies_changed()
        await asyncio.sleep(5)
        mark = (await world.marks())[ledger_id]
        assert [(run.first, run.last) for run in mark.lost] == [(4, 6)]
        assert mark.former == ("a", "b")


async def test_a_bookie_with_the_only_copy_stays_remembered_until_all_named_ones_have_it() -> None:
    async with repair_world(*"abcd") as world:
        ledger_id = await world.closed_ledger("abc")
        for name in "ac":
            world.ledgers.cluster[name].damage(ledger_id, 4)
        process = await world.start()
        world.kill("b")
        await asyncio.sleep(QUICK.grace_s + 10)
        assert (await world.marks())[ledger_id].former == ("b",)
        world.kill("a", "c", "d")  # the cluster restarts, and b is the first one to be back
        world.revive("b")
        process.on_bookies_changed()
        await asyncio.sleep(10)
        assert (await world.marks())[ledger_id].former == ("b",)
        for name in "acd":
            world.revive(name)
        process.on_bookies_changed()
        await world.wait_whole(ledger_id)


async def test_a_bookie_that_denies_one_entry_stays_remembered_for_another_that_some_named_bookies_lack() -> None:
    async with repair_world(*"abcd") as world:
        ledger_id = await world.closed_ledger("abc")
        for name, entry_id in ("a4", "c4", "a7", "b7", "c7"):
            world.ledgers.cluster[name].damage(ledger_id, int(entry_id))
        process = await world.start()
        world.kill("b")
        await asyncio.sleep(QUICK.grace_s + 10)
        assert (await world.marks())[ledger_id].former == ("b",)
        world.kill("a", "d")
        world.revive("b")
        process.on_bookies_changed()
        await asyncio.sleep(10)
        mark = (await world.marks())[ledger_id]
        assert ([(run.first, run.last) for run in mark.lost], mark.former) == ([(4, 4), (7, 7)], ("b",))


@pytest.mark.parametrize("how", ["is down", "cannot read it now"])
async def test_a_bookie_that_may_have_the_only_copy_of_an_entry_is_not_drained(how: str) -> None:
    async with repair_world(*"abcde", settings=_NO_SAMPLES) as world:
        ledger_id = await world.closed_ledger("abc")
        for name in "ac":
            del world.ledgers.cluster[name].entries[ledger_id][5]
        process = await world.start()
        await asyncio.sleep(10)
        if how == "is down":
            world.kill("b")
        else:
            world.ledgers.cluster["b"].unreadable.add(5)
        await world.drain("b")
        process.on_bookies_changed()
        await asyncio.sleep(QUICK.grace_s + 60)
        mark = (await world.marks())[ledger_id]
        assert ([(run.first, run.last) for run in mark.lost], mark.former) == ([(5, 5)], ("b",))
        status = await decommission_status(world.store, "b")
        assert (status["state"], status["ledgers_left"]) == ("draining", 1)
        assert status["problem"].startswith(f"it may have the only copy of entries 5..5 of ledger {ledger_id}: ")
        walks = process.auditor.statistics.walks
        await asyncio.sleep(60)
        assert process.auditor.statistics.walks == walks  # nothing has changed since the last one
        if how == "is down":
            world.revive("b")
            process.on_bookies_changed()
        world.ledgers.cluster["b"].unreadable.clear()
        await world.wait_whole(ledger_id)
        await asyncio.sleep(10)
        assert (await decommission_status(world.store, "b"))["state"] == "drained"


async def test_a_decommissioned_bookie_does_not_start_over_while_a_mark_remembers_it() -> None:
    """It would delete its data, and with it what may be the only copy of an entry."""
    store = MemoryStore(MemoryTree())
    await repair_marks(store).create(7, _remembering("b", ledger_id=7))
    cookies = MetadataCookies(store, {})
    assert [await cookies.is_named(name) for name in "ab"] == [False, True]


async def test_a_drained_bookie_is_not_forgotten_when_a_mark_remembers_it_since() -> None:
    async with repair_world(*"abcde", settings=_NO_SAMPLES) as world:
        process = await world.start()
        await world.drain("e")
        process.on_bookies_changed()
        await asyncio.sleep(30)
        assert (await decommission_status(world.store, "e"))["state"] == "drained"
        await repair_marks(world.store).create(7, _remembering("e", ledger_id=7))
        process.worker._repair = AsyncMock(return_value=False)  # type: ignore[method-assign]
        world.kill("e")
        await asyncio.sleep(QUICK.grace_s + 60)
        assert (await decommission_status(world.store, "e"))["state"] == "draining"


def _remembering(bookie: str, *, ledger_id: int) -> RepairMark:
    lost = (EntryRun(first=5, last=5),)
    return RepairMark(
        ledger_id=ledger_id, bookies={}, copies_left=0, short_entries=0, short_bytes=0, since_ms=0, lost=lost, former=(bookie,)
    )


@pytest.mark.parametrize("ending", ["given up", "brought back"])
async def test_a_bookie_with_the_last_copies_of_a_deleted_ledger_is_drained_when_that_cannot_be_restored_any_more(
    ending: str,
) -> None:
    async with repair_world(*"abcdefg", settings=_NO_SAMPLES) as world:
        ledger_id = await world.closed_ledger("abc")
        process = await world.start()
        found, deleted = await ledger_records(world.store).get(ledger_id), DeletedLedgers(world.store)
        assert found is not None
        await deleted.delete(found, now_ms=0, grace_ms=3_600_000)
        await world.drain("c")
        await asyncio.sleep(120)
        assert (await decommission_status(world.store, "c"))["state"] == "drained"  # a and b have copies
        world.kill("a", "c")
        await world.drain("b")
        process.on_bookies_changed()
        await asyncio.sleep(120)
        status = await decommission_status(world.store, "b")
        assert status["state"] == "draining"
        assert status["problem"].startswith(
            "it has the last copies of 1 deleted ledger, to be restored until 1970-01-01 01:00:00 UTC"
        )
        walks = process.auditor.statistics.walks
        await asyncio.sleep(60)
        assert process.auditor.statistics.walks == walks
        if ending == "given up":
            await deleted.give_up(ledger_id)
        else:
            assert await deleted.undelete(ledger_id, now_ms=0) is not None
        await asyncio.sleep(60)
        assert (await decommission_status(world.store, "b"))["state"] == "drained"
        if ending == "brought back":
            assert "b" not in (await world.ledgers.record(ledger_id)).last_fragment.ensemble
            assert await world.is_whole(ledger_id)


async def test_a_target_that_lost_its_disk_during_the_copy_is_not_named_without_its_copies() -> None:
    async with repair_world(*"abcd") as world:
        ledger_id = await world.closed_ledger("abc")
        process = await world.start()
        write = process.worker._write
        named_at_once: list[bool] = []

        async def lose_disk_first(*args: Any) -> bool:
            if named_at_once:
                return await write(*args)
            await world.lose_disk("d", 1000, "another")
            world.bookies.incarnations["d"] = "first disks"  # the worker has not heard of it
            try:
                return await write(*args)
            finally:
                named_at_once.append("d" in (await world.ledgers.record(ledger_id)).fragments[0].ensemble)

        process.worker._write = lose_disk_first  # type: ignore[method-assign]
        world.kill("b")
        await asyncio.sleep(QUICK.grace_s)
        await world.wait_whole(ledger_id)
        assert named_at_once == [False]
        assert world.ledgers.cluster["d"].ids(ledger_id) == list(range(10))


async def test_a_second_loss_of_a_disk_is_seen_although_no_ledger_was_created_in_between() -> None:
    async with repair_world("a", "b", "c") as world:
        ledger_id = await world.closed_ledger("abc")
        await world.start()
        await world.lose_disk("b", 1000, "second disks")
        await world.wait_refilled("b")
        world.ledgers.cluster["b"].entries.clear()
        await world.lose_disk("b", 1000, "third disks")
        world.bookies.incarnations["b"] = "second disks.1000"  # nobody saw it leave: only its cookie tells
        await asyncio.sleep(20)
        assert await world.is_whole(ledger_id)


async def test_what_a_walk_finds_is_marked_whatever_became_of_the_mark_meanwhile() -> None:
    async with repair_world(*"abcd", settings=_IDLE) as world:
        ledger_id = await world.closed_ledger("abc")
        ledger = await world.ledgers.record(ledger_id)
        auditor = (await world.start()).auditor
        shortage = measure(ledger, {"b": ShortReason.EMPTY_DISK}, "abcd")
        await auditor._renew(ledger, shortage)  # a worker removed the mark that the walk had seen
        assert (await world.marks())[ledger_id].bookies == {"b": ShortReason.EMPTY_DISK}
        walk = _Walk(BookiesSeen(frozenset("abcd")), frozenset(), samples=False, began=0.0)
        walk.new.append((ledger, measure(ledger, {"c": ShortReason.LOST}, "abd")))
        await auditor._create_marks(walk)  # somebody else made one that the walk had not seen
        assert (await world.marks())[ledger_id].bookies == {"b": ShortReason.EMPTY_DISK, "c": ShortReason.LOST}


async def test_a_lock_whose_answer_was_lost_is_used_all_the_same() -> None:
    async with repair_world(*"abcd") as world:
        ledger_id = await world.closed_ledger("abc")
        process = await world.start()
        store, losses = process.worker._store, [1]
        multi = store.multi

        async def lose_answer(ops: Sequence[Any]) -> Any:
            results = await multi(ops)
            if losses and "/locks/" in ops[0].key:
                losses.pop()
                raise StoreUnavailableError("the answer is lost", outcome_unknown=True)
            return results

        store.multi = lose_answer  # type: ignore[method-assign]
        world.kill("b")
        await asyncio.sleep(QUICK.grace_s)
        await world.wait_whole(ledger_id, timeout_s=30)
        assert losses == []


async def test_an_auditor_whose_first_read_failed_is_still_the_auditor() -> None:
    async with repair_world(*"abcd") as world:
        ledger_id = await world.closed_ledger("abc")
        process = await world.start()
        audits, failures = process.auditor._audits, [1]
        get = audits.get

        async def fail_once(noun: None) -> Any:
            if failures:
                failures.pop()
                raise StoreUnavailableError("metadata is away")
            return await get(noun)

        audits.get = fail_once  # type: ignore[method-assign]
        await asyncio.sleep(5)
        assert failures == []
        assert process.auditor.statistics.is_auditor
        world.kill("b")
        await asyncio.sleep(QUICK.grace_s)
        await world.wait_whole(ledger_id)


async def test_the_time_of_an_open_ledger_begins_anew_with_each_bookie_that_it_names() -> None:
    async with repair_world(*"abcde", settings=_IDLE) as world:
        writer = await world.open_ledger("abc", entries=5)
        ledger = await world.ledgers.record(writer.ledger_id)
        ledger_id = writer.ledger_id
        worker = (await world.start()).worker
        mark = RepairMark(ledger_id=ledger_id, bookies={}, copies_left=2, short_entries=0, short_bytes=0, since_ms=1)
        assert not worker._may_recover(ledger, mark, ["a"])
        await asyncio.sleep(QUICK.open_ledger_grace_s + 1)
        assert worker._may_recover(ledger, mark, ["a"])
        assert not worker._may_recover(ledger, mark, ["b"])  # its writer replaced a, so it lives
        await asyncio.sleep(QUICK.open_ledger_grace_s + 1)
        assert not worker._may_recover(ledger, mark.replace(since_ms=2), ["b"])  # b had been back
        assert worker._open_since == {ledger_id: (2, {"b": asyncio.get_running_loop().time()})}


async def test_a_bookie_is_not_called_empty_while_a_record_cannot_be_read() -> None:
    async with repair_world(*"abcd", settings=QUICK.model_copy(update={"walk_interval_s": 20.0})) as world:
        ledger_id = await world.closed_ledger("acd")
        process = await world.start()
        record_key = process.worker._ledgers.key_of(ledger_id)
        stored = await world.store.get(record_key)
        assert stored is not None
        version = await world.store.put(record_key, b"of a newer format", stored.version)
        await world.drain("b")
        await asyncio.sleep(30)
        draining = await draining_bookies(world.store).get("b")
        assert draining is not None
        assert draining.record.drained_at_ms is None
        await world.store.put(record_key, stored.value, version)
        await wait_until_drained(world, "b")


async def wait_until_drained(world: Any, name: str) -> None:
    for _ in range(60):
        found = await draining_bookies(world.store).get(name)
        if found is not None and found.record.drained_at_ms is not None:
            return
        await asyncio.sleep(1)
    raise AssertionError(f"{name} is not drained")


async def test_finished_fragments_are_copied_although_the_end_of_their_ledger_cannot_be_recovered() -> None:
    async with repair_world(*"abcdefg") as world:
        writer = await world.open_ledger("abc", entries=5)
        world.ledgers.cluster["c"].hang = True
        await append(writer, [b"the second fragment"])
        await asyncio.sleep(3)  # c is replaced
        world.ledgers.cluster["c"].hang = False
        record = await world.ledgers.record(writer.ledger_id)
        await writer.aclose()  # its process ended
        end = record.last_fragment.ensemble
        assert record.fragments[0].ensemble == ("a", "b", "c")
        world.kill("b", "c", end[2])  # a alone cannot say where the ledger ends
        await world.start()
        await asyncio.sleep(QUICK.grace_s + 3 * QUICK.open_ledger_grace_s)
        assert "recovery cannot close the ledger now" in (await world.marks())[writer.ledger_id].problem
        lost = (await world.ledgers.record(writer.ledger_id)).fragments[0].ensemble[2]
        world.kill(lost)  # one more that has copies of the first fragment
        await asyncio.sleep(QUICK.grace_s + 60)
        assert lost not in (await world.ledgers.record(writer.ledger_id)).fragments[0].ensemble


async def test_a_bookie_that_lost_its_disk_twice_is_not_taken_for_whole_by_the_first_refill() -> None:
    async with repair_world("a", "b", "c") as world:
        ledger_id = await world.closed_ledger("abc")
        process = await world.start()
        await asyncio.sleep(3)
        write = process.worker._write
        losses = [1]

        async def lose_disk_first(*args: Any) -> bool:
            if losses:
                losses.pop()
                await world.lose_disk("b", 1000, "third disks")
                world.bookies.incarnations["b"] = "first disks"  # nobody saw it leave: only its cookie tells
                await asyncio.sleep(15)  # the auditor finds the ledger marked already
            return await write(*args)

        process.worker._write = lose_disk_first  # type: ignore[method-assign]
        await world.lose_disk("b", 1000, "second disks")
        world.bookies.incarnations["b"] = "first disks"
        await asyncio.sleep(100)
        assert losses == []
        assert await world.is_whole(ledger_id)


async def test_a_target_that_is_decommissioned_during_the_copy_is_not_named() -> None:
    async with repair_world(*"abcde") as world:
        ledger_id = await world.closed_ledger("abc")
        process = await world.start()
        write = process.worker._write
        named_at_once: list[bool] = []

        async def decommission_first(ledger: Any, mark: Any, attempt: Any) -> bool:
            if named_at_once:
                return await write(ledger, mark, attempt)
            (target,) = attempt.replaced.values()
            await world.drain(target)
            await asyncio.sleep(5)
            try:
                return await write(ledger, mark, attempt)
            finally:
                named_at_once.append(target in (await world.ledgers.record(ledger_id)).fragments[0].ensemble)

        process.worker._write = decommission_first  # type: ignore[method-assign]
        world.kill("b")
        await asyncio.sleep(QUICK.grace_s)
        await world.wait_whole(ledger_id)
        assert named_at_once == [False]


async def test_a_drained_bookie_that_loses_its_session_for_a_moment_is_not_forgotten() -> None:
    async with repair_world(*"abcd") as world:
        await world.start()
        await world.drain("d")
        await wait_until_drained(world, "d")
        world.ledgers.cluster["d"].down = True
        await asyncio.sleep(QUICK.grace_s / 2)
        world.ledgers.cluster["d"].down = False
        await asyncio.sleep(5)
        assert await draining_bookies(world.store).get("d") is not None  # or brokers would use it again


async def test_a_bookie_that_was_found_damaged_is_checked_whatever_its_mark_said_before() -> None:
    async with repair_world(*"abcd", settings=_IDLE) as world:
        ledger_id = await world.closed_ledger("abc")
        ledger = await world.ledgers.record(ledger_id)
        for before in (ShortReason.PLACEMENT, ShortReason.LOST, ShortReason.DRAINING):
            shortage = measure(ledger, {"b": before}, "abcd")
            await repair_marks(world.store).create(ledger_id, new_mark(ledger_id, shortage, 0))
            await mark_damaged(world.store, ledger_id, ["b"], 0)
            assert (await world.marks())[ledger_id].bookies == {"b": ShortReason.DAMAGED}, before
            await repair_marks(world.store).delete(ledger_id, None)


async def test_all_copies_of_an_emptied_bookie_are_checked_also_when_some_of_them_are_reported_damaged() -> None:
    async with repair_world(*"abc", settings=_IDLE) as world:
        ledger_id = await world.closed_ledger("abc")
        shortage = measure(await world.ledgers.record(ledger_id), {"b": ShortReason.EMPTY_DISK}, "abc")
        await repair_marks(world.store).create(ledger_id, new_mark(ledger_id, shortage, 0))
        await mark_damaged(world.store, ledger_id, ["b"], 0, entries=[(5, 5)])
        assert (await world.marks())[ledger_id].bookies == {"b": ShortReason.EMPTY_DISK}


async def test_of_a_damaged_bookie_only_the_entries_that_the_mark_names_are_read() -> None:
    async with repair_world(*"abc") as world:
        await storage_format_record(world.store).create(None, StorageFormat(storage_format=2))
        ledger_id = await world.closed_ledger("abc", entries=500)
        world.ledgers.cluster["b"].damage(ledger_id, 7)
        await mark_damaged(world.store, ledger_id, ["b"], 0, entries=[(5, 9)])
        for bookie in world.ledgers.cluster.bookies.values():
            bookie.reads.clear()
        await world.start()
        await world.wait_whole(ledger_id)
        reads = [one for bookie in world.ledgers.cluster.bookies.values() for one in bookie.reads]
        ranges = [(one.first_entry_id, one.last_entry_id) for one in reads]
        # Besides, the auditor reads single entries of closed ledgers, and the copy needs one.
        assert [run for run in ranges if run[0] != run[1]] == [(5, 9)]


async def test_a_mark_names_damaged_entries_only_in_a_cluster_that_can_read_them() -> None:
    async with repair_world(*"abc", settings=_IDLE) as world:
        ledger_id = await world.closed_ledger("abc")
        await mark_damaged(world.store, ledger_id, ["b"], 0, entries=[(5, 9)])
        mark = (await world.marks())[ledger_id]
        assert (mark.format, mark.damaged, mark.short_entries) == (1, None, 5)
        assert b'damaged":{' not in mark.encode()


@pytest.mark.parametrize("storage_format", [1, 2])
async def test_damage_is_not_forgotten_while_its_bookie_is_away_for_longer_than_the_grace_period(storage_format: int) -> None:
    async with repair_world("a", "b", "c") as world:  # no other bookie can take its copies
        await storage_format_record(world.store).create(None, StorageFormat(storage_format=storage_format))
        ledger_id = await world.closed_ledger("abc")
        process = await world.start()
        await asyncio.sleep(10)
        world.kill("b")
        process.on_bookies_changed()
        world.ledgers.cluster["b"].damage(ledger_id, 5)
        await mark_damaged(world.store, ledger_id, ["b"], 0, entries=[(5, 5)])
        await asyncio.sleep(QUICK.grace_s + 10)
        assert "no other bookie can take its copies" in (await world.marks())[ledger_id].problem
        world.revive("b")
        process.on_bookies_changed()
        await world.wait_whole(ledger_id)


async def test_damage_is_not_forgotten_when_a_decommissioning_is_cancelled() -> None:
    async with repair_world("a", "b", "c") as world:
        ledger_id = await world.closed_ledger("abc")
        process = await world.start()
        await asyncio.sleep(10)
        await world.drain("b")
        process.on_bookies_changed()
        await asyncio.sleep(10)
        world.ledgers.cluster["b"].damage(ledger_id, 5)
        await mark_damaged(world.store, ledger_id, ["b"], 0)
        assert "no other bookie can take its copies" in (await world.marks())[ledger_id].problem
        await cancel_decommission(world.store, "b")
        world.ledgers.cluster.not_registered.remove("b")
        process.on_bookies_changed()
        await world.wait_whole(ledger_id)


async def test_a_walk_lets_workers_look_again_at_a_damaged_bookie_that_is_lost() -> None:
    async with repair_world(*"abcd", settings=_IDLE) as world:
        ledger_id = await world.closed_ledger("abc")
        await mark_damaged(world.store, ledger_id, ["b"], 0)
        process = await world.start()
        ledger = await world.ledgers.record(ledger_id)
        before = await repair_marks(world.store).get(ledger_id)
        await process.auditor._renew(ledger, measure(ledger, {"b": ShortReason.LOST}, "acd"))
        after = await repair_marks(world.store).get(ledger_id)
        assert before is not None
        assert after is not None
        assert (after.record.bookies, after.version) == ({"b": ShortReason.DAMAGED}, before.version + 1)


async def test_copies_of_a_damaged_bookie_move_once_its_grace_period_is_over() -> None:
    async with repair_world(*"abcd") as world:
        ledger_id = await world.closed_ledger("abc")
        process = await world.start()
        await asyncio.sleep(10)
        world.kill("b")
        process.on_bookies_changed()
        await asyncio.sleep(1)
        await mark_damaged(world.store, ledger_id, ["b"], 0)
        await asyncio.sleep(QUICK.grace_s - 10)
        assert (await world.ledgers.record(ledger_id)).last_fragment.ensemble == ("a", "b", "c")
        await world.wait_whole(ledger_id)
        assert (await world.ledgers.record(ledger_id)).last_fragment.ensemble == ("a", "d", "c")


async def test_a_damaged_bookie_that_restarts_with_the_auditor_keeps_its_grace_period() -> None:
    """The next auditor saves nothing before its first walk ends."""
    slow_walk = QUICK.model_copy(update={"walk_ledgers_per_s": 5})  # as with some 100,000 ledgers at the default rate
    async with repair_world(*"abcd", settings=slow_walk) as world:
        ledger_id = await world.closed_ledger("abc")
        for _ in range(200):
            await world.closed_ledger("abc", 0)
        first = await world.start()
        second = await world.start("r2")
        await asyncio.sleep(60.5)
        assert first.auditor.statistics.walks == 1
        world.ledgers.cluster["b"].damage(ledger_id, 5)
        world.kill("b")
        await first.aclose()
        await first.auditor._store.aclose()
        await mark_damaged(world.store, ledger_id, ["b"], 0, entries=[(5, 5)])
        second.on_bookies_changed()
        await asyncio.sleep(10)
        assert (await world.ledgers.record(ledger_id)).last_fragment.ensemble == ("a", "b", "c")


async def test_a_bookie_is_listed_as_lost_only_while_the_present_auditor_gave_it_up() -> None:
    async with repair_world(*"abcd") as world:
        first = await world.start()
        await asyncio.sleep(10)
        world.kill("b")
        await asyncio.sleep(QUICK.grace_s + 10)
        assert (await world.audit()).runs["b"] == "lost"
        await first.aclose()
        await first.auditor._store.aclose()
        second = await world.start("r2")
        await asyncio.sleep(10)
        assert (await world.audit()).runs["b"] == ""
        await asyncio.sleep(QUICK.grace_s)
        assert (await world.audit()).runs["b"] == "lost"
        world.revive("b")
        second.on_bookies_changed()
        await asyncio.sleep(2)
        assert (await world.audit()).runs["b"] == ""  # its copies were not checked yet
        await asyncio.sleep(10)
        assert (await world.audit()).runs["b"] == "first disks first process"


def test_marks_for_all_entries_of_a_bookie_outweigh_those_for_some() -> None:
    def entries(mark: RepairMark | None, *runs: tuple[int, int]) -> RepairMark:
        return RepairMark(
            ledger_id=1,
            bookies={"b": ShortReason.DAMAGED},
            copies_left=2,
            short_entries=0,
            short_bytes=0,
            since_ms=0,
            damaged=damaged_entries(mark, ["b"], runs),
        )

    some = entries(entries(None, (5, 9)), (10, 12), (20, 20))
    assert some.format == 2
    assert some.entries_to_check("b") == (EntryRun(first=5, last=12), EntryRun(first=20, last=20))
    assert entries(some).entries_to_check("b") is None
    assert entries(entries(some), (1, 1)).entries_to_check("b") is None, "all of them are waiting to be checked"
    assert entries(None, *((one, one) for one in range(0, 1000, 2))).entries_to_check("b") is None, "too many runs"
    emptied = some.replace(bookies={"b": ShortReason.EMPTY_DISK})
    assert emptied.entries_to_check("b") is None


@pytest.mark.parametrize("broken", ["mark", "audit", "request"])
async def test_one_record_of_repair_that_cannot_be_read_does_not_stop_it(broken: str) -> None:
    async with repair_world(*"abcd") as world:
        first, second = await world.closed_ledger("abc"), await world.closed_ledger("abc")
        key = {
            "mark": keys.repair_mark_key(first),
            "audit": keys.AUDIT_KEY,
            "request": keys.repair_request_key("b"),
        }[broken]
        await world.store.create(key, b"not a record")
        await world.start()
        world.kill("b")
        await asyncio.sleep(QUICK.grace_s + 30)
        assert await world.is_whole(second)


@pytest.mark.parametrize("stood_by", [False, True], ids=["is started", "stood by"])
async def test_a_new_auditor_repeats_the_checks_that_the_first_one_did_not_get_to(stood_by: bool) -> None:
    slow = QUICK.model_copy(update={"checks_per_s": 0.01})
    async with repair_world("a", "b", "c", settings=slow) as world:
        ledger_id = await world.closed_ledger("abc")
        first = await world.start()
        world.settings = QUICK
        if stood_by:
            await world.start("r2")
        await asyncio.sleep(3)
        del world.ledgers.cluster["b"].entries[ledger_id][9]
        world.bookies.processes["b"] = "second process"
        await asyncio.sleep(20)
        await first.aclose()
        await first.auditor._store.aclose()
        if not stood_by:
            await world.start("r2")
        await asyncio.sleep(30)
        assert await world.is_whole(ledger_id)


async def test_a_check_that_found_no_answer_is_repeated_without_waiting_for_the_next_walk() -> None:
    """A rolling restart waits for it."""
    async with repair_world("a", "b", "c", settings=_NO_SAMPLES) as world:
        ledger_id = await world.closed_ledger("abc")
        process = await world.start()
        await asyncio.sleep(10)
        del world.ledgers.cluster["b"].entries[ledger_id][9]
        world.ledgers.cluster["b"].mute = True  # busy with its start
        world.bookies.processes["b"] = "second process"
        process.on_bookies_changed()
        await asyncio.sleep(15)
        world.ledgers.cluster["b"].mute = False
        await asyncio.sleep(60)
        assert await world.is_whole(ledger_id)
        assert (await world.audit()).runs["b"] == "first disks second process"


async def test_a_bookie_is_not_called_checked_before_the_finding_of_its_last_check_is_counted() -> None:
    async with repair_world("a", "b", "c", settings=_NO_SAMPLES) as world:
        ledger_id = await world.closed_ledger("abc")
        process = await world.start()
        await asyncio.sleep(10)
        auditor = process.auditor
        check, read_marks, save = auditor._check_ledger, auditor._read_marks, auditor._save_audit
        reading, may_end, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        polls, saved = 0, list[bool]()

        async def slow_check(*args: Any) -> None:
            reading.set()
            await may_end.wait()  # the disk of a bookie that has just started is busy
            await check(*args)
            ended.set()

        async def end_check_meanwhile(listed: list[int]) -> None:
            nonlocal polls
            polls += reading.is_set()
            if polls == 3:
                may_end.set()
                await ended.wait()
            await read_marks(listed)

        async def save_and_note() -> None:
            await save()
            assert auditor.audit is not None
            says_whole = auditor.audit.runs["b"] == "first disks second process" and not auditor.audit.short.ledgers
            saved.extend([await world.is_whole(ledger_id)] if says_whole else ())

        auditor._check_ledger = slow_check  # type: ignore[method-assign]
        auditor._read_marks = end_check_meanwhile  # type: ignore[method-assign]
        auditor._save_audit = save_and_note  # type: ignore[method-assign]
        del world.ledgers.cluster["b"].entries[ledger_id][9]
        world.bookies.processes["b"] = "second process"
        process.on_bookies_changed()
        await asyncio.sleep(60)
        assert saved
        assert all(saved)


async def test_workers_beside_the_auditor_move_copies_of_a_draining_bookie_and_obey_the_switch() -> None:
    async with repair_world(*"abcd") as world:
        await world.start("auditor")
        await asyncio.sleep(3)
        worker = (await world.start("worker")).worker
        assert not world.processes[1].auditor.statistics.is_auditor
        await world.processes[0].worker.aclose()
        await world.switch_off()
        ledger_id = await world.closed_ledger("abc")
        await mark_damaged(world.store, ledger_id, ["a"], 0)
        await asyncio.sleep(10)
        assert ledger_id in await world.marks()
        await world.switch_on()
        await world.drain("b")
        await asyncio.sleep(20)
        assert "b" not in (await world.ledgers.record(ledger_id)).fragments[0].ensemble
        assert worker.statistics.ledgers == 1


async def test_a_damaged_record_of_a_draining_bookie_hides_nothing_and_can_be_removed() -> None:
    async with repair_world(*"abcd", settings=_IDLE) as world:
        await world.store.create("/repair/draining/a", b"garbage")
        await world.drain("b")
        status = await repair_status(world.store)
        assert ([one["bookie_id"] for one in status["draining"]], status["draining_unreadable"]) == (["b"], ["a"])
        await cancel_decommission(world.store, "a")
        assert (await repair_status(world.store))["draining_unreadable"] == []


async def test_bookies_that_take_no_copies_do_not_count_when_one_is_decommissioned() -> None:
    async with repair_world(*"abcd", settings=_IDLE) as world:
        for name in "abcd":
            registrations = readonly_bookies(world.store) if name == "a" else available_bookies(world.store)
            await registrations.create(name, BookieRegistration(bookie_id=name, incarnation="i", addresses={}))
        with pytest.raises(RepairRefusedError, match=r"need 3 writable bookies, and 2 would be left \(b, c\); start 1 more"):
            await decommission(world.store, "d", 0, 3)


async def test_a_decommissioning_that_leaves_too_few_racks_for_strict_placement_is_refused() -> None:
    async with repair_world(*"abcd", settings=_IDLE) as world:
        for name, rack in {"a": "1", "b": "2", "c": "3", "d": "3"}.items():
            registration = BookieRegistration(bookie_id=name, incarnation="i", addresses={}, rack=rack)
            await available_bookies(world.store).create(name, registration)
        strict = StrictRacks(3, partial(can_separate, size=3, write_quorum=3))
        with pytest.raises(RepairRefusedError, match=r"3 copies .* different racks .* would be left in: 2 \(1\), 3 \(2\); start"):
            await decommission(world.store, "a", 0, 3, strict)
        assert await draining_bookies(world.store).get("a") is None
        assert (await decommission(world.store, "d", 0, 3, strict))["state"] == "draining"


async def test_a_decommissioning_says_that_repair_is_off() -> None:
    async with repair_world(*"abcd") as world:
        await world.start()
        await world.closed_ledger("abc")
        await asyncio.sleep(3)
        await world.switch_off()
        await world.drain("b")
        assert (await decommission_status(world.store, "b"))["problem"] == "automatic repair is off: cepheid repair on"


async def test_a_ledger_in_a_bad_place_is_not_counted_as_one_that_lacks_copies() -> None:
    async with repair_world(*"abcd") as world:
        racks = {"a": "1", "b": "1", "c": "2", "d": "3"}
        world.bookies.known_racks, world.ledgers.placement._racks = racks, lambda: racks
        await world.closed_ledger("abc")
        world.ledgers.cluster["d"].hang = True  # the copy cannot move
        await world.start()
        await asyncio.sleep(5)
        assert await world.marks()
        audit = await world.audit()
        assert (audit.badly_placed, audit.short.ledgers, audit.short.bytes) == (1, 0, 0)


async def test_a_living_writer_is_not_fenced_because_a_bookie_lost_its_disk() -> None:
    async with repair_world(*"abcd") as world:
        writer = await world.open_ledger("abc")
        world.kill("d")
        await world.start()
        await world.lose_disk("b", 1000, "second disks")
        world.ledgers.client.on_bookie_gone("b")  # as the directory does, once
        await asyncio.sleep(5)
        world.revive("d")
        world.ledgers.client.on_bookie_back("d")
        await asyncio.sleep(3 * QUICK.open_ledger_grace_s)
        assert (await world.ledgers.record(writer.ledger_id)).state is LedgerState.OPEN


async def test_of_two_operators_who_decommission_the_last_spare_bookies_at_once_one_is_refused() -> None:
    async with repair_world(*"abcd", settings=_IDLE) as world:
        for name in "abcd":
            await available_bookies(world.store).create(name, BookieRegistration(bookie_id=name, incarnation="i", addresses={}))
        outcomes = await asyncio.gather(*(decommission(world.store, name, 0, 3) for name in "ab"), return_exceptions=True)
        assert any(isinstance(outcome, RepairRefusedError) for outcome in outcomes)


async def test_a_bookie_is_called_empty_only_when_every_process_knows_that_it_is_draining() -> None:
    async with repair_world(*"abcd") as world:
        await world.start()
        await asyncio.sleep(3)
        await world.drain("d")
        await asyncio.sleep(1.5)
        found = await draining_bookies(world.store).get("d")
        assert found is not None
        assert (found.record.ledgers_at_start, found.record.drained_at_ms) == (0, None)
        await wait_until_drained(world, "d")


@pytest.mark.parametrize("first", ["drained", "emptied"])
async def test_an_emptied_bookie_is_refilled_after_its_decommissioning_was_cancelled(first: str) -> None:
    no_samples = QUICK.model_copy(update={"walk_ledgers_per_s": 10**9})
    async with repair_world("a", "b", "c", settings=no_samples) as world:
        ledger_id = await world.closed_ledger("abc")
        process = await world.start()
        await asyncio.sleep(10)
        if first == "emptied":
            world.ledgers.cluster["a"].mute = world.ledgers.cluster["c"].mute = True  # the refill takes its time
            await world.lose_disk("b", 1000, "second disks")
            process.on_bookies_changed()
            await asyncio.sleep(10)
            assert (await world.marks())[ledger_id].bookies == {"b": ShortReason.EMPTY_DISK}
        await world.drain("b")
        process.on_bookies_changed()
        await asyncio.sleep(10)
        if first == "drained":
            await world.lose_disk("b", 1000, "second disks")
            process.on_bookies_changed()
            await asyncio.sleep(10)
        world.ledgers.cluster["a"].mute = world.ledgers.cluster["c"].mute = False
        await cancel_decommission(world.store, "b")
        world.ledgers.cluster.not_registered.remove("b")
        process.on_bookies_changed()
        await asyncio.sleep(300)
        assert await world.is_whole(ledger_id)
