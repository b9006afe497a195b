"""The metadata store goes away and comes back: an open topic goes on, and what needs records waits or says so."""

from __future__ import annotations

import asyncio

import pytest

from cepheid_ledger import LedgerWriter
from cepheid_managed_ledger import ManagedLedger, ManagedLedgerFailedError, State
from cepheid_metadata import Position, SessionState, StoreUnavailableError
from tests.managed_ledger.losing_store import LosingStore, changes
from tests.managed_ledger.test_opening import assert_nothing_dangles
from tests.managed_ledger.topic_world import SETTINGS, TRIM, append, append_all, read_all, topic_world
from tests.support import wait_until

pytestmark = pytest.mark.virtual_time

QUICK = SETTINGS.model_copy(update={"metadata_timeout_s": 0.1, "ledger_max_entries": 5, "drain_timeout_s": 0.3})
PATIENT = SETTINGS.model_copy(update={"ledger_max_entries": 5})


async def lose_a_save(store: LosingStore, ledger: ManagedLedger, position: Position) -> None:
    """The store goes away in the middle of saving a cursor: nobody knows what became of the write."""
    store.lose = lambda _: "answer"
    ledger.cursors["sub"].acknowledge([position])
    await wait_until(lambda: store.lost > 0)
    store.lose = lambda _: None
    store.unreachable = True


async def test_a_write_in_doubt_waits_for_the_store_and_the_topic_goes_on() -> None:
    async with topic_world(settings=QUICK) as world:
        store = LosingStore(world.tree)
        ledger = await world.broker(store=store).open()
        cursor = await ledger.create_cursor("sub", ledger.first_position())
        ledger.read_cached(Position(-1, -1), max_entries=1, max_bytes=1)
        positions = await append_all(ledger, 3)
        await lose_a_save(store, ledger, positions[0])
        for number in range(30):  # three times what an opening would wait
            await append(ledger, b"n%d" % number)
            await asyncio.sleep(0.01)
        assert ledger.state is State.OPEN
        assert len({item.ledger_id for item in ledger.chain.ledgers}) == 1, "no rollover meanwhile"
        cursor.acknowledge([positions[1]])
        store.unreachable = False
        await wait_until(lambda: not ledger._cursors._saved["sub"].is_dirty)
        await ledger.aclose()
        again = await world.broker(seed=2).open()
        assert again.cursors["sub"].mark_delete == positions[1]
        assert len(await read_all(again)) == 33


@pytest.mark.parametrize("in_doubt", [False, True])
async def test_a_store_that_goes_away_in_the_middle_of_a_rollover_is_waited_for(in_doubt: bool) -> None:
    async with topic_world(settings=QUICK) as world:
        store = LosingStore(world.tree)
        ledger = await world.broker(store=store).open()
        await append_all(ledger, 4)
        appender = ledger._appender
        assert appender is not None
        switch_to = appender.switch_to

        def go_away(writer: LedgerWriter) -> LedgerWriter:
            if in_doubt:
                store.lose = lambda ops: "request" if changes(ops, "chains") else None
            else:
                store.unreachable = True
            return switch_to(writer)

        appender.switch_to = go_away  # type: ignore[method-assign]
        await append(ledger, b"full")
        await wait_until(lambda: appender.is_switching and (store.lost > 0 or not in_doubt))
        store.unreachable = True
        late = append(ledger, b"late")
        await asyncio.sleep(0.3)
        assert ledger.state is State.OPEN
        assert not late.done()
        store.unreachable, store.lose = False, lambda _: None
        assert (await late).entry_id == 0
        await append(ledger, b"later")
        assert [payload.decode() for payload in await read_all(ledger)] == ["m0", "m1", "m2", "m3", "full", "late", "later"]
        await ledger.aclose()
        await assert_nothing_dangles(world)


