"""Threads and tasks have owners, and their failures reach somebody."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from cepheid_ports import TaskOwner, ThreadWorker
from tests.support import wait_until


async def test_work_runs_in_order_off_the_loop_and_reports_in_it() -> None:
    worker = ThreadWorker("w")
    loop_thread = threading.get_ident()
    done: list[tuple[int, int, int]] = []
    for number in range(100):
        worker.submit(lambda n=number: (n, threading.get_ident()), lambda r, _e: done.append((*r, threading.get_ident())))
    await worker.aclose()
    assert [number for number, _, _ in done] == list(range(100))
    assert all(where != loop_thread and told == loop_thread for _, where, told in done)


async def test_a_failure_reaches_on_done_and_run() -> None:
    def fail() -> None:
        raise OSError("disk")

    worker = ThreadWorker("w")
    errors: list[BaseException | None] = []
    worker.submit(fail, lambda _r, error: errors.append(error))
    with pytest.raises(OSError, match="disk"):
        await worker.run(fail)
    await worker.aclose()
    assert [str(error) for error in errors] == ["disk"]


async def test_cancelling_the_wait_leaves_the_work_and_the_worker_sound() -> None:
    worker = ThreadWorker("w")
    gate, ran = threading.Event(), []
    waiter = asyncio.create_task(worker.run(lambda: (gate.wait(5), ran.append(1))))
    await asyncio.sleep(0)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    gate.set()
    assert await worker.run(lambda: 7) == 7
    await worker.aclose()
    assert ran == [1]


async def test_a_task_owner_hears_of_failures_and_cancels_the_rest() -> None:
    errors: list[BaseException] = []
    owner = TaskOwner("ledger 7", errors.append)

    async def fail() -> Any:
        raise ValueError("broken")

    owner.start(fail(), name="fail")
    owner.start(asyncio.sleep(3600), name="sleep")
    await wait_until(lambda: bool(errors))
    assert repr(owner) == "<TaskOwner ledger 7: 1 running>"
    await owner.aclose()
    assert len(owner) == 0
    assert [str(error) for error in errors] == ["broken"]
