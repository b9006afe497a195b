"""Reading from storage: bounded by the chain and by the budget, merged, ahead of who continues."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from cepheid_ledger import EntryUnavailableError, LedgerLostError
from cepheid_managed_ledger import ManagedLedger, ManagedLedgerFailedError, ManagedLedgerSettings
from cepheid_managed_ledger.catch_up_budget import CatchUpBudget
from cepheid_metadata import ChainLedger, Check, MemoryTree, Op, OpResult, Position, Put, chain_records, keys
from cepheid_wire import TopicName
from tests.managed_ledger.topic_world import (
    SETTINGS,
    TOPIC,
    TRIM,
    MortalStore,
    append,
    append_all,
    payloads_of,
    read_all,
    topic_world,
)
from tests.support import wait_until

pytestmark = pytest.mark.virtual_time

KIB = 1 << 10
OTHER = TopicName.parse("persistent://public/default/other")


def small_steps(**changes: int) -> ManagedLedgerSettings:
    return ManagedLedgerSettings(**{**SETTINGS.model_dump(), **changes})


async def filled(ledger: ManagedLedger, entries: int, size: int = KIB) -> Position:
    for number in range(entries):
        await append(ledger, f"{number}".encode().ljust(size, b"."))
    return Position(ledger.last_confirmed.ledger_id, 0)


async def test_equal_reads_are_one_and_different_ones_are_not() -> None:
    async with topic_world() as world:
        ledger = await world.broker().open()
        first = await filled(ledger, 10)
        reads = [ledger.read(first, max_entries=4, max_bytes=1 << 20) for _ in range(5)]
        results = await asyncio.gather(*reads)
        assert all(payloads_of(groups) == payloads_of(results[0]) for groups in results)
        assert len(payloads_of(results[0])) == 4
        assert ledger.statistics().catch_up_reads == 1
        await ledger.read(first, max_entries=5, max_bytes=1 << 20)
        assert ledger.statistics().catch_up_reads == 2


async def test_who_continues_is_read_ahead_of_and_the_budget_comes_back() -> None:
    async with topic_world() as world:
        broker = world.broker()
        ledger = await broker.open()
        position = await filled(ledger, 300)
        budget = broker.ledgers.catch_up
        seen: list[bytes] = []
        for turn in range(100):
            groups = await ledger.read(position, max_entries=3, max_bytes=1 << 20)
            seen += payloads_of(groups)
            position = ledger.next_position(Position(groups[-1].ledger_id, groups[-1].last_entry_id))
            if turn == 2:
                await wait_until(lambda: budget.used_bytes > 200 * KIB, what="reading ahead")
                reads = ledger.statistics().catch_up_reads
        assert [int(payload.rstrip(b".")) for payload in seen] == list(range(300))
        assert ledger.statistics().catch_up_reads == reads, "everything was there already"
        assert budget.used_bytes == 0


@pytest.mark.parametrize("fails", [False, True])
async def test_what_was_read_ahead_for_nobody_is_dropped(fails: bool) -> None:
    """Also while nobody has closed a topic that failed."""
    async with topic_world() as world:
        broker = world.broker()
        ledger = await broker.open()
        position = await filled(ledger, 100)
        for _ in range(2):
            groups = await ledger.read(position, max_entries=3, max_bytes=1 << 20)
            position = ledger.next_position(Position(groups[-1].ledger_id, groups[-1].last_entry_id))
        budget = broker.ledgers.catch_up
        await wait_until(lambda: budget.used_bytes > 50 * KIB)
        for stream in ledger._reads._streams.values():
            stream.used_at -= 60
        if fails:
            ledger.fail(ManagedLedgerFailedError("its session ended"))
        ledger.tick()
        await wait_until(lambda: budget.used_bytes == 0)
        if fails:
            return
        groups = await ledger.read(position, max_entries=3, max_bytes=1 << 20)
        assert payloads_of(groups)[0].startswith(b"6.")


async def test_who_waits_for_memory_gets_what_was_read_ahead_for_those_who_paused() -> None:
    """Without waiting until the topic that holds it looks for idle readers by itself."""
    async with topic_world(settings=small_steps(catch_up_bytes=1200 * KIB)) as world:
        broker = world.broker()
        ledger, other = await broker.open(), await broker.open(topic=OTHER)
        position = await filled(ledger, 1000)
        await filled(other, 10)
        for _ in range(2):
            groups = await ledger.read(position, max_entries=3, max_bytes=100 * KIB)
            position = ledger.next_position(Position(groups[-1].ledger_id, groups[-1].last_entry_id))
        budget = broker.ledgers.catch_up
        await wait_until(lambda: budget.used_bytes > 300 * KIB)
        loop = asyncio.get_running_loop()
        began = loop.time()
        groups = await other.read(Position(other.last_confirmed.ledger_id, 0), max_entries=1, max_bytes=1 << 20)
        assert len(payloads_of(groups)) == 1
        assert loop.time() - began < 2.0
        assert budget.used_bytes == 0


async def test_closing_while_reading_gives_everything_back() -> None:
    async with topic_world() as world:
        broker = world.broker()
        ledger = await broker.open()
        position = await filled(ledger, 100)
        for _ in range(2):
            groups = await ledger.read(position, max_entries=3, max_bytes=1 << 20)
            position = ledger.next_position(Position(groups[-1].ledger_id, groups[-1].last_entry_id))
        world.cluster["a"].delay_s = 0.05
        reading = asyncio.ensure_future(ledger.read(Position(position.ledger_id, 50), max_entries=9, max_bytes=1 << 20))
        cancelled = asyncio.ensure_future(ledger.read(Position(position.ledger_id, 60), max_entries=9, max_bytes=1 << 20))
        await asyncio.sleep(0.01)
        cancelled.cancel()
        await ledger.aclose()
        outcomes = await asyncio.gather(reading, cancelled, return_exceptions=True)
        assert isinstance(outcomes[1], asyncio.CancelledError)
        assert broker.ledgers.catch_up.used_bytes == 0
        assert ledger._reads._reading == {}


async def test_a_replica_that_fails_is_an_error_and_the_next_read_tries_again() -> None:
    async with topic_world() as world:
        ledger = await world.broker().open()
        first = await filled(ledger, 5)
        world.cluster["a"].damage(first.ledger_id, 2)
        groups = await ledger.read(first, max_entries=2, max_bytes=1 << 20)
        assert len(payloads_of(groups)) == 2
        with pytest.raises(EntryUnavailableError):
            await ledger.read(Position(first.ledger_id, 2), max_entries=1, max_bytes=1 << 20)
        world.cluster["a"].damage(first.ledger_id, 2)  # the flipped bit back
        groups = await ledger.read(Position(first.ledger_id, 2), max_entries=1, max_bytes=1 << 20)
        assert payloads_of(groups)[0].startswith(b"2.")


async def test_the_chain_is_the_end_also_when_a_ledger_has_more_and_less_is_loss() -> None:
    """Scenario 27: apache/pulsar#7490."""

    async def record(world, entries: int) -> None:  # type: ignore[no-untyped-def]
        records = chain_records(world.broker().store)
        found = await records.get(TOPIC)
        assert found is not None
        ledgers = (ChainLedger(ledger_id=found.record.ledgers[0].ledger_id, entries=entries, size_bytes=1, closed_at_ms=1),)
        await records.replace(TOPIC, found.record.replace(ledgers=ledgers), found.version)

    async with topic_world() as world:
        broker = world.broker()
        await append_all(await broker.open(), 5)
        await broker.aclose()
        await record(world, 3)
        ledger = await world.broker(seed=2).open()
        await append(ledger, b"again")
        assert await read_all(ledger, cached=False) == [b"m0", b"m1", b"m2", b"again"]
        await ledger.aclose()
    async with topic_world() as world:
        broker = world.broker()
        await append_all(await broker.open(), 5)
        await broker.aclose()
        await record(world, 7)
        ledger = await world.broker(seed=2).open()
        with pytest.raises(LedgerLostError):
            await read_all(ledger, cached=False)


