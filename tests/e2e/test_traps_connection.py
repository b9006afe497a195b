"""Traps 1 to 9 of protocol.md §27, with the official client: what a connection may and must carry."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pulsar
import pytest

from cepheid_wire import CommandType
from cepheid_wire import pulsar_api_pb2 as pb
from tests.e2e.official_client import EARLIEST, TIMEOUT_MS, client_of, payloads_of, publish, receive, wait_for
from tests.e2e.tapped_broker import TappedBroker

KIB = 1 << 10
NO_REQUEST = (1 << 64) - 1

KNOWN_TO_CPP = {
    CommandType[name]
    for name in (
        "CONNECTED", "SEND_RECEIPT", "SEND_ERROR", "SUCCESS", "ERROR", "PRODUCER_SUCCESS", "PARTITIONED_METADATA_RESPONSE",
        "LOOKUP_RESPONSE", "CONSUMER_STATS_RESPONSE", "GET_LAST_MESSAGE_ID_RESPONSE", "GET_TOPICS_OF_NAMESPACE_RESPONSE",
        "GET_SCHEMA_RESPONSE", "ACK_RESPONSE", "MESSAGE", "CLOSE_PRODUCER", "CLOSE_CONSUMER", "ACTIVE_CONSUMER_CHANGE",
        "AUTH_CHALLENGE", "PING", "PONG",
    )
}  # fmt: skip
"""protocol.md §2.4, without TOPIC_MIGRATED."""


def test_trap_01_connected_has_a_server_version(tapped: TappedBroker, topic: str) -> None:
    """Without it the client cannot parse the answer, and creating a producer times out."""
    with client_of(tapped.service_url) as client:
        client.create_producer(topic).send(b"x")
    connected = tapped.frames(CommandType.CONNECTED)
    assert connected
    assert all(frame.body.HasField("server_version") and frame.body.protocol_version == 20 for frame in connected)


@pytest.mark.slow
def test_trap_02_a_refusal_before_connected_is_a_timeout_for_the_client(tapped: TappedBroker, topic: str) -> None:
    """What tests of authentication have to expect. The tap refuses in the place of the broker, which has none yet."""
    tried = tapped.connections
    refusal = pb.CommandError(request_id=NO_REQUEST, error=pb.AuthenticationError, message="who are you?")
    with tapped.connects_refused(refusal), client_of(tapped.service_url, operation_timeout_seconds=2) as client:
        with pytest.raises(pulsar.Timeout):
            client.create_producer(topic)
    assert tapped.connections - tried > 1, "it takes the refusal for a failure that passes, and tries again"


@pytest.mark.parametrize(
    ("method", "authentication"),
    [("token", pulsar.AuthenticationToken("abc")), ("basic", pulsar.AuthenticationBasic("user", "password"))],
)
def test_trap_02_credentials_that_nobody_asks_for_do_no_harm(
    tapped: TappedBroker, topic: str, method: str, authentication: pulsar.Authentication
) -> None:
    """Refusing them would show as a Timeout that explains nothing."""
    with client_of(tapped.service_url, authentication=authentication) as client:
        client.create_producer(topic).send(b"x")
    assert tapped.frames(CommandType.CONNECT)[-1].body.auth_method_name == method


def test_trap_04_no_command_comes_that_cpp_does_not_know(tapped: TappedBroker, topic: str) -> None:
    """Each would cost the connection. Here a topic ends and moves, consumers take over and seek."""
    since, connections = len(tapped.seen), tapped.connections
    with client_of(tapped.service_url) as client:
        ended = client.subscribe(topic, "s", initial_position=EARLIEST, unacked_messages_timeout_ms=10_000)
        standby = [client.subscribe(topic, "f", pulsar.ConsumerType.Failover, consumer_name=name) for name in "ba"]
        publish(client, topic, [b"1", b"2"])
        receive(ended, 2)
        tapped.run(tapped.world.topic(topic).terminate())
        with pytest.raises(pulsar.TopicTerminated):
            client.create_producer(topic)
        ledger = tapped.world.topic(topic).ledger
        wait_for(lambda: ledger.cursors["s"].mark_delete == ledger.last_confirmed, "the end is reached")
        receive(standby[1], 2)
        ended.seek(pulsar.MessageId.earliest)
        receive(ended, 2)
        tapped.run(tapped.world.broker.topics.unload(tapped.world.topic(topic).name))
        publish(client, f"{topic}-2", [b"3"])
        assert ended.get_last_message_id().entry_id() == 1
        assert ended.is_connected()
    got = {frame.kind for frame in tapped.seen[since:] if frame.from_broker}
    assert {CommandType.ACTIVE_CONSUMER_CHANGE, CommandType.CLOSE_CONSUMER, CommandType.MESSAGE} <= got <= KNOWN_TO_CPP
    assert tapped.connections == connections + 1, "it lost its connection"


def test_trap_05_a_client_with_debug_logging_survives_moves(tapped: TappedBroker, topic: str) -> None:
    """TOPIC_MIGRATED would abort its process."""
    since = len(tapped.seen)
    script = f"""
