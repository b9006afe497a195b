"""What does the scrubber cost those who publish meanwhile? Latency at a steady rate with it, reading all the time, and without it.

It reads at its default limit (`storage.scrub_bytes_s`), which a bookie with little data would not reach: the period is a second.
Each half of a pair has a new cluster, with the same data in it.
"""

from __future__ import annotations

import argparse
import urllib.request

from benchmarks import load
from benchmarks.cluster import Cluster
from benchmarks.repair_cluster import HERE, add_arguments, shape_of, write_ledgers
from benchmarks.report import percentile, print_line
from benchmarks.slow_bookie import WARMUP_S, latency_p99_s

SCRUBBED_BYTES = "cepheid_bookie_scrubbed_bytes_total"


def scrubbed_bytes(cluster: Cluster) -> float:
    """Return what the scrubbers of all bookies have read."""
    total = 0.0
    for process in cluster.processes.status():
        if process.kind == "bookie":
            with urllib.request.urlopen(f"http://{HERE}:{process.ports['http']}/metrics", timeout=10) as answer:
                lines = answer.read().decode().splitlines()
            total += sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(SCRUBBED_BYTES))
    return total


def measure(arguments: argparse.Namespace, period_s: float) -> tuple[float, float, dict[str, object]]:
    """Return the p99 in seconds, the bytes that were scrubbed per second by each bookie meanwhile, and the settings."""
    shape = shape_of(arguments.gigabytes * 1e9, arguments.ledgers, arguments.entry_bytes)
    with Cluster(arguments, {"bookie": {"storage": {"scrub_period_s": period_s}}}) as cluster:
        write_ledgers(cluster, shape)
        before = scrubbed_bytes(cluster)
        p99_s: float = load.run(latency_p99_s(cluster, cluster.topic("scrub"), arguments))
        rate = (scrubbed_bytes(cluster) - before) / (WARMUP_S + arguments.seconds) / arguments.bookies
        return p99_s, rate, cluster.settings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--gigabytes", type=float, default=0.5, help="on each bookie")
    parser.add_argument("--ledgers", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=2000.0, help="entries a second, evenly spaced")
    parser.set_defaults(entry_bytes=1000, bookies=3)
    arguments = parser.parse_args()
    without: list[float] = []
    beside: list[float] = []
    rates: list[float] = []
    settings: dict[str, object] = {}
    for _ in range(arguments.pairs):
        without.append(measure(arguments, 0.0)[0])
        p99_s, rate, settings = measure(arguments, 1.0)
        beside.append(p99_s)
        rates.append(rate)
    # Within the bar: at most a tenth more, or 1 ms.
    excess_s = [max(0.0, busy - max(1.1 * quiet, quiet + 0.001)) for quiet, busy in zip(without, beside, strict=True)]
    print_line(
        "scrub_beside_publish",
        figures={
            "p99_excess_ms": round(1000 * percentile(excess_s, 0.5), 3),
            "without_ms_p99": round(1000 * percentile(without, 0.5), 3),
            "beside_ms_p99": round(1000 * percentile(beside, 0.5), 3),
            "scrubbed_mb_per_s": round(percentile(rates, 0.5) / 1e6, 2),
        },
        load={
            "pairs": [[round(1000 * value, 2) for value in pair] for pair in zip(without, beside, strict=True)],
            "entries_per_s": arguments.rate,
            "entry_bytes": arguments.entry_bytes,
            "gigabytes": arguments.gigabytes,
            "seconds": arguments.seconds,
        },
        settings=settings,
    )


if __name__ == "__main__":
    main()
