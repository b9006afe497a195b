"""How many topics a broker opens at once: after the loss of another one, clients ask for thousands of them in the same second.

Rules
1. Those that wait are served in the order of asking. Publishing goes on beside so many openings as do not fill a turn of the loop.
2. An opening that has taken `LONGEST_S` does not count any more: topics whose bookies are away must not hold up all others.
"""

from __future__ import annotations

import asyncio
from collections import deque

AT_ONCE = 128
"""Enough to keep the loop busy while they wait for metadata and bookies, on a busy machine too. More only make its turns longer."""
LONGEST_S = 1.0


class OpeningTurns:
    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._at_once = at_once
        self._given = 0
        self._taken: dict[int, float] = {}  # since when, in loop time; the oldest first
        self._waiting: deque[asyncio.Future[int]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<OpeningTurns {len(self._taken)} taken, {len(self._waiting)} waiting>"

    async def take(self) -> int:
        """Wait for a turn; return what `give_back` takes. Nothing is awaited while there are few openings."""
        self._drop_slow()
        if len(self._taken) < self._at_once:
            return self._begin()
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._arm()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(turn.result())
            raise

    def give_back(self, turn: int) -> None:
        self._taken.pop(turn, None)
        self._serve()

    def _begin(self) -> int:
        self._given += 1
        self._taken[self._given] = asyncio.get_running_loop().time()
        return self._given

    def _drop_slow(self) -> None:
        """Rule 2."""
        now_s = asyncio.get_running_loop().time()
        while (turn := next(iter(self._taken), None)) is not None and now_s - self._taken[turn] >= LONGEST_S:
            del self._taken[turn]

    def _serve(self) -> None:
        while self._waiting and len(self._taken) < self._at_once:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(self._begin())
        self._arm()

    def _arm(self) -> None:
        if self._timer is None and self._waiting:
            oldest_s = next(iter(self._taken.values()))
            self._timer = asyncio.get_running_loop().call_at(oldest_s + LONGEST_S, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._drop_slow()
        self._serve()
