"""`cepheid demo-spark`: the year's flights as DataFrames, while a driver and a bookie are killed.

 ZooKeeper, 3 bookies (E=3 Qw=3 Qa=2), a broker: processes of their own
   │
   ├─ half of the flights published ─────────────── several closed ledgers
   ├─ streaming query ── SIGKILL ── again, from its checkpoint     the other half arrives all the while
   └─ batch query ── the same again as 64 tasks ── SIGKILL of a bookie in the middle

What is counted is compared with the source file (`expected`), and everything promised is judged by `checks`.
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

from cepheid_cli.admin_client import AdminClient
from cepheid_cli.demo.checks import Check
from cepheid_cli.demo.flights import FlightEvent, load_flights
from cepheid_cli.demo_spark import checks
from cepheid_cli.demo_spark.checks import StreamSeen
from cepheid_cli.demo_spark.driver_process import DriverProcess
from cepheid_cli.demo_spark.expected import Expected, expect
from cepheid_cli.demo_spark.flight_schema import COLUMNS
from cepheid_cli.demo_spark.plots import plot_all
from cepheid_cli.demo_spark.publisher import FlightPublisher
from cepheid_cli.demo_spark.report import DemoFigures, print_report
from cepheid_dev.local_cluster import LocalCluster
from cepheid_ports import CepheidError

TOPIC = "persistent://public/default/flights"
VICTIM = "bookie-2"
EVENT_BYTES = 75  # of Avro, with what a batch adds per message
LEDGERS = 8
FIRST_PART = 0.5
PACED_S = 15.0  # the second half takes so long, besides what it waits
PARTS = (0.4, 0.85)  # of the second half: what comes before the kill, and by when the query must be back for the rest
KILL_AFTER_BATCHES = 2
TRIGGERS = 16  # micro-batches that the whole topic would take
QUIET_S = 2.0
STALL_S = 300.0
_POLL_S = 0.1


class DemoStalledError(CepheidError):
    """Nothing moved for a long time."""

    hint = "the logs in the demo's directory may say why"


@dataclass(frozen=True, slots=True)
class DemoOptions:
    data_dir: Path
    limit: int | None = None  # 5,000 at least: fewer do not fill ledgers of the least size


def run_demo_spark(options: DemoOptions, console: Console) -> bool:
    """Runs the demo to its end and prints the account; True when every check held."""
    from cepheid_spark.java_check import find_java

    find_java()
    events, expected = load_flights(options.limit), expect(options.limit)
    directory = options.data_dir.absolute()
    cluster = LocalCluster(directory / "cluster")
    if cluster.exists:  # an earlier demo's
        cluster.down()
    for own in ("cluster", "spark"):  # the demo's own only: `--data` may be somebody's directory
        shutil.rmtree(directory / own, ignore_errors=True)
    (directory / "spark").mkdir(parents=True)
    console.print(f"{len(events):,} flights; data, logs and pictures in {options.data_dir}")
    ledger_max_bytes = max(64 << 10, len(events) * EVENT_BYTES // LEDGERS)
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
        admin = AdminClient(self._cluster.admin_urls[0])
        # Nothing else holds the flights before the query comes: no subscription reads them.
        admin.post("/admin/v2/namespaces/public/default/retention", {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1})
        publisher = FlightPublisher(self._cluster.service_url, TOPIC, self._spark / "client.log")
        try:
            published_s = self._publish_first_part(publisher)
            self._run_stream(publisher, admin)
        finally:
            publisher.close()
        # Before a bookie is killed: without it the ledger that is open then cannot stay so.
        closed, open_entries, stored_bytes = self._ledgers(admin)
        batch = self._run_batch()
        kill = batch["kill"]
        promise = "mean departure delays by carrier and hour equal those of the source file"
        self._checks += [
            checks.check_published(self._expected, publisher.receipts, publisher.errors),
            checks.check_ledgers(closed, open_entries),
            checks.check_columns(batch["columns"], COLUMNS),
            checks.check_delays(promise, batch["delays"], self._expected.delays),
            *checks.check_stream(self._seen, self._expected),
            checks.check_kill(kill, self._cluster.pid(VICTIM) is None, self._failovers()),
            checks.check_delays(f"{promise}, with the bookie killed", batch["delays_while_killed"], self._expected.delays),
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
        return print_report(self._console, self._checks, figures, pictures)

    @property
    def _first_part(self) -> list[FlightEvent]:
        return self._events[: int(FIRST_PART * len(self._events))]

    def _publish_first_part(self, publisher: FlightPublisher) -> float:
        started = time.monotonic()
        publisher.publish(self._first_part)
        self._console.print(f"{len(self._first_part):,} flights published with their Avro schema")
        return time.monotonic() - started

    def _run_stream(self, publisher: FlightPublisher, admin: AdminClient) -> None:
        rest = self._events[len(self._first_part) :]
        at_once, killed, back = threading.Event(), threading.Event(), threading.Event()
        first, second = (int(share * len(rest)) for share in PARTS)
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
            admin.put("/admin/v2/persistent/public/default/flights/unload", None)  # the rest then is in the open ledger, and fits
            back.set()
            self._watch(publisher, driver, lambda: not thread.is_alive() and self._counted() >= len(self._events))
            quiet_until = time.monotonic() + QUIET_S  # something that came twice would be counted now
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
        self._console.print(f"streaming query ended with {self._counted():,} events counted")

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
            f"[bold red]SIGKILL[/] of the streaming query's driver and its JVM with {seen.counted_at_kill:,} events counted; "
            "starting it again on its checkpoint"
        )

    def _watch(self, publisher: FlightPublisher, driver: DriverProcess, condition: Callable[[], bool]) -> None:
        """Waits for `condition`, noting what is published and counted; as long as one of the two moves."""
        seen, moved_at_s, last = self._seen, time.monotonic(), (-1, -1)
        while not condition():
            now_s = time.monotonic() - self._started_s
            counts = publisher.receipts, self._counted()
            seen.published.append((now_s, counts[0]))
            seen.counted.append((now_s, counts[1]))
            if counts != last:
                moved_at_s, last = time.monotonic(), counts
            if time.monotonic() - moved_at_s > STALL_S:
                raise DemoStalledError(f"nothing moved for {STALL_S:.0f} s at {counts[1]:,} events; see {self._spark}")
            if publisher.errors:
                raise DemoStalledError(f"publishing failed: {publisher.errors[0]}")
            driver.check_alive()
            time.sleep(_POLL_S)

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
        self._console.print(f"batch queries; [bold red]SIGKILL[/] of {VICTIM} in the middle of the second")
        arguments = [self._cluster.service_url, TOPIC, str(self._spark), str(self._cluster.directory), VICTIM]
        driver = DriverProcess("batch_driver", arguments, self._spark / "batch.log")
        try:
            driver.wait(STALL_S)
        finally:
            driver.kill()
        found: dict[str, Any] = json.loads((self._spark / "batch.json").read_text())
        return found

    def _failovers(self) -> int:
        """Of scans, from the bookie that was killed to another one, as they say in their log."""
        return (self._spark / "batch.log").read_text(errors="replace").count(f"scan.replica_failed: bookie {VICTIM} ")

    def _ledgers(self, admin: AdminClient) -> tuple[int, int, int]:
        """Closed ledgers, entries in the open one, bytes in all."""
        (plan,) = admin.get("/cepheid/v1/plan", topic=TOPIC)["plans"]
        closed = [ledger for ledger in plan["ledgers"] if ledger["entries"] is not None]
        open_entries = [ledger["last_entry_id"] + 1 for ledger in plan["ledgers"] if ledger["entries"] is None]
        return len(closed), sum(open_entries), sum(ledger.get("size_bytes") or 0 for ledger in plan["ledgers"])


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
