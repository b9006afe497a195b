"""filterPushdown is gone: with `true` a DataFrame that was used twice returned wrong rows."""

from __future__ import annotations

from collections.abc import Callable

import pulsar
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from cepheid_scan import BadOptionError
from cepheid_spark.options import parse_options
from tests.e2e.official_client import publish

Load = Callable[..., DataFrame]
NEEDED = {"service.url": "pulsar://127.0.0.1:6650", "topics": "t"}


@pytest.mark.parametrize("streaming", [False, True])
def test_true_is_refused_with_the_reason_and_what_to_give_instead(streaming: bool) -> None:
    with pytest.raises(BadOptionError, match=r"first query to its later queries too.*wrong rows.*startingTimestamp") as caught:
        parse_options({**NEEDED, "filterpushdown": "true"}, streaming=streaming)
    assert "option filterPushdown: 'true' is not accepted" in str(caught.value)


def test_false_is_accepted_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert parse_options({**NEEDED, "filterPushdown": "false"}, streaming=False) == parse_options(NEEDED, streaming=False)
    assert caplog.messages == ["option filterPushdown does nothing, and the next release will refuse it: leave it out"]


@pytest.mark.slow
def test_a_dataframe_that_is_used_twice_gives_all_its_rows_where_spark_pushes_filters(
    spark: SparkSession, topic: str, client: pulsar.Client, load: Load
) -> None:
    producer = client.create_producer(topic)
    for number in range(10):
        producer.send(b"x", partition_key=f"k{number}")
    producer.close()
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        frame = load(topic)
        assert (frame.where("key = 'k1'").count(), frame.count()) == (1, 10)
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


@pytest.mark.slow
def test_spark_shows_the_refusal(topic: str, client: pulsar.Client, load: Load) -> None:
    publish(client, topic, [b"x"])
    with pytest.raises(PySparkException, match="filterPushdown: 'true' is not accepted"):
        load(topic, filterPushdown="true").count()
