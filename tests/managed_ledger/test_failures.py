"""An append fails, or a rollover: everything is answered once and in order, and a new opening has what was acknowledged."""

from __future__ import annotations

import asyncio
from typing import NoReturn

import pytest

from cepheid_managed_ledger import (
    ManagedLedgerClosedError,
    ManagedLedgerError,
    ManagedLedgerFailedError,
    ManagedLedgerSettings,
    State,
    TooManyAppendsError,
)
from cepheid_metadata import BadVersionError, Position, StoreUnavailableError
from cepheid_rpc import Status
from tests.managed_ledger.losing_store import LosingStore, changes
from tests.managed_ledger.test_opening import assert_nothing_dangles
from tests.managed_ledger.topic_world import SETTINGS, THREE_BOOKIES, append, append_all, read_all, topic_world
from tests.support import wait_until

pytestmark = pytest.mark.virtual_time

SMALL = SETTINGS.model_copy(update={"ledger_max_entries": 5})


async def test_appends_that_no_ledger_takes_in_time_fail_in_order_and_each_once() -> None:
    async with topic_world(settings=SETTINGS.model_copy(update={"ledger_failover_timeout_s": 0.1})) as world:
        ledger = await world.broker().open()
        await append(ledger, b"a")
        world.cluster["a"].refuse = Status.FENCED
        answers: list[tuple[int, object]] = []
        failed: list[object] = []
        ledger.on_failed.append(failed.append)
        for number in range(5):
            ledger.append([b"x"], lambda outcome, _, number=number: answers.append((number, outcome)))
        await wait_until(lambda: len(answers) == 5)
        assert [number for number, _ in answers] == [0, 1, 2, 3, 4]
        assert all(isinstance(outcome, ManagedLedgerFailedError) for _, outcome in answers)
        assert len(failed) == 1
        with pytest.raises(ManagedLedgerFailedError):
            await append(ledger, b"y")
        assert ledger.statistics().append_waiting_bytes == 0
        world.cluster["a"].refuse = None
        await ledger.aclose()
        ledger = await world.broker(seed=2).open()
        assert (await read_all(ledger))[0] == b"a"


async def test_rolls_over_by_entries_without_holding_appends_back() -> None:
    async with topic_world(settings=SMALL) as world:
        ledger = await world.broker().open()
        positions = await append_all(ledger, 57)
        assert positions == sorted(positions)
        await wait_until(lambda: ledger.statistics().rollovers > 0)
        positions += await append_all(ledger, 23, "n")
        assert len(set(positions)) == 80
        expected = [f"m{index}".encode() for index in range(57)] + [f"n{index}".encode() for index in range(23)]
        assert await read_all(ledger, cached=False) == expected
        assert await read_all(ledger) == expected
        await ledger.aclose()
        await assert_nothing_dangles(world)
        assert len((await world.chain()).ledgers) > 2


async def test_what_the_next_ledger_confirms_is_answered_only_when_the_chain_names_it() -> None:
    async with topic_world(settings=SMALL) as world:
        store = LosingStore(world.tree)
        ledger = await world.broker(store=store).open()
        first = (await append_all(ledger, 4))[0]
        gate = asyncio.Event()
        multi = store.multi

        async def slow_multi(ops):  # type: ignore[no-untyped-def]
            await gate.wait()
            return await multi(ops)

        store.multi = slow_multi  # type: ignore[method-assign]
        await append(ledger, b"full")
        rolling = ledger._appender
        assert rolling is not None
        await wait_until(lambda: rolling.is_switching)
        late = [append(ledger, b"n0"), append(ledger, b"n1")]
        await wait_until(lambda: len(rolling._current.held) == 2)
        assert not any(future.done() for future in late)
        assert ledger.last_confirmed == Position(first.ledger_id, 4)
        assert await read_all(ledger) == [b"m0", b"m1", b"m2", b"m3", b"full"]
        gate.set()
        positions = await asyncio.gather(*late)
        assert [position.entry_id for position in positions] == [0, 1]
        assert positions[0].ledger_id > first.ledger_id
        assert await read_all(ledger) == [b"m0", b"m1", b"m2", b"m3", b"full", b"n0", b"n1"]


