"""How fast does Spark read history, against the official client and against its own Parquet reader? And what does a task cost?

Two topics of prebuilt entries, 1000 × 100 B and 20 × 1 KB with keys, are read as whole rows, the value alone, and as entries.
Then, in pairs: `sum(length(value))` over the 100 B topic; `receive()` of the official Python client without acknowledgements, for a
part of the same messages; and the same sum over a Parquet file with the same rows.

Also in turn: rows of 1 KB and entries of the topics, and the same given to Spark by a source that has them ready (`spark_bare`).

Figures are of a JVM that has compiled what it runs: of 1 KB rows the third round is a sixth slower than the eighth.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import load
from benchmarks.report import percentile, print_line
from benchmarks.server import Server, add_arguments
from benchmarks.spark_bare import BareSource, write_rows
from benchmarks.spark_bench import (
    add_spark_arguments,
    best_s,
    discard,
    fill,
    frame,
    keep_everything,
    keyed_batch,
    open_session,
    seconds,
)

SMALL = (1000, 100)  # messages an entry, bytes a message
LARGE = (20, 1000)
MICRO_BATCH_EVENTS_PER_S = 50
READY_BYTES = 64_000_000  # of values that the bare source gives again and again
WARMUP_BATCHES = 5  # they load classes
STREAM_LIMIT_S = 300.0


def read_figures(spark: Any, server: Server, topics: dict[str, str], rows: dict[str, int], rounds: int) -> dict[str, float]:
    """Whole rows, the value alone, entries: rows and MB of values a second."""
    small, large = topics["100b"], topics["1kb"]
    discard(frame(spark, server.url, small).limit(1000))  # Python workers and classes
    took_s = {
        "wide_100b": best_s(lambda: discard(frame(spark, server.url, small)), rounds),
        "wide_1kb": best_s(lambda: discard(frame(spark, server.url, large)), rounds),
        "value_100b": best_s(lambda: discard(frame(spark, server.url, small, schema="value binary")), rounds),
        "entries": best_s(lambda: discard(frame(spark, server.url, small, readMode="entries")), rounds),
    }
    figures = {}
    for name, spent_s in took_s.items():
        count, size = (rows["1kb"], LARGE[1]) if name == "wide_1kb" else (rows["100b"], SMALL[1])
        figures[f"{name}_mb_per_s"] = round(count * size / spent_s / 1e6, 1)
        if name != "entries":
            figures[f"{name}_rows_per_s"] = round(count / spent_s)
    return figures


def shares(
    spark: Any, server: Server, topics: dict[str, str], rows: dict[str, int], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Of what Spark takes of any Python source. Interleaved; the best of each counts."""
    from cepheid_scan import scan

    spark.dataSource.register(BareSource)
    figures: dict[str, Any] = {}
    for name, topic, count, size, mode in (
        ("1kb", topics["1kb"], rows["1kb"], LARGE[1], "messages"),
        ("entries", topics["100b"], rows["100b"] // SMALL[0], SMALL[0] * SMALL[1], "entries"),
    ):
        with tempfile.TemporaryDirectory(prefix="cepheid-bench-bare-", dir=arguments.data) as directory:
            path = Path(directory) / "rows.arrow"
            with scan(topic, service_url=server.url, mode=mode) as reader:
                write_rows(reader, path, min(count, READY_BYTES // size))
            ours = frame(spark, server.url, topic, readMode=mode)
            tasks = ours.rdd.getNumPartitions()
            bare = spark.read.format("bare").options(path=str(path), tasks=tasks, task_rows=count // tasks).load()
            assert bare.schema.names == ours.schema.names
            took = [(seconds(lambda: discard(bare)), seconds(lambda: discard(ours))) for _ in range(arguments.rounds)]  # noqa: B023
        bare_s, ours_s = (min(each) for each in zip(*took, strict=True))
        figures[f"bare_{name}_mb_per_s"] = round(count * size / bare_s / 1e6, 1)
        figures[f"{name}_share_of_bare"] = round(bare_s / ours_s, 3)
    return figures


def task_overhead_ms(spark: Any, server: Server, topic: str, tasks: int, cores: int, rounds: int) -> float:
    """Per task and slot, beyond what a task costs that never leaves the JVM. The topic has an entry a task."""
    load_frame = frame(spark, server.url, topic, minPartitions=str(tasks))
    found = load_frame.rdd.getNumPartitions()
    assert found == tasks, f"{found} tasks, not {tasks}"
    of_python = best_s(lambda: discard(load_frame), rounds)
    of_jvm = best_s(lambda: discard(spark.range(0, tasks, 1, tasks)), rounds)
    return round(1000 * (of_python - of_jvm) * cores / tasks, 2)


def micro_batch_ms(spark: Any, server: Server, topic: str, wanted: int) -> list[float]:
    """Durations of so many triggers that had rows, with a trickle of events and a checkpoint on this disk."""
    import pulsar

    client = pulsar.Client(server.url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    producer = client.create_producer(topic)
    stream = spark.readStream.format("cepheid").option("service.url", server.url).option("topics", topic)
    with tempfile.TemporaryDirectory(prefix="cepheid-bench-checkpoint-") as checkpoint:
        query = (
            stream.option("startingOffsets", "latest")
            .load()
            .writeStream.format("noop")
            .option("checkpointLocation", checkpoint)
            .start()
        )
        took: dict[int, float] = {}
        deadline = time.monotonic() + STREAM_LIMIT_S
        while len(took) < WARMUP_BATCHES + wanted:
            producer.send_async(b"x" * 100, lambda *_: None)
            time.sleep(1 / MICRO_BATCH_EVENTS_PER_S)
            if query.exception() is not None:
                raise query.exception()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(took)} micro-batches in {STREAM_LIMIT_S} s")
            if (progress := query.lastProgress) is not None and progress["numInputRows"]:
                took[progress["batchId"]] = progress["durationMs"]["triggerExecution"]
        query.stop()
    client.close()
    return list(took.values())[WARMUP_BATCHES:]


def receive_rows_per_s(server: Server, topic: str, subscription: str, messages: int) -> float:
    import pulsar

    client = pulsar.Client(server.url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    consumer = client.subscribe(topic, subscription, initial_position=pulsar.InitialPosition.Earliest)
    consumer.receive(timeout_millis=30_000)
    started = time.perf_counter()
    for _ in range(messages):
        consumer.receive(timeout_millis=30_000)
    took_s = time.perf_counter() - started
    consumer.unsubscribe()
    client.close()
    return messages / took_s


def write_parquet(server: Server, topic: str, path: Path) -> None:
    """The same rows as Spark reads: values are random, but every entry has the same, so nothing is packed or made a dictionary."""
    import pyarrow.parquet as pq

    from cepheid_scan import scan

    reader = scan(topic, service_url=server.url)
    with pq.ParquetWriter(path, reader.schema, compression="none", use_dictionary=False) as writer:
        for batch in reader:
            writer.write_batch(batch)


def sums(spark: Any, server: Server, topic: str, rows: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Interleaved pairs."""

    def add_up(source: Any) -> None:
        (total,) = source.selectExpr("sum(length(value)) as total").first()
        assert total == rows * SMALL[1], f"{total} bytes, not {rows * SMALL[1]}"

    scans: list[float] = []
    receives: list[float] = []
    parquets: list[float] = []
    with tempfile.TemporaryDirectory(prefix="cepheid-bench-parquet-", dir=arguments.data) as directory:
        path = Path(directory) / "rows.parquet"
        write_parquet(server, topic, path)
        for pair in range(arguments.pairs):
            scans.append(rows / seconds(lambda: add_up(frame(spark, server.url, topic, schema="value binary"))))
            receives.append(receive_rows_per_s(server, topic, f"bench-{pair}", min(arguments.receive, rows - 1)))
            parquets.append(rows / seconds(lambda: add_up(spark.read.parquet(str(path)))))
    return {
        "scan_rows_per_s": round(percentile(scans, 0.5)),
        "receive_rows_per_s": round(percentile(receives, 0.5)),
        "receive_ratio": round(percentile([a / b for a, b in zip(scans, receives, strict=True)], 0.5), 2),
        "parquet_share": round(percentile([a / b for a, b in zip(scans, parquets, strict=True)], 0.5), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    add_spark_arguments(parser)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of values in the 100 B topic; the 1 KB one has half")
    parser.add_argument("--receive", type=int, default=2_000_000, help="messages that the client receives in each pair")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=8, help="of which the best counts, where nothing is compared")
    parser.add_argument("--tasks", type=int, default=200, help="for what a task costs")
    parser.add_argument("--task-rounds", type=int, default=8, help="of which the best counts")
    parser.add_argument("--micro-batches", type=int, default=50)
    arguments = parser.parse_args()
    with Server(arguments) as server:
        keep_everything(server.admin_url)
        topics = {name: server.topic(f"spark-{name}") for name in ("100b", "1kb", "tiny", "stream")}
        rows = {"100b": int(arguments.gigabytes * 1e7), "1kb": int(arguments.gigabytes * 5e5)}
        for name, (messages, size) in {"100b": SMALL, "1kb": LARGE}.items():
            rows[name] -= rows[name] % messages
            payload = keyed_batch(messages, size)
            load.run(fill(server.url, topics[name], payload, rows[name] // messages, num_messages=messages))
        load.run(fill(server.url, topics["tiny"], b"x", arguments.tasks, num_messages=None))
        spark = open_session(arguments.spark_cores, arguments.java_options)
        figures: dict[str, Any] = read_figures(spark, server, topics, rows, arguments.rounds)
        figures |= shares(spark, server, topics, rows, arguments)
        overhead_ms = task_overhead_ms(spark, server, topics["tiny"], arguments.tasks, arguments.spark_cores, arguments.task_rounds)
        figures["task_overhead_ms"] = overhead_ms
        figures["micro_batch_ms_p50"] = percentile(micro_batch_ms(spark, server, topics["stream"], arguments.micro_batches), 0.5)
        figures |= sums(spark, server, topics["100b"], rows["100b"], arguments)
        version = spark.version
        spark.stop()
        print_line(
            "spark_read",
            figures=figures,
            load={
                "gigabytes": arguments.gigabytes,
                "messages_per_entry": {"100b": SMALL[0], "1kb": LARGE[0]},
                "pairs": arguments.pairs,
                "received": arguments.receive,
                "tasks": arguments.tasks,
            },
            settings={**server.settings, "spark": version, "spark_cores": arguments.spark_cores},
        )


if __name__ == "__main__":
    main()
