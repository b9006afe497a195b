"""What the source file says, computed without Spark, without Cepheid, and from other columns than the events have.

The hour is the file's own column, New York's time; Spark has to come to it from the event's time in UTC.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from cepheid_cli.demo.flights import source_rows

DelayKey: TypeAlias = tuple[str, int]
"""Carrier, hour of the scheduled departure."""


@dataclass(slots=True)
class Delays:
    """Of one carrier in one hour of the day. Cancelled flights have no delay and are not counted."""

    flights: int = 0
    minutes: int = 0

    @property
    def mean_minutes(self) -> float:
        return self.minutes / self.flights


@dataclass(slots=True)
class Totals:
    """Of one carrier. A sum of ids would forgive one lost event and another that came twice; with their squares it does not."""

    events: int = 0
    id_sum: int = 0
    id_square_sum: int = 0
    delay_minutes: int = 0


@dataclass(frozen=True, slots=True)
class Expected:
    delays: Mapping[DelayKey, Delays]
    totals: Mapping[str, Totals]
    events: int


def expect(limit: int | None = None) -> Expected:
    delays: dict[DelayKey, Delays] = {}
    totals: dict[str, Totals] = {}
    events = 0
    for event_id, row in source_rows(limit):
        events += 1
        total = totals.setdefault(row["carrier"], Totals())
        total.events += 1
        total.id_sum += event_id
        total.id_square_sum += event_id * event_id
        if row["dep_delay"] not in ("", "NA"):
            minutes = int(float(row["dep_delay"]))
            total.delay_minutes += minutes
            delay = delays.setdefault((row["carrier"], int(row["hour"])), Delays())
            delay.flights += 1
            delay.minutes += minutes
    return Expected(delays, totals, events)
