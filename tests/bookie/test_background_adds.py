"""Background adds in a bookie: stored like others, at the pace that these leave, bounded, answered in order."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cepheid_bookie import Bookie
from cepheid_bookie.background_pace import FREE_BYTES, SLICE_BYTES
from cepheid_bookie.bookie_metrics import bookie_families
from cepheid_ports import OnDone
from cepheid_rpc import AddAnswer, AddRequest, EntryGroup, LacRequest, Status
from tests.bookie.bookie_support import (
    KEY,
    InlineWorker,
    KiB,
    Machine,
    add,
    add_requests,
    added,
    entries_of,
    group_of,
    read_all,
    settle,
    small_settings,
)
from tests.support import wait_until

pytestmark = pytest.mark.virtual_time
MiB = 1 << 20
FLOOR = 2 * MiB


def large_settings(**changes: Any) -> Any:
    return small_settings(**({"write_cache_bytes": 64 * MiB, "journal_segment_bytes": 16 * MiB, "log_bytes": 64 * MiB} | changes))


def background(*groups: EntryGroup) -> list[AddRequest]:
    return [AddRequest(group, KEY, recovery=True, background=True) for group in groups]


class SlowJournal(InlineWorker):
    """Takes 1 ms for a sync, and the bytes of a batch at `bytes_s`."""

    def __init__(self, on_crash: Callable[[], None]) -> None:
        super().__init__(on_crash)
        self.bookie: Bookie | None = None
        self.bytes_s = 400e6

    def submit(self, work: Callable[[], Any], on_done: OnDone) -> None:
        batch = self.bookie._journal._in_flight if self.bookie is not None else None
        self.takes_s = 0.001 + (batch.size_bytes if batch is not None else 0) / self.bytes_s
        super().submit(work, on_done)


class SlowMachine(Machine):
    def __init__(self) -> None:
        super().__init__(settings=large_settings())
        self.journal: SlowJournal | None = None

    def _new_worker(self, name: str, threads: int) -> InlineWorker:
        if not name.endswith("-journal"):
            return super()._new_worker(name, threads)
        self.journal = SlowJournal(self.crashed.set)
        return self.journal


async def publish(bookie: Bookie, seconds: float) -> list[float]:
    """2,000 entries of 1 KB a second; returns how long each took."""
    loop = asyncio.get_running_loop()
    took: list[float] = []
    sent = 0
    end = loop.time() + seconds
    while loop.time() < end:
        started = loop.time()
        bookie.add([AddRequest(group_of(1, sent, size=1_000), KEY)], lambda _, started=started: took.append(loop.time() - started))
        sent += 1
        await asyncio.sleep(0.0005)
    await wait_until(lambda: len(took) == sent)
    return took


@asynccontextmanager
async def copying(bookie: Bookie) -> AsyncIterator[None]:
    """Keeps 4 MiB of background adds under way, and sends again what is refused."""
    group = group_of(2, 0, 64, size=4 * KiB)
    ended = False

    def send() -> None:
        bookie.add(background(group), on_answers)

    def on_answers(answers: Sequence[AddAnswer]) -> None:
        if answers[-1].last_entry_id == group.last_entry_id and not ended:
            asyncio.get_running_loop().call_later(0.001, send)

    for _ in range(16):
        send()
    yield
    ended = True


async def test_a_large_group_is_cut_answered_in_order_and_stored_whole() -> None:
    machine = Machine(settings=large_settings())
    async with machine.bookie() as bookie:
        await added(bookie, group_of(7, 0))
        await bookie.read_lac(LacRequest(7, KEY, fence=True))
        groups = [group_of(7, 1, 2500, size=KiB), group_of(7, 2501, 2, size=1200 * KiB)]
        answers = await add_requests(bookie, background(*groups))
        reached = 0
        for answer in answers:
            assert (answer.first_entry_id, answer.status) == (reached + 1, Status.OK)
            reached = answer.last_entry_id
        assert reached == 2502
        figures = bookie.statistics()
        assert figures.groups_added == 1 + 3 + 2, "2,500 KiB are three slices; an entry larger than a slice is one"
        assert figures.background_bytes_added == figures.bytes_added - len(group_of(7, 0).data)
        entries, missing = await read_all(bookie, 7, 1, 2502)
        assert (entries, missing) == (entries_of(groups), {})


@pytest.mark.deadline(60)
async def test_on_a_slow_journal_background_adds_are_slowed_to_the_floor_and_recover() -> None:
    machine = SlowMachine()
    async with machine.bookie() as bookie:
        assert machine.journal is not None
        machine.journal.bookie = bookie
        machine.journal.bytes_s = 10e6
        alone = await publish(bookie, 1)
        async with copying(bookie):
            await publish(bookie, 2)
            before = bookie.statistics()
            beside = await publish(bookie, 3)
            after = bookie.statistics()
            copied = after.background_bytes_added - before.background_bytes_added
            assert 0.9 * FLOOR <= copied / 3 <= 2.5 * FLOOR, "of the 10 MB/s that the journal can write"
            assert sorted(beside)[len(beside) // 2] <= 2 * sorted(alone)[len(alone) // 2]
            assert after.background_rate_bytes_s is not None
            await asyncio.sleep(1)
            idle = bookie.statistics()
            assert idle.background_rate_bytes_s is None
            await asyncio.sleep(3)
            freely = bookie.statistics().background_bytes_added - idle.background_bytes_added
            assert freely / 3 > 8e6, "without foreground adds they take what the journal gives"
            machine.journal.bytes_s = 400e6
            await publish(bookie, 3)
            rate = bookie.statistics().background_rate_bytes_s
            assert rate is not None
            assert rate > 3 * FLOOR


async def test_foreground_adds_overtake_background_adds_that_wait() -> None:
    machine = Machine(settings=large_settings())
    async with machine.bookie() as bookie:
        machine.workers["journal"].hold()
        copies = [group_of(2, 32 * n, 32, size=4 * KiB) for n in range(50)]
        copied = asyncio.ensure_future(add_requests(bookie, background(*copies)))
        await settle()
        figures = bookie.statistics()
        assert figures.journal_queued_bytes <= FREE_BYTES
        assert figures.background_waiting_bytes > 2 * MiB
        assert not bookie.is_full
        published = asyncio.ensure_future(add(bookie, group_of(1, 0)))
        await settle()
        machine.workers["journal"].release()
        assert [answer.status for answer in await published] == [Status.OK]
        assert not copied.done()
        assert {answer.status for answer in await copied} == {Status.OK}
        assert bookie.statistics().background_waiting_bytes == 0


async def test_beyond_the_bound_background_adds_are_refused_after_those_that_wait() -> None:
    machine = Machine(settings=large_settings(background_waiting_bytes=1 * MiB, waiting_s=1.0))
    async with machine.bookie() as bookie:
        machine.workers["journal"].hold()
        copies = [group_of(2, 32 * n, 32, size=4 * KiB) for n in range(60)]
        copied = asyncio.ensure_future(add_requests(bookie, background(*copies)))
        await settle()
        assert bookie.statistics().background_waiting_bytes <= 1 * MiB + 2 * SLICE_BYTES
        published = asyncio.ensure_future(add(bookie, group_of(1, 0)))
        await settle()
        machine.workers["journal"].release()
        answers = await copied
        statuses = [answer.status for answer in answers]
        assert statuses == sorted(statuses), "OK, then OVERLOADED"
        assert [first.last_entry_id + 1 for first in answers[:-1]] == [second.first_entry_id for second in answers[1:]]
        stored = sum(len(range(a.first_entry_id, a.last_entry_id + 1)) for a in answers if a.status is Status.OK)
        assert 4 * MiB < stored * 4 * KiB < 6 * MiB
        assert statuses[-1] is Status.OVERLOADED
        assert [answer.status for answer in await published] == [Status.OK], "only background adds are refused"


async def test_a_flood_of_refusals_is_bounded() -> None:
    machine = Machine(settings=large_settings(background_waiting_bytes=64 * KiB))
    async with machine.bookie() as bookie:
        machine.workers["journal"].hold()
        flood = [group_of(2, 0, 1024, size=4 * KiB), *(group_of(3, n) for n in range(2_000))]
        flooded = asyncio.ensure_future(add_requests(bookie, background(*flood)))
        await settle()
        assert bookie.statistics().background_waiting_bytes <= 2 * 64 * KiB + 5 * MiB
        machine.workers["journal"].release()
        assert {answer.status for answer in await flooded} == {Status.OK, Status.OVERLOADED}


async def test_a_background_add_waits_no_longer_than_it_may() -> None:
    machine = Machine(settings=small_settings(waiting_s=0.5))
    async with machine.bookie() as bookie:
        machine.workers["flush"].hold()
        started = asyncio.get_running_loop().time()
        answers = await add_requests(bookie, background(*[group_of(7, n, size=2 * KiB) for n in range(20)]))
        assert [answer.status for answer in answers] == [Status.OK, Status.OVERLOADED]
        assert 0.4 < asyncio.get_running_loop().time() - started < 1
        machine.workers["flush"].release()


async def test_a_part_of_the_cache_is_left_to_foreground_adds_while_it_is_flushed() -> None:
    machine = Machine(settings=small_settings(waiting_s=5.0))
    async with machine.bookie() as bookie:
        machine.workers["flush"].hold()
        copied = asyncio.ensure_future(add_requests(bookie, background(*[group_of(7, n, size=KiB) for n in range(30)])))
        await settle()
        assert bookie.statistics().background_waiting_bytes > 0
        await added(bookie, group_of(1, 0, size=KiB))
        assert not bookie.is_full
        machine.workers["flush"].release()
        assert {answer.status for answer in await copied} == {Status.OK}


async def test_a_closed_bookie_answers_background_adds_that_wait() -> None:
    machine = Machine(settings=large_settings())
    bookie = await machine.open()
    machine.workers["journal"].hold()
    copied = asyncio.ensure_future(add_requests(bookie, background(*[group_of(2, n, size=SLICE_BYTES) for n in range(50)])))
    await settle()
    closing = asyncio.ensure_future(bookie.aclose())
    await settle()
    machine.workers["journal"].release()
    assert [answer.status for answer in await copied] == [Status.OK, Status.STOPPED]
    await closing


async def test_a_full_disk_refuses_background_adds_whether_recovery_or_not() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        await added(bookie, group_of(7, 0), group_of(8, 0))
        full = True

        def on_operation(name: str, path: str) -> None:
            if full and name == "pwritev" and path.startswith("entrylog"):
                raise OSError(errno.ENOSPC, "no space left")

        machine.disk.on_operation = on_operation
        with pytest.raises(OSError, match="no space left"):
            await bookie.checkpoint()
        assert [a.status for a in await add_requests(bookie, background(group_of(7, 1), group_of(9, 0)))] == [Status.NO_SPACE] * 2
        await added(bookie, group_of(8, 1), recovery=True)
        full = False
        await wait_until(lambda: bookie.writable)
        answers = await add_requests(bookie, background(group_of(7, 1)))
        assert [answer.status for answer in answers] == [Status.OK]


async def test_background_adds_wait_until_their_ledger_is_loaded() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        await added(bookie, group_of(7, 0))
    async with machine.bookie() as bookie:  # knows the ledger, and has not loaded it
        answers = await add_requests(bookie, background(group_of(7, 1), group_of(8, 0), group_of(7, 2)))
        assert answers == [AddAnswer(7, 1, 2, Status.OK), AddAnswer(8, 0, 0, Status.OK)]
    async with machine.bookie() as bookie:

        def cannot_read(_: int) -> None:
            raise OSError(errno.EIO, "the index cannot be read")

        machine.index.record = cannot_read  # type: ignore[method-assign, assignment]
        answers = await add_requests(bookie, background(group_of(7, 3), group_of(9, 0)))
        assert answers == [AddAnswer(7, 3, 3, Status.IO_ERROR), AddAnswer(9, 0, 0, Status.OK)]


async def test_metrics_tell_how_far_background_adds_are_held_back() -> None:
    async with Machine(settings=large_settings()).bookie() as bookie:

        def figures() -> dict[str, float]:
            families = bookie_families("b", bookie.statistics())
            return {f.name: f.samples[0].value for f in families if f.name.startswith("cepheid_bookie_background")}

        await add_requests(bookie, background(group_of(7, 0, 100)))
        free = figures()
        await added(bookie, group_of(8, 0))
        paced = figures()
        size_bytes = group_of(7, 0, 100).size_bytes
        rate = "cepheid_bookie_background_limit_bytes_per_second"
        assert free == {
            "cepheid_bookie_background_added_bytes_total": size_bytes,
            "cepheid_bookie_background_waiting_bytes": 0,
            rate: float("inf"),
            "cepheid_bookie_background_slowdowns_total": 0,
        }
        assert paced == free | {rate: FLOOR}
