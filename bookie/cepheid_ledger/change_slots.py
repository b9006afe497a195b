"""Shared limits of the ensemble changes of all writers of a process. A bookie's death causes thousands of them at once.

    EnsembleChanger ──begin_soon──► some in each turn of the loop
                    ──take──► a limited number at once, in request order ──► metadata
                    ──retry_later──► rounds, with pauses that grow while nothing helps ──► retry

One timer serves all ledgers that wait for a spare. While metadata is unavailable a round tries only one ledger; the rest follow
once that one has succeeded.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cepheid_ledger.settings import LedgerSettings
from cepheid_ledger.unconfirmed import KeptBytes

_LONGEST_PAUSE = 10  # times the first
_PER_TURN = 100  # changes begun, or retries, in one turn of the loop: publishers wait meanwhile


class Retrying(Protocol):
    def retry(self) -> bool:
        """Try again. Return False if there is still no spare."""


@dataclass(frozen=True, slots=True)
class EnsembleChangeStatistics:
    """Counters of ensemble changes. `ledgers_waiting`: under-replicated until a spare bookie or metadata is available.

    `kept_overflows`: newcomers that were dropped because too much was kept for them.
    """

    changed: int
    refused: int
    ledgers_waiting: int
    kept_bytes: int
    kept_overflows: int


class ChangeSlots:
    def __init__(self, settings: LedgerSettings) -> None:
        self.kept_bytes = KeptBytes(settings.channel_window_bytes)
        self._slots = asyncio.Semaphore(settings.ensemble_changes)  # served in request order
        self._first_pause_s = self._pause_s = settings.ensemble_retry_s
        self._beginning: deque[Callable[[], None]] = deque()
        self._beginner: asyncio.Handle | None = None
        self._waiting: dict[Retrying, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._metadata_is_away = False
        self._changed = self._refused = 0
        self._closed = False

    def __repr__(self) -> str:
        return f"<ChangeSlots: {len(self._waiting)} ledgers wait for a spare, {self.kept_bytes!r}>"

    def statistics(self) -> EnsembleChangeStatistics:
        kept = self.kept_bytes
        return EnsembleChangeStatistics(self._changed, self._refused, len(self._waiting), kept.used_bytes, kept.overflows)

    def begin_soon(self, begin: Callable[[], None]) -> None:
        """Call `begin` in one of the next turns of the loop."""
        self._beginning.append(begin)
        if self._beginner is None:
            self._beginner = asyncio.get_running_loop().call_soon(self._begin_some)

    def _begin_some(self) -> None:
        for _ in range(min(len(self._beginning), _PER_TURN)):
            self._beginning.popleft()()
        self._beginner = asyncio.get_running_loop().call_soon(self._begin_some) if self._beginning else None

    async def take(self) -> None:
        """Wait for this caller's turn to change metadata; end it with `give_back`."""
        await self._slots.acquire()

    def give_back(self) -> None:
        self._slots.release()

    def retry_later(self, changer: Retrying) -> None:
        self._refused += 1
        self._waiting[changer] = None
        self._pause_s = self._first_pause_s
        if self._timer is None:
            self._arm(self._pause_s)

    def forget(self, changer: Retrying) -> None:
        self._waiting.pop(changer, None)

    def on_metadata(self, is_away: bool) -> None:
        """Note whether the last change found metadata unavailable."""
        self._changed += not is_away
        if self._metadata_is_away and not is_away and self._timer is not None:
            self._timer.cancel()
            self._arm(0)
        self._metadata_is_away = is_away

    def retry_now(self) -> None:
        """Retry now: a spare may be available."""
        if self._timer is not None:
            self._timer.cancel()
            self._pause_s = self._first_pause_s
            self._arm(0)

    def close(self) -> None:
        self._closed = True
        self._waiting.clear()
        self._beginning.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, pause_s: float) -> None:
        if not self._closed:
            self._timer = asyncio.get_running_loop().call_later(pause_s, self._round)

    def _round(self, waiting: list[Retrying] | None = None, has_helped: bool = False) -> None:
        """Retry some of those that waited when the round began; the rest in the next turn."""
        self._timer = None
        waiting = list(self._waiting) if waiting is None else waiting
        turn, rest = waiting[:_PER_TURN], waiting[_PER_TURN:]
        for changer in turn:
            if changer not in self._waiting:
                continue
            del self._waiting[changer]
            if not changer.retry():
                self._waiting[changer] = None
                continue
            has_helped = True
            if self._metadata_is_away:
                rest = []
                break
        if rest:
            self._timer = asyncio.get_running_loop().call_later(0, self._round, rest, has_helped)
        elif self._waiting and self._timer is None:
            longest_s = _LONGEST_PAUSE * self._first_pause_s
            self._pause_s = self._first_pause_s if has_helped else min(2 * self._pause_s, longest_s)
            self._arm(self._pause_s)
