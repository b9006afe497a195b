"""How fast does a consumer that only counts read what was stored before it came? 1 GB, once in large and once in small entries."""

from __future__ import annotations

import argparse
import asyncio
import time

from benchmarks import load
from benchmarks.raw_client import open_connection, open_counter, open_publisher, subscribe
from benchmarks.report import print_line
from benchmarks.server import Server, add_arguments


async def fill(server: Server, entry_bytes: int, entries: int) -> None:
    topic = server.topic(f"catch-up-{entry_bytes}")
    connection = await open_connection(server.url, topic)
    await subscribe(connection, topic, "bench", earliest=True)  # without a subscription nothing would be kept
    publisher = await open_publisher(connection, topic, bytes(entry_bytes))
    await load.publish_all(connection, publisher, entries, window=max(32, min(1000, 8_000_000 // entry_bytes)))
    connection.close()


async def catch_up(server: Server, entry_bytes: int, entries: int, permits: int) -> dict[str, float]:
    topic = server.topic(f"catch-up-{entry_bytes}")
    connection = await open_connection(server.url, topic)
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    started, server_cpu, own_cpu = time.perf_counter(), server.cpu_s(), time.process_time()
    counter = await open_counter(connection, topic, "bench", earliest=True, permits=permits, ack_every=permits)

    def on_counted(_: int) -> None:
        if connection.messages >= entries and not done.done():
            done.set_result(None)

    counter.on_counted = on_counted
    on_counted(0)
    await load.wait_unless_failed(done, connection)
    elapsed = time.perf_counter() - started
    figures = {
        "mb_per_s": round(entries * entry_bytes / elapsed / 1e6, 1),
        "entries_per_s": round(entries / elapsed),
        "server_cores": round((server.cpu_s() - server_cpu) / elapsed, 2),
        "generator_cores": round((time.process_time() - own_cpu) / elapsed, 2),
    }
    connection.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--permits", type=int, default=1000, help="as the official clients' receiver queue")
    parser.add_argument("--entry-bytes", type=int, nargs="+", default=[64_000, 1000])
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    with Server(arguments) as server:
        for entry_bytes in arguments.entry_bytes:
            entries = int(arguments.gigabytes * 1e9) // entry_bytes
            load.run(fill(server, entry_bytes, entries))
            if not server.external:  # nothing of it is in the server's memory any more: the consumer is served from the bookie
                server.stop()
                server.start()
            measured = load.run(catch_up(server, entry_bytes, entries, arguments.permits))
            figures |= {f"{name}_{_short(entry_bytes)}": value for name, value in measured.items()}
        print_line(
            "catch_up",
            figures=figures,
            load={
                "gigabytes": arguments.gigabytes,
                "entry_bytes": arguments.entry_bytes,
                "permits": arguments.permits,
                "consumers": 1,
            },
            settings=server.settings,
        )


def _short(entry_bytes: int) -> str:
    return f"{entry_bytes // 1000}kb" if entry_bytes >= 1000 else f"{entry_bytes}b"


if __name__ == "__main__":
    main()