import pulsar
client = pulsar.Client({tapped.service_url!r}, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Debug))
consumer = client.subscribe({topic!r}, "s")
producer = client.create_producer({topic!r})
for number in range(4):
    producer.send(b"%d" % number)
    while consumer.receive({TIMEOUT_MS}).data() != b"%d" % number:
        pass
    print("=" * 8, number, flush=True)
    input()
client.close()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen([sys.executable, "-c", script], text=True, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for number in range(4):
            while (line := process.stdout.readline()) != f"{'=' * 8} {number}\n":
                assert line, f"it ended before message {number}"
            tapped.run(tapped.world.broker.topics.unload(tapped.world.topic(topic).name))
            process.stdin.write("\n")
            process.stdin.flush()
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output[-2000:]
    assert len([frame for frame in tapped.frames(CommandType.CLOSE_PRODUCER, since=since) if frame.from_broker]) >= 3, "it moved"
    assert not tapped.frames(CommandType.TOPIC_MIGRATED)


def test_trap_06_the_client_uses_one_request_id_twice_at_a_time(tapped: TappedBroker, topic: str) -> None:
    """It counts lookups apart from everything else. Both requests are made to reach the broker in one piece."""
    with client_of(tapped.service_url) as client:
        consumer = client.subscribe(topic, "s")  # lookups 1 and 2, request 0
        publish(client, topic, [b"x"])  # lookups 3 and 4, requests 1 and 2
        for _ in range(2):
            consumer.get_last_message_id()  # requests 3 and 4
        since, answers = len(tapped.seen), []

        def asked() -> list[Any]:
            return tapped.frames(CommandType.GET_LAST_MESSAGE_ID, CommandType.PARTITIONED_METADATA, since=since)

        threads = [
            threading.Thread(target=lambda: answers.append(consumer.get_last_message_id().entry_id())),
            threading.Thread(target=lambda: answers.append(client.get_topic_partitions(f"{topic}-new"))),
        ]
        with tapped.requests_held():
            for number, thread in enumerate(threads, 1):
                thread.start()
                wait_for(lambda number=number: len(asked()) == number, "the request at the tap")
        for thread in threads:
            thread.join(60)
        assert answers in ([0, [f"persistent://public/default/{topic}-new"]], [[f"persistent://public/default/{topic}-new"], 0])
    assert [frame.body.request_id for frame in asked()] == [5, 5]


def test_trap_07_ids_of_zero_are_ids(tapped: TappedBroker, topic: str) -> None:
    """The client's first producer, consumer, request and sequence id, and the first entry, are all 0."""
    since = len(tapped.seen)
    with client_of(tapped.service_url) as client:
        consumer = client.subscribe(topic, "s", pulsar.ConsumerType.Shared, negative_ack_redelivery_delay_ms=100)
        producer = client.create_producer(topic)
        first = producer.send(b"first")
        assert producer.last_sequence_id() == 0
        assert first.entry_id() == 0
        consumer.negative_acknowledge(consumer.receive(TIMEOUT_MS))
        again = consumer.receive(TIMEOUT_MS)
        assert again.redelivery_count() == 1
        consumer.acknowledge(again)
        consumer.seek(0)  # the beginning of time
        assert payloads_of(receive(consumer, 1)) == [b"first"]
        consumer.unsubscribe()
        producer.close()
    (subscribe, *_), (create,) = tapped.frames(CommandType.SUBSCRIBE, since=since), tapped.frames(CommandType.PRODUCER, since=since)
    assert (subscribe.body.consumer_id, subscribe.body.request_id) == (0, 0)
    assert create.body.producer_id == 0
    (seek,) = tapped.frames(CommandType.SEEK, since=since)
    assert seek.body.HasField("message_publish_time")


def test_trap_08_the_last_connected_limits_every_producer_of_the_process(
    tapped: TappedBroker, small: TappedBroker, topic: str
) -> None:
    """A fact of the client that tests with two brokers have to mind; each broker tells its own limit."""
    payload = bytes(200 * KIB)
    with client_of(tapped.service_url) as client, client_of(small.service_url) as small_client:
        producer = client.create_producer(topic)
        producer.send(payload)
        small_producer = small_client.create_producer(topic)
        with pytest.raises(pulsar.MessageTooBig):
            small_producer.send(payload)
        with pytest.raises(pulsar.MessageTooBig):
            producer.send(payload)
        with client_of(tapped.service_url) as third:
            third.create_producer(topic).send(payload)
        producer.send(payload)
    limits = [broker.frames(CommandType.CONNECTED)[-1].body.max_message_size for broker in (tapped, small)]
    assert limits == [5 * KIB * KIB, 64 * KIB]


def test_trap_09_frames_of_a_legal_message_may_exceed_the_limit(small: TappedBroker, topic: str) -> None:
    """The client cuts chunks by the limit, and adds the fields of chunks and the command after that."""
    since, connections = len(small.seen), small.connections
    with client_of(small.service_url) as client:
        producer = client.create_producer(topic, chunking_enabled=True, send_timeout_millis=5_000)
        body = bytes(range(256)) * KIB
        producer.send(body)
        consumer = client.subscribe(topic, "s", initial_position=EARLIEST)
        assert payloads_of(receive(consumer, 1)) == [body]
    largest = max(len(frame.tail) for frame in small.frames(CommandType.SEND, since=since))
    assert largest > 64 * KIB, "else this shows nothing"
    assert small.connections == connections + 1
