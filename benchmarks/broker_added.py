"""A third broker is added to two that have load: how long until each has its share, and what do producers notice?

A broker has its share when it serves a third of the topics, give or take 20 %; all of them take the same load. A cluster that moves
nothing by itself never reaches that: the benchmark has no figure then.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from benchmarks.broker_load import LoadedTopics, Producers, add_load_arguments, load_line
from benchmarks.cluster import Cluster, add_arguments
from benchmarks.report import percentile, print_line

TOLERANCE = 0.2
LOOK_EVERY_S = 1.0


def is_balanced(shares: Counter[str], brokers: list[str]) -> bool:
    fair = shares.total() / len(brokers)
    return all(abs(shares[broker] - fair) <= TOLERANCE * fair for broker in brokers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, brokers=2)
    add_load_arguments(parser, topics=120, rate=2000.0)
    parser.add_argument("--limit-s", type=float, default=120.0, help="seconds after which the wait for balance is given up")
    arguments = parser.parse_args()
    with Cluster(arguments) as cluster:
        topics = LoadedTopics(cluster, arguments.topics)
        asked = topics.brokers[0]
        before = Counter(topics.owners(asked))
        producers = Producers(topics.url(asked), topics.names, arguments.rate)
        producers.settle()
        producers.reset()
        cluster.processes.add("broker")
        began = time.monotonic()
        balanced_s = None
        while time.monotonic() - began < arguments.limit_s:
            if is_balanced(Counter(topics.owners(asked)), topics.brokers):
                balanced_s = time.monotonic() - began
                break
            time.sleep(LOOK_EVERY_S)
        producers.settle()
        gaps_ms = [1000 * gap_s for gap_s in producers.gaps_s(range(arguments.topics))]
        after = Counter(topics.owners(asked))
        producers.close()
        if balanced_s is None:
            print(f"after {arguments.limit_s:g} s the brokers have {dict(after)} topics", file=sys.stderr)
        print_line(
            "broker_added",
            figures={
                "balanced_s": None if balanced_s is None else round(balanced_s, 1),
                "gap_ms_p50": round(percentile(gaps_ms, 0.5), 1),
                "gap_ms_max": round(max(gaps_ms), 1),
            },
            load=load_line(arguments, topics_before=dict(before), topics_after=dict(after)),
            settings=cluster.settings,
        )


if __name__ == "__main__":
    main()
