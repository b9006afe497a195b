"""The official client (pulsar-client, the C++ library) against a real cluster: what users do every day."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from pathlib import Path

import pulsar
import pytest

from cepheid_testkit import ProcessCluster
from tests.e2e.official_client import EARLIEST, TIMEOUT_MS, assert_silent, client_of, payloads_of, publish, receive

Shared = pulsar.ConsumerType.Shared


def numbered(count: int, prefix: str = "message") -> list[bytes]:
    return [f"{prefix}-{n}".encode() for n in range(count)]


def create_partitioned(cluster: ProcessCluster, topic: str, partitions: int) -> None:
    url = f"{cluster.admin_url}/admin/v2/persistent/public/default/{topic}/partitions"
    request = urllib.request.Request(url, json.dumps(partitions).encode(), {"Content-Type": "application/json"}, method="PUT")
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status in (200, 204)


def test_publish_consume_acknowledge(cluster: ProcessCluster, topic: str) -> None:
    with client_of(cluster.service_url) as client:
        ids = publish(client, topic, numbered(100))
        assert ids == sorted(ids)
        consumer = client.subscribe(topic, "s", initial_position=EARLIEST)
        assert payloads_of(receive(consumer, 100)) == numbered(100)
        consumer.close()
        again = client.subscribe(topic, "s")
        assert_silent(again)


def test_properties_keys_and_times_come_through(cluster: ProcessCluster, topic: str) -> None:
    with client_of(cluster.service_url) as client:
        producer = client.create_producer(topic, properties={"app": "test"})
        producer.send(b"x", properties={"a": "1", "b": "ü"}, partition_key="key", ordering_key="order", event_timestamp=1_234)
        consumer = client.subscribe(topic, "s", initial_position=EARLIEST, properties={"c": "d"})
        message = consumer.receive(TIMEOUT_MS)
        assert message.properties() == {"a": "1", "b": "ü"}
        assert (message.partition_key(), message.ordering_key(), message.event_timestamp()) == ("key", "order", 1_234)
        assert message.redelivery_count() == 0
        assert abs(message.publish_timestamp() - time.time() * 1000) < 60_000


@pytest.mark.parametrize("compression", ["NONE", "LZ4", "ZLib", "ZSTD", "SNAPPY"])
@pytest.mark.parametrize("batching", [False, True])
def test_batches_and_compression_come_through(cluster: ProcessCluster, topic: str, compression: str, batching: bool) -> None:
    with client_of(cluster.service_url) as client:
        payloads = numbered(300, "x" * 100)
        publish(
            client,
            topic,
            payloads,
            compression_type=getattr(pulsar.CompressionType, compression),
            batching_enabled=batching,
            batching_max_publish_delay_ms=5,
        )
        consumer = client.subscribe(topic, "s", initial_position=EARLIEST)
        assert payloads_of(receive(consumer, 300)) == payloads


def test_trap_16_readers_see_a_batch_of_one_as_a_batch(cluster: ProcessCluster, topic: str) -> None:
    with client_of(cluster.service_url) as client:
        producer = client.create_producer(topic, batching_enabled=True)
        producer.send(b"alone")
        reader = client.create_reader(topic, pulsar.MessageId.earliest)
        assert reader.has_message_available()
        message = reader.read_next(TIMEOUT_MS)
        assert (message.data(), message.message_id().batch_index()) == (b"alone", 0)
        assert not reader.has_message_available()


def test_trap_41_chunked_messages_on_exclusive_and_shared(cluster: ProcessCluster, topic: str) -> None:
    """Three consumers, and other messages in between."""
    with client_of(cluster.service_url) as client:
        bodies = [bytes([65 + n]) * (11_000_000 + n) for n in range(3)]
        producer = client.create_producer(topic, chunking_enabled=True)
        for body in bodies:
            producer.send(body)
            producer.send(b"small")
        expected = sorted([*bodies, b"small", b"small", b"small"])
        exclusive = client.subscribe(topic, "exclusive", initial_position=EARLIEST)
        assert sorted(payloads_of(receive(exclusive, 6))) == expected
        consumers = [client.subscribe(topic, "shared", consumer_type=Shared, initial_position=EARLIEST) for _ in range(3)]
        received: list[bytes] = []
        deadline = time.monotonic() + 60
        while len(received) < 6 and time.monotonic() < deadline:
            for consumer in consumers:
                try:
                    message = consumer.receive(50)
                except pulsar.Timeout:
                    continue
                received.append(message.data())
                consumer.acknowledge(message)
        assert sorted(received) == expected


def test_encrypted_messages(cluster: ProcessCluster, topic: str, tmp_path: Path) -> None:
    private, public = tmp_path / "private.pem", tmp_path / "public.pem"
    for command in (f"genrsa -out {private} 2048", f"rsa -in {private} -pubout -out {public}"):
        try:
            subprocess.run(["openssl", *command.split()], check=True, capture_output=True)
        except FileNotFoundError:
            pytest.skip("openssl is not installed")
    keys = pulsar.CryptoKeyReader(str(public), str(private))
    with client_of(cluster.service_url) as client:
        publish(client, topic, numbered(10), encryption_key="key", crypto_key_reader=keys)
        consumer = client.subscribe(topic, "s", initial_position=EARLIEST, crypto_key_reader=keys)
        assert payloads_of(receive(consumer, 10)) == numbered(10)


def test_shared_consumers_divide_the_messages(cluster: ProcessCluster, topic: str) -> None:
    with client_of(cluster.service_url) as client, client_of(cluster.service_url) as second:
        consumers = [
            client.subscribe(topic, "s", consumer_type=Shared, receiver_queue_size=10),
            second.subscribe(topic, "s", consumer_type=Shared, receiver_queue_size=10),
        ]
        publish(client, topic, numbered(200))
        received: list[list[bytes]] = [[], []]
        while sum(map(len, received)) < 200:
            for index, consumer in enumerate(consumers):
                try:
                    message = consumer.receive(20)
                except pulsar.Timeout:
                    continue
                received[index].append(message.data())
                consumer.acknowledge(message)
        assert sorted(received[0] + received[1]) == sorted(numbered(200))
        assert min(map(len, received)) > 20


def test_trap_33_a_negative_acknowledgement_counts_until_the_dead_letter_topic(cluster: ProcessCluster, topic: str) -> None:
    with client_of(cluster.service_url) as client:
        policy = pulsar.ConsumerDeadLetterPolicy(2, f"{topic}-dead", "first")
        consumer = client.subscribe(
            topic,
            "s",
            consumer_type=Shared,
            initial_position=EARLIEST,
            negative_ack_redelivery_delay_ms=100,
            dead_letter_policy=policy,
        )
        publish(client, topic, numbered(3))
        counts = []
        while len(counts) < 5:
            message = consumer.receive(TIMEOUT_MS)
            if message.data() == b"message-1":
                counts.append(message.redelivery_count())
                consumer.negative_acknowledge(message)
                if len(counts) == 3:
                    break
            else:
                consumer.acknowledge(message)
        assert counts == [0, 1, 2]
        dead = client.subscribe(f"{topic}-dead", "first", initial_position=EARLIEST)
        assert payloads_of(receive(dead, 1)) == [b"message-1"]


@pytest.mark.slow
def test_the_acknowledgement_timeout_brings_messages_again(cluster: ProcessCluster, topic: str) -> None:
    with client_of(cluster.service_url) as client:
        publish(client, topic, numbered(3))
        consumer = client.subscribe(topic, "s", initial_position=EARLIEST, unacked_messages_timeout_ms=10_000, consumer_type=Shared)
        receive(consumer, 3, acknowledge=False)
        again = [consumer.receive(TIMEOUT_MS) for _ in range(3)]
        assert sorted(payloads_of(again)) == numbered(3)
        assert {message.redelivery_count() for message in again} == {1}


def test_cumulative_acknowledgement_and_redelivery_on_exclusive(cluster: ProcessCluster, topic: str) -> None:
    with client_of(cluster.service_url) as client:
        publish(client, topic, numbered(10))
        consumer = client.subscribe(topic, "s", initial_position=EARLIEST)
        messages = receive(consumer, 10, acknowledge=False)
        consumer.acknowledge_cumulative(messages[5])
        consumer.redeliver_unacknowledged_messages()
        assert payloads_of(receive(consumer, 4)) == numbered(10)[6:]


def test_acknowledged_parts_of_a_batch_do_not_come_again(cluster: ProcessCluster, topic: str) -> None:
    with client_of(cluster.service_url) as client:
        publish(client, topic, numbered(10), batching_enabled=True, batching_max_publish_delay_ms=200)
        options = {"initial_position": EARLIEST, "consumer_type": Shared, "batch_index_ack_enabled": True}
        consumer = client.subscribe(topic, "s", **options)
        for message in receive(consumer, 10, acknowledge=False):
            if int(message.data().split(b"-")[1]) % 2 == 0:
                consumer.acknowledge(message)
        consumer.close()
        again = client.subscribe(topic, "s", **options)
        assert payloads_of(receive(again, 5)) == numbered(10)[1::2]
        assert_silent(again)


def test_readers_from_earliest_latest_and_an_id(cluster: ProcessCluster, topic: str) -> None:
    with client_of(cluster.service_url) as client:
        ids = publish(client, topic, numbered(10))
        earliest = client.create_reader(topic, pulsar.MessageId.earliest)
        read = []
        while earliest.has_message_available():
            read.append(earliest.read_next(TIMEOUT_MS).data())
        assert read == numbered(10)
        latest = client.create_reader(topic, pulsar.MessageId.latest)
        assert not latest.has_message_available()
        after = client.create_reader(topic, ids[6])
        assert after.read_next(TIMEOUT_MS).data() == b"message-7"
        inclusive = client.create_reader(topic, ids[6], start_message_id_inclusive=True)
        assert inclusive.read_next(TIMEOUT_MS).data() == b"message-6"
        last = client.create_reader(topic, pulsar.MessageId.latest, start_message_id_inclusive=True)
        assert last.has_message_available()
        assert last.read_next(TIMEOUT_MS).data() == b"message-9"
        publish(client, topic, [b"new"])
        assert latest.has_message_available()
        assert latest.read_next(TIMEOUT_MS).data() == b"new"


def test_readers_inside_a_batch_restart_where_they_were(cluster: ProcessCluster, topic: str) -> None:
    with client_of(cluster.service_url) as client:
        publish(client, topic, numbered(10), batching_enabled=True, batching_max_publish_delay_ms=100)
        reader = client.create_reader(topic, pulsar.MessageId.earliest)
        positions = [reader.read_next(TIMEOUT_MS).message_id() for _ in range(10)]
        second = client.create_reader(topic, positions[3])
        assert second.read_next(TIMEOUT_MS).data() == b"message-4"


def test_readers_seek_by_id_and_by_time(cluster: ProcessCluster, topic: str) -> None:
    with client_of(cluster.service_url) as client:
        first = publish(client, topic, numbered(5))
        time.sleep(0.05)  # publish times of the second half are later than those of the first
        middle_ms = int(time.time() * 1000)
        time.sleep(0.05)
        publish(client, topic, numbered(5, "late"))
        reader = client.create_reader(topic, pulsar.MessageId.earliest)
        assert reader.read_next(TIMEOUT_MS).data() == b"message-0"
        reader.seek(middle_ms)
        assert reader.has_message_available()
        assert reader.read_next(TIMEOUT_MS).data() == b"late-0"
        reader.seek(first[1])
        assert reader.read_next(TIMEOUT_MS).data() == b"message-2"
        reader.seek(pulsar.MessageId.latest)
        assert not reader.has_message_available()
        reader.seek(pulsar.MessageId.earliest)
        assert reader.read_next(TIMEOUT_MS).data() == b"message-0"


@pytest.mark.parametrize("kind", [pulsar.ConsumerType.Exclusive, Shared])
def test_trap_26_consumers_seek_and_do_not_stall(cluster: ProcessCluster, topic: str, kind: pulsar.ConsumerType) -> None:
    """The receive queue is small, so lost permits would show."""
    with client_of(cluster.service_url) as client:
        ids = publish(client, topic, numbered(100))
        consumer = client.subscribe(topic, "s", consumer_type=kind, initial_position=EARLIEST, receiver_queue_size=10)
        receive(consumer, 60)
        for target in (10, 90, 0, 50):
            consumer.seek(ids[target])
            expected = set(numbered(100)[target + 1 :])
            got = set(payloads_of(receive(consumer, len(expected))))
            assert got == expected
        consumer.seek(pulsar.MessageId.earliest)
        assert set(payloads_of(receive(consumer, 100))) == set(numbered(100))
        consumer.seek(pulsar.MessageId.latest)
        assert_silent(consumer)
        publish(client, topic, [b"after"])
        assert payloads_of(receive(consumer, 1)) == [b"after"]


def test_last_message_id(cluster: ProcessCluster, topic: str) -> None:
    with client_of(cluster.service_url) as client:
        consumer = client.subscribe(topic, "s")
        last = publish(client, topic, numbered(7))[-1]
        found = consumer.get_last_message_id()
        assert (found.ledger_id(), found.entry_id()) == (last.ledger_id(), last.entry_id())


def test_unsubscribing_forgets(cluster: ProcessCluster, topic: str) -> None:
    with client_of(cluster.service_url) as client:
        publish(client, topic, numbered(3))
        consumer = client.subscribe(topic, "s", initial_position=EARLIEST)
        receive(consumer, 3)
        consumer.unsubscribe()
        assert len(receive(client.subscribe(topic, "s", initial_position=EARLIEST), 3)) == 3


def test_a_second_exclusive_consumer_is_told_so(cluster: ProcessCluster, topic: str) -> None:
    with client_of(cluster.service_url) as client, client_of(cluster.service_url) as second:
        client.subscribe(topic, "s")
        with pytest.raises(pulsar.ConsumerBusy):
            second.subscribe(topic, "s")
        with pytest.raises(pulsar.ConsumerBusy):
            second.subscribe(topic, "s", consumer_type=Shared)


def test_a_second_producer_of_a_name_is_told_so(cluster: ProcessCluster, topic: str) -> None:
    with client_of(cluster.service_url) as client, client_of(cluster.service_url) as second:
        client.create_producer(topic, producer_name="p")
        with pytest.raises(pulsar.PulsarException):
            second.create_producer(topic, producer_name="p")


def test_partitioned_topics_with_key_routing(cluster: ProcessCluster, topic: str) -> None:
    create_partitioned(cluster, topic, 3)
    with client_of(cluster.service_url) as client:
        producer = client.create_producer(topic)
        for n in range(90):
            producer.send(b"%d" % n, partition_key=f"key-{n % 9}")
        consumer = client.subscribe(topic, "s", initial_position=EARLIEST)
        messages = receive(consumer, 90)
        assert sorted(int(m.data()) for m in messages) == list(range(90))
        partitions = {}
        for message in messages:
            partitions.setdefault(message.partition_key(), set()).add(message.topic_name())
        assert all(len(found) == 1 for found in partitions.values()), "a key stays in its partition"
        assert len(set.union(*partitions.values())) == 3
        for key in partitions:
            order = [int(m.data()) for m in messages if m.partition_key() == key]
            assert order == sorted(order)


def test_subscriptions_by_pattern_and_to_several_topics(cluster: ProcessCluster, topic: str) -> None:
    with client_of(cluster.service_url) as client:
        names = [f"{topic}-{letter}" for letter in "abc"]
        for name in names:
            publish(client, name, [name.encode()])
        import re

        consumer = client.subscribe(re.compile(f"persistent://public/default/{topic}-.*"), "pattern", initial_position=EARLIEST)
        assert sorted(payloads_of(receive(consumer, 3))) == [name.encode() for name in names]
        several = client.subscribe(names[:2], "several", initial_position=EARLIEST)
        assert sorted(payloads_of(receive(several, 2))) == [name.encode() for name in names[:2]]


def test_message_listeners(cluster: ProcessCluster, topic: str) -> None:
    with client_of(cluster.service_url) as client:
        received: list[bytes] = []

        def on_message(consumer: pulsar.Consumer, message: pulsar.Message) -> None:
            received.append(message.data())
            consumer.acknowledge(message)

        client.subscribe(topic, "s", initial_position=EARLIEST, message_listener=on_message)
        publish(client, topic, numbered(50))
        deadline = time.monotonic() + 60
        while len(received) < 50 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert received == numbered(50)


def test_a_receive_queue_of_zero_and_of_one(cluster: ProcessCluster, topic: str) -> None:
    with client_of(cluster.service_url) as client:
        publish(client, topic, numbered(20))
        small = client.subscribe(topic, "small", initial_position=EARLIEST, receiver_queue_size=1)
        assert payloads_of(receive(small, 20)) == numbered(20)
        none = client.subscribe(topic, "none", initial_position=EARLIEST, receiver_queue_size=0)
        assert [none.receive().data() for _ in range(20)] == numbered(20)  # this queue allows no timeout
