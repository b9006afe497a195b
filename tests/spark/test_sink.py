"""Writing on a real Spark: what the official client receives of it, and what is refused."""

from __future__ import annotations

import base64
import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pulsar
import pytest
from google.protobuf.descriptor_pb2 import FieldDescriptorProto as F
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from cepheid_testkit import ProcessCluster

pytestmark = pytest.mark.slow

RECEIVE_LIMIT_MS = 5_000


class Sink:
    """A topic, writes to it, and what it has."""

    def __init__(self, server: ProcessCluster, client: pulsar.Client, topic: str) -> None:
        self._server = server
        self._client = client
        self.topic = f"persistent://public/default/{topic}"

    def admin(self, method: str, what: str, body: Any = None) -> Any:
        """`what`: what follows the topic's path."""
        return self._call(method, f"{self.topic.replace('://', '/')}{what}", body)

    def set_schema(self, kind: str, definition: str, **properties: str) -> None:
        path = self.topic.replace("persistent://", "schemas/")
        self._call("POST", f"{path}/schema", {"type": kind, "schema": definition, "properties": properties})

    def _call(self, method: str, path: str, body: Any) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._server.admin_url}/admin/v2/{path}", data, method=method)
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def create(self, partitions: int = 0) -> None:
        """With deduplication."""
        self.admin("PUT", "/partitions" if partitions else "", partitions or None)
        self.admin("POST", "/deduplicationEnabled", True)

    def options(self, **more: object) -> dict[str, str]:
        given = {"service.url": self._server.service_url, "topic": self.topic, **more}
        return {name: str(value) for name, value in given.items() if value is not None}

    def send(self, numbers: range) -> None:
        """In entries of 1000."""
        producer = self._client.create_producer(
            self.topic,
            batching_enabled=True,
            batching_max_publish_delay_ms=1000,
            max_pending_messages=5000,
            block_if_queue_full=True,
        )
        stored = []
        for number in numbers:
            producer.send_async(str(number).encode(), lambda result, _: stored.append(result), partition_key=f"k{number % 20}")
        producer.flush()
        producer.close()
        assert stored == [pulsar.Result.Ok] * len(numbers)

    def write(self, frame: DataFrame, **more: object) -> None:
        frame.write.format("cepheid").options(**self.options(**more)).mode("append").save()

    def received(self, expected: int, limit_ms: int = RECEIVE_LIMIT_MS) -> list[pulsar.Message]:
        """That many messages, and none besides."""
        consumer = self._client.subscribe(self.topic, "check", initial_position=pulsar.InitialPosition.Earliest)
        try:
            found = [consumer.receive(limit_ms) for _ in range(expected)]
            with pytest.raises(pulsar.Timeout):
                consumer.receive(300)
        finally:
            consumer.unsubscribe()
            consumer.close()
        return found


@pytest.fixture
def sink(server: ProcessCluster, client: pulsar.Client, topic: str) -> Sink:
    return Sink(server, client, topic)


def refusal(work: Callable[[], Any]) -> str:
    with pytest.raises(Exception) as caught:
        work()
    return str(caught.value)


def test_the_parts_of_a_row_are_those_of_its_message(spark: SparkSession, sink: Sink) -> None:
    rows = spark.sql(
        "SELECT 'user-1' AS key, 'hello' AS value, map('lang', 'en', 'a', 'b') AS properties, "
        "timestamp '2026-03-01 12:00:00' AS event_time, cast('o' AS binary) AS ordering_key"
    )
    sink.write(rows, exactlyOnce=False)
    (message,) = sink.received(1)
    assert (message.data(), message.partition_key(), message.ordering_key()) == (b"hello", "user-1", "o")
    assert (message.properties(), message.event_timestamp()) == ({"a": "b", "lang": "en"}, 1_772_366_400_000)


def test_a_batch_write_stores_each_row_once(spark: SparkSession, sink: Sink) -> None:
    sink.create()
    sink.write(spark.range(2_500).selectExpr("cast(id AS string) AS value"))
    assert sorted(int(message.data()) for message in sink.received(2_500)) == list(range(2_500))


def test_a_topic_without_deduplication_is_refused_before_anything_is_written(spark: SparkSession, sink: Sink) -> None:
    said = refusal(lambda: sink.write(spark.sql("SELECT 'x' AS value")))
    assert "needs deduplication, which is off" in said
    assert "dedup on" in said
    sink.received(0)


