"""Runs several tasks of a scan at once and yields their batches in the order of the tasks, with bounded memory.

task 0  ██████████ ──► taken
task 1  ████         ahead, at most `BATCHES_AHEAD` batches of each task wait
task 2  ██           ahead
task 3               begins when a thread is free

Threads take the tasks in order, so the task whose batches are wanted always has a thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from cepheid_decode.history import ScanTask
from cepheid_scan.stop_signal import StopSignal

BATCHES_AHEAD = 2  # per task; a batch has the values of about 4 MB, or `decode_bytes`
_POLL_S = 0.1

ReadTask = Callable[[ScanTask], Iterator[Any]]


def read_in_order(tasks: Sequence[ScanTask], read: ReadTask, threads: int, stop: StopSignal) -> Generator[Any, None, None]:
    """Yield the batches of all tasks. Closing the generator ends the threads; a task's error is raised instead of its next batch.

    `read` also checks `stop`: if another thread sets it, StoppedError is raised.
    """
    if threads <= 1 or len(tasks) <= 1:
        for task in tasks:
            yield from read(task)
        return
    ahead = [_Ahead(task, queue.Queue(BATCHES_AHEAD)) for task in tasks]
    waiting: queue.SimpleQueue[_Ahead] = queue.SimpleQueue()
    for each in ahead:
        waiting.put(each)
    readers = [
        threading.Thread(target=_work, args=(waiting, read, stop), name=f"cepheid-scan-{index}", daemon=True)
        for index in range(min(threads, len(tasks)))
    ]
    try:
        for reader in readers:
            reader.start()
        for each in ahead:
            while (batch := each.take(stop)) is not _END:
                yield batch
    finally:
        stop.set()  # a waiting reader continues at once, one that decodes a batch ends it first
        for reader in readers:
            if reader.ident is not None:
                reader.join()


_END = object()


@dataclass(frozen=True, slots=True)
class _Ahead:
    """Batches of one task that were read and not taken, at the end `_END` or the error with which it ended."""

    task: ScanTask
    batches: queue.Queue[Any]

    def take(self, stop: StopSignal) -> Any:
        while True:
            stop.check()  # stopped threads put nothing more
            with suppress(queue.Empty):
                batch, error = self.batches.get(timeout=_POLL_S)
                if error is not None:
                    raise error
                return batch

    def put(self, batch: Any, error: BaseException | None, stop: StopSignal) -> bool:
        """Add a batch; return False if no reader takes it any more."""
        while not stop.is_set():
            with suppress(queue.Full):
                self.batches.put((batch, error), timeout=_POLL_S)
                return True
        return False


def _work(waiting: queue.SimpleQueue[_Ahead], read: ReadTask, stop: StopSignal) -> None:
    while not stop.is_set():
        try:
            ahead = waiting.get_nowait()
        except queue.Empty:
            return
        found, error = read(ahead.task), None
        try:
            all(ahead.put(batch, None, stop) for batch in found)
        except BaseException as raised:  # passed to the thread that takes the task's batches
            error = raised
        finally:
            getattr(found, "close", lambda: None)()
        ahead.put(_END, error, stop)
