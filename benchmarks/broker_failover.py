"""How long do producers wait when their broker is killed and another takes over? Two brokers, many topics, the official client.

The gap of a topic is the longest wait from a send to its receipt after the kill. The service URL is that of a broker that lives,
as a load balancer would have it. With --all-hosts it names both: the client then asks the dead one for every second topic, and
again for every second of those after a pause that doubles, so that the last of 100 comes back after 12.7 s whatever brokers do.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections import Counter
from typing import Any

import pulsar

from benchmarks.cluster import Cluster, add_arguments
from benchmarks.report import percentile, print_line
from benchmarks.server import ServerFailedError

WATCHED_S = 30.0
SETTLED_S = 3.0


class Producers:
    """One per topic, sending in turn at a steady rate; of each topic the longest wait since `reset`."""

    def __init__(self, url: str, topics: list[str], rate_per_s: float) -> None:
        self._client = pulsar.Client(url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error), io_threads=2)
        self._producers = [
            self._client.create_producer(topic, send_timeout_millis=0, max_pending_messages=100_000, batching_enabled=False)
            for topic in topics
        ]
        self._pause_s = 1 / rate_per_s
        self._unanswered: list[dict[int, float]] = [{} for _ in topics]
        self._longest_s = [0.0 for _ in topics]
        self._errors = 0
        self.answered = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._send_all, name="failover-load", daemon=True)
        self._thread.start()

    def reset(self) -> None:
        self._longest_s = [0.0 for _ in self._longest_s]

    def longest_s(self, index: int) -> float:
        """Waits that have not ended count as long as they last."""
        oldest = min(list(self._unanswered[index].values()), default=time.monotonic())
        return max(self._longest_s[index], time.monotonic() - oldest)

    @property
    def oldest_unanswered_s(self) -> float:
        oldest = [min(list(sends.values()), default=time.monotonic()) for sends in self._unanswered]
        return time.monotonic() - min(oldest)

    def stop(self) -> None:
        """Send nothing more, and wait until everything is answered."""
        self._stopped.set()
        self._thread.join()
        for producer in self._producers:
            producer.flush()
        while any(self._unanswered):
            time.sleep(0.01)

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()
        self._client.close()
        if self._errors:
            raise ServerFailedError(f"{self._errors} sends were answered with errors")

    def _send_all(self) -> None:
        number = 0
        due = time.monotonic()
        while not self._stopped.is_set():
            index = number % len(self._producers)
            self._unanswered[index][number] = time.monotonic()
            self._producers[index].send_async(b"x" * 100, self._on_receipt(index, number))
            number += 1
            due += self._pause_s
            time.sleep(max(0.0, due - time.monotonic()))

    def _on_receipt(self, index: int, number: int) -> Any:
        def on_receipt(result: Any, _: Any) -> None:
            if result != pulsar.Result.Ok and not self._stopped.is_set():
                self._errors += 1
            self.answered += result == pulsar.Result.Ok
            wait_s = time.monotonic() - self._unanswered[index].pop(number)
            self._longest_s[index] = max(self._longest_s[index], wait_s)

        return on_receipt


def one_kill(cluster: Cluster, producers: Producers, topics: list[str], victim: str) -> list[float]:
    """Gaps in seconds of the topics whose broker was killed."""
    its_own = [index for index, topic in enumerate(topics) if cluster.view.owner(topic) == victim]
    if not its_own:
        raise ServerFailedError(f"{victim} owns none of the topics: nothing would be measured")
    producers.reset()
    began = time.monotonic()
    cluster.processes.kill(victim)
    time.sleep(SETTLED_S)
    while producers.oldest_unanswered_s > 1.0 and time.monotonic() - began < WATCHED_S:
        time.sleep(0.1)
    gaps_s = [producers.longest_s(index) for index in its_own]
    cluster.processes.start(victim)
    time.sleep(SETTLED_S)
    return gaps_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, brokers=2)
    parser.add_argument("--topics", type=int, default=100)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--rate", type=float, default=1000.0, help="messages a second, all topics together")
    parser.add_argument("--all-hosts", action="store_true", help="the service URL names the broker that is killed as well")
    arguments = parser.parse_args()
    with Cluster(arguments) as cluster:
        topics = [cluster.topic(f"failover-{index}") for index in range(arguments.topics)]
        gaps_s: list[float] = []
        owned: list[int] = []
        Producers(cluster.url, topics, arguments.rate).close()  # somebody owns them
        for _ in range(arguments.kills):
            victim = Counter(cluster.view.owner(topic) for topic in topics).most_common(1)[0][0]
            survivor = next(port for name, port in cluster.processes.broker_ports.items() if name != victim)
            url = cluster.url if arguments.all_hosts else f"pulsar://127.0.0.1:{survivor}"
            producers = Producers(url, topics, arguments.rate)
            time.sleep(SETTLED_S)
            gaps = one_kill(cluster, producers, topics, victim)
            producers.close()
            owned.append(len(gaps))
            gaps_s += gaps
        print_line(
            "broker_failover",
            figures={
                "gap_s_p50": round(percentile(gaps_s, 0.5), 2),
                "gap_s_p99": round(percentile(gaps_s, 0.99), 2),
                "gap_s_max": round(max(gaps_s), 2),
            },
            load={
                "topics": arguments.topics,
                "kills": arguments.kills,
                "topics_of_the_killed": owned,
                "messages_per_s": arguments.rate,
                "client": "pulsar-client, " + pulsar.__version__,
                "service_url": "both brokers" if arguments.all_hosts else "the one that lives",
            },
            settings=cluster.settings,
        )


if __name__ == "__main__":
    main()
