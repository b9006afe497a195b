"""Copying entries of finished fragments to bookies that lack them."""

from __future__ import annotations

import asyncio

import pytest

from cepheid_ledger import CopyFailedError, CopyTask, LedgerClosedError, bookies_replaced
from cepheid_metadata import LedgerMetadata
from tests.ledger.ledger_world import LedgerWorld, append, ledger_world

pytestmark = pytest.mark.virtual_time


async def closed(world: LedgerWorld, ensemble: str, payloads: list[bytes], **quorums: int) -> LedgerMetadata:
    writer = await world.create_on(ensemble, **quorums)
    await append(writer, payloads)
    await writer.close()
    return await world.record(writer.ledger_id)


def task(ledger: LedgerMetadata, targets: dict[int, str], away: str = "", former: str = "") -> CopyTask:
    assert ledger.last_entry_id is not None
    return CopyTask(ledger, ledger.fragments[0], 0, ledger.last_entry_id, targets, tuple(away), tuple(former))


async def test_entries_larger_than_a_message_are_copied_in_several_chunks() -> None:
    async with ledger_world(*"abcd") as world:
        ledger = await closed(world, "abc", [bytes([number]) * 600_000 for number in range(7)])
        report = await world.client.copy_entries(task(ledger, {1: "d"}, away="b"))
        assert (report.entries, report.lost) == (7, [])
        assert world.cluster["d"].entries[ledger.ledger_id] == world.cluster["a"].entries[ledger.ledger_id]


async def test_copies_are_taken_although_the_ledger_is_fenced_there() -> None:
    async with ledger_world(*"abcd") as world:
        ledger = await closed(world, "abc", [b"1"])
        world.cluster["d"].fenced[ledger.ledger_id] = True
        await world.client.copy_entries(task(ledger, {0: "d"}))
        assert all(request.recovery for request in world.cluster["d"].add_log)
        assert world.cluster["d"].ids(ledger.ledger_id) == [0]


async def test_a_target_that_fails_is_named() -> None:
    async with ledger_world(*"abcd") as world:
        ledger = await closed(world, "abc", [b"1"])
        world.cluster["d"].down = True
        with pytest.raises(CopyFailedError, match="bookie d did not accept copies") as failed:
            await world.client.copy_entries(task(ledger, {0: "d"}))
        assert failed.value.facts["bookie"] == "d"


async def test_a_source_that_cannot_answer_now_is_no_reason_to_call_entries_lost() -> None:
    async with ledger_world(*"abcd") as world:
        ledger = await closed(world, "abc", [b"1"])
        world.cluster["a"].damage(ledger.ledger_id, 0)
        world.cluster["a"].checks_disk = True
        world.cluster["b"].down = world.cluster["c"].down = True
        with pytest.raises(CopyFailedError):
            await world.client.copy_entries(task(ledger, {2: "d"}, away="c"))


async def test_an_entry_that_only_a_former_bookie_has_is_found_there() -> None:
    async with ledger_world(*"abcd") as world:
        ledger = await closed(world, "abc", [b"1", b"2"])
        moved = bookies_replaced(ledger, {(0, "a"): "d"})
        for name in "bc":
            del world.cluster[name].entries[ledger.ledger_id][1]
        report = await world.client.copy_entries(task(moved, {0: "d"}, former="a"))
        assert report.lost == []
        assert world.cluster["d"].ids(ledger.ledger_id) == [0, 1]


async def test_what_a_bookie_lacks_is_told_entry_by_entry() -> None:
    async with ledger_world("a", "b", "c") as world:
        ledger = await closed(world, "abc", [b"%d" % number for number in range(8)])
        bookie = world.cluster["b"]
        del bookie.entries[ledger.ledger_id][2]
        bookie.damage(ledger.ledger_id, 5)
        assert sorted(await world.client.runs_not_stored(ledger, 1, "b", 0, 7)) == [(2, 2), (5, 5)]
        bookie.down = True
        with pytest.raises(CopyFailedError, match="bookie b cannot say"):
            await world.client.runs_not_stored(ledger, 1, "b", 0, 7)


async def test_a_writer_closes_its_ledger_after_a_bookie_of_an_earlier_fragment_was_replaced() -> None:
    async with ledger_world(*"abcde") as world:
        writer = await world.create_on("abc")
        await append(writer, [b"1"])
        world.cluster["c"].down = True
        await append(writer, [b"2"])
        await asyncio.sleep(5)  # its place is taken
        found = await world.records.get(writer.ledger_id)
        assert found is not None
        target = next(name for name in "de" if name not in found.record.last_fragment.ensemble)
        changed = bookies_replaced(found.record, {(0, "c"): target})
        await world.records.replace(writer.ledger_id, changed, found.version)
        await writer.close()
        record = await world.record(writer.ledger_id)
        assert record.is_closed
        assert target in record.fragments[0].ensemble
        with pytest.raises(LedgerClosedError):
            await append(writer, [b"after the end"])


def test_the_open_fragment_is_not_for_workers() -> None:
    from tests.recovery.test_shortage import ledger

    with pytest.raises(AssertionError, match="is open"):
        bookies_replaced(ledger((0, "abc"), last=None), {(0, "c"): "d"})
