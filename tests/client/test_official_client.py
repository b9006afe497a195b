"""What this client publishes the official one reads, and the other way round; also by schema."""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

import pulsar
import pytest
from pulsar.schema import AvroSchema, Double, Integer, JsonSchema, ProtobufNativeSchema, Record, String, StringSchema

import cepheid
from cepheid_wire import pulsar_api_pb2 as pb
from tests.client.conftest import ClusterThread

R = TypeVar("R")
RECEIVE_S = 30.0


@dataclasses.dataclass
class Order:
    """Optional fields, since those of the official client's records are."""

    name: str | None = None
    count: cepheid.Int32 | None = None
    price: float | None = None


class OfficialOrder(Record):  # type: ignore[misc]  # the official client has no types
    name = String()
    count = Integer()
    price = Double()


OfficialOrder.__name__ = "Order"
ORDER = Order("tea", 3, 2.5)
SCHEMAS = [
    (cepheid.JsonSchema(Order), JsonSchema(OfficialOrder)),
    (cepheid.AvroSchema(Order), AvroSchema(OfficialOrder)),
]


async def official(cluster: ClusterThread, work: Callable[[pulsar.Client], R]) -> R:
    """Run blocking calls of the official client in a thread."""

    def call() -> R:
        client = pulsar.Client(cluster.url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
        try:
            return work(client)
        finally:
            client.close()

    return await asyncio.get_running_loop().run_in_executor(None, call)


@pytest.mark.parametrize("compression", ["none", "zlib", "lz4", "zstd", "snappy"])
@pytest.mark.parametrize("batching", [True, False])
async def test_the_official_client_reads_what_we_publish(
    cluster: ClusterThread, topic: str, compression: Any, batching: bool
) -> None:
    async with cepheid.connect(cluster.url) as client:
        async with client.producer(topic, batching=batching, compression=compression) as producer:
            producer.send_nowait(b"plain")
            producer.send_nowait(b"x" * 1000, key="k", properties={"a": "b"}, event_time=7)

    def read(client: pulsar.Client) -> list[Any]:
        reader = client.create_reader(topic, pulsar.MessageId.earliest)
        messages = [reader.read_next(30_000) for _ in range(2)]
        return [(m.data(), m.partition_key(), m.properties(), m.event_timestamp()) for m in messages]

    assert await official(cluster, read) == [(b"plain", "", {}, 0), (b"x" * 1000, "k", {"a": "b"}, 7)]


@pytest.mark.parametrize(
    "options", [{}, {"batching_enabled": True, "compression_type": pulsar.CompressionType.LZ4}, {"chunking_enabled": True}]
)
async def test_we_read_what_the_official_client_publishes(cluster: ClusterThread, topic: str, options: dict[str, Any]) -> None:
    large = bytes(range(256)) * (6 << 12) if "chunking_enabled" in options else b"x" * 1000

    def publish(client: pulsar.Client) -> bytes:
        producer = client.create_producer(topic, **options)
        producer.send_async(b"plain", lambda *_: None)
        last = producer.send(large, partition_key="k", properties={"a": "b"}, event_timestamp=7)
        return bytes(last.serialize())

    last = cepheid.MessageId.from_bytes(await official(cluster, publish))
    async with cepheid.connect(cluster.url) as client, client.reader(topic) as reader:
        plain, second = await reader.read(RECEIVE_S), await reader.read(RECEIVE_S)
        assert (plain.data, plain.key, dict(plain.properties)) == (b"plain", None, {})
        assert (second.data == large, second.key, dict(second.properties)) == (True, "k", {"a": "b"})
        assert second.event_time is not None
        assert second.event_time.timestamp() == 0.007
        assert second.message_id[:2] == last[:2]


@pytest.mark.parametrize(("ours", "theirs"), SCHEMAS, ids=["json", "avro"])
async def test_records_both_ways(cluster: ClusterThread, topic: str, ours: Any, theirs: Any) -> None:
    def publish_and_read(client: pulsar.Client) -> Any:
        producer = client.create_producer(topic, schema=theirs)
        producer.send(OfficialOrder(name="coffee", count=1, price=0.5))
        reader = client.create_reader(topic, pulsar.MessageId.earliest, schema=theirs)
        read = reader.read_next(30_000).value()
        return read.name, read.count, read.price

    async with cepheid.connect(cluster.url) as client:
        async with client.producer(topic, schema=ours) as producer:
            await producer.send(ORDER)
        assert await official(cluster, publish_and_read) == ("tea", 3, 2.5)
        async with client.consumer(topic, "s", schema=ours, start="earliest") as consumer:
            assert [(await consumer.receive(RECEIVE_S)).value for _ in range(2)] == [ORDER, Order("coffee", 1, 0.5)]


@dataclasses.dataclass
class OrderV2:
    name: str | None = None
    count: cepheid.Int32 | None = None
    price: float | None = None
    note: str | None = None


OrderV2.__name__ = "Order"


@dataclasses.dataclass
class OrderFirst:
    """A version whose Avro cannot be read without its own definition: it has a field before the others."""

    note: str | None = None
    name: str | None = None
    count: cepheid.Int32 | None = None
    price: float | None = None


OrderFirst.__name__ = "Order"


async def test_avro_is_read_with_the_schema_that_it_was_written_with(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.connect(cluster.url) as client:
        async with client.producer(topic, schema=cepheid.AvroSchema(Order)) as old:
            await old.send(ORDER)
        async with client.producer(topic, schema=cepheid.AvroSchema(OrderV2)) as new:
            await new.send(OrderV2(note="new"))
        async with client.reader(topic, schema=cepheid.AvroSchema(OrderV2)) as reader:
            assert [(await reader.read(RECEIVE_S)).value for _ in range(2)] == [OrderV2("tea", 3, 2.5), OrderV2(note="new")]
        async with client.reader(topic, schema=cepheid.AvroSchema(Order)) as reader:
            assert [(await reader.read(RECEIVE_S)).value for _ in range(2)] == [ORDER, Order()]


@pytest.mark.parametrize("read_as", ["type", "auto", "bytes"])
@pytest.mark.parametrize("kind", ["AVRO", "JSON", "PROTOBUF_NATIVE"])
async def test_dead_letters_and_retries_have_the_schemas_of_their_messages(cluster: ClusterThread, kind: str, read_as: str) -> None:
    topic = f"written-{kind}-{read_as}-{uuid.uuid4().hex[:8]}"
    ours: Any
    if kind == "PROTOBUF_NATIVE":
        ours, theirs = pb.MessageIdData, ProtobufNativeSchema(pb.MessageIdData)
        written = [(ours, pb.MessageIdData(ledgerId=1, entryId=2)), (ours, pb.MessageIdData(ledgerId=3, entryId=4))]
    else:
        ours, theirs_of = (cepheid.AvroSchema, AvroSchema) if kind == "AVRO" else (cepheid.JsonSchema, JsonSchema)
        theirs = theirs_of(OfficialOrder)
        written = [(ours(Order), ORDER), (ours(OrderFirst), OrderFirst("an earlier field", "coffee", 1, 0.5))]
    schema = {"type": written[0][0], "auto": cepheid.AutoSchema(), "bytes": bytes}[read_as]
    dead = cepheid.DeadLetters(after=1, subscription="look")
    async with cepheid.connect(cluster.url) as client:
        async with client.consumer(topic, "s", type="shared", schema=schema, retry=True, dead_letters=dead) as consumer:
            for each, value in written:
                async with client.producer(topic, schema=each) as producer:
                    await producer.send(value)
            for _ in range(2 * len(written)):  # to the retry topic, then to the other one
                await consumer.retry_later(await consumer.receive(RECEIVE_S), 0)

    def read(client: pulsar.Client) -> list[Any]:
        letters = client.subscribe(f"{topic}-s-DLQ", "look", schema=theirs)
        values = [letters.receive(30_000).value() for _ in written]
        return values if kind == "PROTOBUF_NATIVE" else [Order(value.name, value.count, value.price) for value in values]

    found = await official(cluster, read)
    if kind == "PROTOBUF_NATIVE":
        assert sorted(value.ledgerId for value in found) == [1, 3]
    else:
        assert sorted(found, key=str) == [Order("coffee", 1, 0.5), ORDER]
    async with cepheid.connect(cluster.url) as client:
        for name in (f"{topic}-s-RETRY", f"{topic}-s-DLQ"):
            registered = await client.topic_schema(name)
            assert registered is not None
            assert registered.kind == kind


async def test_text_both_ways(cluster: ClusterThread, topic: str) -> None:
    def publish_and_read(client: pulsar.Client) -> str:
        client.create_producer(topic, schema=StringSchema()).send("Grüße")
        return str(client.create_reader(topic, pulsar.MessageId.earliest, schema=StringSchema()).read_next(30_000).value())

    async with cepheid.connect(cluster.url) as client:
        async with client.producer(topic, schema=str) as producer:
            await producer.send("höflich")
        assert await official(cluster, publish_and_read) == "höflich"
        async with client.reader(topic, schema=str) as reader:
            assert [(await reader.read(RECEIVE_S)).value for _ in range(2)] == ["höflich", "Grüße"]


@pytest.mark.parametrize("key", ["a", "ab", "abc", "hello", "customer", "customer-17", "x" * 100])
async def test_keys_have_the_same_partition(cluster: ClusterThread, key: str) -> None:
    topic = "same-partition"
    if f"persistent://public/default/{topic}" not in cluster.admin("GET", "persistent/public/default/partitioned"):
        cluster.create_partitions(topic, 7)

    def publish(client: pulsar.Client) -> int:
        return int(client.create_producer(topic).send(b"", partition_key=key).partition())

    async with cepheid.connect(cluster.url) as client, client.producer(topic, key_hash="boost") as producer:
        assert (await producer.send(b"", key=key)).partition == await official(cluster, publish)
