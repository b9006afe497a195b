"""Calls to several bookies at once, of which some may hang."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class BookieCalls:
    """Calls by the bookie's position in the ensemble. A single one runs without a task of its own.

    async with BookieCalls() as calls:
        calls.start(0, ask_a()); calls.start(1, ask_b())
        await calls.wait_next()     # until one has ended; leaving the block cancels the rest
    """

    def __init__(self) -> None:
        self._waiting: dict[int, Coroutine[Any, Any, None]] = {}
        self._running: dict[asyncio.Task[None], int] = {}

    async def __aenter__(self) -> BookieCalls:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Cancel the rest: a hung bookie must not delay a decision."""
        for call in self._waiting.values():
            call.close()
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.gather(*self._running, return_exceptions=True)

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    def __contains__(self, position: int) -> bool:
        return position in self._waiting or position in self._running.values()

    def start(self, position: int, call: Coroutine[Any, Any, None]) -> None:
        self._waiting[position] = call

    async def wait_next(self, timeout_s: float | None = None) -> bool:
        """Wait until at least one call has ended; False: none has in time. Raises the error of the call."""
        if timeout_s is None and len(self._waiting) == 1 and not self._running:
            _, call = self._waiting.popitem()
            await call
            return True
        for position, call in self._waiting.items():
            self._running[asyncio.get_running_loop().create_task(call)] = position
        self._waiting.clear()
        done, _ = await asyncio.wait(self._running, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in [task for task in self._running if task in done]:  # in the order in which they were started: `done` is a set
            del self._running[task]
            task.result()
        return bool(done)
