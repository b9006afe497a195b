"""The schema versions of what a typed read reads, asked of whoever plans."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

from cepheid_scan import ReadMode, SchemaVersion
from cepheid_spark.options import SourceOptions


def load_topic_schemas(options: SourceOptions) -> tuple[SchemaVersion, ...]:
    """Of the topic whose schema the rows have, oldest first; nothing in other modes.

    Raises BadOptionError, NoSuchTopicError, PlanUnavailableError."""
    if options.mode is not ReadMode.TYPED:
        return ()
    from cepheid_decode.shared_schema import rows_history
    from cepheid_scan.open_planner import open_planner

    with closing(open_planner(options.source)) as planner:
        return rows_history(planner.plan(planner.topics(options.topics), schemas=True), options.reader_version)


def with_reader_version(options: SourceOptions, schemas: Sequence[SchemaVersion]) -> SourceOptions:
    """The newest version of now stays the rows' schema: one that is registered while the query runs is read, and not shown."""
    if options.mode is not ReadMode.TYPED or options.reader_version is not None or not schemas:
        return options
    return replace(options, reader_version=schemas[-1].version)
