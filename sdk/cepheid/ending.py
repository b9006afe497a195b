"""Closing that runs exactly once, even if the call that began it is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Ending:
    """The closing of one object. `work` closes it."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._work = work
        self._task: asyncio.Task[None] | None = None
        self._is_reported = False  # whether a caller has returned or raised the task's result

    async def reach(self) -> None:
        """Close the object and raise the error of that. Once a call has returned or raised, later ones do nothing.

        Cancelled: closing continues, and another call waits for its end and raises its error.
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
