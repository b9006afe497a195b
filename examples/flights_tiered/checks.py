"""Compares the demo's observations with the source file. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from examples.flights_spark.checks import check_delays
from examples.flights_spark.expected import Expected
from examples.flights_tiered.consuming import Seen
from examples.report import Check

MAX_BATCH = 500  # messages, as the demo's producers are set
_MEAN_ERROR_MINUTES = 1e-6


def check_seen(promise: str, seen: Seen, expected: Sequence[int]) -> Check:
    missing, more = seen.missing(expected), len(seen.ids) - len(set(seen.ids))
    detail = f"{len(seen.ids):,} of {len(expected):,}; missing {missing}, twice {more}, changed {seen.changed}"
    return Check(promise, seen.is_exactly(expected), detail)


def check_continues(promise: str, seen: Seen, start: int, end: int) -> Check:
    """Judge whether a subscription that stopped before event `start` continues there.

    The client acknowledges whole batches, so one in which it stopped is redelivered.
    """
    first = seen.ids[0] if seen.ids else end
    held = start - MAX_BATCH < first <= start and seen.is_exactly(range(first, end))
    return Check(
        promise, held, f"{len(seen.ids):,} events from {first:,} on, acknowledged before {start:,}; changed {seen.changed}"
    )


def check_crash(at_kill: Mapping[str, Any]) -> Check:
    return Check(
        "the broker was killed while an upload was half done",
        at_kill["begun"] == 1 and at_kill["complete"] < at_kill["ended"],
        f"{at_kill['begun']} begun, {at_kill['complete']} of {at_kill['ended']} complete",
    )


def check_offloaded(chain: Mapping[str, Any], objects: int) -> Check:
    held = chain["complete"] == chain["off_bookies"] == chain["ended"] == objects and not chain["begun"]
    return Check(
        "every ended ledger is one object, and the bookies have none of them",
        held,
        f"{chain['ended']} ledgers, {objects} objects, {chain['off_bookies']} deleted from bookies",
    )


def check_carriers(promise: str, rows: Sequence[tuple[str, int, float]], expected: Expected) -> Check:
    flights: dict[str, int] = {}
    minutes: dict[str, int] = {}
    for (carrier, _), delays in expected.delays.items():
        flights[carrier] = flights.get(carrier, 0) + delays.flights
        minutes[carrier] = minutes.get(carrier, 0) + delays.minutes
    wrong = [
        carrier
        for carrier, count, mean in rows
        if count != flights.get(carrier) or abs(mean - minutes[carrier] / flights[carrier]) > _MEAN_ERROR_MINUTES
    ]
    held = not wrong and sorted(row[0] for row in rows) == sorted(flights)
    return Check(
        promise, held, f"{len(rows)} carriers, {sum(row[1] for row in rows):,} flights" + (f"; wrong: {wrong}" if wrong else "")
    )


def check_spark(found: Mapping[str, Any], expected: Expected) -> list[Check]:
    return [
        Check("Spark reads bucket and bookies as one DataFrame", found["events"] == expected.events, f"{found['events']:,} events"),
        check_delays("and its mean delays per carrier and hour equal the source file's", found["delays"], expected.delays),
    ]


def check_bucket(verified: str, swept: str) -> Check:
    valid = re.search(r"(\d+) valid, 0 bad, 0 not known", verified)
    return Check(
        "verify finds every object valid, and sweep finds no orphan",
        valid is not None and int(valid[1]) > 0 and "0 objects, 0 B: would be deleted" in swept,
        valid[0] if valid is not None else verified.strip(),
    )


def check_report(restored: str, tail: int) -> Check:
    """Judge whether the report names what was published after the last offload."""
    lost = re.search(r"never offloaded, lost: .*", restored)
    age = re.search(r"(\d[\d,]*) s old", restored)
    return Check(
        f"the restore says what was never offloaded (the last {tail:,} events) and how old the cursors are",
        lost is not None and age is not None and ": restored" in restored,
        (lost[0] if lost else "nothing said") + (f"; cursors {age[0]}" if age else ""),
    )
