"""Detection of disks that do not finish their writes in time.

    healthy ──several writes in a row slow, for `for_s`──► slow ──all writes fast for `for_s`──► healthy
       └──one write unfinished for `stalled_s`──► stalled ──it finishes──► slow

A bookie whose disk is slow or stalled refuses regular adds, so that writers use other bookies. Then there are few writes or none
that show how the disk performs, and probes take their place: a small file is written and synced.

Rule 1: a write is measured from its submission, or from the end of the one before it on the same thread, to its report in the loop.
Rule 2: a pause of the process is not the disk's fault: a timer that fires late moves the start of the write by as much.
Rule 3: no timer runs while the disk is healthy and idle.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from cepheid_bookie.disk import Disk
from cepheid_ports import OnDone, Worker

log = logging.getLogger(__name__)

T = TypeVar("T")

_SLOW_IN_A_ROW = 3  # one slow write is not a trend
_LATE_S = 1.0  # if a timer is later than this, the process was paused or its loop blocked
_PROBE = "PROBE"
_PROBE_BYTES = 4096


class HealthState(enum.Enum):
    HEALTHY = "healthy"
    SLOW = "slow"
    STALLED = "stalled"


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """How long one write may take, and for how long writes must exceed it."""

    slow_s: float
    stalled_s: float
    for_s: float


class DiskHealth:
    """The core: times in, state out. Writes come one at a time."""

    def __init__(self, use: str, limits: HealthLimits) -> None:
        self._use = use
        self._limits = limits
        self._slow_since: float | None = None
        self._slow_in_a_row = 0
        self._quick_since: float | None = None
        self._finished_at = float("-inf")
        self.started_at: float | None = None
        self.state = HealthState.HEALTHY

    def __repr__(self) -> str:
        return f"<DiskHealth of the {self._use} disk: {self.state.value}>"

    @property
    def reason(self) -> str:
        """What is wrong with the disk; empty while it is healthy."""
        limits = self._limits
        if self.state is HealthState.STALLED:
            return f"its {self._use} disk hangs: a write has not finished for storage.stalled_disk_s ({limits.stalled_s:g} s)"
        if self.state is HealthState.SLOW:
            limit = f"storage.slow_disk_s ({limits.slow_s:g} s)"
            return f"its {self._use} disk is slow: writes took longer than {limit}; it must be quick for {limits.for_s:g} s again"
        return ""

    def on_started(self, now: float) -> None:
        self.started_at = now
        if now - self._finished_at > self._limits.for_s:  # what came before that pause is no longer a trend
            self._slow_since, self._slow_in_a_row = None, 0

    def on_finished(self, now: float) -> None:
        assert self.started_at is not None, "a write ends that never began"
        started_at, self.started_at, self._finished_at = self.started_at, None, now
        if now - started_at > self._limits.slow_s:
            self._on_slow(started_at, now)
        else:
            self._on_quick(now)

    def on_paused(self, late_s: float) -> None:
        """Adjust for a pause of the process of this length (rule 2)."""
        if self.started_at is not None:
            self.started_at += late_s

    def look(self, now: float) -> None:
        """Check whether the write in progress has stalled."""
        if self.started_at is not None and now - self.started_at >= self._limits.stalled_s:
            self.state = HealthState.STALLED
            self._quick_since = None

    def _on_slow(self, started_at: float, now: float) -> None:
        self._quick_since = None
        self._slow_in_a_row += 1
        if self._slow_since is None:
            self._slow_since = started_at
        if self.state is HealthState.STALLED or (
            self._slow_in_a_row >= _SLOW_IN_A_ROW and now - self._slow_since >= self._limits.for_s
        ):
            self.state = HealthState.SLOW

    def _on_quick(self, now: float) -> None:
        self._slow_since, self._slow_in_a_row = None, 0
        if self._quick_since is None:
            self._quick_since = now
        if self.state is HealthState.STALLED:  # the process was paused when it seemed stalled
            self.state = HealthState.SLOW
        if self.state is HealthState.SLOW and now - self._quick_since >= self._limits.for_s:
            self.state = HealthState.HEALTHY


class TimedWorker(Worker):
    """A worker thread whose tasks are all writes to one disk.

    `on_change()` is called when the disk's state has changed, `on_failed(error)` when a probe fails unless the disk is full.
    """

    def __init__(
        self,
        worker: Worker,
        disk: Disk,
        health: DiskHealth,
        limits: HealthLimits,
        *,
        probe_interval_s: float,
        on_change: Callable[[], None],
        on_failed: Callable[[BaseException], None],
    ) -> None:
        self._worker = worker
        self._disk = disk
        self._health = health
        self._limits = limits
        self._probe_interval_s = probe_interval_s
        self._on_change = on_change
        self._on_failed = on_failed
        self._submitted = 0
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def submit(self, work: Callable[[], Any], on_done: OnDone) -> None:
        now = asyncio.get_running_loop().time()
        if not self._submitted:
            self._health.on_started(now)
        self._submitted += 1
        self._arm(self._limits.stalled_s)

        def on_finished(result: Any, error: BaseException | None) -> None:
            self._on_finished()
            on_done(result, error)

        self._worker.submit(work, on_finished)

    async def aclose(self) -> None:
        self.stop()
        await self._worker.aclose()

    def stop(self) -> None:
        """Stop watching."""
        self._closed = True
        self._disarm()

    def _on_finished(self) -> None:
        now, before = asyncio.get_running_loop().time(), self._health.state
        self._submitted -= 1
        self._health.on_finished(now)
        if self._submitted:
            self._health.on_started(now)
            self._arm(self._limits.stalled_s)
        elif self._health.state is not HealthState.HEALTHY:
            self._disarm()
            self._arm(self._probe_interval_s)
        self._report(before)

    def _arm(self, after_s: float) -> None:
        if self._timer is None and not self._closed and after_s < float("inf"):
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(after_s, self._on_timer, loop.time() + after_s)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self, due: float) -> None:
        """Handle the timer, which serves both purposes: while a write is in progress, and until the next probe."""
        self._timer = None
        health, now = self._health, asyncio.get_running_loop().time()
        if health.started_at is not None:
            before = health.state
            if now - due > _LATE_S:
                health.on_paused(now - due)
            health.look(now)
            self._report(before)
            if health.state is not HealthState.STALLED:
                self._arm(max(health.started_at + self._limits.stalled_s - now, 0.001))
        elif health.state is not HealthState.HEALTHY:
            self.submit(lambda: write_probe(self._disk), self._on_probed)

    def _on_probed(self, _: None, error: BaseException | None) -> None:
        if error is not None and not (isinstance(error, OSError) and error.errno == errno.ENOSPC):
            self._on_failed(error)

    def _report(self, before: HealthState) -> None:
        state = self._health.state
        if state is before or self._closed:
            return
        if state is HealthState.HEALTHY:
            log.info("disk.healthy", extra={"before": before.value})
        else:
            hint = "check the disk and what else uses it; adds are refused until it is fast again"
            log.warning(f"disk.{state.value}", extra={"error": self._health.reason, "hint": hint})
        self._on_change()


def write_probe(disk: Disk) -> None:
    """Write and sync a small file. Raises OSError."""
    file = disk.open(_PROBE, create=True)
    try:
        file.pwrite(bytes(_PROBE_BYTES), 0)
        file.sync()
    finally:
        file.close()
