"""Failover, Key_Shared and delayed messages with the official client: what its users see of dispatch."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from datetime import timedelta
from typing import Any

import pulsar
import pytest

from cepheid_testkit import ProcessCluster
from tests.e2e.official_client import EARLIEST, assert_silent, client_of, payloads_of, publish, receive

Shared = pulsar.ConsumerType.Shared
Failover = pulsar.ConsumerType.Failover
KeyShared = pulsar.ConsumerType.KeyShared


def sticky(*ranges: tuple[int, int]) -> pulsar.ConsumerKeySharedPolicy:
    return pulsar.ConsumerKeySharedPolicy(pulsar.KeySharedMode.Sticky, sticky_ranges=list(ranges))


def numbered(first: int, count: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, first + count)]


def received_until_silent(consumer: pulsar.Consumer) -> list[pulsar.Message]:
    received = []
    try:
        while True:
            received.append(consumer.receive(1500))
    except pulsar.Timeout:
        return received


@pytest.mark.slow
def test_failover_takes_over_where_acknowledgements_end(cluster: ProcessCluster, topic: str) -> None:
    with client_of(cluster.service_url) as client, client_of(cluster.service_url) as standby_client:
        first = client.subscribe(topic, "s", Failover, consumer_name="a", initial_position=EARLIEST)
        second = standby_client.subscribe(topic, "s", Failover, consumer_name="b")
        publish(client, topic, numbered(0, 50))
        got = receive(first, 20, acknowledge=False)
        assert payloads_of(got) == numbered(0, 20)
        assert_silent(second)
        for message in got[:10]:
            first.acknowledge(message)
        first.acknowledge(got[15])
        first.close()
        left = [payload for payload in numbered(10, 40) if payload != b"15"]
        assert payloads_of(receive(second, len(left))) == left
        assert_silent(second)


def test_failover_prefers_the_best_priority_then_the_first_name(cluster: ProcessCluster, topic: str) -> None:
    with client_of(cluster.service_url) as client:
        later = client.subscribe(topic, "s", Failover, consumer_name="b")
        first = client.subscribe(topic, "s", Failover, consumer_name="a")
        publish(client, topic, numbered(0, 5))
        assert payloads_of(receive(first, 5)) == numbered(0, 5)
        first.close()
        publish(client, topic, numbered(5, 5))
        assert payloads_of(receive(later, 5)) == numbered(5, 5)


class Churn:
    """Consumers of one Key_Shared subscription that come and go at random; what each received is checked per key."""

    def __init__(self, client: pulsar.Client, topic: str, seed: int) -> None:
        self._client, self._topic = client, topic
        self._random = random.Random(seed)
        self._consumers: list[Any] = []
        self.seen: dict[str, list[int]] = defaultdict(list)
        self.redelivered = 0

    def step(self) -> None:
        dice = self._random.random()
        if len(self._consumers) < 2 or (dice < 0.1 and len(self._consumers) < 8):
            options: dict[str, Any] = {"initial_position": EARLIEST, "receiver_queue_size": 50}
            self._consumers.append(self._client.subscribe(self._topic, "s", KeyShared, **options))
        elif dice < 0.17:
            self._consumers.pop(self._random.randrange(len(self._consumers))).close()
        for consumer in self._consumers:
            self._receive_some(consumer)

    def _receive_some(self, consumer: Any) -> None:
        try:
            for _ in range(20):
                message = consumer.receive(1)
                sequence, seen = int(message.data()), self.seen[message.partition_key()]
                if sequence in seen:
                    self.redelivered += 1
                else:
                    assert sequence == len(seen), f"key {message.partition_key()}: {sequence} after {seen[-3:]}"
                    seen.append(sequence)
                consumer.acknowledge(message)
        except pulsar.Timeout:
            pass

    def total(self) -> int:
        return sum(map(len, self.seen.values()))


@pytest.mark.slow
@pytest.mark.parametrize("batching", [False, True])
def test_key_shared_keeps_the_order_of_each_key_while_consumers_come_and_go(
    cluster: ProcessCluster, topic: str, batching: bool
) -> None:
    keys, per_key = 40, 50
    with client_of(cluster.service_url) as client:
        churn = Churn(client, topic, seed=4711)
        churn.step()
        options: dict[str, Any] = (
            {"batching_enabled": True, "batching_type": pulsar.BatchingType.KeyBased, "batching_max_messages": 20}
            if batching
            else {}
        )
        producer = client.create_producer(topic, block_if_queue_full=True, **options)
        for sequence in range(per_key):
            for key in range(keys):
                producer.send_async(b"%d" % sequence, lambda *_: None, partition_key=f"key-{key}")
            if sequence % 5 == 0:
                churn.step()
        producer.flush()
        deadline = time.monotonic() + 60
        while churn.total() < keys * per_key:
            assert time.monotonic() < deadline, f"{churn.total()} of {keys * per_key} arrived"
            churn.step()
        assert all(seen == list(range(per_key)) for seen in churn.seen.values())


@pytest.mark.slow
def test_key_shared_gives_all_messages_of_a_key_to_one_consumer(cluster: ProcessCluster, topic: str) -> None:
    with client_of(cluster.service_url) as client:
        consumers = [client.subscribe(topic, "s", KeyShared) for _ in range(3)]
        producer = client.create_producer(topic)
        for number in range(90):
            producer.send(b"%d" % number, partition_key=f"key-{number % 30}", ordering_key=f"order-{number % 10}")
        owners: dict[str, set[int]] = defaultdict(set)
        for index, consumer in enumerate(consumers):
            for message in received_until_silent(consumer):
                owners[message.ordering_key()].add(index)
        assert len(owners) == 10, "the ordering key decides, not the partition key"
        assert all(len(indexes) == 1 for indexes in owners.values())
        assert len(set.union(*owners.values())) > 1


@pytest.mark.slow
def test_sticky_ranges_decide_and_an_overlap_is_refused(cluster: ProcessCluster, topic: str) -> None:
    with client_of(cluster.service_url) as client:
        low = client.subscribe(topic, "s", KeyShared, key_shared_policy=sticky((0, 32767)))
        with pytest.raises(pulsar.ConsumerAssignError):
            client.subscribe(topic, "s", KeyShared, key_shared_policy=sticky((30000, 40000)))
        with pytest.raises(pulsar.ConsumerAssignError):
            client.subscribe(topic, "s", KeyShared)  # auto-split beside sticky
        producer = client.create_producer(topic)
        for number in range(40):
            producer.send(b"%d" % number, partition_key=f"key-{number}")
        got_low = received_until_silent(low)
        assert 0 < len(got_low) < 40, "the other half has nobody"
        high = client.subscribe(topic, "s", KeyShared, key_shared_policy=sticky((32768, 65535)))
        got_high = receive(high, 40 - len(got_low))
        assert sorted(map(int, payloads_of(got_low + got_high))) == list(range(40))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Shared, KeyShared])
def test_delayed_messages_come_when_it_is_time(cluster: ProcessCluster, topic: str, kind: Any) -> None:
    with client_of(cluster.service_url) as client:
        consumer = client.subscribe(topic, "s", kind)
        producer = client.create_producer(topic)
        start = time.monotonic()
        producer.send(b"late", deliver_after=timedelta(seconds=4))
        producer.send(b"now")
        producer.send(b"soon", deliver_after=timedelta(seconds=2))
        got = receive(consumer, 3)
        assert payloads_of(got) == [b"now", b"soon", b"late"]
        assert time.monotonic() - start >= 3.95


def test_trap_42_exclusive_and_failover_get_delayed_messages_at_once_and_the_last_id_counts_them(
    cluster: ProcessCluster, topic: str
) -> None:
    with client_of(cluster.service_url) as client:
        consumers = [client.subscribe(topic, "e"), client.subscribe(topic, "f", Failover)]
        waiting = client.subscribe(topic, "s", Shared)
        late = client.create_producer(topic).send(b"late", deliver_after=timedelta(minutes=1))
        assert [payloads_of(receive(consumer, 1)) for consumer in consumers] == [[b"late"], [b"late"]]
        for consumer in (*consumers, waiting):
            last = consumer.get_last_message_id()
            assert (last.ledger_id(), last.entry_id()) == (late.ledger_id(), late.entry_id())
        assert_silent(waiting)
