"""How fast does a broker offload to `file://`, with how much of the processor, and what does that cost those who publish?

Two topics, of batches of 1,000 × 100 B and of messages of 1 KB, are filled and offloaded one after the other; `mb_per_s` is from
the policy until the object is read back and recorded. Then the same for two more topics, beside a publisher at a steady rate:
`p99_excess_ms` is how far its p99 is above 1.3 times that without offloading, or above 2 ms more, whichever allows more.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

from benchmarks import load
from benchmarks.report import percentile, print_line
from benchmarks.server import add_arguments
from benchmarks.tiered_server import TieredServer, fill

SHAPES = {"1000x100b": (100, True), "1kb": (1000, False)}
PUBLISH_BYTES = 1000


def filled(server: TieredServer, name: str, shape: str, gigabytes: float) -> str:
    topic = server.topic(f"tiered-{name}-{shape}")
    message_bytes, batched = SHAPES[shape]
    load.run(fill(server, topic, message_bytes, int(gigabytes * 1e9), batched=batched))
    server.unload(topic)
    return topic


def offload(server: TieredServer, topic: str) -> dict[str, float]:
    began, cpu_s = time.perf_counter(), server.cpu_s()
    server.offload(topic, keep_s=3600)
    places = server.wait_until_offloaded(topic)
    elapsed, cpu_s = time.perf_counter() - began, server.cpu_s() - cpu_s
    mb = places["both"]["bytes"] / 1e6
    return {
        "mb_per_s": round(mb / elapsed, 1),
        "cpu_s_per_gb": round(1000 * cpu_s / mb, 2),
        "size": round(places["object_bytes"] / 1e6 / mb, 3),
    }


async def publish_beside(server: TieredServer, topics: list[str], arguments: argparse.Namespace) -> tuple[float, float, float]:
    """The p99 in ms without offloading, and while these topics are offloaded; and the MB/s of that."""
    topic = server.topic("tiered-beside")
    publishing = await load.SteadyLoad.start(server.url, topic, rate_per_s=arguments.rate, entry_bytes=PUBLISH_BYTES)
    await publishing.go_on(1.0 + arguments.seconds)
    began_at = time.perf_counter()
    loop = asyncio.get_running_loop()
    mb = 0.0
    for each in topics:
        await loop.run_in_executor(None, lambda each=each: server.offload(each, keep_s=3600))
        places = await loop.run_in_executor(None, lambda each=each: server.wait_until_offloaded(each))
        mb += places["both"]["bytes"] / 1e6
    ended_at = time.perf_counter()
    await publishing.finish(0.5)
    without = publishing.latencies_s(began_at - arguments.seconds, began_at)
    beside = publishing.latencies_s(began_at, ended_at)
    return 1000 * percentile(without, 0.99), 1000 * percentile(beside, 0.99), mb / (ended_at - began_at)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument(
        "--gigabytes", type=float, default=1.0, help="of each of the two topics that are offloaded on a quiet server"
    )
    parser.add_argument(
        "--beside-gigabytes", type=float, default=0.4, help="of each of the two that are offloaded beside a publisher"
    )
    parser.add_argument("--rate", type=float, default=1000.0, help="entries of 1 KB a second beside the offload, evenly spaced")
    parser.add_argument("--seconds", type=float, default=10.0, help="of publishing without offloading, before")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    with TieredServer(arguments) as server:
        server.wait_until_admin_answers()
        warm = filled(server, "warm", "1kb", 0.001)  # the process that uploads starts with the first ledger
        offload(server, warm)
        for shape in SHAPES:
            for figure, value in offload(server, filled(server, "quiet", shape, arguments.gigabytes)).items():
                figures[f"{figure}_{shape}"] = value
        topics = [filled(server, "beside", shape, arguments.beside_gigabytes) for shape in SHAPES]
        without, beside, mb_per_s = load.run(publish_beside(server, topics, arguments))
        figures |= {
            "mb_per_s_beside": round(mb_per_s, 1),
            "without_ms_p99": round(without, 2),
            "beside_ms_p99": round(beside, 2),
            "p99_excess_ms": round(max(0.0, beside - max(1.3 * without, without + 2.0)), 2),
        }
        print_line(
            "tiered_offload",
            figures=figures,
            load={
                "gigabytes": arguments.gigabytes,
                "beside_gigabytes": arguments.beside_gigabytes,
                "publish_entries_per_s": arguments.rate,
                "publish_bytes": PUBLISH_BYTES,
            },
            settings=server.settings,
        )


if __name__ == "__main__":
    main()
