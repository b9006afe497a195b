"""Threads behind a port: the only module that starts threads.

    loop ──submit(work, on_done)──► worker thread: work() ──► one loop callback per group ──► on_done(result, error)

The simulator replaces `ThreadWorker` with one that runs `work` in the loop at a chosen virtual time, so everything that blocks
(disk, RocksDB) must go through `Worker`.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
OnDone = Callable[[Any, BaseException | None], None]


class Worker(Protocol):
    """Runs blocking work outside the loop, in the order of submission (if `threads` = 1), and reports in the loop."""

    def submit(self, work: Callable[[], Any], on_done: OnDone) -> None:
        """Queue `work`. `on_done(result, error)` runs in the loop; exactly one of the two is not None, or both are None
        for work that returns None. `on_done` must not raise."""

    async def run(self, work: Callable[[], T]) -> T:
        """Queue `work` and wait for it. Cancelling the wait does not stop the work. Subclasses only have to implement `submit`."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def on_done(result: T, error: BaseException | None) -> None:
            if done.done():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)

        self.submit(work, on_done)
        return await done

    async def aclose(self) -> None:
        """Wait for all submitted work, then end the threads. Calling `submit` afterwards is a bug."""


class ThreadWorker(Worker):
    """Named threads with one queue. Callers limit its length: they submit groups and know how many are outstanding."""

    def __init__(self, name: str, threads: int = 1) -> None:
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], OnDone] | None] = queue.SimpleQueue()
        self._finished: deque[tuple[OnDone, Any, BaseException | None]] = deque()
        self._wakeup_due = False
        self._lock = threading.Lock()
        self._closing = False
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name}-{index}" if threads > 1 else name, daemon=True)
            for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def __repr__(self) -> str:
        return f"<ThreadWorker {self._name}: {self._work.qsize()} waiting>"

    def submit(self, work: Callable[[], Any], on_done: OnDone) -> None:
        assert not self._closing, f"{self._name} is closed"
        self._work.put((work, on_done))

    async def aclose(self) -> None:
        if not self._closing:
            self._closing = True
            for _ in self._threads:
                self._work.put(None)
        while any(thread.is_alive() for thread in self._threads):  # noqa: ASYNC110 - a thread tells nobody of its end
            await asyncio.sleep(0.001)
        self._report()

    def _serve(self) -> None:
        while (item := self._work.get()) is not None:
            work, on_done = item
            try:
                result, error = work(), None
            except BaseException as caught:  # passed to the owner, who decides
                result, error = None, caught
            with self._lock:
                self._finished.append((on_done, result, error))
                wake, self._wakeup_due = not self._wakeup_due, True
            if wake:
                try:
                    self._loop.call_soon_threadsafe(self._report)
                except RuntimeError:  # the loop is closed, so nothing can be reported
                    return

    def _report(self) -> None:
        with self._lock:
            finished, self._finished = self._finished, deque()
            self._wakeup_due = False
        for on_done, result, error in finished:
            on_done(result, error)
