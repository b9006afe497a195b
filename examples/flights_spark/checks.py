"""Compares the demo's observations with the source file. Pure functions without Spark, a client or a clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from examples.flights_spark.expected import DelayKey, Delays, Expected, Totals
from examples.report import Check

LEAST_CLOSED_LEDGERS = 3
_MEAN_ERROR_MINUTES = 1e-6


@dataclass
class StreamSeen:
    """Observations of the streaming query. Counts are events unless stated otherwise."""

    published_at_kill: int = 0
    counted_at_kill: int = 0
    batch_at_kill: int = -1
    exit_code: int = 0  # of the first driver
    published_at_restart: int = 0  # when the second driver had finished its first micro-batch
    first_batch_after: int = -1  # the id of that micro-batch
    totals: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    published: list[tuple[float, int]] = field(default_factory=list)  # seconds since the start, events
    counted: list[tuple[float, int]] = field(default_factory=list)  # seconds since the start, events
    killed_at_s: float = 0.0
    back_at_s: float = 0.0


def check_ledgers(closed: int, open_entries: int) -> Check:
    return Check(
        f"the topic consists of {LEAST_CLOSED_LEDGERS} or more closed ledgers and an open one with entries",
        closed >= LEAST_CLOSED_LEDGERS and open_entries > 0,
        f"{closed} closed, {open_entries:,} entries in the open one",
    )


def check_published(expected: Expected, receipts: int, errors: Sequence[str]) -> Check:
    return Check(
        "every event got a receipt",
        receipts == expected.events and not errors,
        f"{receipts:,} of {expected.events:,}" + (f"; {errors[0]}" if errors else ""),
    )


def check_columns(columns: Sequence[str], expected: Sequence[str]) -> Check:
    shown = [name for name in columns if not name.startswith("_")]
    missing = [name for name in expected if name not in shown]
    return Check(
        "the DataFrame has the columns of the schema",
        shown == list(expected),
        f"{len(shown)} columns" + (f", missing: {missing}" if missing else ""),
    )


def check_delays(promise: str, rows: Sequence[Mapping[str, Any]], expected: Mapping[DelayKey, Delays]) -> Check:
    """Judge the rows of a query: each expected group must occur exactly once, and no other group."""
    found = {(row["carrier"], row["hour"]): row for row in rows}
    wrong = [key for key in [*expected, *found] if not _same_delays(found.get(key), expected.get(key))]
    flights = sum(row["flights"] for row in rows)
    detail = f"{len(expected)} groups, {flights:,} flights with a delay"
    if wrong:
        detail = f"{len(wrong)} groups differ, first {wrong[0]}: {found.get(wrong[0])}, expected {expected.get(wrong[0])}"
    return Check(promise, bool(expected) and len(found) == len(rows) and not wrong, detail)


def _same_delays(row: Mapping[str, Any] | None, expected: Delays | None) -> bool:
    if row is None or expected is None:
        return False
    exact = (row["flights"], row["minutes"]) == (expected.flights, expected.minutes)
    return exact and abs(row["mean_minutes"] - expected.mean_minutes) < _MEAN_ERROR_MINUTES


def check_stream(seen: StreamSeen, expected: Expected) -> list[Check]:
    events = expected.events
    killed_midway = 0 < seen.counted_at_kill < events and seen.exit_code == -9
    arriving = seen.published_at_kill < seen.published_at_restart < events
    return [
        Check(
            "the streaming query's driver was killed with SIGKILL before it was done",
            killed_midway,
            f"{seen.counted_at_kill:,} of {events:,} events counted in {seen.batch_at_kill + 1} micro-batches",
        ),
        Check(
            "events arrived while it was down and after its restart",
            arriving,
            f"{seen.published_at_kill:,} published at the kill, {seen.published_at_restart:,} at the first micro-batch after it",
        ),
        Check(
            "it continued from its checkpoint",
            seen.first_batch_after >= max(1, seen.batch_at_kill),
            f"micro-batch {seen.batch_at_kill} before the kill, {seen.first_batch_after} after it",
        ),
        check_totals(seen.totals, expected.totals),
    ]


def check_totals(found: Mapping[str, Mapping[str, int]], expected: Mapping[str, Totals]) -> Check:
    wanted = {carrier: asdict(totals) for carrier, totals in expected.items()}
    wrong = sorted(carrier for carrier in wanted.keys() | found.keys() if wanted.get(carrier) != found.get(carrier))
    events = sum(totals["events"] for totals in found.values())
    detail = f"{len(wanted)} carriers, {events:,} events"
    if wrong:
        detail = f"{len(wrong)} differ, first {wrong[0]}: {found.get(wrong[0])}, expected {wanted.get(wrong[0])}"
    return Check("its totals per carrier are exact", bool(wanted) and not wrong, detail)


def check_kill(kill: Mapping[str, Any], bookie_is_gone: bool, failovers: int) -> Check:
    """Judge the kill of a bookie during a scan. `failovers` is how often a task found the bookie dead and read from another one.

    Without any of those the kill would prove nothing.
    """
    acted, failed = kill["acted_at"], kill["failed_tasks"]
    detail = "no bookie was killed, because the scan ended too soon"
    if acted is not None:
        detail = f"killed after {acted[1]} of {acted[2]} tasks; {failovers} reads moved to another bookie, {failed} tasks failed"
    if kill["errors"]:
        detail = kill["errors"][0]
    mattered = acted is not None and acted[1] < acted[2] and bookie_is_gone and failovers > 0
    held = mattered and not failed and not kill["errors"]
    return Check("a bookie was killed during a batch scan, and no task failed", held, detail)
