"""The rules of a connection: handshake, keepalive, broken bytes, refusals, and that nobody else notices."""

from __future__ import annotations

import asyncio
import logging
import random
import struct

import pytest
from google.protobuf import message_factory
from google.protobuf.message import Message

from cepheid_broker.settings import ConnectionSettings
from cepheid_wire import BODY_FIELDS, CommandType, ServerError, encode_body
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.broker_world import BrokerWorld
from tests.broker.scripted_client import full, message, send_frame, subscribe
from tests.support import wait_until

QUICK = ConnectionSettings(handshake_timeout_s=1.0, keepalive_s=0.5, liveness_probe_s=1.0)


async def test_trap_01_connected_says_what_every_client_needs() -> None:
    """The official client shows what is missing only as a timeout."""
    async with BrokerWorld() as world, await world.client(handshake=False) as client:
        connected = await client.ask(pb.CommandConnect(client_version="x", protocol_version=17), pb.CommandConnected)
        assert connected.HasField("server_version"), "required: without it C++ cannot parse the answer (trap 1)"
        assert connected.protocol_version == 17, "the smaller of both versions"
        assert connected.max_message_size == 5 * 1024 * 1024
        announced = {field.name for field, _ in connected.feature_flags.ListFields()}
        served = {"supports_topic_watchers", "supports_get_partitioned_metadata_without_auto_creation"}
        assert announced == served, "no feature is announced that is not served"


@pytest.mark.parametrize("first", [pb.CommandPing(), pb.CommandLookupTopic(topic="x", request_id=1), pb.CommandCloseConsumer()])
async def test_anything_before_connect_closes_the_connection(first: pb.CommandPing) -> None:
    async with BrokerWorld() as world, await world.client(handshake=False) as client:
        if isinstance(first, pb.CommandCloseConsumer):
            first.consumer_id = first.request_id = 0
        client.send(first)
        await client.expect_closed()


@pytest.mark.slow
async def test_a_second_connect_and_silence_before_connect_close_the_connection() -> None:
    async with BrokerWorld(connection=QUICK) as world:
        async with await world.client() as twice:
            twice.send(pb.CommandConnect(client_version="x"))
            await twice.expect_closed()
        async with await world.client(handshake=False) as silent:
            await silent.expect_closed()


@pytest.mark.slow
async def test_a_silent_peer_is_pinged_and_one_that_answers_lives() -> None:
    async with BrokerWorld(connection=QUICK) as world:
        async with await world.client() as alive, await world.client() as dead:
            dead.answer_pings = False
            living = asyncio.create_task(alive.expect_nothing(2.5))  # answers PINGs meanwhile
            await dead.expect(pb.CommandPing)
            await dead.expect_closed()
            await living
            await alive.ping()


async def test_trap_03_pong_comes_while_messages_flow() -> None:
    """C++ does not count MESSAGE as a sign of life. The official client asks every 30 s, which Python cannot change."""
    async with BrokerWorld() as world, await world.client() as client:
        await client.produce_on("t")
        await client.publish(200)
        await client.subscribe("t", "s", permits=1000)
        client.send(pb.CommandPing())
        kinds = []
        while pb.CommandPong not in kinds:
            received = await client.receive()
            assert received is not None
            kinds.append(type(received.body))


