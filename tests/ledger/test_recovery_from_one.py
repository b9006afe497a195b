"""Closing a ledger at what is left of it, by an operator's decision: what is kept, what is refused, what stays as it is."""

from __future__ import annotations

import asyncio

import pytest

from cepheid_ledger import ClosedLedger, LedgerError, LedgerWriter, RecoveryFailedError, WriteBackFailedError
from cepheid_metadata import LedgerState
from tests.ledger.ledger_world import LedgerWorld, append, ledger_world, payloads_of
from tests.support import wait_until

pytestmark = pytest.mark.virtual_time


async def written(world: LedgerWorld, count: int = 5) -> LedgerWriter:
    """Entries 0..count - 1 on a, b and c, by a writer that is still there."""
    writer = await world.create()
    for number in range(count):
        await append(writer, [b"%d" % number])
    await wait_until(lambda: all(len(world.cluster[bookie].ids(writer.ledger_id)) == count for bookie in "abc"))
    return writer


def lose_disk(world: LedgerWorld, *bookies: str) -> None:
    """They came back blank, and their operator said so."""
    for name in bookies:
        bookie = world.cluster[name]
        bookie.entries.clear()
        bookie.keys.clear()
        bookie.fenced.clear()
        bookie.limbo = True


async def test_the_one_whole_copy_of_three_closes_the_ledger_after_the_writer_is_fenced() -> None:
    async with ledger_world() as world:
        writer = await written(world)
        lose_disk(world, "a", "b")
        with pytest.raises(RecoveryFailedError):
            await world.client.recover(writer.ledger_id)
        preview = await world.client.preview_recovery_from(writer.ledger_id, "c")
        assert (preview.last_entry_id, preview.needs_decision, preview.unheard) == (4, True, ("a", "b"))
        assert preview.answers == {"a": "not known: UNKNOWN", "b": "not known: UNKNOWN", "c": "highest entry 4"}

        assert await world.client.recover_from(writer.ledger_id, "c", at_least=4) == ClosedLedger(4, 5)
        assert all(world.cluster[bookie].fenced[writer.ledger_id] for bookie in "abc")
        assert sum(4 in world.cluster[bookie].ids(writer.ledger_id) for bookie in "abc") >= 2, "held by an ack quorum again"
        with pytest.raises(LedgerError):
            await append(writer, [b"late"])
        reader = await world.client.open_reader(writer.ledger_id)
        assert payloads_of(await reader.read(0, 4, max_bytes=1 << 20)) == [b"0", b"1", b"2", b"3", b"4"]
        again = await world.client.preview_recovery_from(writer.ledger_id, "c")
        assert (again.state, again.last_entry_id, again.needs_decision) == (LedgerState.CLOSED, 4, False)


async def test_a_preview_changes_nothing() -> None:
    async with ledger_world() as world:
        writer = await written(world)
        lose_disk(world, "a", "b")
        world.cluster["a"].down = True
        before = await world.record(writer.ledger_id)
        preview = await world.client.preview_recovery_from(writer.ledger_id, "c")
        assert "a is down" in preview.answers["a"]
        assert await world.record(writer.ledger_id) == before
        assert not any(world.cluster[bookie].fenced.get(writer.ledger_id) for bookie in "abc")
        world.cluster["a"].down = False


async def test_what_another_bookie_shows_is_kept_as_well() -> None:
    async with ledger_world("a", "b", "c", "d") as world:
        writer = await world.create_on("abcd", ack_quorum=3, write_quorum=4)
        for number in range(5):
            await append(writer, [b"%d" % number])
        await wait_until(lambda: all(len(world.cluster[bookie].ids(writer.ledger_id)) == 5 for bookie in "abcd"))
        lose_disk(world, "a", "b", "c")
        held = world.cluster["d"].entries[writer.ledger_id]
        world.cluster["c"].hold(held[3], held[4])
        del held[4]
        assert await world.client.recover_from(writer.ledger_id, "d", at_least=3) == ClosedLedger(4, 5)


async def test_it_ends_before_an_entry_that_is_damaged_on_the_disk_that_decides() -> None:
    async with ledger_world() as world:
        writer = await world.create()
        await asyncio.gather(*(append(writer, [b"%d" % number]) for number in range(5)))
        await wait_until(lambda: world.cluster["c"].ids(writer.ledger_id) == [0, 1, 2, 3, 4])
        lose_disk(world, "a", "b")
        world.cluster["c"].checks_disk = True
        world.cluster["c"].damage(writer.ledger_id, 4)
        end = (await world.client.preview_recovery_from(writer.ledger_id, "c")).last_entry_id
        assert end == 3
        assert (await world.client.recover_from(writer.ledger_id, "c", at_least=end)).last_entry_id == 3


