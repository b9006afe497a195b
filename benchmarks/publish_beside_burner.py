"""How much of a higher publish latency is only the processor? Latency at a steady rate alone, and beside a process that spins.

The control of `reads_beside_publish`, `repair_beside_publish` and `compaction`: the spinning process reads and writes nothing. Each
round has seconds without it and seconds beside it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from benchmarks import cluster as clusters
from benchmarks import load
from benchmarks.cluster import Cluster
from benchmarks.raw_client import open_connection, open_publisher
from benchmarks.report import latency_figures, print_line
from benchmarks.server import ServerFailedError

WARMUP_S = 2.0
PERIOD_S = 0.01
SPIN = """
import sys, time
busy_s, idle_s = float(sys.argv[1]), float(sys.argv[2])
while True:
    until = time.perf_counter() + busy_s
    while time.perf_counter() < until:
        pass
    time.sleep(idle_s)
"""


def start_burner(share: float) -> subprocess.Popen[bytes]:
    """Start a process that uses this share of one core."""
    return subprocess.Popen([sys.executable, "-c", SPIN, str(share * PERIOD_S), str((1 - share) * PERIOD_S)])


async def publish(cluster: Cluster, topic: str, arguments: argparse.Namespace) -> tuple[list[float], list[float], float]:
    """Return the latencies alone and beside the burner, in seconds, and how many cores the cluster used alone."""
    connection = await open_connection(cluster.url, topic)
    publisher = await open_publisher(connection, topic, bytes(arguments.publish_bytes))
    sender = load.PacedSender(connection, publisher, arguments.rate, 24 * 3600)  # until it is stopped
    arrivals = load.Arrivals()
    connection.on_receipts = arrivals.on_arrived
    sender.start()
    await load.run_unless_failed(connection.failed, WARMUP_S)

    def used_s() -> float:
        return sum(map(cluster.cpu_of_s, cluster.processes.names()))

    spans: list[tuple[float, float]] = []
    used_alone_s = 0.0
    for _ in range(arguments.rounds):
        used_before_s = used_s()
        alone_at = time.perf_counter()
        await load.run_unless_failed(connection.failed, arguments.seconds)
        used_alone_s += used_s() - used_before_s
        burner = start_burner(arguments.share)
        try:
            beside_at = time.perf_counter()
            await load.run_unless_failed(connection.failed, arguments.seconds)
        finally:
            burner.kill()
            burner.wait()
        spans.append((alone_at - sender.started, beside_at - sender.started))
    sender.stop()
    await load.run_unless_failed(connection.failed, 1.0)
    connection.close()
    if sender.error is not None:
        raise ServerFailedError(f"the load ended: {sender.error}")
    latencies = arrivals.latencies_s(sender, skip=0)

    def due_from(at_s: float) -> list[float]:
        return latencies[int(at_s * arguments.rate) : int((at_s + arguments.seconds) * arguments.rate)]

    alone = [latency for alone_at, _ in spans for latency in due_from(alone_at)]
    beside = [latency for _, beside_at in spans for latency in due_from(beside_at)]
    return alone, beside, used_alone_s / (arguments.rounds * arguments.seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    clusters.add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each half of a round")
    parser.add_argument("--share", type=float, default=0.5, help="of one core that the other process uses")
    parser.add_argument("--rate", type=float, default=2000.0, help="entries a second, evenly spaced")
    parser.add_argument("--publish-bytes", type=int, default=1000)
    arguments = parser.parse_args()
    with Cluster(arguments) as cluster:
        alone, beside, cores = load.run(publish(cluster, cluster.topic("beside-burner"), arguments))
        settings = cluster.settings
    print_line(
        "publish_beside_burner",
        figures={
            **latency_figures(alone, "alone_ms"),
            **latency_figures(beside, "beside_ms"),
            "cluster_cores": round(cores, 2),
        },
        load={
            "rounds": arguments.rounds,
            "seconds": arguments.seconds,
            "entries_per_s": arguments.rate,
            "publish_bytes": arguments.publish_bytes,
            "burner_cores": arguments.share,
        },
        settings=settings,
    )


if __name__ == "__main__":
    main()
