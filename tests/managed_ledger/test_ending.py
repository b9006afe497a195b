"""Trimming, terminating, deleting, unloading: what goes, what stays, and what a crash in between leaves."""

from __future__ import annotations

import asyncio

import pytest

from cepheid_managed_ledger import (
    ChainNotDeletableError,
    ManagedLedger,
    ManagedLedgerConfig,
    ManagedLedgerDeletedError,
    ManagedLedgerError,
    Retention,
    State,
    TopicTerminatedError,
)
from cepheid_metadata import MemoryStore, Position, chain_records, keys, list_cursors
from cepheid_wire import TopicName
from tests.managed_ledger.losing_store import LosingStore, SteppingStore, changes
from tests.managed_ledger.test_opening import assert_nothing_dangles
from tests.managed_ledger.topic_world import (
    ONE_BOOKIE,
    SETTINGS,
    THREE_BOOKIES,
    TOPIC,
    TRIM,
    TopicWorld,
    append,
    append_all,
    read_all,
    topic_world,
)
from tests.support import wait_until

pytestmark = pytest.mark.virtual_time

SMALL = SETTINGS.model_copy(update={"ledger_max_entries": 5})
TINY = SMALL.model_copy(update={"cursor_inline_bytes": 100, "cursor_part_bytes": 40})


async def rolled(ledger: ManagedLedger, ledgers: int) -> list[list[Position]]:
    """That many full ledgers and one more that is open: the positions of each."""
    by_ledger: dict[int, list[Position]] = {}
    number = 0
    while len(ledger.chain.ledgers) <= ledgers or not by_ledger.get(ledger.chain.ledgers[-1].ledger_id):
        (position,) = await append_all(ledger, 1, f"r{number}-")
        by_ledger.setdefault(position.ledger_id, []).append(position)
        number += 1
        await wait_until(lambda: not ledger._upkeep.is_rolling)
    return list(by_ledger.values())


def listed(ledger: ManagedLedger) -> list[int]:
    return [item.ledger_id for item in ledger.chain.ledgers]


async def test_consumed_ledgers_go_once_that_is_saved() -> None:
    async with topic_world(settings=SMALL) as world:
        ledger = await world.broker().open(TRIM)
        slow = await ledger.create_cursor("slow", ledger.first_position())
        fast = await ledger.create_cursor("fast", ledger.first_position())
        first, second, third, last = await rolled(ledger, 3)
        fast.acknowledge_cumulative(third[-1])
        await fast.saved()
        assert len(listed(ledger)) == 4
        slow.acknowledge_cumulative(second[-2])
        await slow.saved()
        await wait_until(lambda: len(listed(ledger)) == 3)
        slow.acknowledge(second[-1:])
        await slow.saved()
        await wait_until(lambda: listed(ledger) == [third[0].ledger_id, last[0].ledger_id])
        assert slow.mark_delete == Position(third[0].ledger_id, -1), "no cursor points into what went"
        assert slow.backlog_entries == len(third) + len(last)
        assert ledger.first_position() == Position(third[0].ledger_id, -1)
        await wait_until(lambda: ledger.statistics().waiting_deletions == 0)
        await assert_nothing_dangles(world)
        assert first[0].ledger_id not in await world.ledger_records()
        assert slow.acknowledge(first) == [], "late acknowledgements of what went are no error"


async def test_only_what_is_saved_lets_ledgers_go() -> None:
    async with topic_world(settings=SMALL.model_copy(update={"cursor_flush_s": 60.0})) as world:
        broker = world.broker()
        ledger = await broker.open(TRIM)
        cursor = await ledger.create_cursor("sub", ledger.first_position())
        first, *_ = await rolled(ledger, 2)
        cursor.acknowledge(first)
        assert await ledger.trim() == 0
        await broker.crash()
        ledger = await world.broker(seed=2).open(TRIM)
        assert (await read_all(ledger))[0] == b"r0-0"
        assert ledger.cursors["sub"].backlog_entries == ledger.ledgers.total_entries


