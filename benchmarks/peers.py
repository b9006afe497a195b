"""`python -m benchmarks.peers [NAME,NAME]`: Cepheid and Apache Pulsar or Kafka side by side, the same loads at both, in turn.

    Cepheid, standalone ───────┐
                               ├─► ours theirs │ theirs ours │ … ──► the ratio of each pair, its median and 90 % interval
    Apache Pulsar or Kafka  ───┘

Both run at the same time, are started for each load, and wait for fsync before they acknowledge (`journalSyncData=true` of Pulsar
and `log.flush.interval.messages=1` of Kafka, whose shipped settings do not). The peer is warmed up first: a JVM is slow for its
first ten seconds. What is idle at a moment takes some processor time from the other, a JVM more than we do. Memory is PSS: Pulsar's
collector maps its heap several times.

Loads that write 300 MB/s and more start both for each pair, with empty directories: five pairs would fill a disk of 50 GB.

The loads with `perf` in their names use pulsar-perf, the load generator of Pulsar, which takes more than a core itself. Those with
`kafka` use it for Cepheid, and Kafka's own generator for Kafka: each with the batching that its client does by default.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import kafka, load
from benchmarks.guard import FEWEST_PAIRS, GuardError, judge
from benchmarks.many_topics import publish_to_each
from benchmarks.report import machine, percentile
from benchmarks.server import Server, add_arguments
from tests.apache_pulsar import VERSION, ApachePulsar, NotInstalledError, installed_home

ROOT = Path(__file__).parent.parent
MEMORY = "-Xms2g -Xmx2g -XX:MaxDirectMemorySize=2g"
SETTINGS = {"diskUsageThreshold": 0.99, "diskUsageWarnThreshold": 0.99, "diskUsageLwmThreshold": 0.99}
"""It would stop writing at 0.95 of a disk, which others fill as well."""
WARM_UP = ("publish_batched", "--seconds", "5"), ("publish_single", "--seconds", "10")
PERF_S = 15
_PERF_RATE = re.compile(r"Aggregated throughput stats --- \d+ records sent --- ([\d.]+) msg/s")
_PERF_LATENCY = re.compile(r"Aggregated latency stats .* med: +([\d.]+) .* 99pct: +([\d.]+) .* 99.9pct: +([\d.]+)")


@dataclass(slots=True)
class Peer:
    """A server that runs. `start_again` kills it (SIGKILL), starts it with the same data, and returns its process id."""

    url: str
    admin_url: str
    pid: int
    start_again: Callable[[], int]

    def restart(self) -> None:
        self.pid = self.start_again()

    @property
    def pss_mb(self) -> float:
        """Memory (MB = 10^6 bytes): what it shares with others is divided among them."""
        for line in Path(f"/proc/{self.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024 / 1e6
        raise GuardError(f"process {self.pid} has no memory: it is gone")


Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Row:
    """A load, and the figures of it that are compared: whether higher ones are better, by name."""

    run: Callable[[Peer], Figures]
    figures: Mapping[str, bool]
    fills_disk: bool = False
    """Each pair begins with empty directories."""
    run_at_kafka: Callable[[Peer], Figures] | None = None
    """The peer is Kafka, and this is the load there."""

    @property
    def peer(self) -> str:
        return "pulsar" if self.run_at_kafka is None else "kafka"


def generator(name: str, *options: str, rate: str = "") -> Callable[[Peer], Figures]:
    """Return a load of `benchmarks.NAME`. `rate`: its figure of what is sent in a second, for the processor time of a million."""

    def run(peer: Peer) -> Figures:
        command = [sys.executable, "-m", f"benchmarks.{name}", *options]
        command += ["--url", peer.url, "--admin-url", peer.admin_url, "--server-pid", str(peer.pid)]
        finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT)
        if finished.returncode:
            raise GuardError(f"{' '.join(command[1:])} failed: see above")
        line = json.loads(finished.stdout.splitlines()[-1])
        figures = {name: float(value) for name, value in line.items() if isinstance(value, int | float)}
        if rate:
            figures["cpu_s_per_million"] = 1e6 * figures["server_cores"] / figures[rate]
        return figures

    return run


def pulsar_perf(home: Path, *options: str, rate_per_s: int = 2_000_000) -> Callable[[Peer], Figures]:
    """Return a load of Pulsar's own generator."""

    def run(peer: Peer) -> Figures:
        topic = f"persistent://public/default/perf-{time.monotonic_ns()}"
        command = [str(home / "bin" / "pulsar-perf"), "produce", "--service-url", peer.url, "-o", "1000"]
        command += ["-r", str(rate_per_s), "--test-duration", str(PERF_S), *options, topic]
        finished = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        rate, latency = _PERF_RATE.search(finished.stdout), _PERF_LATENCY.search(finished.stdout)
        if rate is None or latency is None:
            raise GuardError(f"pulsar-perf printed no totals:\n{finished.stdout[-2000:]}")
        p50, p99, p999 = map(float, latency.groups())
        return {"messages_per_s": float(rate[1]), "latency_ms_p50": p50, "latency_ms_p99": p99, "latency_ms_p999": p999}

    return run


