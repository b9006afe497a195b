"""What do ten thousand topics cost: memory while they are open, and time until each acknowledges a publish after a restart?"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterator

from benchmarks import load
from benchmarks.raw_client import Connection, open_connection, open_publisher
from benchmarks.report import print_line
from benchmarks.server import Server, add_arguments


async def publish_to_each(server: Server, topics: int, at_once: int, entry_bytes: int) -> float:
    """One producer and one publish per topic; seconds until the last receipt."""
    started = time.perf_counter()
    connection = await open_connection(server.url)
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_receipts(_: int) -> None:
        if connection.receipts == topics:
            done.set_result(None)

    connection.on_receipts = on_receipts
    todo = iter(range(topics))
    payload = bytes(entry_bytes)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(at_once):
            tasks.create_task(_open_and_publish(server, connection, todo, payload))
    await load.wait_unless_failed(done, connection)
    elapsed = time.perf_counter() - started
    connection.close()
    return elapsed


async def _open_and_publish(server: Server, connection: Connection, todo: Iterator[int], payload: bytes) -> None:
    for number in todo:
        publisher = await open_publisher(connection, server.topic(f"many-{number:05d}"), payload, producer_id=number)
        publisher.send(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--topics", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=200, help="topics being opened at the same time")
    parser.add_argument("--entry-bytes", type=int, default=100)
    arguments = parser.parse_args()
    if arguments.url is not None:
        parser.error("this question needs a server of its own: it is restarted")
    with Server(arguments) as server:
        idle_mb = server.rss_mb()
        create_s = load.run(publish_to_each(server, arguments.topics, arguments.at_once, arguments.entry_bytes))
        open_mb = server.rss_mb()
        server.kill()
        started = time.perf_counter()
        server.start()
        start_s = time.perf_counter() - started
        reopen_s = load.run(publish_to_each(server, arguments.topics, arguments.at_once, arguments.entry_bytes))
        print_line(
            "many_topics",
            figures={
                "memory_mb": round(max(open_mb, server.rss_mb())),
                "memory_mb_before": round(idle_mb),
                "create_s": round(create_s, 2),
                "start_s": round(start_s, 2),
                "restart_s": round(start_s + reopen_s, 2),
            },
            load={
                "topics": arguments.topics,
                "at_once": arguments.at_once,
                "entry_bytes": arguments.entry_bytes,
                "restart": "SIGKILL, then start; one connection, a producer and a publish per topic",
            },
            settings=server.settings,
        )


if __name__ == "__main__":
    main()
