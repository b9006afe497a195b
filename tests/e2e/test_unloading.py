"""A topic that is unloaded under load: its clients come back, and every message is there once and in order."""

from __future__ import annotations

import time
import urllib.request

import pulsar

from cepheid_testkit import ProcessCluster
from tests.e2e.official_client import EARLIEST, TIMEOUT_MS, assert_silent, client_of


def unload(cluster: ProcessCluster, topic: str) -> None:
    url = f"{cluster.admin_url}/admin/v2/persistent/public/default/{topic}/unload"
    with urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=10) as answer:
        assert answer.status == 204


def test_unloading_while_publishing_and_consuming(cluster: ProcessCluster, topic: str) -> None:
    count = 5000
    with client_of(cluster.service_url) as client:
        consumer = client.subscribe(topic, "s", initial_position=EARLIEST)
        producer = client.create_producer(topic, block_if_queue_full=True)
        results: list[object] = []
        received: list[int] = []

        def receive_some(timeout_ms: int) -> None:
            try:
                while True:
                    message = consumer.receive(timeout_ms)
                    received.append(int(message.data()))
                    consumer.acknowledge(message)
            except pulsar.Timeout:
                return

        for n in range(count):
            producer.send_async(b"%d" % n, lambda result, _: results.append(result))
            if n % 1000 == 500:
                unload(cluster, topic)
                receive_some(1)
        producer.flush()
        assert results == [pulsar.Result.Ok] * count
        deadline = time.monotonic() + 20
        while len(set(received)) < count and time.monotonic() < deadline:
            receive_some(100)
        assert list(dict.fromkeys(received)) == list(range(count)), "first deliveries are in order, and none is missing"
        assert_silent(consumer)
        reader = client.create_reader(topic, pulsar.MessageId.earliest)
        stored = []
        while reader.has_message_available():
            stored.append(int(reader.read_next(TIMEOUT_MS).data()))
        assert stored == list(range(count))[-len(stored) :], "what was acknowledged may be trimmed; nothing is stored twice"
