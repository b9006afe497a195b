"""A number for each recently used position, over all topics of a broker: ledger ids are unique among them."""

from __future__ import annotations

from collections import OrderedDict

from cepheid_metadata import Position


class PositionNumbers:
    """A cache of one number per position, about 300 bytes each."""

    def __init__(self, limit: int = 50_000) -> None:
        self._limit = limit
        self._known: OrderedDict[Position, int] = OrderedDict()  # least recently used first

    def __repr__(self) -> str:
        return f"<PositionNumbers {len(self._known)} of {self._limit}>"

    def get(self, position: Position) -> int | None:
        number = self._known.get(position)
        if number is not None:
            self._known.move_to_end(position)
        return number

    def keep(self, position: Position, number: int) -> int:
        """Keep the number, and return it."""
        self._known[position] = number
        if len(self._known) > self._limit:
            self._known.popitem(last=False)
        return number