async def test_trap_06_one_request_id_may_be_in_flight_twice_for_different_commands() -> None:
    """C++ counts lookups and everything else apart."""
    async with BrokerWorld() as world, await world.client() as client:
        client.send(
            pb.CommandPartitionedTopicMetadata(topic=full("t"), request_id=0),
            pb.CommandProducer(topic=full("t"), producer_id=0, request_id=0),
            pb.CommandLookupTopic(topic=full("t"), request_id=0),
        )
        answers = [await client.receive() for _ in range(3)]
        assert {type(answer.body) for answer in answers if answer} == {
            pb.CommandPartitionedTopicMetadataResponse,
            pb.CommandProducerSuccess,
            pb.CommandLookupTopicResponse,
        }
        assert all(answer is not None and answer.body.request_id == 0 for answer in answers)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (struct.pack(">II", 100_000_000, 4) + b"\x08\x12", "the limit is"),  # oversized frame
        (struct.pack(">II", 20, 400) + bytes(400), "cannot be in a frame"),
        (encode_body(pb.CommandConnected(server_version="x")), "not a command for brokers"),
        (struct.pack(">II", 6, 2) + b"\x08\x7f", "type"),  # a command that does not exist
        (encode_body(pb.CommandFlow(consumer_id=0, messagePermits=0))[:-2], None),
        (b"GET / HTTP/1.1\r\n\r\n", "limit"),
        (encode_body(pb.CommandAuthResponse()), "without a challenge"),
        (send_frame(pb.CommandSend(producer_id=9, sequence_id=0), message(0)), "producer 9"),
    ],
)
async def test_broken_bytes_close_the_connection_with_a_logged_reason(
    data: bytes, reason: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="cepheid_broker")
    async with BrokerWorld() as world, await world.client() as other:
        async with await world.client() as client:
            client.send_bytes(data)
            if reason is None:  # a frame that stops in the middle: the client goes away
                await client.close()
            else:
                await client.expect_closed()
        await other.ping()
        await wait_until(lambda: any(record.message == "connection.closed" for record in caplog.records))
        closed = next(record for record in caplog.records if record.message == "connection.closed")
        assert (reason or "the peer closed") in closed.__dict__["reason"]
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def hostile_stream(rng: random.Random) -> bytes:
    """Good frames, some of them damaged, and noise."""
    good = [
        encode_body(pb.CommandLookupTopic(topic=full("f"), request_id=1)),
        encode_body(pb.CommandPartitionedTopicMetadata(topic=full("f"), request_id=2)),
        encode_body(pb.CommandProducer(topic=full("f"), producer_id=0, request_id=3)),
        encode_body(subscribe("f", "s", 0, 4, subType=pb.CommandSubscribe.Shared)),
        encode_body(pb.CommandFlow(consumer_id=0, messagePermits=1000)),
        encode_body(pb.CommandAck(consumer_id=0, ack_type=0, message_id=[pb.MessageIdData(ledgerId=3, entryId=1 << 63)])),
        encode_body(pb.CommandRedeliverUnacknowledgedMessages(consumer_id=0)),
        encode_body(pb.CommandSeek(consumer_id=0, request_id=5, message_publish_time=7)),
        encode_body(pb.CommandGetLastMessageId(consumer_id=0, request_id=6)),
        encode_body(pb.CommandUnsubscribe(consumer_id=0, request_id=7)),
        encode_body(pb.CommandCloseProducer(producer_id=0, request_id=8)),
        send_frame(pb.CommandSend(producer_id=0, sequence_id=1), message(1, b"x" * 50, messages=3)),
        encode_body(pb.CommandGetTopicsOfNamespace(namespace="public/default", request_id=9)),
        encode_body(pb.CommandConsumerStats(consumer_id=0, request_id=10)),
    ]
    stream = bytearray()
    for _ in range(rng.randint(1, 30)):
        frame = bytearray(rng.choice(good))
        match rng.randrange(5):
            case 0:
                frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
            case 1:
                frame = frame[: rng.randrange(len(frame))]
            case 2:
                frame[rng.randrange(len(frame))] = rng.randrange(256)
            case _:
                pass
        stream += frame
    if rng.random() < 0.3:
        stream += rng.randbytes(rng.randint(1, 200))
    return bytes(stream)


async def test_random_and_mutated_bytes_end_one_connection_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="cepheid_broker")
    rng = random.Random(0xC0FFEE)
    async with BrokerWorld() as world, await world.client() as witness:
        await witness.produce_on("w")
        await witness.subscribe("w", "s", permits=100_000)
        for round_number in range(150):
            attacker = await world.client(handshake=rng.random() < 0.9)
            data = hostile_stream(rng) if rng.random() < 0.8 else rng.randbytes(rng.randint(1, 3000))
            attacker.send_bytes(data)
            if rng.random() < 0.5:
                attacker.abort()
            else:
                await attacker.close()
            if round_number % 10 == 0:
                witness.send_message(round_number, b"still here")
                got = {type((await witness.receive()).body) for _ in range(2)}  # type: ignore[union-attr]
                assert got == {pb.CommandSendReceipt, pb.CommandMessage}
        await wait_until(lambda: world.broker.statistics().connections == 1, what="only the witness is connected")
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR], "an unexpected exception was logged"
    closed = [record for record in caplog.records if record.message == "connection.closed"]
    assert len(closed) >= 150
    assert all(record.__dict__["reason"] for record in closed)


