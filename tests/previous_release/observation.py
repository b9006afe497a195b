"""Everything that clients and operators can read from a recorded cluster, as JSON that two releases must agree on.

    observe(service_url, admin_url)
        admin API: tenants, namespaces with their policies, topics with theirs, partitions, schemas, deleted ledgers
        readers:   every message of every topic
        consumers: what each subscription still delivers, in order
Reading changes the cluster (topics are opened, ledgers recovered), so each observation takes a copy of the data.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pulsar

from tests.e2e.official_client import EARLIEST, TIMEOUT_MS, client_of
from tests.plain_admin import AdminClient, namespace_path, quoted, topic_path
from tests.previous_release import policies
from tests.previous_release.population import GOVERNED, SCHEMA_TOPICS, SHARED, id_text, payload_text

CONSUME = pulsar.ConsumerCryptoFailureAction.CONSUME
QUIET_S, LONG_QUIET_S = 0.3, 3.0
"""Consumers that received nothing for this time have received everything. The longer time is used when recording."""
PATIENCE_S = 60.0
ADMINISTRATIVE = ("__change_events", "__health")

Observed = dict[str, Any]


def observe(service_url: str, admin_url: str, remaining: Mapping[str, int] | None = None) -> Observed:
    """Read everything.

    `remaining`: number of messages that each "topic subscription" delivers. Without it the end is found by waiting longer.
    """
    admin = AdminClient(admin_url)
    tenants = {tenant: admin.get(f"/admin/v2/tenants/{quoted(tenant)}") for tenant in admin.get("/admin/v2/tenants")}
    namespaces = sorted(name for tenant in tenants for name in admin.get(f"/admin/v2/namespaces/{quoted(tenant)}"))
    topics = sorted(topic for namespace in namespaces for topic in _topics(admin, namespace))
    with client_of(service_url) as client:
        return {
            "clusters": sorted(admin.get("/admin/v2/clusters")),
            "tenants": tenants,
            "namespaces": {namespace: _without_unset(admin.get(namespace_path(namespace))) for namespace in namespaces},
            "partitioned": {
                topic: _partitioned(admin, topic) for namespace in namespaces for topic in _partitioned_topics(admin, namespace)
            },
            "policies": {topic: _policies(admin, topic) for topic in topics if f"/{GOVERNED}/" in topic},
            "schemas": {topic: _schemas(admin, topic) for topic in SCHEMA_TOPICS},
            "messages": {topic: _messages(client, topic) for topic in topics},
            "backlogs": {topic: _backlogs(admin, topic) for topic in topics},
            "remaining": _remaining(client, admin, topics, remaining or {}),
            "deleted ledgers": [view["ledger"]["ledger_id"] for view in deleted_ledgers(admin)],
        }


def deleted_ledgers(admin: AdminClient) -> list[dict[str, Any]]:
    return list(admin.get("/cepheid/v1/ledgers", deleted=True)["ledgers"])


def _topics(admin: AdminClient, namespace: str) -> list[str]:
    found: list[str] = admin.get(namespace_path(namespace).replace("/namespaces/", "/persistent/"))
    return [topic for topic in found if not topic.rpartition("/")[2].startswith(ADMINISTRATIVE)]


def _partitioned_topics(admin: AdminClient, namespace: str) -> list[str]:
    return [
        topic
        for domain in ("persistent", "non-persistent")
        for topic in admin.get(f"{namespace_path(namespace).replace('/namespaces/', f'/{domain}/')}/partitioned")
    ]


def _partitioned(admin: AdminClient, topic: str) -> Any:
    found = {"partitions": admin.get(f"{topic_path(topic)}/partitions")["partitions"]}
    if topic.startswith("persistent"):
        found["properties"] = admin.get(f"{topic_path(topic)}/properties")
    return found


def _policies(admin: AdminClient, topic: str) -> Any:
    """Return the policies that are set on the topic itself."""
    path = topic_path(topic)
    return _without_unset({word: admin.get(f"{path}/{word}") for word in (*policies.OF_A_TOPIC, "backlogQuotaMap")})


def _schemas(admin: AdminClient, topic: str) -> list[Any]:
    found = admin.get(topic_path(topic).replace("/persistent/", "/schemas/", 1) + "/schemas")["getSchemaResponses"]
    shown = ("version", "type", "properties", "timestamp")
    return [{**{name: row[name] for name in shown}, "data": payload_text(row["data"].encode())} for row in found]


def _messages(client: pulsar.Client, topic: str) -> list[Any]:
    reader = client.create_reader(topic, pulsar.MessageId.earliest, crypto_failure_action=CONSUME)
    found = []
    while reader.has_message_available():
        found.append(_shown(reader.read_next(TIMEOUT_MS)))
    reader.close()
    return found


def _shown(message: pulsar.Message) -> dict[str, Any]:
    shown = {
        "id": id_text(message.message_id()),
        "data": payload_text(message.data()),
        "has_no_value": message.has_null_value(),
        "key": message.partition_key(),
        "ordering_key": message.ordering_key(),
        "properties": message.properties(),
        "event_time": message.event_timestamp(),
        "publish_time": message.publish_timestamp(),
        "producer": message.producer_name(),
        "schema_version": int.from_bytes((message.schema_version() or "").encode("latin-1"), "big"),
    }
    return {name: value for name, value in shown.items() if value}


def _backlogs(admin: AdminClient, topic: str) -> Any:
    """Return the stored bytes of a topic and the exact backlog of each durable subscription."""
    stats = admin.get(f"{topic_path(topic)}/stats", getPreciseBacklog=True)
    subscriptions = stats["subscriptions"]
    return {
        "storage_bytes": stats["storageSize"],
        "subscriptions": {
            name: {
                "entries": subscriptions[name]["msgBacklog"],
                "bytes": subscriptions[name]["backlogSize"],
                "properties": subscriptions[name]["subscriptionProperties"],
            }
            for name in sorted(subscriptions)
            if subscriptions[name]["isDurable"]
        },
    }


def _remaining(client: pulsar.Client, admin: AdminClient, topics: list[str], counts: Mapping[str, int]) -> dict[str, list[Any]]:
    """Consume all subscriptions at the same time; return [id, redelivery count] of each delivered message."""
    found: dict[str, list[Any]] = {}
    for topic in topics:
        for subscription in sorted(admin.get(f"{topic_path(topic)}/subscriptions")):
            received = found[f"{topic} {subscription}"] = []
            _listen(client, topic, subscription, received)
    deadline = time.monotonic() + PATIENCE_S
    while any(len(found.get(name, ())) < count for name, count in counts.items()) and time.monotonic() < deadline:
        time.sleep(0.02)
    count, quiet_s = -1, QUIET_S if counts else LONG_QUIET_S
    while count != (count := sum(map(len, found.values()))):
        time.sleep(quiet_s)
    return found


def _listen(client: pulsar.Client, topic: str, subscription: str, received: list[Any]) -> None:
    def on_message(_: pulsar.Consumer, message: pulsar.Message) -> None:
        received.append([id_text(message.message_id()), message.redelivery_count()])

    client.subscribe(
        topic,
        subscription,
        SHARED,
        message_listener=on_message,
        initial_position=EARLIEST,
        batch_index_ack_enabled=True,
        crypto_failure_action=CONSUME,
    )


def _without_unset(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value not in (None, "", [], {})}


def last_sequence_id(client: pulsar.Client, topic: str, producer_name: str) -> int:
    """Return the last sequence id that deduplication knows for a producer name; -2 when the producer is refused."""
    with suppress(pulsar.PulsarException):
        producer = client.create_producer(topic, producer_name=producer_name)
        try:
            return int(producer.last_sequence_id())
        finally:
            producer.close()
    return -2
