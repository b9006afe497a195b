"""Topics as users of the official client see them: growing, patterns, non-persistent ones, deletion under their feet, odd names.

Tests with a trap in their name guard against that trap of protocol.md §27.
"""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from contextlib import suppress
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import pulsar
import pytest

from cepheid_testkit import ProcessCluster
from tests.e2e.official_client import (
    AT_ONCE_S,
    EARLIEST,
    TIMEOUT_MS,
    assert_silent,
    client_of,
    payloads_of,
    publish,
    receive,
    wait_for,
)


def ask(cluster: ProcessCluster, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """Status and answer of /admin/v2/…"""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"{cluster.admin_url}/admin/v2/{path}", data, {"Content-Type": "application/json"}, method=method
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read()
            return answer.status, json.loads(text) if text else None
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def done(cluster: ProcessCluster, method: str, path: str, body: Any = None) -> Any:
    status, answer = ask(cluster, method, path, body)
    assert status in (200, 204), answer
    return answer


def namespace(cluster: ProcessCluster, name: str) -> str:
    """public/`name`, so that lists show one test's topics."""
    done(cluster, "PUT", f"namespaces/public/{name}", {})
    return f"public/{name}"


# Growing


@pytest.mark.slow
def test_a_message_in_a_new_partition_is_never_missed(cluster: ProcessCluster, topic: str) -> None:
    path = f"persistent/public/default/{topic}"
    done(cluster, "PUT", f"{path}/partitions", 1)
    with client_of(cluster.service_url) as client:
        consumer = client.subscribe(topic, "s", pulsar.ConsumerType.Shared)
        done(cluster, "POST", f"{path}/partitions", 3)
        assert done(cluster, "GET", f"{path}/partitions")["partitions"] == 3
        assert client.get_topic_partitions(topic) == [f"persistent://public/default/{topic}-partition-{n}" for n in range(3)]
        sent = [b"%d" % n for n in range(30)]
        with client_of(cluster.service_url) as other:  # asks for the partitions anew
            publish(other, topic, sent, message_routing_mode=pulsar.PartitionsRoutingMode.RoundRobinDistribution)
            late = other.subscribe(topic, "s", pulsar.ConsumerType.Shared)  # at the latest, were it not there already
            received = []
            while len(received) < len(sent):
                for each in (consumer, late):
                    try:
                        received.append(each.receive(100).data())
                    except pulsar.Timeout:
                        continue
            assert sorted(received) == sorted(sent)
        assert ask(cluster, "POST", f"{path}/partitions", 2)[0] == 422


@pytest.mark.parametrize("domain", ["persistent", "non-persistent"])
def test_a_message_of_a_partition_has_the_same_id_for_its_producer_and_its_consumers(
    cluster: ProcessCluster, topic: str, domain: str
) -> None:
    name = f"{domain}://public/default/{topic}"
    done(cluster, "PUT", f"{domain}/public/default/{topic}/partitions", 3)
    with client_of(cluster.service_url) as client:
        consumers = [client.subscribe(name, subscription) for subscription in ("one", "two")]
        producer = client.create_producer(name, batching_enabled=False)
        for n in range(6):
            sent = producer.send(b"%d" % n)
            for consumer in consumers:
                (message,) = receive(consumer, 1)
                assert message.data() == b"%d" % n
                assert message.message_id() == sent
                assert message.message_id().partition() == sent.partition() >= 0


@pytest.mark.slow
def test_a_connected_consumer_and_producer_hear_of_new_partitions(cluster: ProcessCluster, topic: str) -> None:
    """They ask every 60 s (C++: partitionsUpdateInterval; the Python client cannot set it)."""
    path = f"persistent/public/default/{topic}"
    done(cluster, "PUT", f"{path}/partitions", 1)
    with client_of(cluster.service_url) as client:
        consumer = client.subscribe(topic, "s", pulsar.ConsumerType.Shared)
        routing = pulsar.PartitionsRoutingMode.RoundRobinDistribution
        producer = client.create_producer(topic, message_routing_mode=routing)
        done(cluster, "POST", f"{path}/partitions", 2)
        sent: list[bytes] = []

        def second_is_used() -> bool:
            sent.append(b"%d" % len(sent))
            producer.send(sent[-1])
            return len(ask(cluster, "GET", f"{path}-partition-1/stats")[1]["publishers"]) > 0

        wait_for(second_is_used, "the producer opens the new partition", 100)
        for _ in range(4):
            sent.append(b"%d" % len(sent))
            producer.send(sent[-1])
        received = [message.data() for message in receive(consumer, len(sent))]
        assert sorted(received) == sorted(sent)
        assert ask(cluster, "GET", f"{path}-partition-1/stats")[1]["msgInCounter"] > 0


# Patterns


def ask_every_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the topics of a pattern: subscribe() takes the period, and forgets it (client 3.13)."""
    configuration = pulsar._pulsar.ConsumerConfiguration

    def asks_every_second() -> Any:
        made = configuration()
        made.pattern_auto_discovery_period(1)
        return made

    monkeypatch.setattr(pulsar._pulsar, "ConsumerConfiguration", asks_every_second)


@pytest.mark.slow
def test_trap_35_a_pattern_subscription_finds_topics_that_come_later_and_partitions_once(
    cluster: ProcessCluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = namespace(cluster, "patterns")
    ask_every_second(monkeypatch)
    with client_of(cluster.service_url) as client:
        publish(client, f"{where}/red-1", [b"1"])
        done(cluster, "PUT", f"persistent/{where}/red-split/partitions", 2)
        publish(client, f"{where}/blue", [b"never"])
        consumer = client.subscribe(re.compile(f"persistent://{where}/red-.*"), "s", initial_position=EARLIEST)
        publish(client, f"{where}/red-split", [b"2"])
        publish(client, f"{where}/red-2", [b"3"])
        assert sorted(payloads_of(receive(consumer, 3))) == [b"1", b"2", b"3"]
        assert_silent(consumer)


@pytest.mark.slow
def test_a_pattern_subscription_may_come_before_its_namespace(cluster: ProcessCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    ask_every_second(monkeypatch)
    where = f"public/{uuid4().hex}"
    with client_of(cluster.service_url) as client:
        consumer = client.subscribe(re.compile(f"persistent://{where}/.*"), "s", initial_position=EARLIEST)
        done(cluster, "PUT", f"namespaces/{where}", {})
        publish(client, f"{where}/t", [b"first"])
        assert payloads_of(receive(consumer, 1)) == [b"first"]


# Deletion beside others


def test_trap_13_a_topic_that_goes_leaves_the_others_of_the_connection_alone(cluster: ProcessCluster, topic: str) -> None:
    """A client drops the connection on a refused lookup unless the text has the words that it knows."""
    with client_of(cluster.service_url) as client:
        steady = client.create_producer(f"{topic}-steady")
        done(cluster, "PUT", f"persistent/public/default/{topic}/partitions", 4)
        producer = client.create_producer(topic)
        before = stats(cluster, f"{topic}-steady")["publishers"][0]["connectedSince"]
        producer.send(b"a")
        done(cluster, "DELETE", f"persistent/public/default/{topic}/partitions?force=true")
        for n in range(20):
            steady.send(b"%d" % n)
        assert stats(cluster, f"{topic}-steady")["publishers"][0]["connectedSince"] == before, "its connection was lost"


def stats(cluster: ProcessCluster, topic: str, domain: str = "persistent") -> Any:
    return done(cluster, "GET", f"{domain}/public/default/{topic}/stats")


# Non-persistent topics


def test_trap_40_a_non_persistent_topic_delivers_to_who_is_there(cluster: ProcessCluster, topic: str) -> None:
    name = f"non-persistent://public/default/{topic}"
    with client_of(cluster.service_url) as client:
        lost = publish(client, name, [b"nobody is there"])
        consumer = client.subscribe(name, "s", initial_position=EARLIEST)
        ids = publish(client, name, [b"%d" % n for n in range(10)])
        messages = receive(consumer, 10)
        assert payloads_of(messages) == [b"%d" % n for n in range(10)]
        for message_id in (*lost, *ids, *(message.message_id() for message in messages)):
            assert (message_id.ledger_id(), message_id.entry_id()) == (0, 0), "ids say nothing here"
        assert_silent(consumer)
        with pytest.raises(pulsar.PulsarException):
            consumer.seek(pulsar.MessageId.earliest)
        with pytest.raises(pulsar.PulsarException):
            consumer.get_last_message_id()
        assert stats(cluster, topic, "non-persistent")["msgInCounter"] == 11


@pytest.mark.parametrize("kind", [pulsar.ConsumerType.Shared, pulsar.ConsumerType.KeyShared, pulsar.ConsumerType.Failover])
def test_consumers_share_a_non_persistent_topic(cluster: ProcessCluster, topic: str, kind: pulsar.ConsumerType) -> None:
    name = f"non-persistent://public/default/{topic.replace('.', '-')}"
    with client_of(cluster.service_url) as client:
        consumers = [client.subscribe(name, "s", kind, consumer_name=f"c{n}") for n in range(2)]
        producer = client.create_producer(name)
        for n in range(100):
            producer.send(b"%d" % n, partition_key=f"key-{n % 10}")
        by_consumer: list[list[pulsar.Message]] = [[], []]
        while sum(map(len, by_consumer)) < 100:
            for consumer, got in zip(consumers, by_consumer, strict=True):
                with suppress(pulsar.Timeout):
                    while True:
                        got.append(consumer.receive(100))
        numbers = [[int(message.data()) for message in got] for got in by_consumer]
        assert sorted(numbers[0] + numbers[1]) == list(range(100))
        assert all(part == sorted(part) for part in numbers), "in order, as nothing is ever sent again"
        keys = [{message.partition_key() for message in got} for got in by_consumer]
        match kind:
            case pulsar.ConsumerType.Shared:
                assert all(numbers)
            case pulsar.ConsumerType.KeyShared:
                assert not keys[0] & keys[1]
            case _:
                assert [len(part) for part in numbers] == [100, 0]


def test_a_partitioned_non_persistent_topic(cluster: ProcessCluster, topic: str) -> None:
    done(cluster, "PUT", f"non-persistent/public/default/{topic}/partitions", 3)
    name = f"non-persistent://public/default/{topic}"
    with client_of(cluster.service_url) as client:
        consumer = client.subscribe(name, "s")
        publish(client, name, [b"%d" % n for n in range(30)])
        assert sorted(payloads_of(receive(consumer, 30, acknowledge=False))) == sorted(b"%d" % n for n in range(30))


# Deletion


@pytest.mark.parametrize("partitions", [0, 3])
def test_deleting_under_connected_clients(cluster: ProcessCluster, topic: str, partitions: int) -> None:
    """Without force it is refused; with force everything goes. Clients come back by themselves and, as topics are made by use
    here, make it anew, empty: the partitions of a partitioned one as plain topics, as with Pulsar."""
    name = topic.replace("[", "-").replace("]", "")
    path = f"persistent/public/default/{name}{'/partitions' if partitions else ''}"
    if partitions:
        done(cluster, "PUT", path, partitions)
    with client_of(cluster.service_url) as client:
        producer = client.create_producer(name)
        consumer = client.subscribe(name, "s", pulsar.ConsumerType.Shared)
        for n in range(6):
            producer.send(b"before %d" % n)
        status, refused = ask(cluster, "DELETE", path)
        assert status == 412, refused
        assert "producers" in refused["reason"]
        began = time.monotonic()
        done(cluster, "DELETE", f"{path}?force=true")
        assert time.monotonic() - began < AT_ONCE_S
        for n in range(6):
            producer.send(b"after %d" % n)
        seen: set[bytes] = set()
        while len([data for data in seen if data.startswith(b"after")]) < 6:
            message = consumer.receive(TIMEOUT_MS)  # some from before may have waited in the client
            seen.add(message.data())
        listed = done(cluster, "GET", "persistent/public/default")
        mine = [found for found in listed if f"/{name}" in found]
        assert mine == [
            f"persistent://public/default/{name}{f'-partition-{n}' if partitions else ''}" for n in range(partitions or 1)
        ]
        if partitions:
            assert ask(cluster, "GET", path)[0] == 404


def test_a_subscription_is_deleted_under_its_consumers(cluster: ProcessCluster, topic: str) -> None:
    with client_of(cluster.service_url) as client:
        publish(client, topic, [b"a"])
        client.subscribe(topic, "s", initial_position=EARLIEST)
        path = f"persistent/public/default/{topic}/subscription/s"
        assert ask(cluster, "DELETE", path)[0] == 412
        done(cluster, "DELETE", f"{path}?force=true")


# Names


@pytest.mark.parametrize(
    "local_name",
    [
        "a+b c",
        "percent%2Fencoded",
        "%",
        "ünïcödé-主题-🎈",
        "quo'te\"s&<tags>",
        "semi;colon:comma,",
        "...",
        "-partition-",
        "x-partition-01",
        "{curly}[square]",
        "partitions",
        "q?uestion#hash",
        "long-" + "n" * 250,
    ],
)
def test_a_topic_may_have_any_name(cluster: ProcessCluster, local_name: str) -> None:
    where = "public/default"
    with client_of(cluster.service_url) as client:
        consumer = client.subscribe(f"persistent://{where}/{local_name}", "s")
        producer = client.create_producer(f"persistent://{where}/{local_name}")
        producer.send(b"a")
        assert payloads_of(receive(consumer, 1)) == [b"a"]
        assert f"persistent://{where}/{local_name}" in done(cluster, "GET", f"persistent/{where}")
        segment = quote(local_name, safe="")
        found = done(cluster, "GET", f"persistent/{where}/{segment}/stats")
        assert found["msgInCounter"] == 1
        done(cluster, "PUT", f"persistent/{where}/{segment}/unload")
        producer.send(b"b")
        while (message := consumer.receive(TIMEOUT_MS)).data() != b"b":
            assert message.data() == b"a", "its acknowledgement was on its way when the topic was unloaded"
        done(cluster, "DELETE", f"persistent/{where}/{segment}?force=true")


@pytest.mark.parametrize(
    "name",
    [
        "persistent://public/default/a/b",
        "persistent://public/default/",
        "wrong://public/default/t",
        "persistent://public/default/..",
        "persistent://public/./t",
    ],
)
def test_what_is_no_name_is_refused_at_once(cluster: ProcessCluster, name: str) -> None:
    with client_of(cluster.service_url) as client:
        began = time.monotonic()
        with pytest.raises((pulsar.PulsarException, ValueError)):
            client.create_producer(name)
        assert time.monotonic() - began < AT_ONCE_S
