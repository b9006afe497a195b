"""What the Spark benchmarks share: a session as docs/spark.md recommends it, topics filled with prebuilt entries, timing."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import urllib.request
from collections.abc import Callable
from typing import Any

from benchmarks import load
from benchmarks.raw_client import open_connection, open_publisher
from cepheid_wire import encode_batch
from cepheid_wire import pulsar_api_pb2 as pb

KEYS = 97  # of messages: some that repeat, of different lengths


def add_spark_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--spark-cores", type=int, default=2)
    parser.add_argument("--java-options", default="", help="of the driver's JVM")


def open_session(cores: int, java_options: str = "") -> Any:
    """A SparkSession that says only errors."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(f"local[{cores}]").appName("cepheid benchmarks")
    for setting, value in {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "2g",
        "spark.driver.extraJavaOptions": java_options,
        "spark.sql.shuffle.partitions": str(cores),
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.python.worker.reuse": "true",
    }.items():
        builder = builder.config(setting, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


def frame(spark: Any, url: str, topic: str, *, schema: str | None = None, **options: str) -> Any:
    """A new snapshot of the topic each time."""
    reader = spark.read.format("cepheid").option("service.url", url).option("topics", topic).options(**options)
    return (reader.schema(schema) if schema else reader).load()


def discard(dataframe: Any) -> None:
    """Reads all rows into Spark and drops them there."""
    dataframe.write.format("noop").mode("overwrite").save()


def best_s(action: Callable[[], object], rounds: int) -> float:
    """The shortest of some rounds: what else the machine does only ever adds."""
    return min(seconds(action) for _ in range(rounds))


def seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def keyed_batch(messages: int, message_bytes: int) -> bytes:
    """A batch of random values of equal size, with keys and sequence ids as the official clients write them."""
    return encode_batch(
        (pb.SingleMessageMetadata(partition_key=f"key-{index % KEYS}", sequence_id=index), os.urandom(message_bytes))
        for index in range(messages)
    )


async def fill(url: str, topic: str, payload: bytes, entries: int, *, num_messages: int | None) -> None:
    connection = await open_connection(url, topic)
    publisher = await open_publisher(connection, topic, payload, num_messages=num_messages)
    await load.publish_all(connection, publisher, entries, window=max(32, min(1000, 8_000_000 // len(payload))))
    connection.close()


def keep_everything(admin_url: str | None) -> None:
    """Topics without a subscription keep their ledgers from here on."""
    if admin_url is None:
        return
    request = urllib.request.Request(
        f"{admin_url}/admin/v2/namespaces/public/default/retention",
        data=json.dumps({"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}).encode(),
        headers={"Content-Type": "application/json"},
        method="POST",
    )
    urllib.request.urlopen(request, timeout=30).close()
