"""How much memory do 1,000 consumers take in one process, with the Python client and with the official one?

Each client runs in a process of its own, in turn, with consumers of 1,000 topics on the same server that each have received one
message. What is counted is resident memory: that of the whole process, and what the client with its consumers takes beyond what the
process had after importing it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import load
from benchmarks.report import print_line
from benchmarks.server import Server, add_arguments

OPENED_AT_ONCE = 50
CLIENTS = ("cepheid", "official")


def resident_mb() -> float:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


async def publish(url: str, topics: list[str]) -> None:
    """Publish one message to each topic, after creating its subscriptions."""
    import cepheid

    async with cepheid.connect(url) as client:
        at_once = asyncio.Semaphore(OPENED_AT_ONCE)

        async def publish_to(topic: str) -> None:
            async with at_once:
                for subscription in CLIENTS:
                    await (await client.consumer(topic, subscription)).close()
                async with client.producer(topic) as producer:
                    await producer.send(b"x" * 100)

        await asyncio.gather(*map(publish_to, topics))


async def ours(url: str, topics: list[str]) -> tuple[float, float]:
    import cepheid.client

    before = resident_mb()
    client = cepheid.connect(url)
    consumers = []
    for first in range(0, len(topics), OPENED_AT_ONCE):
        opening = (client.consumer(topic, "cepheid") for topic in topics[first : first + OPENED_AT_ONCE])
        consumers += await asyncio.gather(*(_open(each) for each in opening))
    for consumer in consumers:
        await consumer.ack(await consumer.receive(timeout=60))
    after = resident_mb()
    await client.close()
    return before, after


async def _open(opening: Any) -> Any:
    return await opening


def theirs(url: str, topics: list[str]) -> tuple[float, float]:
    import pulsar

    before = resident_mb()
    client = pulsar.Client(url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    consumers = [client.subscribe(topic, "official") for topic in topics]
    for consumer in consumers:
        consumer.acknowledge(consumer.receive(timeout_millis=60_000))
    after = resident_mb()
    client.close()
    return before, after


def measure(name: str, url: str, topics: list[str]) -> tuple[float, float]:
    """Return the memory of a process before it made its client, and with all consumers, in MB."""
    command = [sys.executable, "-m", "benchmarks.client_memory", "--as-client", name, "--url", url]
    finished = subprocess.run(command, input=json.dumps(topics), stdout=subprocess.PIPE, text=True, check=True)
    before, after = json.loads(finished.stdout.splitlines()[-1])
    return before, after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--consumers", type=int, default=1_000, help="each of its own topic")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--as-client", choices=CLIENTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_client:
        topics = json.loads(sys.stdin.read())
        figures = asyncio.run(ours(arguments.url, topics)) if arguments.as_client == "cepheid" else theirs(arguments.url, topics)
        print(json.dumps(figures))
        return
    with Server(arguments) as server:
        measured: dict[str, list[tuple[float, float]]] = {name: [] for name in CLIENTS}
        for number in range(arguments.rounds):
            topics = [server.topic(f"memory-{number}-{index}") for index in range(arguments.consumers)]
            load.run(publish(server.url, topics))
            for name in CLIENTS:
                measured[name].append(measure(name, server.url, topics))
        figures_mb: dict[str, float] = {}
        for name, rounds in measured.items():
            figures_mb[f"{name}_mb"] = round(statistics.median(after for _, after in rounds), 1)
            figures_mb[f"{name}_consumers_mb"] = round(statistics.median(after - before for before, after in rounds), 1)
        print_line(
            "client_memory",
            figures={
                **figures_mb,
                "memory_ratio": round(figures_mb["cepheid_mb"] / figures_mb["official_mb"], 3),
                "consumers_ratio": round(figures_mb["cepheid_consumers_mb"] / figures_mb["official_consumers_mb"], 3),
            },
            load={"consumers": arguments.consumers, "rounds": arguments.rounds},
            settings=server.settings,
        )


if __name__ == "__main__":
    main()
