"""Creates a view for each topic of a namespace, so that SQL can use the topics by name.

    register(spark, "pulsar://127.0.0.1:6650", "public/default")
    spark.sql("SELECT carrier, count(*) FROM flights GROUP BY carrier")

The views are temporary: they belong to the session, and no catalog keeps them. Each query reads its topic again.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import TYPE_CHECKING

from cepheid_decode import BadOptionError, TopicSelection
from cepheid_scan.open_planner import open_planner
from cepheid_spark.options import parse_options
from cepheid_wire import TopicName

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_OF_ONE_TOPIC = ("topics", "topic", "topicspattern", "readmode")


def register(
    spark: SparkSession, service_url: str, namespace: str = "public/default", *, options: Mapping[str, str] | None = None
) -> list[str]:
    """Create or replace a temporary view for each topic of `namespace`, and return their names, sorted.

    A view has its topic's local name (in backticks if it is not a plain identifier), and the rows of `readMode=typed` if the
    topic has a schema, otherwise those of `messages`. Later topics need another call. `options`: further ones of the source,
    for all views. Raises BadOptionError and PlanUnavailableError.
    """
    given = {"service.url": service_url, **(options or {})}
    if refused := [name for name in given if name.lower() in _OF_ONE_TOPIC]:
        raise BadOptionError(f"register() chooses {refused[0]} for each view: leave that option out", value=refused[0])
    pattern = f"persistent://{namespace}/.*"
    source = parse_options({**given, "topicsPattern": pattern}, streaming=False).source
    with closing(open_planner(source)) as planner:
        selection = TopicSelection(pattern=pattern, fail_on_missing=False)
        parts: dict[TopicName, str] = {}
        for name in planner.topics(selection):
            parts.setdefault(TopicName.parse(name).base, name)
        plan = planner.plan(list(parts.values()), schemas=True)
    for topic in parts:
        mode = "typed" if plan.schemas.get(str(topic)) else "messages"
        view = {**given, "topics": str(topic), "readMode": mode}
        shown = ", ".join(f"{_text(name)} {_text(value)}" for name, value in view.items())
        spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW {_identifier(topic.local_name)} USING cepheid OPTIONS ({shown})")
    return sorted(topic.local_name for topic in parts)


def _identifier(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _text(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
