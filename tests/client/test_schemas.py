"""Schemas of values that are not records, and AutoSchema, which reads what others wrote."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

import cepheid
from cepheid_wire import pulsar_api_pb2 as pb
from tests.client.conftest import ClusterThread

RECEIVE_S = 30.0
AT = datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC)


@dataclass
class Point:
    x: int
    name: str | None = None


@pytest.mark.parametrize(
    ("kind", "value", "payload"),
    [
        ("BOOLEAN", True, "01"),
        ("INT8", -1, "ff"),
        ("INT16", 258, "0102"),
        ("INT32", -2, "fffffffe"),
        ("INT64", 1, "0000000000000001"),
        ("FLOAT", 1.5, "3fc00000"),
        ("DOUBLE", -2.0, "c000000000000000"),
        ("TIMESTAMP", AT, "0000019b7ca98f2e"),
        ("INSTANT", AT, "00000000695735a528697580"),
        ("LOCAL_DATE", date(1970, 1, 3), "0000000000000002"),
        ("LOCAL_TIME", time(0, 0, 1), "000000003b9aca00"),
        ("LOCAL_DATE_TIME", datetime(1970, 1, 2, 0, 0, 1), "0000000000000001000000003b9aca00"),  # noqa: DTZ001
    ],
)
def test_primitives_are_big_endian_as_in_java(kind: str, value: Any, payload: str) -> None:
    schema: cepheid.PrimitiveSchema[Any] = cepheid.PrimitiveSchema(kind)
    assert schema.encode(value).hex() == payload
    assert schema.decode(bytes.fromhex(payload)) == value


@pytest.mark.parametrize(
    ("kind", "value", "why"),
    [
        ("INT8", 128, "does not fit INT8"),
        ("INT64", True, "must be a int for INT64, got True"),
        ("TIMESTAMP", datetime(2026, 1, 1), "no time zone"),  # noqa: DTZ001
        ("DOUBLE", "1", "must be a float"),
    ],
)
def test_a_value_that_does_not_fit_a_primitive_schema(kind: str, value: Any, why: str) -> None:
    with pytest.raises(cepheid.UsageError, match=why):
        cepheid.PrimitiveSchema(kind).encode(value)


def test_a_payload_that_does_not_fit_a_primitive_schema() -> None:
    with pytest.raises(cepheid.UnreadableMessageError, match="3 bytes is not INT32, which has 4"):
        cepheid.PrimitiveSchema("INT32").decode(b"abc")


@pytest.mark.parametrize("payload", [b"", b"\0\0\0\x05ab", b"\0\0\0\x01a", b"\0\0\0\x01a\0\0\0\x02b"])
def test_a_damaged_pair_is_unreadable(payload: bytes) -> None:
    with pytest.raises(cepheid.UnreadableMessageError, match="pair of key and value"):
        cepheid.KeyValueSchema(str, bytes).decode(payload)


@pytest.mark.parametrize(
    ("schema", "value", "read"),
    [
        (str, "text", "text"),
        (int, 7, 7),
        (float, 1.5, 1.5),
        (bool, False, False),
        (datetime, AT, AT),
        (date, date(2026, 1, 2), date(2026, 1, 2)),
        (bytes, b"raw", b"raw"),
        (Point, Point(1), {"x": 1, "name": None}),
        (cepheid.AvroSchema(Point), Point(2, "two"), {"x": 2, "name": "two"}),
        (cepheid.KeyValueSchema(str, cepheid.AvroSchema(Point)), ("k", Point(3)), ("k", {"x": 3, "name": None})),
        (cepheid.KeyValueSchema(int, bytes), (None, b"v"), (None, b"v")),
    ],
)
async def test_values_are_read_with_their_schema_and_without(cluster: ClusterThread, schema: Any, value: Any, read: Any) -> None:
    topic = f"schemas-{uuid.uuid4()}"
    async with cepheid.connect(cluster.url) as client:
        async with client.producer(topic, schema=schema) as producer:
            await producer.send(value)
        async with client.reader(topic, schema=schema) as reader:
            assert (await reader.read(RECEIVE_S)).value == value
        async with client.consumer(topic, "s", start="earliest", schema=cepheid.AutoSchema()) as consumer:
            assert (await consumer.receive(RECEIVE_S)).value == read


async def test_protobuf_messages(cluster: ClusterThread, topic: str) -> None:
    value = pb.MessageIdData(ledgerId=1, entryId=2)
    async with cepheid.connect(cluster.url) as client:
        async with client.producer(topic, schema=pb.MessageIdData) as producer:
            await producer.send(value)
        async with client.reader(topic, schema=pb.MessageIdData) as reader:
            assert (await reader.read(RECEIVE_S)).value == value
        async with client.reader(topic, schema=cepheid.AutoSchema()) as reader:
            found = (await reader.read(RECEIVE_S)).value
            assert (found.ledgerId, found.entryId) == (1, 2)
        described = await client.topic_schema(topic)
        assert described is not None
        assert described.kind == "PROTOBUF_NATIVE"
        with pytest.raises(cepheid.SchemaError):
            await client.producer(topic, schema=Timestamp)


async def test_auto_schema_follows_the_versions_of_a_topic(cluster: ClusterThread, topic: str) -> None:
    @dataclass
    class Point:
        x: int

    async with cepheid.connect(cluster.url) as client:
        for schema, value in ((Point, Point(1)), (globals()["Point"], globals()["Point"](2, "new")), (bytes, b"{}")):
            async with client.producer(topic, schema=schema) as producer:
                await producer.send(value)
        async with client.reader(topic, schema=cepheid.AutoSchema()) as reader:
            values = [(await reader.read(RECEIVE_S)).value for _ in range(3)]
            assert values == [{"x": 1}, {"x": 2, "name": "new"}, b"{}"]
        async with client.producer(topic, schema=cepheid.AutoSchema()) as producer:
            with pytest.raises(cepheid.UsageError, match="for consumers and readers"):
                await producer.send(1)


@pytest.mark.parametrize("batching", [True, False])
async def test_keys_of_pairs_may_be_the_keys_of_messages(cluster: ClusterThread, batching: bool) -> None:
    topic = f"separated-{uuid.uuid4()}"
    schema = cepheid.KeyValueSchema(int, cepheid.AvroSchema(Point), separated=True)
    pairs = [(5, Point(1)), (6, None), (None, Point(2))]
    async with cepheid.connect(cluster.url) as client:
        async with client.producer(topic, schema=schema, batching=batching) as producer:
            await producer.send(pairs[0])
            for pair in pairs[1:]:
                producer.send_nowait(pair)
            with pytest.raises(cepheid.UsageError, match="leave key out"):
                await producer.send(pairs[0], key="five")
        async with client.reader(topic, schema=schema) as reader:
            messages = [await reader.read(RECEIVE_S) for _ in pairs]
            assert [message.value for message in messages] == pairs
            assert [message.key_bytes for message in messages] == [bytes(7) + b"\5", bytes(7) + b"\6", None]
            assert [message.is_null for message in messages] == [False, True, False]
        async with client.reader(topic, schema=cepheid.AutoSchema()) as reader:
            values = [(await reader.read(RECEIVE_S)).value for _ in pairs]
            assert values == [(5, {"x": 1, "name": None}), (6, None), (None, {"x": 2, "name": None})]


async def test_lookup_over_http(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.admin_url) as client:
        cluster.create_partitions(f"{topic}-a", 2)
        async with client.consumer(re.compile(f"public/default/{topic}.*"), "s", schema=cepheid.AutoSchema()) as consumer:
            assert len(consumer.topics) == 2
            for name, schema, value in (
                ("a", cepheid.AvroSchema(Point), Point(1)),
                ("b", cepheid.KeyValueSchema(str, Point), ("k", Point(2))),
                ("c", bytes, b"raw"),
            ):
                async with client.producer(f"{topic}-{name}", schema=schema) as producer:
                    await producer.send(value)
            values = [(await consumer.receive(RECEIVE_S)).value for _ in range(3)]
            assert {"x": 1, "name": None} in values
            assert ("k", {"x": 2, "name": None}) in values
            assert b"raw" in values
        assert await client.topic_schema(f"{topic}-c") is None
        with pytest.raises(cepheid.NotFoundError):
            await client.producer("public/nowhere/topic")
    async with cepheid.connect("http://127.0.0.1:1", request_timeout_s=0.2) as client:
        with pytest.raises(cepheid.TimedOutError, match="no admin API answers"):
            await client.producer(topic)
    with pytest.raises(cepheid.UsageError, match="not an admin address"):
        cepheid.connect("http://")


@pytest.mark.parametrize(("schema", "kind"), [(Point, "JSON"), (cepheid.AvroSchema(Point), "AVRO")])
async def test_dead_letters_have_the_schema_of_their_topic(cluster: ClusterThread, schema: Any, kind: str) -> None:
    topic = f"dead-{uuid.uuid4()}"
    async with cepheid.connect(cluster.url) as client, client.producer(topic, schema=schema) as producer:
        policy = cepheid.DeadLetters(after=1, subscription="look")
        async with client.consumer(topic, "s", type="shared", schema=schema, dead_letters=policy) as consumer:
            await producer.send(Point(1))
            for _ in range(2):
                consumer.nack(await consumer.receive(RECEIVE_S), delay=0)
            async with client.consumer(f"{topic}-s-DLQ", "look", schema=schema) as dead:
                assert (await dead.receive(RECEIVE_S)).value == Point(1)
        found = await client.topic_schema(f"{topic}-s-DLQ")
        assert found is not None
        assert found.kind == kind


async def test_dead_letters_go_to_a_topic_with_another_schema(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client, client.producer(topic, schema=Point) as producer:
        await (await client.producer(f"{topic}-s-DLQ", schema=str)).close()
        policy = cepheid.DeadLetters(after=1, subscription="look")
        async with client.consumer(topic, "s", type="shared", schema=Point, dead_letters=policy) as consumer:
            await producer.send(Point(1))
            for _ in range(2):
                consumer.nack(await consumer.receive(RECEIVE_S), delay=0)
            async with client.consumer(f"{topic}-s-DLQ", "look", start="earliest") as dead:
                assert (await dead.receive(RECEIVE_S)).data == b'{"x":1,"name":null}'


async def test_a_key_of_bytes_stays_one_in_dead_letters(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client, client.producer(topic) as producer:
        policy = cepheid.DeadLetters(after=1, subscription="look")
        async with client.consumer(topic, "s", type="shared", dead_letters=policy) as consumer:
            await producer.send(b"", key=b"\xff")
            for _ in range(2):
                consumer.nack(await consumer.receive(RECEIVE_S), delay=0)
            async with client.consumer(f"{topic}-s-DLQ", "look") as dead:
                message = await dead.receive(RECEIVE_S)
        assert (message.key, message.key_bytes) == ("/w==", b"\xff")


async def test_a_message_without_a_value_stays_one_in_dead_letters(cluster: ClusterThread, topic: str) -> None:
    schema = cepheid.AvroSchema(Point)
    async with cepheid.connect(cluster.url) as client, client.producer(topic, schema=schema) as producer:
        policy = cepheid.DeadLetters(after=1, subscription="look")
        async with client.consumer(topic, "s", type="shared", schema=schema, dead_letters=policy) as consumer:
            await producer.send(None, key="k")
            for _ in range(2):
                consumer.nack(await consumer.receive(RECEIVE_S), delay=0)
            async with client.consumer(f"{topic}-s-DLQ", "look", schema=schema) as dead:
                message = await dead.receive(RECEIVE_S)
        assert (message.is_null, message.value, message.key) == (True, None, "k")
