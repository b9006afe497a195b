"""Ten thousand topics on three brokers, and one is killed: when is each of its topics served again, and what do others notice?

A topic of the killed broker is served again when it has acknowledged a message that was sent to it right after the kill. The topics
of the other brokers take messages at a steady rate meanwhile.
"""

from __future__ import annotations

import argparse
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pulsar

from benchmarks.broker_load import CLIENT, OPENED_AT_ONCE, PAYLOAD, LoadedTopics, Producers, new_client, new_producer
from benchmarks.cluster import Cluster, add_arguments
from benchmarks.report import percentile, print_line
from benchmarks.server import ServerFailedError

SERVED_LIMIT_S = 120.0
STEADY_TOPICS = 100
"""Topics of the other brokers that take messages; all others of them are only open."""


class OneMessageEach:
    """Sends a message to each producer and notes when its receipt comes, in seconds since the sending."""

    def __init__(self, producers: list[pulsar.Producer]) -> None:
        self._began = time.monotonic()
        self.receipts_s: list[float] = []
        self.errors: list[str] = []
        self._all_here = threading.Event()
        self._expected = len(producers)
        for producer in producers:
            producer.send_async(PAYLOAD, self._on_receipt)

    def wait(self) -> None:
        """Raises ServerFailedError when a receipt does not come."""
        if not self._all_here.wait(SERVED_LIMIT_S) or self.errors:
            missing = self._expected - len(self.receipts_s)
            raise ServerFailedError(f"{missing} topics of the killed broker took no message; errors: {self.errors[:3]}")

    def _on_receipt(self, result: Any, _: Any) -> None:
        if result == pulsar.Result.Ok:
            self.receipts_s.append(time.monotonic() - self._began)
        else:
            self.errors.append(str(result))
        if len(self.receipts_s) + len(self.errors) == self._expected:
            self._all_here.set()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, brokers=3)
    parser.add_argument("--topics", type=int, default=10_000)
    parser.add_argument("--rate", type=float, default=500.0, help="messages a second to topics of the brokers that live")
    parser.add_argument("--before-s", type=float, default=5.0, help="seconds of load before the kill")
    arguments = parser.parse_args()
    with Cluster(arguments) as cluster:
        topics = LoadedTopics(cluster, arguments.topics)
        owners = topics.owners(topics.brokers[0])
        victim = max(topics.brokers, key=owners.count)
        survivor = next(name for name in topics.brokers if name != victim)
        client = new_client(topics.url(survivor))
        with ThreadPoolExecutor(OPENED_AT_ONCE) as pool:
            producers = list(pool.map(lambda name: new_producer(client, name), topics.names))
        OneMessageEach(producers).wait()
        steady = [topics.names[number] for number, owner in enumerate(owners) if owner != victim][:STEADY_TOPICS]
        others = Producers(topics.url(survivor), steady, arguments.rate)
        others.settle()
        numbers = range(len(steady))
        others.note_waits()
        time.sleep(arguments.before_s)
        before_s = others.waits_s(numbers)
        others.note_waits()
        cluster.processes.kill(victim)
        again = OneMessageEach([producer for producer, owner in zip(producers, owners, strict=True) if owner == victim])
        again.wait()
        meanwhile_s = others.waits_s(numbers)
        others.close()
        client.close()
        print_line(
            "takeover_many",
            figures={
                "served_again_s": round(max(again.receipts_s), 2),
                "served_again_s_p50": round(percentile(again.receipts_s, 0.5), 2),
                "others_ms_p99": round(1000 * percentile(meanwhile_s, 0.99), 1),
                "others_ms_p99_before": round(1000 * percentile(before_s, 0.99), 1),
            },
            load={
                "topics": arguments.topics,
                "topics_of_the_killed": owners.count(victim),
                "messages_per_s_to_others": arguments.rate,
                "topics_of_others_with_load": len(steady),
                "client": CLIENT,
            },
            settings=cluster.settings,
        )


if __name__ == "__main__":
    main()
