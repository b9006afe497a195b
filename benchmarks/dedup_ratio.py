"""What does deduplication cost a producer that publishes without batching? Throughput with it over without, 1 KB entries.

Two topics of one server, in namespaces with and without the policy, take turns: pair after pair, each in another order. The
pairs are many and short, so that what else the machine does strikes both halves alike; the ratio is their median.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import urllib.request

from benchmarks import load
from benchmarks.raw_client import open_connection, open_publisher
from benchmarks.report import print_line
from benchmarks.server import Server, add_arguments


def make_namespace(server: Server, name: str, *, deduplication: bool) -> str:
    assert server.admin_url is not None, "the policy is set over the admin API: --admin-url"
    namespace = f"{server.admin_url}/admin/v2/namespaces/public/{name}"
    keep_nothing = {"retention_policies": {"retentionTimeInMinutes": 0, "retentionSizeInMB": 0}}
    call(namespace, "PUT", keep_nothing)
    call(f"{namespace}/deduplication", "POST", deduplication)
    return f"persistent://public/{name}/t"


def call(url: str, method: str, body: object) -> None:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=10):
        pass


async def rate(server: Server, topic: str, arguments: argparse.Namespace) -> load.Measured:
    connection = await open_connection(server.url, topic)
    publisher = await open_publisher(connection, topic, bytes(arguments.entry_bytes))
    load.keep_window(connection, publisher, arguments.window)
    measured = await load.measure(
        server, lambda: connection.receipts, warmup_s=0.15, seconds=arguments.seconds, failed=connection.failed
    )
    connection.on_receipts = None
    await asyncio.sleep(0.05)  # the last receipts: the next round finds a server at rest
    connection.close()
    return measured


async def compare(server: Server, arguments: argparse.Namespace) -> list[tuple[load.Measured, load.Measured]]:
    """(without, with) of each pair."""
    without = make_namespace(server, "bench-dedup-off", deduplication=False)
    with_it = make_namespace(server, "bench-dedup-on", deduplication=True)
    await rate(server, without, arguments)  # imports, caches, the first ledgers
    await rate(server, with_it, arguments)
    pairs = []
    for number in range(arguments.pairs):
        if number % 2:
            on = await rate(server, with_it, arguments)
            pairs.append((await rate(server, without, arguments), on))
        else:
            off = await rate(server, without, arguments)
            pairs.append((off, await rate(server, with_it, arguments)))
    return pairs


def server_us_per_entry(measured: load.Measured) -> float:
    return measured.server_cores / measured.rate_per_s * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each half of a pair")
    parser.add_argument("--pairs", type=int, default=25)
    parser.add_argument("--entry-bytes", type=int, default=1000)
    parser.add_argument("--window", type=int, default=1000, help="entries on their way (1000: what official clients allow)")
    arguments = parser.parse_args()
    with Server(arguments) as server:
        pairs = load.run(compare(server, arguments))
        ratios = [on.rate_per_s / off.rate_per_s for off, on in pairs]
        print_line(
            "dedup_ratio",
            figures={
                "ratio": round(statistics.median(ratios), 3),
                "ratios": [round(ratio, 3) for ratio in ratios],
                "entries_per_s_off": round(statistics.median(off.rate_per_s for off, _ in pairs)),
                "entries_per_s_on": round(statistics.median(on.rate_per_s for _, on in pairs)),
                # What others do on the machine moves rates, and processor time less so.
                "server_us_per_entry_off": round(statistics.median(server_us_per_entry(off) for off, _ in pairs), 2),
                "server_us_per_entry_on": round(statistics.median(server_us_per_entry(on) for _, on in pairs), 2),
            },
            load={
                "entry_bytes": arguments.entry_bytes,
                "window_entries": arguments.window,
                "pairs": arguments.pairs,
                "seconds": arguments.seconds,
            },
            settings=server.settings,
        )


if __name__ == "__main__":
    main()
