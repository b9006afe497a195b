"""The lag of a stream, which Spark shows as `latestOffset` of the source in its progress.

The age of the oldest unread entry is found without reading it, if it arrived while this process watched: from when a later end
was first seen, or its ledger was closed. That is a lower bound, exact to a look or two. For an earlier entry the
publish time is read, once per topic and position. Otherwise the lag would start from zero with each process.
"""

from __future__ import annotations

import heapq
import logging
from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from cepheid_decode import HistoryPlan
from cepheid_ports import CepheidError
from cepheid_spark.offsets import EntryPosition, StreamOffset
from cepheid_spark.topic_view import TopicView

log = logging.getLogger(__name__)

_SIGHTINGS = 512  # ends kept per topic
_MOST_PROBES = 8  # entries that one report reads, of the topics with the most unread entries
_PROBE_PAUSE_MS = 60_000  # after a failure: an unavailable bookie must not delay each report

PublishTime: TypeAlias = Callable[[HistoryPlan, TopicView, EntryPosition], int | None]
"""Returns when that entry was published, in ms since 1970; None: it is deleted. Raises CepheidError."""


class Sightings:
    """Times when ends of topics were first seen: (end, wall-clock ms), rising; if there are many, every second one is dropped."""

    def __init__(self) -> None:
        self._ends: dict[str, list[EntryPosition]] = {}
        self._at_ms: dict[str, list[float]] = {}

    def on_end(self, topic: str, end: EntryPosition, now_ms: float) -> bool:
        """Record an end; return whether it is new."""
        ends, times = self._ends.setdefault(topic, []), self._at_ms.setdefault(topic, [])
        if ends and end <= ends[-1]:
            return False
        ends.append(end)
        times.append(now_ms)
        if len(ends) > _SIGHTINGS:
            self._ends[topic], self._at_ms[topic] = ends[1::2], times[1::2]  # later ones stay, so that the bound stays a lower one
        return True

    def first_beyond_ms(self, topic: str, position: EntryPosition) -> float | None:
        ends = self._ends.get(topic, [])
        index = bisect_right(ends, position)
        return self._at_ms[topic][index] if index < len(ends) else None

    def is_older(self, topic: str, position: EntryPosition) -> bool:
        """Return whether the first entry after `position` existed at the first look at its topic."""
        ends = self._ends.get(topic, [])
        return bool(ends) and position < ends[0]


class OldestUnread:
    """Publish times of first unread entries that are older than this process."""

    def __init__(self, publish_time_ms: PublishTime) -> None:
        self._publish_time_ms = publish_time_ms
        self._known: dict[str, tuple[EntryPosition, int | None]] = {}  # by topic: of which entry
        self._next_probe_at_ms = 0.0

    def times_ms(
        self, plan: HistoryPlan, views: Mapping[str, TopicView], read: StreamOffset | None, sightings: Sightings, now_ms: float
    ) -> dict[str, int]:
        """Return times by topic, as far as they are known or can be read now."""
        wanted: dict[str, tuple[int, EntryPosition]] = {}  # number of unread entries, and the first of them
        for topic, view in views.items():
            position = position_of(view, read)
            if position is None or not sightings.is_older(topic, position):
                continue
            rank = view.rank(position)
            if rank < view.total_entries:
                wanted[topic] = view.total_entries - rank, view.at_rank(rank + 1)
        self._known = {topic: known for topic, known in self._known.items() if topic in wanted and known[0] == wanted[topic][1]}
        unknown = [topic for topic in wanted if topic not in self._known]
        if now_ms >= self._next_probe_at_ms:
            for topic in heapq.nlargest(_MOST_PROBES, unknown, key=lambda topic: wanted[topic][0]):
                entry = wanted[topic][1]
                try:
                    self._known[topic] = entry, self._publish_time_ms(plan, views[topic], entry)
                except CepheidError as error:
                    log.info("stream.lag_not_known: %s", error, extra={"topic": topic})
                    self._next_probe_at_ms = now_ms + _PROBE_PAUSE_MS
                    break
        return {topic: at_ms for topic, (_, at_ms) in self._known.items() if at_ms is not None}


def position_of(view: TopicView, read: StreamOffset | None) -> EntryPosition | None:
    """Return the last entry that was read; before the first one, for a topic without a position. None: it has no ledger yet."""
    first = view.earliest
    if first is None:
        return None
    before = EntryPosition.before(first)
    return before if read is None else read.ends.get(view.topic, before)


def waiting_since_ms(view: TopicView, position: EntryPosition, sightings: Sightings, now_ms: float) -> float:
    """Return the latest time at which the first entry after `position` existed; `now_ms` if there is none."""
    rank = view.rank(position)
    if rank >= view.total_entries:
        return now_ms
    ledger = view.ledger(view.at_rank(rank + 1).ledger_id)
    closed_at_ms = ledger.closed_at_ms if ledger is not None else None
    seen_ms = sightings.first_beyond_ms(view.topic, position)
    return min(now_ms if closed_at_ms is None else float(closed_at_ms), now_ms if seen_ms is None else seen_ms)


def lag_report(
    views: Mapping[str, TopicView],
    read: StreamOffset | None,
    sightings: Sightings,
    *,
    lost_entries: int,
    now_ms: float,
    published_ms: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Return the report. `t`: the known ends. Topics without a position yet lag by everything they have.

    `published_ms`: publish times of first unread entries by topic, as far as known.
    """
    entries, size_bytes, since_ms = 0, 0.0, now_ms
    ends: dict[str, list[int]] = {}
    for topic in sorted(views):
        view = views[topic]
        first, position = view.earliest, position_of(view, read)
        if first is None or position is None:
            continue
        rank = view.rank(position)
        entries += view.total_entries - rank
        size_bytes += view.bytes_at(view.total_entries) - view.bytes_at(rank)
        since_ms = min(since_ms, waiting_since_ms(view, position, sightings, now_ms), (published_ms or {}).get(topic, now_ms))
        ends[topic] = list(view.at_rank(view.total_entries) if view.total_entries else EntryPosition.before(first))
    return {
        "lagBytes": int(size_bytes),
        "lagEntries": entries,
        "lagMs": max(0, int(now_ms - since_ms)),
        "lost": lost_entries,
        "t": ends,
    }
