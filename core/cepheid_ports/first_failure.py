"""The first part of a process that failed for good ends the process: who waits for the end hears its reason."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from cepheid_ports.errors import CepheidError


class ProcessFailedError(CepheidError):
    """A part of the process failed in a way that only a restart can mend."""

    hint: ClassVar[str] = "start it again: what was acknowledged is on disk"


class FirstFailure:
    """Made inside the running loop. `report` is the `on_failed` of every part."""

    def __init__(self) -> None:
        self._failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    def __repr__(self) -> str:
        return f"<FirstFailure {self._failed.result()!r}>" if self._failed.done() else "<FirstFailure: none>"

    def report(self, error: BaseException) -> None:
        if not self._failed.done():
            self._failed.set_result(error)

    async def wait(self, stop: asyncio.Event) -> None:
        """Returns when `stop` is set. Raises ProcessFailedError when a part failed before."""
        stopping = asyncio.ensure_future(stop.wait())
        waiting: list[asyncio.Future[Any]] = [stopping, self._failed]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
        if self._failed.done():
            raise ProcessFailedError(str(self._failed.result())) from self._failed.result()