def many_topics(count: int) -> Callable[[Peer], Figures]:
    """Return a load of so many topics, with one entry each: until all are served, twice, and the second time after SIGKILL."""

    def run(peer: Peer) -> Figures:
        topics = [f"persistent://public/default/many-{time.monotonic_ns()}-{number:05d}" for number in range(count)]
        created_s = load.run(publish_to_each(peer.url, topics, 200, 100, look_up=True))
        pss_mb = peer.pss_mb
        began = time.perf_counter()
        peer.restart()
        load.run(publish_to_each(peer.url, topics, 200, 100, look_up=True))
        return {"created_s": created_s, "restart_s": time.perf_counter() - began, "open_pss_mb": pss_mb}

    return run


def kafka_perf(*, records: int, rate_per_s: int = -1) -> Callable[[Peer], Figures]:
    return lambda peer: kafka.producer_perf(kafka.installed_jars(), records=records, rate_per_s=rate_per_s)(peer.url)


def rows(home: Path, topics: int) -> dict[str, Row]:
    latency = {"latency_ms_p50": False, "latency_ms_p99": False, "latency_ms_p999": False}
    return {
        "publish_single": Row(
            generator("publish_single", "--seconds", "8", rate="entries_per_s"), {"entries_per_s": True, "cpu_s_per_million": False}
        ),
        "publish_single_perf": Row(pulsar_perf(home, "-s", "1000", "-db"), {"messages_per_s": True}),
        "publish_large": Row(generator("publish_large", "--seconds", "4"), {"mb_per_s": True}),
        "publish_batched": Row(
            generator("publish_batched", "--seconds", "5", rate="messages_per_s"),
            {"messages_per_s": True, "cpu_s_per_million": False},
            fills_disk=True,
        ),
        "publish_batched_perf": Row(pulsar_perf(home, "-s", "100"), {"messages_per_s": True}, fills_disk=True),
        "publish_latency": Row(generator("publish_latency", "--seconds", "15"), latency),
        "tail_latency": Row(generator("tail_latency", "--seconds", "15"), latency),
        "catch_up": Row(
            generator("catch_up", "--gigabytes", "0.6", "--entry-bytes", "64000", "1000"),
            {"mb_per_s_1kb": True, "mb_per_s_64kb": True},
        ),
        "catch_up_small": Row(generator("catch_up", "--gigabytes", "0.05", "--entry-bytes", "100"), {"mb_per_s_100b": True}),
        "publish_beside_catch_up": Row(
            generator("publish_beside_catch_up", "--rounds", "1", "--entries", "300000"),
            {
                **{f"{name}_{size}": False for size in ("1000b", "100b") for name in ("p99_ratio", "beside_ms_p99")},
                **{f"consumed_entries_per_s_{size}": True for size in ("1000b", "100b")},
            },
        ),
        "many_topics": Row(many_topics(topics), {"created_s": False, "restart_s": False, "open_pss_mb": False}, fills_disk=True),
        "kafka": Row(
            pulsar_perf(home, "-s", "1000"), {"messages_per_s": True}, fills_disk=True, run_at_kafka=kafka_perf(records=100_000)
        ),
        "kafka_latency": Row(
            pulsar_perf(home, "-s", "1000", rate_per_s=5000), latency, run_at_kafka=kafka_perf(records=75_000, rate_per_s=5000)
        ),
    }


@contextlib.contextmanager
def ours(arguments: argparse.Namespace) -> Iterator[tuple[Peer, float]]:
    """A server of this tree, and the seconds until it took connections."""
    began = time.perf_counter()
    with Server(arguments) as server:
        started_s = time.perf_counter() - began
        assert server.pid is not None
        assert server.admin_url is not None

        def start_again() -> int:
            server.kill()
            server.start()
            assert server.pid is not None
            return server.pid

        yield Peer(server.url, server.admin_url, server.pid, start_again), started_s


