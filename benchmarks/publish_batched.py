"""How many messages a second can be published when producers batch? Entries of 1000 × 100 B, durable before each receipt."""

from __future__ import annotations

import argparse

from benchmarks import load
from benchmarks.raw_client import batch_payload, open_connection, open_publisher
from benchmarks.report import print_line
from benchmarks.server import Server, add_arguments


async def publish(server: Server, arguments: argparse.Namespace) -> load.Measured:
    topic = server.topic("publish-batched")
    connection = await open_connection(server.url, topic)
    payload = batch_payload(arguments.batch, arguments.message_bytes)
    publisher = await open_publisher(connection, topic, payload, num_messages=arguments.batch)
    load.keep_window(connection, publisher, arguments.window)
    measured = await load.measure(
        server, lambda: connection.receipts, warmup_s=1.0, seconds=arguments.seconds, failed=connection.failed
    )
    connection.close()
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--batch", type=int, default=1000, help="messages per entry")
    parser.add_argument("--message-bytes", type=int, default=100)
    parser.add_argument("--window", type=int, default=64, help="entries on their way")
    arguments = parser.parse_args()
    with Server(arguments) as server:
        measured = load.run(publish(server, arguments))
        print_line(
            "publish_batched",
            figures={
                "messages_per_s": round(measured.rate_per_s * arguments.batch),
                "entries_per_s": round(measured.rate_per_s),
                "mb_per_s": round(measured.rate_per_s * arguments.batch * arguments.message_bytes / 1e6, 1),
                **measured.cores(),
            },
            load={
                "messages_per_entry": arguments.batch,
                "message_bytes": arguments.message_bytes,
                "window_entries": arguments.window,
                "producers": 1,
                "seconds": arguments.seconds,
            },
            settings=server.settings,
        )


if __name__ == "__main__":
    main()
