"""Policies set over the admin API, seen by the official client: in force without a restart or a reconnect."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pulsar
import pytest

from cepheid_testkit import ProcessCluster
from tests.e2e.official_client import EARLIEST, TIMEOUT_MS, client_of, payloads_of, receive

SOON_S = 20.0
"""A second is promised; these machines may be busy with something else for that long."""
Shared, Exclusive = pulsar.ConsumerType.Shared, pulsar.ConsumerType.Exclusive


@pytest.fixture
def admin(cluster: ProcessCluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cluster.admin_url, timeout=60) as client:
        yield client


@pytest.fixture
def client(cluster: ProcessCluster) -> Iterator[pulsar.Client]:
    with client_of(cluster.service_url) as client:
        yield client


def create(admin: httpx.Client, topic: str) -> str:
    """Its path, for policies of its own."""
    path = f"/admin/v2/persistent/public/default/{topic}"
    assert admin.put(path).status_code == 204
    return path


def set_policy(admin: httpx.Client, path: str, value: Any) -> None:
    answer = admin.post(path, json=value)
    assert answer.status_code == 204, answer.text


def refused_soon(attempt: Callable[[], Any], error: type[Exception]) -> None:
    deadline = time.monotonic() + SOON_S
    while time.monotonic() < deadline:
        try:
            attempt().close()
        except error:
            return
    raise AssertionError("the policy was never in force")


def works_soon(attempt: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + SOON_S
    while True:
        try:
            return attempt()
        except pulsar.PulsarException:
            assert time.monotonic() < deadline, "the policy was never lifted"


@pytest.mark.slow
def test_producers_are_limited_while_the_topic_is_open(admin: httpx.Client, client: pulsar.Client, topic: str) -> None:
    path = create(admin, topic)
    first = client.create_producer(topic)
    set_policy(admin, f"{path}/maxProducers", 1)
    refused_soon(lambda: client.create_producer(topic), pulsar.ProducerBusy)
    first.send(b"goes on")
    assert admin.delete(f"{path}/maxProducers").status_code == 204
    works_soon(lambda: client.create_producer(topic)).send(b"and more")


@pytest.mark.parametrize(("policy", "second"), [("maxConsumers", "other"), ("maxConsumersPerSubscription", "s")])
def test_consumers_are_limited(admin: httpx.Client, client: pulsar.Client, topic: str, policy: str, second: str) -> None:
    path = create(admin, topic)
    client.subscribe(topic, "s", consumer_type=Shared)
    set_policy(admin, f"{path}/{policy}", 1)
    refused_soon(lambda: client.subscribe(topic, second, consumer_type=Shared), pulsar.ConsumerBusy)
    assert admin.delete(f"{path}/{policy}").status_code == 204
    works_soon(lambda: client.subscribe(topic, second, consumer_type=Shared))


def test_types_of_subscriptions_are_limited_by_the_namespace(admin: httpx.Client, client: pulsar.Client) -> None:
    namespace = "/admin/v2/namespaces/public/typed"
    assert admin.put(namespace).status_code == 204
    topic = "persistent://public/typed/t"
    client.subscribe(topic, "before", consumer_type=Shared)
    set_policy(admin, f"{namespace}/subscriptionTypesEnabled", ["Exclusive"])
    refused_soon(lambda: client.subscribe(topic, "s", consumer_type=Shared), pulsar.NotAllowedError)
    client.subscribe(topic, "s", consumer_type=Exclusive)
    set_policy(admin, "/admin/v2/persistent/public/typed/t/subscriptionTypesEnabled", ["Shared"])
    works_soon(lambda: client.subscribe(topic, "t", consumer_type=Shared))


def test_subscriptions_are_not_created_by_consumers_where_that_is_off(
    admin: httpx.Client, client: pulsar.Client, topic: str
) -> None:
    path = create(admin, topic)
    set_policy(admin, f"{path}/autoSubscriptionCreation", {"allowAutoSubscriptionCreation": False})
    refused_soon(lambda: client.subscribe(topic, "s"), pulsar.PulsarException)
    assert admin.put(f"{path}/subscription/s").status_code == 204
    client.subscribe(topic, "s")


def test_deduplication_begins_while_the_producer_is_connected(admin: httpx.Client, client: pulsar.Client, topic: str) -> None:
    path = create(admin, topic)
    consumer = client.subscribe(topic, "s", initial_position=EARLIEST)
    producer = client.create_producer(topic, producer_name="p", initial_sequence_id=0)
    producer.send(b"1", sequence_id=1)
    set_policy(admin, f"{path}/deduplicationEnabled", True)

    def stored() -> int:
        return int(admin.get(f"{path}/internalStats").json()["numberOfEntries"])

    before, deadline = stored(), time.monotonic() + SOON_S
    producer.send(b"1 again", sequence_id=1)
    while stored() > before:
        assert time.monotonic() < deadline, "what is sent again is stored again"
        before = stored()
        producer.send(b"1 again", sequence_id=1)
    producer.send(b"2", sequence_id=2)
    producer.send(b"2 again", sequence_id=2)
    producer.send(b"3", sequence_id=3)
    got = payloads_of(receive(consumer, before + 2))
    assert (got[0], got[-2:]) == (b"1", [b"2", b"3"])
    assert set(got[1:-2]) <= {b"1 again"}


def test_topics_are_created_as_the_namespace_says(admin: httpx.Client, client: pulsar.Client) -> None:
    namespace = "/admin/v2/namespaces/public/creating"
    assert admin.put(namespace).status_code == 204
    override = {"allowAutoTopicCreation": True, "topicType": "partitioned", "defaultNumPartitions": 3}
    set_policy(admin, f"{namespace}/autoTopicCreation", override)
    assert len(client.get_topic_partitions("persistent://public/creating/split")) == 3
    set_policy(admin, f"{namespace}/maxTopicsPerNamespace", 3)
    with pytest.raises(pulsar.PulsarException):
        client.create_producer("persistent://public/creating/more")
    set_policy(admin, f"{namespace}/maxTopicsPerNamespace", 0)
    set_policy(admin, f"{namespace}/autoTopicCreation", {"allowAutoTopicCreation": False})
    with pytest.raises(pulsar.PulsarException):
        client.create_producer("persistent://public/creating/never")


@pytest.mark.slow
def test_policies_survive_a_restart() -> None:
    with ProcessCluster() as cluster:
        with httpx.Client(base_url=cluster.admin_url, timeout=60) as admin:
            path = create(admin, "t")
            set_policy(admin, f"{path}/maxProducers", 1)
            set_policy(
                admin, "/admin/v2/namespaces/public/default/retention", {"retentionTimeInMinutes": 5, "retentionSizeInMB": 5}
            )
        cluster.kill()
        cluster.start()
        with httpx.Client(base_url=cluster.admin_url, timeout=60) as admin, client_of(cluster.service_url) as client:
            assert admin.get(f"{path}/maxProducers").json() == 1
            assert admin.get(f"{path}/retention", params={"applied": "true"}).json()["retentionSizeInMB"] == 5
            first = client.create_producer("t")
            with pytest.raises(pulsar.ProducerBusy):
                client.create_producer("t")
            first.send(b"x", partition_key="k")
            reader = client.create_reader("t", pulsar.MessageId.earliest)
            assert reader.read_next(TIMEOUT_MS).data() == b"x"
