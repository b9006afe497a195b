"""When the auditor walks, when grace periods run, and what keeps a bookie from being drained."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cepheid_metadata import (
    DeletedLedgers,
    SessionState,
    StoreUnavailableError,
    draining_bookies,
    keys,
    ledger_records,
    repair_marks,
)
from cepheid_metadata.repair_views import decommission_status, mark_damaged
from tests.recovery.repair_world import QUICK, RepairWorld, repair_world

_NO_SAMPLES = QUICK.model_copy(update={"walk_ledgers_per_s": 10**9})

pytestmark = [pytest.mark.virtual_time, pytest.mark.deadline(2000)]


async def damage_record(world: RepairWorld, key: str) -> None:
    found = await world.store.get(key)
    await world.store.put(key, b"{damaged", found.version)


async def delete(world: RepairWorld, ledger_id: int) -> None:
    """Delete a ledger, so that it can be restored for an hour."""
    found = await ledger_records(world.store).get(ledger_id)
    assert found is not None
    await DeletedLedgers(world.store).delete(found, now_ms=0, grace_ms=3_600_000)


async def state_of(world: RepairWorld, bookie: str) -> str:
    found = await draining_bookies(world.store).get(bookie)
    return "gone" if found is None else "draining" if found.record.drained_at_ms is None else "drained"


async def test_walks_do_not_repeat_for_an_emptied_bookie_while_a_record_is_unreadable() -> None:
    """Every walk marks its ledgers, workers remove the marks, and that asks for the next walk."""
    async with repair_world("a", "b", "c", settings=_NO_SAMPLES) as world:
        ledgers = [await world.closed_ledger("abc") for _ in range(20)]
        bad = await world.closed_ledger("abc")
        await damage_record(world, keys.ledger_key(bad))
        process = await world.start()
        await asyncio.sleep(10)
        await world.lose_disk("b", 1000, "second disks")
        process.on_bookies_changed()
        await asyncio.sleep(30)
        assert all([await world.is_whole(each) for each in ledgers])
        walks = process.auditor.statistics.walks
        await asyncio.sleep(600)
        assert process.auditor.statistics.walks - walks <= 2


async def test_walks_with_single_ledgers_that_are_short_now_and_then() -> None:
    """Each of them causes a walk over all ledgers when it is repaired."""
    async with repair_world("a", "b", "c", settings=_NO_SAMPLES) as world:
        ledgers = [await world.closed_ledger("abc") for _ in range(20)]
        process = await world.start()
        await asyncio.sleep(30)
        walks = process.auditor.statistics.walks
        for n in range(600 // 15):
            await mark_damaged(world.store, ledgers[n % 20], ["b"], 0, entries=[(5, 5)])
            await asyncio.sleep(15)
        assert process.auditor.statistics.walks - walks <= 5


async def test_a_bookie_whose_disk_was_emptied_holds_no_copies_of_deleted_ledgers() -> None:
    async with repair_world(*"abcdef", settings=_NO_SAMPLES) as world:
        ledger_id = await world.closed_ledger("abc")
        process = await world.start()
        await asyncio.sleep(10)
        await delete(world, ledger_id)
        await world.lose_disk("a", 1000, "a2")
        await world.lose_disk("b", 1000, "b2")
        process.on_bookies_changed()
        await world.wait_refilled("b")
        await world.drain("c")
        await asyncio.sleep(120)
        assert await state_of(world, "c") == "draining"


async def test_a_ledger_that_is_brought_back_during_a_walk_keeps_its_bookie() -> None:
    async with repair_world(*"abcdef", settings=_NO_SAMPLES) as world:
        ledger_id = await world.closed_ledger("abc")
        process = await world.start()
        await asyncio.sleep(10)
        await delete(world, ledger_id)
        world.kill("a", "b")
        walk_slice = process.auditor._walk_slice

        async def undelete_after(*args: Any) -> None:
            await walk_slice(*args)
            since = process.auditor._decommissions.draining_since.get("c")
            if since is not None and args[0].began - since >= 2:  # this walk may find it empty
                await process.worker._client.undelete(ledger_id)

        process.auditor._walk_slice = undelete_after  # type: ignore[method-assign]
        await world.drain("c")
        process.on_bookies_changed()
        states = set()
        for _ in range(200):
            await asyncio.sleep(0.1)
            states.add(await state_of(world, "c"))
            record = await ledger_records(world.store).get(ledger_id)
            named = record is not None and "c" in record.record.last_fragment.ensemble
            assert not (named and await state_of(world, "c") == "drained"), "its disks can be discarded, and it has the only copy"


async def test_a_bookie_that_returns_during_an_outage_is_checked() -> None:
    async with repair_world("a", "b", "c", settings=_NO_SAMPLES) as world:
        ledger_id = await world.closed_ledger("abc")
        process = await world.start()
        await asyncio.sleep(10)
        world.kill("b")  # its session ends; the process runs on
        process.on_bookies_changed()
        await asyncio.sleep(10)
        del world.ledgers.cluster["b"].entries[ledger_id][9]
        events = process.auditor._store._events  # type: ignore[attr-defined]
        events.become(SessionState.SUSPENDED)
        world.revive("b")
        events.become(SessionState.CONNECTED)
        await asyncio.sleep(60)
        assert await world.is_whole(ledger_id)


async def test_a_bookie_whose_copies_were_read_is_checked_although_another_one_does_not_answer() -> None:
    async with repair_world("a", "b", "c", settings=_NO_SAMPLES) as world:
        process = await world.start()
        await asyncio.sleep(10)
        for _ in range(3):
            await world.closed_ledger("abc")
        world.ledgers.cluster["a"].mute = True  # it runs, and hangs
        world.bookies.processes["b"] = "second process"
        process.on_bookies_changed()
        await asyncio.sleep(300)
        assert (await world.audit()).runs["b"] == "first disks second process"


async def test_a_failed_check_is_repeated_soon_after_its_bookie_is_back() -> None:
    async with repair_world("a", "b", "c", settings=_NO_SAMPLES.model_copy(update={"grace_s": 300.0, "retry_s": 10.0})) as world:
        await world.closed_ledger("abc")
        process = await world.start()
        await asyncio.sleep(10)
        world.bookies.processes["b"] = "second process"
        world.ledgers.cluster["b"].mute = True
        process.on_bookies_changed()
        await asyncio.sleep(170)
        world.ledgers.cluster["b"].mute = False
        process.on_bookies_changed()
        await asyncio.sleep(40)
        assert (await world.audit()).runs["b"] == "first disks second process"


async def test_an_unreadable_mark_does_not_stop_every_decommissioning() -> None:
    async with repair_world(*"abcdef", settings=_NO_SAMPLES) as world:
        ledger_id = await world.closed_ledger("abc")
        await world.start()
        await asyncio.sleep(10)
        await world.switch_off()
        await mark_damaged(world.store, ledger_id, ["a"], 0)
        await damage_record(world, repair_marks(world.store).key_of(ledger_id))
        await world.switch_on()
        await world.drain("f")
        await asyncio.sleep(1200)
        state = await state_of(world, "f")
        assert (await decommission_status(world.store, "f"))["problem"] or state == "drained"  # it says why
        assert state == "drained"


async def test_bookies_list_is_right_after_a_repair_although_another_ledger_stays_short() -> None:
    async with repair_world(*"abcdef", settings=_NO_SAMPLES) as world:
        hopeless = await world.closed_ledger("abc")
        for name in "abc":
            del world.ledgers.cluster[name].entries[hopeless][5]
        await mark_damaged(world.store, hopeless, ["a", "b", "c"], 0)
        other = await world.closed_ledger("def")
        process = await world.start()
        await asyncio.sleep(20)
        world.kill("f")
        process.on_bookies_changed()
        await asyncio.sleep(QUICK.grace_s + 120)
        assert "f" not in (await world.ledgers.record(other)).last_fragment.ensemble
        held = (await world.audit()).bookies.get("f")
        assert held is None or held.short_bytes == 0


async def test_outages_during_a_lasting_loss_do_not_cause_walks() -> None:
    async with repair_world("a", "b", "c", settings=_NO_SAMPLES) as world:
        await world.closed_ledger("abc")
        process = await world.start()
        world.kill("b")
        await asyncio.sleep(QUICK.grace_s + 10)
        walks = process.auditor.statistics.walks
        events = process.auditor._store._events  # type: ignore[attr-defined]
        for _ in range(10):
            events.become(SessionState.SUSPENDED)
            events.become(SessionState.CONNECTED)
            await asyncio.sleep(QUICK.grace_s + 10)
        assert process.auditor.statistics.walks - walks <= 2


async def test_a_request_outlives_an_outage() -> None:
    async with repair_world(*"abcd", settings=_NO_SAMPLES) as world:
        process = await world.start()
        await asyncio.sleep(10)
        world.kill("b")
        await world.request("b")
        process.on_bookies_changed()
        await asyncio.sleep(10)
        assert "b" not in (await world.audit()).waiting
        events = process.auditor._store._events  # type: ignore[attr-defined]
        events.become(SessionState.SUSPENDED)
        events.become(SessionState.CONNECTED)
        await asyncio.sleep(5)
        assert "b" not in (await world.audit()).waiting


async def test_a_bookie_that_is_new_since_the_walk_began_is_not_lost() -> None:
    async with repair_world("a", "b", "c", settings=_NO_SAMPLES) as world:
        await world.closed_ledger("abc")
        process = await world.start()
        await asyncio.sleep(10)
        walk_slice = process.auditor._walk_slice
        hidden = world.ledgers.cluster.bookies.pop("c")

        async def new_bookie(*args: Any) -> None:
            await walk_slice(*args)
            world.ledgers.cluster.bookies["c"] = hidden

        await asyncio.sleep(5)
        process.auditor._walk_slice = new_bookie  # type: ignore[method-assign]
        process.auditor._next_walk = 0.0
        seen = set()
        for _ in range(100):
            await asyncio.sleep(0.05)
            seen.add((await world.audit()).runs.get("c"))
        assert "lost" not in seen


async def test_a_dead_bookie_is_given_up_although_metadata_is_away_now_and_then() -> None:
    """For a second each time, always before the grace period has ended."""
    async with repair_world(*"abcd", settings=_NO_SAMPLES) as world:
        ledger_id = await world.closed_ledger("abc")
        process = await world.start()
        await asyncio.sleep(10)
        world.kill("b")
        process.on_bookies_changed()
        events = process.auditor._store._events  # type: ignore[attr-defined]
        for _ in range(30):
            await asyncio.sleep(QUICK.grace_s - 5)
            events.become(SessionState.SUSPENDED)
            await asyncio.sleep(1)
            events.become(SessionState.CONNECTED)
        assert "b" not in (await world.ledgers.record(ledger_id)).last_fragment.ensemble


async def test_one_request_without_an_answer_does_not_start_all_grace_periods_again() -> None:
    async with repair_world(*"abcd", settings=_NO_SAMPLES) as world:
        ledger_id = await world.closed_ledger("abc")
        process = await world.start()
        await asyncio.sleep(10)
        world.kill("b")
        process.on_bookies_changed()
        get, count = process.auditor._election.holds, 0

        async def slow_now_and_then() -> bool:
            nonlocal count
            count += 1
            if count % 50 == 0:  # of some thousand requests in that time
                raise StoreUnavailableError("no answer within 10 s")
            return await get()

        process.auditor._election.holds = slow_now_and_then  # type: ignore[method-assign]
        await asyncio.sleep(600)
        assert "b" not in (await world.ledgers.record(ledger_id)).last_fragment.ensemble


async def test_a_throttled_request_in_a_walk_delays_the_repair_of_a_lost_bookie_by_polls_only() -> None:
    """ZooKeeper refuses single requests (ThrottledOpError), and so does a full request lane, while the connection is fine."""
    async with repair_world(*"abcd", settings=_NO_SAMPLES) as world:
        ledger_id = await world.closed_ledger("abc")
        process = await world.start()
        await asyncio.sleep(10)
        get, refusals = process.auditor._ledgers.get, 5

        async def throttled(key: Any) -> Any:
            nonlocal refusals
            if refusals:
                refusals -= 1
                raise StoreUnavailableError("ZooKeeper failed with ThrottledOpError")
            return await get(key)

        process.auditor._ledgers.get = throttled  # type: ignore[method-assign]
        world.kill("b")
        process.on_bookies_changed()
        await asyncio.sleep(QUICK.grace_s + 30)
        assert "b" not in (await world.ledgers.record(ledger_id)).last_fragment.ensemble


async def test_a_bookie_that_was_remembered_is_drained_when_it_has_been_asked_although_the_entry_stays_lost() -> None:
    """Its mark stays, as the entry is lost."""
    async with repair_world(*"abcde", settings=_NO_SAMPLES) as world:
        ledger_id = await world.closed_ledger("abc")
        for name in "ac":
            del world.ledgers.cluster[name].entries[ledger_id][5]
        process = await world.start()
        await asyncio.sleep(10)
        world.kill("b")
        await world.drain("b")
        process.on_bookies_changed()
        await asyncio.sleep(QUICK.grace_s + 60)
        assert (await world.marks())[ledger_id].former == ("b",)
        del world.ledgers.cluster["b"].entries[ledger_id][5]
        world.revive("b")
        process.on_bookies_changed()
        await asyncio.sleep(120)
        assert await state_of(world, "b") == "drained"
