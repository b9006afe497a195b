"""`cepheid demo`: a year of flights through a durable topic, two SIGKILLs of the server, and the account afterwards.

start ─► publish ──SIGKILL at 40 %──► restart ─► all receipts        (Exclusive subscription consumes meanwhile)
      ─► Shared subscription, two consumers ──SIGKILL at 40 %──► restart ─► everything consumed
      ─► the Exclusive subscription again: nothing acknowledged comes
      ─► audit subscription reads the whole topic once ─► checks against the source file ─► stop
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from cepheid_cli.demo.checks import (
    Check,
    check_all_published,
    check_order,
    check_receipts,
    check_subscription,
    check_totals,
)
from cepheid_cli.demo.clients import Publisher, SubscriptionReader, connect
from cepheid_cli.demo.flights import FlightEvent, load_flights
from cepheid_cli.demo.observations import DeliveryObservations, PublishObservations
from cepheid_cli.demo.report import DemoFigures, print_report
from cepheid_cli.demo.server_process import ServerProcess
from cepheid_ports import CepheidError

TOPIC = "persistent://public/default/flights"
KILL_AT = 0.4
SHARED_PACE_S = 9.0  # the paced part lasts so long, so that there are acknowledgements older than 2 s when the server is killed
QUIET_S = 1.0
STALL_S = 90.0


class DemoStalledError(CepheidError):
    """Nothing moved for a long time."""

    hint = "the server's log may say why"


@dataclass(frozen=True, slots=True)
class DemoOptions:
    data_dir: Path
    port: int
    admin_port: int
    limit: int | None = None


def run_demo(options: DemoOptions, console: Console) -> bool:
    """Runs the demo to its end and prints the account; True when every check held."""
    events = load_flights(options.limit)
    server = ServerProcess(options.data_dir / "cluster", options.port, options.admin_port, bookies=3)
    server.check_ports()
    shutil.rmtree(server.data_dir, ignore_errors=True)  # the demo's own only: `--data` may be somebody's directory
    server.data_dir.mkdir(parents=True)
    server.log_path.unlink(missing_ok=True)
    console.print(f"{len(events):,} flights; data in {options.data_dir}")
    console.print(f"cluster of 3 bookies (E=3 Qw=3 Qa=2) and a broker on {server.service_url}")
    server.start()
    try:
        demo = _Demo(events, server, console)
        demo.run()
        checks = demo.checks()
    finally:
        exit_code = server.stop()
    checks.append(Check("the server stops cleanly on Ctrl-C", exit_code == 0, f"exit code {exit_code}"))
    return print_report(console, checks, demo.figures())


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
                for seen in (self._shared, self._audit):  # created now, so that they hold everything published from here on
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
        end_to_end = [
            seen_at - self._publish.sent_at_s[event_id]
            for event_id, seen_at in self._exclusive.first_seen_at_s.items()
            if not self._in_outage(self._publish.sent_at_s[event_id], seen_at)
        ]
        return DemoFigures(
            events=len(self._events),
            bytes_published=sum(len(event.payload) for event in self._events),
            publish_s=self._publish_s - self._outage_s(0),
            audit_s=self._audit_s,
            publish_latencies_s=self._latencies_outside_outages(),
            end_to_end_s=end_to_end,
            resent_duplicates=len(self._audit.order) - len(self._audit.distinct_events),
            redelivered={seen.name: seen.redelivered for seen in (self._exclusive, self._shared)},
            start_times_s=self._server.start_times_s,
            outages_s=[end - start for start, end in self._outages_s],
            server_memory_bytes=self._server.peak_memory_bytes,
        )

    def _run_publishing(self, client: object, exclusive: SubscriptionReader) -> None:
        publisher = Publisher(client, TOPIC, self._publish)
        failures: list[BaseException] = []

        def publish() -> None:
            try:
                publisher.publish(self._events)
            except BaseException as error:
                failures.append(error)

        published = self._bar("publish")
        consumed = self._bar("consume, exclusive")
        thread = threading.Thread(target=publish, name="demo-publisher", daemon=True)
        started = time.monotonic()
        thread.start()

        def progress() -> int:
            self._progress.update(published, completed=self._publish.receipts)
            self._progress.update(consumed, completed=len(self._exclusive.distinct_events))
            _raise_first([*failures, *filter(None, [exclusive.failure])])
            return self._publish.receipts + len(self._exclusive.distinct_events)

        total = len(self._events)
        self._await(lambda: self._publish.receipts >= KILL_AT * total, progress)
        self._kill_and_restart("publishing")
        self._await(lambda: self._publish.receipts >= total, progress)
        self._publish_s = time.monotonic() - started
        thread.join()
        self._await(lambda: len(self._exclusive.distinct_events) >= total and exclusive.quiet_for_s > QUIET_S, progress)
        exclusive.stop()

    def _run_shared(self, client: object) -> None:
        total = len(self._events)
        reader = self._reader(client, self._shared, shared=True, consumers=2, rate_per_s=total / SHARED_PACE_S)
        bar = self._bar("consume, shared × 2, paced")
        reader.start()

        def progress() -> int:
            self._progress.update(bar, completed=len(self._shared.distinct_events))
            _raise_first([*filter(None, [reader.failure])])
            return len(self._shared.distinct_events)

        self._await(lambda: progress() >= KILL_AT * total, progress)
        self._kill_and_restart("consuming")
        self._await(lambda: progress() >= total, progress)
        self._await(lambda: reader.quiet_for_s > QUIET_S, progress)
        reader.stop()

    def _run_exclusive_again(self, client: object) -> None:
        """A new consumer after the second kill: nothing that was acknowledged by then may come to it."""
        reader = self._reader(client, self._exclusive)
        reader.start()

        def progress() -> int:
            _raise_first([*filter(None, [reader.failure])])
            return len(self._exclusive.order)

        self._await(lambda: reader.quiet_for_s > QUIET_S, progress)
        reader.stop()

    def _run_audit(self, client: object) -> None:
        reader = self._reader(client, self._audit)
        bar = self._bar("audit of the topic")
        started = time.monotonic()
        reader.start()

        def progress() -> int:
            self._progress.update(bar, completed=len(self._audit.distinct_events))
            _raise_first([*filter(None, [reader.failure])])
            return len(self._audit.order)

        self._await(lambda: len(self._audit.distinct_events) >= len(self._events), progress)
        self._audit_s = time.monotonic() - started
        self._await(lambda: reader.quiet_for_s > QUIET_S, progress)
        reader.stop()

    def _reader(
        self,
        client: object,
        seen: DeliveryObservations,
        *,
        shared: bool = False,
        consumers: int = 1,
        rate_per_s: float | None = None,
    ) -> SubscriptionReader:
        killed_at_s = self._server.killed_at_s
        return SubscriptionReader(
            client, TOPIC, seen, shared=shared, consumers=consumers, killed_at_s=killed_at_s, rate_per_s=rate_per_s
        )

    def _bar(self, description: str) -> TaskID:
        return self._progress.add_task(description, total=len(self._events))

    def _kill_and_restart(self, while_doing: str) -> None:
        self._progress.console.print(
            f"[bold red]SIGKILL[/] in the middle of {while_doing}; starting the server again on the same data"
        )
        killed = time.monotonic()
        self._server.kill()
        self._server.start()
        self._outages_s.append((killed, time.monotonic()))

    def _await(self, condition: Callable[[], bool], progress: Callable[[], int]) -> None:
        """Waits for `condition` as long as `progress` moves; a quiet period that the condition asks for counts as movement."""
        moved_at, last = time.monotonic(), -1
        while not condition():
            now = progress()
            if now != last:
                moved_at, last = time.monotonic(), now
            if time.monotonic() - moved_at > STALL_S:
                raise DemoStalledError(f"nothing moved for {STALL_S:.0f} s at {now:,}; see {self._server.log_path}")
            self._server.note_memory()
            time.sleep(0.05)
        progress()

    def _in_outage(self, start_s: float, end_s: float) -> bool:
        return any(start_s < up and end_s > down for down, up in self._outages_s)

    def _outage_s(self, index: int) -> float:
        down, up = self._outages_s[index]
        return up - down

    def _latencies_outside_outages(self) -> list[float]:
        pairs = zip(self._publish.sent_at_s, self._publish.receipt_at_s, strict=True)
        return [got - sent for sent, got in pairs if got > 0 and not self._in_outage(sent, got)]


def _raise_first(failures: Sequence[BaseException]) -> None:
    if failures:
        raise failures[0]
