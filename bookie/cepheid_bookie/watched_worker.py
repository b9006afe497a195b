"""Evidence that adds do not wait for reads: the threads that adds depend on detect a read in their queue.

    add ──► journal, flush, look ──► WatchedWorker ──► threads          reads ──► threads of their own
                                          ▲
                             ReadWork ────┘  must never happen; if it does, the time that others wait for it is counted

The time counted is from the submission of a task until the last read before it in the queue was done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from cepheid_ports import OnDone, Worker

T = TypeVar("T")


class ReadWork(Generic[T]):
    """Marks a task that answers a read, a scan, or other work that no add waits for."""

    __slots__ = ("_work",)

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work

    def __call__(self) -> T:
        return self._work()


class WatchedWorker(Worker):
    """A worker with one thread. Costs one comparison per task while there is no read among them."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._reads = 0  # submitted so far
        self._reads_done = 0
        self._waiting: dict[int, list[float]] = {}  # submission times of tasks, by the number of the last read before them
        self.waited_behind_reads_s = 0.0

    def __repr__(self) -> str:
        return f"<WatchedWorker of {self._worker!r}>"

    def submit(self, work: Callable[[], Any], on_done: OnDone) -> None:
        if isinstance(work, ReadWork):
            on_done = self._on_read_done(on_done)
        elif self._reads_done < self._reads:
            self._waiting.setdefault(self._reads, []).append(self._loop.time())
        self._worker.submit(work, on_done)

    async def aclose(self) -> None:
        await self._worker.aclose()

    def _on_read_done(self, on_done: OnDone) -> OnDone:
        self._reads += 1
        number = self._reads

        def counted(result: Any, error: BaseException | None) -> None:
            self._reads_done += 1
            now = self._loop.time()
            self.waited_behind_reads_s += sum(now - submitted for submitted in self._waiting.pop(number, ()))
            on_done(result, error)

        return counted
