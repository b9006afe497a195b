"""Reads that meet damage, holes and bounds; the budget of catch-up reads."""

from __future__ import annotations

import asyncio
import random

import pytest

from cepheid_bookie.entry_log import log_path
from cepheid_bookie.entry_reader import ReadingBudget, cut_group, split_answer
from cepheid_rpc import LacRequest, MissingEntries, ReadAnswer, ReadRequest, Status
from tests.bookie.bookie_support import KEY, KiB, Machine, added, entries_of, group_of, read_all, small_settings
from tests.support import wait_until


@pytest.mark.parametrize(
    ("first", "last", "max_bytes", "expected"),
    [
        (10, 19, 1 << 30, (10, 19)),
        (12, 14, 1 << 30, (12, 14)),
        (12, 100, 1, (12, 12)),  # at least one
        (12, 100, 46, (12, 12)),  # an entry is 36 + 10 bytes
        (12, 100, 47, (12, 13)),  # soft by one
        (19, 100, 1, (19, 19)),
    ],
)
def test_a_group_is_cut_to_range_and_budget(first: int, last: int, max_bytes: int, expected: tuple[int, int]) -> None:
    part = cut_group(group_of(7, 10, 10), first, last, max_bytes)
    part.verify()
    assert (part.first_entry_id, part.last_entry_id) == expected


@pytest.mark.parametrize("piece_bytes", [1, 46, 100, 250, 10_000])
def test_the_pieces_of_an_answer_say_what_it_says(piece_bytes: int) -> None:
    """Entries are of 46 bytes."""
    groups = (group_of(7, 2, 3), group_of(7, 5, 1), group_of(7, 9, 10))
    missing = (
        MissingEntries(0, 1, Status.NO_ENTRY),
        MissingEntries(6, 8, Status.BAD_DIGEST),
        MissingEntries(19, 30, Status.NO_ENTRY),
    )
    answer = ReadAnswer(groups, missing, 31, retry_after_ms=5)
    pieces = list(split_answer(answer, piece_bytes))
    assert entries_of(group for piece in pieces for group in piece.groups) == entries_of(groups)
    assert [gap for piece in pieces for gap in piece.missing] == list(missing)
    assert (pieces[-1].next_entry_id, pieces[-1].retry_after_ms) == (31, 5)
    position = 0
    for piece in pieces:
        assert sum(len(group.data) for group in piece.groups) < piece_bytes + 46
        told = [*entries_of(piece.groups), *(i for gap in piece.missing for i in range(gap.first_entry_id, gap.last_entry_id + 1))]
        assert sorted(told) == list(range(position, piece.next_entry_id))
        position = piece.next_entry_id
    refusal = ReadAnswer((), (MissingEntries(0, 9, Status.STOPPED),), 10)
    assert list(split_answer(refusal, piece_bytes)) == [refusal]


async def test_a_damaged_entry_is_unknown_and_hides_no_neighbour_in_its_block() -> None:
    """And never absent: recovery would truncate."""
    machine = Machine()
    async with machine.bookie() as bookie:
        groups = [group_of(7, first, 5, size=900) for first in range(0, 20, 5)]
        await added(bookie, *groups)
        await bookie.checkpoint()
        hurt_ids = (7, 13)  # after two whole entries and before one, in the block 5..8; the last of the block 10..13
        for hurt in hurt_ids:
            block = next(block for block in machine.index.blocks() if block.first_entry_id <= hurt <= block.last_entry_id)
            machine.disk.flip_bit(log_path(block.log_id), block.offset + block.length - 936 * (block.last_entry_id - hurt) - 10)
        for fence in (False, True):
            entries, missing = await read_all(bookie, 7, 0, 21, fence=fence)
            assert missing == {**dict.fromkeys(hurt_ids, Status.BAD_DIGEST), 20: Status.NO_ENTRY, 21: Status.NO_ENTRY}
            assert entries == {i: entry for i, entry in entries_of(groups).items() if i not in hurt_ids}
        assert bookie.statistics().read_unreadable_blocks == 4
        for max_bytes in (1, 1000, 3000):  # what is cut for size is neither here nor missing
            entries, missing, position = {}, {}, 0
            while position <= 21:
                async for answer in bookie.read(ReadRequest(7, position, 21, max_bytes)):
                    entries |= entries_of(answer.groups)
                    missing |= {i: gap.status for gap in answer.missing for i in range(gap.first_entry_id, gap.last_entry_id + 1)}
                    position = answer.next_entry_id
            assert (len(entries), sorted(missing)) == (18, [*hurt_ids, 20, 21])


async def test_a_block_whose_table_of_entries_is_damaged_makes_all_its_entries_unknown() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        groups = [group_of(7, first, 5, size=900) for first in range(0, 20, 5)]
        await added(bookie, *groups)
        await bookie.checkpoint()
        block = next(block for block in machine.index.blocks() if block.first_entry_id <= 7 <= block.last_entry_id)
        machine.disk.flip_bit(log_path(block.log_id), block.offset)  # its magic
        entries, missing = await read_all(bookie, 7, 0, 19)
        hurt = range(block.first_entry_id, block.last_entry_id + 1)
        assert missing == dict.fromkeys(hurt, Status.BAD_DIGEST)
        assert sorted(entries) == [i for i in range(20) if i not in hurt]


