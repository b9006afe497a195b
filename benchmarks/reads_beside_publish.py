"""What do readers that drain old entries cost those who publish to the same bookies? Latency at a steady rate without and beside.

Each round: the page cache of the entry logs is dropped, then seconds without readers, then the drain. The readers ask the bookies
themselves, as a broker would: what a broker's own loop costs is not in the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence

from benchmarks import cluster as clusters
from benchmarks import load
from benchmarks.cluster import Cluster
from benchmarks.repair_cluster import HERE, LedgerShape, load_average, shape_of, wait_idle, write_ledgers_on
from benchmarks.report import percentile, print_line
from benchmarks.scheduling import CLASSES
from benchmarks.server import ServerFailedError

WARMUP_S = 2.0
WAITED = "cepheid_bookie_adds_waited_behind_reads_seconds_total"
READ_BLOCKS = "cepheid_bookie_read_disk_blocks_total"
READ_BYTES = "cepheid_bookie_read_disk_bytes_total"


def drop_page_cache(cluster: Cluster) -> None:
    """Forget what the system has in memory of entry logs, which are all synced."""
    for path in cluster.root.glob("**/entrylog/*.log"):
        log = os.open(path, os.O_RDONLY)
        os.posix_fadvise(log, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(log)


def totals(cluster: Cluster, *names: str) -> dict[str, float]:
    """Sums of counters over all bookies."""
    sums = dict.fromkeys(names, 0.0)
    for process in cluster.processes.status():
        if process.kind == "bookie":
            with urllib.request.urlopen(f"http://{HERE}:{process.ports['http']}/metrics", timeout=10) as answer:
                for line in answer.read().decode().splitlines():
                    name, _, rest = line.partition("{")
                    if name in sums:
                        sums[name] += float(rest.rpartition(" ")[2])
    return sums


class Drain:
    """The process of the readers."""

    def __init__(self, cluster: Cluster, arguments: argparse.Namespace, ledger_ids: Sequence[int]) -> None:
        command = [cluster.processes.metadata_url, arguments.readers, arguments.readers_class, *ledger_ids]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.ledger_drain", *map(str, command)], stdout=subprocess.PIPE, text=True
        )

    def wait(self, limit_s: float) -> dict[str, float]:
        try:
            printed, _ = self._process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            raise ServerFailedError(f"the drain took longer than {limit_s:g} s") from None
        if self._process.returncode:
            raise ServerFailedError("the drain failed")
        drained: dict[str, float] = json.loads(printed)
        return drained


async def publish_round(
    cluster: Cluster, topic: str, ledger_ids: Sequence[int], arguments: argparse.Namespace
) -> tuple[list[float], list[float], float]:
    """Return the latencies without and beside readers, in seconds, and the rate of the drain in MB/s."""
    publishing = await load.SteadyLoad.start(cluster.url, topic, rate_per_s=arguments.rate, entry_bytes=arguments.publish_bytes)
    await publishing.go_on(WARMUP_S + arguments.seconds)
    began_at = time.perf_counter()
    drain = Drain(cluster, arguments, ledger_ids)
    drained = await asyncio.get_running_loop().run_in_executor(None, drain.wait, arguments.limit_s)
    ended_at = time.perf_counter()
    await publishing.finish()
    without = publishing.latencies_s(began_at - arguments.seconds, began_at)
    beside = publishing.latencies_s(ended_at - drained["seconds"], ended_at)  # without the start of the readers' process
    return without, beside, drained["mb"] / drained["seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    clusters.add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gigabytes", type=float, default=4.0, help="drained in each round; every bookie has a copy")
    parser.add_argument("--ledgers", type=int, default=16)
    parser.add_argument("--entry-bytes", type=int, default=64_000, help="of an old entry: a batch of messages of 1 KB")
    parser.add_argument("--readers", type=int, default=4)
    parser.add_argument("--readers-class", choices=CLASSES, default="idle", help="idle: readers take what processor time is left")
    parser.add_argument("--seconds", type=float, default=20.0, help="of publishing without readers, in each round")
    parser.add_argument("--rate", type=float, default=2000.0, help="entries a second, evenly spaced")
    parser.add_argument("--publish-bytes", type=int, default=1000)
    parser.add_argument("--limit-s", type=float, default=300.0, help="a drain that takes longer has failed")
    arguments = parser.parse_args()
    load_before = load_average()
    shape: LedgerShape = shape_of(arguments.gigabytes * 1e9, arguments.ledgers, arguments.entry_bytes)
    without: list[float] = []
    beside: list[float] = []
    rates: list[float] = []
    with Cluster(arguments) as cluster:
        topic = cluster.topic("beside-reads")
        written = write_ledgers_on(cluster.processes.metadata_url, shape, cluster.view.writable_bookies())
        wait_idle(cluster)
        for _ in range(arguments.rounds):
            drop_page_cache(cluster)
            quiet, busy, rate = load.run(publish_round(cluster, topic, written, arguments))
            without.append(percentile(quiet, 0.99))
            beside.append(percentile(busy, 0.99))
            rates.append(rate)
        counted = totals(cluster, WAITED, READ_BLOCKS, READ_BYTES)
        settings = cluster.settings
    # Within the bar: at most half as much again, or 2 ms more.
    excess_s = [max(0.0, busy - max(1.5 * quiet, quiet + 0.002)) for quiet, busy in zip(without, beside, strict=True)]
    print_line(
        "reads_beside_publish",
        figures={
            "p99_excess_ms": round(1000 * percentile(excess_s, 0.5), 3),
            "without_ms_p99": round(1000 * percentile(without, 0.5), 3),
            "beside_ms_p99": round(1000 * percentile(beside, 0.5), 3),
            "drain_mb_per_s": round(percentile(rates, 0.5), 1),
            "waited_behind_reads_s": counted[WAITED],
            "read_from_disk_share": round(counted[READ_BYTES] / (shape.size_bytes * arguments.rounds), 3),
        },
        load={
            "rounds": [[round(1000 * value, 2) for value in pair] for pair in zip(without, beside, strict=True)],
            "entries_per_s": arguments.rate,
            "publish_bytes": arguments.publish_bytes,
            "gigabytes": arguments.gigabytes,
            "ledgers": arguments.ledgers,
            "entry_bytes": arguments.entry_bytes,
            "readers": arguments.readers,
            "readers_class": arguments.readers_class,
            "load_average_before": load_before,
        },
        settings=settings,
    )


if __name__ == "__main__":
    main()
