"""A topic, streaming queries over it, and what they and their checkpoint hold: for tests."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

import pulsar
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from cepheid_testkit import ProcessCluster

WAIT_S = 180.0  # a JVM that starts on a busy machine takes its time


class StreamedTopic:
    """Numbers are sent to it, one entry each; its ledgers are ended, trimmed, deleted."""

    def __init__(self, server: ProcessCluster, client: pulsar.Client, topic: str) -> None:
        self._server = server
        self._client = client
        self.topic = f"persistent://public/default/{topic}"
        self._producers: dict[str, pulsar.Producer] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for producer in self._producers.values():
            producer.close()

    def send(self, numbers: Iterable[int], topic: str | None = None, size: int = 0) -> None:
        name = topic or self.topic
        if name not in self._producers:
            self._producers[name] = self._client.create_producer(name, batching_enabled=False)
        failures: list[pulsar.Result] = []

        def on_receipt(result: pulsar.Result, _: pulsar.MessageId) -> None:
            if result != pulsar.Result.Ok:
                failures.append(result)

        for number in numbers:
            self._producers[name].send_async(str(number).encode().ljust(size), on_receipt)
        self._producers[name].flush()
        assert not failures, f"{name}: {failures}"

    def admin(self, method: str, what: str, body: Any = None, topic: str | None = None) -> Any:
        """`what`: what follows the topic's path."""
        path = (topic or self.topic).replace("://", "/")
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._server.admin_url}/admin/v2/{path}{what}", data, method=method)
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def ledgers(self) -> list[int]:
        """Of the chain, the one being written included."""
        found: list[dict[str, int]] = self.admin("GET", "/internalStats")["ledgers"]
        return [ledger["ledgerId"] for ledger in found]

    def roll(self) -> None:
        """The ledger that is written is closed; the next one is made when somebody uses the topic."""
        self.admin("PUT", "/unload")
        self.admin("GET", "/stats")

    def trim(self) -> None:
        self.admin("POST", "/trim")

    def delete_topic(self) -> None:
        for producer in self._producers.values():
            producer.close()
        self._producers.clear()
        self.admin("DELETE", "?force=true")


class Streams(StreamedTopic):
    """Rows are collected by foreachBatch: with the number of the batch, so that a repeated one replaces itself."""

    def __init__(self, spark: SparkSession, server: ProcessCluster, client: pulsar.Client, topic: str, path: Path) -> None:
        super().__init__(server, client, topic)
        self._spark = spark
        self.checkpoint = path / "checkpoint"
        self.batches: dict[int, list[int]] = {}
        self._queries: list[StreamingQuery] = []
        self.fail_batch: int | None = None  # its rows are refused once

    def __exit__(self, *_: object) -> None:
        for query in self._queries:
            query.stop()
        super().__exit__()

    def frame(self, **options: object) -> DataFrame:
        reader = self._spark.readStream.format("cepheid").option("service.url", self._server.service_url)
        if not {"topics", "topicsPattern"} & options.keys():
            reader = reader.option("topics", self.topic)
        reader = reader.options(**{name: str(value) for name, value in options.items()})
        return reader.schema("value binary").load()

    def start(self, trigger: dict[str, Any] | None = None, **options: object) -> StreamingQuery:
        def keep(batch: DataFrame, number: int) -> None:
            rows = [int(row.value) for row in batch.collect()]
            if number == self.fail_batch:
                self.fail_batch = None
                raise RuntimeError("refused once, for the test")
            self.batches[number] = rows

        writer = self.frame(**options).writeStream.foreachBatch(keep).option("checkpointLocation", str(self.checkpoint))
        query = (writer.trigger(**trigger) if trigger else writer).start()
        self._queries.append(query)
        return query

    def run_available(self, **options: object) -> list[int]:
        """One AvailableNow run to its end; the numbers of its batches."""
        before = set(self.batches)
        query = self.start({"availableNow": True}, **options)
        assert query.awaitTermination(int(WAIT_S))
        return sorted(self.batches.keys() - before)

    def failure(self, query: StreamingQuery) -> str:
        """With what it ends."""
        deadline = time.monotonic() + WAIT_S
        while query.isActive and query.exception() is None:
            assert time.monotonic() < deadline, "the query goes on"
            time.sleep(0.01)
        error = query.exception()
        assert error is not None, "the query ended without an error"
        self._queries.remove(query)
        return str(error)

    def numbers(self) -> list[int]:
        return sorted(number for batch in list(self.batches.values()) for number in batch)

    def wait_for(self, numbers: Iterable[int], timeout_s: float = WAIT_S) -> None:
        """Until exactly these have come, each once."""
        expected = sorted(numbers)
        self.wait_until(lambda: len(self.numbers()) >= len(expected), lambda: f"came: {self.numbers()[:50]}", timeout_s)
        assert self.numbers() == expected

    def wait_until(self, condition: Callable[[], bool], what: Callable[[], str], timeout_s: float = WAIT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            for query in self._queries:
                if (error := query.exception()) is not None:
                    raise error
            assert time.monotonic() < deadline, what()
            time.sleep(0.01)

    def offsets(self) -> list[dict[str, Any]]:
        """Of the checkpoint, in order."""
        found = [path for path in (self.checkpoint / "offsets").iterdir() if path.name.isdigit()]
        return [json.loads(path.read_text().splitlines()[-1]) for path in sorted(found, key=lambda path: int(path.name))]
