"""What does one bookie that is 50 times slower than the others cost those who publish? And how much memory the broker?

The slow one's process is stopped and let run by turns, 1 ms in 50: everything that it does takes 50 times as long. Healthy and slow
take turns, so that what else the machine does is in both.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks import load
from benchmarks.cluster import Cluster, add_arguments
from benchmarks.raw_client import open_connection, open_publisher
from benchmarks.report import percentile, print_line

RUNS_S = 0.001
WARMUP_S = 1.0


@contextmanager
def slowed(cluster: Cluster, name: str, factor: float) -> Iterator[None]:
    """For as long as the block lasts, the process runs one part in `factor` of the time."""
    ended = threading.Event()
    pause, resume = cluster.pauser(name)

    def by_turns() -> None:
        while not ended.is_set():
            pause()
            time.sleep(RUNS_S * (factor - 1))
            resume()
            time.sleep(RUNS_S)

    thread = threading.Thread(target=by_turns, name="slow-bookie", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


async def latency_p99_s(cluster: Cluster, topic: str, arguments: argparse.Namespace) -> float:
    connection = await open_connection(cluster.url, topic)
    publisher = await open_publisher(connection, topic, bytes(arguments.entry_bytes))
    sender = load.PacedSender(connection, publisher, arguments.rate, WARMUP_S + arguments.seconds)
    arrivals = load.Arrivals()
    connection.on_receipts = arrivals.on_arrived
    await load.run_paced(sender, arrivals, connection.failed, 4 * arguments.seconds + 20)
    connection.close()
    return percentile(arrivals.latencies_s(sender, skip=int(arguments.rate * WARMUP_S)), 0.99)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rate", type=float, default=2000.0, help="entries a second, evenly spaced")
    parser.add_argument("--entry-bytes", type=int, default=1000)
    parser.add_argument("--factor", type=float, default=50.0)
    arguments = parser.parse_args()
    healthy: list[float] = []
    slow: list[float] = []
    memory_mb: dict[str, list[float]] = {"healthy": [], "slow": []}
    with Cluster(arguments) as cluster:
        for pair in range(arguments.pairs):
            topic = cluster.topic(f"slow-{pair}")  # a new ledger, with all three bookies
            healthy.append(load.run(latency_p99_s(cluster, topic, arguments)))
            memory_mb["healthy"].append(cluster.rss_mb("broker-1"))
            with slowed(cluster, cluster.view.ensemble(topic)[pair % 3], arguments.factor):
                slow.append(load.run(latency_p99_s(cluster, topic, arguments)))
                memory_mb["slow"].append(cluster.rss_mb("broker-1"))
            cluster.wait_until(lambda: len(cluster.view.writable_bookies()) == arguments.bookies, "every bookie is registered")
        # Within the bar: at most half as much again, or 2 ms more.
        excess_s = [max(0.0, bad - max(1.5 * good, good + 0.002)) for good, bad in zip(healthy, slow, strict=True)]
        print_line(
            "slow_bookie",
            figures={
                "p99_excess_ms": round(1000 * percentile(excess_s, 0.5), 3),
                "healthy_ms_p99": round(1000 * percentile(healthy, 0.5), 3),
                "slow_ms_p99": round(1000 * percentile(slow, 0.5), 3),
                "ratio": round(percentile([bad / good for good, bad in zip(healthy, slow, strict=True)], 0.5), 3),
                "broker_mb_healthy": round(max(memory_mb["healthy"]), 1),
                "broker_mb_slow": round(max(memory_mb["slow"]), 1),
                "broker_mb_growth": round(max(memory_mb["slow"]) - max(memory_mb["healthy"]), 1),
            },
            load={
                "pairs": [[round(1000 * value, 2) for value in pair] for pair in zip(healthy, slow, strict=True)],
                "entries_per_s": arguments.rate,
                "entry_bytes": arguments.entry_bytes,
                "seconds": arguments.seconds,
                "slower": arguments.factor,
            },
            settings=cluster.settings,
        )


if __name__ == "__main__":
    main()
