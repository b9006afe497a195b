"""Detects that the data disk does not answer reads, or fails them. Nothing else detects a disk that writes but does not read.

    read, scan, scrub ──► WatchedReads ──► threads        every `hangs_after_s`, while there is a read: age of the oldest?
                              └── number ──► ReadWatch ──► `oldest_s` (metric), `disk.reads_hang` (log), `reason`
    EntryLogReader ──place that could not be read──► ReadWatch ──► `disk.reads_fail` (log), `reason`

While there is a `reason` the bookie is read-only and not registered, as if the disk's writes hung.

Rule 1: reads hang if the oldest is `hangs_after_s` old and none has ended for that long: a busy disk answers some. They
no longer hang when the oldest read is younger.
Rule 2: reads fail when `FAILED_PLACES` different places could not be read within `FAILED_WITHIN_S`. A few bad sectors are damaged
blocks, and repaired one by one. This lasts until a restart: a disk that is no longer read shows no errors.
Rule 3: a pause of the process is not the disk's fault: a timer that fires late waits once more.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
from collections.abc import Callable
from typing import Any

from cepheid_ports import OnDone, Worker

log = logging.getLogger(__name__)


FAILED_PLACES = 32
FAILED_WITHIN_S = 60.0
_DISK_ERRORS = (errno.EIO, errno.ENXIO, errno.ENODEV, errno.ESTALE)
_LATE_S = 1.0  # if a timer is later than this, the process was paused or its loop blocked


class ReadWatch:
    """Reads of one disk that wait for a thread or run in one. `hangs_after_s`: infinite to judge nothing.

    `on_change()` is called when `reason` changes.
    """

    def __init__(self, disk: str, hangs_after_s: float, on_change: Callable[[], None] = lambda: None) -> None:
        self._disk = disk
        self._hangs_after_s = hangs_after_s
        self._loop = asyncio.get_running_loop()
        self._next = 0
        self._began: dict[int, float] = {}  # by number, in order: loop time of submission
        self._timer: asyncio.TimerHandle | None = None
        self._hangs = False
        self._ended_at = float("-inf")  # when the last read ended
        self._failed: dict[tuple[int, int], float] = {}  # place → when reading it failed, in this order
        self._fails = False
        self._on_change = on_change
        self._stopped = False

    def __repr__(self) -> str:
        return f"<ReadWatch {self._disk}: {len(self._began)} reads, the oldest {self.oldest_s:.1f} s>"

    @property
    def oldest_s(self) -> float:
        """The age of the oldest read that has not ended; 0: there is none."""
        return self._loop.time() - next(iter(self._began.values())) if self._began else 0.0

    @property
    def reason(self) -> str:
        """What is wrong with the disk; empty while reads succeed."""
        if self._fails:
            return (
                f"its {self._disk} disk fails: {FAILED_PLACES} places could not be read within {FAILED_WITHIN_S:g} s; "
                "check the disk and restart the bookie"
            )
        if self._hangs:
            limit = f"storage.stalled_disk_s ({self._hangs_after_s:g} s)"
            return f"its {self._disk} disk hangs: a read has not finished for {limit}"
        return ""

    def on_failed_read(self, log_id: int, offset: int, error: OSError) -> None:
        """Note that reading this place of an entry log failed."""
        if error.errno not in _DISK_ERRORS or self._fails or self._stopped or not math.isfinite(self._hangs_after_s):
            return
        now = self._loop.time()
        self._failed.pop((log_id, offset), None)
        self._failed[log_id, offset] = now
        while now - next(iter(self._failed.values())) > FAILED_WITHIN_S:
            del self._failed[next(iter(self._failed))]
        if len(self._failed) >= FAILED_PLACES:
            self._fails = True
            hint = "check the disk and restart the bookie, or replace the disk; adds are refused until the restart"
            log.error("disk.reads_fail", extra={"disk": self._disk, "error": str(error), "hint": hint})
            self._on_change()

    def begin(self) -> int:
        """Return the number of a new read, for `end`."""
        self._next += 1
        self._began[self._next] = self._loop.time()
        self._arm()
        return self._next

    def end(self, number: int) -> None:
        del self._began[number]
        self._ended_at = self._loop.time()
        if self._hangs and self.oldest_s < self._hangs_after_s:
            self._hangs = False
            log.info("disk.reads_answered", extra={"disk": self._disk})
            self._on_change()

    def stop(self) -> None:
        """Stop judging."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        if self._timer is None and not self._stopped and self._began and math.isfinite(self._hangs_after_s):
            due = self._loop.time() + self._hangs_after_s
            self._timer = self._loop.call_later(self._hangs_after_s, self._on_timer, due)

    def _on_timer(self, due: float) -> None:
        self._timer = None
        now, oldest_s = self._loop.time(), self.oldest_s
        is_silent = now - self._ended_at >= self._hangs_after_s
        if oldest_s >= self._hangs_after_s and is_silent and now - due <= _LATE_S and not self._hangs:
            self._hangs = True
            facts = {"disk": self._disk, "oldest_s": round(oldest_s, 1), "reads": len(self._began)}
            hint = "check the disk: its writes may still be answered; adds are refused until it answers reads"
            log.warning("disk.reads_hang", extra={**facts, "hint": hint})
            self._on_change()
        self._arm()


class WatchedReads(Worker):
    """A worker whose tasks all read the disk of `watch`."""

    def __init__(self, worker: Worker, watch: ReadWatch) -> None:
        self._worker = worker
        self._watch = watch

    def __repr__(self) -> str:
        return f"<WatchedReads of {self._worker!r}>"

    def submit(self, work: Callable[[], Any], on_done: OnDone) -> None:
        number = self._watch.begin()

        def on_finished(result: Any, error: BaseException | None) -> None:
            self._watch.end(number)
            on_done(result, error)

        self._worker.submit(work, on_finished)

    async def aclose(self) -> None:
        await self._worker.aclose()
