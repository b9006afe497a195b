"""How long does `GET …/stats` of one topic take: while nothing happens, and while 5,000 entries a second are published to it?"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import time
from urllib.parse import urlsplit

from benchmarks import load
from benchmarks.raw_client import open_connection, open_counter, open_publisher
from benchmarks.report import latency_figures, print_line
from benchmarks.server import Server, add_arguments

PAUSE_S = 0.01


def ask_for(admin_url: str, path: str, seconds: float) -> list[float]:
    """Asks again and again on one connection; how long each answer took, in seconds."""
    parts = urlsplit(admin_url)
    connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port)
    took = []
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        started = time.perf_counter()
        connection.request("GET", path)
        response = connection.getresponse()
        content = response.read()
        if response.status != 200:
            raise RuntimeError(f"GET {path}: {response.status} {content[:300]!r}")
        took.append(time.perf_counter() - started)
        time.sleep(PAUSE_S)
    connection.close()
    return took


async def both(server: Server, arguments: argparse.Namespace) -> tuple[list[float], list[float]]:
    assert server.admin_url is not None
    topic = server.topic("admin")
    producing, consuming = await open_connection(server.url, topic), await open_connection(server.url, topic)
    publisher = await open_publisher(producing, topic, bytes(1000))
    await open_counter(consuming, topic, "bench", earliest=False)
    path = f"/admin/v2/{topic.replace('://', '/')}/stats"
    await asyncio.to_thread(ask_for, server.admin_url, path, 1.0)
    idle = await asyncio.to_thread(ask_for, server.admin_url, path, arguments.seconds)
    sender = load.PacedSender(producing, publisher, arguments.rate, arguments.seconds + 2)
    sender.start()
    await asyncio.sleep(1.0)
    busy = await asyncio.to_thread(ask_for, server.admin_url, path, arguments.seconds)
    await asyncio.to_thread(sender.join)
    producing.close()
    consuming.close()
    return idle, busy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=5000.0, help="entries a second in the second half")
    arguments = parser.parse_args()
    if arguments.url is not None and arguments.admin_url is None:
        parser.error("--url needs --admin-url here")
    with Server(arguments) as server:
        server.metric("none")  # the admin API opens a moment after the protocol's port
        idle, busy = load.run(both(server, arguments))
        print_line(
            "admin_latency",
            figures={**latency_figures(idle, "idle_ms"), **latency_figures(busy, "busy_ms"), "requests": len(idle) + len(busy)},
            load={"path": "stats of the topic", "entries_per_s_while_busy": arguments.rate, "consumers": "1 exclusive"},
            settings=server.settings,
        )


if __name__ == "__main__":
    main()
