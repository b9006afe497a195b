"""Disks that are slow, hang, or fail: the bookie leaves its writers to others in time, comes back by itself, and never guesses."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Callable
from typing import Any

import pytest

from cepheid_bookie import BookieState
from cepheid_bookie.disk_health import DiskHealth, HealthLimits, HealthState, TimedWorker
from cepheid_bookie.read_watch import FAILED_PLACES, ReadWatch
from cepheid_ports import OnDone
from cepheid_rpc import LacRequest, Status
from tests.bookie.bookie_support import KEY, Machine, add, added, group_of, read_all, settle, small_settings
from tests.bookie.promises import Promises

LIMITS = HealthLimits(slow_s=2.0, stalled_s=20.0, for_s=30.0)


@pytest.mark.parametrize(
    ("writes_s", "state"),
    [
        ([1.9] * 50, HealthState.HEALTHY),
        ([29.0], HealthState.HEALTHY),  # one long write is no trend
        ([3.0] * 9, HealthState.HEALTHY),  # not for long enough
        ([3.0] * 10, HealthState.SLOW),
        ([3.0] * 9 + [0.1] + [3.0] * 9, HealthState.HEALTHY),
        ([3.0] * 10 + [0.1] * 299, HealthState.SLOW),  # not quick for long enough
        ([3.0] * 10 + [0.1] * 302, HealthState.HEALTHY),
        ([3.0] * 10 + [1.0] * 20 + [3.0] + [1.0] * 20, HealthState.SLOW),
    ],
)
def test_a_disk_is_slow_when_all_writes_have_been_slow_for_a_while(writes_s: list[float], state: HealthState) -> None:
    health, now = DiskHealth("data", LIMITS), 1000.0
    for write_s in writes_s:
        health.on_started(now)
        now += write_s
        health.on_finished(now)
    assert health.state is state


def test_slow_writes_with_a_pause_between_them_are_no_trend() -> None:
    health = DiskHealth("data", LIMITS)
    for now in (0.0, 100.0, 200.0, 300.0):
        health.on_started(now)
        health.on_finished(now + 5.0)
    assert health.state is HealthState.HEALTHY


def test_a_write_that_does_not_end_is_seen_and_a_pause_of_the_process_is_not_taken_for_one() -> None:
    health = DiskHealth("journal", LIMITS)
    health.on_started(0.0)
    health.on_paused(60.0)
    health.look(60.0)
    assert health.state is HealthState.HEALTHY
    health.look(80.0)
    assert health.state is HealthState.STALLED
    assert health.reason == "its journal disk hangs: a write has not finished for storage.stalled_disk_s (20 s)"
    health.on_finished(81.0)
    assert health.state is HealthState.SLOW


@pytest.mark.virtual_time
@pytest.mark.deadline(600)
@pytest.mark.parametrize("use", ["journal", "data"])
async def test_a_slow_disk_makes_the_bookie_read_only_until_it_is_quick_again(use: str) -> None:
    machine = Machine()
    async with machine.bookie(disk_check_interval_s=2.0, checkpoint_interval_s=1.0) as bookie:
        changes: list[bool] = []
        bookie.on_writable = changes.append
        worker = machine.workers["journal" if use == "journal" else "flush"]
        worker.takes_s = 3.0 if use == "journal" else 11.0
        first = 0
        while bookie.writable and first < 200:
            await add(bookie, group_of(7, first))
            await asyncio.sleep(0.5)
            first += 1
        assert bookie.read_only_reason.startswith(f"its {use} disk is slow: writes took longer than storage.slow_disk_s")
        assert [answer.status for answer in await add(bookie, group_of(7, first))] == [Status.READ_ONLY]
        await added(bookie, group_of(7, first), recovery=True)
        assert (await bookie.read_lac(LacRequest(7, KEY, fence=True))).status is Status.OK
        worker.takes_s = 0.0
        await asyncio.sleep(50)
        assert changes == [False, True]
        await added(bookie, group_of(8, 0))


@pytest.mark.virtual_time
@pytest.mark.deadline(600)
async def test_a_disk_that_hangs_is_seen_without_any_answer_from_it() -> None:
    machine = Machine()
    async with machine.bookie(disk_check_interval_s=2.0) as bookie:
        await added(bookie, group_of(7, 0))
        machine.workers["journal"].hold()
        hanging = asyncio.ensure_future(add(bookie, group_of(7, 1)))
        await asyncio.sleep(19)
        assert bookie.writable
        await asyncio.sleep(2)
        assert not bookie.writable
        assert bookie.is_unfit
        assert "its journal disk hangs" in bookie.read_only_reason
        machine.workers["journal"].release()
        assert [answer.status for answer in await hanging] == [Status.OK]
        await settle()
        assert not bookie.is_unfit
        assert not bookie.writable, "not yet: it must have been quick for a while"
        await asyncio.sleep(40)
        assert bookie.writable


class HangingWorker:
    """Finishes a work only when it is told to."""

    def __init__(self) -> None:
        self.waiting: list[OnDone] = []

    def submit(self, work: Callable[[], Any], on_done: OnDone) -> None:
        self.waiting.append(on_done)


@pytest.mark.virtual_time
@pytest.mark.deadline(600)
async def test_a_write_that_hangs_behind_another_is_seen_too() -> None:
    health, worker, seen = DiskHealth("data", LIMITS), HangingWorker(), list[HealthState]()
    watch: dict[str, Any] = {"probe_interval_s": 2.0, "on_failed": lambda error: None}
    timed = TimedWorker(worker, Machine().disk, health, LIMITS, on_change=lambda: seen.append(health.state), **watch)  # type: ignore[arg-type]
    for _ in range(2):
        timed.submit(lambda: None, lambda result, error: None)
    await asyncio.sleep(25)
    worker.waiting.pop(0)(None, None)
    await asyncio.sleep(25)
    assert seen == [HealthState.STALLED, HealthState.SLOW, HealthState.STALLED]
    timed.stop()


@pytest.mark.virtual_time
@pytest.mark.deadline(600)
async def test_zero_switches_the_watch_off() -> None:
    machine = Machine()
    async with machine.bookie(slow_disk_s=0.0, stalled_disk_s=0.0) as bookie:
        machine.workers["journal"].takes_s = 100.0
        await added(bookie, group_of(7, 0))
        await added(bookie, group_of(7, 1))
        assert bookie.writable
        machine.workers["journal"].takes_s = 0.0


@pytest.mark.parametrize(
    ("operation", "path"),
    [
        ("pwritev", "journal/"),
        ("sync", "journal/"),
        ("pwritev", "entrylog/"),
        ("sync", "entrylog/"),
        ("sync", "mark.new"),
        ("sync", "index"),
    ],
)
async def test_a_write_or_sync_that_fails_ends_the_bookie_and_is_not_tried_again(operation: str, path: str) -> None:
    """The disk of the simulator does as a kernel does: a failed sync drops what was written, and the next one succeeds."""
    machine, promises = Machine(f"{operation} {path}"), Promises()
    bookie = await machine.open()
    for first in range(0, 50, 10):
        await promises.add(bookie, group_of(7, first, 10))
    if path == "index":
        machine.index.before_sync = lambda: fail_once(machine)
    else:
        machine.disk.fail(operation, path, errno.EIO)
    await promises.add(bookie, group_of(7, 50, 5))
    if bookie.state is BookieState.SERVING:
        with pytest.raises(OSError, match=r"injected|no index"):
            await bookie.checkpoint()
    assert bookie.state is BookieState.FAILED
    assert isinstance(bookie.failure, OSError)
    assert [answer.status for answer in await add(bookie, group_of(7, 60))] == [Status.STOPPED]
    await bookie.aclose()
    machine.restart()
    async with machine.bookie() as bookie:
        await promises.check(bookie)


def fail_once(machine: Machine) -> None:
    machine.index.before_sync = lambda: None
    raise OSError(errno.EIO, "no index")


@pytest.mark.virtual_time
@pytest.mark.deadline(200)
async def test_a_disk_that_does_not_answer_reads_makes_the_bookie_read_only_until_it_does(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    machine = Machine(settings=small_settings(stalled_disk_s=20.0, read_ahead_bytes=0))
    async with machine.bookie() as bookie:
        await added(bookie, group_of(7, 0, 5))
        await bookie.checkpoint()
        assert bookie.statistics().oldest_read_s == 0
        machine.workers["read"].hold()
        read = asyncio.ensure_future(read_all(bookie, 7, 0, 4))
        await asyncio.sleep(15)
        assert 14 < bookie.statistics().oldest_read_s <= 15
        assert "disk.reads_hang" not in caplog.text
        await asyncio.sleep(30)
        assert caplog.text.count("disk.reads_hang") == 1
        assert bookie.read_only_reason == "its data disk hangs: a read has not finished for storage.stalled_disk_s (20 s)"
        assert bookie.is_unfit
        machine.workers["read"].release()
        await read
        assert bookie.writable
        assert bookie.statistics().oldest_read_s == 0
        assert caplog.text.count("disk.reads_answered") == 1


@pytest.mark.virtual_time
@pytest.mark.deadline(200)
async def test_a_disk_that_answers_other_reads_does_not_hang() -> None:
    watch = ReadWatch("data", 20.0)
    waiting = watch.begin()
    for _ in range(5):
        await asyncio.sleep(10)
        watch.end(watch.begin())
    assert watch.reason == ""
    watch.end(waiting)
    watch.stop()


@pytest.mark.virtual_time
@pytest.mark.deadline(200)
@pytest.mark.parametrize(
    ("places", "pause_s", "code", "fails"),
    [
        (FAILED_PLACES, 1.0, errno.EIO, True),
        (FAILED_PLACES - 1, 1.0, errno.EIO, False),
        (2 * FAILED_PLACES, 2.0, errno.EIO, False),  # bad sectors, now and then
        (FAILED_PLACES, 1.0, errno.EMFILE, False),  # says nothing of the disk
    ],
)
async def test_a_disk_fails_when_many_places_cannot_be_read_within_a_minute(
    places: int, pause_s: float, code: int, fails: bool
) -> None:
    watch = ReadWatch("data", 20.0)
    for place in range(places):
        for _ in range(3):  # the same place again says nothing new
            watch.on_failed_read(1, place, OSError(code, os.strerror(code)))
        await asyncio.sleep(pause_s)
    assert bool(watch.reason) == fails


async def test_a_bookie_whose_disk_fails_reads_is_read_only_until_it_is_restarted() -> None:
    machine = Machine(settings=small_settings(stalled_disk_s=20.0, read_ahead_bytes=0))
    async with machine.bookie() as bookie:
        await added(bookie, *[group_of(7, n, size=4000) for n in range(FAILED_PLACES)])
        await bookie.checkpoint()
        for _ in range(FAILED_PLACES):
            machine.disk.fail("pread", "entrylog/")
        assert set((await read_all(bookie, 7, 0, FAILED_PLACES - 1))[1].values()) == {Status.IO_ERROR}
        await settle()
        assert bookie.read_only_reason.startswith("its data disk fails: 32 places could not be read within 60 s; check the disk")
        assert bookie.is_unfit
