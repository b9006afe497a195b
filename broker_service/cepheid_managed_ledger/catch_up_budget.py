"""Memory for entries read from storage, over all topics: a reader of old data must not crowd out publishing.

A caller that has to wait reclaims what was read ahead for readers that paused. Otherwise a consumer that seeks often would wait
for seconds: each seek leaves what was read ahead at the previous place.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

_PAUSED_S = 0.5
"""Time after which a reader counts as paused when memory runs short. One of many that share a slow store returns sooner."""


class Holder(Protocol):
    def drop_idle(self, idle_s: float) -> None:
        """Release what was read ahead for readers that have paused that long."""


class CatchUpBudget:
    """A budget in bytes. May be exceeded by what a read returns above its limit: one entry."""

    def __init__(self, limit_bytes: int, object_limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.object_limit_bytes = limit_bytes if object_limit_bytes is None else object_limit_bytes
        self.object_bytes = 0
        """The part of `used_bytes` that was read ahead from objects."""
        self.holders: dict[Holder, None] = {}
        """Objects that may have memory to release."""
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def __repr__(self) -> str:
        return f"<CatchUpBudget {self.used_bytes} of {self.limit_bytes} B, {len(self._waiting)} waiting>"

    async def take(self, size_bytes: int) -> None:
        """Take bytes, waiting in turn until they are available."""
        if not self._waiting and self.take_nowait(size_bytes):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size_bytes, turn))
        try:
            while not turn.done():
                for holder in list(self.holders):
                    holder.drop_idle(_PAUSED_S)
                await asyncio.wait([turn], timeout=_PAUSED_S)
        except asyncio.CancelledError:
            taken = not turn.cancel()  # and cancelled before it could be used
            self.give_back(size_bytes if taken else 0)  # the next caller's turn may have come
            raise

    def take_nowait(self, size_bytes: int) -> bool:
        if self.used_bytes and self.used_bytes + size_bytes > self.limit_bytes:  # one read is always allowed, however large
            return False
        self.used_bytes += size_bytes
        return True

    def charge(self, size_bytes: int) -> None:
        """Take bytes for entries that are in memory already."""
        self.used_bytes += size_bytes

    def take_ahead_of_object(self, size_bytes: int) -> bool:
        """Room to read ahead from an object; it is given back by `give_back_object` as well."""
        if self.object_bytes and self.object_bytes + size_bytes > self.object_limit_bytes:
            return False
        if not self.take_nowait(size_bytes):
            return False
        self.object_bytes += size_bytes
        return True

    def give_back_object(self, size_bytes: int) -> None:
        self.object_bytes -= size_bytes
        assert self.object_bytes >= 0, f"{self!r}: more was given back than taken"

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
