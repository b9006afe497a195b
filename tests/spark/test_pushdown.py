"""filterPushdown=true: filters that spare reading, for DataFrames that are used once."""

from __future__ import annotations

import datetime
import json
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pulsar
import pytest
from pulsar.schema import AvroSchema
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import EqualTo, Filter, GreaterThan, GreaterThanOrEqual, In, IsNotNull, LessThan, LessThanOrEqual, Not

from cepheid_scan import EARLIEST, LATEST, Edge, RowFilter, ScanRequest, SchemaVersion
from cepheid_spark.options import parse_options
from cepheid_spark.pushdown_reader import PushdownBatchReader, narrow
from cepheid_spark.spark_schema import rows_schema
from cepheid_testkit import ProcessCluster
from tests.e2e.official_client import publish

Load = Callable[..., DataFrame]
SETTING = "spark.sql.python.filterPushdown.enabled"
NOON = datetime.datetime(2026, 3, 1, 12, tzinfo=datetime.UTC)
NOON_MS = 1_772_366_400_000
COLUMNS = {name: name for name in ("key", "partition", "publish_time", "event_time", "value")}


@pytest.fixture
def pushing(spark: SparkSession) -> Iterator[None]:
    spark.conf.set(SETTING, "true")
    yield
    spark.conf.unset(SETTING)


def narrowed(*filters: Filter, **options: str) -> ScanRequest:
    parsed = parse_options({"serviceUrl": "pulsar://b:1", "topic": "t", **options}, streaming=False)
    return narrow(parsed.request(("value",)), filters, dict(COLUMNS))


@pytest.mark.parametrize(
    ("each", "start", "end"),
    [
        (GreaterThan(("publish_time",), NOON), Edge(publish_time_ms=NOON_MS), LATEST),
        (GreaterThanOrEqual(("publish_time",), NOON), Edge(publish_time_ms=NOON_MS), LATEST),
        (LessThan(("publish_time",), NOON), EARLIEST, Edge(publish_time_ms=NOON_MS + 1)),
        (LessThanOrEqual(("publish_time",), NOON), EARLIEST, Edge(publish_time_ms=NOON_MS + 1)),
        (EqualTo(("publish_time",), NOON), Edge(publish_time_ms=NOON_MS), Edge(publish_time_ms=NOON_MS + 1)),
        (Not(EqualTo(("publish_time",), NOON)), EARLIEST, LATEST),
        (IsNotNull(("publish_time",)), EARLIEST, LATEST),
        (EqualTo(("value",), b"x"), EARLIEST, LATEST),
    ],
)
def test_publish_times_are_edges(each: Filter, start: Edge, end: Edge) -> None:
    request = narrowed(each)
    assert (request.start, request.end) == (start, end)


def test_edges_of_options_stay_inside() -> None:
    request = narrowed(GreaterThan(("publish_time",), NOON), startingTimestamp=str(NOON_MS + 5))
    assert request.start == Edge(publish_time_ms=NOON_MS + 5)
    positions = '{"t": "3:4"}'
    request = narrowed(GreaterThan(("publish_time",), NOON), startingOffsets=positions)
    assert request.start.positions, "positions are kept: Spark applies the filter"


def test_event_times_keys_and_partitions() -> None:
    request = narrowed(LessThan(("event_time",), NOON), In(("key",), ["a", "b"]), EqualTo(("partition",), 3), keys="b,c")
    assert request.spec.row_filter.event_until_ms == NOON_MS + 1
    assert request.spec.row_filter.keys == {"b"}
    assert request.partition_filter == {3}
    assert request.topics.partitions is None, "that is the option, and one that no topic has is an error there"
    assert narrowed(EqualTo(("partition",), -1)).partition_filter == {-1}
    assert narrowed(In(("partition",), [0, 7]), EqualTo(("partition",), 7), partitions="0-2").partition_filter == {7}


