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
        self._is_reported = False  # a caller has returned or raised what the task did

    async def reach(self) -> None:
        """Close the object and raise what that raises. Calls after one that returned or raised that do nothing.

        Cancelled: closing goes on, and another call waits for its end and raises what it raised.
        """
        if self._task is None or self._task.cancelled():
            self._task = asyncio.get_running_loop().create_task(self._work(), name="cepheid/close")
        elif self._is_reported:
            return
        try:
            await asyncio.shield(self._task)
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._is_reported = True
            raise
        self._is_reported = True