async def test_nobody_reads_above_what_was_answered() -> None:
    async with topic_world() as world:
        ledger = await world.broker().open()
        await append_all(ledger, 3)
        seen: list[int] = []
        ledger.on_appended.append(lambda: seen.append(ledger.last_confirmed.entry_id))
        future = append(ledger, b"n")
        assert len(await read_all(ledger, cached=False)) in (3, 4)
        await future
        assert seen == [3]
        assert len(await read_all(ledger, cached=False)) == 4
        assert await ledger.read(Position(1 << 62, 0), max_entries=1, max_bytes=1) == []


async def test_the_budget_is_taken_in_turn() -> None:
    budget = CatchUpBudget(100)
    await budget.take(500)  # one always goes
    order: list[int] = []

    async def take(number: int, size: int) -> None:
        await budget.take(size)
        order.append(number)

    waiting = [asyncio.ensure_future(take(number, size)) for number, size in enumerate((60, 60, 10))]
    await asyncio.sleep(0)
    assert not budget.take_nowait(1)
    waiting[1].cancel()
    budget.give_back(500)
    await asyncio.gather(*waiting, return_exceptions=True)
    assert order == [0, 2]
    assert budget.used_bytes == 70
    budget.give_back(70)
    assert budget.used_bytes == 0


async def test_a_budget_that_runs_short_ends_reading_ahead_and_nothing_else() -> None:
    async with topic_world(settings=small_steps(catch_up_bytes=1, read_ahead_bytes=64 * KIB)) as world:
        ledger = await world.broker().open()
        await filled(ledger, 50)
        assert len(await read_all(ledger, cached=False, max_bytes=3 * KIB)) == 50