def test_columns_of_the_schema_are_not_those_of_the_message() -> None:
    """Filters on fields of a record are Spark's alone, whatever they are called."""
    names = ("key", "partition", "publish_time", "event_time")
    fields = [{"name": name, "type": "string"} for name in names]
    definition = json.dumps({"type": "record", "name": "R", "fields": fields}).encode()
    schemas = (SchemaVersion(bytes(8), "AVRO", definition),)
    columns = "key,partition,event_time,__key,__partition,__publish_time"
    options = parse_options({"serviceUrl": "pulsar://b:1", "topic": "t", "readMode": "typed", "columns": columns}, streaming=False)
    reader = PushdownBatchReader(rows_schema(options, schemas), options, schemas)
    reader.pushFilters([EqualTo(("key",), "a"), EqualTo(("partition",), 3), LessThan(("event_time",), NOON)])
    request = reader.request()
    assert (request.spec.row_filter, request.partition_filter) == (RowFilter(), None)
    reader.pushFilters([EqualTo(("__key",), "a"), EqualTo(("__partition",), 3), GreaterThan(("__publish_time",), NOON)])
    request = reader.request()
    assert (request.spec.row_filter.keys, request.partition_filter) == ({"a"}, {3})
    assert request.start == Edge(publish_time_ms=NOON_MS)


@pytest.mark.slow
def test_filters_give_the_rows_that_spark_would_have_kept(topic: str, client: pulsar.Client, load: Load, pushing: None) -> None:
    producer = client.create_producer(topic)
    for number in range(30):
        producer.send(b"%d" % number, partition_key=f"k{number % 3}", event_timestamp=NOON_MS + number)
    producer.close()

    def rows(condition: str, **options: Any) -> list[int]:
        return [int(row.value) for row in load(topic, **options).where(condition).collect()]

    for condition in (
        "key = 'k1'",
        "key in ('k0', 'k2')",
        "event_time > '2026-03-01 12:00:00.010'",
        "partition = -1",
        "key is null",
    ):
        assert rows(condition, filterPushdown="true") == rows(condition), condition
    assert rows("publish_time > '2100-01-01'", filterPushdown="true") == []


@pytest.mark.slow
def test_fields_of_a_schema_that_are_called_like_columns_of_messages_are_filtered_by_their_own_values(
    topic: str, client: pulsar.Client, load: Load, pushing: None
) -> None:
    fields = [{"name": "key", "type": "string"}, {"name": "partition", "type": "int"}]
    producer = client.create_producer(topic, schema=AvroSchema(None, {"type": "record", "name": "R", "fields": fields}))
    for number in range(6):
        producer.send({"key": f"a{number % 2}", "partition": number}, partition_key=f"k{number % 3}")
    producer.close()
    for condition in ("key = 'a1'", "partition = 3", "__key = 'k1'", "__key = 'k1' and key = 'a1'"):
        rows = [load(topic, readMode="typed", filterPushdown=pushed).where(condition).count() for pushed in (True, False)]
        assert rows[0] == rows[1] > 0, condition


@pytest.mark.slow
def test_partitions_that_no_topic_has_give_no_rows(
    topic: str, server: ProcessCluster, client: pulsar.Client, load: Load, pushing: None
) -> None:
    url = f"{server.admin_url}/admin/v2/persistent/public/default/{topic}/partitions"
    urllib.request.urlopen(urllib.request.Request(url, b"3", method="PUT"), timeout=30).close()
    for index in range(3):
        publish(client, f"{topic}-partition-{index}", [b"x"] * (index + 1))

    def count(condition: str, **options: Any) -> int:
        return load(topic, filterPushdown="true", **options).where(condition).count()

    assert count("partition = 7") == count("partition = -1") == 0
    assert count("partition in (0, 7)") == 1
    assert count("partition in (0, 1)", partitions="1-2") == 2


@pytest.mark.slow
def test_spark_refuses_it_where_its_own_setting_is_off(topic: str, client: pulsar.Client, load: Load) -> None:
    publish(client, topic, [b"x"])
    with pytest.raises(PySparkException, match="DATA_SOURCE_PUSHDOWN_DISABLED"):
        load(topic, filterPushdown="true").count()


@pytest.mark.slow
@pytest.mark.xfail(strict=True, reason="Spark 4.1.4 to 4.3.0 keep the filters of a DataFrame's first query for its later ones")
def test_filters_of_one_query_do_not_reach_the_next(topic: str, client: pulsar.Client, load: Load, pushing: None) -> None:
    """The day this passes, pushing filters may become the default for Sparks from then on."""
    producer = client.create_producer(topic)
    for number in range(10):
        producer.send(b"x", partition_key=f"k{number}")
    producer.close()
    frame = load(topic, filterPushdown="true")
    assert frame.where("key = 'k1'").count() == 1
    assert frame.count() == 10
