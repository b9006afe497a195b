"""How far a stream is behind: what Spark shows as `latestOffset` of the source in its progress.

How long the oldest unread entry waits is told without reading it: by when its ledger was closed (it is older than that), else by
when this process first saw an end behind it. So `lagMs` is a lower bound, exact to a look or two while the query runs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

from cepheid_spark.offsets import EntryPosition, StreamOffset
from cepheid_spark.topic_view import TopicView

_SIGHTINGS = 512  # of ends, per topic


class Sightings:
    """When ends of topics were first seen: (end, wall-clock ms), rising; of many every second one is forgotten."""

    def __init__(self) -> None:
        self._ends: dict[str, list[EntryPosition]] = {}
        self._at_ms: dict[str, list[float]] = {}

    def on_end(self, topic: str, end: EntryPosition, now_ms: float) -> bool:
        """Whether it is a new one."""
        ends, times = self._ends.setdefault(topic, []), self._at_ms.setdefault(topic, [])
        if ends and end <= ends[-1]:
            return False
        ends.append(end)
        times.append(now_ms)
        if len(ends) > _SIGHTINGS:
            self._ends[topic], self._at_ms[topic] = ends[1::2], times[1::2]  # later ones stay: a bound stays a lower one
        return True

    def first_beyond_ms(self, topic: str, position: EntryPosition) -> float | None:
        ends = self._ends.get(topic, [])
        index = bisect_right(ends, position)
        return self._at_ms[topic][index] if index < len(ends) else None


def waiting_since_ms(view: TopicView, position: EntryPosition, sightings: Sightings, now_ms: float) -> float:
    """When the first entry behind `position` was there at the latest; `now_ms` if there is none."""
    rank = view.rank(position)
    if rank >= view.total_entries:
        return now_ms
    ledger = view.ledger(view.at_rank(rank + 1).ledger_id)
    closed_at_ms = ledger.closed_at_ms if ledger is not None else None
    seen_ms = sightings.first_beyond_ms(view.topic, position)
    return min(now_ms if closed_at_ms is None else float(closed_at_ms), now_ms if seen_ms is None else seen_ms)


def lag_report(
    views: Mapping[str, TopicView], read: StreamOffset | None, sightings: Sightings, *, lost_entries: int, now_ms: float
) -> dict[str, Any]:
    """`t`: the ends as they are known. Topics without a position yet are behind by all they have."""
    entries, size_bytes, since_ms = 0, 0.0, now_ms
    ends: dict[str, list[int]] = {}
    for topic in sorted(views):
        view = views[topic]
        first = view.earliest
        if first is None:
            continue
        position = read.ends.get(topic, EntryPosition.before(first)) if read is not None else EntryPosition.before(first)
        rank = view.rank(position)
        entries += view.total_entries - rank
        size_bytes += view.bytes_at(view.total_entries) - view.bytes_at(rank)
        since_ms = min(since_ms, waiting_since_ms(view, position, sightings, now_ms))
        ends[topic] = list(view.at_rank(view.total_entries) if view.total_entries else EntryPosition.before(first))
    return {
        "lagBytes": int(size_bytes),
        "lagEntries": entries,
        "lagMs": max(0, int(now_ms - since_ms)),
        "lost": lost_entries,
        "t": ends,
    }
