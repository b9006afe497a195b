"""The first part of a process that fails permanently ends the process; `wait` raises its error."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from cepheid_ports.errors import CepheidError


class ProcessFailedError(CepheidError):
    """A part of the process failed, and only a restart can repair it."""

    hint: ClassVar[str] = "start it again: what was acknowledged is on disk"


class FirstFailure:
    """Create it in the running loop. Pass `report` as `on_failed` to every part."""

    def __init__(self) -> None:
        self._failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    def __repr__(self) -> str:
        return f"<FirstFailure {self._failed.result()!r}>" if self._failed.done() else "<FirstFailure: none>"

    def report(self, error: BaseException) -> None:
        if not self._failed.done():
            self._failed.set_result(error)

    async def wait(self, stop: asyncio.Event) -> None:
        """Return when `stop` is set. Raises ProcessFailedError if a part fails before."""
        stopping = asyncio.ensure_future(stop.wait())
        waiting: list[asyncio.Future[Any]] = [stopping, self._failed]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
        if self._failed.done():
            raise ProcessFailedError(str(self._failed.result())) from self._failed.result()
