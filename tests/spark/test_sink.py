"""Writing on a real Spark: what the official client receives of it, and what is refused."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from typing import Any

import pulsar
import pytest
from pyspark.sql import DataFrame, SparkSession

from cepheid_testkit import ProcessCluster

pytestmark = pytest.mark.slow

RECEIVE_LIMIT_MS = 5_000


class Sink:
    """A topic, writes to it, and what it has."""

    def __init__(self, server: ProcessCluster, client: pulsar.Client, topic: str) -> None:
        self._server = server
        self._client = client
        self.topic = f"persistent://public/default/{topic}"

    def admin(self, method: str, what: str, body: Any = None) -> Any:
        """`what`: what follows the topic's path."""
        path = self.topic.replace("://", "/")
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._server.admin_url}/admin/v2/{path}{what}", data, method=method)
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def create(self, partitions: int = 0) -> None:
        """With deduplication."""
        self.admin("PUT", "/partitions" if partitions else "", partitions or None)
        self.admin("POST", "/deduplicationEnabled", True)

    def options(self, **more: object) -> dict[str, str]:
        given = {"service.url": self._server.service_url, "topic": self.topic, **more}
        return {name: str(value) for name, value in given.items() if value is not None}

    def write(self, frame: DataFrame, **more: object) -> None:
        frame.write.format("cepheid").options(**self.options(**more)).mode("append").save()

    def received(self, expected: int) -> list[pulsar.Message]:
        """That many messages, and none besides."""
        consumer = self._client.subscribe(self.topic, "check", initial_position=pulsar.InitialPosition.Earliest)
        try:
            found = [consumer.receive(RECEIVE_LIMIT_MS) for _ in range(expected)]
            with pytest.raises(pulsar.Timeout):
                consumer.receive(300)
        finally:
            consumer.unsubscribe()
            consumer.close()
        return found


@pytest.fixture
def sink(server: ProcessCluster, client: pulsar.Client, topic: str) -> Sink:
    return Sink(server, client, topic)


def refusal(work: Callable[[], Any]) -> str:
    with pytest.raises(Exception) as caught:
        work()
    return str(caught.value)


def test_the_parts_of_a_row_are_those_of_its_message(spark: SparkSession, sink: Sink) -> None:
    rows = spark.sql(
        "SELECT 'user-1' AS key, 'hello' AS value, map('lang', 'en', 'a', 'b') AS properties, "
        "timestamp '2026-03-01 12:00:00' AS event_time, cast('o' AS binary) AS ordering_key"
    )
    sink.write(rows, exactlyOnce=False)
    (message,) = sink.received(1)
    assert (message.data(), message.partition_key(), message.ordering_key()) == (b"hello", "user-1", "o")
    assert (message.properties(), message.event_timestamp()) == ({"a": "b", "lang": "en"}, 1_772_366_400_000)


def test_a_batch_write_stores_each_row_once(spark: SparkSession, sink: Sink) -> None:
    sink.create()
    sink.write(spark.range(2_500).selectExpr("cast(id AS string) AS value"))
    assert sorted(int(message.data()) for message in sink.received(2_500)) == list(range(2_500))


def test_a_topic_without_deduplication_is_refused_before_anything_is_written(spark: SparkSession, sink: Sink) -> None:
    said = refusal(lambda: sink.write(spark.sql("SELECT 'x' AS value")))
    assert "needs deduplication, which is off" in said
    assert "dedup on" in said
    sink.received(0)
