"""Memory that entries read from storage may take, over all topics: a reader of old data must not crowd out publishing."""

from __future__ import annotations

import asyncio
from collections import deque


class CatchUpBudget:
    """Bytes. Soft by what a read brings above what it was allowed: one entry."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def __repr__(self) -> str:
        return f"<CatchUpBudget {self.used_bytes} of {self.limit_bytes} B, {len(self._waiting)} waiting>"

    async def take(self, size_bytes: int) -> None:
        """Waits its turn."""
        if not self._waiting and self.take_nowait(size_bytes):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size_bytes, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # taken, and cancelled before it could be used
                self.give_back(size_bytes)
            raise

    def take_nowait(self, size_bytes: int) -> bool:
        if self.used_bytes and self.used_bytes + size_bytes > self.limit_bytes:  # one read always goes, however large
            return False
        self.used_bytes += size_bytes
        return True

    def charge(self, size_bytes: int) -> None:
        """For bytes that are here already."""
        self.used_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        self.used_bytes -= size_bytes
        assert self.used_bytes >= 0, f"{self!r}: more was given back than taken"
        while self._waiting:
            wanted, turn = self._waiting[0]
            if not turn.done():
                if not self.take_nowait(wanted):
                    return
                turn.set_result(None)
            self._waiting.popleft()
