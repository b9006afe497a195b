"""Slow requests of one connection: bounded in number, cancelled when the connection is lost.

    start ──► at work: a few of them, in order of arrival ──► answered
         └──► waiting for a place, which becomes free when one is answered, or when those at work take long

Each loop turn runs a step of every request at work. Without a bound, a client with a thousand pending requests would delay all
others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from cepheid_broker.errors import ProtocolViolationError
from cepheid_ports import TaskOwner

AT_WORK = 16
"""Most requests of one connection that may use time in every turn of the loop."""

PATIENCE_S = 0.025
"""Requests at work for this long are waiting for something else (a topic being opened, another client), and give up their
places, so that no request waits forever behind one that does."""


class Requests:
    """The slow requests: one task for a lookup, a producer, a subscription, a seek. Entries never pass here."""

    def __init__(self, tasks: TaskOwner, limit: int) -> None:
        self._tasks = tasks
        self._limit = limit
        self._unanswered: dict[asyncio.Task[None], Callable[[], None] | None] = {}
        self._at_work: dict[asyncio.Task[None], None] = {}
        self._waiting: deque[tuple[asyncio.Future[None], asyncio.Task[None]]] = deque()
        self._patience: asyncio.TimerHandle | None = None  # set while some wait

    def __repr__(self) -> str:
        return f"<Requests {len(self._unanswered)} of {self._limit}, {len(self._at_work)} at work>"

    def __len__(self) -> int:
        return len(self._unanswered)

    def start(
        self, work: Coroutine[Any, Any, None], *, name: str, on_cancelled: Callable[[], None] | None = None
    ) -> asyncio.Task[None]:
        """Start the work. Raises ProtocolViolationError if the peer has more unanswered requests than the limit.

        `on_cancelled` is called if the work is cancelled before it answered, as every request is answered (protocol.md §26, rule
        5).
        """
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
        task.add_done_callback(lambda _: work.close())  # it may be cancelled before it begins
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
