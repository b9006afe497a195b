"""What is kept of blocks between two requests, what is read ahead, and what never stays."""

from __future__ import annotations

import threading

import pytest

from cepheid_bookie.block_cache import BlockCache
from cepheid_bookie.block_index import BlockRef
from cepheid_bookie.settings import StorageSettings
from cepheid_ledger import LedgerSettings
from cepheid_rpc import EntryGroup, ReadRequest, Status
from tests.bookie.bookie_support import KiB, Machine, added, entries_of, group_of, read_all, settle, small_settings
from tests.support import wait_until


def ref(number: int, *, ledger: int = 7, length: int = 100) -> BlockRef:
    return BlockRef(ledger, 10 * number, 10 * number + 9, 1, 4096 * number, length)


class Log:
    """Gives any block, and notes which."""

    def __init__(self) -> None:
        self.read: list[BlockRef] = []

    def __call__(self, block: BlockRef) -> tuple[Status, EntryGroup | None]:
        self.read.append(block)
        return Status.OK, group_of(block.ledger_id, block.first_entry_id, 10)


def fetch(cache: BlockCache, block: BlockRef, log: Log, *, finished: bool = False, now: float = 0.0) -> bool:
    """Whether it came from the cache."""
    generation = cache.generation
    _, group, was_cached = cache.fetch(block, log)
    assert group is not None
    cache.settle(block, group, finished=finished, generation=generation, now=now)
    return was_cached


def test_a_finished_block_leaves_before_one_that_a_reader_is_in_the_middle_of() -> None:
    cache, log = BlockCache(300), Log()
    fetch(cache, ref(0), log)
    fetch(cache, ref(1), log, finished=True)
    fetch(cache, ref(2), log)
    fetch(cache, ref(3), log)
    assert [fetch(cache, ref(n), log) for n in (0, 2, 3)] == [True] * 3
    assert cache.used_bytes == 300
    assert not fetch(cache, ref(1), log)


def test_a_block_larger_than_the_cache_is_not_kept() -> None:
    cache, log = BlockCache(50), Log()
    assert not fetch(cache, ref(0), log)
    assert cache.used_bytes == 0


def test_blocks_read_ahead_have_half_of_the_room_and_a_few_seconds() -> None:
    cache, log = BlockCache(400), Log()
    assert all(cache.read_ahead(ref(n), log, generation=0, now=1.0) for n in (0, 1, 1, 0))
    assert log.read == [ref(0), ref(1)]
    assert not cache.read_ahead(ref(2), log, generation=0, now=5.0), "two others wait for their readers"
    for n in range(10, 20):
        fetch(cache, ref(n), log)
    assert fetch(cache, ref(1), log), "other readers have not pushed it out"
    assert cache.read_ahead(ref(2), log, generation=0, now=8.0)
    assert not fetch(cache, ref(0), log), "its reader did not come"
    assert cache.used_bytes <= 400


def test_reading_ahead_takes_no_room_from_readers_in_the_middle_of_a_block() -> None:
    cache, log = BlockCache(400), Log()
    for n in range(3):
        fetch(cache, ref(n), log, now=1.0)
    fetch(cache, ref(3), log, finished=True, now=1.0)
    assert cache.read_ahead(ref(4), log, generation=0, now=2.0), "instead of the finished one"
    assert not cache.read_ahead(ref(5), log, generation=0, now=2.0)
    assert [fetch(cache, ref(n), log, now=6.5) for n in (1, 2)] == [True, True]
    assert cache.read_ahead(ref(5), log, generation=0, now=6.6), "the reader of block 0 has gone"
    assert not fetch(cache, ref(0), log, now=6.7)


def test_nothing_of_a_forgotten_ledger_stays_or_comes_back() -> None:
    cache, log = BlockCache(1000), Log()
    before = cache.generation
    for number in (0, 1):
        fetch(cache, ref(number), log)
        fetch(cache, ref(number, ledger=8), log)
    cache.read_ahead(ref(2), log, generation=before, now=0.0)
    cache.forget([7])
    assert cache.used_bytes == 200
    group = group_of(7, 0, 10)
    cache.settle(ref(0), group, finished=False, generation=before, now=0.0)  # by a reader that asked the index before
    cache.read_ahead(ref(3), log, generation=before, now=0.0)
    assert cache.used_bytes == 200


def test_a_reader_waits_for_a_block_that_is_being_read_ahead() -> None:
    cache, log, begun, goes_on = BlockCache(1000), Log(), threading.Event(), threading.Event()

    def slow(block: BlockRef) -> tuple[Status, EntryGroup | None]:
        begun.set()
        assert goes_on.wait(5)
        return log(block)

    ahead = threading.Thread(target=lambda: cache.read_ahead(ref(0), slow, generation=0, now=0.0))
    ahead.start()
    assert begun.wait(5)
    found: list[bool] = []
    reader = threading.Thread(target=lambda: found.append(fetch(cache, ref(0), log)))
    reader.start()
    goes_on.set()
    ahead.join(5)
    reader.join(5)
    assert (found, log.read) == ([True], [ref(0)])


