"""Plans a bounded scan: its topics and ranges, cut into tasks.

    ScanRequest ──► Planner: topics and locations ──► edges as positions ──► what was trimmed ──► ranges ──► tasks

A publish time as an edge is exact in the rows: its positions are a superset, and the row filter has the times.
A start given as a position after the end is refused: its empty range would look like a topic without news.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

from cepheid_decode.errors import BadOptionError, DataLossError
from cepheid_decode.history import HistoryPlan, LedgerHistory, Piece, ScanTask, TopicHistory
from cepheid_decode.positions import MessagePosition
from cepheid_decode.scan_request import ReadMode, RowFilter, ScanRequest, ScanSpec
from cepheid_scan.edges import EntryProbe, end_of, first_of, resolve_edge
from cepheid_scan.entry_probe import BookieProbe
from cepheid_scan.open_planner import find_ledger, open_planner
from cepheid_scan.planner import Planner
from cepheid_scan.splits import TopicRange, cut_ranges

log = logging.getLogger(__name__)


def plan_scan(request: ScanRequest) -> tuple[list[ScanTask], ScanSpec, HistoryPlan]:
    """Return the tasks, what all of them need besides, and the plan.

    Raises NoSuchTopicError, PlanUnavailableError, DataLossError, BadOptionError.
    """
    began = time.monotonic()
    spec = replace(request.spec, plan_source=request.source, row_filter=_with_times(request))
    with closing(open_planner(request.source)) as planner:
        topics = planner.topics(request.topics)
        plan = planner.plan(topics, schemas=spec.mode is ReadMode.TYPED)
        ranges = plan_ranges(request, plan, planner)
    tasks = cut_ranges(
        ranges,
        plan,
        target_bytes=request.target_task_bytes,
        min_tasks=request.min_tasks,
        look_back=spec.settings.chunk_lookback,
    )
    if spec.mode is ReadMode.TYPED:
        spec = with_schemas(spec, plan, tasks)
    log.info(
        "scan.planned",
        extra={
            "topics": len(topics),
            "ledgers": sum(len(history.ledgers) for history in plan.topics),
            "size_bytes": sum(task.size_bytes for task in tasks),
            "tasks": len(tasks),
            "duration_ms": round(1000 * (time.monotonic() - began)),
        },
    )
    return tasks, spec, plan


def plan_ranges(
    request: ScanRequest, plan: HistoryPlan, planner: Planner, probe: EntryProbe | None = None, *, is_stream: bool = False
) -> list[TopicRange]:
    """Return the range to read for each topic, in the order of the plan. `is_stream`: the start may be in the future, too.

    Raises DataLossError, BadOptionError.
    """
    if probe is None:

        def replan(piece: Piece) -> LedgerHistory | None:
            return find_ledger(request.source, piece.topic, piece.ledger_id)[0]

        probe = BookieProbe(plan, request.spec.settings, replan, request.spec.storage)
    skew_ms, ask = request.timestamp_skew_ms, planner.subscription_position
    starts = resolve_edge(request.start, plan, probe, is_end=False, skew_ms=skew_ms, subscription_position=ask)
    ends = resolve_edge(request.end, plan, probe, is_end=True, skew_ms=skew_ms, subscription_position=ask)
    if request.start.subscription is not None:
        # It may be after the last entry of a ledger that was deleted since: what it has not acknowledged is not trimmed.
        starts = {history.topic: max(starts[history.topic], first_of(history)) for history in plan.topics}
    if request.start.positions:
        is_early = is_stream or request.source.metadata is not None  # ZooKeeper's plan may lack the last second
        for history in plan.topics:
            _check_start(history, starts[history.topic], may_come=is_early, fails=request.spec.fail_on_data_loss)
    return [_range_of(history, starts[history.topic], ends[history.topic], request.spec, planner) for history in plan.topics]


def with_schemas(spec: ScanSpec, plan: HistoryPlan, tasks: Sequence[ScanTask]) -> ScanSpec:
    """Return the spec with the schemas for decoding a typed read. Raises BadOptionError for a topic that the rows cannot show."""
    from cepheid_decode.shared_schema import check_shown, histories_of, rows_history  # imports the schema libraries
    from cepheid_decode.typed.typed_columns import shown_schema

    schemas = spec.schemas or rows_history(plan, spec.reader_version)
    histories = histories_of(plan, dict.fromkeys(piece.topic for task in tasks for piece in task.pieces))
    if schemas:
        check_shown(shown_schema(schemas, spec.reader_version), histories)
    return replace(
        spec, schemas=schemas, writers=tuple((topic, versions) for topic, versions in histories.items() if versions != schemas)
    )


def _with_times(request: ScanRequest) -> RowFilter:
    wanted = request.spec.row_filter
    froms = [each for each in (wanted.publish_from_ms, request.start.publish_time_ms) if each is not None]
    untils = [each for each in (wanted.publish_until_ms, request.end.publish_time_ms) if each is not None]
    return replace(wanted, publish_from_ms=max(froms, default=None), publish_until_ms=min(untils, default=None))


def _range_of(history: TopicHistory, start: MessagePosition, end: MessagePosition, spec: ScanSpec, planner: Planner) -> TopicRange:
    kept = first_of(history)
    if start < kept and start < end:
        loss = _loss(history.topic, start, min(kept, end), kept, planner)
        if spec.fail_on_data_loss:
            raise loss
        log.warning("scan.data_lost: %s", loss.args[0], extra=loss.facts)
        start = kept
    return TopicRange(history, start, end)


def _check_start(history: TopicHistory, start: MessagePosition, *, may_come: bool, fails: bool) -> None:
    """Check a start. `may_come`: it may be an entry of the open ledger that does not exist yet. Later ledgers cannot be known.

    Raises BadOptionError; without `fails` it only logs.
    """
    end = end_of(history)
    if (start.ledger_id, start.entry_id) <= (end.ledger_id, end.entry_id):
        return
    last = history.ledgers[-1] if history.ledgers else None
    what = f"the start {start} of {history.topic} is after its end, {end}"
    if may_come and last is not None and last.is_open and last.ledger_id == start.ledger_id:
        log.warning("scan.start_behind_end: %s: what comes before it is left out", what, extra={"topic": history.topic})
        return
    what += ": it is a position of another topic, or the topic was deleted and created again since"
    if fails:
        raise BadOptionError(
            f"{what}. Give an existing position, earliest or a time; failOnDataLoss=false accepts it",
            topic=history.topic,
            start=str(start),
            end=str(end),
        )
    log.warning("scan.start_behind_end: %s", what, extra={"topic": history.topic})


def _loss(
    topic: str, start: MessagePosition, lost_until: MessagePosition, kept: MessagePosition, planner: Planner
) -> DataLossError:
    """Return the loss. A ledger's record outlives it for a while, and shows at least how many of its entries were deleted."""
    last = planner.deleted_ledger_end(start.ledger_id)
    lost = 0 if last is None else max(0, last - start.entry_id + 1)
    count = f"at least {lost} entries" if lost else "an unknown number of entries"
    return DataLossError(
        f"{topic}: the range from {start} to before {lost_until} is no longer kept ({count}): trimmed by retention, or the "
        f"topic was deleted and created again. The first kept message is {kept}",
        topic=topic,
        start=str(start),
        first_kept=str(kept),
        lost_entries=lost,
    )
