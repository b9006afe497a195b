"""Requests of one connection that take time: bounded in number, cancelled when the connection goes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from cepheid_broker.errors import ProtocolViolationError
from cepheid_ports import TaskOwner


class Requests:
    """Never on the path of entries: one task for a lookup, a producer, a subscription, a seek."""

    def __init__(self, tasks: TaskOwner, limit: int) -> None:
        self._tasks = tasks
        self._limit = limit
        self._waiting: dict[asyncio.Task[None], Callable[[], None] | None] = {}

    def __repr__(self) -> str:
        return f"<Requests {len(self._waiting)} of {self._limit}>"

    def __len__(self) -> int:
        return len(self._waiting)

    def start(
        self, work: Coroutine[Any, Any, None], *, name: str, on_cancelled: Callable[[], None] | None = None
    ) -> asyncio.Task[None]:
        """Raises ProtocolViolationError when the peer asks faster than it can be answered, beyond the limit.

        `on_cancelled`: it was given up before it was answered, and every request is answered (protocol.md §26, rule 5)."""
        if len(self._waiting) >= self._limit:
            work.close()
            raise ProtocolViolationError(
                f"{len(self._waiting)} requests are waiting, the limit is {self._limit}", waiting=len(self._waiting)
            )
        task = self._tasks.start(work, name=name)
        self._waiting[task] = on_cancelled
        task.add_done_callback(self._on_done)
        return task

    def cancel_all(self) -> None:
        for task in list(self._waiting):
            task.cancel()

    def _on_done(self, task: asyncio.Task[None]) -> None:
        on_cancelled = self._waiting.pop(task, None)
        if on_cancelled is not None and task.cancelled():
            on_cancelled()
