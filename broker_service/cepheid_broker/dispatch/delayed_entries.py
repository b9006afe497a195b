"""Entries that wait for the delivery time set by their producer (`deliver_at_time`), in a heap.

They are forgotten with the core; read again, they are held back again.
"""

from __future__ import annotations

from datetime import UTC, datetime
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from cepheid_broker.dispatch.counted_group import CountedGroup
from cepheid_broker.dispatch.effects import AckView, Idle, Why
from cepheid_metadata import Position

NO_HASH = 0  # where it is not needed


class Due(NamedTuple):
    ledger_id: int
    entry_id: int
    key_hash: int


class DelayedEntries:
    """Delayed entries, with a limit that is soft by one read: a core that finds it full stops reading.

    An entry acknowledged meanwhile is noticed when it is due.
    """

    def __init__(self, max_entries: int) -> None:
        self.enabled = True
        self._max_entries = max_entries
        self._heap: list[tuple[int, int, int, int]] = []  # due at (wall clock, ms), ledger, entry, hash of the key

    def __len__(self) -> int:
        return len(self._heap)

    def __repr__(self) -> str:
        return f"<DelayedEntries {len(self._heap)}, the first due at {self.first_due_ms}>"

    @property
    def is_full(self) -> bool:
        return len(self._heap) >= self._max_entries

    @property
    def first_due_ms(self) -> int | None:
        return self._heap[0][0] if self._heap else None

    @property
    def first(self) -> Position | None:
        return Position(*self._heap[0][1:3]) if self._heap else None

    def hold_back(self, counted: CountedGroup, acks: AckView, now_ms: int) -> list[CountedGroup]:
        """Keep the entries of a group that are not due, and return the others."""
        if counted.deliver_at_ms is None or not self.enabled:
            return [counted]
        waiting = [(entry_id, due_ms) for entry_id, due_ms in counted.deliver_at_ms.items() if due_ms > now_ms]
        others, start = [], counted.first
        for entry_id, due_ms in waiting:
            if acks.unacknowledged_runs(counted.ledger_id, entry_id, entry_id):
                heappush(self._heap, (due_ms, counted.ledger_id, entry_id, NO_HASH))
            if entry_id > start:
                others.append(counted.slice(start, entry_id - 1))
            start = entry_id + 1
        if start <= counted.last:
            others.append(counted.slice(start, counted.last))
        return others

    def must_wait(self, counted: CountedGroup, entry_id: int, now_ms: int) -> bool:
        return self.enabled and counted.deliver_at_ms is not None and counted.deliver_at_ms.get(entry_id, 0) > now_ms

    def add(self, counted: CountedGroup, entry_id: int, key_hash: int) -> None:
        assert counted.deliver_at_ms is not None, "it must wait"
        heappush(self._heap, (counted.deliver_at_ms[entry_id], counted.ledger_id, entry_id, key_hash))

    def take_due(self, now_ms: int) -> list[Due]:
        """Return due entries in order; all entries if delayed delivery is off."""
        due = []
        while self._heap and (not self.enabled or self._heap[0][0] <= now_ms):
            due.append(Due(*heappop(self._heap)[1:]))
        return due

    def forget_acknowledged(self, acks: AckView) -> None:
        self._heap = [held for held in self._heap if acks.unacknowledged_runs(held[1], held[2], held[2])]
        heapify(self._heap)

    def clear(self) -> None:
        self._heap.clear()

    def why(self, now_ms: int) -> list[Why]:
        if not self._heap:
            return []
        due_ms = self._heap[0][0]
        idle = Idle.TOO_MANY_DELAYED if self.is_full else Idle.DELAYED
        in_s = max(0, due_ms - now_ms) / 1000
        details = f"{len(self._heap)} entries are held back, the first for {in_s:.3f} s more"
        return [Why(idle, position=self.first, until=f"the clock shows {_utc(due_ms)}", details=details)]


def _utc(wall_ms: int) -> str:
    """Format a time for people; producers may set any number, and one that is not a valid date is shown as it is."""
    try:
        return datetime.fromtimestamp(wall_ms / 1000, UTC).isoformat(timespec="milliseconds")
    except (OverflowError, ValueError, OSError):
        return f"{wall_ms} ms since 1970"
