"""Traps 10 to 14 of protocol.md §27, with the official client: finding the broker of a topic."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pulsar
import pytest

from cepheid_metadata import StoreUnavailableError
from cepheid_testkit import ProcessCluster
from cepheid_wire import CommandType, TopicName
from cepheid_wire import pulsar_api_pb2 as pb
from tests.e2e.official_client import AT_ONCE_S, EARLIEST, client_of, payloads_of, publish, receive
from tests.e2e.tapped_broker import TappedBroker


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    """Listens on all addresses."""
    with ProcessCluster(flags=("--host", "0.0.0.0")) as cluster:
        yield cluster
        assert "Traceback" not in cluster.log_text, cluster.log_text[-4000:]


def test_trap_10_partitions_are_asked_for_and_nothing_fails(tapped: TappedBroker, topic: str) -> None:
    """A plain topic has 0 partitions, one that is not there as well, and one that is named like a partition."""
    since = len(tapped.seen)
    with client_of(tapped.service_url) as client:
        full = f"persistent://public/default/{topic}"
        assert client.get_topic_partitions(topic) == [full]
        assert client.get_topic_partitions(f"{topic}-partition-3") == [f"{full}-partition-3"]
        publish(client, f"{topic}-partition-3", [b"a"])
    answers = [frame.body for frame in tapped.frames(CommandType.PARTITIONED_METADATA_RESPONSE, since=since)]
    success = pb.CommandPartitionedTopicMetadataResponse.Success
    assert [(answer.response, answer.partitions) for answer in answers] == [(success, 0)] * 3


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["binary", "http"])
def test_trap_11_and_14_refusals_of_lookups_come_at_once(cluster: ProcessCluster, scheme: str) -> None:
    """An error outside of the lookup's own reply costs the whole timeout."""
    url = cluster.service_url if scheme == "binary" else cluster.admin_url
    began = time.monotonic()
    with client_of(url) as client:
        with pytest.raises(pulsar.PulsarException):
            client.create_producer("persistent://public/nowhere/t")
        with pytest.raises(pulsar.PulsarException):
            client.subscribe("persistent://nowhere/nowhere/t", "s")
    assert time.monotonic() - began < AT_ONCE_S


def test_trap_12_lookups_lead_to_the_advertised_address(tapped: TappedBroker, topic: str) -> None:
    """The broker listens on another port than the one that it advertises, as behind a port mapping."""
    since, connections = len(tapped.seen), tapped.connections
    with client_of(tapped.service_url) as client:
        publish(client, topic, [b"a"])
    (found,) = tapped.frames(CommandType.LOOKUP_RESPONSE, since=since)
    assert (found.body.brokerServiceUrl, found.body.proxy_through_service_url) == (tapped.service_url, False)
    assert str(tapped.world.port) not in tapped.service_url
    assert tapped.frames(CommandType.SEND, since=since), "it publishes by way of the tap"
    assert tapped.connections == connections + 1


@pytest.mark.parametrize("reached", ["127.0.0.1", "127.0.0.2"])
def test_trap_12_a_broker_on_all_addresses_tells_the_one_that_was_reached(
    cluster: ProcessCluster, topic: str, reached: str
) -> None:
    """Not 0.0.0.0, which is reached on this machine only. Over HTTP, where the answer can be read."""
    admin_url = cluster.admin_url.replace("127.0.0.1", reached)
    with urllib.request.urlopen(f"{admin_url}/lookup/v2/topic/persistent/public/default/t", timeout=60) as answer:
        assert json.load(answer)["brokerUrl"] == f"pulsar://{reached}:{cluster.port}"
    for url in (admin_url, f"pulsar://{reached}:{cluster.port}"):
        with client_of(url) as client:
            assert publish(client, topic.replace(".", "-"), [b"a"])


def test_trap_12_a_listener_that_is_not_there_is_refused_at_once(tapped: TappedBroker, topic: str) -> None:
    """Its address may be one that this client cannot reach, so that it would try until its timeout."""
    began = time.monotonic()
    with client_of(tapped.service_url, listener_name="inner") as client, pytest.raises(pulsar.NotAllowedError):
        client.create_producer(topic)
    assert time.monotonic() - began < AT_ONCE_S


def test_trap_13_a_lookup_that_has_to_wait_does_not_cost_the_connection(
    tapped: TappedBroker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client drops the connection on ServiceNotReady unless the text has words that it knows: others are publishing on it."""
    catalog = tapped.world.broker.catalog
    answer, refusals = catalog.partitions_or_create, iter(range(3))

    async def unavailable_at_first(name: TopicName, **options: Any) -> int:
        if str(name).endswith("-late") and next(refusals, None) is not None:
            raise StoreUnavailableError("planted")
        return await answer(name, **options)

    monkeypatch.setattr(catalog, "partitions_or_create", unavailable_at_first)
    since, connections = len(tapped.seen), tapped.connections
    with client_of(tapped.service_url) as client:
        steady = client.create_producer(topic)
        steady.send(b"before")
        client.create_producer(f"{topic}-late").send(b"late")
        steady.send(b"after")
    failed = pb.CommandPartitionedTopicMetadataResponse.Failed
    answers = [frame.body.response for frame in tapped.frames(CommandType.PARTITIONED_METADATA_RESPONSE, since=since)]
    assert answers.count(failed) == 3
    assert tapped.connections == connections + 1
    assert len(tapped.frames(CommandType.PRODUCER, since=since)) == 2, "nobody had to come back"


def test_trap_14_a_client_with_an_http_address(cluster: ProcessCluster, topic: str) -> None:
    """It needs brokerUrl and a TLS address, if an empty one: topics, partitions and patterns are looked up so."""
    with urllib.request.urlopen(f"{cluster.admin_url}/lookup/v2/topic/persistent/public/default/{topic}", timeout=60) as answer:
        found = json.load(answer)
    assert found.keys() == {"brokerUrl", "brokerUrlTls", "brokerUrlSsl", "httpUrl", "httpUrlTls", "nativeUrl"}
    assert (found["brokerUrl"], found["brokerUrlTls"]) == (cluster.service_url, "")
    with client_of(cluster.admin_url) as client:
        for letter in "ab":
            publish(client, f"{topic}-{letter}", [letter.encode()])
        consumer = client.subscribe(re.compile(f"persistent://public/default/{topic}-.*"), "s", initial_position=EARLIEST)
        assert sorted(payloads_of(receive(consumer, 2))) == [b"a", b"b"]
