"""The expected results of the queries, computed from the source file without Spark and without Cepheid.

The hour is a column of the file, in New York's time, that the events do not have. Spark must compute it from their time in UTC.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from examples.flight_data import has_value, source_rows

DelayKey: TypeAlias = tuple[str, int]
"""Carrier, and hour of the scheduled departure."""


@dataclass(slots=True)
class Delays:
    """The delays of one carrier in one hour of the day. Cancelled flights have no delay and are not counted."""

    flights: int = 0
    minutes: int = 0

    @property
    def mean_minutes(self) -> float:
        return self.minutes / self.flights


@dataclass(slots=True)
class Totals:
    """The totals of one carrier. A lost event and one counted twice can leave count and id sum equal, but not also the squares."""

    events: int = 0
    id_sum: int = 0
    id_square_sum: int = 0
    delay_minutes: int = 0


@dataclass(frozen=True, slots=True)
class Expected:
    """The expected results of all queries over `events` events."""

    delays: Mapping[DelayKey, Delays]
    totals: Mapping[str, Totals]
    events: int


def expect(limit: int | None = None) -> Expected:
    """Compute the expected results for the first `limit` events, or for all of them."""
    delays: dict[DelayKey, Delays] = {}
    totals: dict[str, Totals] = {}
    events = 0
    for event_id, row in source_rows(limit):
        events += 1
        total = totals.setdefault(row["carrier"], Totals())
        total.events += 1
        total.id_sum += event_id
        total.id_square_sum += event_id * event_id
        if has_value(row["dep_delay"]):
            minutes = int(float(row["dep_delay"]))
            total.delay_minutes += minutes
            delay = delays.setdefault((row["carrier"], int(row["hour"])), Delays())
            delay.flights += 1
            delay.minutes += minutes
    return Expected(delays, totals, events)
