"""A bookie that serves before it has found all ledgers in its index: nothing is denied for that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from cepheid_bookie import Bookie, ledger_table
from cepheid_bookie.block_index import BlockRef
from cepheid_bookie.entry_log import log_path
from cepheid_bookie.errors import LedgersNotListedError
from cepheid_bookie.held_ledgers import held_ledgers
from cepheid_bookie.memory_index import MemoryBlockIndex
from cepheid_rpc import LacRequest, Status
from tests.bookie.bookie_support import KEY, Machine, add, added, group_of, read_all, small_settings
from tests.support import wait_until

HELD = range(1, 20)


@asynccontextmanager
async def unlisted(machine: Machine) -> AsyncIterator[Bookie]:
    """A bookie with ledgers 1 to 19, of which only the first is listed until its read thread is released."""
    async with machine.bookie() as bookie:
        await added(bookie, *(group_of(ledger_id, 0, 3) for ledger_id in HELD))
        await bookie.read_lac(LacRequest(18, KEY, fence=True))
        await bookie.delete_ledgers([17])
    machine.listed_at_start = 1
    bookie = await machine.open()
    machine.workers["read"].hold()
    try:
        assert not bookie.ledgers_listed
        yield bookie
    finally:
        machine.workers["read"].release()
        await bookie.aclose()


async def test_what_is_not_listed_yet_is_read_from_the_index_and_never_denied() -> None:
    machine = Machine()
    async with unlisted(machine) as bookie:
        machine.workers["read"].release()
        entries, missing = await read_all(bookie, 15, 0, 3)
        assert (len(entries), missing) == (3, {3: Status.NO_ENTRY})
        assert (await read_all(bookie, 17, 0, 0))[1] == {0: Status.NO_LEDGER}, "it is deleted"
        assert (await read_all(bookie, 99, 0, 0))[1] == {0: Status.NO_LEDGER}, "the index says so"
        assert (await bookie.read_lac(LacRequest(98, KEY))).status is Status.NO_LEDGER


async def test_adds_find_fence_key_and_tombstone_of_a_ledger_that_is_not_listed_yet() -> None:
    machine = Machine()
    async with unlisted(machine) as bookie:
        groups = [group_of(ledger_id, 3) for ledger_id in (15, 17, 18, 50)]
        answers = await add(bookie, *groups)
        assert {answer.ledger_id: answer.status for answer in answers} == {
            15: Status.OK,
            17: Status.FENCED,
            18: Status.FENCED,
            50: Status.OK,
        }
        (answer,) = await add(bookie, group_of(14, 3), key=b"x" * 16)
        assert answer.status is Status.UNAUTHORIZED
        assert not bookie.ledgers_listed
        machine.workers["read"].release()
        await bookie.wait_listed()
        assert bookie.ledgers() == [ledger_id for ledger_id in [*HELD, 50] if ledger_id != 17]


async def test_an_add_does_not_wait_for_the_look_that_a_reader_has_asked_for() -> None:
    machine = Machine()
    async with unlisted(machine) as bookie:
        lac = asyncio.ensure_future(bookie.read_lac(LacRequest(15, KEY)))
        await asyncio.sleep(0)
        await added(bookie, group_of(15, 3))
        await lac
        machine.workers["read"].release()  # the reader's look ends now, and what it has seen is out of date
        await bookie.wait_listed()
        assert (await bookie.read_lac(LacRequest(15, KEY))).status is Status.OK
        assert (await read_all(bookie, 15, 0, 3))[1] == {}


async def test_a_ledger_that_is_created_during_a_look_is_not_what_the_look_finds() -> None:
    """The look began before the listing was complete, and ends after the new ledger has left memory."""
    machine = Machine(settings=small_settings(loaded_ledgers=1))
    async with unlisted(machine) as bookie:
        held = machine.workers["read"]
        reader = asyncio.ensure_future(bookie.read_lac(LacRequest(50, KEY)))
        await asyncio.sleep(0.01)
        assert held._held is not None
        look = held._held.pop(0)
        held.release()
        await bookie.wait_listed()  # ledger 50 is certainly new now
        await added(bookie, group_of(50, 0, 3))
        await bookie.checkpoint()
        bookie._ledgers._evict()
        bookie._ledgers._loaded.pop(50, None)
        held._pending -= 1
        look[1]((None, -1), None)
        assert (await reader).status is Status.OK
        assert (await add(bookie, group_of(50, 3)))[0].status is Status.OK, "its key is not forgotten"


async def test_counts_and_pages_are_complete_once_all_is_listed() -> None:
    machine = Machine()
    async with unlisted(machine) as bookie:
        assert bookie.largest_ledger_id == HELD[-1], "complete from the start on"
        with pytest.raises(LedgersNotListedError):
            held_ledgers(bookie, -1)
        machine.workers["read"].release()
        await bookie.wait_listed()
        assert bookie.ledger_count == len(held_ledgers(bookie, -1)["ledgers"]) == len(HELD) - 1


async def test_a_listing_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_table, "_LISTING_RETRY_S", 0.01)
    machine = Machine()
    async with unlisted(machine) as bookie:
        fail_once(machine.index)
        machine.workers["read"].release()
        await bookie.wait_listed()
        assert bookie.ledger_count == len(HELD) - 1


async def test_a_ledger_that_is_forgotten_meanwhile_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice that was read before still has its tombstone."""
    monkeypatch.setattr(ledger_table, "_LISTING_RETRY_S", 0.5)
    machine = Machine()
    async with unlisted(machine) as bookie:
        fail_once(machine.index)
        machine.workers["read"].release()
        await wait_until(lambda: "fail" not in repr(machine.index.ledger_ids), what="the failure of the first slice")
        await bookie.delete_ledgers([16])
        read_before = machine.index.ledger_ids(1, 100)
        assert (16, True) in read_before
        assert await bookie._deletion.forget_tombstones(1 << 62) == 1, "17 is not listed yet"
        machine.index.ledger_ids = lambda above, limit: [found for found in read_before if found[0] > above]  # type: ignore[method-assign]
        await bookie.wait_listed()
        assert not {16, 17} & set(bookie.ledgers())
        (answer,) = await add(bookie, group_of(16, 0), key=b"n" * 16)
        assert answer.status is Status.OK, "it is a new ledger"


