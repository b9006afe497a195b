"""Finds entries of a backlog without a valid copy, which an operator gives up by `cepheid subscriptions skip --unreadable`.

    waits here
       ▼
    7:3 ✗  7:4 ✗  7:5 ■  7:6 ✗  7:7 ■ ■ ■ ■ … 1 MiB that can be read: the search ends       gives 7:3, 7:4, 7:6

Only certain losses count (`is_entry_gone`). An entry that an unavailable bookie may still have ends the search: with an error, or
with what was found before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cepheid_managed_ledger import is_entry_gone
from cepheid_metadata import Position
from cepheid_ports import CepheidError

if TYPE_CHECKING:
    from cepheid_managed_ledger import Cursor, ManagedLedger

_READABLE_BYTES = 1 << 20
"""This many readable bytes after the last unreadable entry end the search: one damaged place spans a few blocks at most."""

MAX_FOUND = 1_000
"""Most entries found by one search: each costs a read at every replica."""

_READ_ENTRIES = 10_000


@dataclass(slots=True)
class UnreadableEntries:
    """Entries without a valid copy, in the order in which they were found, and why each cannot be read.

    `may_be_more`: the search ended at its bound, or at an entry whose loss is not certain.
    """

    positions: list[Position] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    may_be_more: bool = False

    def __str__(self) -> str:
        return ", ".join(str(first) if first == last else f"{first}..{last.entry_id}" for first, last, _ in self.runs())

    def runs(self) -> Iterator[tuple[Position, Position, str]]:
        """Yield consecutive entries of one ledger together: first, last, and the reason of the first."""
        index = 0
        while index < len(self.positions):
            first = last = self.positions[index]
            reason = self.reasons[index]
            index += 1
            while index < len(self.positions) and self.positions[index] == (last.ledger_id, last.entry_id + 1):
                last = self.positions[index]
                index += 1
            yield first, last, reason


async def find_unreadable(ledger: ManagedLedger, cursor: Cursor, starts: Sequence[Position]) -> UnreadableEntries:
    """Search the unacknowledged entries from each start on, until `_READABLE_BYTES` in a row can be read.

    Raises CepheidError if an entry cannot be read, its loss is not certain, and nothing was found before.
    """
    found = UnreadableEntries()
    for start in starts:
        await _look_from(start, ledger, cursor, found)
    return found


async def _look_from(start: Position, ledger: ManagedLedger, cursor: Cursor, found: UnreadableEntries) -> None:
    position, readable_bytes = start, 0
    while readable_bytes < _READABLE_BYTES:
        position = cursor.unacknowledged_from(position)
        if position > ledger.last_confirmed:
            return
        if len(found.positions) >= MAX_FOUND:
            found.may_be_more = True
            return
        try:
            groups = await ledger.read(position, max_entries=_READ_ENTRIES, max_bytes=_READABLE_BYTES - readable_bytes)
        except CepheidError as error:
            if not is_entry_gone(error):
                if not found.positions:
                    raise
                found.may_be_more = True
                return
            if position not in found.positions:
                found.positions.append(position)
                found.reasons.append(str(error))
            readable_bytes = 0
            position = ledger.next_position(position)
        else:
            if not groups:
                return
            readable_bytes += sum(group.size_bytes for group in groups)
            position = Position(groups[-1].ledger_id, groups[-1].last_entry_id + 1)
