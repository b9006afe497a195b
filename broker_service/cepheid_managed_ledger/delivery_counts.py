"""How often entries of a subscription were redelivered: the counts by which clients decide what is a dead letter.

    count ──► 5:1 → 1, 5:7 → 3 ──acknowledged──► removed      and the inverse: 1 → {5:1}, 3 → {5:7}

Only counts above 0 are kept. They belong to the cursor, not to the dispatch core, and are saved with it: a message that crashes
its consumers, or the broker, has its count after the restart (DeadLetterPolicy of the clients, protocol.md §16). Dispatch asks for
the count of an entry; what is saved is which entries have a count, as bitmaps, so that saving a hundred thousand counts takes
no longer than saving as many acknowledgements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from pyroaring import BitMap

from cepheid_metadata import Position

MAX_COUNTS = 1_000_000
"""Counts of one cursor, about 100 MB. At the limit the oldest positions are dropped: they are delivered with the count 0."""

MAX_COUNT = (1 << 31) - 1  # a Java client reads the wire's uint32 as a signed number
_NONE: Mapping[int, int] = MappingProxyType({})


class DeliveryCounts:
    __slots__ = ("_by_ledger", "_size")

    def __init__(self) -> None:
        self._by_ledger: dict[int, _LedgerCounts] = {}
        self._size = 0

    def __repr__(self) -> str:
        return f"<DeliveryCounts of {self._size} entries>"

    def __len__(self) -> int:
        return self._size

    def groups(self) -> Iterator[tuple[int, int, BitMap]]:
        """Return ledger id, count, and the entries with this count (not to be changed)."""
        for ledger_id, counts in self._by_ledger.items():
            for count, entries in counts.entries_with.items():
                yield ledger_id, count, entries

    def in_ledger(self, ledger_id: int) -> Mapping[int, int]:
        """Return the counts by entry id. The live mapping, not a copy; not to be changed."""
        counts = self._by_ledger.get(ledger_id)
        return _NONE if counts is None else counts.by_entry

    def add(self, ledger_id: int, entry_id: int, times: int = 1) -> None:
        counts = self._by_ledger.get(ledger_id)
        if counts is None:
            counts = self._by_ledger[ledger_id] = _LedgerCounts()
        self._size += counts.add(entry_id, times)
        if self._size > MAX_COUNTS:
            self._forget_oldest(MAX_COUNTS // 64)  # many at once, so that each costs little

    def restore(self, ledger_id: int, entries: BitMap, count: int) -> None:
        """Set this count for these entries, which have none yet."""
        if entries:
            counts = self._by_ledger.setdefault(ledger_id, _LedgerCounts())
            self._size += counts.restore(entries, count)

    def forget(self, positions: Iterable[Position]) -> None:
        for ledger_id, entry_id in positions:
            counts = self._by_ledger.get(ledger_id)
            if counts is not None:
                self._size -= counts.forget(entry_id)
                if not counts.by_entry:
                    del self._by_ledger[ledger_id]

    def forget_between(self, after: Position, last: Position) -> None:
        """Drop the counts of the entries in (after, last]."""
        for ledger_id in [ledger_id for ledger_id in self._by_ledger if after.ledger_id <= ledger_id <= last.ledger_id]:
            first_entry = after.entry_id + 1 if ledger_id == after.ledger_id else 0
            if ledger_id < last.ledger_id and first_entry == 0:
                self._size -= len(self._by_ledger.pop(ledger_id).by_entry)
                continue
            counts = self._by_ledger[ledger_id]
            end = last.entry_id + 1 if ledger_id == last.ledger_id else counts.entries().max() + 1
            few = end - first_entry <= _FEW
            gone = range(first_entry, end) if few else counts.entries() & BitMap(range(first_entry, end))
            self.forget(Position(ledger_id, entry_id) for entry_id in gone)

    def clear(self) -> None:
        self._by_ledger.clear()
        self._size = 0

    def _forget_oldest(self, size: int) -> None:
        while size > 0:
            ledger_id = min(self._by_ledger)
            oldest = self._by_ledger[ledger_id].entries()[:size]
            self.forget(Position(ledger_id, entry_id) for entry_id in oldest)
            size -= len(oldest)


_FEW = 256


class _LedgerCounts:
    """The counts of one ledger, in both directions."""

    __slots__ = ("by_entry", "entries_with")

    def __init__(self) -> None:
        self.by_entry: dict[int, int] = {}
        self.entries_with: dict[int, BitMap] = {}

    def entries(self) -> BitMap:
        return BitMap.union(*self.entries_with.values())

    def add(self, entry_id: int, times: int) -> int:
        """Add to the count of an entry. Return 1 if it had none, else 0."""
        before = self.by_entry.get(entry_id)
        count = self.by_entry[entry_id] = min((before or 0) + times, MAX_COUNT)
        if before is not None:
            self._take_out(before, entry_id)
        same = self.entries_with.get(count)
        if same is None:
            self.entries_with[count] = BitMap((entry_id,))
        else:
            same.add(entry_id)
        return before is None

    def restore(self, entries: BitMap, count: int) -> int:
        before = len(self.by_entry)
        self.by_entry |= dict.fromkeys(entries, count)
        same = self.entries_with.get(count)
        self.entries_with[count] = entries if same is None else entries | same
        return len(self.by_entry) - before

    def forget(self, entry_id: int) -> int:
        """Drop the count of an entry. Return 1 if it had one, else 0."""
        count = self.by_entry.pop(entry_id, None)
        if count is None:
            return 0
        self._take_out(count, entry_id)
        return 1

    def _take_out(self, count: int, entry_id: int) -> None:
        same = self.entries_with[count]
        same.discard(entry_id)
        if not same:
            del self.entries_with[count]
