"""Judging what the demo saw against the source file. Pure: no client, no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cepheid_cli.demo.flights import FlightEvent
from cepheid_cli.demo.observations import DeliveryObservations, PublishObservations


@dataclass(frozen=True, slots=True)
class Check:
    """One promise and whether it held; `detail` has the numbers."""

    promise: str
    held: bool
    detail: str


def first_occurrences(order: Iterable[int]) -> list[int]:
    """Event ids without the later copies."""
    return list(dict.fromkeys(order))


def check_receipts(publish: PublishObservations, stored: Sequence[int]) -> Check:
    in_topic = set(stored)
    lost = [event_id for event_id, at in enumerate(publish.receipt_at_s) if at > 0 and event_id not in in_topic]
    return Check(
        "every event whose receipt the client got is in the topic",
        publish.receipts > 0 and not lost,
        f"{publish.receipts:,} receipts, {len(lost)} lost" + (f", first {lost[0]}" if lost else ""),
    )


def check_all_published(events: Sequence[FlightEvent], publish: PublishObservations) -> Check:
    return Check(
        "every event got a receipt",
        publish.receipts >= len(events) and all(at > 0 for at in publish.receipt_at_s) and not publish.errors,
        f"{publish.receipts:,} of {len(events):,}" + (f"; {publish.errors[0]}" if publish.errors else ""),
    )


def check_order(stored: Sequence[int]) -> Check:
    firsts = first_occurrences(stored)
    swapped = next((index for index in range(1, len(firsts)) if firsts[index] < firsts[index - 1]), None)
    detail = f"{len(firsts):,} events in the order sent"
    if swapped is not None:
        detail = f"event {firsts[swapped]} comes after {firsts[swapped - 1]}"
    return Check("first occurrences keep the order in which they were sent", bool(firsts) and swapped is None, detail)


def check_totals(events: Sequence[FlightEvent], found: Counter[str]) -> Check:
    """`found`: first occurrences by the key of the message that came, not by what the source says of the event."""
    expected = Counter(event.carrier for event in events)
    wrong = {carrier: (expected[carrier], found[carrier]) for carrier in expected | found if expected[carrier] != found[carrier]}
    return Check(
        "totals per carrier equal those of the source file",
        not wrong,
        f"{len(expected)} carriers" if not wrong else f"(expected, found): {wrong}",
    )


ACK_GRACE_S = 2.0


def check_subscription(events: Sequence[FlightEvent], seen: DeliveryObservations, killed_at_s: Sequence[float]) -> list[Check]:
    """`killed_at_s`: monotonic times. The second check needs acknowledgements old enough at some kill, or it shows nothing."""
    missing = len(events) - len(seen.distinct_events)
    last_kill = max(killed_at_s, default=0.0)
    old = sum(1 for at in seen.acknowledged_at_s.values() if at + ACK_GRACE_S <= last_kill)
    return [
        Check(
            f"the {seen.name} subscription got every event",
            missing == 0,
            f"{len(seen.distinct_events):,} events, {missing} missing, {seen.redelivered:,} redelivered",
        ),
        Check(
            f"{seen.name}: nothing acknowledged 2 s or more before a kill came again",
            old > 0 and not seen.forgotten_acks,
            f"{old:,} such acknowledgements, {len(seen.forgotten_acks)} came again",
        ),
    ]


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0..1) of the values lie; 0.0 of nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
