"""How fast is a lost bookie's data copied to the others, and how long does it take from SIGKILL until every ledger is whole?

Four bookies in processes of their own, grace period 0, nothing else to do. The rate is that of a round with 2 GB on the lost
bookie, from the first copied byte to the last; the time from SIGKILL is that of another round with 1 GB, or of the same one
if both sizes are the same.
"""

from __future__ import annotations

import argparse
import time

from benchmarks.repair_cluster import (
    VICTIM,
    Repair,
    RepairMeter,
    add_arguments,
    load_average,
    repairing_cluster,
    shape_of,
    write_ledgers,
)
from benchmarks.report import print_line


def repair(arguments: argparse.Namespace, gigabytes: float) -> tuple[Repair, dict[str, object]]:
    """Return how the repair of a new cluster went, and the cluster's settings."""
    shape = shape_of(gigabytes * 1e9, arguments.ledgers, arguments.entry_bytes)
    with repairing_cluster(arguments) as cluster:
        write_ledgers(cluster, shape)
        began_at = time.perf_counter()
        cluster.processes.kill(VICTIM)
        meter = RepairMeter(cluster)
        repaired = meter.watch(shape.ledgers, arguments.limit_s, began_at)
        return repaired, cluster.settings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="on the lost bookie, when the rate is measured")
    parser.add_argument("--whole-gigabytes", type=float, default=1.0, help="on the lost bookie, when the time is measured")
    parser.add_argument("--ledgers", type=int, default=200)
    arguments = parser.parse_args()
    load_before = load_average()
    rated, settings = repair(arguments, arguments.gigabytes)
    timed = rated
    if arguments.whole_gigabytes != arguments.gigabytes:
        timed, settings = repair(arguments, arguments.whole_gigabytes)
    print_line(
        "repair",
        figures={
            "mb_per_s": round(rated.mb_per_s, 1),
            "cpu_ms_per_mb": round(1000 * rated.cpu_s / (rated.copied_bytes / 1e6), 2),
            "kill_to_whole_s": round(timed.whole_s, 2),
            "kill_to_first_copy_s": round(timed.first_copy_s, 2),
        },
        load={
            "gigabytes": arguments.gigabytes,
            "whole_gigabytes": arguments.whole_gigabytes,
            "ledgers": arguments.ledgers,
            "entry_bytes": arguments.entry_bytes,
            "load_average_before": load_before,
        },
        settings=settings,
    )


if __name__ == "__main__":
    main()
