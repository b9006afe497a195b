"""Rows of a batch read equal what the official client consumes: keys, values, properties, times, ids."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pulsar
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from pyspark.sql import DataFrame, Row, SparkSession

from cepheid_testkit import ProcessCluster
from cepheid_wire import TopicName
from tests.e2e.official_client import EARLIEST, publish, receive

Load = Callable[..., DataFrame]
NAMES = ("batched", "single", "lz4", "zlib", "zstd", "snappy")
PRODUCERS: dict[str, dict[str, Any]] = {
    "batched": {"batching_enabled": True, "batching_max_messages": 50},
    "single": {"batching_enabled": False},
    "lz4": {"batching_enabled": True, "compression_type": pulsar.CompressionType.LZ4},
    "zlib": {"batching_enabled": True, "compression_type": pulsar.CompressionType.ZLib},
    "zstd": {"batching_enabled": False, "compression_type": pulsar.CompressionType.ZSTD},
    "snappy": {"batching_enabled": True, "compression_type": pulsar.CompressionType.SNAPPY},
}
Fact = tuple[Any, ...]


def publish_variety(client: pulsar.Client, topic: str, count: int, *, padding: bytes = b"", **options: Any) -> None:
    """With and without key, properties, event time; also an empty value. `padding`: behind all others."""
    producer = client.create_producer(topic, block_if_queue_full=True, producer_name=f"p-{topic[-40:]}", **options)
    for number in range(count):
        producer.send_async(
            b"" if number % 50 == 7 else f"value {number}".encode() * (number % 5 + 1) + padding,
            None,
            partition_key=f"key {number % 10}" if number % 3 else None,
            properties={"number": str(number), "odd": "yes"} if number % 2 else None,
            event_timestamp=1_700_000_000_000 + number if number % 4 else None,
        )
    producer.flush()
    producer.close()


def consumed(client: pulsar.Client, topic: str, count: int) -> list[Fact]:
    consumer = client.subscribe(topic, "judge", initial_position=EARLIEST)
    facts = [fact_of_message(message) for message in receive(consumer, count)]
    consumer.close()
    return facts


def fact_of_message(message: pulsar.Message) -> Fact:
    place = message.message_id()
    return (
        message.topic_name(),
        TopicName.parse(message.topic_name()).partition_index,  # the client's id of a message has -1
        place.ledger_id(),
        place.entry_id(),
        None if place.batch_index() == -1 else place.batch_index(),
        message.partition_key() or None,
        message.data(),
        message.properties(),
        message.publish_timestamp(),
        message.event_timestamp() or None,
        message.producer_name(),
    )


def fact_of_row(row: Row) -> Fact:
    return (
        row.topic,
        row.partition,
        row.ledger_id,
        row.entry_id,
        row.batch_index,
        row.key,
        None if row.value is None else bytes(row.value),
        row.properties or {},
        row.published_ms,
        row.event_ms,
        row.producer_name,
    )


def read_facts(frame: DataFrame) -> list[Fact]:
    rows = frame.selectExpr("*", "unix_millis(publish_time) AS published_ms", "unix_millis(event_time) AS event_ms").collect()
    return [fact_of_row(row) for row in rows]


@pytest.mark.parametrize("kind", NAMES)
def test_rows_equal_what_the_official_client_consumes(kind: str, topic: str, client: pulsar.Client, load: Load) -> None:
    publish_variety(client, topic, 200, **PRODUCERS[kind])
    assert read_facts(load(topic)) == consumed(client, topic, 200)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["batched", "single"])
def test_large_rows_come_to_spark_in_several_portions(kind: str, topic: str, client: pulsar.Client, load: Load) -> None:
    publish_variety(client, topic, 300, padding=bytes(range(256)) * 80, **PRODUCERS[kind])
    assert read_facts(load(topic)) == consumed(client, topic, 300)


@pytest.mark.slow
def test_messages_in_chunks_are_rows_wherever_tasks_are_cut(topic: str, client: pulsar.Client, load: Load) -> None:
    """A task reads back for the chunks before its first entry; a message is a row of the task that has its last chunk."""
    producer = client.create_producer(topic, batching_enabled=False, chunking_enabled=True, max_pending_messages=100)
    limit_bytes = 5 << 20  # of the broker for one entry
    values = [b"a" * 10, b"b" * (2 * limit_bytes + 17), b"c", b"d" * (limit_bytes + 1)]
    for number, value in enumerate(values):
        producer.send(value, partition_key=f"k{number}", properties={"number": str(number)})
    producer.close()
    expected = [(value, f"k{number}", {"number": str(number)}) for number, value in enumerate(values)]
    for size in ("128mb", "1mb"):
        rows = load(topic, targetPartitionBytes=size).collect()
        assert [(bytes(row.value), row.key, row.properties) for row in rows] == expected, size


@pytest.mark.slow
def test_rows_of_a_partitioned_topic(topic: str, client: pulsar.Client, server: Any, load: Load) -> None:
    path = f"/admin/v2/persistent/public/default/{topic}/partitions"
    request = urllib.request.Request(server.admin_url + path, data=b"3", method="PUT", headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30):
        pass
    publish_variety(client, topic, 300, batching_enabled=False)
    facts = read_facts(load(topic))
    by_place = sorted(facts, key=lambda fact: fact[:4])
    assert by_place == sorted(consumed(client, topic, 300), key=lambda fact: fact[:4])
    assert {fact[1] for fact in facts} == {0, 1, 2}
    assert read_facts(load(topic, partitions="1")) == [fact for fact in facts if fact[1] == 1]
    assert load(f"{topic}-partition-2").count() == sum(fact[1] == 2 for fact in facts)


@pytest.mark.slow
def test_a_topic_without_messages_has_no_rows(topic: str, client: pulsar.Client, load: Load) -> None:
    client.create_producer(topic).close()
    assert load(topic).count() == 0


@pytest.mark.slow
def test_columns_on_request(topic: str, client: pulsar.Client, load: Load) -> None:
    publish(client, topic, [b"a", b"b"], batching_enabled=False)
    assert load(topic, "value binary").collect() == [Row(value=bytearray(b"a")), Row(value=bytearray(b"b"))]
    frame = load(topic, columns="message_id, value, schema_version")
    assert frame.columns == ["message_id", "value", "schema_version"]
    place = load(topic, columns="ledger_id").first()
    assert place is not None
    assert [row.message_id for row in frame.collect()] == [f"{place.ledger_id}:{entry}:-1:-1" for entry in range(2)]


@pytest.mark.slow
def test_one_row_an_entry_with_its_bytes(topic: str, client: pulsar.Client, load: Load) -> None:
    publish(client, topic, [b"message %d" % number for number in range(100)], batching_enabled=True, batching_max_messages=25)
    rows = load(topic, readMode="entries").collect()
    assert sum(row.num_messages for row in rows) == 100
    assert [row.entry_id for row in rows] == list(range(len(rows)))
    assert all(b"message" in bytes(row.entry) for row in rows)


@pytest.mark.slow
def test_names_and_types_of_pulsar_spark(topic: str, client: pulsar.Client, load: Load) -> None:
    publish_variety(client, topic, 20, batching_enabled=True)
    frame = load(topic, columnStyle="pulsar-spark")
    names = {"value": "binary", "__key": "binary", "__topic": "string", "__messageId": "binary"}
    names |= {"__publishTime": "timestamp", "__eventTime": "timestamp", "__messageProperties": "map<string,string>"}
    assert dict(frame.dtypes) == names
    ids = [pulsar.MessageId.deserialize(bytes(row["__messageId"])) for row in frame.collect()]
    places = load(topic).collect()
    expected = [(row.ledger_id, row.entry_id, row.batch_index, row.partition) for row in places]
    assert [(each.ledger_id(), each.entry_id(), each.batch_index(), each.partition()) for each in ids] == expected
    keys = [row["__key"] for row in frame.collect()]
    assert keys == [None if row.key is None else bytearray(row.key.encode()) for row in places]


@pytest.mark.slow
def test_what_is_left_out_is_left_out(topic: str, client: pulsar.Client, load: Load) -> None:
    publish_variety(client, topic, 200, batching_enabled=True)
    everything = read_facts(load(topic))
    assert read_facts(load(topic, keys="key 1,key 4")) == [fact for fact in everything if fact[5] in ("key 1", "key 4")]
    timed = load(topic, eventTimeFrom=1_700_000_000_050, eventTimeUntil=1_700_000_000_060)
    assert read_facts(timed) == [fact for fact in everything if fact[9] and 1_700_000_000_050 <= fact[9] < 1_700_000_000_060]
    middle = sorted(fact[8] for fact in everything)[100]
    halves = [load(topic, publishedUntil=middle), load(topic, publishedFrom=middle)]
    assert [read_facts(half) for half in halves] == [
        [fact for fact in everything if fact[8] < middle],
        [fact for fact in everything if fact[8] >= middle],
    ]


@pytest.mark.slow
def test_a_range_of_positions_starts_with_the_first_and_ends_before_the_second(
    topic: str, client: pulsar.Client, load: Load
) -> None:
    publish(client, topic, [b"%d" % number for number in range(40)], batching_enabled=True, batching_max_messages=10)
    rows = load(topic).collect()
    first, end = rows[7], rows[33]
    places = [f'{{"{topic}": "{row.ledger_id}:{row.entry_id}:{row.batch_index}"}}' for row in (first, end)]
    frame = load(topic, startingOffsets=places[0], endingOffsets=places[1])
    assert [int(row.value) for row in frame.collect()] == list(range(7, 33))


@pytest.mark.slow
def test_tasks_are_cut_by_bytes_and_rows_keep_their_order(topic: str, client: pulsar.Client, load: Load) -> None:
    publish(client, topic, [b"%d " % number + b"x" * 50_000 for number in range(100)], batching_enabled=False)
    frame = load(topic, targetPartitionBytes="1mb")
    assert 4 <= frame.rdd.getNumPartitions() <= 7
    assert [int(bytes(row.value).split()[0]) for row in frame.collect()] == list(range(100))
    assert load(topic, minPartitions=10).rdd.getNumPartitions() >= 10
    assert load(topic).rdd.getNumPartitions() == 1


@pytest.mark.slow
def test_several_topics_and_patterns(
    topic: str, client: pulsar.Client, load: Load, spark: SparkSession, server: ProcessCluster
) -> None:
    for place in "ab":
        publish(client, f"{topic}-{place}", [place.encode()])
        publish(client, f"{topic}-{place}-other", [b"other"])
    assert {bytes(row.value) for row in load(f"{topic}-a,{topic}-b").collect()} == {b"a", b"b"}
    reader = spark.read.format("cepheid").option("service.url", server.service_url)
    matched = reader.option("topicsPattern", f"persistent://public/default/{topic}-[ab]").load().collect()
    assert {(row.topic.rpartition("-")[2], bytes(row.value)) for row in matched} == {("a", b"a"), ("b", b"b")}
    assert reader.option("topicsPattern", f"{topic}-.-other").load().count() == 2


@pytest.mark.slow
def test_a_dataframe_is_a_snapshot_and_another_load_sees_more(topic: str, client: pulsar.Client, load: Load) -> None:
    publish(client, topic, [b"1"])
    frame = load(topic)
    assert frame.count() == 1
    publish(client, topic, [b"2"])
    assert (frame.count(), load(topic).count()) == (1, 2)


def test_encrypted_messages_are_decrypted_with_keys_of_the_executors(
    topic: str, client: pulsar.Client, load: Load, tmp_path: Path
) -> None:
    key, public, folder = rsa.generate_private_key(65537, 2048), tmp_path / "public.pem", tmp_path / "keys"
    folder.mkdir()
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    (folder / "app.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    reader = pulsar.CryptoKeyReader(str(public), str(folder / "app.pem"))
    publish(client, topic, [b"secret %d" % number for number in range(50)], encryption_key="app", crypto_key_reader=reader)
    rows = load(topic, **{"decryption.keys": folder}).select("value").collect()
    assert [bytes(row.value) for row in rows] == [b"secret %d" % number for number in range(50)]
    with pytest.raises(Exception, match="its payload is encrypted, and no decryption keys are given"):
        load(topic).collect()
