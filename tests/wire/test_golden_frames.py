"""Frames captured from the official client, and replies that it accepted (protocol.md §28): byte for byte, both ways."""

from __future__ import annotations

import pytest

from cepheid_wire import (
    PING_FRAME,
    PONG_FRAME,
    CommandType,
    Frame,
    FrameSplitter,
    count_messages,
    decode_batch,
    encode_batch,
    encode_command,
    encode_send_receipt,
    encode_tail,
    parse_command,
    parse_metadata,
    parse_send,
    read_metadata,
    split_tail,
    verify_tail,
)
from cepheid_wire import pulsar_api_pb2 as pb

Type = pb.BaseCommand.Type
TOPIC = "persistent://public/default/t"
PUBLISH_TIME_MS = 1_795_237_001_946

GOLDEN = {
    "CONNECT": "00000029 00000025 0802 1221 0a1150756c7361722d4350502d76342e322e30 2014 2a046e6f6e65 5204 0801 1001",
    "PARTITIONED_METADATA": "0000002a 00000026 0815 aa01210a1d70657273697374656e743a2f2f7075626c69632f64656661756c742f74 1001",
    "LOOKUP": "0000002e 0000002a 0817 ba0125 0a1d70657273697374656e743a2f2f7075626c69632f64656661756c742f74 1002 1800 3a00",
    "PRODUCER": "00000036 00000032 0805 2a2e 0a1d70657273697374656e743a2f2f7075626c69632f64656661756c742f74"
    "1000 1800 220170 2800 4000 4801 5000",
    "SEND plain": "00000027 00000008 0806 3204 0800 1000 0e01 012cb4cf 0000000c 0a0170 1000 18daf5dae39f34 68656c6c6f",
    "SEND batch of one": "00000033 0000000a 0806 3206 0801 1000 1801 0e01 fc239828 0000000e 0a0171 1000 18daf5dae39f34 5801"
    "00000004 1805 4000 68656c6c6f",
    "SEND batch of two": "0000003a 0000000a 0806 3206 0801 1001 1802 0e01 63ce3ef6 0000000e 0a0171 1001 18e5f5dae39f34 5802"
    "00000004 1802 4001 6162 00000004 1802 4002 6162",
    "SUBSCRIBE": "00000046 00000042 0804 223e 0a1d70657273697374656e743a2f2f7075626c69632f64656661756c742f74"
    "120173 1800 2000 2802 320a 63376637326635646436 3800 4001 5800 6801 7000",
    "FLOW": "0000000d 00000009 080b 5a05 0800 10e807",
    "ACK": "0000001e 0000001a 080a 5216 0800 1000 1a04 0801 1000 1a04 0801 1001 1a04 0801 1002",
    "CLOSE_CONSUMER": "0000000d 00000009 0810 820104 0800 1003",
    "CLOSE_PRODUCER": "0000000c 00000008 080f 7a04 0801 1004",
    "CONNECTED": "00000012 0000000e 0803 1a0a 0a0178 1014 188080c002",
    "PARTITIONED_METADATA_RESPONSE": "0000000f 0000000b 0816 b20106 0800 1001 1800",
    "PRODUCER_SUCCESS": "0000001d 00000019 0811 8a0114 0800 120170 18ffffffffffffffffff01 2200 3001",
    "SEND_RECEIPT": "00000012 0000000e 0807 3a0a 0800 1000 1a04 0801 1000",
    "SUCCESS": "0000000a 00000006 080d 6a02 0802",
    "CLOSE_CONSUMER from broker": "00000016 00000012 0810 82010d 0800 10ffffffffffffffffff01",
    "PING": "00000009 00000005 0812 920100",
    "PONG": "00000009 00000005 0813 9a0100",
}

