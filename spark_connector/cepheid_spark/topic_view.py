"""The known history of one topic partition at one moment, for arithmetic: entries are numbered across its ledgers.

ledger   7: 0..4     9: 0..2     12: (open) 0..0
rank     1 .. 5      6 .. 8      9                       rank of a position: entries up to and including it
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from cepheid_decode import LedgerHistory, MessagePosition, TopicHistory
from cepheid_spark.offsets import EntryPosition

_GUESSED_ENTRY_BYTES = 1024.0  # if nothing is known yet


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TopicView:
    """A history.

    `_entry_bytes`: average per ledger. `_before`, `_bytes_before`: totals before each ledger, and at the end of all.
    """

    history: TopicHistory
    ledger_ids: Sequence[int]
    _entry_bytes: Sequence[float]
    _before: Sequence[int]
    _bytes_before: Sequence[float]

    @classmethod
    def of(cls, history: TopicHistory) -> TopicView:
        counts = [ledger.last_entry_id + 1 for ledger in history.ledgers]
        sized = [
            (count, ledger.size_bytes) for ledger, count in zip(history.ledgers, counts, strict=True) if count and ledger.size_bytes
        ]
        usual = sum(size for _, size in sized) / sum(count for count, _ in sized) if sized else _GUESSED_ENTRY_BYTES
        averages = [
            ledger.size_bytes / count if count and ledger.size_bytes else usual
            for ledger, count in zip(history.ledgers, counts, strict=True)
        ]
        totals = accumulate((count * average for count, average in zip(counts, averages, strict=True)), initial=0.0)
        return cls(history, [ledger.ledger_id for ledger in history.ledgers], averages, [0, *accumulate(counts)], list(totals))

    def __repr__(self) -> str:
        return f"<TopicView {self.topic}, {self.total_entries} entries in {len(self.ledger_ids)} ledgers>"

    @property
    def topic(self) -> str:
        return self.history.topic

    @property
    def total_entries(self) -> int:
        return self._before[-1]

    @property
    def earliest(self) -> MessagePosition | None:
        """The first message that exists or will exist; None: it has no ledger yet."""
        return MessagePosition(self.ledger_ids[0], 0) if self.ledger_ids else None

    def with_end(self, ledger_id: int, last_entry_id: int, size_bytes: int = 0) -> TopicView:
        """Return the view with a later end of the open ledger, the last one, and its size; 0: entries since the plan count as
        its average.
        """
        if not self.ledger_ids or self.ledger_ids[-1] != ledger_id:
            return self
        last = self.history.ledgers[-1]
        if not last.is_open or last_entry_id <= last.last_entry_id:
            return self
        entries = last_entry_id + 1
        size = max(float(size_bytes or entries * self._entry_bytes[-1]), self._bytes_before[-1] - self._bytes_before[-2])
        ledgers = (*self.history.ledgers[:-1], replace(last, last_entry_id=last_entry_id, size_bytes=round(size)))
        before = [*self._before[:-1], self._before[-2] + entries]
        bytes_before = [*self._bytes_before[:-1], self._bytes_before[-2] + size]
        entry_bytes = [*self._entry_bytes[:-1], size / entries]
        return TopicView(replace(self.history, ledgers=ledgers), self.ledger_ids, entry_bytes, before, bytes_before)

    def rank(self, position: EntryPosition) -> int:
        """Return the rank of a position.

        In a deleted ledger it is that of the entries before the next one. Limited to what is known.
        """
        index = bisect_left(self.ledger_ids, position.ledger_id)
        if index == len(self.ledger_ids) or self.ledger_ids[index] != position.ledger_id:
            return self._before[index]
        return min(self._before[index] + position.entry_id + 1, self._before[index + 1])

    def at_rank(self, rank: int) -> EntryPosition:
        """Return the entry of that rank, 1 ≤ rank ≤ total_entries."""
        assert 1 <= rank <= self.total_entries, f"rank {rank} of {self!r}"
        index = bisect_left(self._before, rank) - 1  # the last of several with as many before: others are empty
        return EntryPosition(self.ledger_ids[index], rank - self._before[index] - 1)

    def bytes_at(self, rank: int) -> float:
        """Return the stored bytes up to and including the entry of that rank; within a ledger by its average."""
        if rank <= 0:
            return 0.0
        index = bisect_left(self._before, rank) - 1
        return self._bytes_before[index] + (rank - self._before[index]) * self._entry_bytes[index]

    def rank_within(self, size_bytes: float) -> int:
        """Return the last rank with no more stored bytes up to it: the inverse of `bytes_at`."""
        index = bisect_right(self._bytes_before, size_bytes) - 1
        if index >= len(self.ledger_ids):
            return self.total_entries
        more = (size_bytes - self._bytes_before[index]) / self._entry_bytes[index]
        return min(self._before[index] + int(more + 1e-6), self._before[index + 1])  # sums of averages are not exact

    def ledger(self, ledger_id: int) -> LedgerHistory | None:
        index = bisect_left(self.ledger_ids, ledger_id)
        found = index < len(self.ledger_ids) and self.ledger_ids[index] == ledger_id
        return self.history.ledgers[index] if found else None
