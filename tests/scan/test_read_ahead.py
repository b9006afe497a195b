"""Tasks read at once give their batches in order, hold few of them, and leave no thread behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from cepheid_decode import ScanTask
from cepheid_scan.read_ahead import BATCHES_AHEAD, read_in_order
from cepheid_scan.stop_signal import StoppedError, StopSignal

TASKS = [ScanTask(pieces=(), bookies=(), size_bytes=number) for number in range(20)]


def scan_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("cepheid-scan-")]


@pytest.mark.parametrize("threads", [1, 2, 7, 50])
def test_batches_come_in_the_order_of_the_tasks(threads: int) -> None:
    def read(task: ScanTask) -> Iterator[str]:
        for batch in range(task.size_bytes % 5):
            yield f"{task.size_bytes}.{batch}"

    expected = [batch for task in TASKS for batch in read(task)]
    assert list(read_in_order(TASKS, read, threads, StopSignal())) == expected
    assert not scan_threads()


def test_nothing_is_read_further_ahead_than_the_bound() -> None:
    read_batches: list[int] = []

    def read(task: ScanTask) -> Iterator[int]:
        for batch in range(100):
            read_batches.append(task.size_bytes)
            yield batch

    threads = 3
    batches = read_in_order(TASKS, read, threads, StopSignal())
    for _ in range(50):
        next(batches)
        # of each of three tasks: those that wait, and the one in the thread's hand; and what was taken
        assert len(read_batches) <= threads * (BATCHES_AHEAD + 1) + 50
    assert set(read_batches) <= {0, 1, 2}
    batches.close()  # type: ignore[attr-defined]
    assert not scan_threads()


def test_an_error_of_a_task_comes_after_the_batches_before_it() -> None:
    closed: list[int] = []

    def read(task: ScanTask) -> Iterator[int]:
        try:
            yield task.size_bytes
            if task.size_bytes == 2:
                raise ValueError("no replica")
        finally:
            closed.append(task.size_bytes)

    taken: list[int] = []
    with pytest.raises(ValueError, match="no replica"):
        taken.extend(read_in_order(TASKS, read, 4, StopSignal()))
    assert taken == [0, 1, 2]
    assert not scan_threads()
    assert {0, 1, 2} <= set(closed), "what was begun is closed: its calls to bookies end"


def test_whoever_waits_for_a_batch_hears_that_it_was_stopped() -> None:
    """Not an end: rows are missing."""
    stop = StopSignal()

    def read(task: ScanTask) -> Iterator[int]:
        threading.Timer(0.05, stop.set).start()
        stop.pause(60)
        yield task.size_bytes

    with pytest.raises(StoppedError):
        list(read_in_order(TASKS, read, 4, stop))
    assert not scan_threads()
