"""How much more memory does a broker take that offloads, and serves ten offloaded backlogs at the same time?

Ten topics of 1 KB are read to their ends at once, from the bookies; the most that the server took meanwhile is the one figure.
Then all ten leave the bookies, the server is started again, and the ten are read from their objects while an eleventh topic is
offloaded. All processes of the server count, with what they share once; `more_broker_mb` is the server's own process alone.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
import time
from typing import Any

from benchmarks import load
from benchmarks.raw_client import open_connection, open_counter
from benchmarks.report import print_line
from benchmarks.server import add_arguments
from benchmarks.tiered_server import TieredServer, fill

MESSAGE_BYTES = 1000


class Peak:
    """The most memory in MB while it is entered: of all processes, and of the first alone."""

    def __init__(self, server: TieredServer) -> None:
        self._server = server
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.all_mb = self.broker_mb = 0.0

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.1):
            self.all_mb = max(self.all_mb, self._server.memory_mb())
            self.broker_mb = max(self.broker_mb, self._server.rss_mb())


async def drain(server: TieredServer, topics: list[str], subscription: str, entries: int) -> float:
    """MB/s of consumers that read all topics at once."""

    async def one(topic: str) -> None:
        connection = await open_connection(server.url, topic)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        counter = await open_counter(connection, topic, subscription, earliest=True, permits=1000, ack_every=1000)
        counter.on_counted = lambda _: done.set_result(None) if connection.messages >= entries and not done.done() else None
        counter.on_counted(0)
        await load.wait_unless_failed(done, connection)
        connection.close()

    began = time.perf_counter()
    await asyncio.gather(*map(one, topics))
    return len(topics) * entries * MESSAGE_BYTES / (time.perf_counter() - began) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--megabytes", type=int, default=100, help="of each backlog")
    parser.add_argument("--offloaded-megabytes", type=int, default=500, help="of the topic that is offloaded meanwhile")
    parser.add_argument("--topics", type=int, default=10)
    arguments = parser.parse_args()
    with TieredServer(arguments) as server:
        server.wait_until_admin_answers()
        topics = [server.topic(f"tiered-memory-{number}") for number in range(arguments.topics)]
        other = server.topic("tiered-memory-other")
        entries = 0
        for topic in topics:
            entries = load.run(fill(server, topic, MESSAGE_BYTES, arguments.megabytes * 1_000_000))
        load.run(fill(server, other, MESSAGE_BYTES, arguments.offloaded_megabytes * 1_000_000))

        _restart(server)
        with Peak(server) as before:
            from_bookies = load.run(drain(server, topics, "from-bookies", entries))
        for topic in topics:
            server.unload(topic)
            server.offload(topic, keep_s=0)
        for topic in topics:
            server.wait_until_offloaded(topic, off_bookies=True)

        _restart(server)
        server.unload(other)
        with Peak(server) as peak:
            server.offload(other, keep_s=3600)
            from_objects = load.run(drain(server, topics, "from-objects", entries))
            server.wait_until_offloaded(other)
        figures: dict[str, Any] = {
            "without_mb": round(before.all_mb),
            "with_mb": round(peak.all_mb),
            "more_mb": round(peak.all_mb - before.all_mb),
            "more_broker_mb": round(peak.broker_mb - before.broker_mb),
            "bookies_mb_per_s": round(from_bookies, 1),
            "objects_mb_per_s": round(from_objects, 1),
        }
        print_line(
            "tiered_memory",
            figures=figures,
            load={
                "topics": arguments.topics,
                "megabytes": arguments.megabytes,
                "offloaded_megabytes": arguments.offloaded_megabytes,
                "message_bytes": MESSAGE_BYTES,
            },
            settings=server.settings,
        )


def _restart(server: TieredServer) -> None:
    server.stop()
    server.start()
    server.wait_until_admin_answers()


if __name__ == "__main__":
    main()
