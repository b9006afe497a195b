"""Groups that were sent but are not confirmed yet, in the order of their ids.

    push ──►│ 7..9 │ 10..10 │ 11..40 │──► complete_through(10) calls back for 7..9 and 10..10, in this order
                                                    └── during an ensemble change they are kept for the newcomers

A group is answered once, when its last entry is confirmed, or when the ledger fails. Groups kept beyond that are bounded by a
`KeptBytes` that all writers of the process share: when it is used up, the writer drops all that it keeps.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from cepheid_ledger.errors import LedgerError
from cepheid_rpc import EntryGroup

GroupDone: TypeAlias = Callable[[EntryGroup | LedgerError], None]
"""Called with the frozen group once it is confirmed, otherwise with the error. Must not raise."""

log = logging.getLogger(__name__)

GROUP_BYTES = 256
"""Memory of a kept group besides its entries: small ones would fill five times the memory of their bytes."""


class KeptBytes:
    """Budget of confirmed groups kept for newcomers to ensembles, for all writers of the process, including the groups' own memory.

    Soft by one group.
    """

    __slots__ = ("limit_bytes", "overflows", "used_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.overflows = 0

    def __repr__(self) -> str:
        return f"<KeptBytes {self.used_bytes} of {self.limit_bytes}>"


class Unconfirmed:
    __slots__ = ("_groups", "_keeping", "_kept", "_kept_bytes", "_kept_size", "size_bytes")

    def __init__(self, kept_bytes: KeptBytes) -> None:
        self._groups: deque[tuple[int, EntryGroup, GroupDone]] = deque()
        self.size_bytes = 0
        self._kept_bytes = kept_bytes
        self._kept: list[EntryGroup] = []
        self._kept_size = 0
        self._keeping = False

    def __repr__(self) -> str:
        return f"<Unconfirmed {len(self._groups)} groups, {self.size_bytes} B, {len(self._kept)} kept>"

    def __len__(self) -> int:
        """Return the number of groups."""
        return len(self._groups)

    @property
    def first(self) -> EntryGroup | None:
        return self._groups[0][1] if self._groups else None

    def push(self, last_entry_id: int, group: EntryGroup, on_done: GroupDone) -> None:
        self._groups.append((last_entry_id, group, on_done))
        self.size_bytes += len(group.data)

    def view(self, first: int, last: int) -> list[EntryGroup]:
        """Return the entries `first..last` (inclusive) as sent, as slices of their groups; kept ones included."""
        return [
            group.slice(max(first, group.first_entry_id), min(last, group.last_entry_id))
            for group in (*self._kept, *(group for _, group, _ in self._groups))
            if group.last_entry_id >= first and group.first_entry_id <= last
        ]

    @property
    def is_keeping(self) -> bool:
        """Whether nothing had to be dropped since `keep`."""
        return self._keeping

    def keep(self) -> None:
        """Keep confirmed groups visible from now on, until `let_go`."""
        self.let_go()
        self._keeping = True

    def let_go(self) -> None:
        self._keeping = False
        self._kept_bytes.used_bytes -= self._kept_size
        self._kept, self._kept_size = [], 0

    def complete_through(self, last: int) -> None:
        """Answer the groups that end at or before `last`. A callback may push."""
        groups = self._groups
        while groups and groups[0][0] <= last:
            _, group, on_done = groups.popleft()
            self.size_bytes -= len(group.data)
            if self._keeping:
                self._keep(group)
            _answer(on_done, group, group)

    def fail(self, error: LedgerError) -> None:
        """Answer everything that is left with the error, in order."""
        while self._groups:
            _, group, on_done = self._groups.popleft()
            self.size_bytes -= len(group.data)
            _answer(on_done, error, group)

    def _keep(self, group: EntryGroup) -> None:
        self._kept.append(group)
        budget = self._kept_bytes
        size = len(group.data) + GROUP_BYTES
        self._kept_size += size
        budget.used_bytes += size
        if budget.used_bytes > budget.limit_bytes:
            budget.overflows += 1
            self.let_go()


def _answer(on_done: GroupDone, outcome: EntryGroup | LedgerError, group: EntryGroup) -> None:
    try:
        on_done(outcome)
    except Exception as error:  # a defect in one caller must not leave callers of other ledgers unanswered
        log.exception("ledger.callback_failed", extra={"ledger_id": group.ledger_id, "error": repr(error)})
