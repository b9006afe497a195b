"""Compares the clients' observations with the source file. Pure functions without a client or a clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from examples.flight_data import FlightEvent
from examples.flights.observations import ACK_GRACE_S, DeliveryObservations, PublishObservations
from examples.report import Check


def check_all_published(events: Sequence[FlightEvent], publish: PublishObservations) -> Check:
    return Check(
        "every event got a receipt",
        publish.receipts >= len(events) and all(at > 0 for at in publish.receipt_at_s) and not publish.errors,
        f"{publish.receipts:,} of {len(events):,}" + (f"; {publish.errors[0]}" if publish.errors else ""),
    )


def check_receipts(publish: PublishObservations, stored: Sequence[int]) -> Check:
    """Judge whether `stored`, the event ids in the topic, has every event with a receipt."""
    in_topic = set(stored)
    lost = [event_id for event_id, at in enumerate(publish.receipt_at_s) if at > 0 and event_id not in in_topic]
    return Check(
        "every event with a receipt is in the topic",
        publish.receipts > 0 and not lost,
        f"{publish.receipts:,} receipts, {len(lost)} events lost" + (f", first {lost[0]}" if lost else ""),
    )


def check_order(stored: Sequence[int]) -> Check:
    """Judge the order of first copies. After a crash the client resends events, and these copies are later."""
    firsts = list(dict.fromkeys(stored))
    swapped = next((index for index in range(1, len(firsts)) if firsts[index] < firsts[index - 1]), None)
    detail = f"{len(firsts):,} events in the order in which they were sent"
    if swapped is not None:
        detail = f"event {firsts[swapped]} comes after {firsts[swapped - 1]}"
    return Check("the first copies of all events are in the order sent", bool(firsts) and swapped is None, detail)


def check_totals(events: Sequence[FlightEvent], found: Counter[str]) -> Check:
    """Judge `found`, the number of distinct events by the key of the received message, not by the event's own carrier."""
    expected = Counter(event.carrier for event in events)
    wrong = {carrier: (expected[carrier], found[carrier]) for carrier in expected | found if expected[carrier] != found[carrier]}
    return Check(
        "the number of events per carrier equals the source file's",
        not wrong,
        f"{len(expected)} carriers" if not wrong else f"(expected, found): {wrong}",
    )


def check_subscription(events: Sequence[FlightEvent], seen: DeliveryObservations, killed_at_s: Sequence[float]) -> list[Check]:
    """Judge one subscription. `killed_at_s` are monotonic times.

    The second check fails if no acknowledgement was old enough at the last kill, because it would prove nothing.
    """
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
            f"{seen.name}: nothing acknowledged {ACK_GRACE_S:.0f} s or more before a kill was delivered again",
            old > 0 and not seen.forgotten_acks,
            f"{old:,} such acknowledgements, {len(seen.forgotten_acks)} delivered again",
        ),
    ]
