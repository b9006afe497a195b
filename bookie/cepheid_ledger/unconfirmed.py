"""Groups that were sent and are not confirmed yet, in the order of their ids.

    push ──►│ 7..9 │ 10..10 │ 11..40 │──► complete_through(10) calls back for 7..9 and 10..10, in this order

A group is answered once, when its last entry is confirmed, or when the ledger fails.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from cepheid_ledger.errors import LedgerError
from cepheid_rpc import EntryGroup

GroupDone: TypeAlias = Callable[[EntryGroup | LedgerError], None]
"""Gets the frozen group once it is confirmed, else why it is not. Must not raise."""

log = logging.getLogger(__name__)


class Unconfirmed:
    __slots__ = ("_groups", "size_bytes")

    def __init__(self) -> None:
        self._groups: deque[tuple[int, EntryGroup, GroupDone]] = deque()
        self.size_bytes = 0

    def __repr__(self) -> str:
        return f"<Unconfirmed {len(self._groups)} groups, {self.size_bytes} B>"

    def __len__(self) -> int:
        """How many groups."""
        return len(self._groups)

    @property
    def first(self) -> EntryGroup | None:
        return self._groups[0][1] if self._groups else None

    def push(self, last_entry_id: int, group: EntryGroup, on_done: GroupDone) -> None:
        self._groups.append((last_entry_id, group, on_done))
        self.size_bytes += len(group.data)

    def view(self, first: int, last: int) -> list[EntryGroup]:
        """The entries `first..last` (inclusive), as sent, in slices of the groups they were sent in."""
        return [
            group.slice(max(first, group.first_entry_id), min(last, group_last))
            for group_last, group, _ in self._groups
            if group_last >= first and group.first_entry_id <= last
        ]

    def complete_through(self, last: int) -> None:
        """Answers the groups that end at or before `last`. A callback may push."""
        groups = self._groups
        while groups and groups[0][0] <= last:
            _, group, on_done = groups.popleft()
            self.size_bytes -= len(group.data)
            _answer(on_done, group, group)

    def fail(self, error: LedgerError) -> None:
        """Answers everything that is left, in order."""
        while self._groups:
            _, group, on_done = self._groups.popleft()
            self.size_bytes -= len(group.data)
            _answer(on_done, error, group)


def _answer(on_done: GroupDone, outcome: EntryGroup | LedgerError, group: EntryGroup) -> None:
    try:
        on_done(outcome)
    except Exception as error:  # one caller's defect must not leave the answers of other ledgers undelivered
        log.exception("ledger.callback_failed", extra={"ledger_id": group.ledger_id, "error": repr(error)})
