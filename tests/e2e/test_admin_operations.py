"""What people do to topics that the official client uses: look into them, move subscriptions, end them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pulsar
import pytest

from cepheid_testkit import ProcessCluster
from cepheid_wire import decode_batch
from tests.e2e.official_client import EARLIEST, TIMEOUT_MS, assert_silent, client_of, payloads_of, publish, receive

FIRST = {"ledgerId": -1, "entryId": -1}


class Admin:
    def __init__(self, cluster: ProcessCluster) -> None:
        self.http = httpx.Client(base_url=f"{cluster.admin_url}/admin/v2/persistent/public/default", timeout=60)

    def __call__(self, method: str, path: str, body: Any = None) -> httpx.Response:
        answer = self.http.request(method, path, **({} if body is None else {"json": body}))
        assert answer.status_code < 300, f"{method} {path}: {answer.status_code} {answer.text}"
        return answer


@pytest.fixture(scope="module")
def admin(cluster: ProcessCluster) -> Iterator[Admin]:
    admin = Admin(cluster)
    yield admin
    admin.http.close()


COMPRESSIONS = ["NONE", "LZ4", "ZLib", "ZSTD", "SNAPPY"]


@pytest.mark.slow
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_peek_shows_what_any_producer_compressed(cluster: ProcessCluster, admin: Admin, topic: str, compression: str) -> None:
    admin("PUT", f"/{topic}/subscription/s", FIRST)
    kind = pulsar.CompressionType.__members__[compression]
    payload = b"words that repeat, " * 100
    with client_of(cluster.service_url) as client:
        producer = client.create_producer(topic, compression_type=kind)
        producer.send(payload, properties={"k": "✓"}, partition_key="key", event_timestamp=1_700_000_000_000)
    found = admin("GET", f"/{topic}/subscription/s/position/1")
    assert found.content == payload
    assert json.loads(found.headers["X-Pulsar-PROPERTY"]) == {"k": "✓"}
    assert found.headers["X-Pulsar-partition-key"] == "key"
    assert found.headers["X-Pulsar-event-time"] == "2023-11-14T22:13:20.000Z"
    assert "X-Pulsar-num-batch-message" not in found.headers


def test_a_batch_is_peeked_whole(cluster: ProcessCluster, admin: Admin, topic: str) -> None:
    admin("PUT", f"/{topic}/subscription/s", FIRST)
    with client_of(cluster.service_url) as client:
        batching = {"batching_enabled": True, "batching_max_publish_delay_ms": 500, "compression_type": pulsar.CompressionType.LZ4}
        publish(client, topic, [b"one", b"two", b"three"], **batching)
    found = admin("GET", f"/{topic}/subscription/s/position/1")
    count = int(found.headers["X-Pulsar-num-batch-message"])
    assert [bytes(body) for _, body in decode_batch(found.content, count)] == [b"one", b"two", b"three"]


def test_a_reset_goes_into_a_batch(cluster: ProcessCluster, admin: Admin, topic: str) -> None:
    with client_of(cluster.service_url) as client:
        consumer = client.subscribe(topic, "s", initial_position=EARLIEST)
        publish(client, topic, [b"0", b"1", b"2", b"3"], batching_enabled=True, batching_max_publish_delay_ms=500)
        ids = [message.message_id() for message in receive(consumer, 4)]
        assert ids[3].batch_index() == 3, "one batch"
        place = {"ledgerId": ids[0].ledger_id(), "entryId": ids[0].entry_id(), "batchIndex": 2}
        admin("POST", f"/{topic}/subscription/s/resetcursor", place)
        assert payloads_of(receive(consumer, 2)) == [b"2", b"3"]
        admin("POST", f"/{topic}/subscription/s/resetcursor", {**place, "isExcluded": True})
        assert payloads_of(receive(consumer, 1)) == [b"3"]
        assert_silent(consumer)


def test_a_connected_consumer_follows_a_reset_by_time_on_every_partition(cluster: ProcessCluster, admin: Admin, topic: str) -> None:
    admin("PUT", f"/{topic}/partitions", 2)
    with client_of(cluster.service_url) as client:
        consumer = client.subscribe(topic, "s", initial_position=EARLIEST)
        publish(client, topic, [b"old-0", b"old-1", b"old-2", b"old-3"], batching_enabled=False)
        receive(consumer, 4)
        between_ms = int(time.time() * 1000) + 1
        while time.time() * 1000 < between_ms:
            pass
        publish(client, topic, [b"new-0", b"new-1"], batching_enabled=False)
        receive(consumer, 2)
        admin("POST", f"/{topic}/subscription/s/resetcursor/{between_ms}")
        assert sorted(payloads_of(receive(consumer, 2))) == [b"new-0", b"new-1"]
        admin("POST", f"/{topic}/subscription/s/resetcursor/0")
        assert len(receive(consumer, 6)) == 6
        assert_silent(consumer)


@pytest.mark.parametrize("kind", [pulsar.ConsumerType.Exclusive, pulsar.ConsumerType.Shared, pulsar.ConsumerType.KeyShared])
def test_consumers_go_on_behind_what_was_skipped(cluster: ProcessCluster, admin: Admin, topic: str, kind: Any) -> None:
    with client_of(cluster.service_url) as client:
        # One message in the queue: the rest is at the broker while it is skipped.
        consumer = client.subscribe(topic, "s", kind, receiver_queue_size=1, initial_position=EARLIEST)
        publish(client, topic, [b"%d" % number for number in range(20)], batching_enabled=False)
        consumer.acknowledge(consumer.receive(TIMEOUT_MS))
        admin("POST", f"/{topic}/subscription/s/skip_all")
        publish(client, topic, [b"behind"], batching_enabled=False)
        received = []
        while not received or received[-1] != b"behind":
            received.append(consumer.receive(TIMEOUT_MS).data())
        assert len(received) <= 4, "what was on its way may come, nothing else"
        backlog = admin("GET", f"/{topic}/stats").json()["subscriptions"]["s"]["msgBacklog"]
        assert backlog == 1


def test_a_truncated_topic_is_empty_for_everybody(cluster: ProcessCluster, admin: Admin, topic: str) -> None:
    with client_of(cluster.service_url) as client:
        consumer = client.subscribe(topic, "s", initial_position=EARLIEST)
        publish(client, topic, [b"gone"] * 5)
        receive(consumer, 2, acknowledge=False)
        admin("DELETE", f"/{topic}/truncate")
        assert admin("GET", f"/{topic}/internalStats").json()["numberOfEntries"] == 0
        publish(client, topic, [b"after"])
        reader = client.create_reader(topic, pulsar.MessageId.earliest)
        assert reader.read_next(TIMEOUT_MS).data() == b"after"