async def test_the_broker_itself_closes_what_it_cannot_understand(caplog: pytest.LogCaptureFixture) -> None:
    """The peer never closes: whatever frame its bytes left half open, what follows cannot be a frame."""
    caplog.set_level(logging.INFO, logger="cepheid_broker")
    rng = random.Random(0xBADBAD)
    async with BrokerWorld() as world:
        for _ in range(25):
            attacker = await world.client()
            attacker.send_bytes(hostile_stream(rng) + b"\xff" * (6 << 20))
            await attacker.expect_closed()
        await wait_until(lambda: world.broker.statistics().connections == 0, what="no connection is left")
    reasons = [record.__dict__["reason"] for record in caplog.records if record.message == "connection.closed"]
    assert len(reasons) == 25
    assert all(reason and "the peer closed" not in reason for reason in reasons), reasons


@pytest.mark.parametrize(
    ("ask", "kind"),
    [
        (pb.CommandTcClientConnectRequest(request_id=7, tc_id=0), pb.CommandError),
        (pb.CommandNewTxn(request_id=7), pb.CommandNewTxnResponse),
        (pb.CommandAddPartitionToTxn(request_id=7), pb.CommandAddPartitionToTxnResponse),
        (pb.CommandAddSubscriptionToTxn(request_id=7), pb.CommandAddSubscriptionToTxnResponse),
        (pb.CommandEndTxn(request_id=7), pb.CommandEndTxnResponse),
        (pb.CommandEndTxnOnPartition(request_id=7), pb.CommandEndTxnOnPartitionResponse),
        (pb.CommandEndTxnOnSubscription(request_id=7), pb.CommandEndTxnOnSubscriptionResponse),
    ],
)
async def test_what_is_not_served_gets_an_error_in_the_reply_its_clients_wait_for(ask: pb.CommandNewTxn, kind: type) -> None:
    async with BrokerWorld() as world, await world.client() as client:
        answer = await client.ask(ask, kind)
        assert answer.request_id == 7
        code = answer.error_code if hasattr(answer, "error_code") else answer.error
        text = answer.error_message if hasattr(answer, "error_message") else answer.message
        assert code in (ServerError.NOT_ALLOWED_ERROR, ServerError.TOPIC_NOT_FOUND)
        assert "not supported yet" in text
        await client.ping()


BROKERS_ONLY = {
    "CONNECTED", "SEND_RECEIPT", "SEND_ERROR", "MESSAGE", "SUCCESS", "ERROR", "PRODUCER_SUCCESS", "PARTITIONED_METADATA_RESPONSE",
    "LOOKUP_RESPONSE", "CONSUMER_STATS_RESPONSE", "REACHED_END_OF_TOPIC", "GET_LAST_MESSAGE_ID_RESPONSE", "ACTIVE_CONSUMER_CHANGE",
    "GET_TOPICS_OF_NAMESPACE_RESPONSE", "GET_SCHEMA_RESPONSE", "AUTH_CHALLENGE", "ACK_RESPONSE", "GET_OR_CREATE_SCHEMA_RESPONSE",
    "NEW_TXN_RESPONSE", "ADD_PARTITION_TO_TXN_RESPONSE", "ADD_SUBSCRIPTION_TO_TXN_RESPONSE", "END_TXN_RESPONSE",
    "END_TXN_ON_PARTITION_RESPONSE", "END_TXN_ON_SUBSCRIPTION_RESPONSE", "TC_CLIENT_CONNECT_RESPONSE", "WATCH_TOPIC_LIST_SUCCESS",
    "WATCH_TOPIC_UPDATE", "TOPIC_MIGRATED", "SCALABLE_TOPIC_UPDATE", "SCALABLE_TOPIC_SUBSCRIBE_RESPONSE",
    "SCALABLE_TOPIC_ASSIGNMENT_UPDATE", "WATCH_SCALABLE_TOPICS_UPDATE", "WATCH_TC_ASSIGNMENTS_UPDATE",
}  # fmt: skip
WITHOUT_ANSWER = {"PONG", "FLOW", "REDELIVER_UNACKNOWLEDGED_MESSAGES"}


def smallest(kind: CommandType) -> Message:
    """The command with its required fields alone, and a request id where it has one."""
    body = pb.BaseCommand().DESCRIPTOR.fields_by_name[BODY_FIELDS[kind]].message_type
    command = fill(message_factory.GetMessageClass(body)())
    if "request_id" in body.fields_by_name:
        command.request_id = 7  # type: ignore[attr-defined]
    return command


def fill(command: Message) -> Message:
    for field in command.DESCRIPTOR.fields:
        if field.is_required and field.message_type is not None:
            getattr(command, field.name).SetInParent()
            fill(getattr(command, field.name))
        elif field.is_required:
            value = field.enum_type.values[0].number if field.enum_type is not None else field.default_value
            setattr(command, field.name, value)
    return command