@pytest.mark.parametrize("lost", ["answer", "request"])
async def test_a_rollover_whose_answer_got_lost_goes_on(lost: str) -> None:
    async with topic_world(settings=SMALL) as world:
        store = LosingStore(world.tree)
        ledger = await world.broker(store=store).open()
        store.lose = lambda ops: lost if changes(ops, "chains") and store.lost < 3 else None
        await append_all(ledger, 30, group=3)
        await wait_until(lambda: ledger.statistics().rollovers > 0)
        assert store.lost > 0
        assert ledger.state is State.OPEN
        await append_all(ledger, 30)
        assert len(await read_all(ledger, cached=False)) == 60
        await assert_nothing_dangles(world)


async def test_while_no_ledger_can_be_created_the_present_one_goes_on() -> None:
    async with topic_world(settings=SMALL) as world:
        store = LosingStore(world.tree)
        broker = world.broker(store=store)
        ledger = await broker.open()
        create = store.create

        async def no_create(*args, **kwargs):  # type: ignore[no-untyped-def]
            store._check_reachable()
            return await create(*args, **kwargs)

        store.create = no_create  # type: ignore[method-assign]
        store.unreachable = True
        positions = await append_all(ledger, 40)
        assert len({position.ledger_id for position in positions}) == 1
        assert ledger.state is State.OPEN
        store.unreachable = False


async def test_a_rollover_that_finds_another_owner_fails_everything_and_leaves_nothing() -> None:
    async with topic_world(settings=SMALL) as world:
        old = await world.broker().open()
        await append_all(old, 4)
        new = await world.broker(seed=2).open()
        answers = await asyncio.gather(*(append(old, b"x") for _ in range(20)), return_exceptions=True)
        assert all(isinstance(answer, ManagedLedgerError) for answer in answers)
        await append_all(new, 20, "n")
        await old.aclose()
        await wait_until(lambda: new.statistics().waiting_deletions == 0)
        await new.aclose()
        await assert_nothing_dangles(world)


async def test_more_than_the_window_is_refused_and_nothing_is_kept() -> None:
    settings = ManagedLedgerSettings(**{**SETTINGS.model_dump(), "append_window_bytes": 100})
    async with topic_world(settings=settings) as world:
        ledger = await world.broker().open()
        futures = [append(ledger, bytes(60)) for _ in range(3)]
        outcomes = await asyncio.gather(*futures, return_exceptions=True)
        assert isinstance(outcomes[0], Position)
        assert all(isinstance(outcome, TooManyAppendsError) and outcome.retriable for outcome in outcomes[1:])
        assert await append(ledger, bytes(500)) == Position(outcomes[0].ledger_id, 1), "one append always goes"
        assert len(await read_all(ledger)) == 2


async def test_nothing_is_stored_behind_a_refusal_that_its_producer_has_not_heard_of() -> None:
    settings = ManagedLedgerSettings(**{**SETTINGS.model_dump(), "append_window_bytes": 100})
    async with topic_world(settings=settings) as world:
        ledger = await world.broker().open()
        futures = [append(ledger, bytes(size)) for size in (60, 60, 10)]  # the last one alone would fit
        outcomes = await asyncio.gather(*futures, return_exceptions=True)
        assert isinstance(outcomes[0], Position)
        assert all(isinstance(outcome, TooManyAppendsError) for outcome in outcomes[1:])
        assert await append(ledger, bytes(10)) == Position(outcomes[0].ledger_id, 1), "heard of: it goes on"


async def test_closing_waits_for_appends_and_refuses_later_ones() -> None:
    async with topic_world("a", "b", "c") as world:
        for bookie in world.cluster.bookies.values():
            bookie.delay_s = 0.01
        ledger = await world.broker().open(THREE_BOOKIES)
        futures = [append(ledger, b"x") for _ in range(5)]
        closing = asyncio.ensure_future(ledger.aclose())
        await asyncio.sleep(0)
        with pytest.raises(ManagedLedgerClosedError):
            await append(ledger, b"late")
        assert len(await asyncio.gather(*futures)) == 5
        await closing
        await ledger.aclose()
        assert next(iter((await world.ledger_records()).values())).last_entry_id == 4


async def test_a_bookie_that_hangs_delays_closing_by_a_bounded_time() -> None:
    settings = SETTINGS.model_copy(update={"drain_timeout_s": 0.05})
    async with topic_world(settings=settings) as world:
        ledger = await world.broker().open()
        await append(ledger, b"a")
        world.cluster["a"].hang = True
        pending = append(ledger, b"b")
        await ledger.aclose()
        with pytest.raises(ManagedLedgerError):
            await pending
        world.cluster["a"].hang = False


