"""How much more does `cepheid broker --processes 2` publish than one process? Small entries, so that a broker's loop is the bound.

ZooKeeper, the bookie and the generator need cores as well: the line says how many each side kept busy, and how many there are. On a
machine without free cores a second process can give nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from benchmarks import load
from benchmarks.cluster import Cluster, add_arguments
from benchmarks.raw_client import Connection, open_connection, open_publisher
from benchmarks.report import print_line
from benchmarks.server import ServerFailedError, is_listening
from cepheid_dev.free_ports import free_port
from cepheid_wire import pulsar_api_pb2 as pb

PAYLOAD = bytes(100)
WINDOW = 1000
TOPICS_TRIED = 64
START_LIMIT_S = 120.0


class Brokers:
    """`cepheid broker --processes N` on the cluster's metadata. Use as a context manager."""

    def __init__(self, cluster: Cluster, processes: int) -> None:
        self.processes = processes
        self._cluster = cluster
        self.ports = _free_run(processes)
        self._log = cluster.root / f"broker-{processes}-{self.ports[0]}.log"
        self._supervisor: subprocess.Popen[bytes]

    def __enter__(self) -> Brokers:
        command = [
            *(sys.executable, "-m", "cepheid_cli", "broker", "--metadata", self._cluster.processes.metadata_url),
            *("--processes", str(self.processes), "--port", str(self.ports[0]), "--admin-port", "0"),
            *("--ensemble-size", "1", "--write-quorum", "1", "--ack-quorum", "1"),
        ]
        with self._log.open("ab") as log:
            self._supervisor = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + START_LIMIT_S
        while self._log.read_text().count(", ready after") < self.processes or not all(map(_listens, self.ports)):
            if self._supervisor.poll() is not None or time.monotonic() > deadline:
                raise ServerFailedError(f"the brokers do not serve:\n{self._log.read_text()}")
            time.sleep(0.02)
        return self

    def __exit__(self, *_: object) -> None:
        self._supervisor.terminate()
        self._supervisor.wait(START_LIMIT_S)

    @property
    def url(self) -> str:
        return f"pulsar://127.0.0.1:{self.ports[0]}"

    def cpu_s(self) -> float:
        """Processor time of all broker processes so far."""
        pid = self._supervisor.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return sum(_cpu_of_s(int(child)) for child in children or [pid])


def _cpu_of_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _listens(port: int) -> bool:
    return is_listening("127.0.0.1", port)


def _free_run(count: int) -> list[int]:
    """So many free ports in a row."""
    while True:
        first = free_port()
        if all(free_port(first + number) == first + number for number in range(1, count)):
            return list(range(first, first + count))


async def one_topic_each(brokers: Brokers, prefix: str) -> list[str]:
    """A topic for each process."""
    connection = await open_connection(brokers.url)
    found: dict[int, str] = {}
    for number in range(TOPICS_TRIED):
        topic = f"persistent://public/default/{prefix}-{number}"
        await connection.ask(pb.CommandPartitionedTopicMetadata(topic=topic))
        answer = await connection.ask(pb.CommandLookupTopic(topic=topic))
        found.setdefault(urlsplit(answer.brokerServiceUrl or brokers.url).port or 0, topic)
        if len(found) == brokers.processes:
            connection.close()
            return list(found.values())
    raise ServerFailedError(f"{TOPICS_TRIED} topics lie at {len(found)} of {brokers.processes} processes")


async def publish(brokers: Brokers, prefix: str, seconds: float) -> load.Measured:
    """With a full window at each process."""
    connections: list[Connection] = []
    async with AsyncExitStack() as opened:
        for topic in await one_topic_each(brokers, prefix):
            connection = await open_connection(brokers.url, topic)
            opened.callback(connection.close)
            load.keep_window(connection, await open_publisher(connection, topic, PAYLOAD), WINDOW)
            connections.append(connection)
        failed = asyncio.ensure_future(_first_failure(connections))
        try:
            return await load.measure(
                brokers, lambda: sum(each.receipts for each in connections), warmup_s=1.0, seconds=seconds, failed=failed
            )
        finally:
            failed.cancel()


async def _first_failure(connections: list[Connection]) -> None:
    done, _ = await asyncio.wait([each.failed for each in connections], return_when=asyncio.FIRST_COMPLETED)
    done.pop().result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, bookies=1, brokers=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    arguments = parser.parse_args()
    measured: dict[int, list[load.Measured]] = {1: [], arguments.processes: []}
    with Cluster(arguments) as cluster:
        for pair in range(arguments.pairs):
            for processes in sorted(measured, reverse=bool(pair % 2)):
                with Brokers(cluster, processes) as brokers:
                    work = publish(brokers, f"processes-{pair}-{processes}", arguments.seconds)
                    measured[processes].append(load.run(work))
        ratios = [many.rate_per_s / one.rate_per_s for one, many in zip(measured[1], measured[arguments.processes], strict=True)]
        print_line(
            "processes",
            figures={
                "ratio": round(median(ratios), 2),
                "ratios": [round(ratio, 2) for ratio in ratios],
                **{f"entries_per_s_{count}": round(median(each.rate_per_s for each in runs)) for count, runs in measured.items()},
                **_cores(measured),
            },
            load={"processes": arguments.processes, "entry_bytes": len(PAYLOAD), "window": WINDOW, "pairs": arguments.pairs},
            settings=cluster.settings,
        )


def _cores(measured: dict[int, list[load.Measured]]) -> dict[str, Any]:
    return {
        f"{side}_cores_{count}": round(median(getattr(each, f"{side}_cores") for each in runs), 2)
        for count, runs in measured.items()
        for side in ("server", "generator")
    }


if __name__ == "__main__":
    main()
