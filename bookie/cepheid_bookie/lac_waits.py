"""Long polls of open ledgers: requests are parked until the ledger's LAC may have moved.

    request ──► park ──► look: LAC above what the reader has? ──yes──► answer
                 ▲              └──no──► sleep ──wake(ledger)──┐
                 └─────────────────────────────────────────────┘      timeout, fenced, deleted, stopped: answer as it is

Rule 1: park before the look, so that a change during the look is not missed.
Rule 2: one wake per ledger and journal batch, whatever is in it; without waiters this costs one comparison per batch.
Rule 3: the number of parked requests is limited; further ones are answered OVERLOADED at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from cepheid_rpc import LacAnswer, LacRequest, Status

_MAX_WAIT_S = 60.0  # a client that wants to wait longer asks again; its connection may be lost unnoticed


class LacWaits:
    """The parked requests. `is_settled(ledger_id)`: no regular add can move the LAC any more."""

    def __init__(self, limit: int, is_settled: Callable[[int], bool]) -> None:
        self._limit = limit
        self._is_settled = is_settled
        self._parked: dict[int, dict[asyncio.Event, None]] = {}
        self.parked = 0
        self.refused = 0

    def __repr__(self) -> str:
        return f"<LacWaits: {self.parked} parked for {len(self._parked)} ledgers>"

    async def answer(self, request: LacRequest, look: Callable[[LacRequest], Awaitable[LacAnswer]]) -> LacAnswer:
        """Return what `look` returns once it is newer than what the reader has, or when the wait is over."""
        if self.parked >= self._limit:
            self.refused += 1
            return LacAnswer(Status.OVERLOADED)
        deadline = asyncio.get_running_loop().time() + min(request.wait_ms / 1000, _MAX_WAIT_S)
        moved = asyncio.Event()
        self._parked.setdefault(request.ledger_id, {})[moved] = None
        self.parked += 1
        try:
            while True:
                moved.clear()
                answer = await look(request)
                if self._is_news(request, answer):
                    return answer
                try:
                    async with asyncio.timeout_at(deadline):
                        await moved.wait()
                except TimeoutError:
                    return answer
        finally:
            self._leave(request.ledger_id, moved)

    def wake(self, ledger_id: int) -> None:
        """Wake the readers of this ledger: something new is durable."""
        for moved in self._parked.get(ledger_id, ()):
            moved.set()

    def wake_all(self) -> None:
        for ledger_id in self._parked:
            self.wake(ledger_id)

    def _is_news(self, request: LacRequest, answer: LacAnswer) -> bool:
        if answer.status is not Status.OK and not answer.status.certain_no:
            return True
        return answer.last_add_confirmed > request.above or self._is_settled(request.ledger_id)

    def _leave(self, ledger_id: int, moved: asyncio.Event) -> None:
        self.parked -= 1
        of_ledger = self._parked[ledger_id]
        del of_ledger[moved]
        if not of_ledger:
            del self._parked[ledger_id]
