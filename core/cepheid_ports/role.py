"""A process role: opened in order, closed in reverse, ended by the first part that fails permanently.

starting ──► serving ──► stopping ──► stopped
    └── fails, is cancelled: everything opened is closed, and the error raised
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from contextlib import AsyncExitStack

from cepheid_ports.first_failure import FirstFailure


class Role(ABC):
    """Call `start` once and `aclose` once. Create it in the running loop."""

    def __init__(self) -> None:
        self._opened = AsyncExitStack()
        """`_start` adds to it at once how to close what it opened."""
        self._failure = FirstFailure()
        self._phase = "starting"

    @abstractmethod
    async def _start(self) -> None:
        """Return when it serves. Raises CepheidError."""

    async def start(self) -> None:
        """Return when it serves. Raises CepheidError, after closing everything."""
        try:
            await self._start()
        except BaseException:
            await self._opened.aclose()
            raise
        self._phase = "serving"

    async def wait_until_stopped(self, stop: asyncio.Event) -> None:
        """Return when `stop` is set; raises ProcessFailedError if a part failed permanently."""
        await self._failure.wait(stop)

    async def aclose(self) -> None:
        self._phase = "stopping"
        await self._opened.aclose()
        self._phase = "stopped"
