"""What do producers notice when their broker is drained? The longest gap, and messages stored twice without deduplication.

`cepheid brokers drain` moves the topics while the load runs. With --unload every bundle of the broker is unloaded by the admin API
instead, each with a destination.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from benchmarks.broker_load import NAMESPACE, LoadedTopics, Producers, add_load_arguments, load_line
from benchmarks.cluster import Cluster, add_arguments
from benchmarks.report import percentile, print_line
from benchmarks.server import ServerFailedError
from cepheid.admin.sync import Admin

DRAIN_LIMIT_S = 60.0
CEPHEID = (sys.executable, "-m", "cepheid_cli")


def drain(topics: LoadedTopics, victim: str, option: str) -> None:
    """`--wait`, or `--undo`: it takes bundles again."""
    admin_url = topics.admin(victim).url
    command = [*CEPHEID, "brokers", "drain", victim, option, "--admin-url", admin_url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DRAIN_LIMIT_S, check=False)
    if done.returncode != 0:
        raise ServerFailedError(f"{' '.join(command[2:])} failed: {done.stderr.strip() or done.stdout.strip()}")


def unload(topics: LoadedTopics, victim: str) -> None:
    """Unload every bundle of the victim, to the other brokers in turn."""
    admin = topics.admin(victim)
    others = [name for name in topics.brokers if name != victim]
    bundles = {bundle_of(admin, topics.names[number]): None for number in topics.numbers_of(victim, victim)}
    for number, bundle in enumerate(bundles):
        admin.call("PUT", f"/admin/v2/namespaces/{NAMESPACE}/{bundle}/unload", {"destinationBroker": others[number % len(others)]})


def bundle_of(admin: Admin, topic: str) -> str:
    answer = admin.call("GET", f"/lookup/v2/topic/{topic.replace('://', '/')}/bundle")
    return answer.decode() if isinstance(answer, bytes) else str(answer)


def one_drain(topics: LoadedTopics, arguments: argparse.Namespace, *, by_unload: bool) -> tuple[list[float], int]:
    """Gaps in seconds of the topics that moved, and how many messages are stored twice."""
    topics.spread()
    victim = topics.most_loaded(topics.brokers[0])
    other = next(name for name in topics.brokers if name != victim)
    its_own = topics.numbers_of(victim, other)
    stored_before = topics.stored_entries()
    producers = Producers(topics.url(other), topics.names, arguments.rate)
    producers.settle()
    producers.reset()
    if by_unload:
        unload(topics, victim)
    else:
        drain(topics, victim, "--wait")
    producers.settle()
    gaps_s = producers.gaps_s(its_own)
    producers.close()
    left = [number for number in its_own if topics.owners(other)[number] == victim]
    if left:
        raise ServerFailedError(f"{victim} still owns {len(left)} topics after it was drained")
    duplicates = topics.stored_entries() - stored_before - producers.receipts
    if not by_unload:  # a drained broker takes nothing until then
        drain(topics, victim, "--undo")
    return gaps_s, duplicates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, brokers=3)
    add_load_arguments(parser, topics=100, rate=2000.0)
    parser.add_argument("--drains", type=int, default=20)
    parser.add_argument("--unload", action="store_true", help="unload bundles one by one, not `cepheid brokers drain`")
    arguments = parser.parse_args()
    by_unload = arguments.unload
    with Cluster(arguments) as cluster:
        topics = LoadedTopics(cluster, arguments.topics)
        Producers(topics.url(topics.brokers[0]), topics.names, arguments.rate).close()  # now they exist
        rounds = [one_drain(topics, arguments, by_unload=by_unload) for _ in range(arguments.drains)]
        gaps_ms = [1000 * gap_s for gaps_s, _ in rounds for gap_s in gaps_s]
        print_line(
            "drain_gap",
            figures={
                "gap_ms_p50": round(percentile(gaps_ms, 0.5), 1),
                "gap_ms_p99": round(percentile(gaps_ms, 0.99), 1),
                "gap_ms_max": round(max(gaps_ms), 1),
                "duplicates": sum(duplicates for _, duplicates in rounds),
            },
            load=load_line(
                arguments,
                drains=arguments.drains,
                topics_that_moved=[len(gaps_s) for gaps_s, _ in rounds],
                moved_by="unload of each bundle" if by_unload else "cepheid brokers drain",
            ),
            settings=cluster.settings,
        )


if __name__ == "__main__":
    main()
