"""How many entries a second can one producer publish without batching? 1 KB each, pipelined, durable before each receipt."""

from __future__ import annotations

import argparse

from benchmarks import load
from benchmarks.raw_client import open_connection, open_publisher
from benchmarks.report import print_line
from benchmarks.server import Server, add_arguments


async def publish(server: Server, arguments: argparse.Namespace) -> load.Measured:
    topic = server.topic("publish-single")
    connection = await open_connection(server.url, topic)
    publisher = await open_publisher(connection, topic, bytes(arguments.entry_bytes))
    load.keep_window(connection, publisher, arguments.window)
    measured = await load.measure(
        server, lambda: connection.receipts, warmup_s=1.0, seconds=arguments.seconds, failed=connection.failed
    )
    connection.close()
    return measured


def main(name: str = "publish_single", entry_bytes: int = 1000, window: int = 1000, description: str | None = __doc__) -> None:
    parser = argparse.ArgumentParser(description=description)
    add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--entry-bytes", type=int, default=entry_bytes)
    parser.add_argument("--window", type=int, default=window, help="entries on their way (official clients allow 1000)")
    arguments = parser.parse_args()
    with Server(arguments) as server:
        measured = load.run(publish(server, arguments))
        print_line(
            name,
            figures={
                "entries_per_s": round(measured.rate_per_s),
                "mb_per_s": round(measured.rate_per_s * arguments.entry_bytes / 1e6, 1),
                **measured.cores(),
            },
            load={
                "entry_bytes": arguments.entry_bytes,
                "window_entries": arguments.window,
                "producers": 1,
                "seconds": arguments.seconds,
            },
            settings=server.settings,
        )


if __name__ == "__main__":
    main()
