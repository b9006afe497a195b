"""Traps 43 to 46 of protocol.md §27: what the Python client's own test suite asks of the HTTP side, asked in its way.

Its helpers send every body as JSON, take 409 for success and any other error for a failure; its set-up sends whole namespaces.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pulsar
import pytest

from cepheid_testkit import ProcessCluster
from tests.e2e.official_client import EARLIEST, TIMEOUT_MS, assert_silent, client_of, payloads_of, publish, receive

Shared = pulsar.ConsumerType.Shared
ANYBODY = {"auth_policies": {"namespace_auth": {"anonymous": ["produce", "consume"]}}, "replication_clusters": ["standalone"]}


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    """Its own, because tests change policies of public/default."""
    with ProcessCluster() as cluster:
        yield cluster
        assert "Traceback" not in cluster.log_text, cluster.log_text[-4000:]


def ask(cluster: ProcessCluster, method: str, path: str, body: str | None = None) -> tuple[int, str]:
    request = urllib.request.Request(f"{cluster.admin_url}/admin/v2/{path}", None if body is None else body.encode(), method=method)
    request.add_header("Accept", "application/json")
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def put_twice(cluster: ProcessCluster, path: str, body: Any, *, created: int = 204) -> None:
    text = body if isinstance(body, str) else json.dumps(body, separators=(",", ":"))
    assert ask(cluster, "PUT", path, text) == (created, "")
    status, answer = ask(cluster, "PUT", path, text)
    assert status == 409, answer
    assert json.loads(answer)["reason"]


@pytest.mark.slow
def test_trap_43_a_partitioned_topic_is_a_bare_number_and_409_when_it_is_there(cluster: ProcessCluster, topic: str) -> None:
    put_twice(cluster, f"persistent/public/default/{topic}/partitions", "3")
    full = f"persistent://public/default/{topic}"
    with client_of(cluster.service_url) as client:
        partitions = [f"{full}-partition-{n}" for n in range(3)]
        assert client.get_topic_partitions(full) == partitions
        assert client.get_topic_partitions(f"{full}-not") == [f"{full}-not"]
        consumer = client.subscribe(full, "s", Shared)
        reader = client.create_reader(full, pulsar.MessageId.earliest)
        publish(client, full, [b"hello"])
        message = consumer.receive(TIMEOUT_MS)
        assert (message.data(), message.topic_name() in partitions) == (b"hello", True)
        assert reader.read_next(TIMEOUT_MS).data() == b"hello"


def test_trap_44_deduplication_is_turned_on_and_off(cluster: ProcessCluster, topic: str) -> None:
    """In force at the next producer, which is what the suite creates right behind."""
    path = "namespaces/public/default/deduplication"
    assert ask(cluster, "POST", path, "true") == (204, "")
    with client_of(cluster.service_url) as client:
        producer = client.create_producer(topic, producer_name="my-producer-name")
        assert producer.last_sequence_id() == -1
        consumer = client.subscribe(topic, "s")
        for sequence_id in (0, 1, 2, 1, 2):
            producer.send(b"%d" % sequence_id, sequence_id=sequence_id)
        assert producer.last_sequence_id() == 2
        assert payloads_of(receive(consumer, 3)) == [b"0", b"1", b"2"]
        producer.close()
        producer = client.create_producer(topic, producer_name="my-producer-name")
        assert producer.last_sequence_id() == 2
        producer.send(b"1", sequence_id=1)
        assert_silent(consumer, 100)
    assert ask(cluster, "POST", path, "false") == (204, "")
    assert ask(cluster, "GET", path) == (200, "false")


def test_trap_44_compaction_is_refused_as_long_as_there_is_none(cluster: ProcessCluster, topic: str) -> None:
    """The suite asks until a status says neither RUNNING nor an error: no made-up status may tell it SUCCESS."""
    with client_of(cluster.service_url) as client:
        publish(client, topic, [b"0", b"1"])
    for method, body in (("PUT", ""), ("GET", None)):
        status, answer = ask(cluster, method, f"persistent/public/default/{topic}/compaction", body)
        assert status == 501
        assert "compaction" in json.loads(answer)["reason"]


def test_trap_44_the_strategy_of_schemas_is_a_json_string_answered_with_204(cluster: ProcessCluster, topic: str) -> None:
    class Old(pulsar.schema.Record):  # type: ignore[misc]  # the client has no types
        name = pulsar.schema.String()
        age = pulsar.schema.Integer()

    class New(pulsar.schema.Record):  # type: ignore[misc]
        _sorted_fields = True
        name = pulsar.schema.String()
        age = pulsar.schema.Integer(required=True)

    assert ask(cluster, "PUT", "namespaces/public/default/schemaCompatibilityStrategy", '"FORWARD"') == (204, "")
    with client_of(cluster.service_url) as client:
        old = client.create_producer(topic, schema=pulsar.schema.AvroSchema(Old))
        consumer = client.subscribe(topic, "s", schema=pulsar.schema.AvroSchema(Old))
        new = client.create_producer(topic, schema=pulsar.schema.AvroSchema(New))
        old.send(Old(name="a", age=1))
        new.send(New(name="b", age=2))
        assert [(m.value().name, m.value().age) for m in receive(consumer, 2)] == [("a", 1), ("b", 2)]


def test_trap_45_clusters_tenants_and_namespaces_are_put(cluster: ProcessCluster) -> None:
    """All that its set-up does, again and again on one server; two suites in one cluster have one cluster more."""
    here = {
        "serviceUrl": "http://localhost:8080/",
        "serviceUrlTls": "https://localhost:8443/",
        "brokerServiceUrl": "pulsar://localhost:6650/",
        "brokerServiceUrlTls": "pulsar+ssl://localhost:6651/",
    }
    assert ask(cluster, "PUT", "clusters/standalone", json.dumps(here))[0] == 409
    put_twice(cluster, "clusters/standalone-0", here, created=200)
    tenant = {"adminRoles": ["anonymous"], "allowedClusters": ["standalone"]}
    for body in (tenant, {**tenant, "allowedClusters": ["standalone-0"]}):
        assert ask(cluster, "PUT", "tenants/public", json.dumps(body))[0] == 409
    put_twice(cluster, "tenants/private", {"adminRoles": [], "allowedClusters": ["standalone"]})
    for body in (ANYBODY, {"replication_clusters": ["standalone-0"]}):
        assert ask(cluster, "PUT", "namespaces/public/default", json.dumps(body))[0] == 409
    for namespace in ("default-2", "default-3", "test-backlog-quotas"):
        put_twice(cluster, f"namespaces/public/{namespace}", ANYBODY)
    put_twice(cluster, "namespaces/public/default-4", {**ANYBODY, "encryption_required": True})
    assert ask(cluster, "GET", "namespaces/public/default-4/encryptionRequired") == (200, "true")
    restricted = {**ANYBODY, "auth_policies": {"namespace_auth": {"token-principal": ["produce", "consume"]}}}
    status, answer = ask(cluster, "PUT", "namespaces/private/auth", json.dumps(restricted))
    assert (status, "auth_policies" in answer) == (501, True), "there are no users yet that it could be kept from"


def test_trap_45_topics_of_two_namespaces_in_one_consumer(cluster: ProcessCluster, topic: str) -> None:
    assert ask(cluster, "PUT", "namespaces/public/another", json.dumps(ANYBODY)) == (204, "")
    topics = [f"persistent://public/{namespace}/{topic}" for namespace in ("default", "another")]
    for name, partitions in zip(topics, ("2", "4"), strict=True):
        assert ask(cluster, "PUT", f"{name.replace('://', '/')}/partitions", partitions)[0] == 204
    with client_of(cluster.service_url) as client:
        consumer = client.subscribe(topics, "s", Shared, receiver_queue_size=10)
        for name in topics:
            publish(client, name, [b"%d" % n for n in range(100)])
        assert sorted(map(int, payloads_of(receive(consumer, 200)))) == sorted([*range(100), *range(100)])
        assert_silent(consumer, 100)


def test_trap_46_the_defaults_are_those_that_the_suite_configures(cluster: ProcessCluster) -> None:
    settings = json.loads(ask(cluster, "GET", "brokers/configuration/runtime")[1])
    wanted = {
        "topic_creation.allowed": True,
        "topic_creation.topic_type": "non-partitioned",
        "connection.keepalive_s": 30.0,
        "dispatch.max_unacked_messages": 50_000,
    }
    assert {
        name: json.loads(settings[name]) if name != "topic_creation.topic_type" else settings[name] for name in wanted
    } == wanted


def test_trap_46_topics_are_made_by_use_and_redeliveries_are_counted_within_batches(cluster: ProcessCluster, topic: str) -> None:
    with client_of(cluster.service_url) as client:
        options = {"batching_enabled": True, "batching_max_messages": 10, "batching_max_publish_delay_ms": 1000}
        publish(client, topic, [b"%d" % n for n in range(10)], **options)
        assert client.get_topic_partitions(topic) == [f"persistent://public/default/{topic}"]
        consumer = client.subscribe(
            topic,
            "s",
            Shared,
            initial_position=EARLIEST,
            batch_index_ack_enabled=True,
            negative_ack_redelivery_delay_ms=100,
        )
        for message in receive(consumer, 10, acknowledge=False):
            if int(message.data()) < 7:
                consumer.acknowledge(message)
            else:
                consumer.negative_acknowledge(message)
        again = receive(consumer, 3)
        assert [(message.data(), message.redelivery_count()) for message in again] == [(b"7", 1), (b"8", 1), (b"9", 1)]


@pytest.mark.slow
def test_trap_46_a_consumer_holds_50_000_unacknowledged_messages(cluster: ProcessCluster, topic: str) -> None:
    limit, batch = 50_000, 1000
    with client_of(cluster.service_url) as client:
        publish(client, topic, [b"x"] * (limit + 3 * batch), batching_enabled=True, batching_max_messages=batch)
        consumer = client.subscribe(topic, "s", Shared, initial_position=EARLIEST, receiver_queue_size=100_000)
        held = receive(consumer, limit, acknowledge=False)
        while True:
            try:
                held.append(consumer.receive(300))
            except pulsar.Timeout:
                break
        assert limit <= len(held) < limit + batch, "entries are whole"
        for message in held:
            consumer.acknowledge(message)
        receive(consumer, limit + 3 * batch - len(held))