class SlowTrim(MortalStore):
    """Once `slow` is set, a write of the chain, or with a check of it, waits until `go`."""

    def __init__(self, tree: MemoryTree) -> None:
        super().__init__(tree)
        self.slow = False
        self.reached, self.go = asyncio.Event(), asyncio.Event()

    async def multi(self, ops: Sequence[Op]) -> list[OpResult]:
        if self.slow and any(isinstance(op, Put | Check) and op.key == keys.chain_key(TOPIC) for op in ops):
            self.reached.set()
            await self.go.wait()
        return await super().multi(ops)


async def test_a_ledger_leaves_the_chain_when_what_reads_it_has_ended() -> None:
    async with topic_world(settings=small_steps(ledger_max_entries=20)) as world:
        ledger = await world.broker().open()
        await append_all(ledger, 20)
        await wait_until(lambda: len(ledger.chain.ledgers) == 2)
        ledger.config = TRIM
        world.cluster["a"].delay_s = 0.05
        reading = asyncio.ensure_future(ledger.read(ledger.first_position(), max_entries=20, max_bytes=1 << 20))
        await asyncio.sleep(0.01)
        assert await ledger.trim() == 0
        assert payloads_of(await reading) == [b"m%d" % number for number in range(20)]
        assert await ledger.trim() == 1


@pytest.mark.parametrize("waits_for", ["a cursor that moves", "another write of the chain"])
async def test_a_read_that_begins_while_a_trim_waits_keeps_its_ledger(waits_for: str) -> None:
    async with topic_world(settings=small_steps(ledger_max_entries=20)) as world:
        store = SlowTrim(world.tree)
        ledger = await world.broker(store=store).open()
        await append_all(ledger, 20)
        await wait_until(lambda: len(ledger.chain.ledgers) == 2)
        if waits_for == "a cursor that moves":
            await ledger.create_cursor("s", ledger.last_confirmed)
        store.slow, ledger.config = True, TRIM
        if waits_for == "another write of the chain":
            writing = asyncio.ensure_future(ledger.save_topic_epoch(3))
        trimming = asyncio.ensure_future(ledger.trim())
        await store.reached.wait()
        world.cluster["a"].delay_s = 0.05
        reading = asyncio.ensure_future(ledger.read(ledger.first_position(), max_entries=20, max_bytes=1 << 20))
        await asyncio.sleep(0.01)
        store.go.set()
        assert await trimming == 0
        assert len(payloads_of(await reading)) == 20
        assert await ledger.trim() == 1
        if waits_for == "another write of the chain":
            await writing


async def test_what_was_read_ahead_of_a_ledger_that_left_is_nobodys_next_entry() -> None:
    """A reader in the middle of a ledger goes on with the next one when it is trimmed (seed 0x10c9b5316)."""
    settings = small_steps(ledger_max_entries=20)
    async with topic_world(settings=settings) as world:
        store = SlowTrim(world.tree)
        broker = world.broker(store=store)
        ledger = await broker.open()
        await append_all(ledger, 20)
        await wait_until(lambda: len(ledger.chain.ledgers) == 2)
        await append_all(ledger, 5, "n")
        first, second = (Position(each.ledger_id, 0) for each in ledger.chain.ledgers)
        await ledger.read(first, max_entries=3, max_bytes=1 << 20)
        store.slow, ledger.config = True, TRIM
        trimming = asyncio.ensure_future(ledger.trim())
        await store.reached.wait()  # nobody reads in the ledger just now
        world.cluster["a"].delay_s = 0.05
        await ledger.read(Position(first.ledger_id, 3), max_entries=3, max_bytes=1 << 20)
        reading = asyncio.ensure_future(ledger.read(Position(first.ledger_id, 6), max_entries=3, max_bytes=1 << 20))
        await asyncio.sleep(0.01)  # it waits for what is being read ahead
        store.go.set()
        assert await trimming == 1
        assert payloads_of(await reading) == [b"m6", b"m7", b"m8"], "it was there when it was asked for"
        groups = await ledger.read(second, max_entries=3, max_bytes=1 << 20)
        assert (groups[0].ledger_id, groups[0].first_entry_id) == second
        assert payloads_of(groups) == [b"n0", b"n1", b"n2"]
        await ledger.aclose()
        assert broker.ledgers.catch_up.used_bytes == 0
