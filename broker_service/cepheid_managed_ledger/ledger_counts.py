"""The messages and bytes of each entry of one ledger, stored compactly, for a run of entries up to the newest known.

    entries   0 .. 99        100 .................... 249         sizes     one uint32 an entry
              not known      first                    end         messages  one uint32 an entry, only if one is a batch
                             │ 128 │ 128 │ 128 │ …                sums before each block: any range is summed in microseconds

It grows at its end when entries are appended, and at its start when entries are read back.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_BLOCK = 128


class Amount(NamedTuple):
    """Totals of some entries: their number, the messages in them, the bytes of their payloads."""

    entries: int = 0
    messages: int = 0
    size_bytes: int = 0

    def plus(self, other: Amount) -> Amount:
        return Amount(self.entries + other.entries, self.messages + other.messages, self.size_bytes + other.size_bytes)

    def minus(self, other: Amount) -> Amount:
        return Amount(self.entries - other.entries, self.messages - other.messages, self.size_bytes - other.size_bytes)


class LedgerCounts:
    __slots__ = ("_messages", "_sizes", "first")

    def __init__(self, first: int = 0) -> None:
        self.first = first
        self._sizes = _Column()
        self._messages: _Column | None = None  # None: one message in each entry

    def __repr__(self) -> str:
        return f"<LedgerCounts of entries {self.first}..{self.end - 1}, {'batches' if self._messages else 'single messages'}>"

    @property
    def end(self) -> int:
        """The id of the entry after the last known one."""
        return self.first + len(self._sizes.values)

    @property
    def cost_bytes(self) -> int:
        return 4 * len(self._sizes.values) * (1 if self._messages is None else 2)

    def append(self, sizes: Iterable[int], messages: Sequence[int] | None) -> None:
        """Add the next entries. `messages` None: one in each."""
        count = len(self._sizes.values)
        self._sizes.extend(sizes)
        if messages is not None and self._messages is None:
            self._messages = _Column(array("I", [1]) * count)
        if self._messages is not None:
            self._messages.extend([1] * (len(self._sizes.values) - count) if messages is None else messages)

    def prepend(self, before: LedgerCounts) -> None:
        """Add what was read of the entries before."""
        assert before.end == self.first, f"{before!r} does not end where {self!r} starts"
        whole = LedgerCounts(before.first)
        for part in (before, self):
            whole.append(part._sizes.values, None if part._messages is None else part._messages.values)
        self.first, self._sizes, self._messages = whole.first, whole._sizes, whole._messages

    def between(self, start: int, end: int) -> Amount:
        """Return the totals of the entries from `start` up to, but without, `end`; all of them must be known."""
        assert self.first <= start <= end <= self.end, f"{start}..{end} are not all in {self!r}"
        start, end = start - self.first, end - self.first
        size_bytes = self._sizes.before(end) - self._sizes.before(start)
        messages = end - start if self._messages is None else self._messages.before(end) - self._messages.before(start)
        return Amount(end - start, messages, size_bytes)

    def of(self, entries: Sequence[int]) -> Amount:
        """Return the totals of some entries; all of them must be known."""
        indexes = entries if self.first == 0 else [entry - self.first for entry in entries]
        messages = len(entries) if self._messages is None else sum(map(self._messages.values.__getitem__, indexes))
        return Amount(len(entries), messages, sum(map(self._sizes.values.__getitem__, indexes)))

    def messages_of(self, entry_id: int) -> int:
        return 1 if self._messages is None else self._messages.values[entry_id - self.first]


class _Column:
    """Numbers, with the sum of those before each block."""

    __slots__ = ("_sums", "values")

    def __init__(self, values: array[int] | None = None) -> None:
        self.values: array[int] = array("I")
        self._sums = array("Q", [0])
        if values is not None:
            self.extend(values)

    def extend(self, values: Iterable[int]) -> None:
        self.values.extend(values)
        while len(self._sums) * _BLOCK <= len(self.values):
            start = (len(self._sums) - 1) * _BLOCK
            self._sums.append(self._sums[-1] + sum(self.values[start : start + _BLOCK]))

    def before(self, index: int) -> int:
        """Return the sum of the first `index` numbers."""
        block = index // _BLOCK
        return self._sums[block] + sum(self.values[block * _BLOCK : index])
