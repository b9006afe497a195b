"""Too few bookies for a new ledger when topics are opened: consumers go on, and producers once there are enough."""

from __future__ import annotations

import pulsar
import pytest

from tests.integration.chaos_cluster import ChaosCluster, new_topic
from tests.plain_admin import AdminClient, subscription_path, topic_path

pytestmark = pytest.mark.slow

MESSAGES = 200
PATIENCE_MS = 60_000


def test_after_two_of_four_bookies_and_all_brokers_died_topics_are_consumed(chaos: ChaosCluster) -> None:
    topic = new_topic("two-of-four")
    with chaos.client() as client:
        consumer = client.subscribe(topic, "audit", consumer_type=pulsar.ConsumerType.Shared)
        producer = client.create_producer(topic)
        for number in range(MESSAGES):
            producer.send(b"%d" % number)
        consumer.acknowledge(consumer.receive(PATIENCE_MS))
        ensemble, bookies = chaos.ensemble(topic), chaos.writable()
    (spare,) = set(bookies) - set(ensemble)
    dead = (ensemble[0], spare)
    for bookie in dead:
        chaos.processes.kill(bookie)
    chaos.wait_until(lambda: len(chaos.writable()) == 2, "two bookies are not registered any more")
    brokers = list(chaos.processes.broker_ports)
    for broker in brokers:
        chaos.processes.kill(broker)
    for broker in brokers:
        chaos.processes.start(broker)

    admin = AdminClient(chaos.processes.admin_urls[0])
    with chaos.client(operation_timeout_seconds=5) as client:
        consumer = client.subscribe(topic, "audit", consumer_type=pulsar.ConsumerType.Shared)
        received = [consumer.receive(PATIENCE_MS) for _ in range(MESSAGES - 1)]
        assert sorted(int(message.data()) for message in received) == list(range(1, MESSAGES))
        for message in received:
            consumer.acknowledge(message)
        chaos.wait_until(lambda: _backlog(admin, topic) == 0, "everything is acknowledged")
        with pytest.raises(pulsar.PulsarException):
            client.create_producer(topic)
        why = admin.get(subscription_path(topic, "audit").replace("/admin/v2/", "/cepheid/v1/topics/", 1) + "/why")
        assert "needs 3 bookies, 2 are available" in why["reasons"][-1]["details"]
        assert "needs 3 bookies, 2 are available" in admin.get(f"{topic_path(topic)}/stats")["notPublishing"]
        assert admin.get(f"{topic_path(topic)}/internalStats")["state"] == "ClosedLedger"

        for bookie in dead:
            chaos.processes.start(bookie)
        chaos.wait_until(lambda: len(chaos.writable()) == 4, "all bookies are registered")
        client.create_producer(topic).send(b"after")
        assert consumer.receive(PATIENCE_MS).data() == b"after"


def _backlog(admin: AdminClient, topic: str) -> int:
    return int(admin.get(f"{topic_path(topic)}/stats")["subscriptions"]["audit"]["msgBacklog"])
