"""Structured streaming on a real Spark: what comes out, in which batches, and what the checkpoint says."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pulsar
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

from cepheid_spark import ProgressListener
from cepheid_testkit import ProcessCluster
from tests.spark.streams import Streams

pytestmark = pytest.mark.slow

EVERYTHING = {"startingOffsets": "earliest"}
IDLE_S = 10.0  # many looks at the topic, and many questions of Spark


@pytest.fixture
def streams(spark: SparkSession, server: ProcessCluster, client: pulsar.Client, topic: str, tmp_path: Path) -> Iterator[Streams]:
    with Streams(spark, server, client, topic, tmp_path) as streams:
        yield streams


def shown_batch(query: StreamingQuery) -> int | None:
    """Progress is shown a moment after the batch that it is of."""
    return None if query.lastProgress is None else query.lastProgress["batchId"]


def test_what_is_there_and_what_comes_is_read_once_and_an_idle_stream_runs_no_batches(streams: Streams) -> None:
    streams.send(range(10))
    query = streams.start(**EVERYTHING)
    streams.wait_for(range(10))
    streams.send(range(10, 20))
    streams.wait_for(range(20))
    batches = len(streams.batches)
    streams.wait_until(lambda: shown_batch(query) == batches - 1, lambda: f"{query.lastProgress}")
    lag = json.loads(query.lastProgress["sources"][0]["latestOffset"])
    assert (lag["lagEntries"], lag["lost"], list(lag["t"])) == (0, 0, [streams.topic])
    idle_since = time.monotonic()
    streams.wait_until(lambda: time.monotonic() - idle_since > IDLE_S, lambda: "")
    assert len(streams.batches) == batches == len(streams.offsets())
    query.stop()
    first, last = streams.offsets()[0], streams.offsets()[-1]
    assert first["from"] == {streams.topic: [first["t"][streams.topic][0], 0]}
    assert "from" not in last
    assert first["sub"] == last["sub"]
    assert first["sub"] in streams.admin("GET", "/subscriptions")


def test_a_listener_shows_how_streams_are_doing(spark: SparkSession, streams: Streams) -> None:
    listener = ProgressListener()
    spark.streams.addListener(listener)
    try:
        streams.send(range(10))
        query = streams.start(**EVERYTHING, maxEntriesPerTrigger=4)
        streams.wait_for(range(10))
        rows = f'cepheid_spark_rows_total{{query="{query.id}",source="0"}} 10'
        streams.wait_until(lambda: rows in listener.prometheus_text(), listener.prometheus_text)
        (figures,) = listener.figures()
        assert (figures.lag_entries, figures.lag_bytes, figures.lost_entries) == (0, 0, 0)
        assert figures.batch_s > 0
        query.stop()
        streams.wait_until(lambda: not listener.figures(), listener.prometheus_text)
    finally:
        spark.streams.removeListener(listener)


def test_a_first_batch_that_fails_is_repeated_from_where_it_began(streams: Streams) -> None:
    """The start "latest" has moved on meanwhile: by it the first batch would be empty."""
    streams.send(range(5))
    streams.fail_batch = 0
    query = streams.start(startingOffsets="latest")
    streams.wait_until(lambda: len(streams.admin("GET", "/subscriptions")) == 1, lambda: "no lease")
    (lease,) = streams.admin("GET", "/subscriptions")
    streams.send(range(5, 10))
    assert "refused once" in streams.failure(query)
    streams.send(range(10, 15))
    streams.start(startingOffsets="latest")
    streams.wait_for(range(5, 15))
    assert streams.admin("GET", "/subscriptions") == [lease], "the second start's own lease is gone again"


def test_a_start_by_time_is_that_of_the_first_run_whatever_a_restart_says(streams: Streams) -> None:
    """A job that says "an hour ago" computes it anew at each start: what came while it was down is in its checkpoint's backlog."""
    streams.send(range(5))
    streams.fail_batch = 0
    query = streams.start(startingTimestamp=str(int(time.time() * 1000) - 3_600_000))
    assert "refused once" in streams.failure(query)
    streams.send(range(5, 10))
    streams.run_available(startingTimestamp=str(int(time.time() * 1000) + 3_600_000))
    assert streams.numbers() == list(range(10))
    streams.send(range(10, 15))
    streams.run_available(startingTimestamp=str(int(time.time() * 1000) + 3_600_000))
    assert streams.numbers() == list(range(15))


def test_available_now_ends_within_its_limits_and_does_nothing_the_second_time(streams: Streams) -> None:
    streams.send(range(10))
    assert streams.run_available(**EVERYTHING, maxEntriesPerTrigger=4) == [0, 1, 2]
    assert [len(streams.batches[number]) for number in range(3)] == [4, 4, 2]
    assert streams.numbers() == list(range(10))
    assert streams.run_available(**EVERYTHING, maxEntriesPerTrigger=4) == []
    streams.send(range(10, 13))
    streams.run_available(**EVERYTHING, maxBytesPerTrigger=1)
    assert [len(streams.batches[number]) for number in range(3, 6)] == [1, 1, 1], "an entry at least"
    assert streams.numbers() == list(range(13))


