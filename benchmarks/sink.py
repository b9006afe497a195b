"""How fast does Spark write rows of 1 KB to a topic, and how long does a micro-batch take that reads a topic and writes another?

Rows are made by Spark itself, so making them is part of what is measured. In turn: exactly once, at least once, and the official
Python client publishing as many messages of the same size. Then a query from topic to topic, with a trickle of events.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import urllib.request
from typing import Any

from benchmarks.report import percentile, print_line
from benchmarks.server import Server, add_arguments
from benchmarks.spark_bench import add_spark_arguments, open_session, seconds

MESSAGE_BYTES = 1000
EVENTS_PER_S = 50
WARMUP_BATCHES = 5
STREAM_LIMIT_S = 300.0
SEND_LIMIT = 30_000


def write(spark: Any, url: str, topic: str, rows: int, cores: int, **options: str) -> None:
    frame = spark.range(0, rows, 1, cores).selectExpr(f"rpad(cast(id AS string), {MESSAGE_BYTES}, 'x') AS value")
    frame.write.format("cepheid").options(**{"service.url": url, "topic": topic, **options}).mode("append").save()


def publish(url: str, topic: str, rows: int) -> None:
    import pulsar

    client = pulsar.Client(url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    producer = client.create_producer(topic, batching_enabled=True, max_pending_messages=SEND_LIMIT, block_if_queue_full=True)
    payload = b"x" * MESSAGE_BYTES
    for _ in range(rows):
        producer.send_async(payload, None)
    producer.flush()
    client.close()


def micro_batch_ms(spark: Any, url: str, source: str, target: str, wanted: int) -> list[float]:
    """Return the durations of so many triggers that had rows, with a checkpoint on this disk."""
    import pulsar

    client = pulsar.Client(url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    producer = client.create_producer(source)
    stream = spark.readStream.format("cepheid").option("service.url", url).option("topic", source)
    with tempfile.TemporaryDirectory(prefix="cepheid-bench-checkpoint-") as checkpoint:
        writer = stream.option("startingOffsets", "latest").load().select("key", "value").writeStream.format("cepheid")
        query = writer.option("service.url", url).option("topic", target).option("checkpointLocation", checkpoint).start()
        took: dict[int, float] = {}
        deadline = time.monotonic() + STREAM_LIMIT_S
        while len(took) < WARMUP_BATCHES + wanted:
            producer.send_async(b"x" * 100, lambda *_: None)
            time.sleep(1 / EVENTS_PER_S)
            if query.exception() is not None:
                raise query.exception()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(took)} micro-batches in {STREAM_LIMIT_S} s")
            if (progress := query.lastProgress) is not None and progress["numInputRows"]:
                took[progress["batchId"]] = progress["durationMs"]["triggerExecution"]
        query.stop()
    client.close()
    return list(took.values())[WARMUP_BATCHES:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    add_spark_arguments(parser)
    parser.add_argument("--rows", type=int, default=300_000, help="of each write")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--micro-batches", type=int, default=30)
    arguments = parser.parse_args()
    with Server(arguments) as server:
        if server.admin_url is not None:
            deduplicate(server.admin_url)
        spark = open_session(arguments.spark_cores, arguments.java_options)
        write(spark, server.url, server.topic("warm"), 10_000, arguments.spark_cores)
        loads = {
            "exactly_once": lambda: write(spark, server.url, server.topic("once"), arguments.rows, arguments.spark_cores),
            "at_least_once": lambda: write(
                spark, server.url, server.topic("least"), arguments.rows, arguments.spark_cores, exactlyOnce="false"
            ),
            "official": lambda: publish(server.url, server.topic("official"), arguments.rows),
        }
        took: dict[str, list[float]] = {name: [] for name in loads}
        for _ in range(arguments.rounds):
            for name, load in loads.items():
                took[name].append(arguments.rows * MESSAGE_BYTES / seconds(load) / 1e6)
        durations = micro_batch_ms(spark, server.url, server.topic("source"), server.topic("target"), arguments.micro_batches)
        version = spark.version
        spark.stop()
    rates = {name: percentile(each, 0.5) for name, each in took.items()}
    ratios = [ours / theirs for ours, theirs in zip(took["exactly_once"], took["official"], strict=True)]
    print_line(
        "sink",
        figures={
            **{f"{name}_mb_per_s": round(rate, 1) for name, rate in rates.items()},
            "exactly_once_mb_per_s_core": round(rates["exactly_once"] / arguments.spark_cores, 1),
            "official_ratio": round(percentile(ratios, 0.5), 2),
            "micro_batch_ms_p50": percentile(durations, 0.5),
        },
        load={"rows": arguments.rows, "message_bytes": MESSAGE_BYTES, "rounds": arguments.rounds},
        settings={**server.settings, "spark": version, "spark_cores": arguments.spark_cores},
    )


def deduplicate(admin_url: str) -> None:
    """Turn deduplication on for all topics of the benchmark."""
    url = f"{admin_url}/admin/v2/namespaces/public/default/deduplication"
    request = urllib.request.Request(url, b"true", {"Content-Type": "application/json"}, method="POST")
    urllib.request.urlopen(request, timeout=30).close()


if __name__ == "__main__":
    main()
