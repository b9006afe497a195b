"""Ledger ids: never twice, whatever happens to processes and answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cepheid_metadata import (
    LedgerIdCounter,
    LedgerIds,
    LedgerIdsRolledBackError,
    MemoryStore,
    MemoryTree,
    StoreUnavailableError,
    keys,
)


async def test_ids_are_unique_among_processes_and_restarts() -> None:
    tree = MemoryTree()
    stores = [MemoryStore(tree) for _ in range(3)]
    taken: list[int] = []
    for _ in range(4):  # each round is a restart of all three
        processes = [LedgerIds(store, block=7) for store in stores]
        taken += await asyncio.gather(*(ids.take() for _ in range(10) for ids in processes))
    assert len(set(taken)) == len(taken) == 120
    assert min(taken) == 1


async def test_one_process_takes_a_block_once_for_many_callers() -> None:
    store = MemoryStore(MemoryTree())
    ids = LedgerIds(store, block=100)
    assert sorted(await asyncio.gather(*(ids.take() for _ in range(250)))) == list(range(1, 251))
    found = await store.get(keys.LEDGER_IDS_KEY)
    assert found is not None
    assert LedgerIdCounter.decode(found.value, keys.LEDGER_IDS_KEY).next_ledger_id == 301


class LosesAnswers(MemoryStore):
    """Every other write of the counter happens, but its answer is lost."""

    writes = 0

    async def put(self, key: str, value: bytes, expected_version: int) -> int:
        version = await super().put(key, value, expected_version)
        self.writes += 1
        if self.writes % 2:
            raise StoreUnavailableError("the answer was lost", outcome_unknown=True)
        return version


async def test_a_lost_answer_costs_a_block_and_nothing_else() -> None:
    ids = LedgerIds(LosesAnswers(MemoryTree()), block=2)
    taken, refused = [], 0
    for _ in range(20):
        try:
            taken.append(await ids.take())
        except StoreUnavailableError:
            refused += 1
    assert len(set(taken)) == len(taken)
    assert refused > 3


async def test_ids_rise_along_a_chain_that_changes_hands() -> None:
    tree = MemoryTree()
    one, other = LedgerIds(MemoryStore(tree), block=10), LedgerIds(MemoryStore(tree), block=10)
    assert await one.take() == 1
    assert await other.take() == 11
    assert await one.take(above=11) == 21
    assert await one.take(above=25) == 26
    assert await one.take(above=3) == 27
    with pytest.raises(LedgerIdsRolledBackError, match="ledger 500 exists, but the id counter is at 31"):
        await one.take(above=500)


async def test_a_counter_below_an_existing_ledger_is_found() -> None:
    store = MemoryStore(MemoryTree())
    ids = LedgerIds(store, block=10)
    await ids.check()
    await store.create(keys.ledger_key(await ids.take()), b"")
    await ids.check()
    await store.create(keys.ledger_key(11), b"")
    with pytest.raises(LedgerIdsRolledBackError, match="ledger 11 exists, but the id counter is at 11"):
        await ids.check()


async def test_after_a_dropped_block_ids_are_new_to_everybody() -> None:
    store = MemoryStore(MemoryTree())
    ids, other = LedgerIds(store, block=100), LedgerIds(store, block=100)
    assert [await ids.take(), await other.take()] == [1, 101]
    ids.drop_block()
    assert await ids.take() == 201, "2 was not taken, but the counter had given it out"
    assert await other.take() == 102


async def test_a_block_that_was_on_its_way_when_it_was_dropped_is_not_used() -> None:
    ids: LedgerIds

    class DropsInBetween(MemoryStore):
        async def create(self, *given: Any, **options: Any) -> int:
            version = await super().create(*given, **options)
            ids.drop_block()  # the block is taken, and its taker has not heard of it yet
            return version

    ids = LedgerIds(DropsInBetween(MemoryTree()), block=100)
    assert await ids.take() == 101


async def test_the_newest_id_is_above_all_that_anybody_had() -> None:
    tree = MemoryTree()
    one, other = LedgerIds(MemoryStore(tree), block=10), LedgerIds(MemoryStore(tree), block=10)
    assert [await one.take(), await other.take()] == [1, 11]
    assert await one.take(newest=True) == 21
    assert await one.take() == 22
    assert await other.take() == 12
    assert await other.take(newest=True) == 31


async def test_who_has_the_newest_block_goes_on_with_it() -> None:
    tree = MemoryTree()
    one, other = LedgerIds(MemoryStore(tree), block=10), LedgerIds(MemoryStore(tree), block=10)
    assert [await one.take(newest=True) for _ in range(3)] == [1, 2, 3]
    assert [await other.take(newest=True) for _ in range(3)] == [11, 12, 13]
    assert [await one.take(newest=True) for _ in range(9)] == [*range(21, 30)]
    assert await other.take() == 14
    assert [await one.take(newest=True) for _ in range(2)] == [30, 31], "its block was used up"
    one.drop_block()
    assert await one.take(newest=True) == 41, "32 is the newest, and of a block that may not be used"


async def test_a_read_of_the_past_does_not_tell_whose_block_is_the_newest() -> None:
    class Behind(MemoryStore):
        past: Any = None

        async def get(self, key: str) -> Any:
            now = await super().get(key)
            past, self.past = self.past, None
            return past or now

    tree = MemoryTree()
    store = Behind(tree)
    one, other = LedgerIds(store, block=10), LedgerIds(MemoryStore(tree), block=10)
    assert await one.take() == 1
    past = await store.get(keys.LEDGER_IDS_KEY)
    assert await other.take() == 11
    store.past = past
    assert await one.take(newest=True) == 21


async def test_many_that_want_the_newest_id_take_no_block_each() -> None:
    class Slow(MemoryStore):
        async def put(self, *given: Any, **options: Any) -> int:
            await asyncio.sleep(0)
            return await super().put(*given, **options)

    store = Slow(MemoryTree())
    ids = LedgerIds(store, block=1_000)
    await ids.take()
    taken = await asyncio.gather(*(ids.take(newest=True) for _ in range(200)))
    assert len(set(taken)) == 200
    found = await store.get(keys.LEDGER_IDS_KEY)
    assert found is not None
    assert LedgerIdCounter.decode(found.value, keys.LEDGER_IDS_KEY).next_ledger_id <= 3_001
