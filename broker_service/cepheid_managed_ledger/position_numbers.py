"""A number for each of the positions that were asked for last, of all topics of a broker: ledger ids are unique among them."""

from __future__ import annotations

from collections import OrderedDict

from cepheid_metadata import Position


class PositionNumbers:
    """Some 300 bytes each."""

    def __init__(self, limit: int = 50_000) -> None:
        self._limit = limit
        self._known: OrderedDict[Position, int] = OrderedDict()  # the longest unused first

    def __repr__(self) -> str:
        return f"<PositionNumbers {len(self._known)} of {self._limit}>"

    def get(self, position: Position) -> int | None:
        number = self._known.get(position)
        if number is not None:
            self._known.move_to_end(position)
        return number

    def keep(self, position: Position, number: int) -> int:
        """The number again."""
        self._known[position] = number
        if len(self._known) > self._limit:
            self._known.popitem(last=False)
        return number
