"""Judges a history: every rule that it breaks, by number (docs/invariants.md)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.history.events import Event
from tests.history.rules_delivery import check_delivery
from tests.history.rules_publish import check_publishing
from tests.history.rules_served import ORDERED, check_served
from tests.history.verdict import Facts, Promises, Violation


def check(events: Sequence[Event], promises: Promises | None = None) -> list[Violation]:
    facts, promised = Facts(events), promises or Promises()
    check_consumers = check_served if promised.noted_at_servers else check_delivery
    return [*check_publishing(facts, promised), *check_consumers(facts, promised)]


def asked(events: Sequence[Event], promises: Promises | None = None) -> Iterator[str]:
    """The rules that this history could have broken, one for each subscription that could. The others were not checked by it:
    who counts checks must not count what never had a chance to fail."""
    facts, promised = Facts(events), promises or Promises()
    if facts.audit:
        yield "H2"
    if facts.sent_ok:
        yield "H1"
        if promised.deduplication:
            yield "H3"
    if len(facts.sent_ok) > 1:
        yield "H4"
    for of_subscription in facts.subscriptions().values():
        if facts.audit:
            yield "H5"
        yield from _asked_of_deliveries(of_subscription)


def _asked_of_deliveries(events: Sequence[Event]) -> Iterator[str]:
    kinds = [event.kind for event in events]
    types = {event.type for event in events if event.kind == "open"}
    receivers = [event.actor for event in events if event.kind == "received"]
    if receivers and "ack" in kinds:
        yield from ("H6", "H7")
    if types.intersection(ORDERED):
        if len(receivers) > 1:
            yield "H8"
        moves = [place for place, event in enumerate(events) if event.kind == "sought" or event.details.get("reset")]
        if moves and "received" in kinds[moves[0] :]:
            yield "H13"
    elif len(set(receivers)) > 1:
        yield "H9"
        if "Key_Shared" in types:
            yield "H10"
