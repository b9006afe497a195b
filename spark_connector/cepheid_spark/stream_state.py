"""The state of a stream's topics, updated in the background: Spark requests it 69 times a second while nothing happens.

    one thread: topics (each discovery interval) ──► plan (about each second) ──┐
    EndWatch:   LAC of the open ledgers, by long polls ─────────────────────────┴──► Snapshot ──► current(): from memory, at once

Rules
1. A snapshot never knows less of an open ledger than the previous one, unless the topic was created again.
2. The thread retries failures; only when they last for `retry_s`, the next request raises them.
3. A plan costs the broker work: the pause between two is twenty times the duration of one, and at least a second. While the topics
   move it is shorter, since bookies learn of the last entry before a pause of the writers late (`explicit_lac_interval_s`).
   A plan that waited for a broker to return took long, but cost nothing: the faster of the last two counts. The pause is bounded,
   since no new ledger is seen until it is over.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cepheid_decode import HistoryPlan, NoSuchTopicError, PlanUnavailableError, TopicHistory, TopicSelection
from cepheid_ports import CepheidError
from cepheid_spark.data_loss import SeenLedgers
from cepheid_spark.lag import Sightings
from cepheid_spark.topic_view import TopicView

if TYPE_CHECKING:
    from cepheid_scan.ledger_ends import EndWatch, LedgerEnd, LedgerKey
    from cepheid_scan.planner import Planner

log = logging.getLogger(__name__)

_LEAST_PAUSE_S, _LEAST_PAUSE_MOVING_S = 1.0, 0.25
_MOVING_S = 10.0  # after the last new entry was seen
_PAUSE_PER_PLAN = 20.0
_MOST_PAUSE_S = 30.0
_ATTEMPTS = 3  # of a plan whose topics vanish while it is created


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State of the topics. `number` grows with every change. `gone`: topics that the stream reads and that no longer exist."""

    number: int
    views: Mapping[str, TopicView]
    plan: HistoryPlan
    gone: frozenset[str] = frozenset()