@pytest.mark.parametrize(
    "kind", sorted(set(CommandType) - {CommandType.SEND}, key=lambda kind: kind.name), ids=lambda kind: kind.name
)
async def test_every_command_is_answered_or_closes_with_a_reason(kind: CommandType, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="cepheid_broker")
    async with BrokerWorld() as world, await world.client() as client:
        client.send(smallest(kind))
        if kind.name in WITHOUT_ANSWER:
            await client.ping()
        else:
            answer = await client.receive()
            if answer is not None:
                assert getattr(answer.body, "request_id", 7) == 7
                await client.ping()
        closed = [record.__dict__["reason"] for record in caplog.records if record.message == "connection.closed"]
        not_ours = any(reason.startswith(f"{kind.name} is not a command for brokers") for reason in closed)
        assert (kind.name in BROKERS_ONLY) == not_ours, closed
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_lost_connection_frees_names_and_exclusive_slots_at_once() -> None:
    async with BrokerWorld() as world:
        first = await world.client()
        await first.produce_on("t", producer_name="p")
        await first.subscribe("t", "s")
        first.abort()
        async with await world.client() as second:
            await second.produce_on("t", producer_name="p")
            await second.subscribe("t", "s")
            topic = world.topic("t")
            assert (list(topic.producers), len(topic.subscriptions["s"].consumers)) == (["p"], 1)


async def test_a_slow_reader_stops_nobody_else() -> None:
    settings = ConnectionSettings(write_high_bytes=64 * 1024)
    async with BrokerWorld(connection=settings) as world:
        async with await world.client() as fast, await world.client() as slow:
            await fast.produce_on("t")
            await slow.subscribe("t", "slow", permits=1000)
            await fast.subscribe("t", "fast", permits=1000)
            for sequence_id in range(300):
                fast.send_message(sequence_id, bytes(100_000))
            got = 0
            while got < 300:  # `slow` never reads
                received = await fast.receive()
                assert received is not None
                got += isinstance(received.body, pb.CommandMessage)
            assert "sockets" in world.topic("t").subscriptions["slow"].figures().idle
            for _ in range(300):  # and misses nothing when it reads again
                await slow.expect_message()


@pytest.mark.slow
async def test_a_peer_that_never_reads_its_answers_is_closed_and_its_place_is_free(caplog: pytest.LogCaptureFixture) -> None:
    """We do not read it either, so it cannot be asked whether it lives; and TCP keeps such a connection for ever."""
    settings = ConnectionSettings(write_high_bytes=64 * 1024, keepalive_s=0.2)
    async with BrokerWorld(connection=settings) as world:
        rude = await world.client()
        rude.send(subscribe("t", "s", 0, 1, subType=pb.CommandSubscribe.Exclusive, consumer_name="x" * 1000))
        await rude.expect(pb.CommandSuccess)
        caplog.set_level(logging.INFO, logger="cepheid_broker")
        for _ in range(20):  # answers of more than 1 kB each, and nobody reads
            rude.send(*(pb.CommandConsumerStats(consumer_id=0, request_id=request_id) for request_id in range(1000)))

        await wait_until(lambda: not world.topic("t").subscriptions["s"].consumers)
        reasons = [record.__dict__["reason"] for record in caplog.records if record.message == "connection.closed"]
        assert reasons == ["did not read its answers for 0.4 s"]
        rude.abort()


async def test_the_publish_window_stops_reading_and_goes_on() -> None:
    settings = ConnectionSettings(publish_window_bytes=100_000)
    async with BrokerWorld(connection=settings) as world, await world.client() as client:
        await client.produce_on("t")
        for sequence_id in range(200):
            client.send_message(sequence_id, bytes(10_000))
        for sequence_id in range(200):
            assert (await client.expect(pb.CommandSendReceipt)).sequence_id == sequence_id


async def test_requests_beyond_the_limit_close_the_connection() -> None:
    async with BrokerWorld(connection=ConnectionSettings(max_waiting_requests=10)) as world:
        async with await world.client() as client:
            for number in range(100):
                client.send(pb.CommandPartitionedTopicMetadata(topic=full(f"t{number}"), request_id=number))
            await client.expect_closed()
        async with await world.client() as next_client:
            await next_client.ping()


async def test_the_port_being_in_use_says_what_to_do() -> None:
    async with BrokerWorld() as world:
        with pytest.raises(Exception, match=r"cannot listen on 127.0.0.1:\d+.*stop the process"):
            await BrokerWorld(port=world.port).start()
