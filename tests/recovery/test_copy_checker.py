"""Ledgers that were closed by recovery: each copy of them is looked at once."""

from __future__ import annotations

import asyncio

import pytest

from cepheid_metadata import UncheckedLedger, keys, list_names, unchecked_ledgers
from cepheid_recovery import auditor as auditor_module
from cepheid_recovery import copy_checker
from cepheid_rpc import ReadAnswer, ReadRequest
from tests.ledger.ledger_world import append
from tests.ledger.memory_bookie import MemoryBookie
from tests.recovery.repair_world import QUICK, RepairWorld, repair_world
from tests.support import wait_until

pytestmark = [pytest.mark.virtual_time, pytest.mark.deadline(2000)]


def miss(world: RepairWorld, bookie: str, ledger_id: int, *entry_ids: int) -> None:
    """Let a bookie lack entries, as if it had hung while they were written."""
    for entry_id in entry_ids:
        del world.ledgers.cluster[bookie].entries[ledger_id][entry_id]


def note_whole_reads(world: RepairWorld, entries: int) -> list[str]:
    """Return a list that gets the bookie of each read of so many entries."""
    asked: list[str] = []
    for bookie in world.ledgers.cluster.bookies.values():

        def chunk(request: ReadRequest, bookie: MemoryBookie = bookie) -> ReadAnswer:
            if request.last_entry_id - request.first_entry_id + 1 == entries:
                asked.append(bookie.bookie_id)
            return MemoryBookie.chunk(bookie, request)

        bookie.chunk = chunk  # type: ignore[method-assign]
    return asked


async def confirmed_ledger(world: RepairWorld) -> int:
    """Return an open ledger of 21 entries, of which recovery copies the last one alone."""
    writer = await world.open_ledger("abc", 20)
    await append(writer, [b"tells the others that 0 to 19 are confirmed"])
    return writer.ledger_id


async def recover(world: RepairWorld, ledger_id: int) -> None:
    """Close it as another process does, whose writer is gone."""
    client = world.ledgers.another_client()
    await client.recover(ledger_id)
    await client.aclose()


async def test_copies_that_only_the_writer_missed_are_made_again_after_its_ledger_was_recovered() -> None:
    async with repair_world("a", "b", "c") as world:
        ledger_id = await confirmed_ledger(world)
        miss(world, "c", ledger_id, *range(3, 9))
        await recover(world, ledger_id)
        assert not await world.is_whole(ledger_id)
        await world.start()
        await world.wait_checked()
        await world.wait_whole(ledger_id)


async def test_a_recovered_ledger_that_is_whole_costs_one_request_for_each_bookie_and_counts_nowhere_as_short() -> None:
    async with repair_world("a", "b", "c") as world:
        ledger_id = await confirmed_ledger(world)
        await recover(world, ledger_id)
        asked = note_whole_reads(world, 21)
        process = await world.start()
        await world.wait_checked()
        assert sorted(asked) == ["a", "b", "c"]
        assert await world.marks() == {}
        assert process.checker.statistics.ledgers == 1


async def test_a_recovered_ledger_waits_for_a_bookie_that_does_not_answer() -> None:
    async with repair_world() as world:
        ledger_id = await confirmed_ledger(world)
        miss(world, "b", ledger_id, 6)
        miss(world, "c", ledger_id, 7)
        await recover(world, ledger_id)
        world.kill("c")
        await world.start()
        await asyncio.sleep(QUICK.grace_s / 2)
        assert await list_names(world.store, keys.UNCHECKED_LEDGERS_KEY) == [str(ledger_id)]
        assert world.ledgers.cluster["b"].ids(ledger_id) == list(range(21))  # nothing waits for what others lack
        world.revive("c")
        await world.wait_checked()
        await world.wait_whole(ledger_id)


async def test_bookies_that_have_answered_are_not_asked_again_while_another_is_away() -> None:
    async with repair_world("a", "b", "c") as world:  # no other bookie can take the place of the one that is away
        ledger_id = await confirmed_ledger(world)
        await recover(world, ledger_id)
        asked = note_whole_reads(world, 21)
        world.kill("c")
        await world.start()
        await asyncio.sleep(QUICK.grace_s / 2)
        assert sorted(asked) == ["a", "b"]


async def test_a_large_ledger_is_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_checker, "_PART_BYTES", 80)
    async with repair_world("a", "b", "c") as world:
        ledger_id = await confirmed_ledger(world)
        await recover(world, ledger_id)
        asked = note_whole_reads(world, 21)
        await world.start()
        await world.wait_checked()
        assert asked == []


async def test_no_recovered_ledger_is_checked_while_repair_is_off() -> None:
    async with repair_world("a", "b", "c") as world:
        ledger_id = await confirmed_ledger(world)
        miss(world, "c", ledger_id, 7)
        await recover(world, ledger_id)
        await world.switch_off()
        await world.start()
        await asyncio.sleep(60)
        assert (await world.marks(), await world.is_whole(ledger_id)) == ({}, False)
        await world.switch_on()
        await world.wait_checked()
        await world.wait_whole(ledger_id)