@pytest.mark.slow
def test_keys_go_to_the_partitions_that_the_official_client_chooses(
    spark: SparkSession, server: ProcessCluster, client: pulsar.Client, sink: Sink
) -> None:
    other = Sink(server, client, "test_sink-by-the-official-client")
    sink.create(4)
    other.create(4)
    other.send(range(40))
    rows = spark.range(40).selectExpr("concat('k', id % 20) AS key", "cast(id AS string) AS value")
    sink.write(rows, keyHash="boost")

    def places(found: list[pulsar.Message]) -> set[tuple[str, str]]:
        return {(message.partition_key(), message.topic_name().rpartition("-")[2]) for message in found}

    assert places(sink.received(40)) == places(other.received(40))


@pytest.mark.slow
def test_rows_name_their_topics(spark: SparkSession, server: ProcessCluster, client: pulsar.Client, topic: str) -> None:
    one, two = Sink(server, client, f"{topic}-one"), Sink(server, client, f"{topic}-two")
    one.create()
    two.create(2)
    rows = spark.range(10).selectExpr(f"if(id < 4, '{one.topic}', '{two.topic}') AS topic", "cast(id AS string) AS value")
    one.write(rows, topic=None)
    assert sorted(int(message.data()) for message in one.received(4)) == [0, 1, 2, 3]
    assert sorted(int(message.data()) for message in two.received(6)) == [4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("encode", ["json", pytest.param("avro", marks=pytest.mark.slow)])
def test_records_are_read_as_they_were_written(spark: SparkSession, sink: Sink, encode: str) -> None:
    sink.create()
    rows = spark.sql(
        "SELECT 7L AS id, 'Ann' AS name, timestamp '2026-03-01 12:00:00.123456' AS at, date '2026-03-01' AS day, "
        "cast(1.5 AS decimal(10,2)) AS price, array('x', null) AS tags, map('a', 1) AS more, named_struct('a', 2) AS inner, "
        "cast(null AS double) AS missing, 'user-1' AS __key"
    )
    sink.write(rows, encode=encode)
    sink.write(rows)  # the topic has a schema now, so nobody has to say which
    given = {"service.url": sink.options()["service.url"], "topic": sink.topic, "readMode": "typed"}
    read = spark.read.format("cepheid").options(**given).load().select(*rows.columns)
    assert read.collect() == rows.collect() * 2


def message_schema() -> dict[str, Any]:
    file = FileDescriptorProto(name="order.proto", package="p", syntax="proto3")
    message = file.message_type.add(name="Order")
    for number, (name, kind) in enumerate((("id", F.TYPE_INT64), ("name", F.TYPE_STRING), ("tags", F.TYPE_STRING)), start=1):
        field = message.field.add(name=name, number=number, type=kind)
        field.label = field.LABEL_REPEATED if name == "tags" else field.LABEL_OPTIONAL
    files = base64.b64encode(FileDescriptorSet(file=[file]).SerializeToString()).decode()
    return {"fileDescriptorSet": files, "rootMessageTypeName": "p.Order", "rootFileDescriptorName": "order.proto"}


@pytest.mark.parametrize(
    ("kind", "columns"),
    [
        ("PROTOBUF_NATIVE", "7L AS id, 'Ann' AS name, array('x', 'y') AS tags, 'user-1' AS __key"),
        ("INT64", "7L AS value, 'user-1' AS __key"),
        ("LOCAL_DATE_TIME", "timestamp_ntz '2026-03-01 12:00:00.123456' AS value, 'user-1' AS __key"),
        pytest.param("STRING", "'é' AS value, 'user-1' AS __key", marks=pytest.mark.slow),
    ],
)
def test_rows_are_encoded_by_the_schema_of_the_topic(spark: SparkSession, sink: Sink, kind: str, columns: str) -> None:
    sink.create()
    sink.set_schema(kind, json.dumps(message_schema()) if kind == "PROTOBUF_NATIVE" else "")
    rows = spark.sql(f"SELECT {columns}")
    sink.write(rows)
    given = {"service.url": sink.options()["service.url"], "topic": sink.topic, "readMode": "typed"}
    assert spark.read.format("cepheid").options(**given).load().select(*rows.columns).collect() == rows.collect()
    raw = spark.read.format("cepheid").options(**given | {"readMode": "messages", "columns": "schema_version"}).load()
    assert raw.first().schema_version is not None, "the message names the schema that it was written with"


@pytest.mark.parametrize(
    ("kind", "columns", "said"),
    [
        ("INT64", "'7' AS value", "column value must be tinyint or smallint or int or bigint, as the topic's schema INT64 says"),
        ("INT64", "7L AS id", "has a schema of kind INT64, which has no fields: write one column value"),
        (None, "7L AS value", "needs a topic with a primitive schema, and"),
        ("KEY_VALUE", "7L AS id", "has a schema of kind KEY_VALUE: write a column value with payloads"),
    ],
)
def test_rows_that_do_not_go_with_the_schema_of_the_topic_are_refused(
    spark: SparkSession, sink: Sink, kind: str | None, columns: str, said: str
) -> None:
    sink.create()
    if kind == "KEY_VALUE":
        pair = {"key.schema.type": "STRING", "value.schema.type": "STRING", "kv.encoding.type": "INLINE"}
        sink.set_schema(kind, '{"key": "", "value": ""}', **pair)
    elif kind is not None:
        sink.set_schema(kind, "")
    assert said in refusal(lambda: sink.write(spark.sql(f"SELECT {columns}")))


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ("id AS id", "a field name without a default"),
        ("id, 'x' AS name, 1 AS nam", "has no field nam; did you mean name?"),
        ("cast(id AS string) AS id, 'x' AS name", "column id must be"),
    ],
)
def test_columns_that_do_not_fit_the_schema_of_the_topic_are_refused_before_any_task(
    spark: SparkSession, server: ProcessCluster, client: pulsar.Client, columns: str, said: str
) -> None:
    sink = Sink(server, client, "test_sink-with-schema")
    definition = {"type": "record", "name": "R", "fields": [{"name": "id", "type": "long"}, {"name": "name", "type": "string"}]}
    producer = client.create_producer(sink.topic, schema=pulsar.schema.AvroSchema(None, definition))
    producer.close()
    message = refusal(lambda: sink.write(spark.range(1).selectExpr(*columns.split(", ")), exactlyOnce=False))
    assert said in message
    assert "PYTHON_DATA_SOURCE_ERROR" in message.splitlines()[0]


