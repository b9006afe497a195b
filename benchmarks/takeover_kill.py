"""How long do producers wait when their broker is killed and others take over? Three brokers, many topics, the official client.

The gap of a topic is the longest wait from a send to its receipt after the kill. The service URL is that of a broker that lives,
as a load balancer would have it. With --all-hosts it names all of them: the client then asks the dead one too, again and again,
with pauses that double, whatever brokers do.
"""

from __future__ import annotations

import argparse

from benchmarks.broker_load import LoadedTopics, Producers, add_load_arguments, load_line
from benchmarks.cluster import Cluster, add_arguments
from benchmarks.report import percentile, print_line


def one_kill(cluster: Cluster, topics: LoadedTopics, arguments: argparse.Namespace) -> list[float]:
    """Gaps in seconds of the topics whose broker was killed. Afterwards all brokers run."""
    victim = topics.most_loaded(topics.brokers[0])
    survivor = next(name for name in topics.brokers if name != victim)
    its_own = topics.numbers_of(victim, survivor)
    producers = Producers(cluster.url if arguments.all_hosts else topics.url(survivor), topics.names, arguments.rate)
    producers.settle()
    producers.reset()
    cluster.processes.kill(victim)
    producers.settle()
    gaps_s = producers.gaps_s(its_own)
    producers.close()
    cluster.processes.start(victim)
    return gaps_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, brokers=3)
    add_load_arguments(parser, topics=100, rate=5000.0)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--all-hosts", action="store_true", help="the service URL names the broker that is killed as well")
    arguments = parser.parse_args()
    rounds: list[list[float]] = []
    with Cluster(arguments) as cluster:
        topics = LoadedTopics(cluster, arguments.topics)
        for _ in range(arguments.kills):
            rounds.append(one_kill(cluster, topics, arguments))
            topics.spread()
        gaps_s = [gap_s for one in rounds for gap_s in one]
        print_line(
            "takeover_kill",
            figures={
                "gap_s_p50": round(percentile(gaps_s, 0.5), 2),
                "gap_s_p99": round(percentile(gaps_s, 0.99), 2),
                "gap_s_max": round(max(gaps_s), 2),
                "longest_of_a_kill_s_p50": round(percentile([max(one) for one in rounds], 0.5), 2),
            },
            load=load_line(
                arguments,
                kills=arguments.kills,
                topics_of_the_killed=[len(one) for one in rounds],
                service_url="all brokers" if arguments.all_hosts else "one that lives",
            ),
            settings=cluster.settings,
        )


if __name__ == "__main__":
    main()