async def test_retention_keeps_consumed_ledgers_for_a_time_and_a_clock_that_jumps_expires_nothing() -> None:
    async with topic_world(settings=SMALL) as world:
        config = ManagedLedgerConfig(retention=Retention(60_000, -1))
        ledger = await world.broker().open(config)
        *_, last = await rolled(ledger, 3)
        world.clock.now_ms += 365 * 86_400_000
        assert await ledger.trim() == 0
        await ledger.aclose()
        world.clock.now_ms += 1
        ledger = await world.broker(seed=2).open(config)
        await wait_until(lambda: len(listed(ledger)) == 2)
        assert len(await read_all(ledger)) == len(last), "what ended just now is not old"
        world.clock.now_ms -= 10 * 365 * 86_400_000
        await rolled(ledger, 2)
        assert await ledger.trim() == 0


async def test_what_ended_while_the_clock_was_set_back_is_not_old_when_it_is_right_again() -> None:
    async with topic_world(settings=SMALL) as world:
        ledger = await world.broker().open(ManagedLedgerConfig(retention=Retention(60_000, -1)))
        world.clock.now_ms -= 365 * 86_400_000
        await rolled(ledger, 2)
        world.clock.now_ms += 365 * 86_400_000
        assert await ledger.trim() == 0


async def test_readers_hold_nothing_and_are_moved_along() -> None:
    async with topic_world(settings=SMALL) as world:
        ledger = await world.broker().open(ONE_BOOKIE)
        reader = ledger.new_non_durable_cursor("reader", ledger.first_position())
        first, second, last = await rolled(ledger, 2)
        assert reader.backlog_entries == len(first) + len(second) + len(last)
        ledger.config = TRIM
        assert await ledger.trim() == 2
        assert reader.first_unacknowledged() == last[0]
        assert reader.backlog_entries == len(last)
        reader.acknowledge(last[:1])
        await reader.saved()
        ledger.drop_cursor(reader)
        assert ledger.statistics().cursors == {}


@pytest.mark.deadline(60)
async def test_cursors_created_while_ledgers_go_never_point_into_them() -> None:
    """Scenario 31: apache/pulsar#18651."""
    for turns in range(20):
        async with topic_world(settings=SMALL) as world:
            ledger = await world.broker(store=SteppingStore(world.tree)).open(ONE_BOOKIE)
            await rolled(ledger, 3)
            ledger.config = TRIM
            trimming = asyncio.ensure_future(ledger.trim())
            for _ in range(turns):
                await asyncio.sleep(0)
            cursor = await ledger.create_cursor("sub", Position(-1, -1))
            await trimming
            expected = await read_all(ledger)
            assert cursor.backlog_entries == len(expected)
            assert cursor.mark_delete == ledger.first_position()
            await ledger.aclose()
            ledger = await world.broker(seed=2).open(TRIM)
            assert await read_all(ledger, ledger.cursors["sub"].first_unacknowledged()) == expected


@pytest.mark.parametrize("lost", ["answer", "request"])
async def test_trimming_whose_answer_got_lost(lost: str) -> None:
    async with topic_world(settings=SMALL) as world:
        store = LosingStore(world.tree)
        ledger = await world.broker(store=store).open(ONE_BOOKIE)
        *_, last = await rolled(ledger, 3)
        store.lose = lambda ops: lost if changes(ops, "chains") and store.lost == 0 else None
        ledger.config = TRIM
        assert await ledger.trim() == 3
        assert store.lost == 1
        assert listed(ledger) == [last[0].ledger_id]
        await append(ledger, b"goes on")


async def test_what_a_crash_left_in_the_deletion_queue_is_deleted_after_the_next_opening() -> None:
    async with topic_world(settings=SMALL) as world:
        broker = world.broker()
        ledger = await broker.open(ONE_BOOKIE)
        await rolled(ledger, 3)
        before = await world.ledger_records()

        async def no_delete(ledger_id: int, **_: object) -> None:
            raise TimeoutError("too slow")

        broker.client.delete = no_delete
        ledger.config = TRIM
        assert await ledger.trim() == 3
        await broker.crash()
        assert len((await world.chain()).deletions) == 3
        assert set(await world.ledger_records()) == set(before)
        ledger = await world.broker(seed=2).open(ONE_BOOKIE)
        await wait_until(lambda: ledger.statistics().waiting_deletions == 0)
        await assert_nothing_dangles(world)
        assert not set(await world.ledger_records()) & set(list(before)[:3])
        await rolled(ledger, 3)
        assert (await world.chain()).deletions == ()