async def test_where_an_ordinary_recovery_can_decide_it_does() -> None:
    async with ledger_world() as world:
        writer = await written(world)
        lose_disk(world, "a")
        held = world.cluster["c"].entries[writer.ledger_id]
        del held[4]  # b has it, and b and c know that there is no 5
        preview = await world.client.preview_recovery_from(writer.ledger_id, "c")
        assert (preview.last_entry_id, preview.needs_decision) == (4, False)
        assert await world.client.recover_from(writer.ledger_id, "c", at_least=-1) == ClosedLedger(4, 5)


@pytest.mark.parametrize(
    ("bookie", "at_least", "words"),
    [
        ("d", 4, "name one of these"),
        ("c", 9, "before entry 9, to which it was to be kept"),
    ],
)
async def test_what_cannot_be_decided_so_is_refused_and_closes_nothing(bookie: str, at_least: int, words: str) -> None:
    async with ledger_world() as world:
        writer = await written(world)
        lose_disk(world, "a", "b")
        with pytest.raises(RecoveryFailedError, match=words):
            await world.client.recover_from(writer.ledger_id, bookie, at_least=at_least)
        assert (await world.record(writer.ledger_id)).state is LedgerState.IN_RECOVERY
        assert (await world.client.recover_from(writer.ledger_id, "c", at_least=4)).last_entry_id == 4


async def test_a_bookie_that_does_not_answer_cannot_decide() -> None:
    async with ledger_world() as world:
        writer = await written(world)
        lose_disk(world, "a", "b")
        world.cluster["a"].down = True
        with pytest.raises(RecoveryFailedError, match="a, whose answer is to decide, does not answer"):
            await world.client.recover_from(writer.ledger_id, "a", at_least=-1)


@pytest.mark.parametrize(("blank", "end"), [("a", 4), ("ab", 4), ("abc", -1)])
async def test_a_bookie_that_lost_the_ledger_decides_with_what_others_show(blank: str, end: int) -> None:
    async with ledger_world() as world:
        writer = await written(world)
        lose_disk(world, *blank)
        preview = await world.client.preview_recovery_from(writer.ledger_id, "a")
        assert (preview.last_entry_id, preview.answers["a"]) == (end, "not known: UNKNOWN")
        assert await world.client.recover_from(writer.ledger_id, "a", at_least=end) == ClosedLedger(end, end + 1)


async def test_a_ledger_of_which_a_bookie_in_limbo_never_had_an_entry_is_closed_empty() -> None:
    async with ledger_world("a") as world:
        writer = await world.create_on("a", ack_quorum=1, write_quorum=1)
        world.cluster["a"].limbo = True
        with pytest.raises(RecoveryFailedError):
            await world.client.recover(writer.ledger_id)
        preview = await world.client.preview_recovery_from(writer.ledger_id, "a")
        assert (preview.last_entry_id, preview.needs_decision) == (-1, True)
        assert await world.client.recover_from(writer.ledger_id, "a", at_least=-1) == ClosedLedger(-1, 0)


@pytest.mark.parametrize(("spares", "needed"), [("", 1), ("d", 0)])
async def test_a_preview_counts_the_bookies_that_are_missing_for_an_ack_quorum(spares: str, needed: int) -> None:
    async with ledger_world("a", "b", "c", *spares) as world:
        writer = await world.create_on("abc")
        await append(writer, [b"0"])
        await wait_until(lambda: world.cluster["c"].ids(writer.ledger_id) == [0])
        for lost in "ab":
            world.cluster[lost].down = True
            world.cluster.not_registered.append(lost)
        preview = await world.client.preview_recovery_from(writer.ledger_id, "c")
        assert (preview.last_entry_id, preview.needed_bookies) == (0, needed)
        if needed:
            with pytest.raises(WriteBackFailedError, match="entries cannot be written back") as caught:
                await world.client.recover_from(writer.ledger_id, "c", at_least=0)
            assert "recover-from" not in caught.value.hint
        else:
            assert await world.client.recover_from(writer.ledger_id, "c", at_least=0) == ClosedLedger(0, 1)


async def test_a_ledger_without_entries_to_write_back_needs_no_further_bookies() -> None:
    async with ledger_world() as world:
        writer = await world.create()
        world.cluster["c"].limbo = True
        for lost in "ab":
            world.cluster[lost].down = True
            world.cluster.not_registered.append(lost)
        assert (await world.client.preview_recovery_from(writer.ledger_id, "c")).needed_bookies == 0
        assert await world.client.recover_from(writer.ledger_id, "c", at_least=-1) == ClosedLedger(-1, 0)
