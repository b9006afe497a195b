"""Arithmetic of positions over a chain: the next entry, and how many entries lie between two positions.

    [5: 3 entries] [6: 0] [8: 2] [9: being written, last 9:0]         entry numbers span ledgers: 5:0 is 0, 8:0 is 3, 9:0 is 5
     5:-1 … 5:0 … 5:1 … 5:2 = 6:-1 = 6:7 = 8:-1 … 8:0 … 8:1 = 9:-1 … 9:0

A position names an entry, and the gap right after it. Several positions name one gap, so comparing them as pairs is a trap:
everything here uses `rank`, the number of entries at or before the gap.

Rules:
1. Ledgers that are not in the list count 0 entries; a position in one of them lies where its id would be.
2. A topic without any ledger, because it could not get one yet, counts as one with an empty ledger -1. Every other id lies after
   it, so positions in it stay before the first entry when the topic gets a ledger.
3. Only the list's own numbers count: the chain record for closed ledgers, what was confirmed for the last one.
4. A rank is valid until the next await: trimming renumbers. A search by rank that reads in between uses a `copy`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import attrgetter, lt

from cepheid_metadata import ChainLedger, Position

_LEDGER_ID, _ENTRIES, _SIZE_BYTES = attrgetter("ledger_id"), attrgetter("entries"), attrgetter("size_bytes")

_NO_LEDGER_ID = -1
"""Id of the empty ledger that a topic without ledgers counts as having (rule 2)."""


class LedgerList:
    """The chain's ledgers; the last one may grow."""

    __slots__ = ("_before", "_entries", "_ids", "_sizes", "last_is_open")

    def __init__(self, ledgers: Sequence[ChainLedger]) -> None:
        self._ids: list[int] = [_NO_LEDGER_ID]
        self._entries: list[int] = [0]
        self._sizes: list[int] = [0]
        self.update(ledgers)

    def update(self, ledgers: Sequence[ChainLedger]) -> None:
        """Take the ledgers of a changed chain. What is confirmed of its open ledger stays."""
        if not ledgers:
            self._ids, self._entries, self._sizes, self._before = [_NO_LEDGER_ID], [0], [0], [0]
            self.last_is_open = False
            return
        before = self._ids[-1], self._entries[-1], self._sizes[-1]
        self._ids = list(map(_LEDGER_ID, ledgers))  # no bytecode per ledger: a chain may have 100,000
        assert all(map(lt, self._ids, self._ids[1:])), f"ledger ids do not rise along the chain: {self._ids}"
        self.last_is_open = ledgers[-1].is_open
        self._entries = [*map(_ENTRIES, ledgers[:-1]), ledgers[-1].entries or 0]
        self._sizes = list(map(_SIZE_BYTES, ledgers))
        if self.last_is_open and self._ids[-1] == before[0]:
            _, self._entries[-1], self._sizes[-1] = before
        self._before = list(accumulate(self._entries[:-1], initial=0))

    def copy(self) -> LedgerList:
        """Return a copy that neither grows nor is trimmed (rule 4)."""
        copy = LedgerList.__new__(LedgerList)
        copy._ids, copy._before = self._ids, self._before  # never changed in place
        copy._entries, copy._sizes = list(self._entries), list(self._sizes)
        copy.last_is_open = self.last_is_open
        return copy

    def __repr__(self) -> str:
        ledgers = " ".join(f"[{ledger_id}: {count}]" for ledger_id, count in zip(self._ids, self._entries, strict=True))
        return f"<LedgerList {ledgers}{' open' if self.last_is_open else ''}>"

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, ledger_id: int) -> bool:
        return self.entries_of(ledger_id) is not None

    @property
    def has_ledgers(self) -> bool:
        """Whether the topic has a ledger (rule 2)."""
        return self._ids[0] != _NO_LEDGER_ID

    @property
    def ledger_ids(self) -> Sequence[int]:
        return self._ids

    @property
    def last_ledger_id(self) -> int:
        return self._ids[-1]

    @property
    def total_entries(self) -> int:
        return self._before[-1] + self._entries[-1]

    @property
    def total_bytes(self) -> int:
        return sum(self._sizes)

    @property
    def last_size_bytes(self) -> int:
        return self._sizes[-1]

    def confirm(self, last_entry_id: int, size_bytes: int) -> None:
        """Note that the last ledger has grown up to this entry, by this many bytes."""
        assert self.last_is_open, f"{self!r} has no open ledger"
        self._entries[-1] = last_entry_id + 1
        self._sizes[-1] += size_bytes

    def entries_of(self, ledger_id: int) -> int | None:
        """Return the ledger's number of entries; None: not in the list."""
        if ledger_id == self._ids[-1]:
            return self._entries[-1]
        index = bisect_left(self._ids, ledger_id)
        return self._entries[index] if index < len(self._ids) and self._ids[index] == ledger_id else None

    def size_of(self, ledger_id: int) -> int:
        """Return the bytes of a ledger in the list."""
        return self._sizes[bisect_left(self._ids, ledger_id)]

    def from_ledger(self, ledger_id: int) -> Iterator[tuple[int, int, int]]:
        """Return (ledger id, entries, bytes) of this ledger and those after it."""
        start = bisect_left(self._ids, ledger_id)
        return zip(self._ids[start:], self._entries[start:], self._sizes[start:], strict=True)

    def is_ended(self, ledger_id: int) -> bool:
        """Whether the ledger is in the list and gets no more entries."""
        return ledger_id in self and not (self.last_is_open and ledger_id == self._ids[-1])

    def rank(self, position: Position) -> int:
        """Return how many entries of the list are at or before this position."""
        ledger_id, entry_id = position
        index = len(self._ids) - 1
        if ledger_id != self._ids[-1]:
            index = bisect_left(self._ids, ledger_id)
            if index == len(self._ids):
                return self.total_entries
            if self._ids[index] != ledger_id:
                return self._before[index]
        return self._before[index] + min(max(entry_id + 1, 0), self._entries[index])

    def at_rank(self, rank: int) -> Position:
        """Return the entry with `rank - 1` entries before it; for rank 0 the edge before the first ledger."""
        number = min(rank, self.total_entries) - 1
        if number < 0:
            return Position(self._ids[0], -1)
        index = bisect_right(self._before, number) - 1  # of several with this number the last one: the others are empty
        return Position(self._ids[index], number - self._before[index])

    def normalise(self, position: Position) -> Position:
        """Return the canonical name of this gap: the entry before it, or the edge before the first ledger."""
        return self.at_rank(self.rank(position))

    @property
    def first_position(self) -> Position:
        """The position just before the first entry."""
        return Position(self._ids[0], -1)

    @property
    def last_position(self) -> Position:
        """The last entry; if there is none, the edge before the first ledger."""
        return self.at_rank(self.total_entries)

    def next_position(self, position: Position) -> Position:
        """Return the entry after this gap; at the end the one that is written next."""
        rank = self.rank(position)
        if rank >= self.total_entries:
            return Position(self._ids[-1], self._entries[-1])
        return self.at_rank(rank + 1)

    def previous_position(self, position: Position) -> Position:
        """Return the gap before this entry."""
        return self.normalise(Position(position.ledger_id, position.entry_id - 1))

    def is_valid(self, position: Position) -> bool:
        """Whether there is an entry at this position."""
        entries = self.entries_of(position.ledger_id)
        return entries is not None and 0 <= position.entry_id < entries

    def count_between(self, after: Position, last: Position) -> int:
        """Return the number of entries in (after, last]; 0 if `last` lies before `after`."""
        return max(0, self.rank(last) - self.rank(after))
