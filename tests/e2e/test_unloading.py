"""A topic that is unloaded under load: its clients come back, and every message is there once and in order."""

from __future__ import annotations

import json
import time
import urllib.request
from typing import Any

import pulsar
import pytest

from cepheid_testkit import ProcessCluster
from tests.e2e.official_client import EARLIEST, TIMEOUT_MS, assert_silent, client_of

pytestmark = pytest.mark.slow

KEEP = {"retention_policies": {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}}
"""A reader holds nothing: without it the ledgers that the subscription is done with may go while they are read."""


def put(cluster: ProcessCluster, path: str, body: Any = None) -> None:
    data = None if body is None else json.dumps(body).encode()
    url = f"{cluster.admin_url}/admin/v2/{path}"
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method="PUT")
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 204


def test_unloading_while_publishing_and_consuming(cluster: ProcessCluster, topic: str) -> None:
    count = 5000
    put(cluster, "namespaces/public/unloading", KEEP)
    name = f"public/unloading/{topic}"
    with client_of(cluster.service_url) as client:
        consumer = client.subscribe(f"persistent://{name}", "s", initial_position=EARLIEST)
        producer = client.create_producer(f"persistent://{name}", block_if_queue_full=True)
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
                put(cluster, f"persistent/{name}/unload")
                receive_some(1)
        producer.flush()
        assert results == [pulsar.Result.Ok] * count
        deadline = time.monotonic() + 60
        while len(set(received)) < count and time.monotonic() < deadline:
            receive_some(100)
        assert list(dict.fromkeys(received)) == list(range(count)), "first deliveries are in order, and none is missing"
        assert_silent(consumer)
        reader = client.create_reader(f"persistent://{name}", pulsar.MessageId.earliest)
        stored = []
        while reader.has_message_available():
            stored.append(int(reader.read_next(TIMEOUT_MS).data()))
        assert stored == list(range(count)), "everything is stored once"
