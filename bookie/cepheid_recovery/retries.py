"""The ledgers that wait before they are tried again, and until when, and the copies to be read. No I/O; times are those of the
loop, in seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
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


class CopyToRead(NamedTuple):
    """One copy that may be missing."""

    position: int
    entry_id: int
    bookie: str


_Check = tuple[int, Sequence[CopyToRead]]


class CopyChecks:
    """Ledgers with the copies that are to be read. The newest are next: they were open most recently.

    At most `limit` wait, and as many that failed. Beyond that the oldest are dropped.
    """

    def __init__(self, limit: int, first_pause_s: float) -> None:
        self._next: deque[_Check] = deque(maxlen=limit)
        self._failed: deque[_Check] = deque(maxlen=limit)
        self._retries = Retries(first_pause_s)
        self._current: _Check | None = None

    def __len__(self) -> int:
        """Return how many can be begun now."""
        return len(self._next)

    def add(self, ledger_id: int, copies: Sequence[CopyToRead]) -> None:
        self._next.append((ledger_id, copies))

    def begin(self) -> _Check:
        """Return the next check. Its bookies stay listed until `end` is called."""
        self._current = self._next.pop()
        return self._current

    def end(self, left: Sequence[CopyToRead], now_s: float) -> None:
        """End the current check. The copies that are `left`, as their bookies did not answer, are tried again after a pause."""
        assert self._current is not None
        ledger_id, _ = self._current
        if left:
            self._retries.later(ledger_id, now_s)
            self._failed.append((ledger_id, left))
        else:
            self._retries.succeeded(ledger_id)
        self._current = None

    def end_pauses(self) -> None:
        """Let all failed checks be begun by the next `retry`: a bookie came or changed."""
        self._retries.clear()

    def retry(self, now_s: float) -> None:
        """Let failed checks whose pause is over be begun, after all others."""
        if not self._failed:
            return
        due = set(self._retries.due((ledger_id for ledger_id, _ in self._failed), now_s))
        again = [check for check in self._failed if check[0] in due]
        self._failed = deque((check for check in self._failed if check[0] not in due), self._failed.maxlen)
        self._next = deque([*again, *self._next], self._next.maxlen)

    def bookies(self) -> set[str]:
        """Return the bookies with copies that were not read yet."""
        current = () if self._current is None else (self._current,)
        return {copy.bookie for _, copies in chain(self._next, self._failed, current) for copy in copies}
