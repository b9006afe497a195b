"""One Spark session and one server (three bookies) for all tests of a process; every test has its own topic.

Where there is no Java these tests are skipped, and tests/conftest.py says so at the end of the run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pulsar
import pytest
from pyspark.sql import DataFrame, SparkSession

from cepheid_spark.java_check import NoJavaError, find_java
from cepheid_testkit import ProcessCluster
from tests.e2e.official_client import client_of


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """As a user's, with the recommended settings. Each Python worker is this Python."""
    try:
        find_java()
    except NoJavaError as error:
        pytest.skip(f"NO SPARK: {error}")
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    session = (
        SparkSession.builder.master("local[2]")
        .appName("cepheid tests")
        .config("spark.python.unix.domain.socket.enabled", "true")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.driver.memory", "1g")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    try:
        yield session
    finally:
        session.stop()


@pytest.fixture(scope="session")
def server() -> Iterator[ProcessCluster]:
    with ProcessCluster(bookies=3) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(server: ProcessCluster) -> Iterator[pulsar.Client]:
    with client_of(server.service_url) as client:
        yield client


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    name = f"{request.module.__name__.rpartition('.')[2]}-{request.node.name}"
    return "".join(char if char.isalnum() or char in "-_" else "-" for char in name)


@pytest.fixture
def load(spark: SparkSession, server: ProcessCluster):  # type: ignore[no-untyped-def]
    """load(topic, schema=None, option=…): a batch DataFrame over the topic's history."""

    def load(topic: str, schema: str | None = None, **options: object) -> DataFrame:
        reader = spark.read.format("cepheid").option("service.url", server.service_url).option("topics", topic)
        reader = reader.options(**{name: str(value) for name, value in options.items()})
        return (reader.schema(schema) if schema else reader).load()

    return load
