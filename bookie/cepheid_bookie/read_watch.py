"""Makes reads visible that the data disk does not answer. A disk that writes and does not read is noticed nowhere else.

    read, scan, scrub ──► WatchedReads ──► threads        every `hangs_after_s`, while there is a read: how old is the oldest?
                              └── number ──► ReadWatch ──► `oldest_s` (metric), `disk.reads_hang` (log)

It reports, and changes nothing: brokers ask other replicas after a timeout of their own.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from typing import Any

from cepheid_ports import OnDone, Worker

log = logging.getLogger(__name__)


class ReadWatch:
    """The reads of one disk that wait for a thread or run in one. `hangs_after_s`: infinite to log nothing."""

    def __init__(self, disk: str, hangs_after_s: float) -> None:
        self._disk = disk
        self._hangs_after_s = hangs_after_s
        self._loop = asyncio.get_running_loop()
        self._next = 0
        self._began: dict[int, float] = {}  # by number, in order: loop time of submission
        self._timer: asyncio.TimerHandle | None = None
        self._hangs = False
        self._stopped = False

    def __repr__(self) -> str:
        return f"<ReadWatch {self._disk}: {len(self._began)} reads, the oldest {self.oldest_s:.1f} s>"

    @property
    def oldest_s(self) -> float:
        """Return the age of the oldest read that has not ended; 0: there is none."""
        return self._loop.time() - next(iter(self._began.values())) if self._began else 0.0

    def begin(self) -> int:
        """Return the number of a new read, for `end`."""
        self._next += 1
        self._began[self._next] = self._loop.time()
        self._arm()
        return self._next

    def end(self, number: int) -> None:
        del self._began[number]
        if self._hangs and self.oldest_s < self._hangs_after_s:
            self._hangs = False
            log.info("disk.reads_answered", extra={"disk": self._disk})

    def stop(self) -> None:
        """Log nothing more."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        if self._timer is None and not self._stopped and self._began and math.isfinite(self._hangs_after_s):
            self._timer = self._loop.call_later(self._hangs_after_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        oldest_s = self.oldest_s
        if oldest_s >= self._hangs_after_s and not self._hangs:
            self._hangs = True
            facts = {"disk": self._disk, "oldest_s": round(oldest_s, 1), "reads": len(self._began)}
            hint = "look at the disk: its writes may still be answered; cepheid bookies decommission moves everything elsewhere"
            log.warning("disk.reads_hang", extra={**facts, "hint": hint})
        self._arm()


class WatchedReads(Worker):
    """A worker all of whose works read the disk of `watch`."""

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