class StreamState:
    def __init__(
        self,
        planner: Planner,
        watch: EndWatch,
        topics: TopicSelection,
        *,
        discovery_s: float,
        retry_s: float,
        schemas: bool = False,
    ) -> None:
        self._planner = planner
        self._watch = watch
        self._selection = topics
        self._discovery = Discovery(discovery_s)
        self._retry_s = retry_s
        self._schemas = schemas
        self._looking = threading.Lock()  # one look at a time
        self._swapping = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._snapshot: Snapshot | None = None
        self._ends: Mapping[LedgerKey, LedgerEnd] = {}
        self._read: frozenset[str] = frozenset()
        self._failing_since = 0.0  # meaningful with a failure
        self._failure: CepheidError | None = None
        self._moved_at = time.monotonic()
        self.seen = SeenLedgers()
        self.sightings = Sightings()

    def follow(self, topics: Iterable[str]) -> None:
        """Set the topics in which the stream has a position: they are reported if they are not found."""
        self._read = frozenset(topics)

    def current(self) -> Snapshot:
        """Return the snapshot, from memory except the first time. Raises what has kept failing for `retry_s` (rule 2)."""
        if self._snapshot is None:
            self.look()
        if self._failure is not None and time.monotonic() - self._failing_since >= self._retry_s:
            raise self._failure
        ends = self._watch.ends()
        if ends != self._ends:
            self._apply_ends(ends)
        assert self._snapshot is not None
        return self._snapshot

    def look(self, *, discover: bool = True, is_first: bool = False) -> Snapshot:
        """Return a new snapshot that contains everything acknowledged before the call.

        Raises PlanUnavailableError and, with `is_first`, NoSuchTopicError if the options make a missing topic an error.
        """
        with self._looking:
            selection = self._selection if is_first else replace(self._selection, fail_on_missing=False)
            for attempt in range(_ATTEMPTS):
                if discover or attempt or self._discovery.is_due(time.monotonic()):
                    self._discovery.on_found(self._planner.topics(selection), self._read, time.monotonic())
                topics = self._discovery.topics
                try:
                    plan = self._planner.plan(topics, schemas=self._schemas) if topics else HistoryPlan((), {})
                    break
                except NoSuchTopicError:  # deleted after it was found
                    if attempt == _ATTEMPTS - 1:
                        raise
            self._watch.update(plan)
            snapshot = self._swap(plan)
        self._start()
        return snapshot

    def gone_ledgers(self, history: TopicHistory, ids: range) -> Mapping[int, int] | None:
        """Return last entries of those of them with entries, according to records; None: unknown. Raises PlanUnavailableError."""
        with self._looking:  # planners handle one call at a time
            return self._planner.gone_ledgers(history.topic, history.incarnation, ids)

    def close(self) -> None:
        self._stopped.set()
        self._watch.close()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
        self._planner.close()

    def _swap(self, plan: HistoryPlan) -> Snapshot:
        with self._swapping:
            before = self._snapshot
            views: dict[str, TopicView] = {}
            for history in plan.topics:
                known = before.views.get(history.topic) if before is not None else None
                self.seen.on_view(known.history if known is not None else None, history)
                view = TopicView.of(history)
                is_same = known is not None and known.history.incarnation == history.incarnation
                if known is not None and is_same and known.ledger_ids:  # rule 1
                    last = known.history.ledgers[-1]
                    view = view.with_end(last.ledger_id, last.last_entry_id, last.size_bytes)
                views[history.topic] = self._sighted(view)
            for topic, known in before.views.items() if before is not None else ():
                if topic not in views:
                    self.seen.on_missing(known.history)
            number = 1 if before is None else before.number + 1
            self._snapshot = Snapshot(number, views, plan, self._discovery.gone)
            return self._snapshot

    def _apply_ends(self, ends: Mapping[LedgerKey, LedgerEnd]) -> None:
        with self._swapping:
            before = self._snapshot
            assert before is not None
            views = dict(before.views)
            for (topic, ledger_id), end in ends.items():
                if topic in views and self._ends.get((topic, ledger_id)) != end:
                    views[topic] = self._sighted(views[topic].with_end(ledger_id, end.last_entry_id, end.size_bytes))
            self._ends = dict(ends)
            self._snapshot = replace(before, number=before.number + 1, views=views)

    def _sighted(self, view: TopicView) -> TopicView:
        if view.total_entries and self.sightings.on_end(view.topic, view.at_rank(view.total_entries), time.time() * 1000):
            self._moved_at = time.monotonic()
        return view

    def _start(self) -> None:
        if self._thread is None and not self._stopped.is_set():
            self._thread = threading.Thread(target=self._run, name="cepheid-stream-state", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        pause_s = _LEAST_PAUSE_S
        took_s: float | None = None
        while not self._stopped.wait(pause_s):
            began = time.monotonic()
            try:
                self.look(discover=False)
            except Exception as error:
                pause_s = _LEAST_PAUSE_S
                failure = error if isinstance(error, CepheidError) else None
                if failure is None:  # a defect must not look like topics in which nothing happens
                    log.exception("stream.look_failed")
                    failure = PlanUnavailableError(f"the look at the topics failed: {error!r}")
                self._on_failure(failure, began)
                continue
            self._failure = None
            now = time.monotonic()
            before_s, took_s = took_s, now - began
            pause_s = pause_after(took_s, before_s, is_moving=now - self._moved_at < _MOVING_S)

    def _on_failure(self, error: CepheidError, began: float) -> None:
        if self._failure is None:
            log.warning("stream.plan_failed: %s", error)
            self._failing_since = began
        self._failure = error


def pause_after(took_s: float, before_s: float | None, *, is_moving: bool) -> float:
    """Return the pause of rule 3. `before_s`: the duration of the previous plan."""
    usual_s = took_s if before_s is None else min(took_s, before_s)
    least_s = _LEAST_PAUSE_MOVING_S if is_moving else _LEAST_PAUSE_S
    return min(_MOST_PAUSE_S, max(least_s, _PAUSE_PER_PLAN * usual_s))


LOOKS_BEFORE_GONE = 2


class Discovery:
    """Finds the topics of a stream at an interval: new ones are read from their first entry on.

    One look may miss an existing topic (metadata in the middle of a change), and a deleted topic ends the query or its position:
    so it counts as deleted only after a second look. `now`: monotonic clock in seconds.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._looked_at: float | None = None
        self._missing: dict[str, int] = {}  # consecutive looks that missed it
        self.topics: tuple[str, ...] = ()

    def is_due(self, now: float) -> bool:
        """Return whether to look now. A look that missed a topic is repeated at once."""
        unsure = any(looks < LOOKS_BEFORE_GONE for looks in self._missing.values())
        return unsure or self._looked_at is None or now - self._looked_at >= self._interval_s

    def on_found(self, found: Sequence[str], read: Iterable[str], now: float) -> None:
        """Record a look. `read`: topics in which the stream has a position."""
        self._looked_at = now
        there = frozenset(found)
        self._missing = {topic: self._missing.get(topic, 0) + 1 for topic in sorted(read) if topic not in there}
        self.topics = tuple(sorted(there))

    @property
    def gone(self) -> frozenset[str]:
        return frozenset(topic for topic, looks in self._missing.items() if looks >= LOOKS_BEFORE_GONE)
