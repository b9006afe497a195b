"""What a user of the official client sees of subscriptions: counts and dead letters, seeks, batches, readers, through restarts.

Tests with a trap in their name guard against that trap of protocol.md §27."""

from __future__ import annotations

import time
import urllib.request
from pathlib import Path

import pulsar
import pytest

from cepheid_testkit import ProcessCluster
from tests.e2e.official_client import (
    AT_ONCE_S,
    EARLIEST,
    SAVED_S,
    TIMEOUT_MS,
    assert_silent,
    client_of,
    payloads_of,
    publish,
    receive,
    wait_for,
    wait_for_backlog,
)

Shared, Exclusive, Failover = pulsar.ConsumerType.Shared, pulsar.ConsumerType.Exclusive, pulsar.ConsumerType.Failover


def numbered(count: int, start: int = 0) -> list[bytes]:
    return [b"%d" % n for n in range(start, start + count)]


def admin(cluster: ProcessCluster, method: str, path: str, body: str) -> None:
    url, headers = f"{cluster.admin_url}/admin/v2/{path}", {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(url, body.encode(), headers, method=method), timeout=60).close()


def poisoned(client: pulsar.Client, topic: str, most: int) -> pulsar.Consumer:
    return client.subscribe(
        topic,
        "s",
        consumer_type=Shared,
        initial_position=EARLIEST,
        negative_ack_redelivery_delay_ms=100,
        dead_letter_policy=pulsar.ConsumerDeadLetterPolicy(most, f"{topic}-dead", "first"),
    )


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["stop", "kill"])
def test_trap_33_a_dead_letter_policy_counts_on_through_a_restart_of_the_broker(tmp_path: Path, ending: str) -> None:
    with ProcessCluster(tmp_path / "data") as cluster:
        with client_of(cluster.service_url) as client:
            publish(client, "t", [b"poison", b"well"])
            consumer = poisoned(client, "t", 4)
            counts: list[int] = []
            while len(counts) < 3:
                message = consumer.receive(TIMEOUT_MS)
                if message.data() == b"poison":
                    counts.append(message.redelivery_count())
                    consumer.negative_acknowledge(message)
                else:
                    consumer.acknowledge(message)
            assert counts == [0, 1, 2]
            message = consumer.receive(TIMEOUT_MS)
            assert (message.data(), message.redelivery_count()) == (b"poison", 3)
            time.sleep(SAVED_S)
        cluster.kill() if ending == "kill" else cluster.stop()
        cluster.start()
        with client_of(cluster.service_url) as client:
            consumer = poisoned(client, "t", 4)
            message = consumer.receive(TIMEOUT_MS)
            assert (message.data(), message.redelivery_count()) == (b"poison", 3), "not from 0 again"
            consumer.negative_acknowledge(message)
            message = consumer.receive(TIMEOUT_MS)
            assert message.redelivery_count() == 4
            consumer.negative_acknowledge(message)
            dead = client.subscribe("t-dead", "first", initial_position=EARLIEST)
            assert payloads_of(receive(dead, 1)) == [b"poison"]
            assert_silent(consumer)


@pytest.mark.slow
def test_trap_24_permits_are_messages_also_in_batches(cluster: ProcessCluster, topic: str) -> None:
    with client_of(cluster.service_url) as client:
        publish(client, topic, numbered(1000), batching_enabled=True, batching_max_messages=100)
        consumer = client.subscribe(topic, "s", initial_position=EARLIEST, receiver_queue_size=7)
        assert payloads_of(receive(consumer, 1000)) == numbered(1000)


def test_trap_25_redelivered_messages_cost_permits_and_nothing_stalls(cluster: ProcessCluster, topic: str) -> None:
    with client_of(cluster.service_url) as client:
        publish(client, topic, numbered(60))
        consumer = client.subscribe(
            topic, "s", consumer_type=Shared, initial_position=EARLIEST, receiver_queue_size=5, negative_ack_redelivery_delay_ms=100
        )
        seen: dict[bytes, list[int]] = {}
        while sum(map(len, seen.values())) < 180:
            message = consumer.receive(TIMEOUT_MS)
            counts = seen.setdefault(message.data(), [])
            counts.append(message.redelivery_count())
            if len(counts) < 3:
                consumer.negative_acknowledge(message)
            else:
                consumer.acknowledge(message)
        assert seen == {payload: [0, 1, 2] for payload in numbered(60)}
        assert_silent(consumer)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Exclusive, Shared, Failover])
