"""Auditor and workers over memory bookies: what is lost is copied again, and nothing else is touched."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cepheid_metadata import LedgerState, ShortReason, decommissioned_bookies, draining_bookies
from cepheid_metadata.repair_views import mark_damaged
from cepheid_recovery import AutoRecovery
from cepheid_recovery import auditor as auditor_module
from cepheid_recovery.auditor import Auditor
from cepheid_rpc import ReadAnswer, ReadRequest, Status
from tests.ledger.ledger_world import append
from tests.ledger.memory_bookie import MemoryBookie
from tests.recovery.repair_world import QUICK, RepairWorld, repair_world
from tests.support import wait_until

_WITHOUT_SAMPLES = QUICK.model_copy(update={"walk_ledgers_per_s": 10**9})

pytestmark = [pytest.mark.virtual_time, pytest.mark.deadline(2000)]


async def test_a_lost_bookies_copies_are_made_again_after_the_grace_period() -> None:
    async with repair_world() as world:
        ledger_id = await world.closed_ledger("abc")
        await world.start()
        world.kill("b")
        await asyncio.sleep(QUICK.grace_s - 5)
        assert await world.marks() == {}
        await asyncio.sleep(5)
        await world.wait_whole(ledger_id)
        assert (await world.ledgers.record(ledger_id)).fragments[0].ensemble == ("a", "d", "c")


async def test_a_restart_within_the_grace_period_copies_nothing() -> None:
    async with repair_world() as world:
        ledger_id = await world.closed_ledger("abc")
        await world.start()
        for name in "abc":  # a rolling restart
            world.kill(name)
            await asyncio.sleep(QUICK.grace_s - 5)
            world.revive(name)
            await asyncio.sleep(5)
        assert world.ledgers.cluster["d"].add_log == []
        assert (await world.ledgers.record(ledger_id)).fragments[0].ensemble == ("a", "b", "c")


async def test_copies_have_the_bytes_that_the_writer_sent() -> None:
    async with repair_world() as world:
        ledger_id = await world.closed_ledger("abc", entries=30)
        await world.start()
        world.kill("a")
        await world.wait_whole(ledger_id)
        original, copy = (world.ledgers.cluster[name].entries[ledger_id] for name in "bd")
        assert [bytes(copy[one].data) for one in range(30)] == [bytes(original[one].data) for one in range(30)]


@pytest.mark.parametrize("lost", ["a", "b", "c", "d", "e"])
async def test_a_striped_ledger_gets_only_the_stripes_of_the_lost_bookie(lost: str) -> None:
    async with repair_world(*"abcdef") as world:
        ledger_id = await world.closed_ledger("abcde", entries=23, write_quorum=3, ack_quorum=2)
        await world.start()
        held = world.ledgers.cluster[lost].ids(ledger_id)
        world.kill(lost)
        await world.wait_whole(ledger_id)
        assert world.ledgers.cluster["f"].ids(ledger_id) == held


async def test_each_fragment_is_repaired_where_it_names_the_lost_bookie() -> None:
    async with repair_world(*"abcde") as world:
        writer = await world.open_ledger("abc", entries=5)
        world.kill("c")
        await append(writer, [b"after the change"])
        await writer.close()
        await world.start()
        await world.wait_whole(writer.ledger_id)
        for fragment in (await world.ledgers.record(writer.ledger_id)).fragments:
            assert "c" not in fragment.ensemble


async def test_earlier_fragments_of_an_open_ledger_are_repaired_while_its_writer_goes_on() -> None:
    async with repair_world(*"abcde") as world:
        writer = await world.open_ledger("abc", entries=5)
        world.kill("c")
        await append(writer, [b"after the change"])
        await world.start()
        await asyncio.sleep(QUICK.grace_s + 20)
        record = await world.ledgers.record(writer.ledger_id)
        assert record.state is LedgerState.OPEN
        assert "c" not in record.fragments[0].ensemble
        await append(writer, [b"the writer knows nothing of it"])
        end = await writer.close()
        assert end.last_entry_id == 6
        await world.wait_whole(writer.ledger_id)


async def test_an_open_ledger_whose_writer_is_gone_is_recovered_and_made_whole() -> None:
    async with repair_world() as world:
        writer = await world.open_ledger("abc", entries=5)
        await writer.aclose()  # its process ended
        await world.start()
        world.kill("a")
        await world.wait_whole_after_recovery(writer.ledger_id)
        record = await world.ledgers.record(writer.ledger_id)
        assert (record.state, record.last_entry_id) == (LedgerState.CLOSED, 4)
        assert "a" not in record.last_fragment.ensemble


async def test_two_of_four_bookies_lost_one_after_the_other_lose_nothing() -> None:
    async with repair_world(*"abcde") as world:
        ledger_ids = [await world.closed_ledger("abc", entries=20) for _ in range(5)]
        await world.start()
        for name in "ab":
            world.kill(name)
            await asyncio.sleep(QUICK.grace_s)
            await world.wait_whole(*ledger_ids)
        await asyncio.sleep(3)
        assert (await world.audit()).short.ledgers == 0


async def test_decommissioning_moves_everything_and_then_says_that_the_bookie_is_empty() -> None:
    async with repair_world() as world:
        for name in "abcd":
            await world.set_cookie(name)
        ledger_ids = [await world.closed_ledger("abc") for _ in range(3)]
        await world.start()
        await asyncio.sleep(3)
        await world.drain("b")
        await asyncio.sleep(20)  # without any grace period
        await world.wait_whole(*ledger_ids)
        draining = draining_bookies(world.store)
        found = await draining.get("b")
        assert found is not None
        assert (found.record.ledgers_at_start, found.record.drained_at_ms is not None) == (3, True)
        world.kill("b")
        await asyncio.sleep(QUICK.grace_s - 5)
        cookie = await world.processes[0].auditor._cookies.get("b")
        assert cookie is not None  # it may only restart
        await asyncio.sleep(15)
        assert await draining.get("b") is None  # it is forgotten, with its cookie
        gone = await decommissioned_bookies(world.store).get("b")
        assert gone is not None
        assert gone.record.incarnation == cookie.record.incarnation
        assert await world.processes[0].auditor._cookies.get("b") is None


async def test_a_request_repairs_without_waiting_for_the_grace_period() -> None:
    async with repair_world() as world:
        ledger_id = await world.closed_ledger("abc")
        await world.start()
        world.kill("b")
        await asyncio.sleep(3)
        await world.request("b")
        assert await world.wait_whole(ledger_id) < QUICK.grace_s / 2


async def test_a_request_that_comes_while_a_walk_is_under_way_is_for_the_next_walk() -> None:
    async with repair_world() as world:
        ledger_id = await world.closed_ledger("abc")
        process = await world.start()
        walk, walks = process.auditor._walk, 0

        async def die_meanwhile(*args: Any, **options: Any) -> Any:
            nonlocal walks
            walks += 1
            if walks == 1:
                world.kill("b")
                await world.request("b")
            return await walk(*args, **options)

        process.auditor._walk = die_meanwhile
        await asyncio.sleep(QUICK.grace_s / 4)
        assert "b" not in (await world.ledgers.record(ledger_id)).fragments[0].ensemble


async def test_a_request_that_comes_while_repair_is_off_is_for_the_time_when_it_is_on() -> None:
    async with repair_world() as world:
        ledger_id = await world.closed_ledger("abc")
        first = await world.start()
        world.kill("b")
        await world.switch_off()
        await asyncio.sleep(3)
        await world.request("b")
        await asyncio.sleep(5)
        await first.aclose()  # what the auditor knows ends with it
        await first.auditor._store.aclose()
        await world.start("r2")
        await asyncio.sleep(5)
        await world.switch_on()
        await asyncio.sleep(QUICK.grace_s / 4)
        assert "b" not in (await world.ledgers.record(ledger_id)).fragments[0].ensemble


def switch_off_during_a_walk(world: RepairWorld, process: AutoRecovery) -> None:
    """Let repair be off while the next walk looks at its ledgers, and on again before the next poll."""
    walk_slice = process.auditor._walk_slice

    async def off_meanwhile(*args: Any) -> None:
        process.auditor._walk_slice = walk_slice  # type: ignore[method-assign]
        await world.switch_off()
        await asyncio.sleep(3)  # the worker of the process reads the switch too
        await walk_slice(*args)
        await world.switch_on()
        await asyncio.sleep(3)

    process.auditor._walk_slice = off_meanwhile  # type: ignore[method-assign]


async def test_a_ledger_that_a_walk_passed_while_repair_was_off_is_marked_when_it_is_on() -> None:
    async with repair_world() as world:
        ledger_id = await world.closed_ledger("abc")
        process = await world.start()
        await asyncio.sleep(10)
        switch_off_during_a_walk(world, process)
        await world.request("b")
        world.kill("b")
        process.on_bookies_changed()
        await asyncio.sleep(QUICK.grace_s / 2)
        assert await world.is_whole(ledger_id)


async def test_a_bookie_does_not_count_as_refilled_after_a_walk_while_repair_was_off() -> None:
    async with repair_world("a", "b", "c", settings=_WITHOUT_SAMPLES) as world:
        ledger_id = await world.closed_ledger("abc")
        process = await world.start()
        await asyncio.sleep(10)
        switch_off_during_a_walk(world, process)
        await world.lose_disk("b", 1000, "second disks")
        process.on_bookies_changed()
        await world.wait_refilled("b")
        assert await world.is_whole(ledger_id)


async def test_nothing_is_marked_or_copied_while_repair_is_off() -> None:
    async with repair_world() as world:
        ledger_id = await world.closed_ledger("abc")
        await world.switch_off()
        await world.start()
        world.kill("b")
        await asyncio.sleep(3 * QUICK.grace_s)
        assert await world.marks() == {}
        assert (await world.audit()).short.ledgers == 1  # shown all the same
        await world.switch_on()
        await asyncio.sleep(5)
        await world.wait_whole(ledger_id)


async def test_the_figures_stay_true_while_repair_is_off() -> None:
    async with repair_world(settings=QUICK.model_copy(update={"walk_interval_s": 30.0})) as world:
        kept, deleted = await world.closed_ledger("abc"), await world.closed_ledger("abd")
        await world.switch_off()
        await world.start()
        world.kill("b")
        await asyncio.sleep(QUICK.grace_s + 10)
        assert (await world.audit()).short.ledgers == 2
        await world.ledgers.client.delete(deleted)
        await asyncio.sleep(40)
        assert (await world.audit()).short.ledgers == 1
        world.revive("b")
        world.processes[0].on_bookies_changed()
        await asyncio.sleep(20)
        assert (await world.audit()).short.ledgers == 0
        assert await world.is_whole(kept)


async def test_a_walk_reads_no_more_ledgers_per_second_than_it_may() -> None:
    async with repair_world(settings=QUICK.model_copy(update={"walk_ledgers_per_s": 10})) as world:
        for _ in range(301):
            await world.closed_ledger("abc", 0)
        process = await world.start()
        await asyncio.sleep(25)
        assert process.auditor.statistics.walks == 0
        await asyncio.sleep(10)
        assert (process.auditor.statistics.walks, process.auditor.statistics.walked_ledgers) == (1, 301)


async def test_a_bookie_that_is_lost_again_after_a_short_return_is_repaired_again() -> None:
    async with repair_world("a", "b", "c", settings=_WITHOUT_SAMPLES) as world:
        ledger_id = await world.closed_ledger("abc")
        process = await world.start()
        world.kill("b")
        await asyncio.sleep(QUICK.grace_s + 10)
        assert ledger_id in await world.marks()  # there is no spare bookie
        world.revive("b")
        process.on_bookies_changed()
        assert await world.wait_whole(ledger_id) < 3  # its mark is removed, and it is not back for long enough to be checked
        world.kill("b")
        process.on_bookies_changed()
        await asyncio.sleep(QUICK.grace_s + 10)
        assert ledger_id in await world.marks()


async def test_without_a_spare_bookie_the_mark_says_why_and_the_ledger_is_repaired_once_there_is_one() -> None:
    async with repair_world(*"abcd") as world:
        world.kill("d")
        ledger_id = await world.closed_ledger("abc")
        await world.start()
        world.kill("b")
        await asyncio.sleep(QUICK.grace_s + 20)
        mark = (await world.marks())[ledger_id]
        assert mark.copies_left == 2
        assert "b: no other bookie can take its copies" in mark.problem
        world.revive("d")
        world.processes[0].on_bookies_changed()
        await world.wait_whole(ledger_id)


async def test_a_bookie_that_lost_its_disk_gets_its_copies_back_in_place() -> None:
    async with repair_world("a", "b", "c") as world:
        ledger_id = await world.closed_ledger("abc")
        bookie = world.ledgers.cluster["b"]
        bookie.entries.clear()
        bookie.limbo = True
        for name in "abc":
            await world.set_cookie(name, limbo_below=1000 if name == "b" else None)
        await world.start()
        await world.wait_refilled("b")
        assert await world.is_whole(ledger_id)
        assert (await world.audit()).refilled == {"b": "i.1000"}


async def test_what_was_on_its_way_to_a_bookie_that_died_is_copied_when_it_is_back() -> None:
    async with repair_world(*"abcd") as world:
        writer = await world.open_ledger("abc", entries=5)
        await world.start()
        await asyncio.sleep(3)
        world.kill("c")
        await append(writer, [b"not on c"])
        await writer.close()
        record = await world.ledgers.record(writer.ledger_id)
        assert record.fragments[0].ensemble == ("a", "b", "c")
        del world.ledgers.cluster["c"].entries[writer.ledger_id][4]  # as if it had been sent, and not arrived
        await asyncio.sleep(3)
        world.revive("c")
        await asyncio.sleep(30)
        await world.wait_whole(writer.ledger_id)
        assert world.ledgers.cluster["c"].ids(writer.ledger_id) == [0, 1, 2, 3, 4, 5]


async def test_a_copy_that_its_writer_could_not_place_is_made_when_the_ledger_is_closed() -> None:
    """A bookie refused the end of a ledger, and there was no spare: the record names it, and it runs."""
    without_samples = QUICK.model_copy(update={"walk_interval_s": 5.0, "walk_ledgers_per_s": 10**9})
    async with repair_world(*"abc", settings=without_samples) as world:
        await world.start()
        writer = await world.open_ledger("abc", entries=3)
        await asyncio.sleep(10)
        world.ledgers.cluster["c"].refuse = Status.READ_ONLY
        await append(writer, [b"not on c"])
        await writer.close()
        world.ledgers.cluster["c"].refuse = None
        assert (await world.ledgers.record(writer.ledger_id)).fragments[0].ensemble == ("a", "b", "c")
        await asyncio.sleep(10)
        await world.wait_whole(writer.ledger_id)


@pytest.mark.parametrize("auditor_ends", [False, True])
async def test_a_bookie_that_restarts_faster_than_its_session_ends_gets_what_was_on_its_way_to_it(auditor_ends: bool) -> None:
    """Its registration is replaced, and never missing. The auditor may have been in its process, and end with it."""
    async with repair_world(*"abcd") as world:
        ledger_id = await world.closed_ledger("abc", entries=5)
        first = await world.start("r1")
        await asyncio.sleep(3)
        del world.ledgers.cluster["c"].entries[ledger_id][4]  # as if it had been sent, and not arrived
        if auditor_ends:
            await first.aclose()
            await first.auditor._store.aclose()
        world.bookies.processes["c"] = "second process"
        if auditor_ends:
            await world.start("r2")
        await asyncio.sleep(30)
        await world.wait_whole(ledger_id)


async def test_a_damaged_source_is_not_spread_but_replaced_by_another_replica() -> None:
    async with repair_world() as world:
        ledger_id = await world.closed_ledger("abc")
        world.ledgers.cluster["a"].damage(ledger_id, 4)
        await world.start()
        world.kill("b")
        await asyncio.sleep(QUICK.grace_s + 10)
        record = await world.ledgers.record(ledger_id)
        assert world.lacking(record) == [("a", 4)]
        target = next(name for name in record.fragments[0].ensemble if name not in "ac")
        assert world.ledgers.cluster[target].ids(ledger_id) == list(range(10))


async def test_an_entry_without_a_valid_copy_is_reported_and_the_rest_is_made_whole() -> None:
    async with repair_world() as world:
        ledger_id = await world.closed_ledger("abc")
        for name in "ac":
            world.ledgers.cluster[name].damage(ledger_id, 4)
        await world.start()
        world.kill("b")
        await asyncio.sleep(QUICK.grace_s + 10)
        mark = (await world.marks())[ledger_id]
        assert [(run.first, run.last) for run in mark.lost] == [(4, 4)]
        assert (mark.copies_left, mark.former, mark.bookies) == (0, ("b",), {})
        assert "b" not in (await world.ledgers.record(ledger_id)).fragments[0].ensemble
        assert world.ledgers.cluster["d"].ids(ledger_id) == [0, 1, 2, 3, 5, 6, 7, 8, 9]
        assert (await world.audit()).short.lost_entries == 1
        world.revive("b")  # it has the only copy
        world.processes[0].on_bookies_changed()
        await world.wait_whole(ledger_id)


async def test_an_entry_that_a_disk_cannot_read_does_not_stop_the_repair_of_the_others() -> None:
    async with repair_world() as world:
        ledger_id = await world.closed_ledger("abc")
        for name in "bc":
            del world.ledgers.cluster[name].entries[ledger_id][4]
        world.ledgers.cluster["a"].unreadable.add(4)
        await world.start()
        await world.drain("a")
        await asyncio.sleep(20)
        assert (await world.ledgers.record(ledger_id)).fragments[0].ensemble == ("d", "b", "c")
        assert world.ledgers.cluster["d"].ids(ledger_id) == [0, 1, 2, 3, 5, 6, 7, 8, 9]
        mark = (await world.marks())[ledger_id]
        assert ([(run.first, run.last) for run in mark.lost], mark.former) == ([(4, 4)], ("a",))
        assert (await world.audit()).short.lost_entries == 1
        world.ledgers.cluster["a"].unreadable.clear()  # asked again at each attempt
        await world.wait_whole(ledger_id)


async def test_a_read_that_fails_once_loses_no_entry() -> None:
    async with repair_world() as world:
        ledger_id = await world.closed_ledger("abc")
        for name in "bc":
            del world.ledgers.cluster[name].entries[ledger_id][4]
        bookie, asked = world.ledgers.cluster["a"], list[ReadRequest]()

        def chunk(request: ReadRequest) -> ReadAnswer:
            asked.extend([request] if request.first_entry_id == request.last_entry_id == 4 else ())
            bookie.unreadable = {4} if len(asked) < 2 else set()
            return MemoryBookie.chunk(bookie, request)

        bookie.chunk = chunk  # type: ignore[method-assign]
        process = await world.start()
        await world.drain("a")
        await asyncio.sleep(20)
        assert (len(asked), process.worker.statistics.lost_entries, await world.marks()) == (2, 0, {})


async def test_the_most_endangered_ledgers_come_first_whatever_their_write_quorum() -> None:
    async with repair_world() as world:
        two_left, three_left = list[int](), list[int]()
        for _ in range(5):  # no bookie is left for them, so that they stay marked
            three_left.append(await world.closed_ledger("abcd", write_quorum=4))
            two_left.append(await world.closed_ledger("abcd", write_quorum=3))
        process = await world.start()
        world.kill("a")
        await asyncio.sleep(QUICK.grace_s + 10)
        process.worker._retries.clear()
        assert await process.worker._candidates() == [*two_left, *three_left]


async def test_a_ledger_that_is_deleted_while_it_is_marked_loses_its_mark() -> None:
    async with repair_world("a", "b", "c") as world:
        ledger_id = await world.closed_ledger("abc")
        await world.start()
        world.kill("b")
        await asyncio.sleep(QUICK.grace_s + 10)
        assert ledger_id in await world.marks()
        await world.ledgers.client.delete(ledger_id)
        await asyncio.sleep(20)
        assert await world.marks() == {}


async def test_figures_of_a_lost_bookie_are_counted_again_when_its_ledgers_are_whole() -> None:
    async with repair_world(*"abcd") as world:
        ledger_id = await world.closed_ledger("abc")
        process = await world.start()
        world.kill("b")
        process.on_bookies_changed()
        await world.wait_whole(ledger_id)
        await asyncio.sleep(3 * QUICK.poll_s)
        assert {bookie: holdings.ledgers for bookie, holdings in (await world.audit()).bookies.items()} == {"a": 1, "c": 1, "d": 1}
        assert process.auditor.statistics.walks == 3  # at the start, after the loss and now


async def test_what_a_walk_finds_is_saved_even_when_nothing_is_short() -> None:
    async with repair_world(settings=QUICK.model_copy(update={"walk_interval_s": 5.0})) as world:
        await world.closed_ledger("abc")
        await world.start()
        await asyncio.sleep(2)
        assert (await world.audit()).ledgers == 1
        await world.closed_ledger("abd")
        await asyncio.sleep(10)
        assert (await world.audit()).ledgers == 2


async def test_another_process_becomes_the_auditor_when_the_first_one_ends() -> None:
    async with repair_world() as world:
        ledger_id = await world.closed_ledger("abc")
        first, second = await world.start("r1"), await world.start("r2")
        await asyncio.sleep(5)
        assert [first.auditor.statistics.is_auditor, second.auditor.statistics.is_auditor] == [True, False]
        await first.aclose()
        await first.auditor._store.aclose()
        world.kill("b")
        await asyncio.sleep(QUICK.grace_s + 10)
        assert second.auditor.statistics.is_auditor
        await world.wait_whole(ledger_id)


async def test_several_workers_share_the_ledgers_and_repair_each_once() -> None:
    async with repair_world(*"abcde", settings=QUICK.model_copy(update={"ledgers_at_once": 2})) as world:
        ledger_ids = [await world.closed_ledger("abc", entries=3) for _ in range(60)]
        processes = [await world.start(f"r{number}") for number in range(3)]
        for bookie in world.ledgers.cluster.bookies.values():
            bookie.delay_s = 0.2
        world.kill("b")
        await asyncio.sleep(QUICK.grace_s)
        await world.wait_whole(*ledger_ids)
        repaired = [process.worker.statistics.ledgers for process in processes]
        assert sum(repaired) == 60
        assert min(repaired) > 0


async def test_a_mark_that_is_renewed_during_the_copy_survives_it() -> None:
    async with repair_world(*"abcdef") as world:
        ledger_id = await world.closed_ledger("abc")
        process = await world.start()
        for name in "def":
            world.ledgers.cluster[name].delay_s = 0.1
        world.kill("b")
        await asyncio.sleep(QUICK.grace_s)
        await wait_until(lambda: process.worker.statistics.in_work > 0)
        marks = process.worker._marks
        found = await marks.get(ledger_id)
        assert found is not None
        renewed = found.record.replace(bookies={**found.record.bookies, "c": ShortReason.DAMAGED})
        await marks.replace(ledger_id, renewed, found.version)
        world.ledgers.cluster["c"].damage(ledger_id, 7)
        await world.wait_whole(ledger_id)


async def test_bookies_that_are_not_back_yet_after_a_restart_of_the_cluster_lose_nothing() -> None:
    async with repair_world() as world:
        ledger_id = await world.closed_ledger("abc")
        await world.start()
        world.kill("b")
        await asyncio.sleep(QUICK.grace_s - 2)
        world.kill("a", "c")  # everything restarts when the mark is made
        await asyncio.sleep(QUICK.grace_s / 2)
        record = await world.ledgers.record(ledger_id)
        assert record.fragments[0].ensemble == ("a", "b", "c")
        assert (await world.marks())[ledger_id].lost == ()
        for name in "ac":
            world.revive(name)
        world.processes[0].on_bookies_changed()
        await world.wait_whole(ledger_id)


async def test_bookies_that_are_the_only_ones_left_with_the_data_stay_named() -> None:
    async with repair_world(*"abcdef") as world:
        ledger_id = await world.closed_ledger("abc")
        world.ledgers.cluster["c"].entries.clear()  # it lost its disk, and the others are gone for long
        world.ledgers.cluster["c"].limbo = True
        for name in "abcdef":
            await world.set_cookie(name, limbo_below=1000 if name == "c" else None)
        await world.start()
        world.kill("a", "b")
        await asyncio.sleep(3 * QUICK.grace_s)
        record = await world.ledgers.record(ledger_id)
        assert record.fragments[0].ensemble == ("a", "b", "c")
        mark = (await world.marks())[ledger_id]
        assert mark.copies_left == 0
        assert "bring back a or b" in mark.problem
        for name in "ab":
            world.revive(name)
        world.processes[0].on_bookies_changed()
        await world.wait_whole(ledger_id)


def place(world: RepairWorld, **racks: str) -> None:
    world.bookies.known_racks = racks
    world.ledgers.placement._racks = lambda: racks


async def test_a_ledger_with_two_copies_in_one_rack_is_counted_and_spread() -> None:
    async with repair_world() as world:
        place(world, a="east/1", b="east/1", c="east/2", d="east/3")
        bad, good = await world.closed_ledger("abc"), await world.closed_ledger("acd")
        await world.start()
        await asyncio.sleep(5)
        await world.wait_whole(bad, good)
        ensemble = (await world.ledgers.record(bad)).fragments[0].ensemble
        assert sorted(world.bookies.known_racks[name] for name in ensemble) == ["east/1", "east/2", "east/3"]
        assert (await world.ledgers.record(good)).fragments[0].ensemble == ("a", "c", "d")
        assert (await world.audit()).badly_placed == 1


async def test_a_copy_stays_where_it_is_when_no_rack_is_better_or_moving_is_switched_off() -> None:
    counted = QUICK.model_copy(update={"placement_ledgers_per_walk": 0})
    for settings, racks, badly_placed in (
        (QUICK, {"a": "1", "b": "1", "c": "2", "d": "2"}, 0),
        (counted, {"a": "1", "b": "1", "c": "2", "d": "3"}, 1),
    ):
        async with repair_world(settings=settings) as world:
            place(world, **racks)
            ledger_id = await world.closed_ledger("abc")
            await world.start()
            await asyncio.sleep(20)
            assert (await world.ledgers.record(ledger_id)).fragments[0].ensemble == ("a", "b", "c")
            assert (await world.audit()).badly_placed == badly_placed


async def test_a_lost_copy_is_made_again_in_a_rack_that_has_none() -> None:
    async with repair_world(*"abcdef") as world:
        place(world, a="1", b="2", c="3", d="1", e="2", f="3")
        ledger_ids = [await world.closed_ledger("abc") for _ in range(8)]
        await world.start()
        world.kill("b")
        await asyncio.sleep(QUICK.grace_s)
        await world.wait_whole(*ledger_ids)
        for ledger_id in ledger_ids:
            assert (await world.ledgers.record(ledger_id)).fragments[0].ensemble == ("a", "e", "c")


@pytest.mark.parametrize("spare", ["", "d"])
async def test_an_open_ledger_is_not_closed_while_its_writer_could_find_no_spare(spare: str) -> None:
    """There is none, or strict racks rule it out."""
    async with repair_world("a", "b", "c", *spare) as world:
        place(world, a="1", b="2", c="3", d="1")
        world.ledgers.placement._strict = True
        writer = await world.open_ledger("abc")
        await world.start()
        world.kill("c")
        await asyncio.sleep(QUICK.grace_s + 5 * QUICK.open_ledger_grace_s)
        assert "no other bookie can take its place" in (await world.marks())[writer.ledger_id].problem
        await append(writer, [b"it is alive"])
        assert (await world.ledgers.record(writer.ledger_id)).state is LedgerState.OPEN


@pytest.mark.parametrize("spare", ["", "d"])
async def test_a_bookie_that_missed_entries_without_going_away_gets_them_when_the_ledger_is_closed(spare: str) -> None:
    async with repair_world("a", "b", "c", *spare) as world:
        writer = await world.open_ledger("abc")
        await world.start()
        await asyncio.sleep(3)
        bookie = world.ledgers.cluster["c"]
        bookie.hang = True
        await append(writer, [b"c does not answer"])
        await asyncio.sleep(3)  # it is replaced, or done without
        bookie.hang = False
        await append(writer, [b"the end"])
        await writer.close()
        await asyncio.sleep(5)
        await world.wait_whole(writer.ledger_id, timeout_s=QUICK.grace_s)


@pytest.mark.deadline(5000)
async def test_small_repairs_do_not_put_off_the_walk_that_takes_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    walks: list[bool] = []
    walk = Auditor._walk

    async def noted(self: Auditor, *args: Any, samples: bool) -> Any:
        walks.append(samples)
        return await walk(self, *args, samples=samples)

    monkeypatch.setattr(Auditor, "_walk", noted)
    async with repair_world(*"abc", settings=QUICK.model_copy(update={"walk_interval_s": 600.0})) as world:
        ledger_id = await world.closed_ledger("abc")
        await world.start()
        await asyncio.sleep(5)
        cluster = world.ledgers.cluster
        for _ in range(10):  # once in 5 minutes one ledger is short for some seconds
            cluster["a"].mute = cluster["b"].mute = True
            await mark_damaged(world.store, ledger_id, ["c"], 0)
            await asyncio.sleep(10)
            cluster["a"].mute = cluster["b"].mute = False
            await asyncio.sleep(290)
        assert not await world.marks()
        assert walks.count(True) >= 5, f"regular walks in 3000 s, one in 600: {walks}"


async def test_figures_are_counted_again_if_the_repair_ends_while_the_walk_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auditor_module, "_SLICE", 1)
    monkeypatch.setattr(auditor_module, "_MARKED_TOGETHER", 1)
    async with repair_world(*"abcd", settings=QUICK.model_copy(update={"walk_ledgers_per_s": 0.1})) as world:
        ledger_id = await world.closed_ledger("abc")
        for _ in range(5):
            await world.closed_ledger("acd")
        process = await world.start()
        await asyncio.sleep(100)
        world.kill("b")
        process.on_bookies_changed()
        await asyncio.sleep(500)
        assert await world.is_whole(ledger_id)
        assert not await world.marks()
        assert "b" not in (await world.audit()).bookies, "bookies list still shows what was repaired"
