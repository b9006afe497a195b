"""How long does an entry take from producer to a consumer that keeps up, and does it cause reads of storage?"""

from __future__ import annotations

import argparse
import asyncio

from benchmarks import load
from benchmarks.raw_client import open_connection, open_counter, open_publisher
from benchmarks.report import latency_figures, print_line
from benchmarks.server import Server, add_arguments

READS_METRIC = "cepheid_bookie_read_requests_total"


async def publish_and_consume(server: Server, arguments: argparse.Namespace) -> list[float]:
    topic = server.topic("tail-latency")
    producing = await open_connection(server.url, topic)
    consuming = await open_connection(server.url, topic)
    publisher = await open_publisher(producing, topic, bytes(arguments.entry_bytes))
    counter = await open_counter(consuming, topic, "bench", earliest=False)
    warmup_s = 1.0
    sender = load.PacedSender(producing, publisher, arguments.rate, warmup_s + arguments.seconds)
    arrivals = load.Arrivals()
    counter.on_counted = arrivals.on_arrived
    failed = asyncio.gather(producing.failed, consuming.failed)  # only ever ends by an error
    await load.run_paced(sender, arrivals, failed, warmup_s + 3 * arguments.seconds + 10)
    producing.close()
    consuming.close()
    await asyncio.gather(failed, return_exceptions=True)
    return arrivals.latencies_s(sender, skip=int(arguments.rate * warmup_s))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rate", type=float, default=5000.0, help="entries a second, evenly spaced")
    parser.add_argument("--entry-bytes", type=int, default=1000)
    arguments = parser.parse_args()
    with Server(arguments) as server:
        reads_before = server.metric(READS_METRIC)
        latencies_s = load.run(publish_and_consume(server, arguments))
        reads = server.metric(READS_METRIC)
        print_line(
            "tail_latency",
            figures={
                **latency_figures(latencies_s),
                "bookie_reads": None if reads is None or reads_before is None else reads - reads_before,
            },
            load={
                "entries_per_s": arguments.rate,
                "entry_bytes": arguments.entry_bytes,
                "producers": 1,
                "consumers": "1 exclusive, 1000 permits, cumulative acknowledgement every 1000",
                "seconds": arguments.seconds,
                "entries": len(latencies_s),
            },
            settings=server.settings,
        )


if __name__ == "__main__":
    main()
