"""A topic that has no ledger to append to, since too few bookies take new ones: everything but publishing goes on."""

from __future__ import annotations

import asyncio

import pytest

from cepheid_ledger import NotEnoughBookiesError, RecoveryFailedError
from cepheid_managed_ledger import (
    CursorLedgerError,
    ManagedLedgerConfig,
    ManagedLedgerFencedError,
    NoOpenLedgerError,
    State,
)
from cepheid_metadata import LedgerState, Position
from tests.managed_ledger.losing_store import LosingStore
from tests.managed_ledger.test_opening import assert_nothing_dangles
from tests.managed_ledger.topic_world import (
    KEEP,
    ONE_BOOKIE,
    SETTINGS,
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

FOUR = ("a", "b", "c", "d")
THREE_COPIES = ManagedLedgerConfig(3, 3, 2, KEEP)


def make_read_only(world: TopicWorld, *bookies: str) -> None:
    """As bookies whose disks are full: no new ledger gets them, and recoveries go on."""
    world.cluster.not_registered += bookies


def make_writable(world: TopicWorld) -> None:
    for bookie in world.cluster.not_registered:
        world.cluster[bookie].down = False
    world.cluster.not_registered.clear()


async def test_a_topic_opens_for_all_but_publishing_while_the_only_bookie_is_read_only() -> None:
    async with topic_world() as world:
        broker = world.broker()
        ledger = await broker.open()
        await ledger.create_cursor("sub", ledger.first_position())
        positions = await append_all(ledger, 5)
        await broker.crash()
        make_read_only(world, "a")

        ledger = await world.broker(seed=2).open()
        assert await read_all(ledger) == [b"m0", b"m1", b"m2", b"m3", b"m4"]
        cursor = ledger.cursors["sub"]
        cursor.acknowledge(positions[:2])
        await cursor.saved()
        await cursor.reset(ledger.next_position(ledger.last_confirmed), ())
        assert cursor.backlog_entries == 0
        await cursor.reset(positions[1], ())
        await ledger.create_cursor("latest", ledger.last_confirmed)
        with pytest.raises(NoOpenLedgerError, match="a ledger needs 1 bookies, 0 are available") as refused:
            await append(ledger, b"x")
        assert refused.value.retriable
        assert ledger.state is State.OPEN
        assert "0 are available" in str(ledger.statistics().lacking)

        with pytest.raises(NoOpenLedgerError):
            await ledger.require_open_ledger()
        make_writable(world)
        await ledger.require_open_ledger()
        assert ledger.statistics().lacking is None
        position = await append(ledger, b"m5")
        assert position.ledger_id > positions[0].ledger_id
        assert await read_all(ledger, positions[3]) == [b"m3", b"m4", b"m5"]
        assert {name: cursor.backlog_entries for name, cursor in ledger.cursors.items()} == {"sub": 5, "latest": 1}
        await assert_nothing_dangles(world)


async def test_two_of_four_bookies_that_died_close_no_topic_whose_last_ledger_can_be_recovered() -> None:
    async with topic_world(*FOUR) as world:
        broker = world.broker()
        ledger = await broker.open(THREE_COPIES)
        await append_all(ledger, 3)
        await broker.crash()
        (record,) = (await world.ledger_records()).values()
        (spare,) = set(FOUR) - set(record.fragments[0].ensemble)
        dead = (record.fragments[0].ensemble[0], spare)
        for bookie in dead:
            world.cluster[bookie].down = True
            world.cluster.not_registered.append(bookie)

        ledger = await world.broker(seed=2).open(THREE_COPIES)
        assert await read_all(ledger) == [b"m0", b"m1", b"m2"]
        with pytest.raises(NoOpenLedgerError, match="needs 3 bookies, 2 are available"):
            await append(ledger, b"x")
        make_writable(world)
        await ledger.require_open_ledger()
        await append(ledger, b"m3")
        assert await read_all(ledger) == [b"m0", b"m1", b"m2", b"m3"]


async def test_a_topic_whose_last_ledger_cannot_be_recovered_is_refused_and_names_the_bookies() -> None:
    async with topic_world("a", "b", "c") as world:
        broker = world.broker()
        await append_all(await broker.open(THREE_COPIES), 3)
        await broker.crash()
        for bookie in ("a", "b"):
            world.cluster[bookie].down = True
            world.cluster.not_registered.append(bookie)
        broker = world.broker(seed=2)
        with pytest.raises(RecoveryFailedError, match=r"without an answer: a: a is down .*, b: b is down"):
            await broker.open(THREE_COPIES)
        make_writable(world)
        assert await read_all(await broker.open(THREE_COPIES)) == [b"m0", b"m1", b"m2"]


@pytest.mark.parametrize("reopened", [False, True])
async def test_a_topic_that_never_had_a_ledger_takes_subscriptions_and_its_first_message_comes_to_them(reopened: bool) -> None:
    async with topic_world() as world:
        make_read_only(world, "a")
        broker = world.broker()
        ledger = await broker.open()
        assert await read_all(ledger) == []
        await ledger.create_cursor("earliest", ledger.first_position())
        await ledger.create_cursor("latest", ledger.last_confirmed)
        with pytest.raises(NoOpenLedgerError, match="0 are available"):
            await append(ledger, b"x")
        await ledger.cursors["latest"].reset(ledger.next_position(ledger.last_confirmed), ())
        if reopened:
            await broker.crash()
            ledger = await world.broker(seed=2).open()
        make_writable(world)
        await ledger.require_open_ledger()
        cursors = ledger.cursors
        assert {cursor.mark_delete for cursor in cursors.values()} == {ledger.last_confirmed}
        position = await append(ledger, b"m0")
        assert ledger.first_position() == Position(position.ledger_id, -1)
        assert await read_all(ledger) == [b"m0"]
        assert {name: cursor.backlog_entries for name, cursor in cursors.items()} == {"earliest": 1, "latest": 1}
        cursors["earliest"].acknowledge([position])
        await cursors["earliest"].saved()
        assert cursors["earliest"].mark_delete == position
        await assert_nothing_dangles(world)


@pytest.mark.parametrize("change", ["create", "reset"])
async def test_a_cursor_that_is_placed_while_the_first_ledger_is_recorded_is_in_that_ledger(change: str) -> None:
    """Whatever of the two comes first, and however many turns of the loop are between them."""
    for turns in range(40):
        async with topic_world() as world:
            make_read_only(world, "a")
            ledger = await world.broker().open()
            if change == "reset":
                await ledger.create_cursor("sub", ledger.first_position())
            make_writable(world)
            starting = asyncio.create_task(ledger.require_open_ledger())
            for _ in range(turns):
                await asyncio.sleep(0)
            if change == "create":
                await ledger.create_cursor("sub", ledger.first_position())
            else:
                await ledger.cursors["sub"].reset(ledger.next_position(ledger.last_confirmed), ())
            await starting
            assert ledger.cursors["sub"].mark_delete == ledger.first_position(), turns


async def test_a_topic_that_never_had_a_ledger_begins_above_the_ledgers_of_its_name_that_were_deleted() -> None:
    async with topic_world() as world:
        broker = world.broker()
        (old,) = await append_all(await broker.open(), 1)
        await broker.ledgers.delete(TOPIC)
        make_read_only(world, "a")
        ledger = await broker.open()
        await ledger.create_cursor("sub", old)
        make_writable(world)
        await ledger.require_open_ledger()
        position = await append(ledger, b"x")
        assert position.ledger_id > old.ledger_id
        assert ledger.cursors["sub"].backlog_entries == 1


@pytest.mark.parametrize("end", ["terminate", "delete", "close"])
async def test_a_topic_that_never_had_a_ledger_can_be_ended(end: str) -> None:
    async with topic_world() as world:
        make_read_only(world, "a")
        broker = world.broker()
        ledger = await broker.open()
        await ledger.create_cursor("sub", ledger.first_position())
        if end == "delete":
            await ledger.delete()
            assert await world.ledger_records() == {}
            return
        if end == "terminate":
            await ledger.terminate()
        await broker.aclose()
        make_writable(world)
        ledger = await world.broker(seed=2).open()
        assert await read_all(ledger) == []
        assert ledger.is_terminated is (end == "terminate")
        assert ledger.cursors["sub"].backlog_entries == 0


async def test_an_empty_topic_opens_too_and_leaves_no_ledgers_behind() -> None:
    async with topic_world() as world:
        broker = world.broker()
        ledger = await broker.open()
        await ledger.create_cursor("sub", ledger.last_confirmed)
        await broker.crash()
        make_read_only(world, "a")
        for seed in (2, 3, 4):
            broker = world.broker(seed=seed)
            ledger = await broker.open()
            assert await read_all(ledger) == []
            assert len(await world.ledger_records()) == 1
            await broker.crash()
        make_writable(world)
        ledger = await world.broker(seed=5).open()
        await append(ledger, b"x")
        assert ledger.cursors["sub"].backlog_entries == 1
        await wait_until(lambda: ledger.statistics().waiting_deletions == 0)
        assert len(await world.ledger_records()) == 1


async def test_an_owner_without_an_open_ledger_is_deposed_like_any_other() -> None:
    async with topic_world() as world:
        first = await world.broker().open()
        cursor = await first.create_cursor("sub", first.first_position())
        positions = await append_all(first, 3)
        make_read_only(world, "a")
        second = await world.broker(seed=2).open()
        assert (await world.chain()).epoch == 2
        cursor.acknowledge(positions[:1])
        with pytest.raises(ManagedLedgerFencedError):
            await cursor.saved()
        third = await world.broker(seed=3).open()
        make_writable(world)
        with pytest.raises(ManagedLedgerFencedError):
            await second.require_open_ledger()
        assert second.state is State.FAILED
        await third.require_open_ledger()
        await append(third, b"x")
        await assert_nothing_dangles(world)
        assert [listed.ledger_id for listed in (await world.chain()).ledgers] == list(await world.ledger_records())


async def test_an_owner_without_an_open_ledger_learns_of_the_next_one_although_no_bookie_can_tell_it() -> None:
    async with topic_world(settings=SETTINGS.model_copy(update={"housekeeping_s": 1.0})) as world:
        make_read_only(world, "a")
        first = await world.broker().open()
        second = await world.broker(seed=2).open()
        await wait_until(lambda: first.state is State.FAILED)
        assert isinstance(first.failure, ManagedLedgerFencedError)
        await asyncio.sleep(3)
        assert second.state is State.OPEN


async def test_a_tick_starts_the_ledger_when_no_producer_asks() -> None:
    async with topic_world(settings=SETTINGS.model_copy(update={"housekeeping_s": 1.0})) as world:
        broker = world.broker()
        await append_all(await broker.open(), 1)
        await broker.crash()
        make_read_only(world, "a")
        ledger = await world.broker(seed=2).open()
        await asyncio.sleep(3)
        assert ledger.statistics().lacking is not None
        make_writable(world)
        await wait_until(lambda: ledger.statistics().lacking is None, what="the open ledger")
        assert (await world.chain()).ledgers[-1].is_open


async def test_nothing_behind_a_refused_append_is_stored_before_its_producer_heard_of_it() -> None:
    async with topic_world() as world:
        broker = world.broker()
        await append_all(await broker.open(), 1)
        await broker.crash()
        make_read_only(world, "a")
        ledger = await world.broker(seed=2).open()
        make_writable(world)
        starting = asyncio.ensure_future(ledger.require_open_ledger())
        refused = []
        while not starting.done():
            refused.append(append(ledger, b"behind"))
            await asyncio.sleep(0)
            if len(refused) > 200:
                break
        outcomes = await asyncio.gather(*refused, return_exceptions=True)
        stored = [isinstance(outcome, Position) for outcome in outcomes]
        assert stored == sorted(stored), "an append was stored before an earlier one was refused"
        await starting


@pytest.mark.parametrize("ledger_comes", [False, True])
async def test_it_is_terminated_closed_and_opened_again(ledger_comes: bool) -> None:
    async with topic_world() as world:
        broker = world.broker()
        positions = await append_all(await broker.open(), 2)
        await broker.crash()
        make_read_only(world, "a")
        broker = world.broker(seed=2)
        ledger = await broker.open()
        await ledger.aclose()
        ledger = await broker.open()
        if ledger_comes:
            make_writable(world)
            ledger.tick()
        assert await ledger.terminate() == positions[-1]
        assert ledger.lacking is None
        await broker.aclose()
        records = await world.ledger_records()
        assert all(record.state is LedgerState.CLOSED for record in records.values())
        ledger = await world.broker(seed=3).open()
        assert ledger.is_terminated
        assert await read_all(ledger) == [b"m0", b"m1"]


async def test_it_is_deleted_with_everything_it_has() -> None:
    async with topic_world() as world:
        broker = world.broker()
        await append_all(await broker.open(), 2)
        await broker.crash()
        make_read_only(world, "a")
        broker = world.broker(seed=2)
        ledger = await broker.open()
        await ledger.delete()
        assert await world.ledger_records() == {}


async def test_a_ledger_that_was_created_but_not_recorded_is_deleted_and_tried_again() -> None:
    async with topic_world() as world:
        broker = world.broker()
        await append_all(await broker.open(), 1)
        await broker.crash()
        make_read_only(world, "a")
        broker = world.broker(store=LosingStore(world.tree), seed=2)
        ledger = await broker.open()
        make_writable(world)
        create = broker.client.create

        async def create_then_lose_the_store(**options: object) -> object:
            writer = await create(**options)
            broker.store.unreachable = True
            return writer

        broker.client.create = create_then_lose_the_store
        with pytest.raises(NoOpenLedgerError):
            await ledger.require_open_ledger()
        broker.client.create = create
        broker.store.unreachable = False
        await ledger.require_open_ledger()
        await append(ledger, b"x")


async def test_retention_frees_ended_ledgers_of_a_topic_whose_only_bookie_is_read_only() -> None:
    """Opened before, or since."""
    small = SETTINGS.model_copy(update={"ledger_max_bytes": 20, "housekeeping_s": 1.0})
    async with topic_world(settings=small) as world:
        ledger = await world.broker().open(TRIM)
        cursor = await ledger.create_cursor("sub", ledger.first_position())
        positions = []
        for number in range(6):
            positions += await append_all(ledger, 10, prefix=f"{number}-", group=10)
            await wait_until(lambda number=number: ledger.statistics().rollovers == number + 1)
        make_read_only(world, "a")
        cursor.acknowledge(positions[:30])
        await cursor.saved()
        ids = sorted({position.ledger_id for position in positions})
        await wait_until(lambda: ledger.chain.ledgers[0].ledger_id == ids[3] and not ledger.statistics().waiting_deletions)
        assert not set(ids[:3]) & set(await world.ledger_records())

        ledger = await world.broker(seed=2).open(TRIM)
        ledger.cursors["sub"].acknowledge(positions[30:])
        await ledger.cursors["sub"].saved()
        await wait_until(lambda: len(ledger.chain.ledgers) == 1 and not ledger.statistics().waiting_deletions)
        assert len(await world.ledger_records()) == 1


async def test_acknowledgements_that_need_a_ledger_of_their_own_say_why_they_are_not_saved() -> None:
    tiny = SETTINGS.model_copy(update={"cursor_inline_bytes": 100, "cursor_part_bytes": 40})
    async with topic_world(settings=tiny) as world:
        broker = world.broker()
        ledger = await broker.open()
        await ledger.create_cursor("sub", ledger.first_position())
        positions = await append_all(ledger, 400)
        await broker.crash()
        make_read_only(world, "a")
        ledger = await world.broker(seed=2).open(ONE_BOOKIE, TOPIC)
        cursor = ledger.cursors["sub"]
        cursor.acknowledge(positions[1:399:2])
        with pytest.raises(NotEnoughBookiesError):
            await cursor.saved()
        with pytest.raises((NotEnoughBookiesError, CursorLedgerError), match="0 are available"):
            await cursor.saved()
        with pytest.raises(CursorLedgerError, match=r"next attempt in .*: a ledger needs 1 bookies, 0 are available"):
            await cursor.saved()
        assert "0 are available" in str(ledger.not_saving)
        cursor.acknowledge(positions[0::2])
        await cursor.saved()
        assert ledger.not_saving is None
