"""Judging what the demo saw against the source file. Pure: no client, no clock, no Spark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from cepheid_cli.demo.checks import Check
from cepheid_cli.demo_spark.expected import DelayKey, Delays, Expected, Totals

LEAST_CLOSED_LEDGERS = 3
_MEAN_ERROR_MINUTES = 1e-6


@dataclass
class StreamSeen:
    """What the demo saw of the streaming query from outside. Counts of events."""

    published_at_kill: int = 0
    counted_at_kill: int = 0
    batch_at_kill: int = -1
    exit_code: int = 0  # of the first driver
    published_at_restart: int = 0  # when the second driver had finished its first micro-batch
    first_batch_after: int = -1
    totals: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    published: list[tuple[float, int]] = field(default_factory=list)  # s since the start
    counted: list[tuple[float, int]] = field(default_factory=list)
    killed_at_s: float = 0.0
    back_at_s: float = 0.0


def check_ledgers(closed: int, open_entries: int) -> Check:
    return Check(
        f"the topic lies in {LEAST_CLOSED_LEDGERS} or more closed ledgers and the open one",
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
        "the DataFrame has the schema's columns",
        shown == list(expected),
        f"{len(shown)} columns" + (f", missing: {missing}" if missing else ""),
    )


def check_delays(promise: str, rows: Sequence[Mapping[str, Any]], expected: Mapping[DelayKey, Delays]) -> Check:
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
    in_the_middle = 0 < seen.counted_at_kill < events and seen.exit_code == -9
    arriving = seen.published_at_kill < seen.published_at_restart < events
    return [
        Check(
            "the streaming query's driver was killed by SIGKILL in the middle",
            in_the_middle,
            f"{seen.counted_at_kill:,} of {events:,} events counted in {seen.batch_at_kill + 1} micro-batches",
        ),
        Check(
            "events arrived while it was away, and when it was back",
            arriving,
            f"{seen.published_at_kill:,} published at the kill, {seen.published_at_restart:,} after its first micro-batch again",
        ),
        Check(
            "it went on from its checkpoint",
            seen.first_batch_after >= max(1, seen.batch_at_kill),
            f"micro-batch {seen.batch_at_kill} before, {seen.first_batch_after} after",
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
    return Check("its totals by carrier are exact", bool(wanted) and not wrong, detail)


def check_kill(kill: Mapping[str, Any], bookie_is_gone: bool, failovers: int) -> Check:
    """`failovers`: how often a task asked the bookie in vain, and then another one. Else it would not have been missed."""
    acted = kill["acted_at"]
    detail = "no bookie was killed: the scan was over too soon"
    if acted is not None:
        detail = (
            f"killed with {acted[1]} of {acted[2]} tasks done, then asked {failovers} times in vain; {kill['failed_tasks']} failed"
        )
    if kill["errors"]:
        detail = kill["errors"][0]
    was_missed = acted is not None and acted[1] < acted[2] and bookie_is_gone and failovers > 0
    held = was_missed and not kill["failed_tasks"] and not kill["errors"]
    return Check("a bookie was killed during a batch scan, and no task failed", held, detail)
