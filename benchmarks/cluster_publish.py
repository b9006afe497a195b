"""What does one producer reach in a cluster (E=3 Qw=3 Qa=2, every bookie a process)? Entries of 1 KB, then of 64 KB."""

from __future__ import annotations

import argparse

from benchmarks import load
from benchmarks.cluster import Cluster, add_arguments
from benchmarks.raw_client import open_connection, open_publisher
from benchmarks.report import print_line


async def publish(cluster: Cluster, entry_bytes: int, window: int, seconds: float) -> load.Measured:
    topic = cluster.topic(f"publish-{entry_bytes}")
    connection = await open_connection(cluster.url, topic)
    publisher = await open_publisher(connection, topic, bytes(entry_bytes))
    load.keep_window(connection, publisher, window)
    measured = await load.measure(cluster, lambda: connection.receipts, warmup_s=2.0, seconds=seconds, failed=connection.failed)
    connection.close()
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--window", type=int, default=1000, help="1 KB entries on their way (1000: what official clients allow)")
    parser.add_argument("--large-window", type=int, default=250, help="64 KB entries on their way")
    arguments = parser.parse_args()
    with Cluster(arguments) as cluster:
        small = load.run(publish(cluster, 1000, arguments.window, arguments.seconds))
        large = load.run(publish(cluster, 64_000, arguments.large_window, arguments.seconds))
        print_line(
            "cluster_publish",
            figures={
                "entries_per_s_1kb": round(small.rate_per_s),
                "mb_per_s_64kb": round(large.rate_per_s * 64_000 / 1e6, 1),
                **{f"{name}_1kb": cores for name, cores in small.cores().items()},
                **{f"{name}_64kb": cores for name, cores in large.cores().items()},
            },
            load={
                "producers": 1,
                "window_entries": {"1kb": arguments.window, "64kb": arguments.large_window},
                "seconds": arguments.seconds,
            },
            settings=cluster.settings,
        )


if __name__ == "__main__":
    main()