async def test_acknowledgements_with_a_response_wait_a_moment_and_then_say_so() -> None:
    async with topic_world(settings=PATIENT.model_copy(update={"metadata_timeout_s": 0.3})) as world:
        store = LosingStore(world.tree)
        ledger = await world.broker(store=store).open()
        cursor = await ledger.create_cursor("sub", ledger.first_position())
        positions = await append_all(ledger, 3)
        store.unreachable = True
        cursor.acknowledge(positions[:1])
        saved = asyncio.ensure_future(cursor.saved())
        await asyncio.sleep(0.05)
        store.unreachable = False
        await saved
        store.unreachable = True
        cursor.acknowledge(positions[1:2])
        with pytest.raises(StoreUnavailableError) as refused:
            await cursor.saved()
        assert refused.value.retriable
        with pytest.raises(StoreUnavailableError):
            await ledger.create_cursor("another", ledger.first_position())
        store.unreachable = False
        again = world.broker(seed=2)

        async def is_saved() -> bool:
            found = await again.open()
            return found.cursors["sub"].mark_delete == positions[1]

        await asyncio.sleep(3 * SETTINGS.cursor_flush_s)  # the flusher's turn, without anybody asking
        assert await is_saved()


async def test_what_waits_behind_a_write_in_doubt_is_refused_in_time() -> None:
    async with topic_world(settings=QUICK) as world:
        store = LosingStore(world.tree)
        ledger = await world.broker(store=store).open()
        cursor = await ledger.create_cursor("sub", ledger.first_position())
        positions = await append_all(ledger, 2)
        await lose_a_save(store, ledger, positions[0])
        cursor.acknowledge([positions[1]])
        for asked in (cursor.saved(), ledger.create_cursor("new", ledger.first_position()), cursor.reset(positions[0])):
            with pytest.raises(StoreUnavailableError):
                await asked
        assert ledger.state is State.OPEN
        store.unreachable = False
        await wait_until(lambda: "new" in ledger.cursors)
        await wait_until(lambda: cursor.mark_delete == ledger.first_position())


async def test_closing_gives_a_write_in_doubt_up() -> None:
    async with topic_world(settings=QUICK) as world:
        store = LosingStore(world.tree)
        ledger = await world.broker(store=store).open()
        await ledger.create_cursor("sub", ledger.first_position())
        positions = await append_all(ledger, 2)
        await lose_a_save(store, ledger, positions[0])
        await asyncio.sleep(0.2)
        began = asyncio.get_running_loop().time()
        await ledger.aclose()
        assert asyncio.get_running_loop().time() - began < 5
        store.unreachable = False


async def test_a_lost_session_ends_a_write_in_doubt_and_every_handle() -> None:
    async with topic_world(settings=QUICK) as world:
        store = LosingStore(world.tree)
        broker = world.broker(store=store)
        ledger = await broker.open()
        await ledger.create_cursor("sub", ledger.first_position())
        positions = await append_all(ledger, 2)
        await lose_a_save(store, ledger, positions[0])
        broker.ledgers.on_session(SessionState.SUSPENDED)
        await append(ledger, b"goes on")
        broker.ledgers.on_session(SessionState.LOST)
        broker.ledgers.on_session(SessionState.LOST)
        with pytest.raises(ManagedLedgerFailedError) as failed:
            await append(ledger, b"x")
        assert failed.value.retriable
        assert ledger.state is State.FAILED
        store.unreachable = False
        again = await broker.open()
        assert await read_all(again) == [b"m0", b"m1", b"goes on"]


async def test_trimming_is_postponed() -> None:
    async with topic_world(settings=PATIENT) as world:
        store = LosingStore(world.tree)
        ledger = await world.broker(store=store).open(TRIM)
        cursor = await ledger.create_cursor("sub", ledger.first_position())
        await append_all(ledger, 5)
        await wait_until(lambda: ledger.statistics().rollovers == 1)
        store.unreachable = True
        cursor.acknowledge_cumulative(ledger.last_confirmed)
        with pytest.raises(StoreUnavailableError):
            await cursor.saved()
        assert ledger.statistics().trimmed_ledgers == 0
        assert ledger.state is State.OPEN
        store.unreachable = False
        await cursor.saved()
        await wait_until(lambda: ledger.statistics().trimmed_ledgers == 1)
