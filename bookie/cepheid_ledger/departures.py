"""Makes open writers of a process leave a bookie that is gone or draining, some writers in each turn of the loop.

    leave ──► ids of all open writers ──► those that send to the bookie ──LedgerWriter.leave_bookie──► EnsembleChanger

The writer of an idle ledger has no other way to notice that a bookie is gone, and after several such losses no recovery would find
a quorum. The caller repeats `leave` while the bookie stays gone, for ledgers that were created meanwhile. Writers without a spare
are asked again every `retry_s` until they have left, or until the bookie is as good as before (`stay`): otherwise repair would
consider a living writer gone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Protocol

_LOOKED_AT_PER_TURN = 1_000
_ASKED_PER_TURN = 100  # as many changes start in one turn: publishers wait meanwhile


class LeavingWriter(Protocol):
    """A LedgerWriter."""

    @property
    def receivers(self) -> tuple[str, ...]: ...

    def leave_bookie(self, bookie_id: str, reason: str) -> bool: ...


class Departures:
    """The bookies that open writers are to leave. `writers` is by ledger id, and may change at any time."""

    def __init__(self, writers: Mapping[int, LeavingWriter], retry_s: float) -> None:
        self._writers = writers
        self._retry_s = retry_s
        self._without_spare: dict[str, tuple[str, dict[int, None]]] = {}  # by bookie: reason, ids of writers that stay
        self._retry: asyncio.TimerHandle | None = None
        self._rounds: deque[tuple[str, str, Iterator[int]]] = deque()  # bookie, reason, ids of writers to look at
        self._turn: asyncio.Handle | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"<Departures from {[bookie_id for bookie_id, _, _ in self._rounds]}>"

    def leave(self, bookie_id: str, reason: str) -> None:
        """Make each open writer that sends to this bookie replace it, soon. Another call during such a round changes nothing."""
        if self._closed or any(bookie_id == other for other, _, _ in self._rounds):
            return
        self._rounds.append((bookie_id, reason, iter(list(self._writers))))
        if self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._ask_some)

    def stay(self, bookie_id: str) -> None:
        """Ask no further writer to leave this bookie: it came back as it was, or is not decommissioned any more."""
        self._without_spare.pop(bookie_id, None)
        self._rounds = deque(one for one in self._rounds if one[0] != bookie_id)

    def close(self) -> None:
        """Ask no further writer."""
        self._closed = True
        self._rounds.clear()
        self._without_spare.clear()
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None

    def _ask_some(self) -> None:
        self._turn = None
        if not self._rounds:  # the bookie came back in the meantime
            return
        bookie_id, reason, ledger_ids = self._rounds[0]
        asked = 0
        for _ in range(_LOOKED_AT_PER_TURN):
            ledger_id = next(ledger_ids, None)
            if ledger_id is None:
                self._rounds.popleft()
                break
            writer = self._writers.get(ledger_id)
            if writer is not None and bookie_id in writer.receivers:
                if not writer.leave_bookie(bookie_id, reason):
                    self._ask_later(ledger_id, bookie_id, reason)
                asked += 1
                if asked == _ASKED_PER_TURN:
                    break
        if self._rounds and self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._ask_some)

    def _ask_later(self, ledger_id: int, bookie_id: str, reason: str) -> None:
        self._without_spare.setdefault(bookie_id, (reason, {}))[1][ledger_id] = None
        if self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(self._retry_s, self._ask_again)

    def _ask_again(self) -> None:
        self._retry = None
        waiting, self._without_spare = self._without_spare, {}
        self._rounds.extend((bookie_id, reason, iter(ids)) for bookie_id, (reason, ids) in waiting.items())
        if self._rounds and self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._ask_some)
