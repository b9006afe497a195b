"""The parts of a streaming query, put together: who is asked where history lies, who watches its ends, who holds it."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

from cepheid_scan import LATEST, HistoryPlan, MessagePosition, ReadMode, SchemaVersion
from cepheid_scan.admin_http import AdminHttp
from cepheid_scan.entry_probe import BookieProbe
from cepheid_scan.ledger_ends import EndWatch
from cepheid_scan.open_planner import open_planner
from cepheid_scan.plan_scan import plan_ranges
from cepheid_spark.offsets import EntryPosition
from cepheid_spark.options import SourceOptions
from cepheid_spark.stream_query import StreamQuery
from cepheid_spark.stream_state import Snapshot, StreamState
from cepheid_spark.topic_view import TopicView


def open_stream_query(options: SourceOptions, schemas: tuple[SchemaVersion, ...] = ()) -> StreamQuery:
    """`schemas`: of the rows, if they are typed. Asks nobody yet. Raises BadOptionError."""
    source = options.source
    admin = AdminHttp(source) if source.service_url or source.admin_url else None

    def resolve_start(snapshot: Snapshot) -> dict[str, MessagePosition]:
        """Raises BadOptionError, DataLossError: the options name a place that is not kept any more, or will never be."""
        request = replace(options.request(()), end=LATEST)
        with closing(open_planner(source)) as planner:
            ranges = plan_ranges(request, snapshot.plan, planner, is_stream=True)
        return {found.history.topic: found.first for found in ranges if found.history.ledgers}

    def publish_time_ms(plan: HistoryPlan, view: TopicView, entry: EntryPosition) -> int | None:
        """Does not wait for bookies as a task does: the lag is reported at every trigger."""
        ledger = view.ledger(entry.ledger_id)
        settings = replace(options.settings, read_timeout_s=1.0, read_attempts=1, unreachable_s=0.0)
        if ledger is None:
            return None
        return BookieProbe(plan, settings, storage=options.storage).publish_time_ms(view.history, ledger, entry.entry_id)

    state = StreamState(
        open_planner(source),
        EndWatch(retry_s=options.metadata_retry_s, tls=options.settings.tls),
        options.topics,
        discovery_s=options.topic_discovery_s,
        retry_s=options.metadata_retry_s,
        schemas=options.mode is ReadMode.TYPED,
    )
    return StreamQuery(options, state, admin, resolve_start, schemas, publish_time_ms)
