"""What goes wrong is said in the last line of Spark's error: what, which topic or option, what to do; never as "no rows"."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pulsar
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from cepheid_decode import EntriesUnreadableError, ScanSpec, ScanTask
from cepheid_decode.history import Fragment, Piece
from cepheid_decode.scan_request import PlanSource, ReadMode
from cepheid_security.client_environment import ClientSecrets
from cepheid_spark.options import parse_options
from cepheid_spark.partitions import TaskPartition, read_partition
from cepheid_spark.spark_schema import choose_columns, rows_schema
from tests.e2e.official_client import publish

Load = Callable[..., DataFrame]


def said(action: Callable[[], Any]) -> str:
    """The line that names the error: Spark puts a Python traceback before it and its own state behind it."""
    with pytest.raises(PySparkException) as caught:
        action()
    lines = [line for line in str(caught.value).splitlines() if line.startswith(("cepheid_", "pyspark."))]
    assert lines, str(caught.value)
    return lines[-1]


@pytest.mark.slow
def test_an_unknown_topic(topic: str, client: pulsar.Client, load: Load) -> None:
    publish(client, topic, [b"x"])
    message = said(load(topic + "s").count)
    assert "NoSuchTopicError" in message
    assert f"persistent://public/default/{topic}s" in message
    assert "failOnMissingTopic" in message
    assert load(f"{topic},{topic}s", failOnMissingTopic="false").count() == 1


@pytest.mark.slow
def test_a_misspelt_option(topic: str, load: Load) -> None:
    assert "did you mean readMode?" in said(lambda: load(topic, readMod="entries"))


@pytest.mark.slow
def test_an_option_whose_stack_is_no_news(topic: str, load: Load) -> None:
    with pytest.raises(PySparkException) as caught:
        load(topic, startingTimestamp="yesterday")
    assert str(caught.value).count('File "') == 1, "a user's mistake comes without our stack"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ("valu binary", "did you mean value?"),
        ("value string", "column value is binary, the schema declares string"),
        ("publish_time bigint", "column publish_time is timestamp, the schema declares bigint"),
        ("properties map<string,int>", "column properties is map<string,string>, the schema declares map<string,int>"),
        ("value binary not null", "declare it nullable"),
    ],
)
def test_a_schema_that_the_rows_do_not_have(schema: str, why: str, topic: str, load: Load) -> None:
    message = said(load(topic, schema).count)
    assert "BadOptionError" in message
    assert why in message


@pytest.mark.slow
def test_a_column_that_is_not_there(topic: str, load: Load) -> None:
    message = said(lambda: load(topic, columns="value,produser_name"))
    assert "did you mean producer_name?" in message
    assert "replicated_from" in message, "all columns are listed"


@pytest.mark.slow
def test_nobody_answers(topic: str, spark: SparkSession) -> None:
    frame = spark.read.format("cepheid").options(topic=topic, serviceUrl="pulsar://127.0.0.1:1", metadataRetry="200ms").load()
    message = said(frame.count)
    assert "PlanUnavailableError" in message
    assert "127.0.0.1:1" in message


def test_bookies_that_do_not_answer_are_named_with_the_entries() -> None:
    """As where executors have no network to them."""
    fragment = Fragment(0, ("bookie-1", "bookie-2"))
    piece = Piece("persistent://public/default/t", -1, 12, 3, 45, 2, 2, (fragment,))
    task = ScanTask((piece,), (("bookie-1", "127.0.0.1:1"), ("bookie-2", "127.0.0.1:2")))
    given = {"serviceUrl": "pulsar://127.0.0.1:1", "topic": "t", "readAttempts": "1", "unreachableTimeout": "0s"}
    options = parse_options(given, streaming=False)
    spec = ScanSpec(ReadMode.MESSAGES, ("value",), settings=options.spec.settings)
    schema = rows_schema(replace(options, columns=("value",)))
    layout = choose_columns(schema, options)
    with pytest.raises(EntriesUnreadableError) as caught:
        list(read_partition(TaskPartition(task, spec), (), layout, schema, freeze_gc=False))
    assert all(part in str(caught.value) for part in ("persistent://public/default/t", "12", "bookie-1", "127.0.0.1:1", "bookie-2"))
    assert " in 1 rounds: " in str(caught.value), "what the two options say"


def test_a_partition_shows_its_range_and_no_secret() -> None:
    piece = Piece("persistent://public/default/t", -1, 12, 3, 45, 1, 1, (Fragment(0, ("b",)),))
    spec = ScanSpec(ReadMode.MESSAGES, ("value",), plan_source=PlanSource(admin_url="http://b:1", secrets=ClientSecrets("hush")))
    shown = repr(TaskPartition(ScanTask((piece,) * 5, (("b", "b:1"),), b"hush"), spec))
    assert shown.startswith("TaskPartition(persistent://public/default/t 12:3..45, ")
    assert shown.endswith(" and 2 ranges more)")
    assert "hush" not in shown
