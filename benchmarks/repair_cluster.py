"""What the benchmarks of automatic repair share: ledgers that a bookie has copies of, its death, and how far the repair is.

write_ledgers ──► every ledger names bookie-1 ──► SIGKILL ──► RepairMeter.watch ──► no record names it any more
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import time
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import cluster as clusters
from benchmarks import load
from benchmarks.cluster import Cluster
from benchmarks.server import ServerFailedError
from cepheid_dev.zookeeper_server import ZooKeeperServer

VICTIM = "bookie-1"
GROUP_BYTES = 1 << 20
IN_FLIGHT_BYTES = 2 << 20
WAITING_BYTES = 32 << 20  # for one bookie: one that lags by far more is dropped, and repaired during the measurement
WRITE_TIMEOUT_S = 60.0  # a busy machine must not cost a ledger one of its copies before the measurement begins
SAMPLE_S = 0.1
IDLE_CORES = 0.1
HERE = "127.0.0.1"

COPIED_BYTES = "cepheid_repair_copied_bytes_total"
REPAIRED = "cepheid_repair_repaired_ledgers_total"
WALKED = "cepheid_repair_walked_ledgers_total"
WALKS = "cepheid_repair_walks_total"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    clusters.add_arguments(parser, bookies=4)
    parser.add_argument("--entry-bytes", type=int, default=64 << 10)
    parser.add_argument("--limit-s", type=float, default=300.0, help="a repair that takes longer has failed")


def repairing_cluster(arguments: argparse.Namespace) -> Cluster:
    """Return a cluster whose repair starts as soon as a bookie's session ends."""
    return Cluster(arguments, {"bookie": {"recovery": {"grace_s": 0.0}}})


@dataclass(frozen=True, slots=True)
class LedgerShape:
    """So many ledgers, each of so many entries of `entry_bytes`, with E 3, Qw 3, Qa 2."""

    ledgers: int
    entries: int
    entry_bytes: int

    @property
    def size_bytes(self) -> int:
        """Payload bytes that each of the three bookies of every ledger gets, in all."""
        return self.ledgers * self.entries * self.entry_bytes


def shape_of(size_bytes: float, ledgers: int, entry_bytes: int) -> LedgerShape:
    return LedgerShape(ledgers, max(1, round(size_bytes / ledgers / entry_bytes)), entry_bytes)


# Writing


def write_ledgers(cluster: Cluster, shape: LedgerShape, *, at_once: int = 8) -> None:
    """Write and close ledgers that all have a copy on the victim, and wait until the bookies have flushed them."""
    write_ledgers_on(cluster.processes.metadata_url, shape, cluster.view.writable_bookies(), at_once=at_once)
    wait_idle(cluster)


def write_ledgers_on(metadata_url: str, shape: LedgerShape, bookies: Sequence[str], *, at_once: int = 8) -> list[int]:
    """Write and close ledgers on the victim and two of the others in turn; return their ids."""
    return load.run(_write(metadata_url, shape, bookies, at_once))


async def _write(metadata_url: str, shape: LedgerShape, bookies: Sequence[str], at_once: int) -> list[int]:
    others = itertools.cycle(itertools.combinations([name for name in bookies if name != VICTIM], 2))
    async with ledger_client(metadata_url, lambda: [VICTIM, *next(others)]) as client:
        left = iter(range(shape.ledgers))
        written: list[int] = []

        async def write_in_turn() -> None:
            for _ in left:
                ledger_id = await _write_one(client, shape)
                written.append(ledger_id)

        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(write_in_turn())
        await _until_waiting(client, 0)  # a close waits for two of three copies
    return written


async def _until_waiting(client: Any, most_bytes: int) -> None:
    """Wait until no bookie has more than so many bytes to acknowledge."""
    while max((channel.waiting_bytes for channel in client.statistics().values()), default=0) > most_bytes:  # noqa: ASYNC110 - the channels tell nobody
        await asyncio.sleep(0.01)


