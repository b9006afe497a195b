"""Traps of consumers (protocol.md §27) that show in the frames of the official client; test_delivery.py has the others."""

from __future__ import annotations

import re
import time
from typing import Any

import pulsar
import pytest

from cepheid_wire import CommandType
from tests.e2e.official_client import EARLIEST, TIMEOUT_MS, assert_silent, client_of, payloads_of, publish, receive, wait_for
from tests.e2e.tapped_broker import Seen, TappedBroker

Shared, Exclusive, Failover = pulsar.ConsumerType.Shared, pulsar.ConsumerType.Exclusive, pulsar.ConsumerType.Failover


@pytest.mark.slow
def test_trap_23_a_first_subscribe_that_has_to_wait_succeeds_later(tapped: TappedBroker, topic: str) -> None:
    """A retryable ERROR alone leaves the client waiting for its timeout, and then it fails."""
    since = len(tapped.seen)
    tapped.world.refuse_opening_topics(True)

    def came_again() -> bool:
        return len(tapped.frames(CommandType.SUBSCRIBE, since=since)) > 1

    tapped.call_when(came_again, lambda: tapped.world.refuse_opening_topics(False))
    with client_of(tapped.service_url) as client:
        consumer = client.subscribe(topic, "s")
        publish(client, topic, [b"a"])
        assert payloads_of(receive(consumer, 1)) == [b"a"]
    assert came_again()


@pytest.mark.parametrize("kind", [Exclusive, Shared, pulsar.ConsumerType.KeyShared])
def test_trap_24_permits_are_messages_and_a_flow_adds(tapped: TappedBroker, topic: str, kind: Any) -> None:
    """A queue of 10 takes three batches of 4: 10 - 12 = -2. When 5 are read the client gives 5 permits: one more batch, not two."""
    since = len(tapped.seen)

    def delivered() -> int:
        return len(tapped.frames(CommandType.MESSAGE, since=since))

    with client_of(tapped.service_url) as client:
        options = {"batching_enabled": True, "batching_max_messages": 4, "batching_max_publish_delay_ms": 10_000}
        publish(client, topic, [b"%d" % n for n in range(40)], **options)
        consumer = client.subscribe(topic, "s", kind, initial_position=EARLIEST, receiver_queue_size=10)
        for expected, left in ((3, 5), (4, 5), (5, 30)):
            wait_for(lambda expected=expected: delivered() >= expected, "what permits allow")
            time.sleep(0.1)  # for one too many to come
            assert delivered() == expected
            receive(consumer, left)
        assert_silent(consumer)
        assert delivered() == 10


@pytest.mark.parametrize("kind", [Shared, pulsar.ConsumerType.KeyShared])
def test_trap_25_what_is_sent_again_costs_permits(tapped: TappedBroker, topic: str, kind: Any) -> None:
    """A queue of 10 gets 10, and 5 more for each 5 that are read, among them those that come again."""
    since = len(tapped.seen)

    def counts() -> list[int]:
        return [frame.body.redelivery_count for frame in tapped.frames(CommandType.MESSAGE, since=since)]

    def asked_again() -> list[Any]:
        frames = tapped.frames(CommandType.REDELIVER_UNACKNOWLEDGED_MESSAGES, since=since)
        return [message_id for frame in frames for message_id in frame.body.message_ids]

    with client_of(tapped.service_url) as client:
        publish(client, topic, [b"%d" % n for n in range(50)])
        options = {"receiver_queue_size": 10, "negative_ack_redelivery_delay_ms": 100}
        consumer = client.subscribe(topic, "s", kind, initial_position=EARLIEST, **options)
        for message in receive(consumer, 5, acknowledge=False):
            consumer.negative_acknowledge(message)
        wait_for(lambda: len(asked_again()) == 5, "all five are asked for again")  # the client may take two commands for them
        for expected in (20, 25):
            receive(consumer, 5)
            wait_for(lambda expected=expected: len(counts()) >= expected, "what permits allow")
            time.sleep(0.1)  # for one too many to come
            assert len(counts()) == expected
        assert sorted(counts()) == [0] * 20 + [1] * 5


@pytest.mark.parametrize("kind", [Exclusive, Shared, Failover, "reader"])
def test_trap_26_a_seek_closes_then_succeeds_then_subscribes(tapped: TappedBroker, topic: str, kind: Any) -> None:
    """In any other order the client throws away what it just got, and stalls for good."""
    with client_of(tapped.service_url) as client:
        ids = publish(client, topic, [b"%d" % n for n in range(50)])
        consumer = (
            client.create_reader(topic, pulsar.MessageId.earliest, receiver_queue_size=10)
            if kind == "reader"
            else client.subscribe(topic, "s", kind, initial_position=EARLIEST, receiver_queue_size=10)
        )
        take = consumer.read_next if kind == "reader" else consumer.receive
        for number, target in enumerate((ids[20], 0, ids[3])):
            take(TIMEOUT_MS)
            since = len(tapped.seen)
            consumer.seek(target)
            first = 0 if number == 1 else int(target.entry_id()) + 1
            assert [int(take(TIMEOUT_MS).data()) for _ in range(15)] == list(range(first, first + 15))
            assert steps_of_seek(tapped.seen[since:]) == ["CLOSE_CONSUMER", "sought", "subscribed", "MESSAGE"]


