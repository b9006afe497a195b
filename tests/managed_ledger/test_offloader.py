"""Offloading ledgers: whatever fails and whenever the owner dies, every entry stays readable and no object is forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from cepheid_managed_ledger import (
    ManagedLedger,
    ManagedLedgerConfig,
    ManagedLedgerFencedError,
    NoObjectStoreError,
    OffloadConfig,
    OffloadOffError,
    OffloadRunningError,
    OffloadState,
    Retention,
    is_entry_gone,
)
from cepheid_metadata import Chain, MemoryTree, Op, OpResult, Position
from cepheid_tiered import DamagedSegmentError, NoSuchSegmentError, SegmentError
from cepheid_tiered.object_store import NewerSegmentError, StoreRefusedError, StoreUnavailableError, UnusableNameError
from cepheid_wire import TopicName
from tests.managed_ledger.losing_store import LosingStore, changes
from tests.managed_ledger.memory_segments import MemorySegments, store_is_away
from tests.managed_ledger.topic_world import (
    KEEP,
    ONE_BOOKIE,
    SETTINGS,
    Broker,
    MortalStore,
    TopicWorld,
    append,
    payloads_of,
    read_all,
    topic_world,
)
from tests.support import wait_until

pytestmark = pytest.mark.virtual_time

URL = "memory://bucket"
OTHER = TopicName.parse("persistent://public/default/other")
AT_ONCE = OffloadConfig(URL, after_bytes=0, keep_ms=0)
BOTH = OffloadConfig(URL, after_bytes=0, keep_ms=1 << 50)
SMALL = SETTINGS.model_copy(update={"ledger_max_entries": 4, "housekeeping_s": 1.0, "offload_retry_s": 0.5})


def offloads(config: OffloadConfig, retention: Retention = KEEP) -> ManagedLedgerConfig:
    return ManagedLedgerConfig(retention=retention, offload=config)


def ended(chain: Chain) -> list[int]:
    return [ledger.ledger_id for ledger in chain.ledgers if ledger.entries]


def is_offloaded(chain: Chain, *, off_bookies: bool) -> bool:
    """All ended ledgers are; and what waited for deletion is gone."""
    done = all(chain.offload_of(ledger_id) and chain.is_on_bookies(ledger_id) is not off_bookies for ledger_id in ended(chain))
    return done and not chain.object_deletions


async def fill(ledger: ManagedLedger, ledgers: int) -> list[bytes]:
    """Append so much that this many ledgers end, of four entries each. Return what is stored."""
    for number in range(ledgers):
        await append(ledger, *(b"m%d" % entry for entry in range(4 * number, 4 * number + 4)))
        await wait_until(lambda: len(ledger.chain.ledgers) > number + 1 or ledger.tick() is not None)  # noqa: B023
    return [b"m%d" % entry for entry in range(4 * ledgers)]


async def settle(world: TopicWorld, ledger: ManagedLedger, *, off_bookies: bool = True) -> Chain:
    def is_done() -> bool:
        world.clock.now_ms += 10
        ledger.tick()
        return is_offloaded(ledger.chain, off_bookies=off_bookies) and not ledger.statistics().waiting_deletions

    await wait_until(is_done, timeout_s=120)
    return ledger.chain


def assert_objects_are_named(world: TopicWorld, chain: Chain) -> None:
    named = [found.url for found in (chain.offloaded or {}).values()]
    assert sorted(world.segments.objects) == sorted(named)


async def test_ledgers_are_offloaded_leave_the_bookies_and_are_read_from_their_objects() -> None:
    async with topic_world(settings=SMALL) as world:
        broker = world.broker()
        ledger = await broker.open(offloads(AT_ONCE))
        stored = await fill(ledger, 3)
        chain = await settle(world, ledger)
        assert len(ended(chain)) == 3
        assert not set(ended(chain)) & set(await world.ledger_records()), "the bookies have none of them"
        assert await read_all(ledger, cached=False) == stored
        figures = ledger.statistics().offload
        assert (figures.ledgers, figures.off_bookies_ledgers, figures.due_ledgers, figures.last_error) == (3, 3, 0, None)
        assert figures.object_reads > 0
        assert ledger.stored_ledger_ids() == [], "none of them can lack a copy on bookies"
        await ledger.aclose()
        again = await world.broker(seed=2).open(offloads(AT_ONCE))
        assert await read_all(again, cached=False) == stored
        assert_objects_are_named(world, again.chain)


class DyingStore(MortalStore):
    """Its process dies at one of its writes to the chain: before it, or after it was applied."""

    def __init__(self, tree: MemoryTree, number: int, *, applied: bool) -> None:
        super().__init__(tree)
        self.left = number
        self.applied = applied

    async def multi(self, ops: Sequence[Op]) -> list[OpResult]:
        if changes(ops, "chains") and not self.dead:
            self.left -= 1
            if self.left == 0:
                if self.applied:
                    await super().multi(ops)
                self.dead = True
        return await super().multi(ops)


async def end_of(world: TopicWorld, broker: Broker, ledger: ManagedLedger) -> None:
    """Until its process has died, or everything is offloaded without that."""

    def is_over() -> bool:
        world.clock.now_ms += 10
        ledger.tick()
        return broker.store.dead or not ledger.is_usable or is_offloaded(ledger.chain, off_bookies=True)

    await wait_until(is_over, timeout_s=120)
    await broker.crash()


async def assert_next_owner_finishes(world: TopicWorld, stored: list[bytes]) -> None:
    next_owner = world.broker(seed=2)
    ledger = await next_owner.open(offloads(AT_ONCE))
    await append(ledger, b"next")
    chain = await settle(world, ledger)
    assert await read_all(ledger, cached=False) == [*stored, b"next"]
    assert_objects_are_named(world, chain)


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("number", range(1, 9))
async def test_an_owner_that_dies_at_a_write_of_the_chain_loses_nothing(number: int, applied: bool) -> None:
    """From the write that follows the rollovers on: attempt, complete, left bookies, …, for each ledger."""
    async with topic_world(settings=SMALL) as world:
        store = DyingStore(world.tree, 0, applied=applied)
        broker = world.broker(store=store)
        ledger = await broker.open()
        stored = await fill(ledger, 2)
        store.left = number
        ledger.config = offloads(AT_ONCE)
        await end_of(world, broker, ledger)
        await assert_next_owner_finishes(world, stored)


@pytest.mark.parametrize("step", ["write", "wrote", "verify", "open", "delete", "deleted"])
async def test_an_owner_that_dies_while_it_uses_the_store_loses_nothing(step: str) -> None:
    async with topic_world(settings=SMALL) as world:
        broker = world.broker()
        ledger = await broker.open()
        stored = await fill(ledger, 2)
        if step.startswith("delete"):  # there is something to delete after a failure
            failures = iter([SegmentError("a bad moment")])
            world.segments.fail = lambda at, url: next(failures, None) if at == "wrote" else die_at(broker, step)(at, url)
        else:
            world.segments.fail = die_at(broker, step)
        ledger.config = offloads(AT_ONCE)
        await end_of(world, broker, ledger)
        assert broker.store.dead
        world.segments.fail = lambda at, url: None
        await assert_next_owner_finishes(world, stored)


def die_at(broker: Broker, step: str) -> Callable[[str, str], Exception | None]:
    def fail(at: str, url: str) -> Exception | None:
        if at != step:
            return None
        broker.store.dead = True
        return SegmentError("its process dies")

    return fail


@pytest.mark.parametrize("fate", ["answer", "request"])
@pytest.mark.parametrize("number", [1, 2, 3])
async def test_writes_of_unknown_outcome_are_looked_up_and_no_object_is_given_up(fate: str, number: int) -> None:
    async with topic_world(settings=SMALL) as world:
        store = LosingStore(world.tree)
        ledger = await world.broker(store=store).open()
        stored = await fill(ledger, 1)
        writes = 0

        def lose(ops: Sequence[Op]) -> str | None:
            nonlocal writes
            writes += changes(ops, "chains")
            return fate if changes(ops, "chains") and writes == number else None

        store.lose = lose
        ledger.config = offloads(AT_ONCE)
        chain = await settle(world, ledger)
        assert store.lost == 1
        assert len(world.segments.written) == 1, "one upload was enough"
        assert_objects_are_named(world, chain)
        assert await read_all(ledger, cached=False) == stored


async def test_an_outcome_that_stays_unknown_ends_the_opening_and_keeps_the_object() -> None:
    async with topic_world(settings=SMALL) as world:
        store = LosingStore(world.tree)
        broker = world.broker(store=store)
        ledger = await broker.open()
        await fill(ledger, 1)

        def lose_completion(ops: Sequence[Op]) -> str | None:
            return "answer" if changes(ops, "chains") and world.segments.written else None

        store.lose = lose_completion
        ledger.config = offloads(BOTH)
        ledger.tick()
        await wait_until(lambda: store.lost > 0)
        store.unreachable = True
        await broker.crash()
        chain = await world.chain()
        assert chain.offload_of(ended(chain)[0]) is not None, "it was recorded"
        assert world.segments.deleted == []
        again = await world.broker(seed=2).open(offloads(BOTH))
        assert_objects_are_named(world, await settle(world, again, off_bookies=False))
        assert world.segments.written == list(world.segments.objects), "the object of the first owner counts"


async def test_a_second_owner_clears_the_upload_of_the_first() -> None:
    async with topic_world(settings=SMALL) as world:
        world.segments.gate = asyncio.Event()
        first = await world.broker().open()
        await fill(first, 1)
        first.config = offloads(BOTH)
        first.tick()
        await wait_until(lambda: bool(first.chain.offloaded))
        (left,) = (first.chain.offloaded or {}).values()
        second = await world.broker(seed=2).open(offloads(BOTH))
        world.segments.gate.set()
        with pytest.raises(ManagedLedgerFencedError):
            await first.create_cursor("any", first.first_position())
        chain = await settle(world, second, off_bookies=False)
        assert left.url in world.segments.deleted
        await asyncio.sleep(5)
        assert_objects_are_named(world, chain)


@pytest.mark.parametrize("step", ["write", "wrote", "verify"])
async def test_a_store_that_fails_is_tried_again_and_named_meanwhile(step: str) -> None:
    async with topic_world(settings=SMALL) as world:
        world.segments.fail = store_is_away(step)
        ledger = await world.broker().open(offloads(AT_ONCE, Retention()))
        await fill(ledger, 1)
        await wait_until(lambda: ledger.statistics().offload.failures >= 3, timeout_s=120)
        figures = ledger.statistics().offload
        assert "the store does not answer" in (figures.last_error or "")
        assert figures.failing_since_ms > 0
        assert figures.oldest_due_age_ms is not None
        assert len(ended(ledger.chain)) == 1, "what is due is not trimmed before it is complete"
        world.segments.fail = lambda at, url: None
        await wait_until(lambda: not ended(ledger.chain) and not ledger.chain.object_deletions, timeout_s=900)
        assert ledger.statistics().offload.last_error is None
        assert world.segments.objects == {}, "it was trimmed then, and its object deleted"


async def test_an_object_that_is_not_the_ledger_does_not_count() -> None:
    async with topic_world(settings=SMALL) as world:
        ledger = await world.broker().open(offloads(AT_ONCE))

        def spoil(step: str, url: str) -> None:
            if step == "wrote" and len(world.segments.written) == 1:
                groups = world.segments.objects[url]
                world.segments.objects[url] = [groups[0].slice(0, 0)]

        world.segments.fail = spoil
        await fill(ledger, 1)
        chain = await settle(world, ledger)
        assert len(world.segments.written) == 2
        assert_objects_are_named(world, chain)


def refuses(ledger_id: int) -> Callable[[str, str], Exception | None]:
    """A store that takes every ledger but this one."""
    return lambda step, url: UnusableNameError("too long") if step == "write" and f"{ledger_id:020d}-" in url else None


async def test_a_ledger_that_is_refused_for_good_is_named_and_does_not_hold_up_the_others() -> None:
    async with topic_world(settings=SMALL) as world:
        ledger = await world.broker().open()
        await fill(ledger, 3)
        refused = ended(ledger.chain)[0]
        world.segments.fail = refuses(refused)
        ledger.config = offloads(AT_ONCE)
        others = ended(ledger.chain)[1:]
        await wait_until(lambda: ledger.tick() or all(map(ledger.chain.offload_of, others)), timeout_s=120)
        figures = ledger.statistics().offload
        assert (figures.refused_ledgers, list(figures.refused)) == (1, [refused])
        assert "too long" in figures.refused[refused]
        world.segments.fail = lambda step, url: None
        await settle(world, ledger)
        assert ledger.statistics().offload.refused_ledgers == 0


@pytest.mark.deadline(1_000)
async def test_retention_waits_for_a_failing_offload_only_for_a_time(caplog: pytest.LogCaptureFixture) -> None:
    async with topic_world(settings=SMALL.model_copy(update={"offload_hold_s": 100.0})) as world:
        world.segments.fail = store_is_away("write")
        ledger = await world.broker().open(offloads(AT_ONCE, Retention()))
        await fill(ledger, 1)
        await wait_until(lambda: ledger.statistics().offload.failures > 0)
        world.clock.now_ms += 90_000
        await asyncio.sleep(90)
        assert len(ended(ledger.chain)) == 1
        world.clock.now_ms += 60_000
        await wait_until(lambda: not ended(ledger.chain), timeout_s=400)
        assert "offload.retention_not_held" in caplog.messages


async def test_a_low_rate_gives_uploads_more_time() -> None:
    slow = SMALL.model_copy(update={"offload_bytes_per_s": 1_000, "offload_uploads": 2})
    async with topic_world(settings=slow) as world:
        ledger = await world.broker().open(offloads(BOTH))
        assert ledger._offloader is not None
        assert ledger._offloader._slowest_bytes_per_s() == 250


async def test_a_reader_in_the_middle_of_a_ledger_goes_on_when_the_copy_under_it_is_deleted() -> None:
    async with topic_world(settings=SMALL) as world:
        ledger = await world.broker().open(offloads(BOTH))
        stored = await fill(ledger, 1)
        await settle(world, ledger, off_bookies=False)
        groups = await ledger.read(Position(-1, -1), max_entries=2, max_bytes=1 << 20)
        assert world.segments.reads == [], "the bookies are read while they have it"
        ledger.config = offloads(AT_ONCE)
        await settle(world, ledger)
        position = Position(groups[-1].ledger_id, groups[-1].last_entry_id + 1)
        assert await read_all(ledger, position, cached=False) == stored[2:]
        assert world.segments.reads


@pytest.mark.parametrize(
    "error",
    [
        StoreRefusedError("there is no bucket"),
        StoreRefusedError("no permission"),
        StoreRefusedError("the bucket is in another region"),
        StoreRefusedError("the credentials have expired"),
        StoreUnavailableError("could not be reached"),
    ],
)
async def test_whatever_the_store_refuses_is_named_costs_nothing_and_passes(error: SegmentError) -> None:
    async with topic_world(settings=SMALL) as world:
        world.segments.fail = lambda step, url: error
        ledger = await world.broker().open(offloads(AT_ONCE))
        stored = await fill(ledger, 2)
        await wait_until(lambda: ledger.statistics().offload.failures >= 2)
        figures = ledger.statistics().offload
        assert str(error.args[0]) in (figures.last_error or "")
        assert (figures.refused_ledgers, figures.off_bookies_ledgers) == (0, 0), "it may pass"
        assert await read_all(ledger, cached=False) == stored
        world.segments.fail = lambda step, url: None
        await settle(world, ledger)
        assert await read_all(ledger, cached=False) == stored


@pytest.mark.parametrize(
    "error",
    [NoSuchSegmentError("gone"), DamagedSegmentError("cut off"), NewerSegmentError("of a later release"), SegmentError("away")],
)
async def test_an_object_that_cannot_be_read_is_replaced_by_the_bookies_while_they_have_the_ledger(error: Exception) -> None:
    async with topic_world(settings=SMALL) as world:
        ledger = await world.broker().open(offloads(replace(BOTH, reads_objects=True)))
        stored = await fill(ledger, 1)
        await settle(world, ledger, off_bookies=False)
        assert await read_all(ledger, cached=False) == stored
        assert world.segments.reads, "objects are read first"
        world.segments.fail = lambda step, url: error if step in ("read", "open") else None
        assert await read_all(ledger, cached=False) == stored
        assert ledger.statistics().offload.other_copy_reads > 0


async def test_a_ledger_stays_on_the_bookies_when_its_object_was_damaged_by_others() -> None:
    async with topic_world(settings=SMALL) as world:
        ledger = await world.broker().open(offloads(BOTH))
        stored = await fill(ledger, 1)
        await settle(world, ledger, off_bookies=False)
        world.segments.objects.clear()
        ledger.config = offloads(AT_ONCE)
        world.clock.now_ms += 10_000
        await asyncio.sleep(5)
        await wait_until(lambda: ledger.tick() or ledger.statistics().offload.last_error is not None, timeout_s=60)
        await asyncio.sleep(5)
        assert all(ledger.chain.is_on_bookies(ledger_id) for ledger_id in ended(ledger.chain))
        assert await read_all(ledger, cached=False) == stored


async def test_a_truncated_topic_stops_the_upload_and_deletes_its_object() -> None:
    async with topic_world(settings=SMALL) as world:
        world.segments.gate = asyncio.Event()
        ledger = await world.broker().open(offloads(BOTH))
        await fill(ledger, 1)
        await wait_until(lambda: ledger.tick() or ledger.statistics().offload.uploading_ledger_id is not None)
        assert await ledger.truncate() == 1
        await wait_until(lambda: ledger.tick() or not ledger.chain.object_deletions, timeout_s=60)
        world.segments.gate.set()
        await asyncio.sleep(5)
        assert world.segments.objects == {}
        assert ledger.chain.offloaded is None


async def test_a_topic_deleted_in_the_middle_of_an_upload_leaves_nothing() -> None:
    async with topic_world(settings=SMALL) as world:
        world.segments.gate = asyncio.Event()
        broker = world.broker()
        ledger = await broker.open(offloads(BOTH))
        await fill(ledger, 1)
        await wait_until(lambda: ledger.tick() or ledger.statistics().offload.uploading_ledger_id is not None)
        await broker.ledgers.delete(ledger.topic)
        world.segments.gate.set()
        await asyncio.sleep(5)
        assert world.segments.objects == {}
        assert await broker.store.get("/chains/persistent/public/default/orders") is None


@pytest.mark.deadline(10_000)
async def test_an_hour_without_the_store_costs_nothing() -> None:
    """Readers get an error that passes, nothing leaves the bookies, and what was published meanwhile is offloaded afterwards."""
    async with topic_world(settings=SMALL) as world:
        ledger = await world.broker().open(offloads(AT_ONCE))
        stored = await fill(ledger, 1)
        await settle(world, ledger)
        world.segments.fail = store_is_away()
        before = len(world.segments.written)
        await append(ledger, b"m4", b"m5", b"m6", b"m7")
        for _ in range(120):
            world.clock.now_ms += 30_000
            await asyncio.sleep(30)
            ledger.tick()
        with pytest.raises(SegmentError) as failure:
            await read_all(ledger, cached=False)
        assert failure.value.retriable
        assert len([ledger_id for ledger_id in ended(ledger.chain) if ledger.chain.is_on_bookies(ledger_id)]) == 1
        world.segments.fail = lambda step, url: None
        await asyncio.sleep(300)
        await settle(world, ledger)
        assert await read_all(ledger, cached=False) == [*stored, b"m4", b"m5", b"m6", b"m7"]
        assert len(world.segments.written) == before + 1


@pytest.mark.parametrize("is_away", [False, True])
async def test_a_deleted_topic_takes_its_objects_along_unless_the_store_is_away(
    is_away: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with topic_world(settings=SMALL) as world:
        broker = world.broker()
        ledger = await broker.open(offloads(AT_ONCE))
        await fill(ledger, 1)
        await settle(world, ledger)
        if is_away:
            world.segments.fail = store_is_away()
        await broker.ledgers.delete(ledger.topic)
        assert await broker.store.get("/chains/persistent/public/default/orders") is None
        assert bool(world.segments.objects) is is_away
        assert ("segments.left_behind" in caplog.messages) is is_away


async def test_a_command_offloads_up_to_a_position() -> None:
    by_command = OffloadConfig(URL, keep_ms=1 << 50)
    async with topic_world(settings=SMALL) as world:
        ledger = await world.broker().open(offloads(by_command))
        assert ledger.offload_status.state is OffloadState.NOT_RUN
        await fill(ledger, 2)
        second = ledger.chain.ledgers[1].ledger_id
        world.segments.gate = asyncio.Event()
        ledger.offload(Position(second, 0))
        assert ledger.offload_status.state is OffloadState.RUNNING
        with pytest.raises(OffloadRunningError, match="RUNNING"):
            ledger.offload(ledger.last_confirmed)
        world.segments.gate.set()
        await wait_until(lambda: ledger.offload_status.state is OffloadState.SUCCESS)
        assert ledger.offload_status.first_unoffloaded == Position(second, 0)
        assert len(world.segments.objects) == 1
        world.segments.fail = store_is_away("write")
        ledger.offload(Position(second, 4))
        await wait_until(lambda: ledger.offload_status.state is OffloadState.ERROR)
        status = ledger.offload_status
        assert status.first_unoffloaded == Position(second, 0)
        assert "does not answer" in (status.error or "")


async def test_commands_that_cannot_be_carried_out_are_refused() -> None:
    async with topic_world(settings=SMALL) as world:
        ledger = await world.broker(with_segments=False).open(ONE_BOOKIE)
        with pytest.raises(OffloadOffError, match="set an offload policy"):
            ledger.offload(Position(1, 0))
        ledger.config = offloads(AT_ONCE)
        with pytest.raises(NoObjectStoreError, match=r"pip install cepheid\[tiered\]"):
            ledger.offload(Position(1, 0))


async def test_without_the_library_a_ledger_is_readable_as_far_as_bookies_have_it() -> None:
    async with topic_world(settings=SMALL) as world:
        first = await world.broker().open(offloads(BOTH))
        stored = await fill(first, 1)
        await settle(world, first, off_bookies=False)
        await first.aclose()
        second = await world.broker(seed=2, with_segments=False).open(offloads(BOTH))
        assert await read_all(second, cached=False) == stored
        await second.aclose()
        third = await world.broker(seed=3).open(offloads(AT_ONCE))
        await settle(world, third)
        await third.aclose()
        fourth = await world.broker(seed=4, with_segments=False).open(offloads(AT_ONCE))
        with pytest.raises(NoObjectStoreError, match=r"pip install cepheid\[tiered\]"):
            await read_all(fourth, cached=False)


async def test_topics_take_turns_at_uploading() -> None:
    from cepheid_wire import TopicName

    async with topic_world(settings=SMALL) as world:
        order: list[str] = []
        busy = 0

        class Watched(MemorySegments):
            async def write(self, url, topic, ledger_id, groups):  # type: ignore[no-untyped-def]
                nonlocal busy
                busy += 1
                assert busy == 1, "one upload at a time"
                order.append(topic.local_name)
                await asyncio.sleep(0.1)
                try:
                    return await super().write(url, topic, ledger_id, groups)
                finally:
                    busy -= 1

        world.segments = Watched()
        broker = world.broker()
        names = [TopicName.parse(f"persistent://public/default/{name}") for name in ("long", "short")]
        opened = [await broker.open(topic=name) for name in names]
        await fill(opened[0], 3)
        await fill(opened[1], 1)
        for ledger in opened:
            ledger.config = offloads(BOTH)
            ledger.tick()
        for ledger in opened:
            await settle(world, ledger, off_bookies=False)
        assert order[:3] == ["long", "short", "long"], "a topic with many ledgers waits in line after each"


async def test_what_lies_in_an_object_is_read_ahead_by_row_groups() -> None:
    """By smaller parts the rest of each would wait in a cache, and be fetched again when others need its room."""
    large = SETTINGS.model_copy(update={"ledger_max_entries": 2000, "housekeeping_s": 1.0})
    async with topic_world(settings=large) as world:
        ledger = await world.broker().open(offloads(AT_ONCE))
        await append(ledger, *(bytes(1000) for _ in range(2000)))
        await wait_until(lambda: len(ledger.chain.ledgers) > 1 or ledger.tick() is not None)
        position = Position(ended(await settle(world, ledger))[0], 0)
        for _ in range(3):
            groups = await ledger.read(position, max_entries=10, max_bytes=1 << 20)
            position = Position(position.ledger_id, groups[-1].last_entry_id + 1)
            await asyncio.sleep(0.1)
        assert ledger.statistics().offload.object_reads == 3


async def test_what_is_read_ahead_from_objects_has_a_limit_of_its_own_and_comes_back() -> None:
    limited = SETTINGS.model_copy(update={"ledger_max_entries": 100, "housekeeping_s": 1.0, "object_ahead_bytes": 1})
    async with topic_world(settings=limited) as world:
        broker = world.broker()
        first, other = await broker.open(offloads(AT_ONCE)), await broker.open(offloads(AT_ONCE), topic=OTHER)
        budget = broker.ledgers.catch_up
        for ledger in (first, other):
            await append(ledger, *(bytes(1000) for _ in range(100)))
            await wait_until(lambda: len(ledger.chain.ledgers) > 1 or ledger.tick() is not None)  # noqa: B023
            position = Position(ended(await settle(world, ledger))[0], 0)
            for _ in range(2):
                groups = await ledger.read(position, max_entries=10, max_bytes=1 << 20)
                position = Position(position.ledger_id, groups[-1].last_entry_id + 1)
            await asyncio.sleep(0.1)
            assert 50_000 < budget.object_bytes < 100_000, "of the first topic alone"
        await first.aclose()
        assert budget.object_bytes == 0
        assert len(payloads_of(await other.read(position, max_entries=10, max_bytes=1 << 20))) == 10


async def test_an_entry_whose_only_object_is_missing_is_gone_for_certain() -> None:
    async with topic_world(settings=SMALL) as world:
        ledger = await world.broker().open(offloads(AT_ONCE))
        await fill(ledger, 1)
        await settle(world, ledger)
        world.segments.objects.clear()
        with pytest.raises(NoSuchSegmentError) as failure:
            await read_all(ledger, cached=False)
        assert is_entry_gone(failure.value)
        world.segments.fail = store_is_away()
        with pytest.raises(SegmentError) as failure:
            await read_all(ledger, cached=False)
        assert not is_entry_gone(failure.value), "a store that does not answer says nothing"
