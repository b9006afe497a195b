"""What a process is: opened in order, closed in reverse, ended by the first part that fails for good.

starting ──► serving ──► stopping ──► stopped
    └── fails, is cancelled: what was opened is closed, and the reason raised
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from contextlib import AsyncExitStack

from cepheid_ports.first_failure import FirstFailure


class Role(ABC):
    """`start` once, `aclose` once. Made inside the running loop."""

    def __init__(self) -> None:
        self._opened = AsyncExitStack()
        """Gets the end of whatever `_start` opens, at once."""
        self._failure = FirstFailure()
        self._phase = "starting"

    @abstractmethod
    async def _start(self) -> None:
        """Returns when it serves. Raises CepheidError."""

    async def start(self) -> None:
        """Returns when it serves. Raises CepheidError, having closed everything."""
        try:
            await self._start()
        except BaseException:
            await self._opened.aclose()
            raise
        self._phase = "serving"

    async def wait_until_stopped(self, stop: asyncio.Event) -> None:
        """Returns when `stop` is set; raises ProcessFailedError when a part failed for good."""
        await self._failure.wait(stop)

    async def aclose(self) -> None:
        self._phase = "stopping"
        await self._opened.aclose()
        self._phase = "stopped"
