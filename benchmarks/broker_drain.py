"""How long do producers wait when their broker is drained, and others take its topics? Three brokers, the official client.

The gap of a topic is the longest wait from a send to its receipt while its broker is drained. Deduplication is off: afterwards the
topics must have as many entries as were acknowledged.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter

import pulsar

from benchmarks.broker_failover import SETTLED_S, Producers
from benchmarks.cluster import Cluster, add_arguments
from benchmarks.report import percentile, print_line
from benchmarks.server import ServerFailedError
from cepheid_cli.admin_client import AdminClient, quoted, topic_path

DRAIN_LIMIT_S = 60.0
POLL_S = 0.05


def one_drain(cluster: Cluster, admin: AdminClient, producers: Producers, topics: list[str]) -> tuple[list[float], float]:
    """Gaps in seconds of the topics whose broker was drained, and how long the drain took."""
    owners = [cluster.view.owner(topic) for topic in topics]
    victim = Counter(owners).most_common(1)[0][0]
    path = f"/cepheid/v1/brokers/{quoted(victim)}/drain"
    producers.reset()
    began = time.monotonic()
    found = admin.put(path)
    while not found["drained"]:
        if time.monotonic() - began > DRAIN_LIMIT_S:
            raise ServerFailedError(f"{victim} is not drained after {DRAIN_LIMIT_S:g} s: {found}")
        time.sleep(POLL_S)
        found = admin.get(path)
    took_s = time.monotonic() - began
    time.sleep(1.0)
    gaps_s = [producers.longest_s(index) for index, owner in enumerate(owners) if owner == victim]
    admin.delete(path)
    return gaps_s, took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, brokers=3)
    parser.add_argument("--topics", type=int, default=100)
    parser.add_argument("--drains", type=int, default=5)
    parser.add_argument("--rate", type=float, default=1000.0, help="messages a second, all topics together")
    arguments = parser.parse_args()
    with Cluster(arguments) as cluster:
        topics = [cluster.topic(f"drain-{index}") for index in range(arguments.topics)]
        admin = AdminClient(cluster.processes.admin_urls[0])
        producers = Producers(cluster.url, topics, arguments.rate)
        time.sleep(SETTLED_S)
        gaps_s: list[float] = []
        owned: list[int] = []
        took_s: list[float] = []
        for _ in range(arguments.drains):
            gaps, took = one_drain(cluster, admin, producers, topics)
            gaps_s += gaps
            owned.append(len(gaps))
            took_s.append(took)
            time.sleep(SETTLED_S)
        producers.stop()
        stored = 0
        for topic in topics:
            stats = admin.get(f"{topic_path(topic)}/internalStats")
            stored += stats["numberOfEntries"]
        print_line(
            "broker_drain",
            figures={
                "gap_s_p50": round(percentile(gaps_s, 0.5), 3),
                "gap_s_p99": round(percentile(gaps_s, 0.99), 3),
                "gap_s_max": round(max(gaps_s), 3),
                "drain_s_max": round(max(took_s), 2),
                "duplicates": stored - producers.answered,
            },
            load={
                "topics": arguments.topics,
                "drains": arguments.drains,
                "topics_of_the_drained": owned,
                "messages_per_s": arguments.rate,
                "client": "pulsar-client, " + pulsar.__version__,
            },
            settings=cluster.settings,
        )
        producers.close()


if __name__ == "__main__":
    main()
