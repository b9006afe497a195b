"""The ledgers that wait before they are tried again, and until when. No I/O; times are those of the loop, in seconds."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

_MAX_PAUSE_S = 300.0


class _Retry(NamedTuple):
    not_before_s: float
    pause_s: float


class Retries:
    """The pauses after failures: `first_pause_s`, then twice as long at each further failure, up to 300 s."""

    def __init__(self, first_pause_s: float) -> None:
        self._first_pause_s = first_pause_s
        self._waiting: dict[int, _Retry] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def later(self, ledger_id: int, now_s: float) -> None:
        """Record a failure, which doubles the pause."""
        before = self._waiting.get(ledger_id)
        pause_s = self._first_pause_s if before is None else min(2 * before.pause_s, _MAX_PAUSE_S)
        self._waiting[ledger_id] = _Retry(now_s + pause_s, pause_s)

    def succeeded(self, ledger_id: int) -> None:
        self._waiting.pop(ledger_id, None)

    def keep(self, listed: Collection[int]) -> None:
        """Forget all but these ledgers."""
        self._waiting = {ledger_id: retry for ledger_id, retry in self._waiting.items() if ledger_id in listed}

    def clear(self) -> None:
        """Forget all failures: every ledger is due, and the next pause is the first one again."""
        self._waiting.clear()

    def due(self, ledger_ids: Iterable[int], now_s: float) -> list[int]:
        """Return those that need not wait, in the order given."""
        waiting = self._waiting
        return [one for one in ledger_ids if one not in waiting or waiting[one].not_before_s <= now_s]