async def test_a_terminated_topic_answers_what_was_on_its_way_and_refuses_the_rest() -> None:
    async with topic_world() as world:
        ledger = await world.broker().open()
        futures = [append(ledger, b"x") for _ in range(4)]
        ending = asyncio.ensure_future(ledger.terminate())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(TopicTerminatedError):
            await append(ledger, b"late")
        positions = await asyncio.gather(*futures)
        assert await ending == positions[-1]
        assert await ledger.terminate() == positions[-1]
        cursor = await ledger.create_cursor("sub", ledger.first_position())
        cursor.acknowledge(positions[:1])
        await cursor.saved()
        await ledger.aclose()

        ledger = await world.broker(seed=2).open()
        assert ledger.state is State.TERMINATED
        with pytest.raises(TopicTerminatedError):
            await append(ledger, b"late")
        assert await ledger.terminate() == positions[-1]
        assert len(await read_all(ledger, ledger.cursors["sub"].first_unacknowledged())) == 3
        assert len(await world.ledger_records()) == 1, "no ledger is made for a topic that ended"


async def test_terminating_an_empty_topic_during_a_rollover_and_twice_at_once() -> None:
    async with topic_world(settings=SMALL) as world:
        ledger = await world.broker().open()
        assert (await ledger.terminate()).entry_id == -1
        await ledger.aclose()
        assert (await world.broker(seed=2).open()).state is State.TERMINATED
    async with topic_world(settings=SMALL) as world:
        ledger = await world.broker(store=SteppingStore(world.tree)).open()
        futures = [append(ledger, b"x") for _ in range(5)]
        await futures[-1]
        futures.append(append(ledger, b"next"))
        assert ledger._upkeep.is_rolling
        first, second = await asyncio.gather(ledger.terminate(), ledger.terminate())
        assert first == second == await futures[-1]
        assert len(await read_all(ledger)) == 6
        await assert_nothing_dangles(world)


async def assert_deleted(world: TopicWorld) -> None:
    assert await world.ledger_records() == {}
    store = MemoryStore(world.tree)
    assert await chain_records(store).get(TOPIC) is None
    assert await list_cursors(store, TOPIC) == []


@pytest.mark.parametrize("loaded", [True, False])
async def test_a_deleted_topic_leaves_nothing_and_starts_anew(loaded: bool) -> None:
    async with topic_world(settings=TINY) as world:
        broker = world.broker()
        ledger = await broker.open()
        cursor = await ledger.create_cursor("sub", ledger.first_position())
        positions = [position for some in await rolled(ledger, 60) for position in some]
        cursor.acknowledge(positions[1::2])
        await cursor.saved()
        incarnation = ledger.chain.incarnation
        if not loaded:
            await ledger.aclose()
        await broker.ledgers.delete(TOPIC)
        await broker.ledgers.delete(TOPIC)
        await assert_deleted(world)
        if loaded:
            with pytest.raises(ManagedLedgerDeletedError):
                await append(ledger, b"late")
        ledger = await broker.open()
        assert ledger.cursors == {}
        assert await read_all(ledger) == []
        assert ledger.chain.incarnation != incarnation
        assert (await append(ledger, b"x")).ledger_id > positions[-1].ledger_id


async def test_ledger_ids_of_a_topic_made_anew_are_above_those_it_had_whoever_makes_it() -> None:
    async with topic_world(settings=TINY) as world:
        one, other = world.broker(), world.broker(seed=2)
        await other.open(topic=TopicName.parse("persistent://public/default/another"))  # its block of ids is the older one
        ledger = await one.open()
        before = (await rolled(ledger, 5))[-1][-1].ledger_id
        await one.ledgers.delete(TOPIC)
        assert (await append(await other.open(), b"x")).ledger_id > before


