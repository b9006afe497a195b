"""A topic that is deleted and made anew, while an owner of before, or one that is opening it, has not heard of that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from cepheid_managed_ledger import ManagedLedger, ManagedLedgerError, ManagedLedgerFencedError
from cepheid_metadata import (
    Create,
    CursorRecord,
    Delete,
    MemoryStore,
    MemoryTree,
    Op,
    OpResult,
    Put,
    SessionState,
    StoreUnavailableError,
    chain_records,
    cursor_records,
    keys,
)
from cepheid_wire import TopicName
from tests.managed_ledger.topic_world import (
    SETTINGS,
    TOPIC,
    Broker,
    MortalStore,
    TopicWorld,
    append,
    append_all,
    read_all,
    topic_world,
)

pytestmark = pytest.mark.virtual_time


class HeldUp(MortalStore):
    """Of a process that sleeps, or whose request is late: what `holds` waits until `go`."""

    def __init__(self, tree: MemoryTree, holds: Callable[[Op], bool]) -> None:
        super().__init__(tree)
        self._holds = holds
        self.reached, self.go = asyncio.Event(), asyncio.Event()

    async def multi(self, ops: Sequence[Op]) -> list[OpResult]:
        if any(map(self._holds, ops)) and not self.go.is_set():
            self.reached.set()
            await self.go.wait()
        return await super().multi(ops)


def makes_the_chain(op: Op) -> bool:
    return isinstance(op, Create) and op.key == keys.chain_key(TOPIC)


def writes_the_chain(op: Op) -> bool:
    return isinstance(op, Put) and op.key == keys.chain_key(TOPIC)


Opening = tuple[HeldUp, asyncio.Future[ManagedLedger]]


@asynccontextmanager
async def opening_east(world: TopicWorld, holds: Callable[[Op], bool]) -> AsyncIterator[Opening]:
    store = HeldUp(world.tree, holds)
    opening = asyncio.ensure_future(world.broker(store=store).open())
    await store.reached.wait()
    yield store, opening
    if not opening.done():
        opening.cancel()


async def cursor_record(world: TopicWorld) -> CursorRecord:
    found = await cursor_records(MemoryStore(world.tree)).get((TOPIC, "sub"))
    assert found is not None
    return found.record


@pytest.mark.parametrize("holds", [makes_the_chain, writes_the_chain])
async def test_an_opening_that_was_held_up_begins_above_what_the_topic_had_meanwhile(holds: Callable[[Op], bool]) -> None:
    async with topic_world() as world, opening_east(world, holds) as (store, opening):
        other = world.broker(seed=2)
        before = await append_all(await other.open(), 3)
        await other.ledgers.delete(TOPIC)
        store.go.set()
        try:
            anew = await opening
        except ManagedLedgerFencedError:
            anew = await world.broker(seed=3).open()
        assert (await append(anew, b"x")) > before[-1]


async def test_a_chain_whose_deletion_has_come_far_does_not_tell_how_large_its_ids_were() -> None:
    async with topic_world() as world:
        other = world.broker(seed=2)
        await other.open(topic=TopicName.parse("persistent://public/default/another"))  # its block of ids is the older one
        broker = world.broker()
        before = await append(await broker.open(), b"x")
        await broker.crash()
        records = chain_records(MemoryStore(world.tree))
        found = await records.get(TOPIC)
        assert found is not None
        await records.replace(TOPIC, found.record.replace(ledgers=(), deletions=(1,)), found.version)
        assert (await append(await other.open(), b"y")) > before


async def assert_fenced_by_what_was_made_anew(world: TopicWorld, west: Broker, east: Opening) -> None:
    store, opening = east
    await west.ledgers.delete(TOPIC)
    anew = await west.open()
    told = await append_all(anew, 3, "new")
    store.go.set()
    with pytest.raises(ManagedLedgerFencedError):
        await opening
    told += await append_all(anew, 2, "later")
    assert {position.ledger_id for position in told} <= {ledger.ledger_id for ledger in (await world.chain()).ledgers}


async def test_an_opening_of_before_does_not_take_over_the_chain_made_anew() -> None:
    async with topic_world() as world:
        west = world.broker(seed=2)
        ledger = await west.open()
        await ledger.create_cursor("sub", ledger.first_position())
        await append_all(ledger, 2, "old")
        async with opening_east(world, writes_the_chain) as east:
            await assert_fenced_by_what_was_made_anew(world, west, east)


@pytest.mark.parametrize("hears", [False, True])
async def test_an_owner_of_before_saves_nothing_over_a_subscription_made_anew(hears: bool) -> None:
    async with topic_world(settings=SETTINGS.model_copy(update={"cursor_flush_s": 600.0})) as world:
        brokers = world.broker(seed=1), world.broker(seed=2)
        ledger = await brokers[0].open()
        old = await append_all(ledger, 4, "old")
        cursor = await ledger.create_cursor("sub", ledger.first_position())
        await brokers[1].ledgers.delete(TOPIC)
        anew = await brokers[1].open()
        fresh = await anew.create_cursor("sub", anew.first_position())
        positions = await append_all(anew, 4, "new")
        cursor.acknowledge(old[:3])
        if hears:
            brokers[0].ledgers.on_session(SessionState.LOST)
            await ledger.aclose()
        else:
            with pytest.raises(ManagedLedgerError):
                await cursor.saved()
        assert (await cursor_record(world)).chain_incarnation == anew.chain.incarnation
        fresh.acknowledge(positions[:2])
        await fresh.saved()
        await brokers[1].crash()
        assert (await world.broker(seed=3).open()).cursors["sub"].mark_delete == positions[1]


async def test_a_chain_of_an_older_release_gets_its_mark_when_it_is_opened() -> None:
    async with topic_world() as world:
        broker = world.broker()
        before = await append_all(await broker.open(), 3)
        await broker.crash()
        mark = keys.incarnation_key((await world.chain()).incarnation)
        store = MemoryStore(world.tree)
        await store.delete(mark, None)
        ledger = await world.broker(seed=2).open()
        assert (await append(ledger, b"x")) > before[-1]
        assert await store.exists(mark)


async def test_a_deleted_topic_leaves_no_mark() -> None:
    async with topic_world() as world:
        broker = world.broker()
        ledger = await broker.open()
        mark = keys.incarnation_key(ledger.chain.incarnation)
        assert mark in world.tree.nodes
        await broker.ledgers.delete(TOPIC)
        assert mark not in world.tree.nodes


async def test_an_opening_that_ended_before_its_first_ledger_was_recorded_leaves_a_chain_and_no_ledger() -> None:
    async with topic_world() as world, opening_east(world, writes_the_chain):
        found = await world.chain()
        assert (found.epoch, found.ledgers) == (0, ())
        assert not await world.ledger_records()
        for seed in (2, 3):
            broker = world.broker(seed=seed)
            ledger = await broker.open()
            assert ledger.chain.incarnation == found.incarnation
            await append(ledger, b"x")
        assert {item.ledger_id for item in ledger.chain.ledgers} == set(await world.ledger_records())


class SlowMark(MortalStore):
    """Its process sleeps between the record of the chain and the mark."""

    def __init__(self, tree: MemoryTree) -> None:
        super().__init__(tree)
        self.reached, self.go = asyncio.Event(), asyncio.Event()

    async def get(self, key: str):  # type: ignore[no-untyped-def]
        if key.startswith(keys.INCARNATIONS_KEY) and not self.go.is_set():
            self.reached.set()
            await self.go.wait()
        return await super().get(key)


@pytest.mark.parametrize("deletes", [False, True])
async def test_a_chain_that_was_deleted_while_it_was_read_is_not_taken_for_one_of_an_older_release(deletes: bool) -> None:
    async with topic_world() as world:
        before = world.broker(seed=2)
        await append_all(await before.open(), 2, "old")
        await before.ledgers.aclose()
        store = SlowMark(world.tree)
        sleeper = world.broker(seed=1, store=store)
        work = asyncio.ensure_future(sleeper.ledgers.delete(TOPIC) if deletes else sleeper.open())
        await store.reached.wait()
        await world.broker(seed=3).ledgers.delete(TOPIC)
        other = world.broker(seed=4)
        await append_all(await other.open(), 3, "new")
        await other.ledgers.aclose()
        store.go.set()
        await work  # it finds the topic made anew, and does with that what it is asked
        if not deletes:
            assert await read_all(await world.broker(seed=5).open()) == [b"new0", b"new1", b"new2"]


async def of_an_older_release(world: TopicWorld) -> None:
    """A topic that was opened once, as releases without marks left it: made with its first ledger, at version 0."""
    broker = world.broker(seed=20)
    await append_all(await broker.open(), 2, "old")
    await broker.crash()
    chain, store = await world.chain(), MemoryStore(world.tree)
    await store.delete(keys.incarnation_key(chain.incarnation), None)
    await store.delete(keys.chain_key(TOPIC), None)
    await chain_records(store).create(TOPIC, chain)


async def version(world: TopicWorld) -> int:
    found = await chain_records(MemoryStore(world.tree)).get(TOPIC)
    assert found is not None
    return found.version


@pytest.mark.parametrize("adopted", [False, True])
async def test_an_opening_of_a_chain_of_an_older_release_does_not_come_behind_its_deletion(adopted: bool) -> None:
    async with topic_world() as world:
        await of_an_older_release(world)
        if adopted:
            before = world.broker(seed=2)
            await before.open()
            await before.crash()
        async with opening_east(world, writes_the_chain) as east:
            await assert_fenced_by_what_was_made_anew(world, world.broker(seed=3), east)


async def test_an_adopted_chain_that_was_deleted_while_it_was_read_is_not_taken_for_the_one_made_anew() -> None:
    async with topic_world() as world:
        await of_an_older_release(world)
        adopter = world.broker(seed=2)
        await append_all(await adopter.open(), 2, "old")
        await adopter.crash()
        store = SlowMark(world.tree)
        work = asyncio.ensure_future(world.broker(seed=1, store=store).open())
        await store.reached.wait()
        await world.broker(seed=3).ledgers.delete(TOPIC)  # the mark of the adopted chain stays, with another version
        other = world.broker(seed=4)
        await append_all(await other.open(), 3, "new")
        await other.ledgers.aclose()
        store.go.set()
        await work
        assert await read_all(await world.broker(seed=5).open()) == [b"new0", b"new1", b"new2"]


async def test_an_owner_of_an_adopted_chain_saves_nothing_over_a_subscription_made_anew() -> None:
    async with topic_world(settings=SETTINGS.model_copy(update={"cursor_flush_s": 600.0})) as world:
        await of_an_older_release(world)
        east, west = world.broker(), world.broker(seed=2)
        ledger = await east.open()
        positions = await append_all(ledger, 4, "old")
        cursor = await ledger.create_cursor("sub", ledger.first_position())
        before = await version(world)
        await west.ledgers.delete(TOPIC)
        anew = await west.open()
        await anew.create_cursor("sub", anew.first_position())
        assert await version(world) == before, "only the mark tells the two apart"
        cursor.acknowledge(positions[:3])
        with pytest.raises(ManagedLedgerFencedError):
            await cursor.saved()
        assert (await cursor_record(world)).chain_incarnation == anew.chain.incarnation


def deletes_the_chain(op: Op) -> bool:
    return isinstance(op, Delete) and op.key == keys.chain_key(TOPIC)


class LostAnswer(MortalStore):
    """Of the first such write; and its process sleeps before it looks what became of that."""

    def __init__(self, tree: MemoryTree, is_lost: Callable[[Op], bool] = makes_the_chain) -> None:
        super().__init__(tree)
        self._is_lost = is_lost
        self.reached, self.go, self.lost = asyncio.Event(), asyncio.Event(), False

    async def multi(self, ops: Sequence[Op]) -> list[OpResult]:
        results = await super().multi(ops)
        if any(map(self._is_lost, ops)) and not self.lost:
            self.lost = True
            raise StoreUnavailableError("the answer was lost", outcome_unknown=True)
        return results

    async def get(self, key: str):  # type: ignore[no-untyped-def]
        if self.lost and not self.go.is_set():
            self.reached.set()
            await self.go.wait()
        return await super().get(key)


async def test_a_chain_that_was_made_and_deleted_while_nobody_told_its_maker_is_not_made_again() -> None:
    async with topic_world() as world:
        store = LostAnswer(world.tree)
        opening = asyncio.ensure_future(world.broker(seed=1, store=store).open())
        await store.reached.wait()
        ledger = await world.broker(seed=2).open()
        await append_all(ledger, 2, "old")
        await world.broker(seed=3).ledgers.delete(TOPIC)
        store.go.set()
        with pytest.raises(ManagedLedgerError):
            await opening
        assert keys.chain_key(TOPIC) not in world.tree.nodes


@pytest.mark.parametrize("older_release", [False, True])
async def test_a_deletion_whose_answer_was_lost_is_done_and_deletes_nothing_made_anew(older_release: bool) -> None:
    async with topic_world() as world:
        if older_release:
            await of_an_older_release(world)
        else:
            await world.broker(seed=7).open()
        store = LostAnswer(world.tree, deletes_the_chain)
        deleting = asyncio.ensure_future(world.broker(store=store).ledgers.delete(TOPIC))
        await store.reached.wait()
        anew = await world.broker(seed=2).open()
        told = await append_all(anew, 3, "new")
        store.go.set()
        await deleting
        assert (await world.chain()).incarnation == anew.chain.incarnation
        assert {position.ledger_id for position in told} <= {ledger.ledger_id for ledger in (await world.chain()).ledgers}


async def test_an_owner_from_before_a_restore_of_metadata_cannot_write_even_at_the_version_that_it_knows() -> None:
    async with topic_world() as world:
        before = await world.broker(seed=1).open()
        await append_all(before, 2, "old")
        mark = keys.incarnation_key(before.chain.incarnation)
        await MemoryStore(world.tree).put(mark, b"restored", 0)  # what a restore does to it
        with pytest.raises(ManagedLedgerFencedError):
            await before.create_cursor("late", before.first_position())
        after = world.broker(seed=2)
        ledger = await after.open()
        await append_all(ledger, 2, "new")
        await ledger.aclose()
        assert await read_all(await world.broker(seed=3).open()) == [b"old0", b"old1", b"new0", b"new1"]
        await after.ledgers.delete(TOPIC)
        assert mark not in world.tree.nodes
