"""Bad days on a real Spark: damaged disks, a server that goes and comes back, history that is gone, topics of odd shapes,
checkpoints of something else. What is asserted is what the user reads, and the rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pulsar
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from cepheid_testkit import ProcessCluster
from tests.e2e.official_client import client_of, publish
from tests.spark.streams import StreamedTopic, Streams

pytestmark = pytest.mark.slow

Load = Callable[..., DataFrame]
EVERYTHING = {"startingOffsets": "earliest"}


def said(action: Callable[[], Any]) -> str:
    """The line that names the error."""
    with pytest.raises(PySparkException) as caught:
        action()
    return named(str(caught.value))


def named(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if "cepheid_" in line and "Error: " in line and 'File "' not in line]
    assert lines, text
    return lines[-1]


@pytest.fixture(scope="module")
def own() -> Iterator[ProcessCluster]:
    """A server that these tests stop and kill."""
    with ProcessCluster(bookies=3) as cluster:
        yield cluster


@pytest.fixture
def streams(spark: SparkSession, server: ProcessCluster, client: pulsar.Client, topic: str, tmp_path: Path) -> Iterator[Streams]:
    with Streams(spark, server, client, topic, tmp_path) as streams:
        yield streams


def flip(server: ProcessCluster, what: bytes, *bookies: int) -> None:
    """A bit of it is another, in the entry logs of these bookies."""
    for number in bookies:
        found = 0
        for path in (server.data_dir / f"bookie-{number}" / "entrylog").iterdir():
            data = bytearray(path.read_bytes())
            at = data.find(what)
            while at >= 0:
                data[at] ^= 1
                found += 1
                at = data.find(what, at)
            path.write_bytes(data)
        assert found, f"bookie {number} has no {what!r}"


def test_damage_on_disk_is_made_up_for_or_named_or_left_out(own: ProcessCluster, spark: SparkSession, topic: str) -> None:
    with client_of(own.service_url) as client, StreamedTopic(own, client, topic) as streamed:
        client.subscribe(topic, "keeper").close()  # so that nothing is trimmed
        streamed.send(range(50))
        publish(client, topic, [b"one copy is bad"])
        streamed.roll()
        publish(client, topic, [b"%d" % number for number in range(50, 100)])
        publish(client, topic, [b"all copies are bad"])
        streamed.roll()
    own.stop()
    flip(own, b"one copy is bad", 1)
    flip(own, b"all copies are bad", 1, 2, 3)
    own.start()

    def load(**options: str) -> DataFrame:
        reader = spark.read.format("cepheid").option("service.url", own.service_url).option("topics", topic)
        return reader.options(**options).load()

    message = said(load().count)
    assert "DamagedEntryError: entry " in message
    assert f"persistent://public/default/{topic} is damaged on all of its bookies" in message
    assert "onBadRecord=skip leaves such entries out" in message
    rows = [bytes(row.value) for row in load(onBadRecord="skip").collect()]
    assert b"one copy is bad" in rows
    assert b"all copies are bad" not in rows
    whole = {b"%d" % number for number in range(50)}
    assert whole <= set(rows), "the ledger with one bad copy is whole"
    nulls = load(onBadRecord="null").where("value IS NULL").select("topic", "entry_id").collect()
    assert {row.topic for row in nulls} == {f"persistent://public/default/{topic}"}
    assert len(nulls) == 101 + 1 - len(rows)


def test_a_server_that_dies_and_comes_back_in_mid_stream(
    own: ProcessCluster, spark: SparkSession, topic: str, tmp_path: Path
) -> None:
    with client_of(own.service_url) as client, Streams(spark, own, client, topic, tmp_path) as streams:
        streams.send(range(10))
        query = streams.start(**EVERYTHING)
        streams.wait_for(range(10))
        own.kill()
        own.start()
        streams.send(range(10, 20))
        streams.wait_for(range(20))
        assert query.isActive, "it waited; nobody had to start it again"


def test_a_range_that_was_trimmed(server: ProcessCluster, client: pulsar.Client, topic: str, load: Load) -> None:
    with StreamedTopic(server, client, topic) as streamed:
        streamed.send(range(5))
        (ledger,) = streamed.ledgers()
        streamed.roll()
        streamed.send(range(5, 8))
        streamed.trim()
        assert ledger not in streamed.ledgers()
        start = json.dumps({streamed.topic: f"{ledger}:2"})
        message = said(load(topic, startingOffsets=start).count)
        assert f"DataLossError: {streamed.topic}: the range from {ledger}:2 to before" in message
        assert "trimmed by retention" in message
        assert "failOnDataLoss=false" in message
        rows = load(topic, startingOffsets=start, failOnDataLoss="false").collect()
        assert [int(row.value) for row in rows] == [5, 6, 7]


def test_nothing_but_tombstones(client: pulsar.Client, topic: str, load: Load) -> None:
    producer = client.create_producer(topic, batching_enabled=True)
    for number in range(20):
        producer.send_async(None, lambda *_: None, partition_key=f"k{number % 4}")
    producer.flush()
    producer.close()
    rows = load(topic).collect()
    assert [row.value for row in rows] == [None] * 20
    assert [row.key for row in rows] == [f"k{number % 4}" for number in range(20)]
    assert load(topic, keys="k1").count() == 5


def test_a_message_as_large_as_a_broker_takes(client: pulsar.Client, topic: str, load: Load) -> None:
    """An entry is larger than what a bookie is asked for at once, and than what is decoded at once."""
    values = [b"small", bytes(range(256)) * (5 << 12), b"small again"]
    assert len(values[1]) == 5 << 20
    producer = client.create_producer(topic, batching_enabled=False)
    for value in (values[0], values[1][:-20_000], values[2]):
        producer.send(value)
    producer.close()
    rows = load(topic, chunkBytes="1mb", decodeBytes="1mb").collect()
    assert [bytes(row.value) for row in rows] == [values[0], values[1][:-20_000], values[2]]


def test_a_thousand_partitions(server: ProcessCluster, client: pulsar.Client, topic: str, load: Load) -> None:
    with StreamedTopic(server, client, topic) as streamed:
        streamed.admin("PUT", "/partitions", 1000)
        numbers = range(7, 1000, 199)
        for number in numbers:
            streamed.send([number], f"{streamed.topic}-partition-{number}")
        rows = load(topic).collect()
        assert sorted((row.partition, int(row.value)) for row in rows) == [(number, number) for number in numbers]
        assert load(topic, partitions="0-100").count() == 1
        assert "1000" in said(load(f"{streamed.topic}-partition-1000").count)


def test_a_stream_of_what_is_not_there(streams: Streams) -> None:
    missing = f"{streams.topic}-missing"
    error = streams.failure(streams.start(topics=missing))
    assert "plan_service.py" not in error, "a user's mistake comes without our stack"
    message = named(error)
    assert f"NoSuchTopicError: topic {missing} does not exist" in message
    assert "failOnMissingTopic=false" in message
    assert "did you mean maxBytesPerTrigger?" in named(streams.failure(streams.start(maxBytePerTrigger="1mb")))


def test_a_checkpoint_of_other_topics(streams: Streams) -> None:
    other = f"{streams.topic}-other"
    streams.send(range(5))
    streams.send(range(5, 8), other)
    streams.run_available(**EVERYTHING)
    message = named(streams.failure(streams.start(topics=other, **EVERYTHING)))
    assert f"DataLossError: {streams.topic}: the topic was deleted, or is no longer among the topics of the options" in message
    assert "failOnDataLoss=false" in message
    streams.start(topics=other, failOnDataLoss="false", **EVERYTHING)
    streams.wait_for(range(8))
    assert list(streams.offsets()[-1]["t"]) == [other]


def test_a_checkpoint_with_other_options_goes_on_where_it_was(streams: Streams) -> None:
    streams.send(range(5))
    streams.run_available(**EVERYTHING)
    streams.send(range(5, 10))
    streams.run_available(startingOffsets="latest", maxEntriesPerTrigger=2, targetPartitionBytes="1mb", subscription="renamed")
    assert streams.numbers() == list(range(10))
    assert streams.offsets()[-1]["sub"] == "renamed"
    streams.send(range(10, 12))
    streams.run_available(subscription="none")
    assert streams.numbers() == list(range(12))
