"""What happens to a repair under way when something else fails: a target, all replicas, metadata, the bookie, the ledger itself.

Other bad days of repair, and their tests:
| bad day | test |
|---|---|
| an unknown bookie is decommissioned | `tests/cli/test_repair_commands.py`: `test_what_cannot_be_done_…` |
| one bookie too many is decommissioned | the same: `test_a_bookie_is_decommissioned_while_it_runs` |
| two are decommissioned at once | `test_repair_holes.py`: `test_of_two_operators_…` |
| the copies of a bookie that returned are collected | `tests/bookie/test_surplus_copies.py` |
| all bookies are restarted in turn | `tests/integration/test_repair_of_processes.py`: `test_a_rolling_restart_…` |
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock
from unittest.mock import AsyncMock

import pytest

from cepheid_metadata import (
    Check,
    Delete,
    DeletedLedgers,
    MemoryStore,
    Op,
    StoreUnavailableError,
    draining_bookies,
    keys,
    ledger_records,
)
from cepheid_recovery import AutoRecovery
from cepheid_rpc import AddRequest, Status
from tests.ledger.ledger_world import append
from tests.ledger.memory_bookie import MemoryBookie
from tests.recovery.repair_world import QUICK, RepairWorld, repair_world
from tests.support import wait_until

pytestmark = [pytest.mark.virtual_time, pytest.mark.deadline(2000)]

FIRST_COPIES = 2
"""Requests with copies that a target takes before its disk is full."""


def fill_after(bookie: MemoryBookie, adds: int) -> None:
    """Let the bookie take so many more adds; its disk is full after them, until `refuse` is reset."""
    add, left = bookie.add, adds

    def counted(request: AddRequest) -> Status:
        nonlocal left
        if request.recovery and left == 0:
            bookie.refuse = Status.NO_SPACE
        left -= request.recovery
        return add(request)

    bookie.add = counted  # type: ignore[method-assign]


def before_write(process: AutoRecovery, act: Callable[[], Any]) -> list[int]:
    """Act once, when everything is copied and nothing is written down. Return a list of ledgers that gets one by then."""
    write, seen = process.worker._write, list[int]()

    async def act_first(ledger: Any, mark: Any, attempt: Any) -> bool:
        if not seen:
            seen.append(ledger.record.ledger_id)
            await act()
        return await write(ledger, mark, attempt)

    process.worker._write = act_first  # type: ignore[method-assign]
    return seen


async def large_ledger(world: RepairWorld) -> int:
    """A ledger whose copies take several requests to a target."""
    writer = await world.open_ledger("abc", entries=0)
    await append(writer, [bytes(300_000)] * 10)
    await writer.close()
    return writer.ledger_id


async def ensemble_of(world: RepairWorld, ledger_id: int) -> tuple[str, ...]:
    return (await world.ledgers.record(ledger_id)).fragments[0].ensemble


async def test_a_target_that_is_full_in_the_middle_of_a_copy_is_replaced_by_another() -> None:
    async with repair_world(*"abcde") as world:
        ledger_id = await large_ledger(world)
        for name in "de":
            fill_after(world.ledgers.cluster[name], FIRST_COPIES)
        await world.start()
        world.kill("b")
        await wait_until(lambda: any(world.ledgers.cluster[name].refuse for name in "de"), timeout_s=QUICK.grace_s + 30)
        (first,) = full = [name for name in "de" if world.ledgers.cluster[name].refuse]
        (second,) = set("de").difference(full)
        world.ledgers.cluster[second].add = partial(MemoryBookie.add, world.ledgers.cluster[second])  # type: ignore[method-assign]
        await world.wait_whole(ledger_id)
        assert await ensemble_of(world, ledger_id) == ("a", second, "c")
        assert world.ledgers.cluster[first].ids(ledger_id), "it had a part"


async def test_a_target_that_failed_is_not_chosen_again_while_there_is_another() -> None:
    """The full one has the rack that is best for the copies."""
    async with repair_world(*"abcde") as world:
        world.bookies.known_racks = racks = dict(zip("abcde", ["1", "2", "3", "2", "1"], strict=True))
        world.ledgers.placement._racks = lambda: racks
        ledger_id = await world.closed_ledger("abc")
        world.ledgers.cluster["d"].refuse = Status.NO_SPACE
        process = await world.start()
        world.kill("b")
        await asyncio.sleep(QUICK.grace_s)
        await world.wait_whole(ledger_id, timeout_s=30)
        assert await ensemble_of(world, ledger_id) == ("a", "e", "c")
        assert process.worker.statistics.failures == 1


async def test_a_full_target_that_is_the_only_one_is_named_in_the_mark_and_gets_the_rest_when_it_has_room() -> None:
    async with repair_world(*"abcd") as world:
        ledger_id = await large_ledger(world)
        target = world.ledgers.cluster["d"]
        fill_after(target, FIRST_COPIES)
        process = await world.start()
        world.kill("b")
        await asyncio.sleep(QUICK.grace_s + 20)
        assert await ensemble_of(world, ledger_id) == ("a", "b", "c"), "it has a part of the copies only"
        assert (await world.marks())[ledger_id].problem.startswith("b: ")
        assert process.worker.statistics.failures > 0
        target.refuse = None
        await world.wait_whole(ledger_id, timeout_s=600)


async def test_replicas_that_are_all_slow_are_waited_for() -> None:
    async with repair_world(*"abcd") as world:
        ledger_id = await world.closed_ledger("abc")
        for name in "acd":
            world.ledgers.cluster[name].delay_s = 0.15  # of 0.2 and 0.3 s until the client gives up
        await world.start()
        world.kill("b")
        await asyncio.sleep(QUICK.grace_s)
        await world.wait_whole(ledger_id)


async def test_replicas_that_are_all_too_slow_are_asked_again_until_they_are_quicker() -> None:
    async with repair_world(*"abcd") as world:
        ledger_id = await world.closed_ledger("abc")
        for name in "ac":
            world.ledgers.cluster[name].read_delay_s = 5.0
        await world.start()
        world.kill("b")
        await asyncio.sleep(QUICK.grace_s + 30)
        mark = (await world.marks())[ledger_id]
        assert mark.problem, "it says why"
        assert not mark.lost, "a slow answer is no denial"
        for name in "ac":
            world.ledgers.cluster[name].read_delay_s = 0.0
        await world.wait_whole(ledger_id, timeout_s=600)


@pytest.mark.parametrize("session_ends", [False, True])
async def test_metadata_that_goes_away_in_the_middle_of_a_repair_delays_it(session_ends: bool) -> None:
    async with repair_world(*"abcd") as world:
        ledger_id = await world.closed_ledger("abc")
        process = await world.start()
        store: MemoryStore = process.worker._store  # type: ignore[assignment]
        check = store._check_session
        away = False

        def check_away() -> None:
            if away:
                raise StoreUnavailableError("metadata is away")
            check()

        store._check_session = check_away  # type: ignore[method-assign]

        async def go_away() -> None:
            nonlocal away
            away = True

        seen = before_write(process, go_away)
        world.kill("b")
        await asyncio.sleep(QUICK.grace_s)
        await wait_until(lambda: bool(seen))
        await asyncio.sleep(30)
        assert await ensemble_of(world, ledger_id) == ("a", "b", "c")
        if session_ends:
            store.expire_session()
            store.renew_session()
        away = False
        await world.wait_whole(ledger_id)
        assert not [key for key in store._tree.nodes if "/locks/" in key]


async def test_time_without_metadata_is_no_part_of_the_grace_period() -> None:
    """A bookie that restarts while metadata is away cannot register before it is back."""
    async with repair_world(*"abcd") as world:
        ledger_id = await world.closed_ledger("abc")
        process = await world.start()
        await asyncio.sleep(10)
        store: MemoryStore = process.worker._store  # type: ignore[assignment]
        check, away = store._check_session, False

        def check_away() -> None:
            if away:
                raise StoreUnavailableError("metadata is away")
            check()

        store._check_session = check_away  # type: ignore[method-assign]
        world.kill("b")
        await asyncio.sleep(5)
        away = True  # the session of the auditor lives on, as that of a ZooKeeper that restarts
        await asyncio.sleep(QUICK.grace_s)
        away = False
        await asyncio.sleep(10)
        world.revive("b")
        process.on_bookies_changed()
        await asyncio.sleep(30)
        assert process.worker.statistics.entries == 0
        assert await ensemble_of(world, ledger_id) == ("a", "b", "c")


async def test_an_auditor_that_is_elected_again_knows_nothing_of_an_earlier_absence_of_a_bookie() -> None:
    async with repair_world(*"abcd") as world:
        ledger_id = await world.closed_ledger("abc")
        first, second = await world.start(), await world.start("r2")
        world.kill("b")
        await asyncio.sleep(QUICK.grace_s - 10)
        store: MemoryStore = first.auditor._store  # type: ignore[assignment]
        store.expire_session()
        await asyncio.sleep(5)
        assert second.auditor.statistics.is_auditor
        store.renew_session()
        world.revive("b")
        await asyncio.sleep(10)
        world.kill("b")
        await second.aclose()
        await second.auditor._store.aclose()
        await asyncio.sleep(QUICK.grace_s - 5)
        assert first.auditor.statistics.is_auditor
        assert await ensemble_of(world, ledger_id) == ("a", "b", "c")


async def test_a_worker_that_loses_its_lock_with_its_session_copies_nothing_twice() -> None:
    async with repair_world(*"abcd") as world:
        ledger_id = await world.closed_ledger("abc")
        process = await world.start()

        async def end_session() -> None:
            store: MemoryStore = process.worker._store  # type: ignore[assignment]
            store.expire_session()
            store.renew_session()

        before_write(process, end_session)
        world.kill("b")
        await asyncio.sleep(QUICK.grace_s)
        await world.wait_whole(ledger_id)
        assert process.worker.statistics.entries == 10
        assert process.worker.statistics.failures == 0


async def test_a_bookie_that_comes_back_while_it_is_decommissioned_is_emptied_all_the_same() -> None:
    async with repair_world(*"abcd") as world:
        ledger_ids = [await world.closed_ledger("abc") for _ in range(3)]
        process = await world.start()
        world.ledgers.cluster["b"].down = True
        await world.drain("b")

        async def come_back() -> None:
            world.ledgers.cluster["b"].down = False
            process.on_bookies_changed()
            await asyncio.sleep(10)

        before_write(process, come_back)
        await asyncio.sleep(30)
        await world.wait_whole(*ledger_ids)
        for ledger_id in ledger_ids:
            assert "b" not in await ensemble_of(world, ledger_id)
        found = await draining_bookies(world.store).get("b")
        assert found is not None
        assert found.record.drained_at_ms is not None


async def test_a_bookie_that_returns_with_old_data_after_the_repair_is_not_named_again_and_not_read() -> None:
    async with repair_world(*"abcd") as world:
        ledger_id = await world.closed_ledger("abc")
        process = await world.start()
        world.kill("b")
        await asyncio.sleep(QUICK.grace_s)
        await world.wait_whole(ledger_id)
        old = world.ledgers.cluster["b"]
        old.damage(ledger_id, 5)
        old.reads.clear()
        world.revive("b")
        process.on_bookies_changed()
        await asyncio.sleep(QUICK.grace_s)
        assert await ensemble_of(world, ledger_id) == ("a", "d", "c")
        assert await world.marks() == {}
        assert process.worker.statistics.ledgers == 1
        assert old.reads == []


async def test_two_auditors_for_a_moment_do_no_harm() -> None:
    async with repair_world(*"abcd") as world:
        ledger_ids = [await world.closed_ledger("abc") for _ in range(5)]
        processes = [await world.start(), await world.start("r2")]
        for process in processes:
            process.auditor._election.stand = AsyncMock(return_value=True)  # type: ignore[method-assign]
            process.auditor._election.holds = AsyncMock(return_value=True)  # type: ignore[method-assign]
        world.kill("b")
        await asyncio.sleep(QUICK.grace_s)
        await world.wait_whole(*ledger_ids)
        assert all(process.auditor.statistics.is_auditor for process in processes)
        assert sum(process.worker.statistics.ledgers for process in processes) == len(ledger_ids)


async def test_a_ledger_that_is_deleted_while_it_is_copied_does_not_come_back() -> None:
    async with repair_world(*"abcd") as world:
        ledger_id = await world.closed_ledger("abc")
        process = await world.start()

        async def delete() -> None:
            await world.ledgers.client.delete(ledger_id)

        seen = before_write(process, delete)
        world.kill("b")
        await asyncio.sleep(QUICK.grace_s + 20)
        assert seen == [ledger_id]
        assert await ledger_records(world.store).get(ledger_id) is None
        assert await world.marks() == {}
        assert process.worker.statistics.ledgers == 0


async def test_the_mark_of_a_deleted_ledger_stays_when_the_ledger_is_brought_back_at_that_moment() -> None:
    """Otherwise nobody would know what it lacks until the next walk."""
    async with repair_world(*"abcd") as world:
        ledger_id = await world.closed_ledger("abc")
        process, deleted = await world.start(), DeletedLedgers(world.store)

        async def delete() -> None:
            found = await ledger_records(world.store).get(ledger_id)
            assert found is not None
            await deleted.delete(found, now_ms=0, grace_ms=1000)

        seen, multi = before_write(process, delete), process.worker._store.multi
        marked_after = list[int]()

        async def multi_after_undelete(ops: Sequence[Op]) -> None:
            takes_mark = any(isinstance(op, Delete) and op.key == keys.repair_mark_key(ledger_id) for op in ops)
            if not takes_mark or any(isinstance(op, Check) for op in ops):  # of the record that is to be replaced
                return await multi(ops)
            assert await deleted.undelete(ledger_id, now_ms=0) is not None
            try:
                await multi(ops)
            finally:
                marked_after.extend(await world.marks())

        world.kill("b")
        with mock.patch.object(process.worker._store, "multi", multi_after_undelete):
            await asyncio.sleep(QUICK.grace_s + 20)
        assert (seen, marked_after) == ([ledger_id], [ledger_id])
        assert await world.is_whole(ledger_id)
        assert await world.marks() == {}