@contextlib.contextmanager
def theirs(row: Row, home: Path) -> Iterator[tuple[Peer, float]]:
    """The peer, warmed up, and the seconds until it served: a topic of Pulsar, the port of Kafka."""
    began = time.perf_counter()
    if row.run_at_kafka is not None:
        with kafka.ApacheKafka(kafka.installed_jars()) as server:
            started_s = time.perf_counter() - began
            assert server.process is not None
            peer = Peer(server.url, "", server.process.pid, _no_restart)
            kafka_perf(records=50_000)(peer)
            yield peer, started_s
        return
    with ApachePulsar(home, memory=MEMORY, settings=dict(SETTINGS)) as pulsar:
        started_s = time.perf_counter() - began
        assert pulsar.process is not None

        def start_again() -> int:
            pulsar.kill()
            pulsar.start()
            assert pulsar.process is not None
            return pulsar.process.pid

        peer = Peer(pulsar.url, pulsar.admin_url, pulsar.process.pid, start_again)
        for name, *options in WARM_UP:
            generator(name, *options)(peer)
        yield peer, started_s


def _no_restart() -> int:
    raise NotImplementedError("no load restarts Kafka")


@dataclass(slots=True)
class Comparison:
    """What was measured of one load, ours first."""

    pairs: list[tuple[Figures, Figures]] = field(default_factory=list)
    start_s: tuple[float, float] = (0.0, 0.0)
    pss_mb: tuple[float, float] = (0.0, 0.0)


def measure(row: Row, arguments: argparse.Namespace, home: Path) -> Comparison:
    """Load both servers in turn. Raises GuardError."""
    found, numbers = Comparison(), range(arguments.pairs)
    for together in [range(number, number + 1) for number in numbers] if row.fills_disk else [numbers]:
        with ours(arguments) as (our, our_start_s), theirs(row, home) as (their, their_start_s):
            found.pairs += compare(row, our, their, together)
            found.start_s, found.pss_mb = (our_start_s, their_start_s), (our.pss_mb, their.pss_mb)
    return found


def compare(row: Row, our: Peer, their: Peer, numbers: range) -> list[tuple[Figures, Figures]]:
    """Return the figures of the pairs with these numbers, ours and theirs. Raises GuardError."""
    found, run_at_peer = [], row.run_at_kafka or row.run
    for pair in numbers:
        if pair % 2:
            theirs_first = run_at_peer(their)
            found.append((row.run(our), theirs_first))
        else:
            ours_first = row.run(our)
            found.append((ours_first, run_at_peer(their)))
    return found


def print_figure(load: str, row: Row, name: str, found: Comparison) -> None:
    """One line: the medians, and ours over theirs of each pair, whichever of the two is better."""
    ours, theirs = ([float(pair[side][name]) for pair in found.pairs] for side in (0, 1))
    verdict = judge([our / their for our, their in zip(ours, theirs, strict=True)])
    line = {
        "load": load,
        "figure": name,
        "better": "higher" if row.figures[name] else "lower",
        "cepheid": round(percentile(ours, 0.5), 2),
        row.peer: round(percentile(theirs, 0.5), 2),
        "ratio": round(verdict.median, 3),
        "interval": [round(verdict.low, 3), round(verdict.high, 3)],
    }
    print(json.dumps(line), flush=True)


def why_no_kafka() -> str:
    """Return what is missing; empty if Kafka is installed."""
    try:
        kafka.installed_jars()
    except NotInstalledError as error:
        return str(error)
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    add_arguments(parser)
    parser.add_argument("names", nargs="?", default="all", help="all, or names of loads, separated by commas")
    parser.add_argument("--pairs", type=int, default=FEWEST_PAIRS)
    parser.add_argument("--topics", type=int, default=10_000, help="of the load many_topics")
    arguments = parser.parse_args()
    try:
        home = installed_home()
    except NotInstalledError as error:
        print(f"nothing is compared: {error}", file=sys.stderr)
        return 0
    table = rows(home, arguments.topics)
    names = list(table) if arguments.names == "all" else arguments.names.split(",")
    if unknown := [name for name in names if name not in table]:
        parser.error(f"no load {', '.join(unknown)}; there are {', '.join(table)}")
    if arguments.pairs < FEWEST_PAIRS:
        parser.error(f"--pairs: {FEWEST_PAIRS} are the fewest")
    try:
        for name in names:
            row = table[name]
            if row.run_at_kafka is not None and (missing := why_no_kafka()):
                print(f"{name} is not compared: {missing}", file=sys.stderr)
                continue
            found = measure(row, arguments, home)
            for figure in row.figures:
                print_figure(name, row, figure, found)
            line: dict[str, object] = {"load": name}
            for figure, digits, (our, their) in (("start_s", 2, found.start_s), ("pss_mb", 0, found.pss_mb)):
                line[figure] = {"cepheid": round(our, digits), row.peer: round(their, digits)}
            print(json.dumps(line), flush=True)
        print(json.dumps({"pulsar_version": VERSION, "kafka_version": kafka.VERSION, "machine": machine()}), flush=True)
    except (GuardError, RuntimeError) as error:
        print(f"peers: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