@pytest.mark.parametrize(("ack_quorum", "entries", "listed"), [(2, 5, True), (3, 5, False), (2, 0, False)])
async def test_a_recovered_ledger_is_checked_if_an_entry_may_lack_a_copy(ack_quorum: int, entries: int, listed: bool) -> None:
    async with repair_world("a", "b", "c") as world:
        writer = await world.open_ledger("abc", entries, write_quorum=3, ack_quorum=ack_quorum)
        await recover(world, writer.ledger_id)
        assert bool(await list_names(world.store, keys.UNCHECKED_LEDGERS_KEY)) == listed


async def test_a_deleted_ledger_leaves_the_list_of_what_is_to_be_checked() -> None:
    async with repair_world("a", "b", "c") as world:
        writer = await world.open_ledger("abc")
        await recover(world, writer.ledger_id)
        await world.ledgers.client.delete(writer.ledger_id)
        await world.start()
        await world.wait_checked()


async def test_a_ledger_that_was_brought_back_is_checked() -> None:
    """What was known of its missing copies went with its deletion. Found by seed 0x5e of the simulator (V5)."""
    async with repair_world("a", "b", "c") as world:
        ledger_id = await confirmed_ledger(world)
        await recover(world, ledger_id)
        await world.start()
        await world.wait_checked()
        miss(world, "c", ledger_id, *range(3, 9))
        await world.ledgers.client.delete(ledger_id)
        await world.ledgers.client.undelete(ledger_id)
        await world.wait_checked()
        await world.wait_whole(ledger_id)


async def test_a_ledger_that_is_on_the_list_already_is_closed_all_the_same() -> None:
    async with repair_world("a", "b", "c") as world:
        writer = await world.open_ledger("abc")
        await unchecked_ledgers(world.store).create(writer.ledger_id, UncheckedLedger(ledger_id=writer.ledger_id))
        await recover(world, writer.ledger_id)
        assert (await world.ledgers.record(writer.ledger_id)).is_closed


async def test_a_writer_that_ends_right_after_it_closed_a_ledger_without_all_copies_leaves_word_of_it() -> None:
    async with repair_world("a", "b", "c") as world:
        writer = await world.open_ledger("abc", 20)
        world.ledgers.cluster["c"].down = True
        await append(writer, [b"two copies"])
        await wait_until(lambda: writer.under_replicated == ("c",))
        world.ledgers.cluster["c"].down = False
        writer._on_short = lambda ledger_id, bookies: None
        await writer.close()
        assert await list_names(world.store, keys.UNCHECKED_LEDGERS_KEY) == [str(writer.ledger_id)]
        await world.start()
        await world.wait_checked()
        await world.wait_whole(writer.ledger_id)


@pytest.mark.parametrize("ack_quorum", [2, 3])
async def test_copies_of_a_ledger_that_is_brought_back_are_made_for_a_bookie_that_was_lost_before(ack_quorum: int) -> None:
    async with repair_world(*"abcde") as world:
        ledger_id = await world.closed_ledger("abc", ack_quorum=ack_quorum)
        process = await world.start()
        await world.ledgers.client.delete(ledger_id)
        world.kill("b")
        process.on_bookies_changed()
        await asyncio.sleep(QUICK.grace_s + 60)
        await world.ledgers.client.undelete(ledger_id)
        assert not await world.is_whole(ledger_id)
        await world.wait_whole(ledger_id, timeout_s=600)


async def test_a_bookie_that_restarts_has_its_grace_period_although_a_check_has_waited_for_longer() -> None:
    async with repair_world(*"abcd") as world:
        writer = await world.open_ledger("abc", 20)
        await append(writer, [b"x"])
        client = world.ledgers.another_client()
        await client.recover(writer.ledger_id)
        await client.aclose()
        cluster = world.ledgers.cluster
        cluster["c"].mute = True  # registered, but does not answer
        process = await world.start()
        await asyncio.sleep(2 * QUICK.grace_s)
        marks = await world.marks()
        assert marks == {}
        world.kill("c")
        process.on_bookies_changed()
        await asyncio.sleep(QUICK.grace_s / 4)
        assert (await world.marks(), (await world.audit()).short.ledgers) == ({}, 0)
        assert "c" in (await world.ledgers.record(writer.ledger_id)).fragments[0].ensemble


async def test_a_bookie_that_restarts_during_a_walk_keeps_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auditor_module, "_SLICE", 1)
    settings = QUICK.model_copy(update={"walk_ledgers_per_s": 0.05, "walk_interval_s": 150.0})
    async with repair_world(*"abcd", settings=settings) as world:
        writer = await world.open_ledger("abc", 20)
        await append(writer, [b"x"])
        client = world.ledgers.another_client()
        await client.recover(writer.ledger_id)
        await client.aclose()
        for _ in range(10):
            await world.closed_ledger("abc")
        cluster = world.ledgers.cluster
        cluster["c"].mute = True  # registered, but does not answer
        process = await world.start()
        await wait_until(lambda: process.auditor.statistics.walks >= 2, timeout_s=1000)
        await asyncio.sleep(200)  # the next walk has begun, and takes 220 s
        world.kill("c")
        process.on_bookies_changed()
        await asyncio.sleep(QUICK.grace_s / 4)
        cluster["c"].mute = False
        world.revive("c")
        process.on_bookies_changed()
        assert process.worker.statistics.entries == 0, await world.marks()
        assert "c" in (await world.ledgers.record(writer.ledger_id)).fragments[0].ensemble
