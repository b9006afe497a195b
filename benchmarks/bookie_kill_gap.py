"""How long does a producer wait when a bookie of the ensemble is killed? When one is stopped and says nothing?

every few seconds:  SIGKILL one of three ──► the longest time from due to receipt ──► start it again, once there is a spare
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
from collections.abc import Callable

from benchmarks import load
from benchmarks.cluster import Cluster, add_arguments
from benchmarks.raw_client import Connection, RefusedError, open_connection, open_publisher
from benchmarks.report import percentile, print_line

WATCHED_S = 3.0
"""What happens so long after a break belongs to it."""
SETTLED_S = 1.0


class GapMeter:
    """Breaks things beside a steady load, and finds the longest latency around each break."""

    def __init__(self, cluster: Cluster, sender: load.PacedSender, arrivals: load.Arrivals, connection: Connection) -> None:
        self._cluster = cluster
        self._sender = sender
        self._arrivals = arrivals
        self._connection = connection

    async def gap_s(self, break_it: Callable[[], None], watched_s: float) -> float:
        """From when an entry was due until its receipt: the longest of those that were due around and after the break."""
        loop = asyncio.get_running_loop()
        first = self._arrivals.count
        await loop.run_in_executor(None, break_it)
        await load.run_unless_failed(self._connection.failed, watched_s)
        return max(self._arrivals.latencies_s(self._sender, skip=first))

    async def mend(self, mend: Callable[[], None], is_mended: Callable[[], bool], what: str) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, mend)
        await loop.run_in_executor(None, self._cluster.wait_until, is_mended, what)
        await load.run_unless_failed(self._connection.failed, SETTLED_S)


async def measure(cluster: Cluster, arguments: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Gaps of kills, and of stops."""
    topic = cluster.topic("kill-gap")
    connection = await open_connection(cluster.url, topic)
    publisher = await open_publisher(connection, topic, bytes(arguments.entry_bytes))
    sender = load.PacedSender(connection, publisher, arguments.rate, 24 * 3600)  # until we are done
    arrivals = load.Arrivals()
    connection.on_receipts = arrivals.on_arrived
    meter = GapMeter(cluster, sender, arrivals, connection)
    sender.start()
    await load.run_unless_failed(connection.failed, 2.0)
    kills = [await kill_one(cluster, meter, topic, place) for place in places(arguments.kills)]
    stopped_s = arguments.add_timeout_s + 2.0
    stops = [await stop_one(cluster, meter, topic, place, stopped_s) for place in places(arguments.stops)]
    if sender.error is not None:
        raise RefusedError(f"the load ended: {sender.error}")
    sender.stop()
    connection.close()
    return kills, stops


def places(count: int) -> list[int]:
    """Every place of the ensemble in turn."""
    return list(itertools.islice(itertools.cycle(range(3)), count))


async def kill_one(cluster: Cluster, meter: GapMeter, topic: str, place: int) -> float:
    loop = asyncio.get_running_loop()
    victim = (await loop.run_in_executor(None, cluster.view.ensemble, topic))[place]
    gap_s = await meter.gap_s(lambda: cluster.processes.kill(victim), WATCHED_S)
    await meter.mend(
        lambda: cluster.processes.start(victim),
        lambda: is_whole(cluster, topic, victim),
        f"{victim} is back and the ensemble whole",
    )
    return gap_s


async def stop_one(cluster: Cluster, meter: GapMeter, topic: str, place: int, stopped_s: float) -> float:
    loop = asyncio.get_running_loop()
    victim = (await loop.run_in_executor(None, cluster.view.ensemble, topic))[place]
    gap_s = await meter.gap_s(lambda: cluster.processes.pause(victim), stopped_s)
    await meter.mend(
        lambda: cluster.processes.resume(victim),
        lambda: is_whole(cluster, topic, victim),
        f"{victim} is back and the ensemble whole",
    )
    return gap_s


def is_whole(cluster: Cluster, topic: str, victim: str) -> bool:
    writable = cluster.view.writable_bookies()
    return victim in writable and set(cluster.view.ensemble(topic)) <= set(writable)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, bookies=4, session_timeout_s=2.0)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--stops", type=int, default=5)
    parser.add_argument("--rate", type=float, default=1000.0, help="entries a second, evenly spaced")
    parser.add_argument("--entry-bytes", type=int, default=1000)
    parser.add_argument("--add-timeout-s", type=float, default=1.0, help="of the broker: after so long a silent bookie has failed")
    arguments = parser.parse_args()
    with Cluster(arguments, {"broker": {"ledger": {"add_timeout_s": arguments.add_timeout_s}}}) as cluster:
        kills, stops = load.run(measure(cluster, arguments))
        print_line(
            "bookie_kill_gap",
            figures={
                "kill_gap_ms_p50": round(1000 * percentile(kills, 0.5), 1),
                "kill_gap_ms_p99": round(1000 * percentile(kills, 0.99), 1),
                "stop_gap_ms_max": round(1000 * max(stops, default=0.0), 1),
                "stop_gap_above_timeout_ms": round(1000 * (max(stops, default=0.0) - arguments.add_timeout_s), 1),
            },
            load={
                "kills": arguments.kills,
                "kill_gaps_ms": [round(1000 * gap_s) for gap_s in kills],
                "stops": arguments.stops,
                "stop_gaps_ms": [round(1000 * gap_s) for gap_s in stops],
                "entries_per_s": arguments.rate,
                "entry_bytes": arguments.entry_bytes,
            },
            settings=cluster.settings,
        )


if __name__ == "__main__":
    main()
