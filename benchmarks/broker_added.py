"""A third broker is added to two that have load: how long until each has its share of it, and what do producers notice?

A broker has its share when the topics that it serves take a third of the messages, give or take 20 %. The topics differ in their
rates, so that an even number of topics is not an even load. A cluster that moves nothing by itself never reaches that: the
benchmark has no figure then.

The two brokers run under load for a while first: a broker does not count its processor before it has run for 30 s.

The gaps of producers whose topics stayed where they were show what the machine adds: no hand-over stops those. The rate leaves two
cores some room; with 2,000 messages/s the processes wait for a processor for more than half of the time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence

from benchmarks.broker_load import LoadedTopics, Producers, add_load_arguments, load_line
from benchmarks.cluster import Cluster, add_arguments
from benchmarks.report import percentile, print_line

TOLERANCE = 0.2
LOOK_EVERY_S = 1.0
MOST_WEIGHT = 4
"""Topics send one to so many messages in the same time."""


def turns(topics: int) -> list[int]:
    """Numbers of the topics in the order in which they send: spread, and as often as their weights say."""
    weights = [1 + number % MOST_WEIGHT for number in range(topics)]
    return [number for turn in range(MOST_WEIGHT) for number in range(topics) if turn < weights[number]]


def shares(owners: Sequence[str], order: Sequence[int], brokers: Sequence[str]) -> Mapping[str, float]:
    """Return the part of all messages that goes to each broker."""
    found = dict.fromkeys(brokers, 0)
    for number in order:
        found[owners[number]] += 1
    return {broker: round(count / len(order), 3) for broker, count in found.items()}


def is_balanced(parts: Mapping[str, float]) -> bool:
    fair = 1 / len(parts)
    return all(abs(part - fair) <= TOLERANCE * fair for part in parts.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, brokers=2)
    add_load_arguments(parser, topics=120, rate=1000.0)
    parser.add_argument("--before-s", type=float, default=35.0, help="seconds of load before the broker is added")
    parser.add_argument("--limit-s", type=float, default=120.0, help="seconds after which the wait for balance is given up")
    parser.add_argument("--after-s", type=float, default=0.0, help="seconds of load once the shares are even: do they stay so?")
    arguments = parser.parse_args()
    with Cluster(arguments) as cluster:
        topics = LoadedTopics(cluster, arguments.topics)
        asked = topics.brokers[0]
        order = turns(arguments.topics)
        before = topics.owners(asked)
        producers = Producers(topics.url(asked), topics.names, arguments.rate, order)
        time.sleep(arguments.before_s)
        producers.settle()
        producers.reset()
        cluster.processes.add("broker")
        began = time.monotonic()
        balanced_s = None
        while (waited_s := time.monotonic() - began) < arguments.limit_s:
            if is_balanced(shares(topics.owners(asked), order, topics.brokers)):
                balanced_s = round(waited_s, 1)
                break
            time.sleep(LOOK_EVERY_S)
        time.sleep(arguments.after_s)
        producers.settle()
        gaps_ms = [1000 * gap_s for gap_s in producers.gaps_s(range(arguments.topics))]
        late_ms = 1000 * producers.latest_s
        after = topics.owners(asked)
        producers.close()
        if balanced_s is None:
            print(f"after {arguments.limit_s:g} s shares are {shares(after, order, topics.brokers)}", file=sys.stderr)
        moved_ms = [gap_ms for gap_ms, old, new in zip(gaps_ms, before, after, strict=True) if old != new]
        stayed_ms = [gap_ms for gap_ms, old, new in zip(gaps_ms, before, after, strict=True) if old == new]
        print_line(
            "broker_added",
            figures={
                "balanced_s": balanced_s,
                "gap_ms_max": round(max(gaps_ms), 1),
                "gap_ms_p50_moved": round(percentile(moved_ms or [0.0], 0.5), 1),
                "gap_ms_max_moved": round(max(moved_ms, default=0.0), 1),
                "gap_ms_p50_stayed": round(percentile(stayed_ms or [0.0], 0.5), 1),
                "gap_ms_max_stayed": round(max(stayed_ms, default=0.0), 1),
                "sent_late_ms_max": round(late_ms, 1),
            },
            load=load_line(
                arguments,
                rates_of_topics=f"1 to {MOST_WEIGHT}",
                shares_before=shares(before, order, topics.brokers),
                shares_after=shares(after, order, topics.brokers),
                topics_moved=len(moved_ms),
            ),
            settings=cluster.settings,
        )


if __name__ == "__main__":
    main()