COMMANDS = {
    "CONNECT": pb.BaseCommand(
        type=Type.CONNECT,
        connect=pb.CommandConnect(
            client_version="Pulsar-CPP-v4.2.0",
            protocol_version=20,
            auth_method_name="none",
            feature_flags=pb.FeatureFlags(supports_auth_refresh=True, supports_broker_entry_metadata=True),
        ),
    ),
    "PARTITIONED_METADATA": pb.BaseCommand(
        type=Type.PARTITIONED_METADATA, partitionMetadata=pb.CommandPartitionedTopicMetadata(topic=TOPIC, request_id=1)
    ),
    "LOOKUP": pb.BaseCommand(
        type=Type.LOOKUP,
        lookupTopic=pb.CommandLookupTopic(topic=TOPIC, request_id=2, authoritative=False, advertised_listener_name=""),
    ),
    "PRODUCER": pb.BaseCommand(
        type=Type.PRODUCER,
        producer=pb.CommandProducer(
            topic=TOPIC,
            producer_id=0,
            request_id=0,
            producer_name="p",
            encrypted=False,
            epoch=0,
            user_provided_producer_name=True,
            producer_access_mode=pb.ProducerAccessMode.Shared,
        ),
    ),
    "SEND plain": pb.BaseCommand(type=Type.SEND, send=pb.CommandSend(producer_id=0, sequence_id=0)),
    "SEND batch of one": pb.BaseCommand(type=Type.SEND, send=pb.CommandSend(producer_id=1, sequence_id=0, num_messages=1)),
    "SEND batch of two": pb.BaseCommand(type=Type.SEND, send=pb.CommandSend(producer_id=1, sequence_id=1, num_messages=2)),
    "SUBSCRIBE": pb.BaseCommand(
        type=Type.SUBSCRIBE,
        subscribe=pb.CommandSubscribe(
            topic=TOPIC,
            subscription="s",
            subType=pb.CommandSubscribe.SubType.Exclusive,
            consumer_id=0,
            request_id=2,
            consumer_name="c7f72f5dd6",
            priority_level=0,
            durable=True,
            read_compacted=False,
            initialPosition=pb.CommandSubscribe.InitialPosition.Earliest,
            replicate_subscription_state=False,
        ),
    ),
    "FLOW": pb.BaseCommand(type=Type.FLOW, flow=pb.CommandFlow(consumer_id=0, messagePermits=1000)),
    "ACK": pb.BaseCommand(
        type=Type.ACK,
        ack=pb.CommandAck(
            consumer_id=0,
            ack_type=pb.CommandAck.AckType.Individual,
            message_id=[pb.MessageIdData(ledgerId=1, entryId=entry_id) for entry_id in range(3)],
        ),
    ),
    "CLOSE_CONSUMER": pb.BaseCommand(type=Type.CLOSE_CONSUMER, close_consumer=pb.CommandCloseConsumer(consumer_id=0, request_id=3)),
    "CLOSE_PRODUCER": pb.BaseCommand(type=Type.CLOSE_PRODUCER, close_producer=pb.CommandCloseProducer(producer_id=1, request_id=4)),
    "CONNECTED": pb.BaseCommand(
        type=Type.CONNECTED,
        connected=pb.CommandConnected(server_version="x", protocol_version=20, max_message_size=5_242_880),
    ),
    "PARTITIONED_METADATA_RESPONSE": pb.BaseCommand(
        type=Type.PARTITIONED_METADATA_RESPONSE,
        partitionMetadataResponse=pb.CommandPartitionedTopicMetadataResponse(
            partitions=0, request_id=1, response=pb.CommandPartitionedTopicMetadataResponse.LookupType.Success
        ),
    ),
    "PRODUCER_SUCCESS": pb.BaseCommand(
        type=Type.PRODUCER_SUCCESS,
        producer_success=pb.CommandProducerSuccess(
            request_id=0, producer_name="p", last_sequence_id=-1, schema_version=b"", producer_ready=True
        ),
    ),
    "SEND_RECEIPT": pb.BaseCommand(
        type=Type.SEND_RECEIPT,
        send_receipt=pb.CommandSendReceipt(producer_id=0, sequence_id=0, message_id=pb.MessageIdData(ledgerId=1, entryId=0)),
    ),
    "SUCCESS": pb.BaseCommand(type=Type.SUCCESS, success=pb.CommandSuccess(request_id=2)),
    "CLOSE_CONSUMER from broker": pb.BaseCommand(
        type=Type.CLOSE_CONSUMER, close_consumer=pb.CommandCloseConsumer(consumer_id=0, request_id=2**64 - 1)
    ),
    "PING": pb.BaseCommand(type=Type.PING, ping=pb.CommandPing()),
    "PONG": pb.BaseCommand(type=Type.PONG, pong=pb.CommandPong()),
}


def golden(name: str) -> bytes:
    return bytes.fromhex(GOLDEN[name])


def split(name: str) -> Frame:
    (frame,) = FrameSplitter(5 * 1024 * 1024).feed(golden(name))
    return frame


@pytest.mark.parametrize("name", GOLDEN)
def test_every_golden_frame_reads_and_writes(name: str) -> None:
    frame = split(name)
    command = parse_command(frame.command)
    assert command == COMMANDS[name]
    assert frame.type == CommandType[name.split()[0]]
    assert encode_command(COMMANDS[name], frame.tail) == golden(name)


def test_hand_written_frames_are_the_golden_ones() -> None:
    assert golden("PING") == PING_FRAME
    assert golden("PONG") == PONG_FRAME
    assert encode_send_receipt(0, 0, 1, 0) == golden("SEND_RECEIPT")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("SEND plain", (0, 0, None, None, False, None, None, False)),
        ("SEND batch of one", (1, 0, 1, None, False, None, None, False)),
        ("SEND batch of two", (1, 1, 2, None, False, None, None, False)),
    ],
)
def test_golden_sends_are_read(name: str, expected: tuple[object, ...]) -> None:
    assert parse_send(split(name).command) == expected


def test_a_golden_plain_message_is_rebuilt_from_its_parts() -> None:
    tail = split("SEND plain").tail
    verify_tail(tail)
    metadata = pb.MessageMetadata(producer_name="p", sequence_id=0, publish_time=PUBLISH_TIME_MS)
    assert parse_metadata(tail) == metadata
    assert bytes(split_tail(tail)[1]) == b"hello"
    assert encode_tail(metadata, b"hello") == tail
    assert (count_messages(tail), read_metadata(tail).is_batch) == (1, False)


@pytest.mark.parametrize(
    ("name", "publish_time_ms", "messages"),
    [
        ("SEND batch of one", PUBLISH_TIME_MS, [(0, b"hello")]),
        ("SEND batch of two", PUBLISH_TIME_MS + 11, [(1, b"ab"), (2, b"ab")]),
    ],
)
def test_a_golden_batch_is_rebuilt_from_its_messages(name: str, publish_time_ms: int, messages: list[tuple[int, bytes]]) -> None:
    tail = split(name).tail
    verify_tail(tail)
    payload = split_tail(tail)[1]
    assert [(m.sequence_id, bytes(body)) for m, body in decode_batch(payload, len(messages))] == messages
    assert (count_messages(tail), read_metadata(tail).is_batch) == (len(messages), True)
    metadata = pb.MessageMetadata(
        producer_name="q", sequence_id=messages[0][0], publish_time=publish_time_ms, num_messages_in_batch=len(messages)
    )
    batch = encode_batch((pb.SingleMessageMetadata(sequence_id=sequence_id), body) for sequence_id, body in messages)
    assert encode_tail(metadata, batch) == tail
