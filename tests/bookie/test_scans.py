"""Scans at the bookie: their own threads, budget and bound; whole blocks; one chunk per turn of the loop; the ticket."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing

from cepheid_bookie import Bookie
from cepheid_bookie.scans import CACHED_GROUPS, LoopTurns
from cepheid_rpc import MAX_MESSAGE_BYTES, MissingEntries, ReadAnswer, ReadRequest, Status
from tests.bookie.bookie_support import KEY, KiB, Machine, added, entries_of, group_of, read_all, settle, small_settings


async def scan(bookie: Bookie, first: int, last: int, **fields: object) -> list[ReadAnswer]:
    request = ReadRequest(7, first, last, max_bytes=1 << 40, scan=True, **fields)  # type: ignore[arg-type]
    return [chunk async for chunk in bookie.read(request)]


def groups_in(chunks: Sequence[ReadAnswer]) -> dict[int, bytes]:
    return entries_of(group for chunk in chunks for group in chunk.groups)


async def test_a_scan_gives_what_a_read_gives() -> None:
    async with Machine(settings=small_settings(write_cache_bytes=1 << 20)).bookie() as bookie:
        held = [group_of(7, first, 5, size=900) for first in (*range(0, 100, 5), 110)]
        await added(bookie, *held)
        for _ in range(2):  # from the cache, then from blocks
            entries, missing = await read_all(bookie, 7, 0, 120)
            chunks = await scan(bookie, 0, 120)
            assert groups_in(chunks) == entries == entries_of(held)
            runs = [run for chunk in chunks for run in chunk.missing]
            told = {entry_id for run in runs for entry_id in range(run.first_entry_id, run.last_entry_id + 1)}
            assert told == set(missing)
            await bookie.checkpoint()
        statistics = bookie.statistics()
        assert statistics.scan_requests == 2
        assert statistics.scan_cache_chunks > 0
        assert statistics.scan_disk_chunks > 0
        assert statistics.scan_sent_bytes == 2 * sum(map(len, entries.values()))
        assert statistics.open_scans == 0


async def test_no_block_is_read_twice() -> None:
    """A chunk that ends in the middle of a block would read that block again for its other half."""
    machine = Machine(settings=small_settings(write_cache_bytes=8 << 20, block_bytes=300 * KiB, log_bytes=16 << 20))
    async with machine.bookie() as bookie:
        await added(bookie, *[group_of(7, first, 20, size=5_000) for first in range(0, 600, 20)])
        await bookie.checkpoint()
        blocks = list(machine.index.blocks())
        chunks = await scan(bookie, 0, 599)
        assert len(groups_in(chunks)) == 600
        assert bookie.statistics().scan_disk_bytes == sum(block.length for block in blocks)
        assert len(chunks) < len(blocks), "several to a chunk"
        assert max(sum(len(group.data) for group in chunk.groups) for chunk in chunks) <= MAX_MESSAGE_BYTES
        large = await scan(bookie, 0, 599, chunk_bytes=4 * MAX_MESSAGE_BYTES)
        assert len(large) < len(chunks)


async def test_a_block_larger_than_a_chunk_comes_whole() -> None:
    machine = Machine(settings=small_settings(write_cache_bytes=16 << 20, block_bytes=3 << 20, log_bytes=16 << 20))
    async with machine.bookie() as bookie:
        await added(bookie, *[group_of(7, first, 1, size=500_000) for first in range(12)])
        await bookie.checkpoint()
        chunks = await scan(bookie, 0, 11)
        assert len(chunks) == len(list(machine.index.blocks()))
        assert bookie.statistics().scan_disk_bytes == sum(block.length for block in machine.index.blocks())


async def test_a_chunk_of_blocks_and_cache_is_no_larger_than_one_of_either() -> None:
    """Together they were more than gRPC carries, and no retry would have changed that."""
    machine = Machine(settings=small_settings(write_cache_bytes=32 << 20, block_bytes=1 << 20, log_bytes=64 << 20))
    async with machine.bookie() as bookie:
        held = [group_of(7, first, 10, size=95_000) for first in range(0, 160, 10)]  # 15 MB, then as much
        await added(bookie, *held[:8])
        await bookie.checkpoint()
        await added(bookie, *held[8:])
        chunks = await scan(bookie, 0, 159, chunk_bytes=8 * MAX_MESSAGE_BYTES)
        assert groups_in(chunks) == entries_of(held)
        sizes = [sum(len(group.data) for group in chunk.groups) for chunk in chunks]
        assert max(sizes) <= 9 * MAX_MESSAGE_BYTES, "soft by an entry or a block"
        assert len(sizes) == 2, "and blocks and cache come together"


async def test_scans_that_nobody_reads_hold_little() -> None:
    """128 with chunks of 8 MiB took 2.9 GB."""
    machine = Machine(settings=small_settings(write_cache_bytes=32 << 20, block_bytes=1 << 20, log_bytes=64 << 20))
    async with machine.bookie(open_scans=16) as bookie, AsyncExitStack() as opened:
        await added(bookie, *[group_of(7, first, 10, size=95_000) for first in range(0, 100, 10)])
        await bookie.checkpoint()
        request = ReadRequest(7, 0, 99, max_bytes=1 << 40, scan=True, chunk_bytes=8 * MAX_MESSAGE_BYTES)
        held_bytes = []
        for _ in range(16):
            chunks = await opened.enter_async_context(aclosing(bookie.read(request)))
            held_bytes.append(sum(len(group.data) for group in (await anext(chunks)).groups))
        assert min(held_bytes[:2]) > 7 * MAX_MESSAGE_BYTES, "a few get what they ask for"
        assert max(held_bytes[2:]) <= MAX_MESSAGE_BYTES
        await opened.aclose()
        assert bookie.statistics().open_scans == 0
        assert len(await scan(bookie, 0, 99, chunk_bytes=8 * MAX_MESSAGE_BYTES)) == 2, "and so does who comes later"


async def test_small_cached_groups_come_a_few_at_a_time() -> None:
    """Each costs the loop, not its bytes."""
    async with Machine(settings=small_settings(write_cache_bytes=1 << 20)).bookie() as bookie:
        await added(bookie, *[group_of(7, first) for first in range(1_000)])
        chunks = await scan(bookie, 0, 999)
        assert len(groups_in(chunks)) == 1_000
        assert max(len(chunk.groups) for chunk in chunks) == CACHED_GROUPS


async def test_adds_and_brokers_reads_do_not_wait_for_scans() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        await added(bookie, *[group_of(7, first, 5, size=900) for first in range(0, 100, 5)])
        await bookie.checkpoint()
        machine.workers["scan"].hold()
        scanning = asyncio.ensure_future(scan(bookie, 0, 99))
        await settle()
        assert not scanning.done()
        await added(bookie, group_of(8, 0, 3))
        assert len((await read_all(bookie, 7, 0, 99))[0]) == 100
        machine.workers["scan"].release()
        assert len(groups_in(await scanning)) == 100


async def test_too_many_scans_are_told_when_to_come_back() -> None:
    machine = Machine()
    async with machine.bookie(open_scans=2, scan_retry_s=0.75) as bookie:
        await added(bookie, group_of(7, 0, 5))
        await bookie.checkpoint()
        machine.workers["scan"].hold()
        running = [asyncio.ensure_future(scan(bookie, 0, 4)) for _ in range(2)]
        await settle()
        refusal = ReadAnswer((), (MissingEntries(1, 3, Status.OVERLOADED),), 4, retry_after_ms=750)
        assert await scan(bookie, 1, 3) == [refusal]
        assert bookie.statistics().scans_refused == 1
        assert bookie.statistics().open_scans == 2
        running[0].cancel()
        await asyncio.wait(running[:1])
        machine.workers["scan"].release()
        assert len(groups_in(await scan(bookie, 0, 4))) == 5
        await running[1]
        assert bookie.statistics().open_scans == 0


async def test_a_ticket_is_judged_before_anything_is_told() -> None:
    async with Machine().bookie() as bookie:
        await added(bookie, group_of(7, 0, 5))
        seen: list[tuple[bytes, int, int, int]] = []

        def authorize(ticket: bytes, ledger_id: int, first: int, last: int) -> Status:
            seen.append((ticket, ledger_id, first, last))
            return Status.OK if ticket == b"good" else Status.UNAUTHORIZED

        bookie.authorize_reads(authorize)
        assert len(groups_in(await scan(bookie, 1, 3, ticket=b"good"))) == 3
        refusal = [ReadAnswer((), (MissingEntries(1, 9, Status.UNAUTHORIZED),), 10)]
        assert await scan(bookie, 1, 9, ticket=b"bad") == refusal
        unknown = [chunk async for chunk in bookie.read(ReadRequest(99, 1, 9, scan=True))]
        assert unknown == refusal, "whether there is such a ledger is not told either"
        assert seen == [(b"good", 7, 1, 3), (b"bad", 7, 1, 9), (b"", 99, 1, 9)]
        assert bookie.statistics().scans_unauthorized == 2
        assert len((await read_all(bookie, 7, 0, 4))[0]) == 5, "brokers have none"


async def test_a_scan_never_fences() -> None:
    async with Machine().bookie() as bookie:
        await added(bookie, group_of(7, 0, 2))
        (answer,) = await scan(bookie, 0, 1, fence=True, master_key=KEY)
        assert answer.missing[0].status is Status.BAD_REQUEST
        await added(bookie, group_of(7, 2, 2))


async def test_a_stopped_bookie_ends_scans() -> None:
    bookie = await Machine(settings=small_settings(write_cache_bytes=1 << 20)).open()
    await added(bookie, *[group_of(7, first) for first in range(2 * CACHED_GROUPS)])
    chunks = bookie.read(ReadRequest(7, 0, 199, max_bytes=1 << 30, scan=True))
    await anext(chunks)
    await bookie.aclose()
    assert (await anext(chunks)).missing[0].status is Status.STOPPED
    await chunks.aclose()
    (answer,) = await scan(bookie, 0, 9)
    assert answer.missing[0].status is Status.STOPPED


async def test_one_of_many_goes_on_per_turn_of_the_loop() -> None:
    turns, order = LoopTurns(), []
    turn = 0

    async def work(name: int) -> None:
        for _ in range(3):
            await turns.wait()
            order.append((turn, name))

    tasks = [asyncio.ensure_future(work(name)) for name in range(4)]
    while not all(task.done() for task in tasks):
        turn += 1
        await asyncio.sleep(0)
        assert turn < 100
    assert len({when for when, _ in order}) == len(order) == 12, "never two in one turn"
    assert [name for _, name in order[:4]] == [0, 1, 2, 3], "first come, first served"
    assert turns.waits > 0


async def test_a_waiter_that_gave_up_holds_nobody_back() -> None:
    turns = LoopTurns()
    tasks = [asyncio.ensure_future(turns.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    tasks[1].cancel()
    for _ in range(3):  # the turn, the third waiter, and whoever looks at it
        await asyncio.sleep(0)
    assert [task.done() and not task.cancelled() for task in tasks] == [False, False, True], "it has the first turn"
    assert turns.waits == 2
    async with asyncio.timeout(10):
        await turns.wait()
    assert turns.waits == 2, "nobody was before the next one"


async def test_scans_wait_for_each_other_before_they_send() -> None:
    async with Machine(settings=small_settings(write_cache_bytes=1 << 20)).bookie() as bookie:
        await added(bookie, *[group_of(7, first) for first in range(4 * CACHED_GROUPS)])
        for chunks in await asyncio.gather(*[scan(bookie, 0, 4 * CACHED_GROUPS - 1) for _ in range(5)]):
            assert len(groups_in(chunks)) == 4 * CACHED_GROUPS
        assert bookie.statistics().scan_waits >= 4