async def test_a_highest_entry_that_cannot_be_read_makes_the_lac_unknown() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        await added(bookie, group_of(7, 0, 3))
        await bookie.checkpoint()
        machine.disk.fail("pread", "entrylog/")
        answer = await bookie.read_lac(LacRequest(7, KEY))
        assert answer.status is Status.IO_ERROR
        assert (await bookie.read_lac(LacRequest(7, KEY))).status is Status.OK
        machine.disk.unlink(log_path(1))
        machine.disk.fail("pread", "entrylog/")
        assert not (await bookie.read_lac(LacRequest(7, KEY))).status.certain_no


async def test_an_index_that_fails_makes_entries_unknown() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        await added(bookie, group_of(7, 0, 3))
        await bookie.checkpoint()

        def broken(*_: object) -> None:
            raise RuntimeError("the database is unhappy")

        machine.index.find = broken  # type: ignore[assignment]
        _, missing = await read_all(bookie, 7, 0, 4)
        assert set(missing.values()) == {Status.IO_ERROR}


async def test_a_long_range_comes_in_chunks_from_many_small_blocks() -> None:
    machine = Machine(settings=small_settings(write_cache_bytes=16 * KiB))
    async with machine.bookie() as bookie:
        groups = [group_of(7, first, 2, size=1_500) for first in range(0, 1_600, 2)]
        await added(bookie, *groups)
        await bookie.checkpoint()
        chunks = [chunk async for chunk in bookie.read(ReadRequest(7, 0, 1_599, max_bytes=1 << 30))]
        assert len(chunks) >= 2
        assert sum(len(group) for chunk in chunks for group in chunk.groups) == 1_600
        assert max(sum(len(group.data) for group in chunk.groups) for chunk in chunks) <= (1 << 20) + 4 * KiB
        assert (await read_all(bookie, 7, 0, 1_599)) == (entries_of(groups), {})


async def test_holes_are_told_id_by_id_whether_cached_or_flushed() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        held = [group_of(7, 2, 2), group_of(7, 8, 1), group_of(7, 20, 3)]
        await added(bookie, *held)
        for _ in range(2):
            entries, missing = await read_all(bookie, 7, 0, 25)
            assert entries == entries_of(held)
            assert missing == dict.fromkeys([i for i in range(26) if i not in entries], Status.NO_ENTRY)
            await bookie.checkpoint()


async def test_catch_up_reads_queue_for_their_budget_and_recovery_does_not() -> None:
    machine = Machine(settings=small_settings(reading_bytes=1 << 20))
    async with machine.bookie() as bookie:
        await added(bookie, group_of(7, 0, 3))
        await bookie.checkpoint()
        budget = bookie._reader._budget
        machine.workers["read"].hold()
        reads = [asyncio.ensure_future(read_all(bookie, 7, 0, 2)) for _ in range(3)]
        await wait_until(lambda: "2 waiting" in repr(budget))
        reads[1].cancel()
        await asyncio.gather(reads[1], return_exceptions=True)
        machine.workers["read"].release()
        results = await asyncio.gather(reads[0], reads[2])
        assert all(len(entries) == 3 for entries, _ in results)
        assert (budget.used_bytes, "0 waiting" in repr(budget)) == (0, True)


async def test_a_wait_that_ends_in_the_turn_in_which_room_comes_takes_nothing() -> None:
    budget = ReadingBudget(10)
    await budget.take(10)
    waiting = asyncio.ensure_future(budget.take(5))
    await asyncio.sleep(0)
    waiting.cancel()
    budget.give_back(10)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert budget.used_bytes == 0


async def test_a_cancelled_wait_gives_its_turn_on_whenever_it_is_cancelled() -> None:
    budget = ReadingBudget(10)
    assert await budget.take(99) == 10  # a wish beyond the limit gets the limit
    first, second = asyncio.ensure_future(budget.take(10)), asyncio.ensure_future(budget.take(10))
    await asyncio.sleep(0)
    budget.give_back(10)  # granted to `first` …
    first.cancel()  # … which is cancelled before it hears of it
    await asyncio.gather(first, return_exceptions=True)
    assert await second == 10
    budget.give_back(10)
    assert budget.used_bytes == 0


@pytest.mark.parametrize("seed", range(20))
async def test_cached_runs_written_blocks_and_gaps_are_read_as_one(seed: int) -> None:
    """A striped ledger, half of it flushed: every id of every chunk is here or certainly not, in few looks at the disk."""
    rng = random.Random(seed)
    machine = Machine(seed, small_settings(write_cache_bytes=1 << 20))
    async with machine.bookie() as bookie:
        held = sorted(rng.sample(range(400), 200))
        for entry_id in held:
            await added(bookie, group_of(7, entry_id))
            if rng.random() < 0.01:
                await bookie.checkpoint()
        looks = 0
        run = machine.workers["read"].run

        async def counted(work: object) -> object:
            nonlocal looks
            looks += 1
            return await run(work)  # type: ignore[arg-type]

        machine.workers["read"].run = counted  # type: ignore[method-assign, assignment]
        for first, last, max_bytes in [(0, 399, 1 << 20), (rng.randrange(400), 399, 1 << 20), (0, 399, 500), (5, 300, 1)]:
            entries, missing = await read_all(bookie, 7, first, last, max_bytes=max_bytes)
            reached = max([*entries, *missing])
            assert list(entries) == [e for e in held if first <= e <= reached]
            assert list(missing) == [e for e in range(first, reached + 1) if e not in held]
            assert set(missing.values()) <= {Status.NO_ENTRY}
            assert reached == last or sum(map(len, entries.values())) >= max_bytes
        assert looks <= 24, "gaps are looked up together"
