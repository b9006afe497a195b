"""Requests of one connection that take time: bounded in number, cancelled when the connection goes.

    start ──► at work: a few of them, in the order in which they came ──► answered
         └──► waiting for a place, which is free when one is answered, or when those at work take long

Each turn of the loop costs a step of every request that is at work. Without a bound one client with a thousand requests under way
makes all others wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from cepheid_broker.errors import ProtocolViolationError
from cepheid_ports import TaskOwner

AT_WORK = 16
"""Requests of one connection that may cost every turn of the loop something."""

PATIENCE_S = 0.025
"""Those at work for so long wait for something themselves (a topic that is opened, another client), and take no places any more. So
none waits for ever behind one that does."""


class Requests:
    """Never on the path of entries: one task for a lookup, a producer, a subscription, a seek."""

    def __init__(self, tasks: TaskOwner, limit: int) -> None:
        self._tasks = tasks
        self._limit = limit
        self._unanswered: dict[asyncio.Task[None], Callable[[], None] | None] = {}
        self._at_work: dict[asyncio.Task[None], None] = {}
        self._waiting: deque[tuple[asyncio.Future[None], asyncio.Task[None]]] = deque()
        self._patience: asyncio.TimerHandle | None = None  # while some wait

    def __repr__(self) -> str:
        return f"<Requests {len(self._unanswered)} of {self._limit}, {len(self._at_work)} at work>"

    def __len__(self) -> int:
        return len(self._unanswered)

    def start(
        self, work: Coroutine[Any, Any, None], *, name: str, on_cancelled: Callable[[], None] | None = None
    ) -> asyncio.Task[None]:
        """Raises ProtocolViolationError when the peer asks faster than it can be answered, beyond the limit.

        `on_cancelled`: it was given up before it was answered, and every request is answered (protocol.md §26, rule 5)."""
        if len(self._unanswered) >= self._limit:
            work.close()
            raise ProtocolViolationError(
                f"{len(self._unanswered)} requests are waiting, the limit is {self._limit}", waiting=len(self._unanswered)
            )
        if len(self._at_work) < AT_WORK and not self._waiting:
            task = self._tasks.start(work, name=name)
            self._at_work[task] = None
        else:
            task = self._start_later(work, name)
        self._unanswered[task] = on_cancelled
        task.add_done_callback(self._on_done)
        return task

    def _start_later(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        loop = asyncio.get_running_loop()
        place: asyncio.Future[None] = loop.create_future()
        task = self._tasks.start(_after(place, work), name=name)
        task.add_done_callback(lambda _: work.close())  # it may have been cancelled before it began
        self._waiting.append((place, task))
        if self._patience is None:
            self._patience = loop.call_later(PATIENCE_S, self._on_patience_over)
        return task

    def _give_places(self) -> None:
        while self._waiting and len(self._at_work) < AT_WORK:
            place, task = self._waiting.popleft()
            if not place.done() and not task.done():
                self._at_work[task] = None
                place.set_result(None)

    def _on_patience_over(self) -> None:
        self._patience = None
        self._at_work.clear()
        self._give_places()
        if self._waiting:
            self._patience = asyncio.get_running_loop().call_later(PATIENCE_S, self._on_patience_over)

    def cancel_all(self) -> None:
        self._waiting.clear()
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        for task in list(self._unanswered):
            task.cancel()

    def _on_done(self, task: asyncio.Task[None]) -> None:
        on_cancelled = self._unanswered.pop(task, None)
        if on_cancelled is not None and task.cancelled():
            on_cancelled()
        self._at_work.pop(task, None)
        self._give_places()


async def _after(place: asyncio.Future[None], work: Coroutine[Any, Any, None]) -> None:
    await place
    await work
