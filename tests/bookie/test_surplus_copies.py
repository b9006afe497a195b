"""Surplus copies are dropped; what a replication worker copies to this bookie meanwhile never is."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations
from unittest import mock

import pytest

from cepheid_bookie import Bookie, GarbageCollector, MetadataLedgers
from cepheid_bookie.bookie_metrics import bookie_families
from cepheid_bookie.ledger_deletion import HeldCopy, LedgerDeletion
from cepheid_bookie.surplus_copies import SurplusCopies
from cepheid_metadata import (
    BadVersionError,
    DeletedLedgers,
    Found,
    Fragment,
    LedgerMetadata,
    LedgerState,
    MemoryStore,
    MemoryTree,
    Records,
    RepairMark,
    StoreUnavailableError,
    keys,
    ledger_records,
    repair_marks,
)
from cepheid_ports import Ports
from cepheid_rpc import Status
from tests.bookie.bookie_support import IDENTITY, KiB, Machine, add, added, group_of, read_all, settle
from tests.bookie.promises import Promises

HERE = IDENTITY.bookie_id
Ledgers = Records[int, LedgerMetadata]


def ledger(ledger_id: int, *ensembles: str, last: int | None = 9) -> LedgerMetadata:
    """A ledger with a fragment of five entries for each bookie; open if it has no last entry."""
    return LedgerMetadata(
        ledger_id=ledger_id,
        ensemble_size=1,
        write_quorum=1,
        ack_quorum=1,
        state=LedgerState.OPEN if last is None else LedgerState.CLOSED,
        fragments=tuple(Fragment(first_entry_id=5 * place, ensemble=(bookie,)) for place, bookie in enumerate(ensembles)),
        last_entry_id=last,
        length_bytes=None if last is None else 10 * (last + 1),
        creation_token=1,
        created_at_ms=0,
    )


async def metadata_of(*ledgers: LedgerMetadata) -> MemoryStore:
    store = MemoryStore(MemoryTree())
    for record in ledgers:
        await ledger_records(store).create(record.ledger_id, record)
    return store


async def filled(bookie: Bookie, *ledger_ids: int) -> None:
    for ledger_id in ledger_ids:
        await added(bookie, group_of(ledger_id, 0, 12))


async def held(bookie: Bookie, ledger_id: int) -> set[int]:
    return set((await read_all(bookie, ledger_id, 0, 11))[0])


async def dropped(bookie: Bookie, ledger_id: int) -> None:
    copy = await bookie.look_at_copy(ledger_id)
    assert copy is not None
    assert await bookie.drop_copy(copy)


@pytest.mark.virtual_time
async def test_a_closed_ledger_that_names_the_bookie_nowhere_is_dropped_at_the_second_pass() -> None:
    machine = Machine()
    surplus, named, still_open, restorable = ledger(1, "b2"), ledger(2, "b2", HERE), ledger(3, "b2", last=None), ledger(4, "b2")
    store = await metadata_of(surplus, named, still_open, restorable)
    await DeletedLedgers(store).delete(Found(restorable, 0), machine.now_ms, grace_ms=3_600_000)
    async with machine.bookie() as bookie:
        await filled(bookie, 1, 2, 3, 4)
        await bookie.checkpoint()
        collector = GarbageCollector(bookie, MetadataLedgers(store, machine.ports()))
        assert (await collector.collect()).surplus == ()
        assert (await collector.collect()).surplus == (1,)
        assert (await collector.collect()).surplus == (), "there is nothing left to drop"
        assert await held(bookie, 1) == set()
        for ledger_id in (2, 3, 4):
            assert await held(bookie, ledger_id) == set(range(12)), f"ledger {ledger_id} is needed, or was not closed"
        assert {block.ledger_id for block in machine.index.blocks()} == {2, 3, 4}
        samples = {family.name: family.samples[0].value for family in bookie_families(HERE, bookie.statistics())}
        assert samples["cepheid_bookie_surplus_ledgers_dropped_total"] == 1
    assert await ledger_records(store).get(1) == Found(surplus, 1), "touched once, and not changed"


@pytest.mark.virtual_time
async def test_a_dropped_ledger_stays_fenced_and_takes_copies_again() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        await filled(bookie, 1)
        await dropped(bookie, 1)
    for _ in range(2):  # and after a restart
        async with machine.bookie() as bookie:
            assert [a.status for a in await add(bookie, group_of(1, 12))] == [Status.FENCED]
            assert [a.status for a in await add(bookie, group_of(1, 3), recovery=True, key=b"x" * 16)] == [Status.UNAUTHORIZED]
            await added(bookie, group_of(1, 3, 4), recovery=True)
            assert await held(bookie, 1) == {3, 4, 5, 6}
        machine.restart()


@pytest.mark.virtual_time
async def test_a_pass_reads_a_bounded_number_of_records_and_comes_to_every_ledger() -> None:
    ledger_ids = range(1, 8)
    store = await metadata_of(*(ledger(ledger_id, "b2") for ledger_id in ledger_ids))
    async with Machine().bookie(gc_surplus_ledgers=3) as bookie:
        await filled(bookie, *ledger_ids)
        ledgers = MetadataLedgers(store, Ports())
        collector = GarbageCollector(bookie, ledgers)
        seen: list[int] = []
        while len(seen) < len(ledger_ids):
            with mock.patch.object(ledgers, "record", wraps=ledgers.record) as record:
                seen += (await collector.collect()).surplus
            assert 0 < record.call_count <= 3
        assert sorted(seen) == list(ledger_ids)


@pytest.mark.virtual_time
async def test_a_record_that_cannot_be_read_keeps_its_ledger_alone() -> None:
    store = await metadata_of(ledger(1, "b2"), ledger(2, "b2"))
    await store.put(keys.ledger_key(1), b"damaged", 0)
    async with Machine().bookie() as bookie:
        await filled(bookie, 1, 2)
        collector = GarbageCollector(bookie, MetadataLedgers(store, Ports()))
        await collector.collect()
        assert (await collector.collect()).surplus == (2,)
        assert await held(bookie, 1) == set(range(12))


@pytest.mark.virtual_time
async def test_a_touch_whose_outcome_is_unknown_or_that_was_too_late_drops_nothing() -> None:
    store = await metadata_of(ledger(1, "b2"))
    async with Machine().bookie() as bookie:
        await filled(bookie, 1)
        collector = GarbageCollector(bookie, MetadataLedgers(store, Ports()))
        for outcome, error in ((StoreUnavailableError("no answer"), StoreUnavailableError), (BadVersionError("changed"), None)):
            await collector.collect()
            with mock.patch.object(store, "put", side_effect=outcome), pytest.raises(error) if error else contextlib.nullcontext():
                await collector.collect()
            assert await held(bookie, 1) == set(range(12))


async def test_a_copy_of_a_ledger_that_waits_for_repair_stays() -> None:
    store = await metadata_of(ledger(1, "b2"))
    mark = RepairMark(ledger_id=1, bookies={}, copies_left=0, short_entries=0, short_bytes=0, since_ms=0, former=(HERE,))
    await repair_marks(store).create(1, mark)
    async with Machine().bookie() as bookie:
        await filled(bookie, 1)
        collector = GarbageCollector(bookie, MetadataLedgers(store, Ports()))
        for _ in range(3):
            assert (await collector.collect()).surplus == ()
        await repair_marks(store).delete(1, None)
        await collector.collect()
        await collector.collect()
        assert await held(bookie, 1) == set()


# a worker and a collection of one ledger, step by step

WORKER_STEPS, COLLECTOR_STEPS = 3, 6


class Turns:
    """Lets two tasks take one step at a time in a given order; both run freely when it is over."""

    def __init__(self, order: str) -> None:
        self._left = deque(order)
        self._active = ""
        self._moved = asyncio.Condition()

    async def take(self, who: str) -> None:
        """Wait for the next step of `who`; its step before is over."""
        await self._end(who)
        async with self._moved:
            await self._moved.wait_for(lambda: not self._left or self._left[0] == who)
            self._active = who

    async def leave(self, who: str) -> None:
        """End the last step of `who` and give up those that are left."""
        await self._end(who)
        self._left = deque(other for other in self._left if other != who)
        async with self._moved:
            self._moved.notify_all()

    async def _end(self, who: str) -> None:
        if self._active == who:
            self._active = ""
            if self._left:
                self._left.popleft()
            async with self._moved:
                self._moved.notify_all()


class SteppedLedgers(MetadataLedgers):
    """Metadata whose every answer is a step of the collection."""

    def __init__(self, store: MemoryStore, turns: Turns) -> None:
        super().__init__(store, Ports())
        self._turns = turns

    async def record(self, ledger_id: int) -> Found[LedgerMetadata] | None:
        await self._turns.take("g")
        return await super().record(ledger_id)

    async def touch(self, found: Found[LedgerMetadata]) -> bool:
        await self._turns.take("g")
        return await super().touch(found)


async def collect_twice(bookie: Bookie, store: MemoryStore, turns: Turns) -> None:
    surplus = SurplusCopies(bookie, SteppedLedgers(store, turns), limit=10)
    look, drop = bookie.look_at_copy, bookie.drop_copy

    async def stepped_look(ledger_id: int) -> HeldCopy | None:
        await turns.take("g")
        return await look(ledger_id)

    async def stepped_drop(copy: HeldCopy) -> bool:
        await turns.take("g")
        return await drop(copy)

    with mock.patch.multiple(bookie, look_at_copy=stepped_look, drop_copy=stepped_drop):
        for _ in range(2):
            await surplus.collect([1])
    await turns.leave("g")


async def repair(bookie: Bookie, ledgers: Ledgers, turns: Turns) -> set[int]:
    """Copy ledger 1 to this bookie as a replication worker does; return what the bookie holds when the record names it."""
    while True:
        await turns.take("w")
        found = await ledgers.get(1)
        assert found is not None
        await turns.take("w")
        await added(bookie, group_of(1, 0, 10), recovery=True)
        await turns.take("w")
        try:
            await ledgers.replace(1, found.record.replace(fragments=ledger(1, HERE).fragments), found.version)
        except BadVersionError:
            continue
        there = await held(bookie, 1)
        await turns.leave("w")
        return there


async def keeps_the_copy(order: str) -> bool:
    """Whether the bookie holds what its record says at the moment when it says so, and after the collection."""
    turns, store = Turns(order), await metadata_of(ledger(1, "b2"))
    async with Machine().bookie() as bookie:
        await filled(bookie, 1)
        there, _ = await asyncio.gather(repair(bookie, ledger_records(store), turns), collect_twice(bookie, store, turns))
        return set(range(10)) <= there & await held(bookie, 1)


def orders() -> Iterator[str]:
    steps = range(WORKER_STEPS + COLLECTOR_STEPS)
    for of_worker in combinations(steps, WORKER_STEPS):
        yield "".join("w" if step in of_worker else "g" for step in steps)


@contextlib.contextmanager
def drop_without_touch() -> Iterator[None]:
    """A worker that has copied everything by then names the bookie afterwards."""
    with mock.patch.object(SteppedLedgers, "touch", mock.AsyncMock(return_value=True)):
        yield


@contextlib.contextmanager
def drop_whatever_was_admitted_meanwhile() -> Iterator[None]:
    """A worker that reads the touched record copies before the drop, and names the bookie after it (apache/bookkeeper#4668)."""
    drop = LedgerDeletion.drop

    async def careless(self: LedgerDeletion, copy: HeldCopy) -> bool:
        return await drop(self, copy._replace(adds=copy.state.adds))

    with mock.patch.object(LedgerDeletion, "drop", careless):
        yield


@pytest.mark.virtual_time
async def test_a_worker_never_names_the_bookie_for_entries_that_a_collection_drops() -> None:
    """Scenario 19 of the list of courses, gc-meets-worker (R1): every order of the steps of both."""
    assert [order for order in orders() if not await keeps_the_copy(order)] == []


@pytest.mark.virtual_time
@pytest.mark.parametrize("mistake", [drop_without_touch, drop_whatever_was_admitted_meanwhile])
async def test_either_half_of_the_protocol_alone_loses_copies(
    mistake: Callable[[], contextlib.AbstractContextManager[None]],
) -> None:
    with mistake():
        assert [order for order in orders() if not await keeps_the_copy(order)] != []


# the drop itself: flushes, refusals, crashes


@pytest.mark.virtual_time
async def test_a_ledger_that_was_evicted_and_loaded_again_since_the_look_is_not_dropped() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        await filled(bookie, 1, 2)
    async with machine.bookie(loaded_ledgers=1) as bookie:
        copy = await bookie.look_at_copy(1)
        assert copy is not None
        await bookie.look_at_copy(2)  # two are loaded: the first is pushed out
        await asyncio.sleep(1)
        await added(bookie, group_of(1, 0), recovery=True)
        assert not await bookie.drop_copy(copy)
        assert await held(bookie, 1) == set(range(12))


@pytest.mark.virtual_time
async def test_what_is_copied_again_while_a_flush_of_the_old_entries_runs_stays() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        await filled(bookie, 1)
        machine.workers["flush"].hold()
        checkpoint = asyncio.ensure_future(bookie.checkpoint())
        await settle()
        drop = asyncio.ensure_future(dropped(bookie, 1))
        await settle()
        await added(bookie, group_of(1, 2, 3), recovery=True)
        assert await held(bookie, 1) == {2, 3, 4}
        machine.workers["flush"].release()
        await asyncio.gather(checkpoint, drop)
        await bookie.checkpoint()
        assert await held(bookie, 1) == {2, 3, 4}
        assert [block[:3] for block in machine.index.blocks()] == [(1, 2, 4)]


@pytest.mark.virtual_time
async def test_old_entries_that_the_index_refused_do_not_come_back_after_the_drop() -> None:
    """They are in the entry log, and their flush is tried again after the drop."""
    machine = Machine()
    full = True

    def refuse() -> None:
        if full:
            raise OSError(errno.ENOSPC, "no space left")

    async with machine.bookie() as bookie:
        await filled(bookie, 1)
        machine.index.before_sync = refuse
        with pytest.raises(OSError, match="no space"):
            await bookie.checkpoint()
        with pytest.raises(OSError, match="no space"):
            await dropped(bookie, 1)
        await added(bookie, group_of(1, 2, 3), recovery=True)
        full = False
        await dropped(bookie, 1)
        await added(bookie, group_of(1, 3, 3), recovery=True)
        await bookie.checkpoint()
        assert await held(bookie, 1) == {3, 4, 5}
    machine.restart()
    async with machine.bookie() as bookie:
        assert await held(bookie, 1) == {3, 4, 5}


@pytest.mark.virtual_time
@pytest.mark.parametrize("steps_ahead", [0, 1, 4, 12])
async def test_a_drop_loses_nothing_that_is_copied_again_wherever_the_power_goes(steps_ahead: int) -> None:
    """A flush of the old entries has begun so many steps of the loop before the drop."""

    async def scenario(bookie: Bookie, promises: Promises) -> None:
        await promises.add(bookie, group_of(8, 0, 5))
        await promises.add(bookie, group_of(7, 0, 10, size=KiB))
        await bookie.checkpoint()
        await promises.add(bookie, group_of(7, 10, 5, size=KiB))
        for name in [name for name in promises.ok if name[0] == 7]:
            del promises.ok[name]  # the record names this bookie nowhere
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(bookie.checkpoint())
            for _ in range(steps_ahead):
                await asyncio.sleep(0)
            drop = tasks.create_task(dropped(bookie, 7))
            await asyncio.sleep(0)
            await promises.add(bookie, group_of(7, 3, 9, size=KiB), recovery=True)
            await drop
            promises.fenced[7] = promises.fence_asked[7] = None
            await promises.add(bookie, group_of(7, 12, 2, size=KiB), recovery=True)
        await bookie.checkpoint()
        await bookie.reclaim()
        assert set((await read_all(bookie, 7, 0, 20))[0]) == set(range(3, 14))

    operation, dropped_again = 0, 0
    while True:
        machine, promises = Machine(f"drop/{operation}"), Promises()
        machine.crash_at(operation)
        crashed = await machine.run_until_crash(partial(scenario, promises=promises))
        machine.restart()
        async with machine.bookie() as bookie:
            await promises.check(bookie)
            if (copy := await bookie.look_at_copy(7)) is not None:  # a replay may have brought old entries back
                assert await bookie.drop_copy(copy)
                dropped_again += 1
            assert (await read_all(bookie, 7, 0, 20))[0] == {}
        if not crashed:
            break
        operation += 1
    assert dropped_again > 10
