"""The steps of `cepheid demo-spark`.

ZooKeeper, 3 bookies (E=3 Qw=3 Qa=2) and a broker run as processes
  ├─ half of the flights is published ──────────────── several closed ledgers
  ├─ streaming query ── SIGKILL ── restart on its checkpoint      (the other half is published meanwhile)
  └─ batch query ── its result written to a topic ── the query as 64 tasks ── SIGKILL of a bookie when a quarter of them is done
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

import cepheid.admin.sync
from cepheid_dev.local_cluster import LocalCluster
from cepheid_spark.java_check import find_java
from examples.flight_data import FlightEvent, load_flights
from examples.flights_spark import checks
from examples.flights_spark.batch_driver import delays_topic
from examples.flights_spark.checks import StreamSeen
from examples.flights_spark.driver_process import DriverProcess
from examples.flights_spark.expected import Expected, expect
from examples.flights_spark.figures import DemoFigures
from examples.flights_spark.flight_schema import COLUMNS
from examples.flights_spark.plots import plot_all
from examples.flights_spark.publisher import FlightPublisher
from examples.progress import wait_while_moving
from examples.report import Check, print_report

TOPIC = "persistent://public/default/flights"
VICTIM = "bookie-2"
EVENT_BYTES = 75  # an event in Avro, with its share of the batch's metadata
LEDGERS = 8
LEAST_LEDGER_BYTES = 64 << 10  # about two full batches
FIRST_PART = 0.5
PACED_S = 15.0  # publishing the second half takes this long, besides waiting at its gates
GATES = (0.4, 0.85)  # shares of the second half after which publishing waits: for the kill, and for the restarted query
KILL_AFTER_BATCHES = 2
TRIGGERS = 16  # number of micro-batches that the whole topic would take
QUIET_S = 2.0
STALL_S = 300.0


@dataclass(frozen=True, slots=True)
class DemoOptions:
    data_dir: Path
    limit: int | None = None  # 5,000 or more, because fewer do not fill several ledgers of LEAST_LEDGER_BYTES


def run_demo_spark(options: DemoOptions, console: Console) -> bool:
    """Run the demo to its end and print the report. Returns True when every check held."""
    find_java()
    events, expected = load_flights(options.limit), expect(options.limit)
    directory = options.data_dir.absolute()
    cluster = LocalCluster(directory / "cluster")
    if cluster.exists:  # from an earlier demo, which may have been killed
        cluster.down()
    for own in ("cluster", "spark"):  # nothing else in `data_dir`, which may have other files of the user
        shutil.rmtree(directory / own, ignore_errors=True)
    (directory / "spark").mkdir(parents=True)
    console.print(f"{len(events):,} flights; data, logs and pictures in {options.data_dir}")
    ledger_max_bytes = max(LEAST_LEDGER_BYTES, len(events) * EVENT_BYTES // LEDGERS)
    try:
        cluster.up(bookies=3, brokers=1, settings={"broker": {"managed_ledger": {"ledger_max_bytes": ledger_max_bytes}}})
        console.print(f"cluster of ZooKeeper, 3 bookies (E=3 Qw=3 Qa=2) and a broker on {cluster.service_url}", soft_wrap=True)
        return _Demo(events, expected, cluster, directory, console).run()
    finally:
        cluster.down()


class _Demo:
    def __init__(
        self, events: list[FlightEvent], expected: Expected, cluster: LocalCluster, directory: Path, console: Console
    ) -> None:
        self._events = events
        self._expected = expected
        self._cluster = cluster
        self._directory = directory
        self._spark = directory / "spark"
        self._console = console
        self._seen = StreamSeen()
        self._checks: list[Check] = []
        self._started_s = time.monotonic()

    def run(self) -> bool:
        admin = cepheid.admin.sync.connect(self._cluster.admin_urls[0])
        # No subscription retains the flights until the query starts, so retention must.
        admin.namespaces.set_retention("public/default", {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1})
        publisher = FlightPublisher(self._cluster.service_url, TOPIC, self._spark / "client.log")
        try:
            published_s = self._publish_first_part(publisher)
            self._run_stream(publisher, admin)
        finally:
            publisher.close()
        # Looked up before a bookie is killed: with two bookies left the open ledger cannot stay open.
        closed, open_entries, stored_bytes = self._ledgers(admin)
        admin.topics.create(delays_topic(TOPIC))
        admin.topics.set_deduplication_enabled(delays_topic(TOPIC), True)  # writing exactly once needs it
        batch = self._run_batch()
        kill = batch["kill"]
        delays = self._expected.delays
        promise = "mean delays per carrier and hour equal the source file's"
        self._checks += [
            checks.check_published(self._expected, publisher.receipts, publisher.errors),
            checks.check_ledgers(closed, open_entries),
            checks.check_columns(batch["columns"], COLUMNS),
            checks.check_delays(promise, batch["delays"], delays),
            checks.check_delays("they are written to a topic once, as the official client sees", batch["delays_received"], delays),
            *checks.check_stream(self._seen, self._expected),
            checks.check_kill(kill, self._cluster.pid(VICTIM) is None, self._failovers()),
            checks.check_delays(f"{promise}, also with a bookie killed", batch["delays_while_killed"], delays),
        ]
        pictures = plot_all(self._directory, batch["delays"], self._seen, kill)
        figures = DemoFigures(
            events=len(self._events),
            stored_bytes=stored_bytes,
            closed_ledgers=closed,
            first_part_per_s=len(self._first_part) / published_s,
            batch=batch,
            stream=self._seen,
            progress=_lines(self._spark / "progress.jsonl"),
        )
        title = f"Measured (Spark {batch['spark']}, everything on this machine)"
        all_held = print_report(self._console, title, figures.rows(), self._checks)
        for path in pictures:
            self._console.print(f"picture: {path}", highlight=False, soft_wrap=True)
        return all_held

    @property
    def _first_part(self) -> list[FlightEvent]:
        return self._events[: int(FIRST_PART * len(self._events))]

    def _publish_first_part(self, publisher: FlightPublisher) -> float:
        started = time.monotonic()
        publisher.publish(self._first_part)
        self._console.print(f"{len(self._first_part):,} flights published with their Avro schema")
        return time.monotonic() - started

    def _run_stream(self, publisher: FlightPublisher, admin: cepheid.admin.sync.Admin) -> None:
        rest = self._events[len(self._first_part) :]
        at_once, killed, back = threading.Event(), threading.Event(), threading.Event()
        first, second = (int(share * len(rest)) for share in GATES)
        parts = [(at_once, rest[:first]), (killed, rest[first:second]), (back, rest[second:])]
        self._started_s = time.monotonic()
        driver = self._start_stream()
        at_once.set()
        thread = publisher.start_paced(parts, len(rest) / PACED_S)
        try:
            self._watch(publisher, driver, lambda: self._batch_id() >= KILL_AFTER_BATCHES - 1)
            self._kill_stream(publisher, driver)
            killed.set()
            driver = self._start_stream()
            self._watch(publisher, driver, lambda: self._batch_id() > self._seen.batch_at_kill)
            self._seen.back_at_s = time.monotonic() - self._started_s
            self._seen.published_at_restart = publisher.receipts
            self._watch(publisher, driver, lambda: publisher.receipts >= len(self._first_part) + second)
            # Unloading closes the ledger, so that the rest is in a new one, which is still open at the end.
            admin.topics.unload("persistent://public/default/flights")
            back.set()
            self._watch(publisher, driver, lambda: not thread.is_alive() and self._counted() >= len(self._events))
            quiet_until = time.monotonic() + QUIET_S  # an event that is delivered twice would be counted by then
            self._watch(publisher, driver, lambda: time.monotonic() > quiet_until)
            (self._spark / "stop").touch()
            driver.wait(STALL_S)
        finally:
            killed.set()
            back.set()
            driver.kill()
        thread.join(STALL_S)
        self._seen.totals = self._totals().get("totals", {})
        progress = _lines(self._spark / "progress.jsonl")
        self._seen.first_batch_after = min(
            (line["batchId"] for line in progress if line["runId"] == progress[-1]["runId"]), default=-1
        )
        self._console.print(f"the streaming query ended with {self._counted():,} events counted")

    def _start_stream(self) -> DriverProcess:
        bytes_per_trigger = len(self._events) * EVENT_BYTES // TRIGGERS
        arguments = [self._cluster.service_url, TOPIC, str(self._spark), str(bytes_per_trigger)]
        return DriverProcess("stream_driver", arguments, self._spark / "stream.log")

    def _kill_stream(self, publisher: FlightPublisher, driver: DriverProcess) -> None:
        seen = self._seen
        seen.published_at_kill = publisher.receipts
        seen.killed_at_s = time.monotonic() - self._started_s
        seen.exit_code = driver.kill()
        seen.batch_at_kill, seen.counted_at_kill = self._batch_id(), self._counted()
        self._console.print(
            f"[bold red]SIGKILL[/] of the streaming query's driver and JVM after {seen.counted_at_kill:,} events; "
            "starting it again on its checkpoint"
        )

    def _watch(self, publisher: FlightPublisher, driver: DriverProcess, condition: Callable[[], bool]) -> None:
        """Wait for `condition` and record how many events are published and counted.

        Raises the error of the publisher or the driver.
        """

        def progress() -> str:
            now_s, counted = time.monotonic() - self._started_s, self._counted()
            self._seen.published.append((now_s, publisher.receipts))
            self._seen.counted.append((now_s, counted))
            publisher.check_errors()
            driver.check_alive()
            return f"{publisher.receipts:,} published and {counted:,} counted events"

        wait_while_moving(condition, progress, stall_s=STALL_S, logs=self._spark)

    def _totals(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self._spark / "totals.json").read_text())
            return found
        except FileNotFoundError:
            return {}

    def _batch_id(self) -> int:
        return int(self._totals().get("batch_id", -1))

    def _counted(self) -> int:
        return sum(totals["events"] for totals in self._totals().get("totals", {}).values())

    def _run_batch(self) -> dict[str, Any]:
        self._console.print(f"batch queries, with [bold red]SIGKILL[/] of {VICTIM} during the last")
        arguments = [self._cluster.service_url, TOPIC, str(self._spark), str(self._cluster.directory), VICTIM]
        driver = DriverProcess("batch_driver", arguments, self._spark / "batch.log")
        try:
            driver.wait(STALL_S)
        finally:
            driver.kill()
        found: dict[str, Any] = json.loads((self._spark / "batch.json").read_text())
        return found

    def _failovers(self) -> int:
        """Return how often a scan moved from the killed bookie to another one, according to warnings in the log."""
        return (self._spark / "batch.log").read_text(errors="replace").count(f"scan.replica_failed: bookie {VICTIM} ")

    def _ledgers(self, admin: cepheid.admin.sync.Admin) -> tuple[int, int, int]:
        """Return the number of closed ledgers, the entries in the open one, and the bytes in all of them."""
        (plan,) = admin.topics.plan(topic=TOPIC)["plans"]
        closed = [ledger for ledger in plan["ledgers"] if ledger["entries"] is not None]
        open_entries = [ledger["last_entry_id"] + 1 for ledger in plan["ledgers"] if ledger["entries"] is None]
        return len(closed), sum(open_entries), sum(ledger.get("size_bytes") or 0 for ledger in plan["ledgers"])


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