def test_trap_26_seeks_in_the_middle_of_delivery_never_stall(
    cluster: ProcessCluster, topic: str, kind: pulsar.ConsumerType
) -> None:
    with client_of(cluster.service_url) as client:
        ids = publish(client, topic, numbered(300), batching_enabled=False)
        consumer = client.subscribe(topic, "s", consumer_type=kind, initial_position=EARLIEST, receiver_queue_size=20)
        for start in (0, 100, 200, 10):
            receive(consumer, 30)
            consumer.seek(ids[start])
            assert payloads_of(receive(consumer, 40)) == numbered(40, start + 1), "a client drops the target itself (§17)"
        consumer.seek(pulsar.MessageId.earliest)
        assert payloads_of(receive(consumer, 300)) == numbered(300)
        consumer.seek(pulsar.MessageId.latest)
        assert_silent(consumer)
        publish(client, topic, [b"new"])
        assert payloads_of(receive(consumer, 1)) == [b"new"]


def test_a_seek_into_a_batch_goes_on_inside_it(cluster: ProcessCluster, topic: str) -> None:
    with client_of(cluster.service_url) as client:
        publish(client, topic, numbered(30), batching_enabled=True, batching_max_messages=10, batching_max_publish_delay_ms=1000)
        consumer = client.subscribe(topic, "s", initial_position=EARLIEST, start_message_id_inclusive=True)
        fifteenth = receive(consumer, 16)[15].message_id()
        assert fifteenth.batch_index() == 5
        receive(consumer, 14)
        consumer.seek(fifteenth)
        again = payloads_of(receive(consumer, 15))
        assert again[-15:] == numbered(15, 15)


def test_trap_27_and_32_readers_start_at_after_and_behind(cluster: ProcessCluster, topic: str) -> None:
    with client_of(cluster.service_url) as client:
        ids = publish(client, topic, numbered(20), batching_enabled=False)
        for start, inclusive, first in (
            (pulsar.MessageId.earliest, False, 0),
            (ids[4], False, 5),
            (ids[4], True, 4),
            (ids[19], True, 19),
        ):
            reader = client.create_reader(topic, start, start_message_id_inclusive=inclusive)
            assert reader.read_next(TIMEOUT_MS).data() == b"%d" % first
            reader.close()
        latest = client.create_reader(topic, pulsar.MessageId.latest)
        assert not latest.has_message_available()
        publish(client, topic, [b"new"])
        assert latest.has_message_available()
        assert latest.read_next(TIMEOUT_MS).data() == b"new"
        assert not latest.has_message_available()


def test_trap_28_a_reader_of_a_batch_in_entry_0_acknowledges_before_it(cluster: ProcessCluster, topic: str) -> None:
    with client_of(cluster.service_url) as client:
        publish(client, topic, numbered(10), batching_enabled=True, batching_max_messages=10, batching_max_publish_delay_ms=1000)
        reader = client.create_reader(topic, pulsar.MessageId.earliest)
        assert [reader.read_next(TIMEOUT_MS).data() for _ in range(10)] == numbered(10)
        consumer = client.subscribe(topic, "s", initial_position=EARLIEST)
        consumer.acknowledge_cumulative(receive(consumer, 5, acknowledge=False)[4])
        consumer.close()
        consumer = client.subscribe(topic, "s", initial_position=EARLIEST)
        assert payloads_of(receive(consumer, 10)) == numbered(10), "without batch-index acknowledgements the batch is whole"


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["unsubscribed by closing", "kill"])
def test_trap_29_and_30_parts_of_batches_stay_acknowledged(tmp_path: Path, ending: str) -> None:
    with ProcessCluster(tmp_path / "data") as cluster, client_of(cluster.service_url) as client:
        publish(client, "t", numbered(20), batching_enabled=True, batching_max_messages=10, batching_max_publish_delay_ms=1000)

        def consumer_of() -> pulsar.Consumer:
            return client.subscribe(
                "t",
                "s",
                consumer_type=Shared,
                initial_position=EARLIEST,
                batch_index_ack_enabled=True,
                negative_ack_redelivery_delay_ms=100,
            )

        consumer = consumer_of()
        for number, message in enumerate(receive(consumer, 20, acknowledge=False)):
            if number % 3 == 0:
                consumer.acknowledge(message)
        consumer.close()  # with the acknowledgements that it groups
        time.sleep(SAVED_S)
        if ending == "kill":
            cluster.kill()
            cluster.start()
        consumer = consumer_of()
        left = [b"%d" % n for n in range(20) if n % 3]
        assert payloads_of(receive(consumer, len(left))) == left
        assert_silent(consumer)


def test_trap_31_whether_something_is_available_after_a_seek_by_time_and_in_an_empty_topic(
    cluster: ProcessCluster, topic: str
) -> None:
    with client_of(cluster.service_url) as client:
        reader = client.create_reader(topic, pulsar.MessageId.earliest)
        assert not reader.has_message_available()
        publish(client, topic, numbered(3), batching_enabled=False)
        last_ms = 0
        while reader.has_message_available():
            last_ms = reader.read_next(TIMEOUT_MS).publish_timestamp()
        reader.seek(last_ms)
        assert reader.has_message_available()
        reader.seek(last_ms + 1)
        assert not reader.has_message_available()
        reader.seek(0)
        assert [reader.read_next(TIMEOUT_MS).data() for _ in range(3)] == numbered(3)
        assert not reader.has_message_available()


