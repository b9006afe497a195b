"""Rows are what the official client consumes from the same topic: whatever it can be told to send."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pulsar
import pytest

from cepheid_scan import scan
from cepheid_testkit import ProcessCluster
from tests.e2e.official_client import client_of

pytestmark = pytest.mark.slow

COUNT = 60
COLUMNS = ("key", "value", "message_id", "publish_time", "event_time", "producer_name", "properties", "batch_index")
CODECS = {
    "none": pulsar.CompressionType.NONE,
    "lz4": pulsar.CompressionType.LZ4,
    "zlib": pulsar.CompressionType.ZLib,
    "zstd": pulsar.CompressionType.ZSTD,
    "snappy": pulsar.CompressionType.SNAPPY,
}


@pytest.fixture(scope="module")
def server() -> Iterator[ProcessCluster]:
    with ProcessCluster(bookies=1) as cluster:
        yield cluster


def consumed(cluster: ProcessCluster, topic: str, count: int) -> list[dict[str, Any]]:
    with client_of(cluster.service_url) as client:
        consumer = client.subscribe(topic, "golden", initial_position=pulsar.InitialPosition.Earliest)
        messages = [consumer.receive(timeout_millis=20_000) for _ in range(count)]
    return [
        {
            "key": message.partition_key() or None,
            "value": message.data(),
            "message_id": ":".join(
                str(part)
                for part in (
                    message.message_id().ledger_id(),
                    message.message_id().entry_id(),
                    message.message_id().partition(),
                    message.message_id().batch_index(),
                )
            ),
            "publish_time": message.publish_timestamp(),
            "event_time": message.event_timestamp(),
            "producer_name": message.producer_name(),
            "properties": message.properties(),
            "batch_index": message.message_id().batch_index(),
        }
        for message in messages
    ]


def scanned(cluster: ProcessCluster, topic: str) -> list[dict[str, Any]]:
    rows = scan(topic, service_url=cluster.service_url, columns=COLUMNS).read_all().to_pylist()

    def ms(time: Any) -> int:
        return 0 if time is None else round(time.timestamp() * 1000)

    return [
        {
            **row,
            "publish_time": ms(row["publish_time"]),
            "event_time": ms(row["event_time"]),
            "properties": dict(row["properties"]),
            "batch_index": -1 if row["batch_index"] is None else row["batch_index"],
        }
        for row in rows
    ]


@pytest.mark.parametrize("batching", [False, True], ids=["single", "batched"])
@pytest.mark.parametrize("codec", CODECS)
def test_rows_equal_what_the_official_client_consumes(server: ProcessCluster, codec: str, batching: bool) -> None:
    topic = f"golden-{codec}-{batching}"
    with client_of(server.service_url) as client:
        settings = {"batching_enabled": batching, "batching_max_messages": 25, "batching_max_publish_delay_ms": 500}
        producer = client.create_producer(topic, compression_type=CODECS[codec], **settings)
        for number in range(COUNT):
            fields: dict[str, Any] = {}
            if number % 2:
                fields["partition_key"] = f"key-é-{number}"
            if number % 3:
                fields["properties"] = {"n": str(number), "✈": ""}
            if number % 5:
                fields["event_timestamp"] = 1_600_000_000_000 + number
            # Never empty: of an empty message the official client makes a zlib stream that it refuses itself.
            producer.send_async(b"%d" % number * (1 + number % 7 * 40), lambda *_: None, **fields)
        producer.flush()
    rows = scanned(server, topic)
    assert rows == consumed(server, topic, COUNT)
    assert {row["batch_index"] >= 0 for row in rows} == {batching}


@pytest.mark.parametrize("codec", CODECS)
def test_a_message_in_chunks_equals_what_the_official_client_consumes(server: ProcessCluster, codec: str) -> None:
    topic = f"golden-chunks-{codec}"
    payload = random.Random(7).randbytes(8 << 20) + bytes(range(256)) * (4 << 12)  # it is cut after it is compressed
    with client_of(server.service_url) as client:
        producer = client.create_producer(topic, compression_type=CODECS[codec], chunking_enabled=True, batching_enabled=False)
        for _ in range(2):
            producer.send(payload, partition_key="k")
            producer.send(b"small")
    rows, expected = scanned(server, topic), consumed(server, topic, 4)
    assert [row["value"] == payload for row in rows] == [True, False, True, False]
    # The position of a message in chunks is that of its last chunk.
    assert rows == expected
    assert scan(topic, service_url=server.service_url, mode="entries").read_all().num_rows >= 6
