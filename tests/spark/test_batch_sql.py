"""Topics as tables and views of SQL, found without registering anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pulsar
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

import cepheid_scan
import cepheid_spark
from cepheid_decode import PlanSource
from cepheid_scan.admin_http import AdminHttp
from cepheid_testkit import ProcessCluster
from tests.e2e.official_client import publish

pytestmark = pytest.mark.slow


@pytest.fixture
def table(spark: SparkSession) -> Iterator[str]:
    yield "flights_table"
    spark.sql("DROP TABLE IF EXISTS flights_table")


def test_a_table_is_a_topic(topic: str, client: pulsar.Client, server: ProcessCluster, spark: SparkSession, table: str) -> None:
    publish(client, topic, [b"%d" % number for number in range(20)])
    spark.sql(f"CREATE TABLE {table} USING cepheid OPTIONS ('service.url' '{server.service_url}', topics '{topic}')")
    assert spark.sql(f"SELECT sum(CAST(CAST(value AS STRING) AS INT)) AS total FROM {table}").collect()[0].total == 190
    publish(client, topic, [b"1000"])
    assert spark.table(table).count() == 21, "a table is read anew by each query"
    with_options = f"SELECT count(*) AS rows FROM {table} WITH ('startingTimestamp' = '2100-01-01T00:00:00Z')"
    assert spark.sql(with_options).collect()[0].rows == 0, "options of a query go over those of the table"


def test_a_table_with_columns_of_its_own_choice(
    topic: str, client: pulsar.Client, server: ProcessCluster, spark: SparkSession, table: str
) -> None:
    publish(client, topic, [b"x"])
    options = f"'service.url' '{server.service_url}', topics '{topic}', columns 'entry_id,value'"
    spark.sql(f"CREATE TABLE {table} USING cepheid OPTIONS ({options})")
    assert [tuple(row) for row in spark.table(table).collect()] == [(0, bytearray(b"x"))]


def test_a_view_is_a_topic(topic: str, client: pulsar.Client, server: ProcessCluster, spark: SparkSession) -> None:
    publish(client, topic, [b"x", b"y"])
    options = f"'service.url' '{server.service_url}', topics '{topic}'"
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW topic_view USING cepheid OPTIONS ({options})")
    assert spark.table("topic_view").count() == 2


def test_no_token_is_written_into_a_catalog(server: ProcessCluster, spark: SparkSession, table: str) -> None:
    options = f"'service.url' '{server.service_url}', topics 't', token 'hush'"
    with pytest.raises(PySparkException, match="tokenEnv or tokenFile"):
        spark.sql(f"CREATE TABLE {table} USING cepheid OPTIONS ({options})")


def test_a_view_for_each_topic_of_a_namespace(client: pulsar.Client, server: ProcessCluster, spark: SparkSession) -> None:
    call(server, "PUT", "/admin/v2/namespaces/public/views")
    call(server, "PUT", "/admin/v2/persistent/public/views/parts/partitions", 3)
    for name, schema, value in (
        ("plain-bytes", pulsar.schema.BytesSchema(), b"x"),
        ("parts", pulsar.schema.JsonSchema(Flight), Flight(carrier="AA")),
    ):
        producer = client.create_producer(f"public/views/{name}", schema=schema)
        producer.send(value)
        producer.close()
    assert cepheid_spark.register(spark, server.service_url, "public/views") == ["parts", "plain-bytes"]
    assert [row.carrier for row in spark.sql("SELECT carrier FROM parts").collect()] == ["AA"]
    assert spark.sql("SELECT value FROM `plain-bytes`").collect()[0].value == b"x"
    with pytest.raises(cepheid_scan.BadOptionError, match="chooses topics for each view"):
        cepheid_spark.register(spark, server.service_url, "public/views", options={"topics": "t"})


class Flight(pulsar.schema.Record):  # type: ignore[misc]
    carrier = pulsar.schema.String()


def call(server: ProcessCluster, method: str, path: str, body: object = None) -> None:
    with closing(AdminHttp(PlanSource(admin_url=server.admin_url))) as http:
        http.request(method, path, body=body)
