"""Tasks with an owner: every task is cancelled and awaited by its owner, which is notified of its error."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger(__name__)


class TaskOwner:
    """Tasks of one object that outlive the call that started them (within one call use `asyncio.TaskGroup`).

    An error is passed to `on_error`; if it were only logged, an object could seem to work and do nothing.
    """

    def __init__(self, owner: str, on_error: Callable[[BaseException], None] | None = None) -> None:
        self._owner = owner
        self._on_error = on_error
        self._tasks: set[asyncio.Task[Any]] = set()

    def __repr__(self) -> str:
        return f"<TaskOwner {self._owner}: {len(self._tasks)} running>"

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work, name=f"{self._owner}/{name}")
        self._tasks.add(task)  # the loop itself keeps only a weak reference
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("task.failed", extra={"task": task.get_name(), "error": repr(error)}, exc_info=error)
        if self._on_error is not None:
            self._on_error(error)

    async def wait(self) -> None:
        """Wait for the end of the running tasks, however they end. A caller that is cancelled cancels none of them."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def aclose(self) -> None:
        """Cancel the running tasks and wait for their end."""
        assert asyncio.current_task() not in self._tasks, "a task cannot wait for its own end"
        running = list(self._tasks)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
