"""The schema versions of what a typed read reads, asked of whoever plans."""

from __future__ import annotations

from contextlib import closing

from cepheid_scan import BadOptionError, HistoryPlan, ReadMode, SchemaVersion
from cepheid_spark.options import SourceOptions


def load_topic_schemas(options: SourceOptions) -> tuple[SchemaVersion, ...]:
    """Oldest first; nothing in other modes. Raises BadOptionError, NoSuchTopicError, PlanUnavailableError."""
    if options.mode is not ReadMode.TYPED:
        return ()
    from cepheid_scan.planner import open_planner

    with closing(open_planner(options.source)) as planner:
        return one_topic_schema(planner.plan(planner.topics(options.topics), schemas=True))


def one_topic_schema(plan: HistoryPlan) -> tuple[SchemaVersion, ...]:
    """The versions of the schema that all topics of a typed read share. Raises BadOptionError when there are several schemas."""
    by_topic = {topic: versions for topic, versions in plan.schemas.items() if versions}
    different = {(versions[-1].kind, versions[-1].definition): topic for topic, versions in by_topic.items()}
    if len(different) > 1:
        first, second, *_ = different.values()
        raise BadOptionError(
            f"readMode=typed: the topics {first} and {second} have different schemas; "
            "read them one by one, or with readMode=messages"
        )
    return max(by_topic.values(), key=len, default=())