@pytest.mark.slow
def test_trap_36_and_39_many_consumers_of_several_topics_on_one_connection(cluster: ProcessCluster, topic: str) -> None:
    """SEEK and GET_LAST_MESSAGE_ID name a consumer, no topic."""
    with client_of(cluster.service_url) as client:
        one, other = f"{topic}-1", f"{topic}-2"
        publish(client, one, numbered(5))
        publish(client, other, numbered(9))
        consumers = [client.subscribe(name, "s", consumer_type=Shared, initial_position=EARLIEST) for name in (one, one, other)]
        assert receive(consumers[2], 9)[-1].message_id().entry_id() == consumers[2].get_last_message_id().entry_id()
        got = []
        while len(got) < 5:
            for consumer in consumers[:2]:
                try:
                    message = consumer.receive(300)
                except pulsar.Timeout:
                    continue
                consumer.acknowledge(message)
                got.append(message.data())
        assert sorted(got) == numbered(5)
        consumers[2].seek(pulsar.MessageId.earliest)
        assert payloads_of(receive(consumers[2], 9)) == numbered(9)
        assert_silent(consumers[0])


def test_trap_37_and_38_consumers_of_a_partitioned_topic_share_a_name(cluster: ProcessCluster, topic: str) -> None:
    url = f"{cluster.admin_url}/admin/v2/persistent/public/default/{topic}/partitions"
    urllib.request.urlopen(
        urllib.request.Request(url, b"3", {"Content-Type": "application/json"}, method="PUT"), timeout=60
    ).close()
    with client_of(cluster.service_url) as client:
        consumer = client.subscribe(topic, "s", consumer_name="me", initial_position=EARLIEST)
        publish(client, topic, numbered(30), message_routing_mode=pulsar.PartitionsRoutingMode.RoundRobinDistribution)
        assert sorted(payloads_of(receive(consumer, 30))) == sorted(numbered(30))


def test_a_topic_that_was_never_compacted_can_be_read_compacted(cluster: ProcessCluster, topic: str) -> None:
    """A TableView always asks so."""
    with client_of(cluster.service_url) as client:
        view = client.create_table_view(topic)
        producer = client.create_producer(topic)
        for payload in (b"1", b"2"):
            producer.send(payload, partition_key="k")
        wait_for(lambda: view.get("k") == b"2", "the view has the last value")
        consumer = client.subscribe(topic, "s", is_read_compacted=True, initial_position=EARLIEST)
        assert payloads_of(receive(consumer, 2)) == [b"1", b"2"]


def test_trap_23_a_subscription_that_may_not_be_made_by_use_fails_at_once(cluster: ProcessCluster) -> None:
    """The code of the reference (12) would hang the client until its timeout."""
    admin(cluster, "PUT", "namespaces/public/strict", "{}")
    policy = '{"allowAutoSubscriptionCreation": false}'
    admin(cluster, "POST", "namespaces/public/strict/autoSubscriptionCreation", policy)
    topic = "persistent://public/strict/t"
    with client_of(cluster.service_url) as client:
        publish(client, topic, numbered(2))
        started = time.monotonic()
        with pytest.raises(pulsar.NotAllowedError):
            client.subscribe(topic, "s")
        assert time.monotonic() - started < AT_ONCE_S
        admin(cluster, "PUT", "persistent/public/strict/t/subscription/s", '{"ledgerId": -1, "entryId": -1}')
        assert payloads_of(receive(client.subscribe(topic, "s"), 2)) == numbered(2)
        reader = client.create_reader(topic, pulsar.MessageId.earliest)
        assert reader.read_next(TIMEOUT_MS).data() == b"0"


def test_what_the_admin_api_skips_is_not_delivered_to_a_connected_consumer(cluster: ProcessCluster, topic: str) -> None:
    with client_of(cluster.service_url) as client:
        publish(client, topic, numbered(30), batching_enabled=False)
        consumer = client.subscribe(topic, "s", initial_position=EARLIEST, receiver_queue_size=1)
        receive(consumer, 5)
        wait_for_backlog(cluster.admin_url, topic, 25)
        admin(cluster, "POST", f"persistent/public/default/{topic}/subscription/s/skip/10", "")
        got = [int(payload) for payload in payloads_of(receive(consumer, 3))]
        assert got[-1] >= 15, "what was on its way comes, then what is behind the skipped ones"
        admin(cluster, "POST", f"persistent/public/default/{topic}/subscription/s/skip_all", "")
        publish(client, topic, [b"100"])
        while consumer.receive(TIMEOUT_MS).data() != b"100":
            pass
        assert_silent(consumer)