def steps_of_seek(seen: list[Seen]) -> list[str]:
    """What the broker sent behind the first SEEK, each once; what was on its way when it came does not count."""
    start = next(index for index, frame in enumerate(seen) if frame.kind == CommandType.SEEK)
    names: dict[int, str] = {seen[start].body.request_id: "sought"}
    steps: list[str] = []
    for frame in seen[start:]:
        if frame.kind == CommandType.SUBSCRIBE:
            names[frame.body.request_id] = "subscribed"
        if not frame.from_broker:
            continue
        step = names.get(frame.body.request_id, "") if frame.kind == CommandType.SUCCESS else frame.kind.name
        if step in ("CLOSE_CONSUMER", "sought", "subscribed", "MESSAGE") and step not in steps and (steps or step != "MESSAGE"):
            steps.append(step)
    return steps


def test_trap_34_delivered_bytes_are_those_of_the_send(tapped: TappedBroker, topic: str) -> None:
    """From 0x0e01 on, whatever the client sends: it checks the checksum, and reads what it wrote."""
    since = len(tapped.seen)
    kinds: list[dict[str, Any]] = [
        {},
        {"batching_enabled": True, "batching_max_messages": 5, "batching_max_publish_delay_ms": 1000},
        {"compression_type": pulsar.CompressionType.ZSTD},
        {"compression_type": pulsar.CompressionType.LZ4, "batching_enabled": True},
    ]
    with client_of(tapped.service_url) as client:
        for options in kinds:
            producer = client.create_producer(topic, **options)
            for n in range(5):
                message: dict[str, Any] = {"properties": {"n": str(n), "ü": "ö"}, "partition_key": f"k{n}", "event_timestamp": n}
                producer.send_async(b"%d" % n * 100, lambda *_: None, **message)
            producer.flush()
        consumer = client.subscribe(topic, "s", initial_position=EARLIEST)
        assert payloads_of(receive(consumer, 20)) == [b"%d" % n * 100 for n in range(5)] * 4
    sent = [frame.tail for frame in tapped.frames(CommandType.SEND, since=since)]
    assert 10 < len(sent) < 20, "some are batches"
    assert all(tail.startswith(b"\x0e\x01") for tail in sent)
    assert [frame.tail for frame in tapped.frames(CommandType.MESSAGE, since=since)] == sent


def test_trap_37_consumers_of_a_pattern_have_no_name(tapped: TappedBroker, topic: str) -> None:
    """Equal and empty names are no conflict, also of two consumers with the same pattern."""
    since = len(tapped.seen)
    with client_of(tapped.service_url) as client:
        for letter in "abc":
            publish(client, f"{topic}-{letter}", [letter.encode()])
        pattern = re.compile(f"persistent://public/default/{topic}-.*")
        consumers = [client.subscribe(pattern, "s", Shared, initial_position=EARLIEST) for _ in range(2)]
        got: list[bytes] = []
        while len(got) < 3:
            for consumer in consumers:
                try:
                    got.append(consumer.receive(100).data())
                except pulsar.Timeout:
                    continue
        assert sorted(got) == [b"a", b"b", b"c"]
    names = [frame.body.consumer_name for frame in tapped.frames(CommandType.SUBSCRIBE, since=since)]
    assert names == [""] * 6


def test_trap_38_readers_have_no_name_and_leave_nothing_behind(tapped: TappedBroker, topic: str) -> None:
    since = len(tapped.seen)
    with client_of(tapped.service_url) as client:
        publish(client, topic, [b"a", b"b"])
        readers = [client.create_reader(topic, pulsar.MessageId.earliest) for _ in range(3)]
        for reader in readers:
            assert [reader.read_next(TIMEOUT_MS).data() for _ in range(2)] == [b"a", b"b"]
        assert len(tapped.world.topic(topic).subscriptions) == 3
        for reader in readers:
            reader.close()
        assert not tapped.world.topic(topic).subscriptions
    asked = [frame.body for frame in tapped.frames(CommandType.SUBSCRIBE, since=since)]
    assert [(ask.consumer_name, ask.durable) for ask in asked] == [("", False)] * 3
    assert len({ask.subscription for ask in asked}) == 3


@pytest.mark.parametrize("kind", [Exclusive, Shared])
def test_trap_41_every_chunk_has_a_receipt_and_costs_a_permit(small: TappedBroker, topic: str, kind: Any) -> None:
    """A queue smaller than the chunks of one message: a permit lost for each would stall it."""
    since = len(small.seen)
    bodies = [bytes([n]) * 300_000 for n in range(8)]
    with client_of(small.service_url) as client:
        producer = client.create_producer(topic, chunking_enabled=True)
        for body in bodies:
            producer.send(body)
        consumer = client.subscribe(topic, "s", kind, initial_position=EARLIEST, receiver_queue_size=2)
        assert payloads_of(receive(consumer, len(bodies))) == bodies
        assert_silent(consumer)
    chunks = [frame.body for frame in small.frames(CommandType.SEND, since=since)]
    receipts = [frame.body for frame in small.frames(CommandType.SEND_RECEIPT, since=since)]
    delivered = [frame.body.message_id for frame in small.frames(CommandType.MESSAGE, since=since)]
    assert len(chunks) >= 5 * len(bodies)
    assert [receipt.sequence_id for receipt in receipts] == [chunk.sequence_id for chunk in chunks]
    assert [receipt.message_id for receipt in receipts] == delivered, "each once, in order"
