"""The steps of `cepheid demo`.

start ─► publish ──SIGKILL at 40 %──► restart ─► all receipts        (the Exclusive subscription consumes meanwhile)
      ─► Shared subscription, a consumer of each client ──SIGKILL at 40 %──► restart ─► everything consumed
      ─► the Exclusive subscription again: nothing that was acknowledged is delivered
      ─► the audit subscription reads the whole topic once, with Cepheid's client ─► checks against the source file ─► stop
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pulsar
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from examples.flight_data import FlightEvent, load_flights
from examples.flights.checks import check_all_published, check_order, check_receipts, check_subscription, check_totals
from examples.flights.clients import Kind, Publisher, SubscriptionReader
from examples.flights.figures import DemoFigures
from examples.flights.observations import DeliveryObservations, PublishObservations
from examples.flights.server_process import ServerProcess
from examples.progress import wait_while_moving
from examples.pulsar_connection import connect
from examples.report import Check, print_report

TOPIC = "persistent://public/default/flights"
KILL_AT = 0.4
SHARED_PACE_S = 9.0  # the Shared consumers take this long, so that some acknowledgements are older than 2 s at the kill
QUIET_S = 1.0  # after this long without a delivery nothing more is expected
STALL_S = 90.0


@dataclass(frozen=True, slots=True)
class DemoOptions:
    data_dir: Path
    port: int
    admin_port: int
    limit: int | None = None


def run_demo(options: DemoOptions, console: Console) -> bool:
    """Run the demo to its end and print the report. Returns True when every check held."""
    events = load_flights(options.limit)
    server = ServerProcess(options.data_dir / "cluster", options.port, options.admin_port, bookies=3)
    server.check_ports()
    shutil.rmtree(server.data_dir, ignore_errors=True)  # nothing else in `data_dir`, which may have other files of the user
    server.data_dir.mkdir(parents=True)
    server.log_path.unlink(missing_ok=True)
    console.print(f"{len(events):,} flights; data and logs in {options.data_dir}")
    console.print(f"cluster of 3 bookies (E=3 Qw=3 Qa=2) and a broker on {server.service_url}")
    server.start()
    try:
        demo = _Demo(events, server, console)
        demo.run()
        checks = demo.checks()
    finally:
        exit_code = server.stop()
    checks.append(Check("the server stops cleanly on Ctrl-C", exit_code == 0, f"exit code {exit_code}"))
    title = "Measured (without the time in which the server was down)"
    return print_report(console, title, demo.figures().rows(), checks)


class _Demo:
    def __init__(self, events: Sequence[FlightEvent], server: ServerProcess, console: Console) -> None:
        self._events = events
        self._server = server
        self._publish = PublishObservations(len(events))
        self._exclusive = DeliveryObservations("exclusive")
        self._shared = DeliveryObservations("shared")
        self._audit = DeliveryObservations("audit")
        self._outages_s: list[tuple[float, float]] = []
        self._publish_s = self._audit_s = 0.0
        self._progress = Progress(
            TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        )

    def run(self) -> None:
        client = connect(self._server.service_url, self._server.log_path.with_name("client.log"))
        try:
            with self._progress:
                exclusive = self._reader(client, self._exclusive)
                for seen in (self._shared, self._audit):  # created now, so that they keep everything that is published from now on
                    self._reader(client, seen).stop()
                exclusive.start()
                self._run_publishing(client, exclusive)
                self._run_shared(client)
                self._run_exclusive_again(client)
                self._run_audit(client)
        finally:
            client.close()

    def checks(self) -> list[Check]:
        stored = self._audit.order
        return [
            check_all_published(self._events, self._publish),
            check_receipts(self._publish, stored),
            check_order(stored),
            check_totals(self._events, self._audit.carriers),
            *check_subscription(self._events, self._exclusive, self._server.killed_at_s),
            *check_subscription(self._events, self._shared, self._server.killed_at_s),
        ]

    def figures(self) -> DemoFigures:
        down_s, up_s = self._outages_s[0]
        receipts = ((event_id, at) for event_id, at in enumerate(self._publish.receipt_at_s) if at > 0)
        return DemoFigures(
            events=len(self._events),
            bytes_published=sum(len(event.payload) for event in self._events),
            publish_s=self._publish_s - (up_s - down_s),
            audit_s=self._audit_s,
            publish_latencies_s=self._latencies_s(receipts),
            end_to_end_s=self._latencies_s(self._exclusive.first_seen_at_s.items()),
            resent_duplicates=len(self._audit.order) - len(self._audit.distinct_events),
            redelivered={seen.name: seen.redelivered for seen in (self._exclusive, self._shared)},
            start_times_s=self._server.start_times_s,
            outages_s=[end - start for start, end in self._outages_s],
            server_memory_bytes=self._server.peak_memory_bytes,
        )

    def _run_publishing(self, client: pulsar.Client, exclusive: SubscriptionReader) -> None:
        publisher = Publisher(client, TOPIC, self._publish)
        failures: list[BaseException] = []

        def publish() -> None:
            try:
                publisher.publish(self._events)
            except BaseException as error:
                failures.append(error)

        published = self._bar("publish")
        consumed = self._bar("consume, Exclusive")
        thread = threading.Thread(target=publish, name="demo-publisher", daemon=True)
        started = time.monotonic()
        thread.start()

        def progress() -> int:
            self._progress.update(published, completed=self._publish.receipts)
            self._progress.update(consumed, completed=len(self._exclusive.distinct_events))
            if failures:
                raise failures[0]
            exclusive.check_alive()
            return self._publish.receipts + len(self._exclusive.distinct_events)

        total = len(self._events)
        self._wait(lambda: self._publish.receipts >= KILL_AT * total, progress)
        self._kill_and_restart("publishing")
        self._wait(lambda: self._publish.receipts >= total, progress)
        self._publish_s = time.monotonic() - started
        thread.join()
        self._wait(lambda: len(self._exclusive.distinct_events) >= total and exclusive.quiet_for_s > QUIET_S, progress)
        exclusive.stop()

    def _run_shared(self, client: pulsar.Client) -> None:
        total = len(self._events)
        reader = self._reader(client, self._shared, shared=True, kinds=("official", "cepheid"), rate_per_s=total / SHARED_PACE_S)
        progress = self._progress_of(reader, self._shared, "consume, Shared by 2, paced")
        reader.start()
        self._wait(lambda: len(self._shared.distinct_events) >= KILL_AT * total, progress)
        self._kill_and_restart("consuming")
        self._wait(lambda: len(self._shared.distinct_events) >= total and reader.quiet_for_s > QUIET_S, progress)
        reader.stop()

    def _run_exclusive_again(self, client: pulsar.Client) -> None:
        """Consume again after the second kill. Nothing acknowledged before may be delivered."""
        reader = self._reader(client, self._exclusive)

        def progress() -> int:
            reader.check_alive()
            return len(self._exclusive.order)

        reader.start()
        self._wait(lambda: reader.quiet_for_s > QUIET_S, progress)
        reader.stop()

    def _run_audit(self, client: pulsar.Client) -> None:
        reader = self._reader(client, self._audit, kinds=("cepheid",))
        progress = self._progress_of(reader, self._audit, "read the whole topic")
        started = time.monotonic()
        reader.start()
        self._wait(lambda: len(self._audit.distinct_events) >= len(self._events), progress)
        self._audit_s = time.monotonic() - started
        self._wait(lambda: reader.quiet_for_s > QUIET_S, progress)
        reader.stop()

    def _reader(
        self,
        client: pulsar.Client,
        seen: DeliveryObservations,
        *,
        shared: bool = False,
        kinds: Sequence[Kind] = ("official",),
        rate_per_s: float | None = None,
    ) -> SubscriptionReader:
        return SubscriptionReader(
            client,
            TOPIC,
            seen,
            shared=shared,
            kinds=kinds,
            service_url=self._server.service_url,
            killed_at_s=self._server.killed_at_s,
            rate_per_s=rate_per_s,
        )

    def _bar(self, description: str) -> TaskID:
        return self._progress.add_task(description, total=len(self._events))

    def _progress_of(self, reader: SubscriptionReader, seen: DeliveryObservations, description: str) -> Callable[[], int]:
        """Add a bar; return a function that updates it, raises the error of a consumer, and returns the number of events."""
        bar = self._bar(description)

        def progress() -> int:
            self._progress.update(bar, completed=len(seen.distinct_events))
            reader.check_alive()
            return len(seen.distinct_events)

        return progress

    def _kill_and_restart(self, activity: str) -> None:
        self._progress.console.print(f"[bold red]SIGKILL[/] of the server while {activity}; starting it again on the same data")
        killed = time.monotonic()
        self._server.kill()
        self._server.start()
        self._outages_s.append((killed, time.monotonic()))

    def _wait(self, condition: Callable[[], bool], progress: Callable[[], int]) -> None:
        def look() -> int:
            self._server.note_memory()
            return progress()

        wait_while_moving(condition, look, stall_s=STALL_S, logs=self._server.log_path.parent)

    def _latencies_s(self, arrived: Iterable[tuple[int, float]]) -> list[float]:
        """Return the seconds from sending to arrival, by (event id, arrival), without times in which the server was down."""
        sent_and_arrived = ((self._publish.sent_at_s[event_id], at) for event_id, at in arrived)
        return [at - sent for sent, at in sent_and_arrived if not any(sent < up and at > down for down, up in self._outages_s)]
