"""Writers that nobody appends to: the LAC they tell, and the look at their record before they go on."""

from __future__ import annotations

import asyncio
import copy

import pytest

from cepheid_ledger import LedgerFencedError, LedgerSettings, NoSuchLedgerError, WriterPhase
from cepheid_ledger.idle_writers import IdleWriters
from cepheid_metadata import MemoryStore, MemoryTree, Versioned
from cepheid_rpc import ExplicitLac, Status
from tests.ledger.faulty_store import FaultyStore
from tests.ledger.ledger_world import FAST, LedgerWorld, append, ledger_world
from tests.support import wait_until

pytestmark = pytest.mark.virtual_time

TALKATIVE = FAST.model_copy(update={"explicit_lac_interval_s": 0.02})


def idle_writers(world: LedgerWorld) -> IdleWriters:
    return world.client._idle_writers


async def test_an_idle_writer_tells_its_lac_once_and_rests() -> None:
    async with ledger_world(settings=TALKATIVE) as world:
        writer = await world.create()
        await append(writer, [b"x", b"y"])
        bookies = world.cluster.bookies.values()
        await wait_until(lambda: all(b.explicit_lacs.get(writer.ledger_id) == 1 for b in bookies), what="the LAC at bookies")
        await wait_until(lambda: idle_writers(world)._timer is None, what="no timer while all are at rest")
        assert idle_writers(world).lacs_told == 3
        await append(writer, [b"z"])
        await wait_until(lambda: all(b.explicit_lacs.get(writer.ledger_id) == 2 for b in bookies), what="the next LAC")


async def test_what_is_not_confirmed_is_not_told() -> None:
    async with ledger_world(settings=TALKATIVE.model_copy(update={"add_timeout_s": 5.0})) as world:
        writer = await world.create()
        await append(writer, [b"x"])
        for bookie in "ab":
            world.cluster[bookie].drop_adds = True
        pending = append(writer, [b"y"])
        await wait_until(lambda: world.cluster["c"].explicit_lacs.get(writer.ledger_id) == 0)
        await wait_until(lambda: world.cluster["c"].ids(writer.ledger_id) == [0, 1])
        assert world.cluster["c"].explicit_lacs[writer.ledger_id] == 0
        await writer.aclose()
        await asyncio.gather(pending, return_exceptions=True)


async def test_what_is_confirmed_late_is_told_late() -> None:
    async with ledger_world("a", settings=TALKATIVE.model_copy(update={"add_timeout_s": 5.0})) as world:
        writer = await world.create(1, 1)
        world.cluster["a"].delay_s = 0.3  # many intervals
        await append(writer, [b"x"])
        world.cluster["a"].delay_s = 0.0
        await wait_until(lambda: world.cluster["a"].explicit_lacs.get(writer.ledger_id) == 0)
        await wait_until(lambda: not idle_writers(world)._awake)


async def test_a_bookie_that_hangs_keeps_no_other_from_hearing() -> None:
    async with ledger_world(settings=TALKATIVE) as world:
        writers = [await world.create() for _ in range(5)]
        await asyncio.gather(*(append(writer, [b"x"]) for writer in writers))
        world.cluster["b"].hang = True
        told = world.cluster["c"].explicit_lacs
        await wait_until(lambda: len(told) == 5 and set(told.values()) == {0})
        world.cluster["b"].hang = False


async def test_rounds_do_not_pile_up_behind_a_bookie_that_hangs() -> None:
    settings = TALKATIVE.model_copy(update={"read_timeout_s": 30.0})
    async with ledger_world(settings=settings) as world:
        writer = await world.create()
        await append(writer, [b"x"])
        for bookie in world.cluster.bookies.values():
            bookie.hang = True
        idle = idle_writers(world)
        await wait_until(lambda: len(idle._tasks) > 0, what="a round")
        for _ in range(10):
            await asyncio.sleep(settings.explicit_lac_interval_s)
            assert len(idle._tasks) == 1


async def test_a_closed_writer_tells_nothing_and_is_not_held() -> None:
    async with ledger_world(settings=TALKATIVE) as world:
        writer = await world.create()
        await append(writer, [b"x"])
        await writer.close()
        await wait_until(lambda: not idle_writers(world)._awake)
        assert world.cluster["a"].explicit_lacs == {}


async def test_switched_off_nothing_is_told() -> None:
    async with ledger_world(settings=FAST.model_copy(update={"explicit_lac_interval_s": 0.0})) as world:
        writer = await world.create()
        await append(writer, [b"x"])
        idle_writers(world)._on_tick()
        idle_writers(world)._on_tick()
        assert not idle_writers(world)._awake
        assert idle_writers(world).lacs_told == 0


async def test_a_lac_that_no_bookie_heard_is_told_again() -> None:
    async with ledger_world("a", settings=TALKATIVE) as world:
        writer = await world.create(1, 1)
        await append(writer, [b"x"])
        world.cluster["a"].down = True
        await asyncio.sleep(0.1)
        assert idle_writers(world)._awake
        world.cluster["a"].down = False
        await wait_until(lambda: world.cluster["a"].explicit_lacs.get(writer.ledger_id) == 0)


async def test_writers_that_no_bookie_hears_keep_no_others_from_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cepheid_ledger.idle_writers._WRITERS_PER_ROUND", 2)
    async with ledger_world("a", "b", settings=TALKATIVE) as world:
        writers = [await world.create_on(bookie, ack_quorum=1) for bookie in "aaab"]
        await asyncio.gather(*(append(writer, [b"x"]) for writer in writers))
        world.cluster["a"].down = True
        await wait_until(lambda: world.cluster["b"].explicit_lacs.get(writers[-1].ledger_id) == 0)


# After a long silence

