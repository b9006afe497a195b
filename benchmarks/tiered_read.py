"""How fast does a consumer catch up from objects, over from bookies; and how long until the first message after a seek into one?

A topic of messages of 1 KB in one ledger, which is in a folder and on the bookies. `ratio`: the median of pairs in which a new
subscription reads all of it, once from each, the topic unloaded before. Then it leaves the bookies, and `seek_ms`: from a seek to a
random entry until that message is here, of a consumer with a queue of ten.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from typing import Any

import cepheid
from benchmarks import load
from benchmarks.raw_client import open_connection, open_counter
from benchmarks.report import percentile, print_line
from benchmarks.server import add_arguments
from benchmarks.tiered_server import TieredServer, fill

MESSAGE_BYTES = 1000
PERMITS = 1000


async def catch_up(server: TieredServer, topic: str, subscription: str, entries: int) -> float:
    """MB/s of a consumer that only counts."""
    connection = await open_connection(server.url, topic)
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    began = time.perf_counter()
    counter = await open_counter(connection, topic, subscription, earliest=True, permits=PERMITS, ack_every=PERMITS)

    def on_counted(_: int) -> None:
        if connection.messages >= entries and not done.done():
            done.set_result(None)

    counter.on_counted = on_counted
    on_counted(0)
    await load.wait_unless_failed(done, connection)
    elapsed = time.perf_counter() - began
    connection.close()
    return entries * MESSAGE_BYTES / elapsed / 1e6


def read_from(server: TieredServer, topic: str, subscription: str, entries: int, *, objects: bool) -> float:
    server.offload(topic, keep_s=3600, reads_objects=objects)
    server.unload(topic)
    reads = _object_reads(server)
    mb_per_s = load.run(catch_up(server, topic, subscription, entries))
    if (_object_reads(server) > reads) != objects:
        raise RuntimeError(f"{topic} was not read from {'objects' if objects else 'bookies'}")
    return mb_per_s


def _object_reads(server: TieredServer) -> float:
    return server.metric("cepheid_offload_reads_total") or 0.0


async def seek(server: TieredServer, topic: str, ledger_id: int, entries: int, seeks: int) -> list[float]:
    """Seconds until the first message after each seek."""
    chance = random.Random(1)
    found: list[float] = []
    async with cepheid.connect(server.url) as client, client.consumer(topic, "seeks", receiver_queue=10) as consumer:
        for _ in range(seeks):
            place = cepheid.MessageId(ledger_id, chance.randrange(entries))
            began = time.perf_counter()
            await consumer.seek(place, inclusive=True)
            message = await consumer.receive()
            found.append(time.perf_counter() - began)
            assert message.message_id.entry_id == place.entry_id, (message.message_id, place)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--seeks", type=int, default=200)
    arguments = parser.parse_args()
    with TieredServer(arguments) as server:
        server.wait_until_admin_answers()
        topic = server.topic("tiered-read")
        entries = load.run(fill(server, topic, MESSAGE_BYTES, int(arguments.gigabytes * 1e9)))
        server.unload(topic)
        server.offload(topic, keep_s=3600)
        server.wait_until_offloaded(topic)
        rates: list[tuple[float, float]] = []
        for index in range(arguments.pairs):
            pair = [read_from(server, topic, f"from-{index}-{objects}", entries, objects=objects) for objects in (False, True)]
            rates.append((pair[0], pair[1]))
        server.offload(topic, keep_s=0)
        server.wait_until_offloaded(topic, off_bookies=True)
        ledgers = server.ask("GET", f"/admin/v2/persistent/public/default/{topic.rpartition('/')[2]}/internalStats")["ledgers"]
        seeks_s = load.run(seek(server, topic, ledgers[0]["ledgerId"], entries, arguments.seeks))
        figures: dict[str, Any] = {
            "bookies_mb_per_s": round(percentile([rate for rate, _ in rates], 0.5), 1),
            "objects_mb_per_s": round(percentile([rate for _, rate in rates], 0.5), 1),
            "ratio": round(percentile([objects / bookies for bookies, objects in rates], 0.5), 2),
            "seek_ms_p50": round(1000 * percentile(seeks_s, 0.5), 1),
            "seek_ms_p99": round(1000 * percentile(seeks_s, 0.99), 1),
        }
        print_line(
            "tiered_read",
            figures=figures,
            load={"gigabytes": arguments.gigabytes, "message_bytes": MESSAGE_BYTES, "pairs": arguments.pairs, "permits": PERMITS},
            settings=server.settings,
        )


if __name__ == "__main__":
    main()
