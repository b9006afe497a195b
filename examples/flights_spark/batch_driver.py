"""The batch queries of the demo, as a driver process.

`python -m examples.flights_spark.batch_driver SERVICE_URL TOPIC DIRECTORY CLUSTER VICTIM`

Computes the mean delays, and writes them to the topic TOPIC-delays, where the official client receives them. Then it computes them
again as many small tasks. When a quarter of those is done, it kills the bookie VICTIM of the local cluster in CLUSTER.
DIRECTORY/batch.json gets the results.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from examples.flights_spark.spark_session import open_session

NEW_YORK = "America/New_York"
SCAN_TASKS = 64
KILL_AT = 0.25
TASKS_AFTER_KILL = 16  # the kill leaves at least this many tasks; a third of them would read from the bookie first
_POLL_S = 0.01
_RECEIVE_LIMIT_MS = 30_000


def main(service_url: str, topic: str, directory: Path, cluster: Path, victim: str) -> None:
    from cepheid_dev.local_cluster import LocalCluster

    spark = open_session("cepheid demo: batch")

    def load(**options: str) -> Any:
        reader = spark.read.format("cepheid").option("service.url", service_url).option("topics", topic)
        return reader.options(readMode="typed", **options).load()

    flights = load()
    columns = flights.columns
    started = time.monotonic()
    flights.count()  # starts the Python workers and loads classes before the measured query
    first_s = time.monotonic() - started
    started = time.monotonic()
    delays = mean_delays(load()).collect()
    query_s = time.monotonic() - started
    writer = mean_delays(load()).write.format("cepheid").option("service.url", service_url).option("topic", delays_topic(topic))
    writer.option("encode", "json").mode("append").save()
    received = receive_rows(service_url, delays_topic(topic))
    watch = JobWatch(spark, KILL_AT, lambda: LocalCluster(cluster).kill(victim))
    again = watch.run(lambda: mean_delays(load(minPartitions=str(SCAN_TASKS))).collect())
    results = {
        "columns": columns,
        "first_s": first_s,
        "query_s": query_s,
        "delays": [row.asDict() for row in delays],
        "delays_received": received,
        "delays_while_killed": [row.asDict() for row in again],
        "kill": watch.summary(),
        "spark": spark.version,
    }
    (directory / "batch.json").write_text(json.dumps(results))
    spark.stop()


def mean_delays(flights: Any) -> Any:
    """Return the mean departure delay per carrier and hour of the scheduled departure in New York."""
    from pyspark.sql import functions as f

    hour = f.hour(f.from_utc_timestamp("scheduled_departure", NEW_YORK))
    known = flights.where("dep_delay is not null").groupBy("carrier", hour.alias("hour"))
    return known.agg(
        f.count("dep_delay").alias("flights"), f.sum("dep_delay").alias("minutes"), f.avg("dep_delay").alias("mean_minutes")
    )


def delays_topic(topic: str) -> str:
    """Return the name of the topic for the mean delays."""
    return f"{topic}-delays"


def receive_rows(service_url: str, topic: str) -> list[dict[str, Any]]:
    """Return the records of a topic with a JSON schema, as the official client reads them."""
    import pulsar

    client = pulsar.Client(service_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    reader = client.create_reader(topic, pulsar.MessageId.earliest)
    rows = []
    while reader.has_message_available():
        rows.append(json.loads(reader.read_next(_RECEIVE_LIMIT_MS).data()))
    client.close()
    return rows


class JobWatch:
    """Runs a query while a thread counts its finished tasks. When `share` (0..1) of them are done, it calls `act` once."""

    def __init__(self, spark: Any, share: float, act: Callable[[], None]) -> None:
        self._tracker = spark.sparkContext.statusTracker()
        self._share = share
        self._act = act
        self._done = threading.Event()
        self._stages: dict[int, Any] = {}
        self.acted_at: tuple[float, int, int] | None = None  # seconds since the start, tasks done, all tasks
        self.finished: list[tuple[float, int]] = []  # seconds since the start, tasks done
        self.seconds = 0.0
        self.errors: list[str] = []

    def run(self, query: Callable[[], Any]) -> Any:
        """Run `query` in the calling thread and return its result."""
        self._started = time.monotonic()
        thread = threading.Thread(target=self._watch, name="job-watch", daemon=True)
        thread.start()
        try:
            return query()
        finally:
            self.seconds = time.monotonic() - self._started
            self._done.set()
            thread.join()

    def summary(self) -> dict[str, Any]:
        """Return the results in a form for JSON."""
        failed = sum(info.numFailedTasks for info in self._stages.values())
        return {
            "acted_at": self.acted_at,
            "finished": self.finished,
            "seconds": self.seconds,
            "failed_tasks": failed,
            "errors": self.errors,
        }

    def _watch(self) -> None:
        """Follow the stage with the most tasks, which is the one that reads.

        One more look after the query has ended finds what finished since the look before.
        """
        is_last = False
        while not is_last:
            is_last = self._done.wait(_POLL_S)
            for stage in {*self._stages, *self._tracker.getActiveStageIds()}:
                if (info := self._tracker.getStageInfo(stage)) is not None:
                    self._stages[stage] = info
            if self._stages:
                self._note(max(self._stages.values(), key=lambda info: info.numTasks))

    def _note(self, info: Any) -> None:
        now_s, done, tasks = time.monotonic() - self._started, info.numCompletedTasks, info.numTasks
        if not self.finished or self.finished[-1][1] != done:
            self.finished.append((now_s, done))
        if self.acted_at is None and self._share * tasks <= done <= tasks - TASKS_AFTER_KILL:
            try:
                self._act()
            except Exception as error:
                self.errors.append(f"{type(error).__name__}: {error}")
            self.acted_at = (now_s, done, tasks)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]), sys.argv[5])