async def test_a_deletion_that_fails_in_the_middle_is_finished_by_repeating_it() -> None:
    for failing in range(1, 8):
        async with topic_world(settings=SMALL) as world:
            broker = world.broker()
            ledger = await broker.open()
            await ledger.create_cursor("sub", ledger.first_position())
            await rolled(ledger, 3)
            calls = 0

            async def counted(ledger_id: int, delete=broker.client.delete, failing=failing, **options) -> None:  # type: ignore[no-untyped-def]
                nonlocal calls
                calls += 1
                if calls == failing:
                    raise TimeoutError("too slow")
                await delete(ledger_id, **options)

            broker.client.delete = counted
            try:
                await broker.ledgers.delete(TOPIC)
            except TimeoutError:
                await broker.ledgers.delete(TOPIC)
            await assert_deleted(world)


@pytest.mark.parametrize("damage", ["bookies are away", "a record is damaged"])
async def test_a_topic_of_which_a_ledger_cannot_be_closed_is_deleted_wholly_or_not_at_all(damage: str) -> None:
    async with topic_world("a", "b", "c") as world:
        broker = world.broker()
        ledger = await broker.open(THREE_BOOKIES)
        cursor = await ledger.create_cursor("sub", ledger.first_position())
        positions = await append_all(ledger, 3)
        cursor.acknowledge(positions[:1])
        await cursor.saved()
        await broker.crash()
        key, store = keys.ledger_key(positions[0].ledger_id), MemoryStore(world.tree)
        found = await store.get(key)
        assert found is not None
        if damage == "a record is damaged":
            await store.put(key, b"garbage", None)
        else:
            world.cluster["a"].down = world.cluster["b"].down = True
        for _ in range(2):
            with pytest.raises(ChainNotDeletableError, match=f"nothing .* was deleted: its ledger {positions[0].ledger_id} cannot"):
                await world.broker().ledgers.delete(TOPIC)

        world.cluster["a"].down = world.cluster["b"].down = False
        if damage == "a record is damaged":
            await store.put(key, found.value, None)
        heir = world.broker(seed=2)
        ledger = await heir.open(THREE_BOOKIES)
        assert await read_all(ledger) == [b"m0", b"m1", b"m2"]
        assert ledger.cursors["sub"].backlog_entries == 2
        await heir.ledgers.delete(TOPIC)
        await assert_deleted(world)


async def test_a_topic_of_which_no_bookie_has_anything_is_deleted_once_its_ledger_is_closed_by_one_of_them() -> None:
    async with topic_world("a", "b", "c") as world:
        broker = world.broker()
        (position,) = await append_all(await broker.open(THREE_BOOKIES), 1)
        await broker.crash()
        for bookie in world.cluster.bookies.values():
            bookie.entries.clear()
            bookie.limbo = True
        with pytest.raises(ChainNotDeletableError):
            await world.broker().ledgers.delete(TOPIC)
        heir = world.broker(seed=2)
        await heir.client.recover_from(position.ledger_id, "a", at_least=-1)
        await heir.ledgers.delete(TOPIC)
        await assert_deleted(world)


async def test_deleting_shuts_out_whoever_serves_the_topic() -> None:
    async with topic_world() as world:
        ledger = await world.broker().open()
        await append(ledger, b"x")
        await world.broker(seed=2).ledgers.delete(TOPIC)
        with pytest.raises(ManagedLedgerError):
            await append(ledger, b"y")
        await ledger.aclose()
        await assert_deleted(world)


async def test_truncating_drops_what_is_acknowledged_whatever_retention_says_and_ends_the_open_ledger() -> None:
    keep = ManagedLedgerConfig(retention=Retention(time_ms=-1, size_bytes=-1))
    async with topic_world(settings=SMALL) as world:
        ledger = await world.broker().open(keep)
        slow = await ledger.create_cursor("slow", ledger.first_position())
        first, _, last = await rolled(ledger, 2)
        slow.acknowledge_cumulative(first[-1])
        await slow.saved()
        assert await ledger.trim() == 0, "retention keeps all"
        assert await ledger.truncate() == 1, "what a cursor has not acknowledged stays"
        slow.acknowledge_cumulative(last[-1])
        await slow.saved()
        assert await ledger.truncate() >= 2
        assert len(listed(ledger)) == 1
        assert ledger.ledgers.total_entries == 0
        assert await ledger.truncate() == 0, "an empty ledger does not end for it"
        await append_all(ledger, 1, "after")
        assert await read_all(ledger) == [b"after0"]
        assert slow.backlog_entries == 1
