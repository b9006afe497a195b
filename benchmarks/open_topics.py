"""How many topics a second does one broker open: in `cepheid standalone`, and on ZooKeeper with bookies of their own?

Topics are created with an entry each; then the broker is killed and started again, and a producer opens each topic: its ledger is
recovered, and a new one is started. What takes over a dead broker's topics does the same.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import load
from benchmarks.cluster import Cluster, add_arguments
from benchmarks.raw_client import Connection, open_connection, open_publisher
from benchmarks.report import print_line
from benchmarks.server import Server

PAYLOAD = bytes(100)


async def open_each(url: str, topics: Sequence[str], at_once: int, *, publish: bool) -> float:
    """Topics a second that get a producer; with `publish` also an entry each, which must be acknowledged."""
    connection = await open_connection(url)
    todo = iter(enumerate(topics))
    began = time.perf_counter()
    done = asyncio.get_running_loop().create_future()
    connection.on_receipts = lambda _: done.set_result(None) if connection.receipts == len(topics) else None
    async with asyncio.TaskGroup() as tasks:
        for _ in range(at_once):
            tasks.create_task(_open(connection, todo, publish=publish))
    if publish:
        await load.wait_unless_failed(done, connection)
    elapsed_s = time.perf_counter() - began
    connection.close()
    return len(topics) / elapsed_s


async def _open(connection: Connection, todo: Iterator[tuple[int, str]], *, publish: bool) -> None:
    for number, topic in todo:
        publisher = await open_publisher(connection, topic, PAYLOAD, producer_id=number)
        if publish:
            publisher.send(1)


def in_standalone(arguments: argparse.Namespace) -> dict[str, float]:
    given = argparse.Namespace(
        url=None, admin_url=None, bookies=1, data=arguments.data, keep=arguments.keep, server_python=sys.executable, server_pid=None
    )
    with Server(given) as server:
        topics = [server.topic(f"open-{number:05d}") for number in range(arguments.topics)]
        created = load.run(open_each(server.url, topics, arguments.at_once, publish=True))
        server.kill()
        server.start()
        server.metric("process_cpu_seconds_total")  # waits for the admin API, whose imports would be counted
        before_s = server.cpu_s()
        opened = load.run(open_each(server.url, topics, arguments.at_once, publish=False))
        cpu_ms = 1000 * (server.cpu_s() - before_s) / len(topics)
    return {"standalone_per_s": opened, "standalone_created_per_s": created, "standalone_cpu_ms_a_topic": cpu_ms}


def on_zookeeper(cluster: Cluster, arguments: argparse.Namespace) -> dict[str, float]:
    topics = [cluster.topic(f"open-{number:05d}") for number in range(arguments.topics)]
    created = load.run(open_each(cluster.url, topics, arguments.at_once, publish=True))
    (broker,) = cluster.processes.broker_ports
    cluster.processes.kill(broker)
    cluster.processes.start(broker)
    before_s = cluster.cpu_s()
    opened = load.run(open_each(cluster.url, topics, arguments.at_once, publish=False))
    cpu_ms = 1000 * (cluster.cpu_s() - before_s) / len(topics)
    return {"zookeeper_per_s": opened, "zookeeper_created_per_s": created, "zookeeper_cpu_ms_a_topic": cpu_ms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--topics", type=int, default=3000)
    parser.add_argument("--at-once", type=int, default=200, help="topics that are being opened at the same time")
    parser.add_argument("--only", choices=["standalone", "zookeeper"])
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    settings: dict[str, Any] = {"standalone_bookies": 1}
    if arguments.only != "zookeeper":
        figures |= in_standalone(arguments)
    if arguments.only != "standalone":
        with Cluster(arguments) as cluster:
            figures |= on_zookeeper(cluster, arguments)
            settings |= cluster.settings
    print_line(
        "open_topics",
        figures={name: round(value, 2 if name.endswith("_a_topic") else 0) for name, value in figures.items()},
        load={"topics": arguments.topics, "at_once": arguments.at_once, "restart": "SIGKILL, then start"},
        settings=settings,
    )


if __name__ == "__main__":
    main()