def test_a_block_that_cannot_be_read_ahead_is_left_to_its_reader() -> None:
    cache, log = BlockCache(1000), Log()
    assert not cache.read_ahead(ref(0), lambda _: (Status.BAD_DIGEST, None), generation=0, now=0.0)

    def broken(_: BlockRef) -> tuple[Status, EntryGroup | None]:
        raise OSError("the disk is unhappy")

    with pytest.raises(OSError, match="unhappy"):
        cache.read_ahead(ref(0), broken, generation=0, now=0.0)
    assert not fetch(cache, ref(0), log)


async def test_a_reader_in_sequence_reads_each_block_once_and_ahead() -> None:
    machine = Machine(settings=small_settings(write_cache_bytes=1 << 20, block_bytes=32 * KiB, log_bytes=1 << 20))
    async with machine.bookie() as bookie:
        groups = [group_of(7, first, 4, size=960) for first in range(0, 800, 4)]  # 800 KB, 25 blocks
        await added(bookie, *groups)
        await bookie.checkpoint()
        blocks = sum(1 for _ in machine.index.blocks())
        entries, position = {}, 0
        while position < 800:  # as a broker reads: as many bytes as a block has, and from another place in it
            async for answer in bookie.read(ReadRequest(7, position, 799, 30 * KiB)):
                entries |= entries_of(answer.groups)
                position = answer.next_entry_id
            await settle()
        assert entries == entries_of(groups)
        counters = bookie._reader.counters
        assert counters.disk_blocks == blocks, "each is read once"
        assert counters.blocks_ahead >= blocks - 2
        assert bookie._reader._budget.used_bytes == 0


async def test_nothing_is_read_ahead_of_those_who_do_not_continue_or_while_others_wait() -> None:
    machine = Machine(settings=small_settings(write_cache_bytes=1 << 20, block_bytes=32 * KiB, log_bytes=1 << 20))
    async with machine.bookie() as bookie:
        await added(bookie, *(group_of(7, first, 4, size=960) for first in range(0, 800, 4)))
        await bookie.checkpoint()
        for first in (100, 700, 300, 500):
            await read_all(bookie, 7, first, 799, max_bytes=10 * KiB)
        await settle()
        assert bookie._reader.counters.blocks_ahead == 0
        assert bookie._reader._budget.take_nowait(31 << 20)
        await read_all(bookie, 7, 0, 799, max_bytes=10 * KiB)
        await read_all(bookie, 7, 11, 799, max_bytes=10 * KiB)
        await settle()
        assert bookie._reader.counters.blocks_ahead == 0
        bookie._reader._budget.give_back(31 << 20)


async def test_a_deleted_ledger_leaves_the_cache() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        for ledger_id in (7, 8):
            await added(bookie, *(group_of(ledger_id, first, 4, size=900) for first in range(0, 40, 4)))
        await bookie.checkpoint()
        for ledger_id in (7, 8):
            await read_all(bookie, ledger_id, 0, 39, max_bytes=5000)
        cache = bookie._reader._blocks
        assert cache.used_bytes > 0
        await bookie.delete_ledgers([7])
        copy = await bookie.look_at_copy(8)
        assert copy is not None
        assert await bookie.drop_copy(copy)
        assert cache.used_bytes == 0
        assert (await read_all(bookie, 7, 0, 0))[1] == {0: Status.NO_LEDGER}
        assert (await read_all(bookie, 8, 0, 0))[1] == {0: Status.NO_ENTRY}


async def test_a_read_that_waited_too_long_is_refused_and_read_for_nobody() -> None:
    machine = Machine(settings=small_settings(reading_bytes=1 << 20, read_wait_s=0.05))
    async with machine.bookie() as bookie:
        await added(bookie, group_of(7, 0, 3))
        await bookie.checkpoint()
        assert bookie._reader._budget.take_nowait(1 << 20)
        assert (await read_all(bookie, 7, 0, 2))[1] == dict.fromkeys(range(3), Status.OVERLOADED)  # it waited for the budget
        bookie._reader._budget.give_back(1 << 20)
        machine.workers["read"].takes_s = 0.1
        assert (await read_all(bookie, 7, 0, 2))[1] == dict.fromkeys(range(3), Status.OVERLOADED)  # for a thread
        assert len((await read_all(bookie, 7, 0, 2, fence=True))[0]) == 3, "a recovery has no time limit here"
        assert (bookie._reader.counters.expired, bookie._reader.counters.disk_chunks) == (2, 1)
        machine.workers["read"].takes_s = 0.0
        assert len((await read_all(bookie, 7, 0, 2))[0]) == 3
        await wait_until(lambda: bookie._reader._budget.used_bytes == 0)


def test_a_bookie_gives_up_on_a_read_before_its_broker_does() -> None:
    assert StorageSettings().read_wait_s < LedgerSettings().read_timeout_s
