"""Limit of topics that a broker opens at a time: after the loss of another broker, clients ask for thousands within a second.

Rules
1. Waiting openings are served in the order of requests. The limit leaves room in each turn of the loop for publishing.
2. An opening that has taken `LONGEST_S` no longer counts: topics whose bookies are away must not hold up all others.
3. A bundle that is released does not wait for the turns of its topics (`hurry`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cepheid_wire import TopicName

AT_ONCE = 128
"""Enough to keep the loop busy while openings wait for metadata and bookies. Without a limit, 4,084 topics of a killed broker were
served again no sooner (14.5 s; 14.7 s with it), and the p99 of publishers to other topics was 448 ms, not 176 (`takeover_many`)."""
LONGEST_S = 1.0


class OpeningTurns:
    """Turns of openings, at most `at_once` at a time."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._at_once = at_once
        self._given = 0
        self._taken: dict[int, float] = {}  # since when, in loop time; the oldest first
        self._waiting: dict[asyncio.Future[int], TopicName] = {}  # in the order of requests
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<OpeningTurns {len(self._taken)} taken, {len(self._waiting)} waiting>"

    async def take(self, topic: TopicName) -> int:
        """Wait for a turn and return its number for `give_back`. Returns at once below the limit."""
        self._drop_slow()
        if not self._waiting and len(self._taken) < self._at_once:
            return self._begin()
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = topic
        self._serve()
        try:
            return await turn
        except asyncio.CancelledError:
            self._waiting.pop(turn, None)
            if turn.done() and not turn.cancelled():
                self.give_back(turn.result())
            raise

    def give_back(self, turn: int) -> None:
        self._taken.pop(turn, None)
        self._serve()

    def hurry(self, wanted: Callable[[TopicName], bool]) -> None:
        """Serve these topics now, beyond the limit."""
        for turn in [turn for turn, topic in self._waiting.items() if wanted(topic)]:
            del self._waiting[turn]
            if not turn.done():
                turn.set_result(self._begin())

    def _begin(self) -> int:
        self._given += 1
        self._taken[self._given] = asyncio.get_running_loop().time()
        return self._given

    def _drop_slow(self) -> None:
        """Stop counting openings that have taken `LONGEST_S` (rule 2)."""
        now_s = asyncio.get_running_loop().time()
        while (turn := next(iter(self._taken), None)) is not None and now_s - self._taken[turn] >= LONGEST_S:
            del self._taken[turn]

    def _serve(self) -> None:
        while self._waiting and len(self._taken) < self._at_once:
            turn = next(iter(self._waiting))
            del self._waiting[turn]
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