async def _write_one(client: Any, shape: LedgerShape) -> int:
    writer = await client.create(ensemble_size=3, write_quorum=3, ack_quorum=2, custom={})
    payloads = [bytes(shape.entry_bytes)] * min(shape.entries, max(1, GROUP_BYTES // shape.entry_bytes))
    moved = asyncio.Event()
    failures: list[Exception] = []

    def on_done(outcome: Any) -> None:
        if isinstance(outcome, Exception):
            failures.append(outcome)
        moved.set()

    while writer.last_add_confirmed < shape.entries - 1:
        while writer.last_add_pushed < shape.entries - 1 and writer.in_flight_bytes < IN_FLIGHT_BYTES:
            writer.append(payloads[: shape.entries - 1 - writer.last_add_pushed], on_done)
        await moved.wait()
        moved.clear()
        await _until_waiting(client, WAITING_BYTES)
        if failures:
            raise ServerFailedError(f"ledger {writer.ledger_id} could not be written: {failures[0]}")
    await writer.close()
    return int(writer.ledger_id)


@asynccontextmanager
async def ledger_client(metadata_url: str, available: Any) -> AsyncIterator[Any]:
    """A ledger client whose new ledgers are on the bookies that `available` returns."""
    from cepheid_ledger import LedgerClient, LedgerSettings, RackAwarePlacement
    from cepheid_ledger.bookie_directory import BookieDirectory
    from cepheid_metadata import LedgerIds, ledger_records
    from cepheid_metadata.open_store import open_store
    from cepheid_ports import Ports

    ports = Ports()
    store = await open_store(metadata_url, ports)
    directory = BookieDirectory(store, ports)
    await directory.start()
    placement = RackAwarePlacement(available, ports.random)
    # No second replica is asked because this process got no processor time: what it reads would be read twice.
    settings = LedgerSettings(
        add_timeout_s=WRITE_TIMEOUT_S,
        refusal_retry_s=WRITE_TIMEOUT_S,
        speculative_read_s=WRITE_TIMEOUT_S,
        read_timeout_s=WRITE_TIMEOUT_S,
    )
    client = LedgerClient(directory, ledger_records(store), LedgerIds(store), placement, settings, ports)
    try:
        yield client
    finally:
        await client.aclose()
        await directory.aclose()
        await store.aclose()


def wait_idle(cluster: Cluster) -> None:
    """Wait until no bookie flushes or collects any more, as a cluster that nobody writes to."""
    names = [name for name in cluster.processes.names() if name.startswith("bookie")]
    used_s = sum(map(cluster.cpu_of_s, names))

    def is_idle() -> bool:
        nonlocal used_s
        time.sleep(1.0 - clusters.POLL_S)
        before_s, used_s = used_s, sum(map(cluster.cpu_of_s, names))
        return used_s - before_s < IDLE_CORES * len(names)

    cluster.wait_until(is_idle, "bookies are idle after the ledgers were written")


# Watching


@dataclass(frozen=True, slots=True)
class Repair:
    """How a repair went. Times are seconds after the kill."""

    first_copy_s: float
    last_copy_s: float
    whole_s: float
    copied_bytes: float
    cpu_s: float
    """Processor time of the bookies, which copy, since the kill."""
    began_at: float
    """The clock of `time.perf_counter` at the kill."""

    @property
    def copying_s(self) -> float:
        return self.last_copy_s - self.first_copy_s

    @property
    def mb_per_s(self) -> float:
        return self.copied_bytes / 1e6 / self.copying_s


class RepairMeter:
    """Reads the counters of all bookies but the victim."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.own_requests = 0
        """Metadata requests of this meter itself."""

    def total(self, *names: str) -> list[float]:
        """Return the sums of counters over these bookies."""
        sums = dict.fromkeys(names, 0.0)
        for process in self._cluster.processes.status():
            if process.kind == "bookie" and process.name != VICTIM:
                with urllib.request.urlopen(f"http://{HERE}:{process.ports['http']}/metrics", timeout=10) as answer:
                    for line in answer.read().decode().splitlines():
                        name, _, value = line.partition(" ")
                        if name in sums:
                            sums[name] += float(value)
        return list(sums.values())

    def cpu_s(self) -> float:
        """Return the processor time that these bookies have used."""
        names = [name for name in self._cluster.processes.bookie_ports if name != VICTIM]
        return sum(map(self._cluster.cpu_of_s, names))

    def watch(self, ledgers: int, limit_s: float, began_at: float) -> Repair:
        """Return when so many ledgers are repaired. Raises ServerFailedError when that takes too long.

        A ledger can be repaired twice: on a loaded machine another bookie may miss its session for a moment, and its ledgers are
        marked as well. So the counters say when to look, and metadata says whether everything is whole.
        """
        first_s = last_s = 0.0
        copied = repaired = 0.0
        cpu_before_s = self.cpu_s()
        before_s = time.perf_counter() - began_at
        unfinished: list[str] | None = None
        while unfinished is None or unfinished:
            now_copied, repaired = self.total(COPIED_BYTES, REPAIRED)
            now_s = time.perf_counter() - began_at
            if now_copied > copied:
                first_s = first_s or before_s
                last_s, copied = now_s, now_copied
            if now_s > limit_s:
                left = f"; not whole: {unfinished[:5]}" if unfinished else ""
                raise ServerFailedError(f"{repaired:.0f} of {ledgers} ledgers are repaired after {limit_s:g} s{left}")
            before_s = now_s
            if repaired >= ledgers:
                unfinished, requests = load.run(_unfinished(self._cluster.processes.metadata_url))
                self.own_requests += requests
            else:
                time.sleep(SAMPLE_S)
        whole_s = time.perf_counter() - began_at
        cpu_s = self.cpu_s() - cpu_before_s
        return Repair(first_s, last_s, whole_s, copied, cpu_s, began_at)


async def _unfinished(metadata_url: str) -> tuple[list[str], int]:
    """Name the closed ledgers that are marked, or whose record names the victim, and count the metadata requests for that.

    Open ledgers belong to brokers.
    """
    from cepheid_metadata import ledger_records, list_ledgers, list_repair_marks, repair_marks
    from cepheid_metadata.open_store import open_store
    from cepheid_ports import Ports

    store = await open_store(metadata_url, Ports())
    try:
        marked = {ledger_id async for ledger_id in list_repair_marks(store)}
        ledger_ids = [ledger_id async for ledger_id in list_ledgers(store)]
        found = []
        for start in range(0, len(ledger_ids), 100):
            found += await asyncio.gather(*map(ledger_records(store).get, ledger_ids[start : start + 100]))
        closed = [one.record for one in found if one is not None and one.record.is_closed]
        unfinished = [ledger.ledger_id for ledger in closed if ledger.ledger_id in marked or _names_victim(ledger)]
        marks = await asyncio.gather(*map(repair_marks(store).get, unfinished[:5]))
        requests = len(ledger_ids) + len(marks)  # listing asks for few more
        reasons = [f" ({dict(mark.record.bookies)} {mark.record.problem})" if mark is not None else "" for mark in marks]
        return [f"{ledger_id}{reason}" for ledger_id, reason in itertools.zip_longest(unfinished, reasons, fillvalue="")], requests
    finally:
        await store.aclose()


def _names_victim(ledger: Any) -> bool:
    return any(VICTIM in fragment.ensemble for fragment in ledger.fragments)


def metadata_requests(cluster: Cluster) -> int:
    """Return how many packets ZooKeeper has received from all its clients."""
    (member,) = [process for process in cluster.processes.status() if process.kind == "zookeeper"]
    answer = ZooKeeperServer(cluster.root / member.name, member.ports["client"], pid=member.pid).ask("mntr") or ""
    for line in answer.splitlines():
        name, _, value = line.partition("\t")
        if name == "zk_packets_received":
            return int(value)
    raise ServerFailedError(f"ZooKeeper did not say how many packets it received: {answer[:200]!r}")


def peak_rss_mb(cluster: Cluster, name: str) -> float:
    """Return the most memory that a process has had resident (MB = 10^6 bytes)."""
    for line in Path(f"/proc/{cluster.processes.pid(name)}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise ServerFailedError(f"{name} has no memory: it has ended")


def load_average() -> float:
    """Return the machine's load in the last minute, before a benchmark adds its own."""
    return round(os.getloadavg()[0], 1)
