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
from benchmarks.report import latency_figures, print_line

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
    publishing = await load.SteadyLoad.start(cluster.url, topic, rate_per_s=arguments.rate, entry_bytes=arguments.publish_bytes)
    await publishing.go_on(WARMUP_S)

    def used_s() -> float:
        return sum(map(cluster.cpu_of_s, cluster.processes.names()))

    spans: list[tuple[float, float]] = []
    used_alone_s = 0.0
    for _ in range(arguments.rounds):
        used_before_s, alone_at = used_s(), time.perf_counter()
        await publishing.go_on(arguments.seconds)
        used_alone_s += used_s() - used_before_s
        burner = start_burner(arguments.share)
        try:
            beside_at = time.perf_counter()
            await publishing.go_on(arguments.seconds)
        finally:
            burner.kill()
            burner.wait()
        spans.append((alone_at, beside_at))
    await publishing.finish()
    alone, beside = (
        [latency for span in spans for latency in publishing.latencies_s(span[side], span[side] + arguments.seconds)]
        for side in (0, 1)
    )
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
