"""Sums over the closed ledgers of a chain, so that a cursor far behind costs no more than one at the end.

    ledgers            5          6          8         closed ledgers
    before each        0          ●          ●          ● sum of all before it; of those from index i on: last − before i

A ledger whose messages are not counted counts as 0 messages here, and is listed in `uncounted`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from cepheid_managed_ledger.ledger_counts import Amount


class EndedTotals:
    __slots__ = ("_before", "ids", "uncounted")

    def __init__(self, ledgers: Iterable[tuple[int, int, int | None, int]]) -> None:
        """Take (ledger id, entries, messages, bytes) in the order of the chain."""
        self.ids: list[int] = []
        self.uncounted: list[int] = []
        self._before = [Amount()]
        for ledger_id, entries, messages, size_bytes in ledgers:
            self.ids.append(ledger_id)
            if messages is None:
                self.uncounted.append(ledger_id)
            self._before.append(self._before[-1].plus(Amount(entries, messages or 0, size_bytes)))

    def __repr__(self) -> str:
        return f"<EndedTotals of {len(self.ids)} ledgers, {len(self.uncounted)} uncounted>"

    def behind(self, ledger_id: int) -> Amount:
        """Return the totals of the ledgers after this one."""
        return self._before[-1].minus(self._before[bisect_right(self.ids, ledger_id)])

    def of(self, ledger_id: int) -> Amount:
        """Return the totals of this ledger; zero if it is not in the list."""
        index = bisect_left(self.ids, ledger_id)
        if index == len(self.ids) or self.ids[index] != ledger_id:
            return Amount()
        return self._before[index + 1].minus(self._before[index])

    def uncounted_behind(self, ledger_id: int) -> list[int]:
        return self.uncounted[bisect_right(self.uncounted, ledger_id) :]