@pytest.mark.slow
def test_only_append_is_served(spark: SparkSession, sink: Sink) -> None:
    frame = spark.sql("SELECT 'x' AS value")
    said = refusal(frame.write.format("cepheid").options(**sink.options()).mode("overwrite").save)
    assert "mode('append')" in said


def test_a_write_of_foreach_batch_that_is_repeated_is_stored_once(spark: SparkSession, sink: Sink) -> None:
    sink.create()
    frame = spark.range(100).selectExpr("cast(id AS string) AS value")
    for batch in (0, 0, 1):
        sink.write(frame, sinkName="mine", batchId=batch)
    assert len(sink.received(200)) == 200


@pytest.mark.slow
def test_a_stream_goes_from_topic_to_topic_and_goes_on_after_a_restart(
    spark: SparkSession, server: ProcessCluster, client: pulsar.Client, sink: Sink, topic: str, tmp_path: Path
) -> None:
    source = Sink(server, client, f"{topic}-source")
    source.create()
    sink.create(2)

    def run() -> list[int]:
        stream = spark.readStream.format("cepheid").options(**source.options(), startingOffsets="earliest").load()
        writer = stream.select("key", "value").writeStream.format("cepheid").options(**sink.options())
        query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start()
        assert query.awaitTermination(180)
        assert query.exception() is None
        return [progress["numInputRows"] for progress in query.recentProgress]

    source.send(range(300))
    run()
    source.send(range(300, 500))
    run()
    found = sink.received(500)
    assert sorted(int(message.data()) for message in found) == list(range(500))
    assert {message.producer_name().rpartition("-")[2] for message in found} == {"p2"}


def test_of_two_live_streams_with_one_sink_name_the_second_ends_and_writes_nothing(
    spark: SparkSession, server: ProcessCluster, client: pulsar.Client, sink: Sink, topic: str, tmp_path: Path
) -> None:
    """The second one has more tasks, whose own names the first one never claims."""
    source = Sink(server, client, f"{topic}-source")
    source.create()
    sink.create()

    def start(name: str, tasks: int) -> StreamingQuery:
        stream = spark.readStream.format("cepheid").options(**source.options(), startingOffsets="earliest").load()
        writer = stream.select("key", "value").repartition(tasks).writeStream.format("cepheid")
        return writer.options(**sink.options(sinkName="one", checkpointLocation=tmp_path / name)).start()

    source.send(range(300))
    first = start("first", 1)
    try:
        sink.received(300, limit_ms=60_000)
        second = start("second", 3)
        said = refusal(lambda: second.awaitTermination(180))
        source.send(range(300, 500))
        found = sink.received(500, limit_ms=60_000)
    finally:
        first.stop()
    assert "SinkNameTakenError: another query writes under the sinkName 'one'" in said
    assert sorted(int(message.data()) for message in found) == list(range(500))
