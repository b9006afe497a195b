"""What does a consumer that catches up cost those who publish to the same broker? Latency at a steady rate without and beside.

Each round publishes for a while, then goes on publishing while another process reads a topic from its start to its end, and again.
That topic was stored before the server was restarted, so that nothing of it is in the server's memory. The consumer gets only
processor time that nobody else wants: with two cores it would take the publisher's.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time

from benchmarks import load
from benchmarks.catch_up import fill
from benchmarks.raw_client import open_connection, open_counter
from benchmarks.report import percentile, print_line
from benchmarks.scheduling import enter_class
from benchmarks.server import Server, ServerFailedError, add_arguments

PERMITS = 1000  # as the official clients' receiver queue


async def publish_round(server: Server, old_topic: str, arguments: argparse.Namespace) -> tuple[float, float, float]:
    """Return the p99 without and beside the consumer in seconds, and the entries per second that the consumer got."""
    topic = server.topic("beside-catch-up")
    publishing = await load.SteadyLoad.start(server.url, topic, rate_per_s=arguments.rate, entry_bytes=arguments.publish_bytes)
    await publishing.go_on(1.0 + arguments.seconds)
    without_until = time.perf_counter()
    entries_per_s = await asyncio.get_running_loop().run_in_executor(None, run_consumer, server.url, old_topic, arguments)
    beside_until = time.perf_counter()
    await publishing.finish()
    without, beside = (publishing.latencies_s(until - arguments.seconds, until) for until in (without_until, beside_until))
    return percentile(without, 0.99), percentile(beside, 0.99), entries_per_s


def run_consumer(url: str, topic: str, arguments: argparse.Namespace) -> float:
    command = ["--consume", topic, "--url", url, "--seconds", str(arguments.seconds), "--entries", str(arguments.entries)]
    finished = subprocess.run(
        [sys.executable, "-m", "benchmarks.publish_beside_catch_up", *command], stdout=subprocess.PIPE, text=True, check=False
    )
    if finished.returncode:
        raise ServerFailedError("the consumer failed")
    return float(finished.stdout)


async def consume(arguments: argparse.Namespace) -> float:
    """Read a topic for so many seconds, each time from its start as another subscription. Return the entries per second."""
    received, rounds, started = 0, 0, time.perf_counter()
    while (left_s := started + arguments.seconds - time.perf_counter()) > 0:
        connection = await open_connection(arguments.url, arguments.consume)
        subscription, rounds = f"reader-{started}-{rounds}", rounds + 1
        counter = await open_counter(connection, arguments.consume, subscription, earliest=True, permits=PERMITS, ack_every=PERMITS)
        at_end = asyncio.Event()
        counter.on_counted = lambda _, seen=connection, end=at_end: end.set() if seen.messages >= arguments.entries else None
        try:
            await asyncio.wait_for(at_end.wait(), left_s)
        except TimeoutError:
            pass
        received += connection.messages
        connection.close()
    return received / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--entries", type=int, default=500_000, help="stored before, of each size")
    parser.add_argument("--entry-bytes", type=int, nargs="+", default=[1000, 100])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rate", type=float, default=5000.0, help="entries a second, evenly spaced")
    parser.add_argument("--publish-bytes", type=int, default=1000)
    parser.add_argument("--consume", metavar="TOPIC", help=argparse.SUPPRESS)  # the process of the consumer
    arguments = parser.parse_args()
    if arguments.consume:
        enter_class("idle")
        print(load.run(consume(arguments)))
        return
    figures: dict[str, float] = {}
    rounds: dict[str, list[tuple[float, float]]] = {}
    with Server(arguments) as server:
        for entry_bytes in arguments.entry_bytes:
            load.run(fill(server, entry_bytes, arguments.entries))
            if not server.external:
                server.stop()
                server.start()
            old_topic = server.topic(f"catch-up-{entry_bytes}")
            measured = [load.run(publish_round(server, old_topic, arguments)) for _ in range(arguments.rounds)]
            size = f"{entry_bytes}b"
            figures[f"p99_ratio_{size}"] = round(percentile([beside / without for without, beside, _ in measured], 0.5), 2)
            figures[f"without_ms_p99_{size}"] = round(1000 * percentile([without for without, _, _ in measured], 0.5), 2)
            figures[f"beside_ms_p99_{size}"] = round(1000 * percentile([beside for _, beside, _ in measured], 0.5), 2)
            figures[f"consumed_entries_per_s_{size}"] = round(percentile([rate for _, _, rate in measured], 0.5))
            rounds[size] = [(round(1000 * without, 2), round(1000 * beside, 2)) for without, beside, _ in measured]
        print_line(
            "publish_beside_catch_up",
            figures=figures,
            load={
                "rounds": rounds,
                "entries_per_s": arguments.rate,
                "publish_bytes": arguments.publish_bytes,
                "old_entries": arguments.entries,
                "permits": PERMITS,
                "seconds": arguments.seconds,
            },
            settings=server.settings,
        )


if __name__ == "__main__":
    main()
