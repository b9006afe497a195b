"""Memory for the counts of all topics of a broker. The least recently used counts are dropped, and read back on demand."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol


class Forgetful(Protocol):
    def forget(self, ledger_id: int) -> None:
        """Drop the counts of this ledger, without reporting it to the budget."""


class CountBudget:
    """Bytes of counts over all topics. May be exceeded by 2 KiB a ledger."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._charged: OrderedDict[tuple[Forgetful, int], int] = OrderedDict()  # least recently used first

    def __repr__(self) -> str:
        return f"<CountBudget {self.used_bytes} of {self.limit_bytes} B, {len(self._charged)} ledgers>"

    def charge(self, owner: Forgetful, ledger_id: int, cost_bytes: int) -> None:
        """Set what a ledger's counts cost, as the most recently used. If it is too much in total, other counts are dropped."""
        key = owner, ledger_id
        self.used_bytes += cost_bytes - self._charged.pop(key, 0)
        if cost_bytes:
            self._charged[key] = cost_bytes
        while self.used_bytes > self.limit_bytes:
            (other, other_id), its_bytes = self._charged.popitem(last=False)
            self.used_bytes -= its_bytes
            other.forget(other_id)

    def note_used(self, owner: Forgetful, ledger_id: int) -> None:
        if (owner, ledger_id) in self._charged:
            self._charged.move_to_end((owner, ledger_id))
