"""How soon is a server of use, and what does it take when it is idle? From starting the process to the first receipt."""

from __future__ import annotations

import argparse
import asyncio
import time

from benchmarks import load
from benchmarks.raw_client import RefusedError, open_connection, open_publisher
from benchmarks.report import percentile, print_line
from benchmarks.server import Server, add_arguments

LIMIT_S = 60.0


async def first_produce(server: Server, started: float) -> float:
    """Seconds from `started` to a receipt; tries again until somebody answers, as a client does."""
    topic = server.topic("startup")
    while True:
        try:
            connection = await open_connection(server.url, topic)
            publisher = await open_publisher(connection, topic, b"hello")
            await load.publish_all(connection, publisher, 1, 1)
            connection.close()
            return time.perf_counter() - started
        except (OSError, RefusedError):
            server.check_alive()
            if time.perf_counter() - started > LIMIT_S:
                raise
            await asyncio.sleep(0.005)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--idle-seconds", type=float, default=3.0)
    arguments = parser.parse_args()
    if arguments.url is not None:
        parser.error("this question needs a server of its own: it is started")
    times_s: list[float] = []
    idle_mb: list[float] = []
    for _ in range(arguments.rounds):
        with Server(arguments, start_now=False) as server:
            started = time.perf_counter()
            server.start(wait=False)
            times_s.append(load.run(first_produce(server, started)))
            time.sleep(arguments.idle_seconds)
            idle_mb.append(server.rss_mb())
    print_line(
        "startup",
        figures={
            "first_produce_s": round(percentile(times_s, 0.5), 3),
            "first_produce_s_max": round(max(times_s), 3),
            "idle_memory_mb": round(max(idle_mb)),
        },
        load={"rounds": arguments.rounds, "data": "empty directory", "idle_seconds": arguments.idle_seconds},
        settings=server.settings,
    )


if __name__ == "__main__":
    main()
