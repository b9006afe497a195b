"""Opening a topic: owners that come at the same time, answers that get lost, cancelled at every await, ledgers that are gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import pytest

from cepheid_managed_ledger import (
    ChainDamagedError,
    ManagedLedger,
    ManagedLedgerConfig,
    ManagedLedgerError,
    ManagedLedgerFailedError,
    ManagedLedgerFencedError,
    State,
)
from cepheid_metadata import (
    Check,
    LedgerState,
    MemoryStore,
    MemoryTree,
    Op,
    OpResult,
    StoreUnavailableError,
    ValueTooLargeError,
    Versioned,
    keys,
    ledger_records,
)
from cepheid_wire import TopicName
from tests.managed_ledger.losing_store import LosingStore, SteppingStore, changes
from tests.managed_ledger.topic_world import (
    SETTINGS,
    THREE_BOOKIES,
    TOPIC,
    TRIM,
    Broker,
    MortalStore,
    TopicWorld,
    append,
    append_all,
    read_all,
    topic_world,
)
from tests.support import wait_until

pytestmark = pytest.mark.virtual_time


async def assert_nothing_dangles(world: TopicWorld) -> None:
    """M2, M7, M8: every ledger is in the chain or its deletion queue; every one before the last is closed where recorded."""
    chain = await world.chain()
    records = await world.ledger_records()
    listed = [item.ledger_id for item in chain.ledgers]
    assert set(records) <= {*listed, *chain.deletions}, "orphaned ledgers"
    assert set(listed) <= set(records), "the chain names ledgers that do not exist"
    for item in chain.ledgers[:-1]:
        assert records[item.ledger_id].state is LedgerState.CLOSED
        assert records[item.ledger_id].last_entry_id == item.entries - 1  # type: ignore[operator]


async def test_a_new_owner_shuts_the_old_one_out() -> None:
    async with topic_world("a", "b", "c") as world:
        config = THREE_BOOKIES
        old, failures = await world.broker().open(config), []
        old.on_failed.append(failures.append)
        cursor = await old.create_cursor("sub", old.first_position())
        positions = await append_all(old, 5)
        new = await world.broker(seed=2).open(config)
        with pytest.raises(ManagedLedgerError):
            await append(old, b"late")
        assert old.state is State.FAILED
        assert len(failures) == 1
        cursor.acknowledge(positions)
        with pytest.raises(ManagedLedgerError):
            await cursor.saved()
        assert new.cursors["sub"].backlog_entries == 5
        assert (await append(new, b"n")).ledger_id > positions[0].ledger_id
        assert await read_all(new) == [b"m0", b"m1", b"m2", b"m3", b"m4", b"n"]
        await assert_nothing_dangles(world)


async def test_a_late_save_of_the_old_owner_fails_instead_of_overwriting() -> None:
    async with topic_world(settings=SETTINGS.model_copy(update={"cursor_flush_s": 600.0})) as world:
        old = await world.broker().open()
        cursor = await old.create_cursor("sub", old.first_position())
        positions = await append_all(old, 3)
        cursor.acknowledge(positions[:1])
        new = await world.broker(seed=2).open()
        with pytest.raises(ManagedLedgerError, match="opened by another broker"):
            await cursor.saved()
        assert old.state is State.FAILED
        assert new.cursors["sub"].backlog_entries == 3
        new.cursors["sub"].acknowledge(positions)
        await new.cursors["sub"].saved()


@pytest.mark.deadline(60)
@pytest.mark.parametrize("owners", [2, 4])
async def test_of_owners_that_open_at_once_one_serves(owners: int) -> None:
    for seed in range(25):
        async with topic_world() as world:
            first = world.broker(seed=99)
            expected = await append_all(await first.open(), seed % 3)
            await first.crash()
            brokers = [world.broker(store=SteppingStore(world.tree), seed=seed + index) for index in range(owners)]
            opened = await asyncio.gather(*(broker.open() for broker in brokers), return_exceptions=True)
            ledgers = [ledger for ledger in opened if isinstance(ledger, ManagedLedger)]
            for ledger in opened:
                assert isinstance(ledger, ManagedLedger | ManagedLedgerError), ledger
            assert ledgers
            answers = await asyncio.gather(*(append(ledger, b"x") for ledger in ledgers), return_exceptions=True)
            stored = [answer for answer in answers if not isinstance(answer, BaseException)]
            assert len(stored) >= 1
            survivor = await world.broker(seed=77).open()
            assert await read_all(survivor) == [f"m{index}".encode() for index in range(len(expected))] + [b"x"] * len(stored)
            await wait_until(lambda survivor=survivor: survivor.statistics().waiting_deletions == 0)
            await assert_nothing_dangles(world)


async def test_one_broker_opens_a_topic_once() -> None:
    async with topic_world() as world:
        broker = world.broker(store=SteppingStore(world.tree))
        ledgers = await asyncio.gather(*(broker.open() for _ in range(5)))
        assert all(ledger is ledgers[0] for ledger in ledgers)
        assert await broker.open() is ledgers[0]
        assert (await world.chain()).epoch == 1


@pytest.mark.parametrize("lost", ["answer", "request"])
async def test_a_take_over_whose_answer_got_lost(lost: str) -> None:
    async with topic_world() as world:
        await append_all(await world.broker().open(), 2)
        store = LosingStore(world.tree)
        store.lose = lambda _: lost if store.lost == 0 else None
        ledger = await world.broker(store=store, seed=2).open()
        assert store.lost == 1
        await append(ledger, b"x")
        assert await read_all(ledger) == [b"m0", b"m1", b"x"]
        assert (await world.chain()).epoch == 2
        await assert_nothing_dangles(world)


async def test_a_take_over_that_arrives_after_it_was_tried_again() -> None:
    async with topic_world() as world:
        store = LosingStore(world.tree)

        def lose(_: object) -> str | None:
            if store.lost == 0:
                asyncio.get_running_loop().call_soon(lambda: arrived.append(asyncio.ensure_future(store.deliver_late())))
                return "late"
            return None

        arrived: list[asyncio.Future[None]] = []
        store.lose = lose
        ledger = await world.broker(store=store).open()
        await asyncio.gather(*arrived, return_exceptions=True)
        await append(ledger, b"x")
        await assert_nothing_dangles(world)


class InterposedStore(MortalStore):
    """Notes its writes, and awaits `before_take_over` once before the first one that changes a chain and a ledger."""

    def __init__(self, tree: MemoryTree, before_take_over: Callable[[], Awaitable[object]] | None = None) -> None:
        super().__init__(tree)
        self._before_take_over = before_take_over
        self.writes: list[tuple[str, ...]] = []

    async def create(self, key: str, value: bytes, *, ephemeral: bool = False, sequential: bool = False) -> str:
        self.writes.append((key,))
        return await super().create(key, value, ephemeral=ephemeral, sequential=sequential)

    async def put(self, key: str, value: bytes, expected_version: int) -> int:
        self.writes.append((key,))
        return await super().put(key, value, expected_version)

    async def multi(self, ops: Sequence[Op]) -> list[OpResult]:
        self.writes.append(tuple(op.key for op in ops if not isinstance(op, Check)))
        if self._before_take_over is not None and changes(ops, "chains") and changes(ops, "ledgers"):
            interpose, self._before_take_over = self._before_take_over, None
            await interpose()
        return await super().multi(ops)


async def test_an_opening_records_the_end_and_the_next_ledger_in_one_write_with_the_chain() -> None:
    async with topic_world() as world:
        old = world.broker()
        (position,) = await append_all(await old.open(), 1)
        await old.crash()
        store = InterposedStore(world.tree)
        ledger = await world.broker(store=store, seed=2).open()
        ended, begun = (keys.ledger_key(item.ledger_id) for item in ledger.chain.ledgers)
        writes = [write for write in store.writes if write != (keys.LEDGER_IDS_KEY,)]
        assert writes == [(keys.ledger_key(position.ledger_id),), (keys.chain_key(TOPIC), ended, begun)]


async def test_an_opening_has_repair_look_at_the_copies_of_the_ledger_that_it_ends() -> None:
    quorums = ManagedLedgerConfig(ensemble_size=3, write_quorum=3, ack_quorum=2)
    async with topic_world("a", "b", "c") as world:
        old = world.broker()
        (position,) = await append_all(await old.open(quorums), 1)
        await old.crash()
        store = InterposedStore(world.tree)
        await world.broker(store=store, seed=2).open(quorums)
        (take_over,) = [write for write in store.writes if keys.chain_key(TOPIC) in write]
        assert keys.unchecked_ledger_key(position.ledger_id) in take_over


async def test_records_that_are_too_large_for_one_write_are_written_one_after_the_other() -> None:
    async def refuse() -> None:
        raise ValueTooLargeError("1000001 bytes in one request", key=keys.chain_key(TOPIC), size_bytes=1_000_001)

    async with topic_world() as world:
        old = world.broker()
        (position,) = await append_all(await old.open(), 1)
        await old.crash()
        store = InterposedStore(world.tree, refuse)
        ledger = await world.broker(store=store, seed=2).open()
        ended, begun = (keys.ledger_key(item.ledger_id) for item in ledger.chain.ledgers)
        writes = [write for write in store.writes if write != (keys.LEDGER_IDS_KEY,)]
        assert ended == keys.ledger_key(position.ledger_id)
        assert len(writes[1]) == 3  # the one that was refused
        assert [writes[0], *writes[2:]] == [(ended,), (ended,), (begun,), (keys.chain_key(TOPIC),)]
        await assert_nothing_dangles(world)


async def test_an_opening_looks_again_for_the_end_of_a_ledger_that_somebody_else_ends_meanwhile() -> None:
    async with topic_world() as world:
        old = world.broker()
        positions = await append_all(await old.open(), 2)
        await old.crash()
        other = world.broker(seed=3)
        store = InterposedStore(world.tree, partial(other.client.recover, positions[0].ledger_id))
        ledger = await world.broker(store=store, seed=2).open()
        assert await read_all(ledger) == [b"m0", b"m1"]
        await append(ledger, b"x")
        assert (await world.chain()).epoch == 2
        await assert_nothing_dangles(world)


async def test_an_opening_learns_that_another_won_although_that_one_ended_the_ledger_too() -> None:
    async with topic_world() as world:
        old = world.broker()
        await append_all(await old.open(), 2)
        await old.crash()
        store = InterposedStore(world.tree, world.broker(seed=3).open)
        with pytest.raises(ManagedLedgerFencedError):
            await world.broker(store=store, seed=2).open()
        await assert_nothing_dangles(world)


def lanes(broker: Broker) -> int:
    """Of all writers at all bookies."""
    return sum(channel.lanes for channel in broker.client.statistics().values())


async def test_an_opening_that_cannot_read_its_cursors_gives_its_ledger_up() -> None:
    async with topic_world() as world:
        await world.broker().open()
        store = SteppingStore(world.tree)
        broker, children = world.broker(store=store, seed=2), store.children

        async def no_children(key: str) -> list[str]:
            raise StoreUnavailableError("the store is away")

        store.children = no_children  # type: ignore[method-assign]
        with pytest.raises(StoreUnavailableError):
            await broker.open()
        assert lanes(broker) == 0
        store.children = children  # type: ignore[method-assign]
        await append(await broker.open(), b"x")
        assert lanes(broker) == 1


async def test_an_opening_that_cannot_save_what_it_recovered_gives_up_the_ledger_that_it_began_for_it() -> None:
    settings = SETTINGS.model_copy(update={"cursor_inline_bytes": 100, "cursor_part_bytes": 40})
    async with topic_world(settings=settings) as world:
        broker = world.broker()
        ledger = await broker.open()
        cursor = await ledger.create_cursor("sub", ledger.first_position())
        positions = await append_all(ledger, 400)
        cursor.acknowledge(positions[1::2])
        await cursor.saved()
        await broker.crash()
        records, last = ledger_records(MemoryStore(world.tree)), positions[-10]
        found = await records.get(last.ledger_id)
        assert found is not None
        shorter = found.record.replace(state=LedgerState.CLOSED, last_entry_id=last.entry_id, length_bytes=1_000)
        await records.replace(last.ledger_id, shorter, found.version)

        def lose(ops: Sequence[Op]) -> str | None:
            return "request" if any(op.key.startswith(keys.CURSORS_KEY) for op in ops) else None

        store = LosingStore(world.tree)
        store.lose = lose
        broker = world.broker(store=store, seed=2)
        with pytest.raises(ManagedLedgerFailedError):
            await broker.open()
        assert store.lost
        assert lanes(broker) == 0


async def test_an_opening_that_does_not_hear_of_its_take_over_gives_its_ledger_up() -> None:
    async with topic_world() as world:
        store = LosingStore(world.tree)
        broker = world.broker(store=store)
        store.lose = lambda _: "request"
        with pytest.raises(ManagedLedgerFailedError):
            await broker.open()
        assert lanes(broker) == 0


@pytest.mark.slow
@pytest.mark.deadline(90)
async def test_cancelled_at_every_await() -> None:
    async def opened_in(world: TopicWorld, broker: Broker, turns: int) -> bool:
        opening = asyncio.ensure_future(broker.open())
        for _ in range(turns):
            await asyncio.sleep(0)
        opening.cancel()
        return not isinstance((await asyncio.gather(opening, return_exceptions=True))[0], BaseException)

    turns, done = 0, False
    while not done:
        async with topic_world() as world:
            first = world.broker()
            ledger = await first.open()
            cursor = await ledger.create_cursor("sub", ledger.first_position())
            positions = await append_all(ledger, 3)
            cursor.acknowledge(positions[1:2])
            await cursor.saved()
            await first.crash()
            broker = world.broker(store=SteppingStore(world.tree), seed=2)
            done = await opened_in(world, broker, turns)
            turns += 1
            ledger = await broker.open()
            await append(ledger, b"x")
            assert lanes(broker) == 1, "what was cancelled keeps no ledger"
            assert await read_all(ledger) == [b"m0", b"m1", b"m2", b"x"]
            assert ledger.cursors["sub"].backlog_entries == 3
            await wait_until(lambda ledger=ledger: ledger.statistics().waiting_deletions == 0)
            await assert_nothing_dangles(world)
            assert broker.tail_cache.statistics().topics == 1
    assert turns > 20, "the opening has that many awaits"


async def test_a_ledger_of_the_chain_without_metadata_is_an_alarm() -> None:
    async with topic_world() as world:
        broker = world.broker()
        positions = await append_all(await broker.open(), 2)
        await broker.crash()
        await ledger_records(world.broker().store).delete(positions[0].ledger_id, None)
        with pytest.raises(ChainDamagedError, match=f"ledger {positions[0].ledger_id}"):
            await world.broker(seed=2).open()
        assert [item.ledger_id for item in (await world.chain()).ledgers] == [positions[0].ledger_id], "nothing was changed"


async def test_an_opening_that_fails_leaves_nothing_and_succeeds_later() -> None:
    async with topic_world("a", "b", "c") as world:
        store = LosingStore(world.tree)
        broker = world.broker(store=store)
        store.unreachable = True
        with pytest.raises(StoreUnavailableError):
            await broker.open()
        assert broker.ledgers.opened == {}
        store.unreachable = False
        await append(await broker.open(), b"x")
        assert list(broker.ledgers.opened) == [TOPIC]


async def test_ids_rise_along_a_chain_that_changes_hands() -> None:
    async with topic_world() as world:
        a, b = world.broker(), world.broker(seed=2)
        last = -1
        for broker in (a, b, a, b):
            ledger = await broker.open()
            position = await append(ledger, b"x")
            assert position.ledger_id > last
            last = position.ledger_id
            await ledger.aclose()


class HeldStore(MortalStore):
    """Reads of the chain of one topic wait."""

    def __init__(self, tree: MemoryTree, key: str) -> None:
        super().__init__(tree)
        self._key = key
        self.go_on = asyncio.Event()

    async def get(self, key: str) -> Versioned | None:
        if key == self._key:
            await self.go_on.wait()
        return await super().get(key)


async def test_a_topic_is_trimmed_when_no_other_is_being_opened() -> None:
    other = TopicName.parse("persistent://public/default/other")
    async with topic_world() as world:
        before = world.broker()
        await append_all(await before.open(TRIM), 2)
        await before.crash()
        store = HeldStore(world.tree, keys.chain_key(other))
        broker = world.broker(store=store)
        opening = asyncio.create_task(broker.open(TRIM, topic=other))
        await asyncio.sleep(0)
        ledger = await broker.open(TRIM)
        await asyncio.sleep(5)  # of virtual time
        assert ledger.statistics().trimmed_ledgers == 0
        store.go_on.set()
        await opening
        await wait_until(lambda: ledger.statistics().trimmed_ledgers == 1)


async def test_a_topic_is_not_trimmed_between_openings_that_follow_each_other_at_once() -> None:
    async with topic_world() as world:
        before = world.broker()
        await append_all(await before.open(TRIM), 2)
        await before.crash()
        broker = world.broker()
        ledger = await broker.open(TRIM)
        for number in range(20):
            await asyncio.sleep(0.05)  # of virtual time: a client has its answer, and asks for its next topic
            await broker.open(TRIM, topic=TopicName.parse(f"persistent://public/default/next-{number}"))
        assert ledger.statistics().trimmed_ledgers == 0
        await wait_until(lambda: ledger.statistics().trimmed_ledgers == 1)
