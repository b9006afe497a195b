"""What does a scan of a topic by Spark cost those who publish to it? And what does it cost the broker, past which the bytes go?

A topic with history on a cluster of processes; 2,000 entries/s of 1 KB go to it, by turns without and with a Spark driver
in a process of its own that scans the history again and again. At the end Spark scans alone: what does the broker do meanwhile?
On one machine Spark takes processor time from everybody, which a Spark elsewhere would not: so it gets what nobody else wants
(Linux's idle class; `--spark-class normal`: it competes with the servers as an equal). What sharing the processors costs all the
same is measured too: `busy` is the same load beside processes of that class, one per core, that only spin.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from types import TracebackType
from typing import Any, Self

from benchmarks import load
from benchmarks.cluster import Cluster, add_arguments
from benchmarks.raw_client import open_connection, open_publisher
from benchmarks.report import percentile, print_line
from benchmarks.scheduling import CLASSES, yield_as_a_session
from benchmarks.spark_bench import add_spark_arguments, fill, keep_everything, keyed_batch

WARMUP_S = 1.0
BATCH = (1000, 100)  # messages an entry of the history, bytes a message
ALLOWED_RATIO, ALLOWED_MORE_S = 1.5, 0.003


class Scanner:
    """Use as a context manager. `rows`: read so far, in all."""

    def __init__(self, url: str, topic: str, until: str, arguments: argparse.Namespace) -> None:
        command = [sys.executable, "-m", "benchmarks.spark_scanner", url, topic, "--until", until]
        command += ["--spark-cores", str(arguments.spark_cores), f"--java-options={arguments.java_options}"]
        command += ["--scheduling", arguments.spark_class]
        self._process = subprocess.Popen(
            command,
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sys.stderr if arguments.verbose else subprocess.DEVNULL,
            text=True,
        )
        yield_as_a_session(self._process.pid, arguments.spark_class)
        self._expect("ready")
        self.rows = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def start(self) -> None:
        self._say("go")

    def stop(self) -> int:
        """When the scan that runs is over; rows read since `start`."""
        self._say("stop")
        told: dict[str, Any] = json.loads(self._line())
        self.rows += told["rows"]
        return int(told["rows"])

    def _say(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()

    def _expect(self, word: str) -> None:
        if (line := self._line()) != word:
            raise RuntimeError(f"the scanner said {line!r}; run with --verbose to see why")

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


class BusyLoops:
    """Processes that spin, of Spark's class: what sharing the processors costs by itself. Use as a context manager."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._class = arguments.spark_class
        self._count = arguments.spark_cores
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        for _ in range(self._count):
            process = subprocess.Popen([sys.executable, "-m", "benchmarks.scheduling", self._class], start_new_session=True)
            self._processes.append(process)
            yield_as_a_session(process.pid, self._class)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


async def latency_p99_s(cluster: Cluster, topic: str, arguments: argparse.Namespace) -> float:
    connection = await open_connection(cluster.url, topic)
    publisher = await open_publisher(connection, topic, os.urandom(arguments.entry_bytes))
    sender = load.PacedSender(connection, publisher, arguments.rate, WARMUP_S + arguments.seconds)
    arrivals = load.Arrivals()
    connection.on_receipts = arrivals.on_arrived
    await load.run_paced(sender, arrivals, connection.failed, 4 * arguments.seconds + 20)
    connection.close()
    return percentile(arrivals.latencies_s(sender, skip=int(arguments.rate * WARMUP_S)), 0.99)


def history_end(cluster: Cluster, topic: str) -> str:
    from cepheid_decode import PlanSource
    from cepheid_scan.open_planner import open_planner

    planner = open_planner(PlanSource(service_url=cluster.url))
    try:
        (history,) = planner.plan([topic]).topics
    finally:
        planner.close()
    last = [ledger for ledger in history.ledgers if ledger.last_entry_id >= 0][-1]
    return f"{last.ledger_id}:{last.last_entry_id + 1}"


def broker_cores(cluster: Cluster, scanner: Scanner, for_s: float) -> tuple[float, float]:
    """While Spark scans alone: the broker's part of a core, and rows a second."""
    started, used_s = time.perf_counter(), cluster.cpu_s()
    scanner.start()
    time.sleep(for_s)
    rows = scanner.stop()
    elapsed_s = time.perf_counter() - started
    return (cluster.cpu_s() - used_s) / elapsed_s, rows / elapsed_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    add_spark_arguments(parser)
    parser.add_argument("--gigabytes", type=float, default=0.5, help="of history")
    parser.add_argument("--pairs", type=int, default=5, help="rounds of quiet, busy, scanned")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rate", type=float, default=2000.0, help="entries a second, evenly spaced")
    parser.add_argument("--entry-bytes", type=int, default=1000)
    parser.add_argument("--spark-class", choices=CLASSES, default="idle", help="how Spark shares processors with the servers")
    parser.add_argument("--verbose", action="store_true", help="show what Spark says")
    arguments = parser.parse_args()
    quiet: list[float] = []
    busy: list[float] = []
    scanned: list[float] = []
    with Cluster(arguments) as cluster:
        keep_everything(cluster.processes.admin_urls[0])
        topic = cluster.topic("spark-beside")
        messages, size = BATCH
        entries = int(arguments.gigabytes * 1e9) // (messages * size)
        load.run(fill(cluster.url, topic, keyed_batch(messages, size), entries, num_messages=messages))
        with Scanner(cluster.url, topic, history_end(cluster, topic), arguments) as scanner:
            for _ in range(arguments.pairs):
                quiet.append(load.run(latency_p99_s(cluster, topic, arguments)))
                with BusyLoops(arguments):
                    busy.append(load.run(latency_p99_s(cluster, topic, arguments)))
                scanner.start()
                scanned.append(load.run(latency_p99_s(cluster, topic, arguments)))
                scanner.stop()
            rows_beside = scanner.rows
            assert rows_beside > 0, "every stop waits for a scan"
            cores, rows_per_s = broker_cores(cluster, scanner, arguments.seconds)
        excess_s = [
            max(0.0, with_scan - max(ALLOWED_RATIO * without, without + ALLOWED_MORE_S))
            for without, with_scan in zip(quiet, scanned, strict=True)
        ]
        print_line(
            "spark_beside_publish",
            figures={
                "p99_excess_ms": round(1000 * percentile(excess_s, 0.5), 3),
                "quiet_ms_p99": round(1000 * percentile(quiet, 0.5), 3),
                "busy_ms_p99": round(1000 * percentile(busy, 0.5), 3),
                "scanned_ms_p99": round(1000 * percentile(scanned, 0.5), 3),
                "ratio": round(percentile([bad / good for good, bad in zip(quiet, scanned, strict=True)], 0.5), 3),
                "broker_cores": round(cores, 4),
                "scan_rows_per_s_alone": round(rows_per_s),
                "scan_rows_beside": rows_beside,
            },
            load={
                "rounds": [[round(1000 * p99, 2) for p99 in each] for each in zip(quiet, busy, scanned, strict=True)],
                "entries_per_s": arguments.rate,
                "entry_bytes": arguments.entry_bytes,
                "history_gigabytes": arguments.gigabytes,
                "seconds": arguments.seconds,
            },
            settings={**cluster.settings, "spark_cores": arguments.spark_cores, "spark_class": arguments.spark_class},
        )


if __name__ == "__main__":
    main()
