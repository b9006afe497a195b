"""The worker threads of a simulated node: work runs inside the loop, after a random delay of virtual time.

    submit ──delay──► work() ──delay──► on_done(result, error)        two steps: a crash may fall between doing and telling

With one thread works run and report in the order of submission; with more, in any order. Work that raises NodeCrashed takes
its node down and never reports.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from cepheid_ports import OnDone, Ports, Worker
from tests.simulation.world.node import Node, NodeCrashed, current_node
from tests.simulation.world.sim_clock import MachineClock

T = TypeVar("T")


class SimWorker(Worker):
    """Implements `cepheid_ports.Worker`. `delay_s` draws how long one work, or one report, takes."""

    def __init__(self, name: str, threads: int, delay_s: Callable[[], float]) -> None:
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._delay_s = delay_s
        self._idle_threads = threads
        self._single = threads == 1
        self._queue: deque[tuple[Callable[[], Any], OnDone]] = deque()
        self._unreported = 0
        self._last_report_s = 0.0
        self._closing: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return f"<SimWorker {self._name}: {len(self._queue)} waiting, {self._unreported} not reported>"

    def submit(self, work: Callable[[], Any], on_done: OnDone) -> None:
        assert self._closing is None, f"{self._name} is closed"
        self._queue.append((work, on_done))
        self._unreported += 1
        self._take_next()

    async def aclose(self) -> None:
        if self._closing is None:
            self._closing = self._loop.create_future()
            if not self._unreported:
                self._closing.set_result(None)
        await asyncio.shield(self._closing)

    def _take_next(self) -> None:
        if self._idle_threads and self._queue:
            self._idle_threads -= 1
            work, on_done = self._queue.popleft()
            self._loop.call_later(self._delay_s(), self._do, work, on_done)

    def _do(self, work: Callable[[], Any], on_done: OnDone) -> None:
        result, error = None, None
        try:
            result = work()
        except NodeCrashed:
            node: Node | None = current_node()
            if node is not None:
                node.crash()
            return
        except BaseException as caught:  # as ThreadWorker: reported to the owner, who decides
            error = caught
        report_s = self._loop.time() + self._delay_s()
        if self._single:
            report_s = self._last_report_s = max(report_s, self._last_report_s)
        self._loop.call_at(report_s, self._report, result, error, on_done)
        self._idle_threads += 1
        self._take_next()

    def _report(self, result: Any, error: BaseException | None, on_done: OnDone) -> None:
        self._unreported -= 1
        on_done(result, error)
        if self._closing is not None and not self._unreported and not self._closing.done():
            self._closing.set_result(None)


def sim_workers(rng: random.Random, *, shortest_s: float = 0.0, longest_s: float = 0.002) -> Callable[[str, int], SimWorker]:
    """For `Ports.new_worker`: workers whose steps take up to `longest_s`."""

    def new_worker(name: str, threads: int) -> SimWorker:
        return SimWorker(name, threads, lambda: rng.uniform(shortest_s, longest_s))

    return new_worker


def sim_ports(rng: random.Random, work_delay_s: Callable[[str], float], clock: MachineClock) -> Ports:
    """`work_delay_s` is asked with the worker's name: what keeps the journal's thread busy does not slow down the others."""
    return Ports(
        wall_ms=clock.wall_ms,
        random=rng,
        new_worker=lambda name, threads: SimWorker(name, threads, lambda: work_delay_s(name)),
        seconds=lambda: asyncio.get_running_loop().time(),
    )
