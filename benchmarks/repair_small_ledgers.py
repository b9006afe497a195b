"""How many small ledgers are repaired per second, and how many metadata requests does that take?

A walk is counted alone, while repair is switched off, and without what the cluster asks for when idle. Then repair is switched on:
requests are those that ZooKeeper receives from all processes, without those of the walk that finds the ledgers again.
"""

from __future__ import annotations

import argparse
import time

import cepheid.admin.sync
from benchmarks.cluster import Cluster
from benchmarks.repair_cluster import (
    VICTIM,
    WALKED,
    WALKS,
    LedgerShape,
    RepairMeter,
    add_arguments,
    load_average,
    metadata_requests,
    repairing_cluster,
    write_ledgers,
)
from benchmarks.report import print_line

IDLE_S = 10.0


def idle_requests_per_s(cluster: Cluster) -> float:
    """Return how many requests pings and polls make while nothing happens."""
    began, before = time.perf_counter(), metadata_requests(cluster)
    time.sleep(IDLE_S)
    return (metadata_requests(cluster) - before) / (time.perf_counter() - began)


def count_walk(cluster: Cluster, meter: RepairMeter, limit_s: float) -> tuple[int, float]:
    """Return the metadata requests and the seconds from the loss of a bookie to the end of its walk, while repair is off."""
    walks, began, requests_before = meter.total(WALKS)[0], time.perf_counter(), metadata_requests(cluster)
    cluster.processes.kill(VICTIM)
    cluster.wait_until(lambda: meter.total(WALKS)[0] > walks, "the walk over all ledgers ends", limit_s)
    return metadata_requests(cluster) - requests_before, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.set_defaults(entry_bytes=100)
    parser.add_argument("--ledgers", type=int, default=20_000)
    parser.add_argument("--entries", type=int, default=10)
    arguments = parser.parse_args()
    load_before = load_average()
    with repairing_cluster(arguments) as cluster:
        meter = RepairMeter(cluster)
        write_ledgers(cluster, LedgerShape(arguments.ledgers, arguments.entries, arguments.entry_bytes), at_once=128)
        admin = cepheid.admin.sync.connect(cluster.processes.admin_urls[0])
        admin.repair.switch_off(reason="benchmark")
        idle_per_s = idle_requests_per_s(cluster)
        requests, seconds = count_walk(cluster, meter, arguments.limit_s)
        per_walked = (requests - idle_per_s * seconds) / arguments.ledgers
        (walked_before,), requests_before = meter.total(WALKED), metadata_requests(cluster)
        admin.repair.switch_on()
        repair = meter.watch(arguments.ledgers, arguments.limit_s, time.perf_counter())
        walked = meter.total(WALKED)[0] - walked_before
        asked = metadata_requests(cluster) - requests_before - meter.own_requests - idle_per_s * repair.whole_s
        print_line(
            "repair_small_ledgers",
            figures={
                "ledgers_per_s": round(arguments.ledgers / repair.copying_s, 1),
                "requests_per_ledger": round((asked - per_walked * walked) / arguments.ledgers, 2),
                "requests_per_walked_ledger": round(per_walked, 2),
                "cpu_ms_per_ledger": round(1000 * repair.cpu_s / arguments.ledgers, 2),
                "switched_on_to_whole_s": round(repair.whole_s, 1),
            },
            load={
                "ledgers": arguments.ledgers,
                "entries_each": arguments.entries,
                "entry_bytes": arguments.entry_bytes,
                "load_average_before": load_before,
            },
            settings=cluster.settings,
        )


if __name__ == "__main__":
    main()
