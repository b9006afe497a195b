"""What does repair cost those who publish meanwhile? Latency at a steady rate before a bookie is lost, and while it is repaired.

The topic's ledger does not name the lost bookie, so that no replacement of it is in the figures. Each round has a new cluster.
"""

from __future__ import annotations

import argparse
import asyncio
import time

from benchmarks import load
from benchmarks.cluster import Cluster
from benchmarks.raw_client import open_connection, open_publisher
from benchmarks.repair_cluster import (
    VICTIM,
    LedgerShape,
    Repair,
    RepairMeter,
    add_arguments,
    load_average,
    repairing_cluster,
    shape_of,
    write_ledgers,
)
from benchmarks.report import percentile, print_line
from benchmarks.server import ServerFailedError

WARMUP_S = 2.0
TOPICS_TRIED = 50


async def publish_during_repair(
    cluster: Cluster, topic: str, shape: LedgerShape, arguments: argparse.Namespace
) -> tuple[list[float], list[float], Repair]:
    """Return the latencies before the loss and during the repair, in seconds, and how the repair went."""
    loop = asyncio.get_running_loop()
    publishing = await load.SteadyLoad.start(cluster.url, topic, rate_per_s=arguments.rate, entry_bytes=arguments.publish_bytes)
    await publishing.go_on(WARMUP_S + arguments.seconds)
    began_at = time.perf_counter()
    await loop.run_in_executor(None, cluster.processes.kill, VICTIM)
    repair = await loop.run_in_executor(None, RepairMeter(cluster).watch, shape.ledgers, arguments.limit_s, began_at)
    await publishing.finish()
    before = publishing.latencies_s(began_at - arguments.seconds, began_at)
    during = publishing.latencies_s(began_at + repair.first_copy_s, began_at + repair.last_copy_s)
    return before, during, repair


def topic_without_victim(cluster: Cluster, name: str) -> str:
    """Return a new topic whose ledger is on the other three bookies."""

    async def create(topic: str) -> None:
        connection = await open_connection(cluster.url, topic)
        await open_publisher(connection, topic, b"")
        connection.close()

    for number in range(TOPICS_TRIED):
        topic = cluster.topic(f"{name}-{number}")
        load.run(create(topic))
        if VICTIM not in cluster.view.ensemble(topic):
            return topic
    raise ServerFailedError(f"each of {TOPICS_TRIED} new ledgers has {VICTIM}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="on the lost bookie")
    parser.add_argument("--ledgers", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=10.0, help="of publishing before the bookie is lost")
    parser.add_argument("--rate", type=float, default=2000.0, help="entries a second, evenly spaced")
    parser.add_argument("--publish-bytes", type=int, default=1000)
    arguments = parser.parse_args()
    load_before = load_average()
    shape = shape_of(arguments.gigabytes * 1e9, arguments.ledgers, arguments.entry_bytes)
    before: list[float] = []
    during: list[float] = []
    rates: list[float] = []
    settings: dict[str, object] = {}
    for number in range(arguments.rounds):
        with repairing_cluster(arguments) as cluster:
            write_ledgers(cluster, shape)
            topic = topic_without_victim(cluster, f"beside-{number}")
            quiet, busy, repair = load.run(publish_during_repair(cluster, topic, shape, arguments))
            before.append(percentile(quiet, 0.99))
            during.append(percentile(busy, 0.99))
            rates.append(repair.mb_per_s)
            settings = cluster.settings
    # Within the bar: at most half as much again, or 2 ms more.
    excess_s = [max(0.0, busy - max(1.5 * quiet, quiet + 0.002)) for quiet, busy in zip(before, during, strict=True)]
    print_line(
        "repair_beside_publish",
        figures={
            "p99_excess_ms": round(1000 * percentile(excess_s, 0.5), 3),
            "before_ms_p99": round(1000 * percentile(before, 0.5), 3),
            "during_ms_p99": round(1000 * percentile(during, 0.5), 3),
            "repair_mb_per_s": round(percentile(rates, 0.5), 1),
        },
        load={
            "rounds": [[round(1000 * value, 2) for value in pair] for pair in zip(before, during, strict=True)],
            "entries_per_s": arguments.rate,
            "publish_bytes": arguments.publish_bytes,
            "gigabytes": arguments.gigabytes,
            "ledgers": arguments.ledgers,
            "entry_bytes": arguments.entry_bytes,
            "load_average_before": load_before,
        },
        settings=settings,
    )


if __name__ == "__main__":
    main()
