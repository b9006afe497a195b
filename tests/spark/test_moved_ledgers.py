"""Spark over a topic whose ledgers move to object storage: batch and stream see every message once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pulsar
import pytest
from pyspark.sql import DataFrame, SparkSession

from cepheid_testkit import ProcessCluster
from tests.spark.offloading_broker import OffloadingBroker
from tests.spark.streams import Streams

pytestmark = pytest.mark.slow


@pytest.fixture
def streams(spark: SparkSession, server: ProcessCluster, client: pulsar.Client, topic: str, tmp_path: Path) -> Iterator[Streams]:
    with Streams(spark, server, client, topic, tmp_path) as streams:
        streams.admin("PUT", "")
        streams.admin("POST", "/retention", {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1})
        yield streams


def fill(streams: Streams, ledgers: int, start: int = 0) -> None:
    for number in range(ledgers):
        streams.send(range(start + 10 * number, start + 10 * number + 10))
        streams.roll()


def test_objects_and_bookies_are_read_as_one_topic(
    server: ProcessCluster, streams: Streams, load: Callable[..., DataFrame], tmp_path: Path
) -> None:
    """Two ledgers are objects alone, one is in both places, two are on bookies."""
    fill(streams, 4)
    streams.send(range(40, 45))
    with OffloadingBroker(server.admin_url, tmp_path / "objects") as broker:
        ids = broker.offload(streams.topic, 3, keeps=1)
        frame = load(streams.topic, **{"service.url": broker.url, "subscription": "none"})
        rows = frame.select("ledger_id", "entry_id", "value").collect()
        assert [int(row.value) for row in sorted(rows, key=lambda row: (row.ledger_id, row.entry_id))] == list(range(45))
        assert {row.ledger_id for row in rows} > set(ids)
        assert frame.count() == 45
        entries = load(streams.topic, **{"service.url": broker.url, "readMode": "entries", "subscription": "none"})
        assert entries.count() == 45


def test_a_stream_goes_on_while_ledgers_move(server: ProcessCluster, streams: Streams, tmp_path: Path) -> None:
    fill(streams, 3)
    options = {"startingOffsets": "earliest", "maxEntriesPerTrigger": 7, "topicDiscoveryInterval": "200ms"}
    with OffloadingBroker(server.admin_url, tmp_path / "objects") as broker:
        query = streams.start(**options, **{"service.url": broker.url})
        broker.offload(streams.topic, 2)
        streams.wait_for(range(30))
        broker.offload(streams.topic, 3, keeps=1)
        fill(streams, 1, start=30)
        streams.wait_for(range(40))
        query.stop()
        broker.offload(streams.topic, 4)
        streams.send(range(40, 50))
        streams.start(**options, **{"service.url": broker.url})
        streams.wait_for(range(50))
