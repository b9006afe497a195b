"""Which topics a stream reads: looked for at an interval, so that new partitions and new topics of a pattern are found.

    look ──► found: new ones are read from their first entry on · one missing: a second look ──► still missing: gone

One look may miss a topic that is there (metadata in the middle of a change), and what is gone ends the query or its position.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

LOOKS_BEFORE_GONE = 2


class Discovery:
    """`now` by a monotonic clock, in seconds."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._looked_at: float | None = None
        self._missing: dict[str, int] = {}  # looks in a row
        self.topics: tuple[str, ...] = ()

    def is_due(self, now: float) -> bool:
        """A look that missed a topic is repeated at once."""
        unsure = any(looks < LOOKS_BEFORE_GONE for looks in self._missing.values())
        return unsure or self._looked_at is None or now - self._looked_at >= self._interval_s

    def on_found(self, found: Sequence[str], read: Iterable[str], now: float) -> None:
        """`read`: topics that the stream has a position in."""
        self._looked_at = now
        there = frozenset(found)
        self._missing = {topic: self._missing.get(topic, 0) + 1 for topic in sorted(read) if topic not in there}
        self.topics = tuple(sorted(there))

    @property
    def gone(self) -> frozenset[str]:
        return frozenset(topic for topic, looks in self._missing.items() if looks >= LOOKS_BEFORE_GONE)