def test_partitions_that_are_added_are_read_from_their_first_entry(streams: Streams) -> None:
    streams.admin("PUT", "/partitions", 1)
    streams.send(range(5))
    streams.start(startingOffsets="latest", topicDiscoveryInterval="200ms")
    streams.wait_until(lambda: bool(streams.admin("GET", "/subscriptions")), lambda: "no lease")
    streams.send(range(5, 8), f"{streams.topic}-partition-0")
    streams.wait_for(range(5, 8))
    streams.admin("POST", "/partitions", 3)
    streams.send(range(8, 12), f"{streams.topic}-partition-2")
    streams.wait_for(range(5, 12))
    last = streams.offsets()[-1]
    assert last["from"] == {f"{streams.topic}-partition-2": [last["t"][f"{streams.topic}-partition-2"][0], 0]}
    assert last["sub"] in streams.admin("GET", "/subscriptions", topic=f"{streams.topic}-partition-2")


def test_a_pattern_gains_a_topic(streams: Streams) -> None:
    first, second = f"{streams.topic}-one", f"{streams.topic}-two"
    streams.send(range(3), first)
    streams.start(topicsPattern=f"{streams.topic}-.*", startingOffsets="earliest", topicDiscoveryInterval="200ms")
    streams.wait_for(range(3))
    streams.send(range(3, 6), second)
    streams.wait_for(range(6))
    (lease,) = streams.admin("GET", "/subscriptions", topic=second)
    assert lease == streams.offsets()[-1]["sub"]


def test_retention_keeps_what_a_query_has_still_to_read(streams: Streams) -> None:
    """Nothing else keeps it: no retention, no other subscription. The query is away while its topic goes on."""
    streams.send(range(5))
    streams.run_available(**EVERYTHING, chunkLookback=0)
    for number in range(5, 20, 5):
        streams.send(range(number, number + 5))
        streams.roll()
    streams.trim()
    kept = streams.ledgers()
    assert len(kept) >= 4, "of all that was not read, and of the last entry that was"
    streams.run_available(**EVERYTHING, chunkLookback=0, maxEntriesPerTrigger=6)  # commits all of its batches but the last one
    assert streams.numbers() == list(range(20))
    streams.wait_until(
        lambda: streams.trim() is None and kept[1] not in streams.ledgers(), lambda: f"{streams.ledgers()} of {kept}"
    )
    assert kept[2] in streams.ledgers()


def test_a_name_of_a_lease_is_for_one_query_at_a_time_and_free_when_that_was_stopped(streams: Streams) -> None:
    streams.send(range(3))
    first = streams.start(subscription="mine", **EVERYTHING)
    streams.wait_for(range(3))
    first.stop()
    streams.batches.clear()
    streams.checkpoint = streams.checkpoint.with_name("second")
    second = streams.start(subscription="mine", **EVERYTHING)
    streams.wait_for(range(3))
    streams.checkpoint = streams.checkpoint.with_name("third")
    third = streams.start(subscription="mine", **EVERYTHING)
    assert "LeaseTakenError: subscription 'mine' of" in streams.failure(third)
    assert second.isActive


def test_what_was_trimmed_ends_the_query_or_is_skipped(streams: Streams) -> None:
    streams.send(range(5))
    streams.run_available(**EVERYTHING, chunkLookback=0)
    for name in streams.admin("GET", "/subscriptions"):
        streams.admin("DELETE", f"/subscription/{name}")  # as when the lease had expired
    streams.send(range(5, 10))
    streams.roll()
    streams.send(range(10, 15))
    streams.roll()
    streams.trim()
    streams.send(range(15, 20))
    error = streams.failure(streams.start(**EVERYTHING))
    assert "was trimmed" in error
    assert streams.topic in error
    assert "failOnDataLoss=false" in error
    streams.start(**EVERYTHING, failOnDataLoss="false")
    streams.wait_for([*range(5), *range(15, 20)])


def test_a_topic_that_was_made_anew_is_loss_and_then_read_from_its_beginning(streams: Streams) -> None:
    streams.send(range(5))
    streams.run_available(**EVERYTHING)
    streams.delete_topic()
    streams.send(range(5, 8))
    assert "deleted and created again" in streams.failure(streams.start(**EVERYTHING))
    streams.start(**EVERYTHING, failOnDataLoss="false")
    streams.wait_for(range(8))


def test_a_topic_that_is_deleted_ends_the_query_or_leaves_its_offsets(streams: Streams) -> None:
    other = f"{streams.topic}-other"
    streams.send(range(5))
    streams.send(range(5, 8), other)
    both = {"topics": f"{streams.topic},{other}", "topicDiscoveryInterval": "200ms", **EVERYTHING}
    query = streams.start(**both)
    streams.wait_for(range(8))
    streams.delete_topic()
    assert "deleted" in streams.failure(query)
    streams.start(**both, failOnDataLoss="false")
    streams.send(range(8, 10), other)
    streams.wait_for(range(10))
    streams.wait_until(lambda: list(streams.offsets()[-1]["t"]) == [other], lambda: f"{streams.offsets()[-1]}")


def test_an_offset_of_another_format_is_refused_with_both_named(streams: Streams) -> None:
    streams.send(range(5))
    streams.run_available(**EVERYTHING)
    (path,) = (path for path in (streams.checkpoint / "offsets").iterdir() if path.name == "0")
    path.write_text(path.read_text().replace('"v": 3', '"v": 9').replace('"v":3', '"v":9'))
    (path.parent / f".{path.name}.crc").unlink(missing_ok=True)
    assert "format 9, this version of cepheid_spark knows formats 1 to 3" in streams.failure(streams.start(**EVERYTHING))
