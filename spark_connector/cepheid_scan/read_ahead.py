"""Several tasks of a scan at once, their batches in the order of the tasks; within a bound of memory.

task 0  ██████████ ──► taken
task 1  ████         ahead, at most `BATCHES_AHEAD` batches of each task wait
task 2  ██           ahead
task 3               begins when a thread is free

Threads take the tasks in order, so the one whose batches are wanted always has a thread, and nobody waits for nothing.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from cepheid_decode.history import ScanTask
from cepheid_scan.stop_signal import StopSignal

BATCHES_AHEAD = 2  # of each task; a batch has the values of about 4 MB, or `decode_bytes`
_POLL_S = 0.1

ReadTask = Callable[[ScanTask], Iterator[Any]]


def read_in_order(tasks: Sequence[ScanTask], read: ReadTask, threads: int, stop: StopSignal) -> Generator[Any, None, None]:
    """Batches of all tasks. Closing the generator ends the threads; an error of a task comes where its next batch would.

    `read` heeds `stop`, too: where another thread sets it, StoppedError is raised.
    """
    if threads <= 1 or len(tasks) <= 1:
        for task in tasks:
            yield from read(task)
        return
    readers = _Readers(tasks, read, min(threads, len(tasks)), stop)
    try:
        for batches in readers.batches:
            yield from readers.take(batches)
    finally:
        readers.stop()


class _End:
    """The last word of a task: `error` is None when it was read to its end."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class _Readers:
    def __init__(self, tasks: Sequence[ScanTask], read: ReadTask, threads: int, stop: StopSignal) -> None:
        self._read = read
        self._stop = stop
        self.batches: list[queue.Queue[Any]] = [queue.Queue(BATCHES_AHEAD) for _ in tasks]
        self._waiting = iter(zip(tasks, self.batches, strict=True))
        self._next_task = threading.Lock()
        self._threads = [threading.Thread(target=self._work, name=f"cepheid-scan-{index}", daemon=True) for index in range(threads)]
        for thread in self._threads:
            thread.start()

    def take(self, batches: queue.Queue[Any]) -> Iterator[Any]:
        while not isinstance(batch := self._next(batches), _End):
            yield batch
        if batch.error is not None:
            raise batch.error

    def _next(self, batches: queue.Queue[Any]) -> Any:
        while True:
            self._stop.check()  # threads that were stopped put nothing more
            try:
                return batches.get(timeout=_POLL_S)
            except queue.Empty:
                continue

    def stop(self) -> None:
        """Returns when the threads have ended: who waits goes on at once, who decodes a batch ends it."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while not self._stop.is_set():
            with self._next_task:
                task, batches = next(self._waiting, (None, None))
            if task is None or batches is None:
                return
            self._read_task(task, batches)

    def _read_task(self, task: ScanTask, batches: queue.Queue[Any]) -> None:
        error: BaseException | None = None
        found = self._read(task)
        try:
            for batch in found:
                if not self._put(batches, batch):
                    break
        except BaseException as raised:  # said to whoever takes the task's batches
            error = raised
        finally:
            getattr(found, "close", lambda: None)()
        self._put(batches, _End(error))

    def _put(self, batches: queue.Queue[Any], item: Any) -> bool:
        """False: nobody takes it any more."""
        while not self._stop.is_set():
            try:
                batches.put(item, timeout=_POLL_S)
                return True
            except queue.Full:
                continue
        return False
