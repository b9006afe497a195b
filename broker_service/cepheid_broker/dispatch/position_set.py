"""A set of positions, by ledger: the entries a subscription has to send again. Ordered, and small for dense runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pyroaring import BitMap

from cepheid_broker.dispatch.effects import AckView
from cepheid_metadata import Position

_END = 1 << 32


class PositionSet:
    """A set of positions with entry ids from 0 to 2^32 - 1 (one ledger holds far fewer)."""

    __slots__ = ("_ledgers",)

    def __init__(self, positions: Iterable[tuple[int, int]] = ()) -> None:
        self._ledgers: dict[int, BitMap] = {}
        for ledger_id, entry_id in positions:
            self.add(ledger_id, entry_id)

    def __repr__(self) -> str:
        return f"<PositionSet of {len(self)}>"

    def __bool__(self) -> bool:
        return bool(self._ledgers)

    def __len__(self) -> int:
        return sum(map(len, self._ledgers.values()))

    def __iter__(self) -> Iterator[Position]:
        for ledger_id in sorted(self._ledgers):
            for entry_id in self._ledgers[ledger_id]:
                yield Position(ledger_id, entry_id)

    def __contains__(self, position: tuple[int, int]) -> bool:
        ledger_id, entry_id = position
        return ledger_id in self._ledgers and entry_id in self._ledgers[ledger_id]

    def add(self, ledger_id: int, entry_id: int) -> None:
        self._of(ledger_id).add(entry_id)

    def add_all(self, ledger_id: int, entry_ids: Iterable[int]) -> None:
        entries = self._of(ledger_id)
        entries.update(entry_ids)
        if not entries:
            del self._ledgers[ledger_id]

    def discard(self, ledger_id: int, entry_id: int) -> None:
        """Remove the position; clients may name any."""
        entries = self._ledgers.get(ledger_id)
        if entries is not None and 0 <= entry_id < _END:
            entries.discard(entry_id)
            if not entries:
                del self._ledgers[ledger_id]

    def discard_range(self, ledger_id: int, first: int, last: int) -> None:
        entries = self._ledgers.get(ledger_id)
        if entries is not None:
            entries.remove_range(first, last + 1)
            if not entries:
                del self._ledgers[ledger_id]

    def keep_only(self, ledger_id: int, first: int, last: int, runs: Iterable[tuple[int, int]]) -> bool:
        """Discard members in `first..last` outside of the runs. Return whether there were any."""
        entries = self._ledgers.get(ledger_id)
        if entries is None:
            return False
        discarded = entries & BitMap(range(first, last + 1))
        for run_first, run_last in runs:
            discarded.remove_range(run_first, run_last + 1)
        entries -= discarded
        if not entries:
            del self._ledgers[ledger_id]
        return bool(discarded)

    def forget_acknowledged(self, acks: AckView) -> None:
        for ledger_id, entries in list(self._ledgers.items()):
            first, last = entries.min(), entries.max()
            self.keep_only(ledger_id, first, last, acks.unacknowledged_runs(ledger_id, first, last))

    def clear(self) -> None:
        self._ledgers.clear()

    def first(self) -> Position | None:
        if not self._ledgers:
            return None
        ledger_id = min(self._ledgers)
        return Position(ledger_id, self._ledgers[ledger_id].min())

    def first_span(self, max_entries: int, max_gap: int) -> tuple[int, int, int] | None:
        """Return (ledger, first, last) from the first position on, while neighbours are at most `max_gap` apart.

        One read of it fetches few unneeded entries.
        """
        position = self.first()
        if position is None:
            return None
        first = last = position.entry_id
        entries = self._ledgers[position.ledger_id]
        for entry_id in entries[1:max_entries]:
            if entry_id - last > max_gap or entry_id - first >= max_entries:
                break
            last = entry_id
        return position.ledger_id, first, last

    def runs(self, ledger_id: int, first: int, last: int) -> list[tuple[int, int]]:
        """Return the members in `first..last` (inclusive) of a ledger, as runs."""
        entries = self._ledgers.get(ledger_id)
        if entries is None:
            return []
        return _runs(entries & BitMap(range(first, last + 1)))

    def _of(self, ledger_id: int) -> BitMap:
        entries = self._ledgers.get(ledger_id)
        if entries is None:
            entries = self._ledgers[ledger_id] = BitMap()
        return entries


def acknowledged_of(acks: AckView, ledger_id: int, entry_ids: Iterable[int]) -> list[int]:
    """Return which of these entries of a ledger are acknowledged, at a cost for their number, not for their distance."""
    found: list[int] = []
    for first, last in _runs(sorted(entry_ids)):
        start = first
        for run_first, run_last in acks.unacknowledged_runs(ledger_id, first, last):
            found += range(start, run_first)
            start = run_last + 1
        found += range(start, last + 1)
    return found


def _runs(members: Iterable[int]) -> list[tuple[int, int]]:
    """Return the runs of sorted `members`."""
    runs: list[tuple[int, int]] = []
    run_first = previous = -2
    for member in members:
        if member != previous + 1:
            if previous >= 0:
                runs.append((run_first, previous))
            run_first = member
        previous = member
    if previous >= 0:
        runs.append((run_first, previous))
    return runs
