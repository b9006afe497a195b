"""`python -m benchmarks.peers [NAME,NAME]`: Cepheid and Apache Pulsar side by side, the same loads at both, in turn.

    Cepheid, standalone ───────┐
                               ├─► ours theirs │ theirs ours │ … ──► the ratio of each pair, its median and 90 % interval
    Apache Pulsar, standalone ─┘

Both run all the time, started anew for each load, and wait for fsync before they acknowledge (`journalSyncData=true` with Pulsar,
whose shipped settings do not). Pulsar is warmed up first: a JVM is slow for its first ten seconds. What is idle at a moment takes
some processor time from the other, a JVM more than we do. Memory is PSS: Pulsar's collector maps its heap several times.

The rows with `perf` load both by pulsar-perf, the load generator of Pulsar, which uses more than a core itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.guard import FEWEST_PAIRS, GuardError, judge
from benchmarks.report import machine, percentile
from benchmarks.server import Server, add_arguments
from tests.apache_pulsar import VERSION, ApachePulsar, NotInstalledError, installed_home

ROOT = Path(__file__).parent.parent
MEMORY = "-Xms2g -Xmx2g -XX:MaxDirectMemorySize=2g"
SETTINGS = {"diskUsageThreshold": 0.99, "diskUsageWarnThreshold": 0.99, "diskUsageLwmThreshold": 0.99}
"""It would stop writing at 0.95 of a disk, which others fill as well."""
WARM_UP = ("publish_batched", "--seconds", "15"), ("publish_single", "--seconds", "10")
PERF_S = 20
_PERF_RATE = re.compile(r"Aggregated throughput stats --- \d+ records sent --- ([\d.]+) msg/s")


@dataclass(frozen=True, slots=True)
class Peer:
    """A server that runs."""

    url: str
    admin_url: str
    pid: int

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


def pulsar_perf(home: Path, *options: str) -> Callable[[Peer], Figures]:
    def run(peer: Peer) -> Figures:
        topic = f"persistent://public/default/perf-{time.monotonic_ns()}"
        command = [str(home / "bin" / "pulsar-perf"), "produce", "--service-url", peer.url, "-r", "2000000", "-o", "1000"]
        command += ["--test-duration", str(PERF_S), *options, topic]
        finished = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        found = _PERF_RATE.search(finished.stdout)
        if found is None:
            raise GuardError(f"pulsar-perf said no rate:\n{finished.stdout[-2000:]}")
        return {"messages_per_s": float(found[1])}

    return run


def rows(home: Path) -> dict[str, Row]:
    latency = {"latency_ms_p50": False, "latency_ms_p99": False, "latency_ms_p999": False}
    return {
        "publish_single": Row(
            generator("publish_single", "--seconds", "8", rate="entries_per_s"), {"entries_per_s": True, "cpu_s_per_million": False}
        ),
        "publish_single_perf": Row(pulsar_perf(home, "-s", "1000", "-db"), {"messages_per_s": True}),
        "publish_large": Row(generator("publish_large", "--seconds", "4"), {"mb_per_s": True}),
        "publish_batched": Row(
            generator("publish_batched", "--seconds", "8", rate="messages_per_s"),
            {"messages_per_s": True, "cpu_s_per_million": False},
        ),
        "publish_batched_perf": Row(pulsar_perf(home, "-s", "100"), {"messages_per_s": True}),
        "publish_latency": Row(generator("publish_latency", "--seconds", "15"), latency),
        "tail_latency": Row(generator("tail_latency", "--seconds", "15"), latency),
        "catch_up": Row(
            generator("catch_up", "--gigabytes", "0.6", "--entry-bytes", "64000", "1000"),
            {"mb_per_s_1kb": True, "mb_per_s_64kb": True},
        ),
        "publish_beside_catch_up": Row(
            generator("publish_beside_catch_up", "--rounds", "1", "--entries", "300000"),
            {"p99_ratio_1000b": False, "p99_ratio_100b": False, "beside_ms_p99_1000b": False, "beside_ms_p99_100b": False},
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
        yield Peer(server.url, server.admin_url, server.pid), started_s


@contextlib.contextmanager
def theirs(home: Path) -> Iterator[tuple[Peer, float]]:
    """An Apache Pulsar, and the seconds until it served its first namespace."""
    began = time.perf_counter()
    with ApachePulsar(home, memory=MEMORY, settings=dict(SETTINGS)) as pulsar:
        started_s = time.perf_counter() - began
        assert pulsar.process is not None
        yield Peer(pulsar.url, pulsar.admin_url, pulsar.process.pid), started_s


def compare(row: Row, our: Peer, their: Peer, pairs: int) -> list[tuple[Figures, Figures]]:
    """Return the figures of each pair, ours and theirs. Raises GuardError."""
    found = []
    for pair in range(pairs):
        if pair % 2:
            theirs_first = row.run(their)
            found.append((row.run(our), theirs_first))
        else:
            ours_first = row.run(our)
            found.append((ours_first, row.run(their)))
    return found


def print_figure(load: str, name: str, ours: Sequence[float], theirs: Sequence[float], *, higher_is_better: bool) -> None:
    """One line: the medians, and ours over theirs of each pair, whichever of the two is better."""
    verdict = judge([our / their for our, their in zip(ours, theirs, strict=True)])
    line = {
        "load": load,
        "figure": name,
        "better": "higher" if higher_is_better else "lower",
        "cepheid": round(percentile(ours, 0.5), 2),
        "pulsar": round(percentile(theirs, 0.5), 2),
        "ratio": round(verdict.median, 3),
        "interval": [round(verdict.low, 3), round(verdict.high, 3)],
    }
    print(json.dumps(line), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    add_arguments(parser)
    parser.add_argument("names", nargs="?", default="all", help="all, or names of loads, separated by commas")
    parser.add_argument("--pairs", type=int, default=FEWEST_PAIRS)
    arguments = parser.parse_args()
    try:
        home = installed_home()
    except NotInstalledError as error:
        print(f"nothing is compared: {error}", file=sys.stderr)
        return 0
    table = rows(home)
    names = list(table) if arguments.names == "all" else arguments.names.split(",")
    if unknown := [name for name in names if name not in table]:
        parser.error(f"no load {', '.join(unknown)}; there are {', '.join(table)}")
    if arguments.pairs < FEWEST_PAIRS:
        parser.error(f"--pairs: {FEWEST_PAIRS} are the fewest")
    try:
        for name in names:  # with new servers and empty directories: a load writes up to 10 GB
            with ours(arguments) as (our, our_start_s), theirs(home) as (their, their_start_s):
                for warm_up, *options in WARM_UP:
                    generator(warm_up, *options)(their)
                found = compare(table[name], our, their, arguments.pairs)
                memory = {"cepheid": round(our.pss_mb), "pulsar": round(their.pss_mb)}
            for figure, higher in table[name].figures.items():
                our_figures, their_figures = ([float(pair[side][figure]) for pair in found] for side in (0, 1))
                print_figure(name, figure, our_figures, their_figures, higher_is_better=higher)
            starts = {"cepheid": round(our_start_s, 2), "pulsar": round(their_start_s, 2)}
            print(json.dumps({"load": name, "start_s": starts, "pss_mb": memory}), flush=True)
        print(json.dumps({"pulsar_version": VERSION, "machine": machine()}), flush=True)
    except GuardError as error:
        print(f"peers: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
