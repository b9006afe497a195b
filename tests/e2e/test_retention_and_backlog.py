"""By time and size, with the official client: messages that expire, quotas that stop a producer, data that is kept and given up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pulsar
import pytest

from cepheid_testkit import ProcessCluster
from tests.e2e.official_client import EARLIEST, assert_silent, client_of, payloads_of, publish, receive, wait_for

TENANT = "public"


class Namespace:
    """A namespace of one test, and its policies over the admin API."""

    def __init__(self, cluster: ProcessCluster, name: str) -> None:
        self.name = name
        self._http = httpx.Client(base_url=cluster.admin_url, timeout=60)
        self._call("PUT", f"/admin/v2/namespaces/{TENANT}/{name}", None)

    def topic(self, name: str) -> str:
        return f"persistent://{TENANT}/{self.name}/{name}"

    def set(self, policy: str, value: Any) -> None:
        self._call("POST", f"/admin/v2/namespaces/{TENANT}/{self.name}/{policy}", value)

    def remove(self, policy: str) -> None:
        self._call("DELETE", f"/admin/v2/namespaces/{TENANT}/{self.name}/{policy}", None)

    def stats(self, topic: str, query: str = "") -> dict[str, Any]:
        answer = self._http.get(f"/admin/v2/persistent/{TENANT}/{self.name}/{topic}/stats{query}")
        assert answer.status_code == 200, answer.text
        stats: dict[str, Any] = answer.json()
        return stats

    def internal(self, topic: str) -> dict[str, Any]:
        stats: dict[str, Any] = self._http.get(f"/admin/v2/persistent/{TENANT}/{self.name}/{topic}/internalStats").json()
        return stats

    def unload(self, topic: str) -> None:
        self._call("PUT", f"/admin/v2/persistent/{TENANT}/{self.name}/{topic}/unload", None)

    def _call(self, method: str, path: str, body: Any) -> None:
        answer = self._http.request(method, path, json=body)
        assert answer.status_code < 300, f"{method} {path}: {answer.status_code} {answer.text}"

    def close(self) -> None:
        self._http.close()


@pytest.fixture
def namespace(cluster: ProcessCluster, topic: str) -> Iterator[Namespace]:
    namespace = Namespace(cluster, topic)
    yield namespace
    namespace.close()


@pytest.fixture
def client(cluster: ProcessCluster) -> Iterator[pulsar.Client]:
    with client_of(cluster.service_url) as client:
        yield client


@pytest.mark.slow
def test_messages_expire(namespace: Namespace, client: pulsar.Client) -> None:
    consumer = client.subscribe(namespace.topic("t"), "s", initial_position=EARLIEST)
    consumer.close()
    publish(client, namespace.topic("t"), [b"old-1", b"old-2"], batching_enabled=True)
    namespace.set("messageTTL", 1)
    wait_for(lambda: namespace.stats("t")["subscriptions"]["s"]["msgBacklog"] == 0, "the messages expire")
    namespace.set("messageTTL", 3600)
    publish(client, namespace.topic("t"), [b"new"])
    consumer = client.subscribe(namespace.topic("t"), "s")
    assert payloads_of(receive(consumer, 1)) == [b"new"]
    assert_silent(consumer)
    assert namespace.stats("t")["subscriptions"]["s"]["totalMsgExpired"] >= 1


@pytest.mark.slow
def test_a_producer_above_the_quota_is_refused_until_the_backlog_is_small(namespace: Namespace, client: pulsar.Client) -> None:
    topic = namespace.topic("t")
    consumer = client.subscribe(topic, "s", initial_position=EARLIEST)
    namespace.set("retention", {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1})
    namespace.set("backlogQuota?backlogQuotaType=destination_storage", {"limitSize": 10_000, "policy": "producer_exception"})
    publish(client, topic, [b"x" * 1000] * 20, batching_enabled=False)
    wait_for(lambda: not namespace.stats("t")["publishers"] and _is_refused(client, topic), "a producer is refused")
    assert namespace.stats("t")["backlogQuotaLimitSize"] == 10_000
    receive(consumer, 20)
    wait_for(lambda: not _is_refused(client, topic), "producers are let in again")
    publish(client, topic, [b"after"])
    assert payloads_of(receive(consumer, 1)) == [b"after"]


def _is_refused(client: pulsar.Client, topic: str) -> bool:
    try:
        client.create_producer(topic).close()
    except pulsar.ProducerBlockedQuotaExceededException:
        return True
    return False


@pytest.mark.slow
def test_a_quota_by_eviction_lets_the_consumer_skip_the_oldest(namespace: Namespace, client: pulsar.Client) -> None:
    topic = namespace.topic("t")
    client.subscribe(topic, "s", initial_position=EARLIEST).close()
    publish(client, topic, [b"%02d" % number + b"x" * 1000 for number in range(20)], batching_enabled=False)
    namespace.set("retention", {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1})
    namespace.set("backlogQuota?backlogQuotaType=destination_storage", {"limitSize": 5_500, "policy": "consumer_backlog_eviction"})
    wait_for(lambda: namespace.stats("t")["subscriptions"]["s"]["msgBacklog"] < 20, "the oldest are skipped")
    left = namespace.stats("t")["subscriptions"]["s"]["msgBacklog"]
    assert left == 5
    consumer = client.subscribe(topic, "s")
    assert [message[:2] for message in payloads_of(receive(consumer, left))] == [b"%02d" % number for number in range(15, 20)]


def test_an_exact_backlog_of_batches_through_a_restart_of_the_topic(namespace: Namespace, client: pulsar.Client) -> None:
    topic = namespace.topic("t")
    consumer = client.subscribe(topic, "s", pulsar.ConsumerType.Shared, initial_position=EARLIEST, batch_index_ack_enabled=True)
    publish(client, topic, [b"%d" % number for number in range(100)], batching_enabled=True, batching_max_messages=10)
    publish(client, topic, [b"single"], batching_enabled=False)
    messages = receive(consumer, 101, acknowledge=False)
    for message in messages[:25]:  # two whole batches of ten and half of a third, if they were filled
        consumer.acknowledge(message)

    def backlog() -> dict[str, Any]:
        found: dict[str, Any] = namespace.stats("t", "?getPreciseBacklog=true")["subscriptions"]["s"]
        return found

    wait_for(lambda: backlog()["backlogMessages"] == 76, "messages, not batches, are counted")
    before = backlog()
    namespace.unload("t")
    after = backlog()
    for field in ("msgBacklog", "backlogMessages", "backlogSize"):
        assert after[field] == before[field], field
    assert after["backlogAgeSeconds"] >= before["backlogAgeSeconds"]


def test_retention_keeps_what_was_consumed_and_gives_it_up(namespace: Namespace, client: pulsar.Client) -> None:
    topic = namespace.topic("t")
    namespace.set("retention", {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1})
    consumer = client.subscribe(topic, "s", initial_position=EARLIEST)
    publish(client, topic, [b"kept"])
    receive(consumer, 1)
    consumer.close()
    wait_for(lambda: namespace.stats("t")["subscriptions"]["s"]["msgBacklog"] == 0, "it is acknowledged")
    namespace.unload("t")  # its ledger ends
    reader = client.create_reader(topic, pulsar.MessageId.earliest)
    assert reader.read_next(5000).data() == b"kept"
    reader.close()
    namespace.set("retention", {"retentionTimeInMinutes": 0, "retentionSizeInMB": 0})
    wait_for(lambda: namespace.internal("t")["numberOfEntries"] == 0, "consumed data goes")


def test_chunks_are_counted(namespace: Namespace, client: pulsar.Client) -> None:
    producer = client.create_producer(namespace.topic("t"), batching_enabled=False, chunking_enabled=True)
    producer.send(b"small")
    assert namespace.stats("t")["msgChunkPublished"] is False
    producer.send(b"x" * (6 << 20))
    assert namespace.stats("t")["msgChunkPublished"] is True


def test_nothing_goes_that_a_subscription_needs(namespace: Namespace, client: pulsar.Client) -> None:
    topic = namespace.topic("t")
    client.subscribe(topic, "s", initial_position=EARLIEST).close()
    publish(client, topic, [b"needed"])
    namespace.unload("t")
    publish(client, topic, [b"more"])
    namespace.set("retention", {"retentionTimeInMinutes": 0, "retentionSizeInMB": 0})
    consumer = client.subscribe(topic, "s")
    assert payloads_of(receive(consumer, 2)) == [b"needed", b"more"]
