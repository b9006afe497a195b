"""Topics of a cluster with several brokers under a steady load of the official client: who owns them, and how long producers wait.

The brokers' own answers to lookups say who owns a topic, so a benchmark sees what a client sees. The namespace keeps all that was
ever published: stored entries minus receipts is then the number of duplicates.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pulsar

from benchmarks import load
from benchmarks.cluster import Cluster
from benchmarks.raw_client import open_connection
from benchmarks.server import ServerFailedError
from cepheid.admin.sync import Admin, connect
from cepheid_wire import pulsar_api_pb2 as pb

NAMESPACE = "public/bench"
BUNDLES = 64
"""Enough to spread over three brokers about evenly."""
PAYLOAD = b"x" * 100
WATCHED_S = 60.0
SETTLED_S = 2.0
OPENED_AT_ONCE = 32
LOOKED_UP_AT_ONCE = 500
CLIENT = "pulsar-client, " + pulsar.__version__


def add_load_arguments(parser: argparse.ArgumentParser, *, topics: int, rate: float) -> None:
    parser.add_argument("--topics", type=int, default=topics)
    parser.add_argument("--rate", type=float, default=rate, help="messages a second, all topics together")


class LoadedTopics:
    """Topics of one namespace of the cluster, by number."""

    def __init__(self, cluster: Cluster, count: int, *, bundles: int = BUNDLES) -> None:
        self._cluster = cluster
        forever = {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}
        policies = {"retention_policies": forever, "bundles": {"numBundles": bundles}}
        self.admin(self.brokers[0]).call("PUT", f"/admin/v2/namespaces/{NAMESPACE}", body=policies)
        self.names = [f"persistent://{NAMESPACE}/topic-{number:05d}" for number in range(count)]

    @property
    def brokers(self) -> list[str]:
        return list(self._cluster.processes.broker_ports)

    def admin(self, broker: str) -> Admin:
        return connect(self._cluster.processes.admin_urls[self.brokers.index(broker)])

    def url(self, broker: str) -> str:
        """The service URL of one broker, as a load balancer that only names living ones would give it."""
        return f"pulsar://127.0.0.1:{self._cluster.processes.broker_ports[broker]}"

    def owners(self, asked: str) -> list[str]:
        """The broker of each topic, as `asked` tells its clients. A topic without an owner gets one by this."""
        names = {port: name for name, port in self._cluster.processes.broker_ports.items()}
        return [names[port] for port in load.run(_owning_ports(self.url(asked), self.names))]

    def numbers_of(self, broker: str, asked: str) -> list[int]:
        """The numbers of the topics that `broker` owns. Raises ServerFailedError when there are none: nothing would be measured."""
        numbers = [number for number, owner in enumerate(self.owners(asked)) if owner == broker]
        if not numbers:
            raise ServerFailedError(f"{broker} owns none of the topics: nothing would be measured")
        return numbers

    def most_loaded(self, asked: str) -> str:
        return Counter(self.owners(asked)).most_common(1)[0][0]

    def spread(self) -> None:
        """Unload everything: the next lookups choose owners among the brokers that run now."""
        self.admin(self.brokers[0]).call("PUT", f"/admin/v2/namespaces/{NAMESPACE}/unload")

    def stored_entries(self) -> int:
        """Entries in all topics together."""
        admin = self.admin(self.brokers[0])
        paths = [f"/admin/v2/{name.replace('://', '/')}/internalStats" for name in self.names]
        return sum(int(admin.call("GET", path)["numberOfEntries"]) for path in paths)


async def _owning_ports(url: str, topics: Sequence[str]) -> list[int]:
    connection = await open_connection(url)
    try:
        ports: list[int] = []
        for start in range(0, len(topics), LOOKED_UP_AT_ONCE):
            asked = [connection.ask(pb.CommandLookupTopic(topic=topic)) for topic in topics[start : start + LOOKED_UP_AT_ONCE]]
            for answer in await asyncio.gather(*asked):
                if answer.response == pb.CommandLookupTopicResponse.Failed:
                    raise ServerFailedError(f"a lookup failed: {answer.message}")
                ports.append(urlsplit(answer.brokerServiceUrl or url).port or 0)
        return ports
    finally:
        connection.close()


def new_client(url: str) -> pulsar.Client:
    return pulsar.Client(url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error), io_threads=2)


def new_producer(client: pulsar.Client, topic: str) -> pulsar.Producer:
    """Never gives a message up, and does not gather messages in batches: a message is an entry."""
    return client.create_producer(topic, send_timeout_millis=0, max_pending_messages=100_000, batching_enabled=False)


class Producers:
    """One per topic, sending in turn at a steady rate; of each topic the longest wait for a receipt since `reset`."""

    def __init__(self, url: str, topics: Sequence[str], rate_per_s: float, turns: Sequence[int] = ()) -> None:
        """`turns`: numbers of the topics in the order in which they send, again and again. Empty: all of them alike."""
        self._client = new_client(url)
        with ThreadPoolExecutor(OPENED_AT_ONCE) as pool:
            self._producers = list(pool.map(lambda topic: new_producer(self._client, topic), topics))
        self._turns = turns or range(len(topics))
        self._pause_s = 1 / rate_per_s
        self._unanswered: list[dict[int, float]] = [{} for _ in topics]
        self._longest_s = [0.0 for _ in topics]
        self.latest_s = 0.0
        """By how much a message was sent too late since `reset`: what this process had to wait for a processor."""
        self._waits_s: list[tuple[int, float]] | None = None
        self._errors = 0
        self.receipts = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._send_all, name="producers", daemon=True)
        self._thread.start()

    def reset(self) -> None:
        """Forget the waits so far; those that go on count from their beginning."""
        self._longest_s = [0.0 for _ in self._longest_s]
        self.latest_s = 0.0

    def note_waits(self) -> None:
        """From now on every single wait is kept: see `waits_s`."""
        self._waits_s = []

    def waits_s(self, numbers: Sequence[int]) -> list[float]:
        """Waits of these topics that have ended since `note_waits`."""
        wanted = set(numbers)
        return [wait_s for number, wait_s in list(self._waits_s or ()) if number in wanted]

    def longest_s(self, number: int) -> float:
        """Waits that have not ended count as long as they last."""
        now = time.monotonic()
        oldest = min(list(self._unanswered[number].values()), default=now)
        return max(self._longest_s[number], now - oldest)

    def gaps_s(self, numbers: Sequence[int]) -> list[float]:
        return [self.longest_s(number) for number in numbers]

    @property
    def oldest_unanswered_s(self) -> float:
        now = time.monotonic()
        return now - min(min(list(sends.values()), default=now) for sends in self._unanswered)

    def settle(self, within_s: float = WATCHED_S) -> None:
        """Wait until receipts come at once again. Raises ServerFailedError when they do not."""
        time.sleep(SETTLED_S)
        deadline = time.monotonic() + within_s
        while self.oldest_unanswered_s > 0.5:
            if time.monotonic() > deadline:
                raise ServerFailedError(
                    f"after {within_s:g} s a message has waited {self.oldest_unanswered_s:.1f} s for its receipt"
                )
            time.sleep(0.05)

    def stop(self) -> None:
        """Send nothing more, and wait for all receipts. Raises ServerFailedError when a send was answered with an error."""
        self._stopped.set()
        self._thread.join()
        deadline = time.monotonic() + WATCHED_S
        while any(self._unanswered) and time.monotonic() < deadline:
            time.sleep(0.02)
        if self._errors or any(self._unanswered):
            waiting = sum(map(len, self._unanswered))
            raise ServerFailedError(f"{self._errors} sends were answered with errors, {waiting} not at all")

    def close(self) -> None:
        try:
            self.stop()
        finally:
            self._client.close()

    def _send_all(self) -> None:
        number = 0
        due = time.monotonic()
        while not self._stopped.is_set():
            index = self._turns[number % len(self._turns)]
            self._unanswered[index][number] = time.monotonic()
            self._producers[index].send_async(PAYLOAD, self._on_receipt(index, number))
            number += 1
            due += self._pause_s
            if (ahead_s := due - time.monotonic()) > 0:
                time.sleep(ahead_s)
            self.latest_s = max(self.latest_s, -ahead_s)

    def _on_receipt(self, index: int, number: int) -> Any:
        def on_receipt(result: Any, _: Any) -> None:
            if result == pulsar.Result.Ok:
                self.receipts += 1
            else:
                self._errors += 1
            wait_s = time.monotonic() - self._unanswered[index].pop(number)
            self._longest_s[index] = max(self._longest_s[index], wait_s)
            if self._waits_s is not None:
                self._waits_s.append((index, wait_s))

        return on_receipt


def load_line(arguments: argparse.Namespace, **more: Any) -> Mapping[str, Any]:
    """What every benchmark here says about its load."""
    return {"topics": arguments.topics, "messages_per_s": arguments.rate, "client": CLIENT, **more}
