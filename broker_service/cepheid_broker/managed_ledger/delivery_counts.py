"""How often entries of a subscription were delivered again: the redelivery counts by which clients find their dead letters.

    count ──► 5:1 → 1, 5:7 → 3 ──acknowledged──► gone

Only counts above 0 are kept. They are the cursor's, not the dispatch core's, and are saved with it: a message that kills its
consumers, or the broker, has its count after the restart (DeadLetterPolicy of the clients, protocol.md §16).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from cepheid_metadata import Position

MAX_COUNTS = 1_000_000
"""Of one cursor, some 100 MB. At the bound the oldest positions are forgotten: they are delivered with the count 0 again."""

MAX_COUNT = (1 << 31) - 1  # a Java client reads the wire's uint32 as a signed number
_NONE: Mapping[int, int] = MappingProxyType({})


class DeliveryCounts:
    __slots__ = ("_by_ledger", "_size")

    def __init__(self) -> None:
        self._by_ledger: dict[int, dict[int, int]] = {}
        self._size = 0

    def __repr__(self) -> str:
        return f"<DeliveryCounts of {self._size} entries>"

    def __len__(self) -> int:
        return self._size

    def items(self) -> Iterator[tuple[int, Mapping[int, int]]]:
        """By ledger: counts by entry id."""
        return iter(self._by_ledger.items())

    def in_ledger(self, ledger_id: int) -> Mapping[int, int]:
        """Counts by entry id, as they are at any time: not a copy, not to be changed."""
        return self._by_ledger.get(ledger_id, _NONE)

    def add(self, ledger_id: int, entry_id: int, times: int = 1) -> None:
        counts = self._by_ledger.get(ledger_id)
        if counts is None:
            counts = self._by_ledger[ledger_id] = {}
        before = counts.get(entry_id)
        if before is None:
            self._size += 1
            before = 0
        counts[entry_id] = min(before + times, MAX_COUNT)
        if self._size > MAX_COUNTS:
            self._forget_oldest(MAX_COUNTS // 64)  # many at once, so that each costs little

    def forget(self, positions: Iterable[Position]) -> None:
        for ledger_id, entry_id in positions:
            counts = self._by_ledger.get(ledger_id)
            if counts is not None and counts.pop(entry_id, None) is not None:
                self._size -= 1
                if not counts:
                    del self._by_ledger[ledger_id]

    def forget_between(self, after: Position, last: Position) -> None:
        """Of the entries after the one and up to the other."""
        for ledger_id in [ledger_id for ledger_id in self._by_ledger if after.ledger_id <= ledger_id <= last.ledger_id]:
            counts = self._by_ledger[ledger_id]
            first_entry = after.entry_id + 1 if ledger_id == after.ledger_id else 0
            if ledger_id < last.ledger_id and first_entry == 0:
                gone: Iterable[int] = list(counts)
            else:
                last_entry = last.entry_id if ledger_id == last.ledger_id else max(counts)
                span = range(first_entry, last_entry + 1)
                gone = span if len(span) < len(counts) else [entry_id for entry_id in counts if entry_id in span]
            self.forget(Position(ledger_id, entry_id) for entry_id in gone)

    def clear(self) -> None:
        self._by_ledger.clear()
        self._size = 0

    def _forget_oldest(self, size: int) -> None:
        while size > 0:
            ledger_id = min(self._by_ledger)
            oldest = heapq.nsmallest(size, self._by_ledger[ledger_id])
            self.forget([Position(ledger_id, entry_id) for entry_id in oldest])
            size -= len(oldest)
