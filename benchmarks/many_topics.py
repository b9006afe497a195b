"""What do ten thousand topics cost: memory while they are open, and time until each acknowledges a publish after a restart?"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterator, Sequence

from benchmarks import load
from benchmarks.raw_client import Connection, Publisher, RefusedError, look_up_topic, open_connection, open_publisher
from benchmarks.report import print_line
from benchmarks.server import Server, add_arguments

RETRY_S = 0.1
RETRY_LIMIT_S = 300.0
"""A broker that has just started may not serve all bundles yet."""


async def publish_to_each(url: str, topics: Sequence[str], at_once: int, entry_bytes: int, *, look_up: bool = False) -> float:
    """One producer and one publish per topic; seconds until the last receipt. `look_up`: look topics up first, as clients do."""
    started = time.perf_counter()
    connection = await open_connection(url)
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_receipts(_: int) -> None:
        if connection.receipts == len(topics):
            done.set_result(None)

    connection.on_receipts = on_receipts
    todo = iter(enumerate(topics))
    payload = bytes(entry_bytes)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(at_once):
            tasks.create_task(_open_and_publish(connection, todo, payload, look_up))
    await load.wait_unless_failed(done, connection)
    elapsed = time.perf_counter() - started
    connection.close()
    return elapsed


async def _open_and_publish(connection: Connection, todo: Iterator[tuple[int, str]], payload: bytes, look_up: bool) -> None:
    for number, topic in todo:
        publisher = await (_find_and_open if look_up else open_publisher)(connection, topic, payload, producer_id=number)
        publisher.send(1)


async def _find_and_open(connection: Connection, topic: str, payload: bytes, *, producer_id: int) -> Publisher:
    """Look the topic up and open it, again and again until it is served."""
    deadline = time.monotonic() + RETRY_LIMIT_S
    while True:
        try:
            await look_up_topic(connection, topic)
            return await open_publisher(connection, topic, payload, producer_id=producer_id)
        except RefusedError:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(RETRY_S)


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
        topics = [server.topic(f"many-{number:05d}") for number in range(arguments.topics)]
        create_s = load.run(publish_to_each(server.url, topics, arguments.at_once, arguments.entry_bytes))
        open_mb = server.rss_mb()
        server.kill()
        started = time.perf_counter()
        server.start()
        start_s = time.perf_counter() - started
        reopen_s = load.run(publish_to_each(server.url, topics, arguments.at_once, arguments.entry_bytes))
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
