"""Closing that runs once, also when the call that began it is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Ending:
    """The end of one object. `work` closes it."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._work = work
        self._task: asyncio.Task[None] | None = None

    async def reach(self) -> None:
        """Close the object and raise what that raises. Later calls do nothing.

        Cancelled: closing goes on, and another call waits for its end.
        """
        if self._task is None or self._task.cancelled():
            self._task = asyncio.get_running_loop().create_task(self._work(), name="cepheid/close")
        elif self._task.done():
            return
        await asyncio.shield(self._task)
