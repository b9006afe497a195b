"""readMode=typed: the topic's schema as columns, through all of its versions."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from typing import Any

import pulsar
import pytest
from pulsar.schema import AvroSchema, Boolean, Double, Integer, JsonSchema, Long, Record, String
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row

from cepheid_testkit import ProcessCluster
from tests.e2e.official_client import publish

pytestmark = pytest.mark.slow

Load = Callable[..., DataFrame]


class Flight(Record):  # type: ignore[misc]
    carrier = String()
    number = Integer()
    distance = Double()
    cancelled = Boolean()


def flight_with_delay() -> type[Record]:
    """The next version: its record has the same name, and one more field that may be missing."""

    class Flight(Record):  # type: ignore[misc]
        carrier = String()
        number = Integer()
        distance = Double()
        cancelled = Boolean()
        delay = Long(required_default=True)

    return Flight


def publish_flights(client: pulsar.Client, topic: str, schema: Any, flights: list[Any], **options: Any) -> None:
    producer = client.create_producer(topic, schema=schema, **options)
    for flight in flights:
        producer.send(flight, partition_key=getattr(flight, "carrier", None))
    producer.close()


def flight(number: int) -> Flight:
    return Flight(carrier=f"C{number % 3}", number=number, distance=number / 2, cancelled=number % 2 == 1)


@pytest.mark.parametrize("kind", [AvroSchema, JsonSchema])
def test_the_schema_as_columns(kind: Any, topic: str, client: pulsar.Client, load: Load) -> None:
    publish_flights(client, topic, kind(Flight), [flight(number) for number in range(30)])
    frame = load(topic, readMode="typed")
    assert dict(frame.dtypes) | {"carrier": "string", "number": "int", "distance": "double", "cancelled": "boolean"} == dict(
        frame.dtypes
    )
    assert {"__key", "__topic", "__partition", "__publish_time", "__properties"} <= set(frame.columns)
    assert "_error" not in frame.columns
    rows = frame.select("carrier", "number", "distance", "cancelled", "__key").collect()
    expected = [flight(number) for number in range(30)]
    assert rows == [
        Row(carrier=each.carrier, number=each.number, distance=each.distance, cancelled=each.cancelled, __key=each.carrier)
        for each in expected
    ]


def test_versions_are_read_as_the_newest_and_as_an_older_one(topic: str, client: pulsar.Client, load: Load) -> None:
    publish_flights(client, topic, AvroSchema(Flight), [flight(1), flight(2)])
    newer = flight_with_delay()
    publish_flights(client, topic, AvroSchema(newer), [newer(carrier="C9", number=9, distance=1.5, cancelled=False, delay=77)])
    newest = load(topic, readMode="typed").select("number", "delay").collect()
    assert [tuple(row) for row in newest] == [(1, None), (2, None), (9, 77)]
    oldest = load(topic, readMode="typed", schemaVersion="0")
    assert "delay" not in oldest.columns
    assert [row.number for row in oldest.collect()] == [1, 2, 9]


def test_a_schema_registered_after_load_is_read_and_not_shown(topic: str, client: pulsar.Client, load: Load) -> None:
    publish_flights(client, topic, AvroSchema(Flight), [flight(1)])
    frame = load(topic, readMode="typed")
    newer = flight_with_delay()
    publish_flights(client, topic, AvroSchema(newer), [newer(carrier="C9", number=9, distance=1.5, cancelled=False, delay=77)])
    assert [row.number for row in frame.collect()] == [1, 9]


def test_a_schema_of_ones_own_picks_columns(topic: str, client: pulsar.Client, load: Load) -> None:
    publish_flights(client, topic, JsonSchema(Flight), [flight(4)])
    rows = load(topic, "__entry_id bigint, number int, carrier string", readMode="typed").collect()
    assert [tuple(row) for row in rows] == [(0, 4, "C1")]
    with pytest.raises(PySparkException, match="column number is int, the schema declares string"):
        load(topic, "number string", readMode="typed").count()


def test_pulsar_spark_style_keeps_the_schemas_columns_first(topic: str, client: pulsar.Client, load: Load) -> None:
    publish_flights(client, topic, JsonSchema(Flight), [flight(4)])
    frame = load(topic, readMode="typed", columnStyle="pulsar-spark")
    metadata = ["__key", "__topic", "__messageId", "__publishTime", "__eventTime", "__messageProperties"]
    assert frame.columns[-6:] == metadata
    assert set(frame.columns[:-6]) == {"carrier", "number", "distance", "cancelled"}
    row = frame.first()
    assert row is not None
    assert (row["number"], bytes(row["__key"])) == (4, b"C1")


def test_text_is_the_column_value(topic: str, client: pulsar.Client, load: Load) -> None:
    publish_flights(client, topic, pulsar.schema.StringSchema(), ["één", "zwei"])
    frame = load(topic, readMode="typed", columns="value,__entry_id")
    assert [tuple(row) for row in frame.collect()] == [("één", 0), ("zwei", 1)]


def post_schema(server: ProcessCluster, topic: str, kind: str, definition: str) -> None:
    body = json.dumps({"type": kind, "schema": definition, "properties": {}}).encode()
    url = f"{server.admin_url}/admin/v2/schemas/public/default/{topic}/schema"
    request = urllib.request.Request(url, data=body, method="POST", headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30):
        pass


def test_a_value_that_is_none_of_the_schema(topic: str, client: pulsar.Client, server: ProcessCluster, load: Load) -> None:
    definition = {"type": "record", "name": "F", "fields": [{"name": "number", "type": ["null", "int"]}]}
    publish(client, topic, [b'{"number": 1}', b"no json", b'{"number": 3}'])
    post_schema(server, topic, "JSON", json.dumps(definition))
    with pytest.raises(PySparkException, match="BadRecordError") as caught:
        load(topic, readMode="typed").collect()
    assert f"persistent://public/default/{topic}" in str(caught.value)
    assert [row.number for row in load(topic, readMode="typed", onBadRecord="skip").collect()] == [1, 3]
    rows = load(topic, "number int, _error string", readMode="typed", onBadRecord="null").collect()
    assert [row.number for row in rows] == [1, None, 3]
    assert [row._error is None for row in rows] == [True, False, True]


class Train(Record):  # type: ignore[misc]
    number = Integer()


@pytest.mark.parametrize("kind", [AvroSchema, JsonSchema])
def test_topics_with_versions_of_one_schema_are_read_together(kind: Any, topic: str, client: pulsar.Client, load: Load) -> None:
    newer = flight_with_delay()
    publish_flights(client, f"{topic}-a", kind(Flight), [flight(4)])
    publish_flights(client, f"{topic}-b", kind(newer), [newer(carrier="C", number=1, distance=0.0, cancelled=True, delay=1)])
    rows = load(f"{topic}-a,{topic}-b", readMode="typed").select("number", "delay").collect()
    assert sorted(tuple(row) for row in rows) == [(1, 1), (4, None)]


def test_topics_with_different_schemas_are_read_apart_or_as_bytes(topic: str, client: pulsar.Client, load: Load) -> None:
    publish_flights(client, f"{topic}-a", JsonSchema(Flight), [flight(4)])
    publish_flights(client, f"{topic}-b", JsonSchema(Train), [Train(number=1)])
    both = f"{topic}-a,{topic}-b"
    with pytest.raises(PySparkException, match="different schemas") as caught:
        load(both, readMode="typed")
    assert all(part in str(caught.value) for part in (f"{topic}-a", f"{topic}-b", "readMode=messages"))
    assert load(both).count() == 2


def test_a_topic_without_a_schema_says_so(topic: str, client: pulsar.Client, load: Load) -> None:
    publish(client, topic, [b"x"])
    with pytest.raises(PySparkException, match="BadOptionError") as caught:
        load(topic, readMode="typed")
    assert "schema" in str(caught.value)
