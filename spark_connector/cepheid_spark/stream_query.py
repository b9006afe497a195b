"""The logic of a streaming query on the driver: where it begins, what a micro-batch takes, in which tasks.

    initial ──► lease at the start ──► [ latest: how much ──► plan: tasks ──► Spark reads ──► commit: lease moves ] …

Rules
1. If nothing is new, the end is the start itself. It is never before the start, whatever a look at metadata shows.
2. Repeated calls of Spark return the same: the first offset within a process, the tasks of a batch from its offsets.
3. A loss is accepted as such if a new look shows it, too, and records of deleted ledgers do not refute it; then it is
   an error, or skipped and counted (failOnDataLoss).
4. A position is valid in one incarnation of its topic. In another one nothing is ranked, read or released by it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from cepheid_decode import LATEST, BadOptionError, HistoryPlan, MessagePosition, ReadMode, ScanSpec, ScanTask, SchemaVersion
from cepheid_scan.admin_http import AdminHttp
from cepheid_scan.entry_probe import BookieProbe
from cepheid_scan.ledger_ends import EndWatch
from cepheid_scan.open_planner import open_planner
from cepheid_scan.plan_scan import plan_ranges
from cepheid_spark.admission import NO_LIMITS, Backlog, Limits, Patience, admit
from cepheid_spark.data_loss import Loss, find_loss, is_another, settled
from cepheid_spark.lag import OldestUnread, PublishTime, lag_report, waiting_since_ms
from cepheid_spark.lease import Lease, new_lease_name
from cepheid_spark.lease_holder import Holder, wall_ms
from cepheid_spark.lease_keeper import LeaseKeeper
from cepheid_spark.offsets import EntryPosition, StreamOffset
from cepheid_spark.options import SourceOptions
from cepheid_spark.stream_state import LOOKS_BEFORE_GONE, Snapshot, StreamState
from cepheid_spark.topic_view import TopicView

if TYPE_CHECKING:
    from cepheid_scan.splits import TopicRange

log = logging.getLogger(__name__)


class StreamQuery:
    """A streaming query. `resolve_start`: returns where the options begin, given a snapshot. `schemas`: of typed rows, as found by
    load(), whose columns stay. `publish_time_ms`: reads one entry, for the lag.
    """

    def __init__(
        self,
        options: SourceOptions,
        state: StreamState,
        admin: AdminHttp | None,
        resolve_start: Callable[[Snapshot], dict[str, MessagePosition]],
        schemas: tuple[SchemaVersion, ...] = (),
        publish_time_ms: PublishTime = lambda plan, view, entry: None,
    ) -> None:
        if options.has_lease and admin is None:
            raise BadOptionError(
                "a stream retains what it has still to read by a subscription, and only a broker can move it: give service.url or "
                "admin.url, or subscription=none, with which only retention keeps it",
                option="subscription",
            )
        self._options = options
        self._state = state
        self._admin = admin
        self._resolve_start = resolve_start
        self._schemas = schemas
        self._limits = Limits(
            options.max_bytes_per_trigger,
            options.max_entries_per_trigger,
            options.min_bytes_per_trigger,
            options.max_trigger_delay_s,
        )
        self._patience = Patience(self._limits, time.monotonic())
        self._bounds = {topic: EntryPosition.before(end) for topic, end in options.end.positions}  # ends of the options
        self._targets: Mapping[str, EntryPosition] | None = None  # for AvailableNow
        self._initial: StreamOffset | None = None
        self._holder = Holder.this_process(wall_ms())
        self._keeper: LeaseKeeper | None = None
        self._newly_held: set[str] = set()  # topics without a position yet, as of a look since the lease has held them
        self._is_adopted = False  # whether an offset has named the lease, or agreed with it
        self._idle: tuple[int, StreamOffset] | None = None  # the snapshot in which nothing was new after it
        self._last: StreamOffset | None = None  # the last end that was returned
        self._batches = 0
        self._turns: dict[str, int] = {}  # by topic, the number of the last batch that took some of it
        self._waiting: tuple[int, StreamOffset, float] | None = None  # like `_idle`, but something is there: not enough
        self._oldest = OldestUnread(publish_time_ms)
        self._lag: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._accepted: dict[str, tuple[EntryPosition, str | None]] = {}  # with their incarnations; entries after these are lost
        self.lost_entries = 0

    # The start

    def initial(self) -> StreamOffset:
        if self._initial is None:
            snapshot = self._state.look(is_first=True)
            starts = self._resolve_start(snapshot)
            name = self._options.subscription or new_lease_name()
            if self._options.has_lease:
                self._keeper = self._new_keeper(name)
                self._keeper.hold({topic: _held_from(first) for topic, first in starts.items()}, takes=False)
                if self._options.start.subscription is not None:  # until now its consumers released entries
                    snapshot = self._state.look(is_first=True)
                    starts = self._resolve_start(snapshot)
            self._state.follow(starts)
            incarnations = {topic: snapshot.views[topic].history.incarnation for topic in starts}
            since_ms = self._options.start.publish_time_ms
            self._initial = StreamOffset.initial(starts, name if self._options.has_lease else None, incarnations, since_ms)
            log.info("stream.begins", extra={"topics": len(starts), "subscription": self._initial.subscription})
        return self._initial

    def prepare_available_now(self) -> None:
        """Make the current ends the target of this run."""
        views = self._state.look().views
        self._targets = {topic: view.at_rank(view.total_entries) for topic, view in views.items() if view.total_entries}

    # The content of a micro-batch

    def latest(self, start: StreamOffset, *, is_limited: bool) -> StreamOffset:
        """Return the end of the next batch; `start` itself if there is none."""
        self._adopt(start)
        if self._keeper is not None:
            self._keeper.check()
        snapshot = self._state.current()
        if self._idle == (snapshot.number, start) or self._is_waiting(snapshot, start):
            return start
        snapshot = self._since_held(self._sure_of_missing(snapshot, start), start)
        gone = self._gone(snapshot, start)
        positions = self._positions(snapshot, start)
        backlogs = [self._backlog(snapshot.views[topic], position) for topic, position in positions.items()]
        if not gone and not any(backlog.entries for backlog in backlogs):
            self._idle = (snapshot.number, start)
            self._last = start
            return start
        limits = self._limits if is_limited else NO_LIMITS
        waits = is_limited and self._targets is None and not gone
        self._waiting = (snapshot.number, start, sum(backlog.size_bytes for backlog in backlogs)) if waits else None
        if self._is_waiting(snapshot, start):
            return start
        taken = admit(backlogs, limits)
        if not taken and not gone:
            return start
        self._check_schemas(taken)
        self._patience.on_batch(time.monotonic())
        self._batches += 1
        self._turns.update(dict.fromkeys(taken, self._batches))
        self._last = self._end_of(snapshot, start, positions, taken, gone)
        return self._last

    def _check_schemas(self, topics: Iterable[str]) -> None:
        """Raise BadOptionError before an offset names a topic that cannot be shown, which would then fail every restart.

        Looks now: a message's schema version may be newer than the snapshot, and those of the snapshot may be deleted.
        """
        if self._options.spec.mode is not ReadMode.TYPED or not self._schemas:
            return
        from cepheid_decode.shared_schema import check_shown, histories_of
        from cepheid_decode.typed.typed_columns import shown_schema

        shown, now = shown_schema(self._schemas, self._options.spec.reader_version), self._state.look()
        check_shown(shown, histories_of(now.plan, [topic for topic in topics if topic in now.views]))

    def _is_waiting(self, snapshot: Snapshot, start: StreamOffset) -> bool:
        if self._waiting is None or self._waiting[:2] != (snapshot.number, start):
            return False
        return not self._patience.is_due(self._waiting[2], time.monotonic())

    def _sure_of_missing(self, snapshot: Snapshot, start: StreamOffset) -> Snapshot:
        """Confirm missing topics: a run of AvailableNow would end before background looks have missed a topic often enough."""
        looks = 0
        while self._targets is not None and looks < LOOKS_BEFORE_GONE and start.ends.keys() - snapshot.views.keys() - snapshot.gone:
            snapshot, looks = self._state.look(), looks + 1
        return snapshot

    def _since_held(self, snapshot: Snapshot, start: StreamOffset) -> Snapshot:
        """Return the snapshot in which a new topic begins where it did when the lease already held it:

        earlier deletions do not matter.
        """
        if self._keeper is None:
            return snapshot
        held = {topic for topic in snapshot.views if topic not in start.ends and self._keeper.covers(topic)}
        looked_at, self._newly_held = self._newly_held, held
        return snapshot if held <= looked_at else self._state.look()

    def _positions(self, snapshot: Snapshot, start: StreamOffset) -> dict[str, EntryPosition]:
        """Return where to continue in every topic that can be read now. Raises DataLossError."""
        positions: dict[str, EntryPosition] = {}
        look = cache(self._state.look)  # one for all topics: a broker that restarts may delete the ledgers of many
        for topic, view in snapshot.views.items():
            if topic in start.ends:
                positions[topic] = self._kept(view, start, look)
                if self._keeper is not None and not self._keeper.covers(topic):  # it was not found when the lease was taken
                    self._keeper.want(topic, _held_from(positions[topic].next), must_exist=True)
            elif view.earliest is not None and self._is_held(topic, view.earliest):
                positions[topic] = EntryPosition.before(view.earliest)
        return positions

    def _kept(self, view: TopicView, start: StreamOffset, look: Callable[[], Snapshot]) -> EntryPosition:
        """Return the position of `start`, or the one after an accepted loss. Raises DataLossError (rule 3)."""
        position, incarnation = start.ends[view.topic], start.incarnations.get(view.topic)
        is_start = start.is_start(view.topic)
        loss = self._loss(view, position, incarnation, is_start)
        if loss is not None and self._accepted.get(view.topic) != (position, incarnation):
            now = self._sure_loss(look().views.get(view.topic, view), position, incarnation, is_start)
            self._believe(now, is_counted=False)
            if now is None:
                loss = None
            else:
                self._accepted[view.topic] = position, incarnation  # the batch belongs to this snapshot
        if loss is None:
            return self._state.seen.settled(view, position)  # if a batch is repeated, no process may have seen the deletions
        return position if loss.first_kept is None else EntryPosition(loss.first_kept, -1)

    def _is_held(self, topic: str, first: MessagePosition) -> bool:
        """Return whether a topic that is new to the stream is held; if not, request it."""
        if self._keeper is None or self._keeper.covers(topic):
            return True
        if self._targets is not None:
            self._keeper.hold({topic: first})
            return self._keeper.covers(topic)
        self._keeper.want(topic, first)
        return False

    def _backlog(self, view: TopicView, position: EntryPosition) -> Backlog:
        rank, last = view.rank(position), view.total_entries
        if self._targets is not None:
            target = self._targets.get(view.topic)
            last = view.rank(target) if target is not None else 0
        if view.topic in self._bounds:
            last = min(last, view.rank(self._bounds[view.topic]))
        if last <= rank:
            return Backlog(view, rank, rank)
        since_ms = waiting_since_ms(view, position, self._state.sightings, time.time() * 1000)
        return Backlog(view, rank, last, since_ms, self._turns.get(view.topic, 0))

    def _end_of(
        self,
        snapshot: Snapshot,
        start: StreamOffset,
        positions: Mapping[str, EntryPosition],
        taken: Mapping[str, int],
        gone: frozenset[str],
    ) -> StreamOffset:
        ends: dict[str, EntryPosition] = {}
        entry_bytes: dict[str, float] = {}
        total_bytes = 0.0
        for topic, entries in taken.items():
            view = snapshot.views[topic]
            rank = view.rank(positions[topic])
            ends[topic] = view.at_rank(rank + entries)
            size_bytes = view.bytes_at(rank + entries) - view.bytes_at(rank)
            entry_bytes[topic] = max(1.0, size_bytes / entries)
            total_bytes += size_bytes
        task_bytes, min_tasks = float(self._options.target_task_bytes), self._options.min_tasks
        task_bytes = task_bytes if min_tasks == 1 else min(task_bytes, math.ceil(total_bytes / min_tasks))
        cut = _fitting({topic: max(1, int(task_bytes / size)) for topic, size in entry_bytes.items()}, taken)
        gone_on_with = {topic for topic in positions if _goes_on(snapshot.views[topic], start, positions[topic])}
        found = {topic: positions[topic].next for topic in taken if topic not in gone_on_with}
        behind_losses = found.keys() & start.ends.keys()
        for topic in sorted(behind_losses):
            incarnation, is_start = start.incarnations.get(topic), start.is_start(topic)
            loss = self._sure_loss(snapshot.views[topic], start.ends[topic], incarnation, is_start)
            self._believe(loss, is_counted=True)
        self._state.follow([*start.ends, *ends])
        name = self._keeper.name if self._keeper is not None else None
        if self._keeper is not None:
            self._keeper.forget(gone | behind_losses)  # requested again where the stream continues
        there = {topic: snapshot.views[topic].history.incarnation for topic in gone_on_with.union(taken)}
        incarnations = {topic: incarnation for topic, incarnation in there.items() if incarnation}
        further_on = {topic: start.starts[topic] for topic in gone_on_with if _starts_further_on(snapshot.views[topic], start)}
        end = start.moved_to(ends, cut=cut, found={**found, **further_on}, incarnations=incarnations, gone=gone)
        return replace(end, subscription=name)

    # Tasks

    def plan(self, start: StreamOffset, end: StreamOffset) -> list[ScanTask]:
        from cepheid_scan.splits import cut_ranges

        self._adopt(end, start)
        snapshot = self._state.current()
        # A message's schema version may be newer than the last look. `latest` has looked for the end that it returned.
        needs_schemas = self._options.spec.mode is ReadMode.TYPED and end != self._last
        if needs_schemas or any(self._is_unknown(snapshot, topic, last) for topic, last in end.ends.items()):
            snapshot = self._state.look()
        ranges: list[TopicRange] = []
        for topic in sorted(end.ends):
            first = end.first_message(topic, start)
            if end.ends[topic].next <= first:
                continue
            found = self._range_of(snapshot, topic, first, end)
            if found is not None:
                ranges.append(found)
        return cut_ranges(
            ranges,
            snapshot.plan,
            target_bytes=self._options.target_task_bytes,
            entries_per_task=end.cut,
            look_back=self._options.spec.settings.chunk_lookback,
        )

    def _range_of(self, snapshot: Snapshot, topic: str, first: MessagePosition, end: StreamOffset) -> TopicRange | None:
        from cepheid_scan.splits import TopicRange

        position, last, incarnation = EntryPosition.before(first), end.ends[topic], end.incarnations.get(topic)
        is_start = topic in end.starts
        view = snapshot.views.get(topic) or self._state.look().views.get(topic)
        if view is None:
            self._believe(Loss(topic, position, None, "the topic was deleted"), is_counted=True)
            return None
        loss = self._loss(view, position, incarnation, is_start)
        if loss is not None:
            view = self._state.look().views.get(topic, view)  # rule 3
            loss = self._sure_loss(view, position, incarnation, is_start)
            self._believe(loss, is_counted=True)
        if is_another(view, incarnation):
            return None  # rule 4
        view = view.with_end(last.ledger_id, last.entry_id)
        if loss is None and not _reaches(view, last):
            view = self._state.look().views.get(topic, view).with_end(last.ledger_id, last.entry_id)
            if not _reaches(view, last):  # fewer rows than the offsets promise must not look like a batch
                what = f"its history ends before {last.ledger_id}:{last.entry_id}, where the batch does"
                self._believe(Loss(topic, position, None, what), is_counted=True)
        if loss is not None:
            if loss.first_kept is None or not position.ledger_id <= loss.first_kept <= last.ledger_id:
                return None  # the rest belongs to the next batches
            first = MessagePosition(loss.first_kept, 0)
        return TopicRange(view.history, first, last.next)

    def _is_unknown(self, snapshot: Snapshot, topic: str, last: EntryPosition) -> bool:
        view = snapshot.views.get(topic)
        return view is None or not view.ledger_ids or view.ledger_ids[-1] < last.ledger_id

    def spec(self, end: StreamOffset, columns: tuple[str, ...], tasks: Sequence[ScanTask]) -> ScanSpec:
        """Return the spec for the tasks of a batch that ends there. The publish time of the query's start is exact in the rows; the
        current options may have another start (rule 2).
        """
        spec = self._options.reading(columns, self._schemas).spec
        if spec.mode is ReadMode.TYPED:
            from cepheid_scan.plan_scan import with_schemas

            spec = with_schemas(spec, self._state.current().plan, tasks)
        return replace(spec, row_filter=replace(spec.row_filter, publish_from_ms=end.since_ms))

    # Release

    def commit(self, end: StreamOffset) -> None:
        """Release what was read except one entry, so that the ledger of the position stays (rule 1 of lease.py)."""
        if self._keeper is None:
            return
        back = max(1, self._options.spec.settings.chunk_lookback)
        views = self._state.current().views
        firsts: dict[str, MessagePosition] = {}
        for topic, last in end.ends.items():
            view = views.get(topic)
            if view is None or is_another(view, end.incarnations.get(topic)):
                continue  # rule 4
            rank = view.rank(last) - back + 1
            if 1 <= rank <= view.total_entries:
                place = view.at_rank(rank)
                firsts[topic] = MessagePosition(place.ledger_id, place.entry_id)
        self._keeper.move(firsts)

    def lag(self) -> dict[str, Any]:
        """Return the lag, computed once per snapshot: Spark requests it at every look."""
        snapshot, read = self._state.current(), self._last or self._initial
        key = (snapshot.number, read, self.lost_entries)
        if self._lag is None or self._lag[0] != key:
            now_ms = time.time() * 1000
            sightings = self._state.sightings
            published_ms = self._oldest.times_ms(snapshot.plan, snapshot.views, read, sightings, now_ms)
            report = lag_report(
                snapshot.views, read, sightings, lost_entries=self.lost_entries, now_ms=now_ms, published_ms=published_ms
            )
            self._lag = key, report
        return self._lag[1]

    def close(self) -> None:
        """Close connections and threads; the lease stays."""
        if self._keeper is not None:
            self._keeper.close()
        if self._admin is not None:
            self._admin.close()
        self._state.close()

    # Lease and loss

    def _new_keeper(self, name: str) -> LeaseKeeper:
        assert self._admin is not None
        return LeaseKeeper(Lease(self._admin, name, self._options.lease_ttl_s, holder=self._holder))

    def _adopt(self, offset: StreamOffset, start: StreamOffset | None = None) -> None:
        """Adopt the lease that the offsets name. One that this process created for an unused start is deleted.

        `start`: of the batch that ends with `offset` and is still to be read.
        """
        if not self._options.has_lease:
            self._state.follow(offset.ends)
            return
        name = self._options.subscription or offset.subscription
        if name is not None and name == self._options.start.subscription:  # from an earlier version: it belongs to its consumers
            name = self._keeper.name if self._keeper is not None and self._is_adopted else new_lease_name()
        if self._keeper is not None and (name is None or self._keeper.name == name):
            if not self._is_adopted and self._initial is not None and offset.starts != self._initial.starts:
                self._keeper.doubt()
            if not self._is_adopted and start is not None:  # a batch of the checkpoint: the query has run before
                self._keeper.take(self._held_firsts(offset, start))
            self._is_adopted = True
            return
        if self._keeper is not None:
            self._keeper.drop()
        self._keeper = self._new_keeper(name or new_lease_name())
        self._is_adopted = True
        self._state.follow(offset.ends)
        held = self._held_firsts(offset, start)
        self._keeper.hold(held, must_exist=True, takes=offset.subscription == self._keeper.name)

    def _held_firsts(self, offset: StreamOffset, start: StreamOffset | None) -> dict[str, MessagePosition]:
        """Return what the query has still to read of existing topics, with arguments as for `_adopt`."""
        views = self._state.current().views
        firsts = {topic: end.next if start is None else offset.first_message(topic, start) for topic, end in offset.ends.items()}
        return {topic: _held_from(first) for topic, first in firsts.items() if topic in views}

    def _gone(self, snapshot: Snapshot, start: StreamOffset) -> frozenset[str]:
        gone = snapshot.gone & start.ends.keys()
        for topic in sorted(gone):
            what = "the topic was deleted, or is no longer among the topics of the options"
            self._believe(Loss(topic, start.ends[topic], None, what), is_counted=True)
            self._turns.pop(topic, None)
        return frozenset(gone)

    def _loss(self, view: TopicView, position: EntryPosition, incarnation: str | None, is_start: bool) -> Loss | None:
        is_held = self._keeper is not None and self._keeper.has_held(view.topic)
        return find_loss(view, position, self._state.seen, is_held=is_held, incarnation=incarnation, is_start=is_start)

    def _sure_loss(self, view: TopicView, position: EntryPosition, incarnation: str | None, is_start: bool) -> Loss | None:
        """Return a loss confirmed by a new look, and if in doubt by records (rule 3)."""
        loss = self._loss(view, position, incarnation, is_start)
        if loss is None or loss.doubt is None:
            return loss
        seen = self._state.seen
        loss = settled(loss, view, seen, self._state.gone_ledgers(view.history, loss.doubt))
        if loss is None:
            seen.on_settled(view, position)
        return loss

    def _believe(self, loss: Loss | None, *, is_counted: bool) -> None:
        if loss is None:
            return
        if self._options.spec.fail_on_data_loss:
            raise loss.error()
        if is_counted:
            self.lost_entries += loss.entries or 0
            log.warning("stream.data_lost: %s", loss, extra={"topic": loss.topic})


def _fitting(cut: Mapping[str, int], taken: Mapping[str, int]) -> Mapping[str, int]:
    """Return a larger cut if the entries would make more tasks than allowed."""
    from cepheid_scan.splits import MAX_TASKS

    surplus = sum(entries / cut[topic] for topic, entries in taken.items()) / MAX_TASKS
    return cut if surplus <= 1 else {topic: math.ceil(entries * surplus) for topic, entries in cut.items()}


def _goes_on(view: TopicView, start: StreamOffset, position: EntryPosition) -> bool:
    """Return whether `position` is where `start` ended, with nothing lost after it."""
    return start.ends.get(view.topic) == position and not is_another(view, start.incarnations.get(view.topic))


def _starts_further_on(view: TopicView, start: StreamOffset) -> bool:
    """Return whether it is at a start that its ledger does not reach, or did not when deleted: `ends` would imply read entries."""
    ledger = view.ledger(start.ends[view.topic].ledger_id)
    return start.is_start(view.topic) and (ledger is None or ledger.last_entry_id < start.ends[view.topic].entry_id)


def _reaches(view: TopicView, last: EntryPosition) -> bool:
    ledger = view.ledger(last.ledger_id)
    return last.entry_id < 0 or (ledger is not None and ledger.last_entry_id >= last.entry_id)


def _held_from(first: MessagePosition) -> MessagePosition:
    """Return where the lease for reading from `first` begins: like in `commit`, the ledger of the position stays in the chain."""
    return MessagePosition(first.ledger_id, max(0, first.entry_id - 1))


def open_stream_query(options: SourceOptions, schemas: tuple[SchemaVersion, ...] = ()) -> StreamQuery:
    """Return the query without any call yet. `schemas`: of the rows, if they are typed. Raises BadOptionError."""
    source = options.source
    admin = AdminHttp(source) if source.service_url or source.admin_url else None

    def resolve_start(snapshot: Snapshot) -> dict[str, MessagePosition]:
        """Return the starts. Raises BadOptionError or DataLossError for a place that is no longer kept, or will never exist."""
        request = replace(options, end=LATEST)
        with closing(open_planner(source)) as planner:
            ranges = plan_ranges(request, snapshot.plan, planner, is_stream=True)
        return {found.history.topic: found.first for found in ranges if found.history.ledgers}

    def publish_time_ms(plan: HistoryPlan, view: TopicView, entry: EntryPosition) -> int | None:
        """Return a publish time, with less patience for bookies than a task: the lag is reported at every trigger."""
        ledger = view.ledger(entry.ledger_id)
        settings = replace(options.spec.settings, read_timeout_s=1.0, read_attempts=1, unreachable_s=0.0)
        if ledger is None:
            return None
        return BookieProbe(plan, settings, storage=options.spec.storage).publish_time_ms(view.history, ledger, entry.entry_id)

    state = StreamState(
        open_planner(source),
        EndWatch(retry_s=options.metadata_retry_s, tls=options.spec.settings.tls),
        options.topics,
        discovery_s=options.topic_discovery_s,
        retry_s=options.metadata_retry_s,
        schemas=options.spec.mode is ReadMode.TYPED,
    )
    return StreamQuery(options, state, admin, resolve_start, schemas, publish_time_ms)