SLEEPY = FAST.model_copy(update={"explicit_lac_interval_s": 0.01, "idle_check_s": 0.03, "idle_check_timeout_s": 1.0})


async def sleep_long(world: LedgerWorld) -> None:
    await wait_until(lambda: not idle_writers(world)._awake)
    await asyncio.sleep(2 * SLEEPY.idle_check_s)


def forget_fences(world: LedgerWorld) -> None:
    """As if every bookie had been replaced by a blank one of the same id."""
    for bookie in world.cluster.bookies.values():
        bookie.fenced.clear()
        bookie.entries.clear()


async def test_a_writer_that_slept_through_a_recovery_confirms_nothing_though_bookies_forgot_the_fence() -> None:
    """Scenario 20 (blank-bookie-old-id): bookies alone would take the entry, and the ledger is closed below it."""
    async with ledger_world(settings=SLEEPY) as world:
        writer = await world.create()
        await append(writer, [b"x"])
        await sleep_long(world)
        await world.another_client().recover(writer.ledger_id)
        forget_fences(world)
        with pytest.raises(LedgerFencedError, match="CLOSED"):
            await append(writer, [b"late"])
        assert writer.state is WriterPhase.FAILED


async def test_a_writer_whose_ledger_was_deleted_confirms_nothing() -> None:
    async with ledger_world(settings=SLEEPY) as world:
        writer = await world.create()
        await append(writer, [b"x"])
        await sleep_long(world)
        other = world.another_client()
        await other.delete(writer.ledger_id)
        forget_fences(world)
        with pytest.raises((NoSuchLedgerError, LedgerFencedError)):
            await append(writer, [b"late"])


class LaggingStore(FaultyStore):
    """A follower that shows the past until `sync` is called."""

    past: MemoryTree | None = None

    async def get(self, key: str) -> Versioned | None:
        return await (MemoryStore(self.past).get(key) if self.past is not None else super().get(key))

    async def sync(self, key: str) -> None:
        self.past = None


async def test_a_follower_that_lags_does_not_hide_a_recovery_from_a_writer_that_slept() -> None:
    async with ledger_world(settings=SLEEPY, store_of=LaggingStore) as world:
        writer = await world.create()
        await append(writer, [b"x"])
        await sleep_long(world)
        past = copy.deepcopy(world.tree)
        await world.another_client().recover(writer.ledger_id)
        world.store.past = past
        forget_fences(world)
        with pytest.raises(LedgerFencedError, match="CLOSED"):
            await append(writer, [b"late"])


class SlowlyReadStore(FaultyStore):
    """Answers of reads are late, and say what was the case when they were asked."""

    gate: asyncio.Event | None = None

    async def get(self, key: str) -> Versioned | None:
        found = await super().get(key)
        if self.gate is not None:
            await self.gate.wait()
        return found


async def test_a_look_at_the_record_that_a_change_overtook_is_forgotten() -> None:
    async with ledger_world(*"abcd", settings=SLEEPY, store_of=SlowlyReadStore) as world:
        writer = await world.create_on("abc")
        await append(writer, [b"x"])
        await sleep_long(world)
        world.store.gate = asyncio.Event()
        world.cluster["b"].refuse = Status.IO_ERROR
        pending = append(writer, [b"y"])
        await wait_until(lambda: writer.metadata.last_fragment.ensemble == ("a", "d", "c"))
        world.store.gate.set()
        await pending
        assert writer.metadata.last_fragment.ensemble == ("a", "d", "c")


async def test_after_a_silence_the_add_is_on_its_way_while_the_record_is_read() -> None:
    async with ledger_world(settings=SLEEPY) as world:
        writer = await world.create()
        await append(writer, [b"x"])
        await sleep_long(world)
        pending = append(writer, [b"y"])
        assert writer._core._held_back
        await pending
        assert writer.last_add_confirmed == 1


@pytest.mark.parametrize("fault", ["refused", "silent"])
async def test_metadata_that_is_away_does_not_stop_a_writer_that_slept(fault: str) -> None:
    async with ledger_world(settings=SLEEPY, store_of=FaultyStore) as world:
        writer = await world.create()
        await append(writer, [b"x"])
        await sleep_long(world)
        world.store.unreadable = 1 if fault == "refused" else 0
        world.store.hang_reads = fault == "silent"
        await append(writer, [b"y"])
        assert writer.last_add_confirmed == 1


async def test_giving_up_during_the_look_up_leaves_nothing() -> None:
    settings: LedgerSettings = SLEEPY
    async with ledger_world(settings=settings, store_of=FaultyStore) as world:
        writer = await world.create()
        await append(writer, [b"x"])
        await sleep_long(world)
        world.store.hang_reads = True
        pending = append(writer, [b"y"])
        await asyncio.sleep(0)
        await writer.aclose()
        assert isinstance((await asyncio.gather(pending, return_exceptions=True))[0], Exception)
        assert all(s.lanes == 0 for s in world.client.statistics().values())


async def test_one_request_at_a_time_reaches_a_bookie() -> None:
    async with ledger_world(settings=TALKATIVE) as world:
        running = most = 0
        real = world.cluster["a"].connection().write_lac

        class Counting:
            async def write_lac(self, request: ExplicitLac) -> object:
                nonlocal running, most
                running += 1
                most = max(most, running)
                try:
                    return await real(request)
                finally:
                    running -= 1

        get = world.cluster.get
        idle_writers(world)._connection_of = lambda bookie: Counting() if bookie == "a" else get(bookie)  # type: ignore[assignment, return-value]
        writers = [await world.create() for _ in range(20)]
        await asyncio.gather(*(append(writer, [b"x"]) for writer in writers))
        await wait_until(lambda: len(world.cluster["a"].explicit_lacs) == 20)
        assert most == 1