@pytest.mark.parametrize("wins", ["closing", "rollover"])
async def test_closing_during_a_rollover_that_fails_answers_everything(wins: str) -> None:
    async with topic_world(settings=SMALL) as world:
        store = LosingStore(world.tree)
        ledger = await world.broker(store=store).open()
        await append_all(ledger, 4)
        multi = store.multi
        gate = asyncio.Event()

        async def held_multi(ops):  # type: ignore[no-untyped-def]
            await gate.wait()
            if wins == "rollover" or not changes(ops, "chains"):
                return await multi(ops)
            raise BadVersionError("somebody else was here", op_index=0)

        store.multi = held_multi  # type: ignore[method-assign]
        await append(ledger, b"full")
        await wait_until(lambda: ledger._appender is not None and ledger._appender.is_switching)
        late = [append(ledger, b"n") for _ in range(3)]
        ending = [asyncio.ensure_future(ledger.aclose()), asyncio.ensure_future(ledger.aclose())]
        await asyncio.sleep(0.01)
        gate.set()
        await asyncio.gather(*ending)
        outcomes = await asyncio.gather(*late, return_exceptions=True)
        if wins == "rollover":
            assert all(isinstance(outcome, Position) for outcome in outcomes)
        else:
            assert all(isinstance(outcome, ManagedLedgerError) for outcome in outcomes)
        store.multi = multi  # type: ignore[method-assign]


async def test_a_rollover_in_which_appends_fail_gives_up_the_ledger_before() -> None:
    async with topic_world(settings=SMALL.model_copy(update={"drain_timeout_s": 0.05})) as world:
        ledger = await world.broker().open()
        await append_all(ledger, 4)
        appender = ledger._appender
        assert appender is not None
        before = appender.writer
        world.cluster["a"].hang = True
        late = [append(ledger, b"x") for _ in range(3)]
        ledger.tick()
        await wait_until(lambda: appender.is_switching)
        await ledger.aclose()
        assert all(isinstance(outcome, ManagedLedgerError) for outcome in await asyncio.gather(*late, return_exceptions=True))
        assert before.in_flight_bytes == 0, "nobody waits for it any more"
        world.cluster["a"].hang = False


@pytest.mark.deadline(60.0)
async def test_a_rollover_that_cannot_end_the_ledger_before_gives_it_up() -> None:
    async with topic_world("a", "b", "c", "d", settings=SMALL.model_copy(update={"drain_timeout_s": 0.05})) as world:
        store = LosingStore(world.tree)
        broker = world.broker(store=store)
        ledger = await broker.open(THREE_BOOKIES)
        appender = ledger._appender
        assert appender is not None

        async def no_write(*_: object) -> NoReturn:
            raise StoreUnavailableError("the connection broke", outcome_unknown=True)

        put, multi = store.put, store.multi
        store.put = store.multi = no_write  # type: ignore[method-assign]
        world.cluster[appender.writer.metadata.last_fragment.ensemble[0]].refuse = Status.READ_ONLY
        appended = []
        while not appender.is_switching:
            appended.append(append(ledger, b"x"))
            await asyncio.sleep(0.001)
        assert broker.client.ensemble_change_statistics().kept_bytes > 0, "another bookie may be named, and have nothing yet"
        await ledger.aclose()
        await asyncio.gather(*appended, return_exceptions=True)
        assert broker.client.ensemble_change_statistics().kept_bytes == 0
        store.put, store.multi = put, multi  # type: ignore[method-assign]


async def test_terminating_and_closing_at_once() -> None:
    async with topic_world() as world:
        world.cluster["a"].delay_s = 0.01
        ledger = await world.broker().open()
        futures = [append(ledger, b"x") for _ in range(3)]
        await asyncio.gather(ledger.terminate(), ledger.aclose(), return_exceptions=True)
        assert len(await asyncio.gather(*futures)) == 3


async def test_a_session_that_ends_fails_every_topic() -> None:
    async with topic_world() as world:
        broker = world.broker()
        ledger = await broker.open()
        failed: list[object] = []
        ledger.on_failed.append(failed.append)
        pending = append(ledger, b"x")
        broker.store.expire_session()
        with pytest.raises(ManagedLedgerFailedError, match="session"):
            await pending
        assert len(failed) == 1
        broker.store.renew_session()
        ledger = await broker.open()
        await append(ledger, b"y")