def fail_once(index: MemoryBlockIndex) -> None:
    ledger_ids = index.ledger_ids

    def fail(above: int, limit: int) -> list[tuple[int, bool]]:
        index.ledger_ids = ledger_ids  # type: ignore[method-assign]
        raise OSError("the database is unhappy")

    index.ledger_ids = fail  # type: ignore[method-assign]


async def test_a_restart_after_a_crash_does_not_read_the_whole_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the newest entry log may be of a start that failed."""
    machine, walks = Machine(), 0
    blocks = machine.index.blocks

    def counted() -> Iterator[BlockRef]:
        nonlocal walks
        walks += 1
        return blocks()

    monkeypatch.setattr(machine.index, "blocks", counted)
    bookie = await machine.open()
    await added(bookie, *(group_of(ledger_id, 0, 3) for ledger_id in HELD))
    await bookie.checkpoint()
    await added(bookie, group_of(5, 3))
    machine.restart()
    bookie = await machine.open()
    assert (await read_all(bookie, 5, 0, 3))[1] == {}
    walks_of_restart, walks = walks, 0
    await added(bookie, group_of(5, 4))
    machine.restart()
    left_behind = machine.disk.open(log_path(77), create=True)  # by a start that failed
    left_behind.sync()
    machine.disk.sync_dir("entrylog")
    async with machine.bookie() as bookie:
        assert (await read_all(bookie, 5, 0, 4))[1] == {}
        assert (walks_of_restart, walks, machine.disk.exists(log_path(77))) == (0, 1, False)
