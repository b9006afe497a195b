"""A ledger breaks while it is written: it is recovered and followed by the next one, and nobody who appends hears of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial

import pytest

from cepheid_broker.topics.backlog import oldest_publish_time_ms
from cepheid_broker.topics.backlog_check import last_published_before
from cepheid_ledger import ClosedLedger
from cepheid_managed_ledger import (
    ChainDamagedError,
    ManagedLedger,
    ManagedLedgerClosedError,
    ManagedLedgerError,
    ManagedLedgerFailedError,
    ManagedLedgerFencedError,
    SplitPosition,
    State,
    TooManyAppendsError,
)
from cepheid_managed_ledger.chain_keeper import Plan
from cepheid_metadata import LedgerState, Op, OpResult, Position, StoreUnavailableError, keys
from cepheid_rpc import AddRequest, Status
from cepheid_wire import TopicName
from tests.managed_ledger.losing_store import LosingStore, changes
from tests.managed_ledger.test_opening import assert_nothing_dangles
from tests.managed_ledger.topic_world import (
    SETTINGS,
    THREE_BOOKIES,
    TOPIC,
    TopicWorld,
    append,
    append_all,
    payloads_of,
    read_all,
    topic_world,
)
from tests.support import run_async, wait_until

pytestmark = pytest.mark.virtual_time

SMALL = SETTINGS.model_copy(update={"ledger_max_entries": 5})
SOON_OVER = SETTINGS.model_copy(update={"ledger_failover_timeout_s": 0.2})


def slow(world: TopicWorld, delay_s: float) -> None:
    for bookie in world.cluster.bookies.values():
        bookie.delay_s = delay_s


def current(ledger: ManagedLedger) -> int:
    """The ledger that is written, whether the chain names it or not."""
    assert ledger._appender is not None
    return ledger._appender.writer.ledger_id


async def assert_stored_once(world: TopicWorld, ledger: ManagedLedger, expected: list[bytes]) -> None:
    """For whoever reads now, from memory or storage, and for the next owner."""
    assert await read_all(ledger) == expected
    assert await read_all(ledger, cached=False) == expected
    assert ledger.ledgers.total_entries == len(expected)
    assert ledger.last_confirmed == ledger.ledgers.last_position
    assert ledger.statistics().append_waiting_bytes == 0
    await ledger.aclose()
    await assert_nothing_dangles(world)
    again = await world.broker(seed=99).open()
    assert await read_all(again, cached=False) == expected
    await again.aclose()


async def test_somebody_recovers_the_ledger_while_it_is_written() -> None:
    async with topic_world("a", "b", "c") as world:
        ledger = await world.broker().open(THREE_BOOKIES)
        other = world.broker(seed=2).client
        await append(ledger, b"first")
        slow(world, 0.005)
        futures = []
        for number in range(60):
            futures.append(append(ledger, b"m%d" % number))
            if number % 20 == 10:
                await other.recover(current(ledger))
            await asyncio.sleep(0.001)
        positions = await asyncio.gather(*futures)
        assert positions == sorted(set(positions))
        assert ledger.statistics().failovers >= 2
        assert ledger.state is State.OPEN
        await assert_stored_once(world, ledger, [b"first", *(b"m%d" % number for number in range(60))])


def hang(world: TopicWorld) -> None:
    """What is appended from now on is on its way."""
    for bookie in world.cluster.bookies.values():
        bookie.hang = True


def fence(world: TopicWorld, ledger_id: int) -> None:
    for bookie in world.cluster.bookies.values():
        bookie.fence(ledger_id)


async def append_to_a_lost_ledger(world: TopicWorld, ledger: ManagedLedger) -> asyncio.Future[Position]:
    """What waits for the next ledger, as nobody tells where this one ends."""
    lac_down(world, True)
    fence(world, current(ledger))
    pending = append(ledger, b"x")
    await wait_until(lambda: ledger._appender is not None and ledger._appender.is_broken)
    return pending


def lac_down(world: TopicWorld, down: bool) -> None:
    for bookie in world.cluster.bookies.values():
        bookie.lac_down = down


def break_down(world: TopicWorld, ledger: ManagedLedger, stored: int) -> None:
    """Of what is on its way to the ledger, so many entries arrived, and their answers did not; it takes no more."""
    assert ledger._appender is not None
    groups = [item.group for item in ledger._appender._pending if item.group is not None]
    for bookie in world.cluster.bookies.values():
        left = stored
        for group in groups:
            if left > 0:
                bookie.hold(group.slice(group.first_entry_id, group.first_entry_id + min(left, len(group)) - 1))
            left -= len(group)
    fence(world, current(ledger))
    for bookie in world.cluster.bookies.values():
        bookie.hang = False


def want_to_read(ledger: ManagedLedger) -> None:
    """Somebody reads at the end: what is appended is cached."""
    ledger.read_cached(Position(-1, -1), max_entries=1, max_bytes=1)


async def test_what_was_stored_without_an_answer_is_answered_and_not_stored_again() -> None:
    """Scenario 27 (apache/pulsar#7490)."""
    async with topic_world("a", "b", "c") as world:
        ledger = await world.broker().open(THREE_BOOKIES)
        want_to_read(ledger)
        first = await append(ledger, b"a", b"b")
        hang(world)
        lost = [append(ledger, b"c"), append(ledger, b"d", b"e")]
        after = [append(ledger, b"f")]
        await asyncio.sleep(0.01)
        break_down(world, ledger, stored=3)
        after.append(append(ledger, b"g"))
        positions = await asyncio.gather(*lost, *after)
        last = ledger.ledgers.last_ledger_id
        assert positions == [Position(first.ledger_id, 2), Position(first.ledger_id, 3), Position(last, 0), Position(last, 1)]
        assert [item.entries for item in ledger.chain.ledgers] == [5, None]
        assert (ledger.chain.messages or {})[first.ledger_id] == 5
        assert ledger.statistics().failovers == 1
        await assert_stored_once(world, ledger, [b"a", b"b", b"c", b"d", b"e", b"f", b"g"])


@pytest.mark.parametrize("stored", [(2,), (1, 2), (1, 1, 1), (3, 0)])
def test_a_group_that_a_ledgers_end_cuts_in_two_is_answered_once(stored: tuple[int, ...]) -> None:
    async def main() -> None:
        async with topic_world() as world:
            ledger = await world.broker().open()
            want_to_read(ledger)
            before = await append(ledger, b"a")
            hang(world)
            answers: list[Position | ManagedLedgerError] = []
            ledger.append([b"b", b"c", b"d", b"e"], lambda outcome, _: answers.append(outcome), [1, 2, 3, 4])
            behind = append(ledger, b"f")
            ledger_ids = []
            for count in stored:
                broken = current(ledger)
                if count:
                    ledger_ids.append(broken)
                break_down(world, ledger, count)
                while current(ledger) == broken:
                    assert ledger.last_confirmed == before, "nobody sees the first half alone"
                    await asyncio.sleep(0)
                hang(world)
            ledger_ids.append(current(ledger))
            assert not answers
            world.cluster["a"].hang = False
            last = await behind
            (answer,) = answers
            assert isinstance(answer, SplitPosition)
            assert [first.ledger_id for first, _ in answer.runs] == ledger_ids
            counts = [count for count in stored if count]
            assert [count for _, count in answer.runs] == [*counts, 4 - sum(counts)]
            assert answer == answer.runs[0][0] == Position(before.ledger_id, 1)
            assert last.ledger_id == ledger_ids[-1]
            assert (ledger.chain.messages or {})[before.ledger_id] == 1 + sum(range(1, stored[0] + 1))
            await assert_stored_once(world, ledger, [b"a", b"b", b"c", b"d", b"e", b"f"])

    run_async(main())  # it looks at every step, and waits for time to pass meanwhile


@contextmanager
def commits_held(ledger: ManagedLedger) -> Iterator[None]:
    """Nothing is recorded in the chain before the end."""
    recorded, commit = asyncio.Event(), ledger._keeper.commit

    async def commit_later(plan: Plan) -> None:
        await recorded.wait()
        await commit(plan)

    ledger._keeper.commit = commit_later  # type: ignore[method-assign]
    try:
        yield
    finally:
        recorded.set()


@asynccontextmanager
async def half_stored(world: TopicWorld, ledger: ManagedLedger) -> AsyncIterator[asyncio.Future[Position]]:
    """Of b, c, d and e the first two are stored, and the chain does not say so before the end."""
    before = ledger.ledgers.total_entries
    hang(world)
    pending = append(ledger, b"b", b"c", b"d", b"e")
    await asyncio.sleep(0.01)
    with commits_held(ledger):
        break_down(world, ledger, stored=2)
        await wait_until(lambda: ledger.ledgers.total_entries == before + 2)
        yield pending


async def test_nobody_reads_the_first_half_of_a_group_before_the_rest_is_stored() -> None:
    async with topic_world() as world:
        ledger = await world.broker().open()
        before = await append(ledger, b"a")
        half = Position(before.ledger_id, 1)
        async with half_stored(world, ledger) as pending:
            assert await read_all(ledger, cached=False) == [b"a"]
            assert await read_all(ledger) == [b"a"]
            assert await ledger.read(half, max_entries=9, max_bytes=99) == []
        await pending
        assert payloads_of(await ledger.read(half, max_entries=2, max_bytes=99)) == [b"b", b"c"]
        await assert_stored_once(world, ledger, [b"a", b"b", b"c", b"d", b"e"])


async def test_a_half_that_nobody_may_read_has_no_age_and_is_never_too_old() -> None:
    """The search for its publish time went on for ever, in one step of the loop; expiry took it for trimmed, so for too old."""
    async with topic_world() as world:
        ledger = await world.broker().open()
        last = await append(ledger, b"a")  # no message: as old as can be
        cursor = await ledger.create_cursor("sub", ledger.first_position())
        assert await oldest_publish_time_ms(ledger, cursor) == 0
        async with half_stored(world, ledger) as pending:
            assert await last_published_before(ledger, last, before_ms=1) == last
            assert await oldest_publish_time_ms(ledger, cursor) == 0
            cursor.acknowledge([last])
            half = cursor.first_unacknowledged()
            assert half == Position(last.ledger_id, 1)
            assert await last_published_before(ledger, half, before_ms=1) is None
            assert await oldest_publish_time_ms(ledger, cursor) is None
        await pending
        assert await last_published_before(ledger, half, before_ms=1) == ledger.last_confirmed
        assert await oldest_publish_time_ms(ledger, cursor) == 0


async def test_nobody_who_reads_on_from_the_ledger_before_gets_that_half_either() -> None:
    """It was read ahead, behind a ledger of which the last entry is the topic's (seed 0x1409d09c9)."""
    async with topic_world(settings=SMALL) as world:
        ledger = await world.broker().open()
        first = await append(ledger, b"0")
        for number in range(1, 5):
            await append(ledger, b"%d" % number)
        await wait_until(lambda: len(ledger.chain.ledgers) == 2)
        async with half_stored(world, ledger) as pending:
            for entry_id in (0, 1):  # who goes on is read ahead of
                await ledger.read(Position(first.ledger_id, entry_id), max_entries=1, max_bytes=99)
            (stream,) = ledger._reads._streams.values()
            await wait_until(lambda: sum(map(len, stream.groups)) == 5)
            there = payloads_of(await ledger.read(Position(first.ledger_id, 2), max_entries=99, max_bytes=999))
            assert there == [b"2", b"3", b"4"]
        await pending
        await assert_stored_once(world, ledger, [b"0", b"1", b"2", b"3", b"4", b"b", b"c", b"d", b"e"])


async def roll_slowly(world: TopicWorld, ledger: ManagedLedger, futures: list[asyncio.Future[Position]]) -> None:
    """Appends until both ledgers of a rollover have some under way."""
    slow(world, 0.004)
    appender = ledger._appender
    assert appender is not None
    while not (appender._draining and appender._draining.unconfirmed and appender._current.unconfirmed):
        futures.append(append(ledger, b"m%d" % len(futures)))
        await asyncio.sleep(0.0005)


@pytest.mark.parametrize("which", ["draining", "next", "both"])
async def test_a_ledger_breaks_in_the_middle_of_a_rollover(which: str) -> None:
    async with topic_world("a", "b", "c", settings=SMALL) as world:
        ledger = await world.broker().open(THREE_BOOKIES)
        futures: list[asyncio.Future[Position]] = []
        await roll_slowly(world, ledger, futures)
        assert ledger._appender is not None
        assert ledger._appender._draining is not None
        draining, following = ledger._appender._draining.writer.ledger_id, current(ledger)
        if which != "next":
            fence(world, draining)
        if which != "draining":
            fence(world, following)
        futures += [append(ledger, b"m%d" % (len(futures) + number)) for number in range(3)]
        positions = await asyncio.gather(*futures)
        assert positions == sorted(set(positions))
        assert ledger.state is State.OPEN
        assert ledger.statistics().failovers >= 1
        if which == "draining":
            assert following not in [item.ledger_id for item in ledger.chain.ledgers]
            await wait_until(lambda: ledger.statistics().waiting_deletions == 0)
            assert following not in await world.ledger_records()
        await assert_stored_once(world, ledger, [b"m%d" % number for number in range(len(futures))])


async def test_a_drained_ledger_that_somebody_else_ended_is_followed_all_the_same() -> None:
    async with topic_world(settings=SMALL) as world:
        store = LosingStore(world.tree)
        ledger = await world.broker(store=store).open()
        other = world.broker(seed=2).client
        await append_all(ledger, 4)
        before = current(ledger)
        multi = store.multi

        async def recovered_first(ops):  # type: ignore[no-untyped-def]
            return await multi(ops)

        store.multi = recovered_first  # type: ignore[method-assign]
        put = store.put

        async def put_late(key, value, expected_version):  # type: ignore[no-untyped-def]
            if "/ledgers/" in key and "ids" not in key and (await world.ledger_records())[before].state is LedgerState.OPEN:
                await other.recover(before)
            return await put(key, value, expected_version)

        store.put = put_late  # type: ignore[method-assign]
        await append(ledger, b"m4")
        await wait_until(lambda: ledger.statistics().rollovers == 1)
        await append(ledger, b"m5")
        await assert_stored_once(world, ledger, [b"m%d" % number for number in range(6)])


@pytest.mark.parametrize("end", ["terminate", "close", "terminate, then close"])
async def test_a_ledger_breaks_while_the_topic_comes_to_its_end(end: str) -> None:
    async with topic_world("a", "b", "c") as world:
        ledger = await world.broker().open(THREE_BOOKIES)
        other = world.broker(seed=2).client
        slow(world, 0.005)
        futures = [append(ledger, b"m%d" % number) for number in range(10)]
        ending = [asyncio.ensure_future(ledger.terminate() if "terminate" in end else ledger.aclose())]
        await asyncio.sleep(0)
        await other.recover(current(ledger))
        if "then" in end:
            ending.append(asyncio.ensure_future(ledger.aclose()))
        positions = await asyncio.gather(*futures)
        assert positions == sorted(set(positions))
        await asyncio.gather(*ending, return_exceptions=True)
        if end == "terminate":
            assert await ending[0] == positions[-1]
        await ledger.aclose()
        await assert_nothing_dangles(world)
        again = await world.broker(seed=3).open(THREE_BOOKIES)
        assert await read_all(again) == [b"m%d" % number for number in range(10)]


async def test_terminating_waits_for_the_next_ledger_although_everything_is_answered() -> None:
    async with topic_world() as world:
        ledger = await world.broker().open()
        await append(ledger, b"a")
        hang(world)
        pending = append(ledger, b"b")
        await asyncio.sleep(0.01)
        with commits_held(ledger):
            terminating = asyncio.ensure_future(ledger.terminate())
            await asyncio.sleep(0.01)
            break_down(world, ledger, stored=1)
            position = await pending
            await asyncio.sleep(0.05)
        assert await terminating == position
        assert ledger.state is State.TERMINATED
        assert ledger.chain.terminated_at == position
        assert not any(item.is_open for item in ledger.chain.ledgers)
        assert await read_all(ledger, cached=False) == [b"a", b"b"]
        await ledger.aclose()
        await assert_nothing_dangles(world)


async def test_a_ledger_that_ends_below_what_was_answered_is_never_followed_by_another(caplog: pytest.LogCaptureFixture) -> None:
    async with topic_world() as world:
        broker = world.broker()
        ledger = await broker.open()
        await append(ledger, b"a")
        before = await world.chain()

        async def recover_to_nothing(_: int) -> ClosedLedger:
            return ClosedLedger(-1, 0)

        broker.client.recover = recover_to_nothing
        fence(world, current(ledger))
        with pytest.raises(ChainDamagedError, match="ends at -1"):
            await append(ledger, b"x")
        assert ledger.state is State.FAILED
        assert (await world.chain()).ledgers == before.ledgers
    assert "ledger.end_impossible" in {record.message for record in caplog.records}


async def test_a_topic_is_terminated_although_somebody_else_ended_its_ledger() -> None:
    async with topic_world() as world:
        ledger = await world.broker().open()
        (position,) = await append_all(ledger, 1)
        await world.broker(seed=2).client.recover(position.ledger_id)
        assert await ledger.terminate() == position
        assert ledger.state is State.TERMINATED
        await ledger.aclose()
        await assert_nothing_dangles(world)


async def test_another_owner_is_met_at_the_chain_and_not_before() -> None:
    """Scenario 26: an owner that slept through its replacement. What it had stored counts, the rest does not; nothing is harmed."""
    async with topic_world("a", "b", "c") as world:
        old = await world.broker().open(THREE_BOOKIES)
        failures: list[ManagedLedgerError] = []
        old.on_failed.append(failures.append)
        await append(old, b"a")
        hang(world)
        stored = append(old, b"b")
        await asyncio.sleep(0.01)
        break_down(world, old, stored=1)
        new = await world.broker(seed=2).open(THREE_BOOKIES)
        await append(new, b"c")
        late = [append(old, b"x"), append(old, b"y")]
        outcomes = await asyncio.gather(stored, *late, return_exceptions=True)
        assert outcomes[0] == Position(new.ledgers.ledger_ids[0], 1), "it is in the chain, whoever owns it"
        assert all(isinstance(outcome, ManagedLedgerFencedError) for outcome in outcomes[1:])
        assert len(failures) == 1
        assert old.state is State.FAILED
        await old.aclose()
        await append(new, b"d")
        await assert_stored_once(world, new, [b"a", b"b", b"c", b"d"])


async def test_what_no_ledger_takes_in_time_fails_in_order_and_the_topic_is_opened_anew() -> None:
    async with topic_world("a", "b", "c", settings=SOON_OVER) as world:
        broker = world.broker()
        ledger = await broker.open(THREE_BOOKIES)
        await append(ledger, b"a")
        for bookie in world.cluster.bookies.values():
            bookie.refuse = Status.FENCED
            bookie.lac_down = True
        answers: list[tuple[int, object]] = []
        for number in range(5):
            ledger.append([b"x"], lambda outcome, _, number=number: answers.append((number, outcome)))
        await wait_until(lambda: len(answers) == 5)
        assert [number for number, _ in answers] == [0, 1, 2, 3, 4]
        assert all(isinstance(outcome, ManagedLedgerFailedError) for _, outcome in answers)
        for bookie in world.cluster.bookies.values():
            bookie.refuse, bookie.lac_down = None, False
        ledger = await broker.open(THREE_BOOKIES)
        await append(ledger, b"b")
        payloads = await read_all(ledger)
        assert [payload for payload in payloads if payload != b"x"] == [b"a", b"b"]
        await ledger.aclose()
        await assert_nothing_dangles(world)


def only_recovery(add: Callable[[AddRequest], Status], request: AddRequest) -> Status:
    return add(request) if request.recovery else Status.FENCED


async def test_ledgers_that_take_nothing_use_up_one_time_together() -> None:
    async with topic_world("a", "b", "c", settings=SOON_OVER) as world:
        ledger = await world.broker().open(THREE_BOOKIES)
        await append(ledger, b"a")
        for bookie in world.cluster.bookies.values():
            bookie.add = partial(only_recovery, bookie.add)  # type: ignore[method-assign]
        before = asyncio.get_running_loop().time()
        with pytest.raises(ManagedLedgerFailedError):
            await append(ledger, b"x")
        assert asyncio.get_running_loop().time() - before < 3.0
        assert ledger.statistics().failovers >= 2
        assert len(ledger.chain.ledgers) < 12, "with pauses"


async def test_an_empty_ledger_that_a_rollover_led_to_has_its_own_time() -> None:
    settings = SETTINGS.model_copy(update={"ledger_failover_timeout_s": 0.5, "ledger_max_entries": 3})
    async with topic_world("a", "b", "c", settings=settings) as world:
        ledger = await world.broker().open(THREE_BOOKIES)
        await append(ledger, b"m0")
        fence(world, current(ledger))
        await append(ledger, b"m1")
        assert ledger.statistics().failovers == 1
        over_at = asyncio.get_running_loop().time() + 0.5
        for number in (2, 3):
            await append(ledger, b"m%d" % number)
        await wait_until(lambda: ledger.statistics().rollovers == 1 and not ledger._upkeep.is_rolling)
        await wait_until(lambda: asyncio.get_running_loop().time() > over_at)
        fence(world, current(ledger))
        await append(ledger, b"m4")
        assert ledger.statistics().failovers == 2
        await assert_stored_once(world, ledger, [b"m%d" % number for number in range(5)])


async def test_a_metadata_store_that_is_away_delays_the_next_ledger() -> None:
    async with topic_world() as world:
        store = LosingStore(world.tree)
        ledger = await world.broker(store=store).open()
        want_to_read(ledger)
        await append(ledger, b"a")
        await world.broker(seed=2).client.recover(current(ledger))
        put, create = store.put, store.create

        def reachable(call: Callable[..., object]) -> Callable[..., object]:
            async def checked(*args, **kwargs):  # type: ignore[no-untyped-def]
                store._check_reachable()
                return await call(*args, **kwargs)  # type: ignore[misc]

            return checked

        store.put, store.create = reachable(put), reachable(create)  # type: ignore[method-assign, assignment]
        store.unreachable = True
        pending = append(ledger, b"b")
        await asyncio.sleep(0.1)
        assert not pending.done()
        assert await read_all(ledger) == [b"a"], "who reads does not notice"
        store.unreachable = False
        await pending
        await assert_stored_once(world, ledger, [b"a", b"b"])


@pytest.mark.parametrize("lost", ["answer", "request"])
async def test_a_lost_answer_of_the_chains_write_is_looked_up(lost: str) -> None:
    async with topic_world() as world:
        store = LosingStore(world.tree)
        ledger = await world.broker(store=store).open()
        await append(ledger, b"a")
        await world.broker(seed=2).client.recover(current(ledger))
        store.lose = lambda ops: lost if changes(ops, "chains") and not store.lost else None
        await append(ledger, b"b")
        assert store.lost == 1
        assert ledger.statistics().failovers == 1
        await assert_stored_once(world, ledger, [b"a", b"b"])


class DeafStore(LosingStore):
    """Applies one write of a chain, and neither tells nor shows it."""

    deaf = False

    async def multi(self, ops: Sequence[Op]) -> list[OpResult]:
        if not (self.deaf and changes(ops, "chains")):
            return await super().multi(ops)
        await super().multi(ops)
        self.lost += 1
        raise StoreUnavailableError("the connection broke", outcome_unknown=True)

    async def get(self, key: str):  # type: ignore[no-untyped-def]
        if self.deaf and self.lost and key == keys.chain_key(TOPIC):
            raise StoreUnavailableError("the store is away")
        return await super().get(key)


@pytest.mark.parametrize("change", ["failover", "rollover"])
async def test_a_next_ledger_that_the_chain_may_name_is_not_deleted(change: str) -> None:
    settings = SMALL.model_copy(update={"metadata_timeout_s": 0.1, "drain_timeout_s": 0.1})
    async with topic_world(settings=settings) as world:
        store = DeafStore(world.tree)
        ledger = await world.broker(store=store).open()
        await append(ledger, b"m0")
        store.deaf = True
        if change == "failover":
            fence(world, current(ledger))
            lost = append(ledger, b"lost")
        else:
            for number in range(1, 5):
                lost = append(ledger, b"m%d" % number)
        await wait_until(lambda: store.lost == 1)
        await ledger.aclose()
        await asyncio.gather(lost, return_exceptions=True)
        assert len((await world.chain()).ledgers) == 2, "the write did arrive"
        await assert_nothing_dangles(world)
        again = await world.broker(seed=2).open()
        assert (await read_all(again))[:1] == [b"m0"]
        await append(again, b"goes on")


async def test_what_waits_for_a_ledger_is_bounded() -> None:
    settings = SETTINGS.model_copy(update={"append_window_bytes": 100})
    async with topic_world("a", "b", "c", settings=settings) as world:
        ledger = await world.broker().open(THREE_BOOKIES)
        await append(ledger, b"a")
        for bookie in world.cluster.bookies.values():
            bookie.lac_down = True  # it cannot be recovered
        fence(world, current(ledger))
        waiting = [append(ledger, bytes(40)) for _ in range(2)]
        await wait_until(lambda: ledger._appender is not None and ledger._appender.is_broken)
        with pytest.raises(TooManyAppendsError):
            await append(ledger, bytes(40))
        lac_down(world, False)
        await asyncio.gather(*waiting)
        await assert_stored_once(world, ledger, [b"a", bytes(40), bytes(40)])


async def test_closing_does_not_wait_for_a_ledger_that_cannot_be_replaced() -> None:
    settings = SETTINGS.model_copy(update={"drain_timeout_s": 0.1})
    async with topic_world("a", "b", "c", settings=settings) as world:
        ledger = await world.broker().open(THREE_BOOKIES)
        pending = await append_to_a_lost_ledger(world, ledger)
        began = asyncio.get_running_loop().time()
        await ledger.aclose()
        assert asyncio.get_running_loop().time() - began < SETTINGS.ledger_failover_timeout_s / 2
        with pytest.raises(ManagedLedgerClosedError):
            await pending
        lac_down(world, False)


async def test_a_session_that_ends_in_the_middle_of_it_fails_what_waits() -> None:
    async with topic_world("a", "b", "c") as world:
        broker = world.broker()
        ledger = await broker.open(THREE_BOOKIES)
        await append(ledger, b"a")
        pending = await append_to_a_lost_ledger(world, ledger)
        broker.store.expire_session()
        with pytest.raises(ManagedLedgerFailedError, match="session"):
            await pending
        lac_down(world, False)
        broker.store.renew_session()
        ledger = await broker.open(THREE_BOOKIES)
        assert await append(ledger, b"b")
        assert [payload for payload in await read_all(ledger) if payload != b"x"] == [b"a", b"b"]


async def test_a_session_that_ends_while_all_topics_are_closed_fails_what_waits() -> None:
    """Nobody listened to the session any more: what was recovered afterwards was told OK by an owner of the past."""
    async with topic_world("a", "b", "c") as world:
        broker = world.broker()
        ledger = await broker.open(THREE_BOOKIES)
        await append(ledger, b"a")
        pending = await append_to_a_lost_ledger(world, ledger)
        closing = asyncio.ensure_future(broker.ledgers.aclose())
        await wait_until(lambda: ledger.state is State.CLOSED)
        assert not pending.done()
        broker.store.expire_session()
        broker.store.renew_session()
        lac_down(world, False)
        with pytest.raises(ManagedLedgerFailedError, match="session"):
            await pending
        await closing


async def test_many_appends_go_to_the_next_ledger_in_turns_and_in_order() -> None:
    async with topic_world() as world:
        ledger = await world.broker().open()
        world.cluster["a"].fence(current(ledger))
        futures = [append(ledger, b"%d" % number + bytes(1 << 20)) for number in range(30)]
        assert len(await asyncio.gather(*futures)) == 30
        groups = await ledger.read(Position(-1, -1), max_entries=100, max_bytes=1 << 30)
        found = payloads_of(groups)
        while len(found) < 30:
            last = Position(groups[-1].ledger_id, groups[-1].last_entry_id)
            groups = await ledger.read(ledger.next_position(last), max_entries=100, max_bytes=1 << 30)
            found += payloads_of(groups)
        assert [payload.rstrip(b"\0") for payload in found] == [b"%d" % number for number in range(30)]


async def test_many_topics_lose_their_ledgers_together() -> None:
    async with topic_world("a", "b", "c") as world:
        broker = world.broker()
        topics = [TopicName.parse(f"persistent://public/default/t{number}") for number in range(60)]
        ledgers = [await broker.open(THREE_BOOKIES, topic) for topic in topics]
        await asyncio.gather(*(append(ledger, b"a") for ledger in ledgers))
        for ledger in ledgers:
            fence(world, current(ledger))
        await asyncio.gather(*(append(ledger, b"%d" % number) for number in range(3) for ledger in ledgers))
        for ledger in ledgers:
            assert ledger.statistics().failovers == 1
            assert len(ledger.chain.ledgers) == 2
            assert await read_all(ledger, cached=False) == [b"a", b"0", b"1", b"2"]
