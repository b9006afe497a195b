"""How long does a publish take at a steady rate? From when an entry was due to be sent until its receipt is here."""

from __future__ import annotations

import argparse

from benchmarks import load
from benchmarks.raw_client import open_connection, open_publisher
from benchmarks.report import latency_figures, print_line
from benchmarks.server import Server, add_arguments


async def publish(server: Server, arguments: argparse.Namespace) -> list[float]:
    topic = server.topic("publish-latency")
    connection = await open_connection(server.url, topic)
    publisher = await open_publisher(connection, topic, bytes(arguments.entry_bytes))
    warmup_s = 1.0
    sender = load.PacedSender(connection, publisher, arguments.rate, warmup_s + arguments.seconds)
    arrivals = load.Arrivals()
    connection.on_receipts = arrivals.on_arrived
    await load.run_paced(sender, arrivals, connection.failed, warmup_s + 3 * arguments.seconds + 10)
    connection.close()
    return arrivals.latencies_s(sender, skip=int(arguments.rate * warmup_s))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rate", type=float, default=5000.0, help="entries a second, evenly spaced")
    parser.add_argument("--entry-bytes", type=int, default=1000)
    arguments = parser.parse_args()
    with Server(arguments) as server:
        latencies_s = load.run(publish(server, arguments))
        print_line(
            "publish_latency",
            figures=latency_figures(latencies_s),
            load={
                "entries_per_s": arguments.rate,
                "entry_bytes": arguments.entry_bytes,
                "producers": 1,
                "seconds": arguments.seconds,
                "entries": len(latencies_s),
            },
            settings=server.settings,
        )


if __name__ == "__main__":
    main()
