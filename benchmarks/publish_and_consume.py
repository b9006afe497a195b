"""A producer and a consumer at full speed on two kinds of connection in turn: which share of one is the other?"""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import load
from benchmarks.raw_client import Shown, open_connection, open_counter, open_publisher
from benchmarks.server import Server

Side = tuple[Server, str, Shown]
"""A server, the URL of one of its ports, and what is shown there."""
_rounds = itertools.count()


@dataclass(frozen=True, slots=True)
class Load:
    """Entries of `payload`, each of `batch` messages, with `window` of them on their way. `batch` 1: not a batch."""

    payload: bytes
    window: int
    batch: int = 1


async def rate(side: Side, each: Load, topic: str, seconds: float) -> load.Measured:
    """Return how many entries a consumer received that reads along. Each round has a subscription of its own."""
    server, url, shown = side
    reading, writing = await open_connection(url, topic, shown), await open_connection(url, topic, shown)
    subscription = f"s{next(_rounds)}"
    await open_counter(
        reading, topic, subscription, earliest=False, permits=4 * each.window, ack_every=each.window, batch=each.batch
    )
    num_messages = each.batch if each.batch > 1 else None
    publisher = await open_publisher(writing, topic, each.payload, num_messages=num_messages)
    load.keep_window(writing, publisher, each.window)
    measured = await load.measure(server, lambda: reading.messages, warmup_s=0.3, seconds=seconds, failed=writing.failed)
    assert not reading.failed.done(), "the consumer was cut off"
    writing.on_receipts = None
    await asyncio.sleep(0.05)  # the last receipts: the next round finds a server at rest
    for connection in (writing, reading):
        connection.close()
    return measured


async def compare(
    sides: tuple[Side, Side], each: Load, name: str, *, pairs: int, seconds: float
) -> list[tuple[load.Measured, load.Measured]]:
    """Return what both sides did, of each pair. A first round of each, which warms up, does not count."""
    topics = [side[0].topic(f"{name}-{number}") for number, side in enumerate(sides)]
    for side, topic in zip(sides, topics, strict=True):
        await rate(side, each, topic, min(seconds, 1.0))
    found = []
    for number in range(pairs):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        measured = {place: await rate(sides[place], each, topics[place], seconds) for place in order}
        found.append((measured[0], measured[1]))
    return found


def pair_figures(pairs: Sequence[tuple[load.Measured, load.Measured]], first: str, second: str) -> dict[str, object]:
    """Return the median share of the second side of the first, and the rates of both in entries a second."""
    ratios = [after.rate_per_s / before.rate_per_s for before, after in pairs]
    return {
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        f"{first}_entries_per_s": round(statistics.median(before.rate_per_s for before, _ in pairs)),
        f"{second}_entries_per_s": round(statistics.median(after.rate_per_s for _, after in pairs)),
    }
