"""The official client, given the admin API's address: lookup, partitions and topic lists over HTTP."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator

import pulsar
import pytest

from cepheid_testkit import ProcessCluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    with ProcessCluster() as cluster:
        yield cluster
        assert "Traceback" not in cluster.log_text


@pytest.fixture
def client(cluster: ProcessCluster) -> Iterator[pulsar.Client]:
    client = pulsar.Client(cluster.admin_url, operation_timeout_seconds=15, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    yield client
    client.close()


def put(cluster: ProcessCluster, path: str, body: bytes = b"") -> None:
    headers = {"Content-Type": "application/json"}  # urllib would call it a web form
    request = urllib.request.Request(f"{cluster.admin_url}/admin/v2{path}", data=body, headers=headers, method="PUT")
    with urllib.request.urlopen(request) as answer:
        assert answer.status == 204


@pytest.mark.slow
def test_publish_and_consume(client: pulsar.Client) -> None:
    consumer = client.subscribe("by-http", "s")
    client.create_producer("by-http").send(b"a")
    message = consumer.receive(30_000)
    consumer.acknowledge(message)
    assert message.data() == b"a"


def test_a_partitioned_topic(cluster: ProcessCluster, client: pulsar.Client) -> None:
    put(cluster, "/persistent/public/default/split/partitions", b"3")
    assert len(client.get_topic_partitions("split")) == 3
    producer = client.create_producer("split", message_routing_mode=pulsar.PartitionsRoutingMode.RoundRobinDistribution)
    for number in range(9):
        producer.send(b"%d" % number)
    consumer = client.subscribe("split", "s", initial_position=pulsar.InitialPosition.Earliest)
    assert sorted(consumer.receive(30_000).data() for _ in range(9)) == [b"%d" % number for number in range(9)]


def test_a_pattern_finds_its_topics(cluster: ProcessCluster, client: pulsar.Client) -> None:
    put(cluster, "/namespaces/public/patterns")
    for name in ("red", "green"):
        client.create_producer(f"persistent://public/patterns/{name}").send(name.encode())
    pattern = re.compile("persistent://public/patterns/.*")
    consumer = client.subscribe(pattern, "s", initial_position=pulsar.InitialPosition.Earliest)
    assert sorted(consumer.receive(30_000).data() for _ in range(2)) == [b"green", b"red"]


def test_a_topic_that_may_not_be_created(cluster: ProcessCluster, client: pulsar.Client) -> None:
    put(cluster, "/namespaces/public/closed", b'{"autoTopicCreationOverride": {"allowAutoTopicCreation": false}}')
    with pytest.raises(pulsar.PulsarException):
        client.create_producer("persistent://public/closed/t")
