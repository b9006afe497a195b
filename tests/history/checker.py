"""Judges a history: every rule that it breaks, by number (docs/invariants.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.history.events import Event
from tests.history.rules_delivery import check_delivery
from tests.history.rules_publish import check_publishing
from tests.history.rules_served import ORDERED, check_served
from tests.history.verdict import Facts, Promises, Violation


@dataclass(frozen=True, slots=True)
class Judgement:
    violations: list[Violation]
    asked: Counter[str]
    """The rules that this history could have broken; those about deliveries once for each subscription that could. The others were
    not checked by it: who counts checks must not count what never had a chance to fail."""


def check(events: Sequence[Event], promises: Promises | None = None) -> list[Violation]:
    return judge(events, promises).violations


def judge(events: Sequence[Event], promises: Promises | None = None) -> Judgement:
    facts, promised = Facts(events), promises or Promises()
    asked = Counter(_asked_of_publishing(facts, promised))
    violations = [*check_publishing(facts, promised)]
    if promised.noted_at_servers:
        violations += check_served(facts, promised, asked)
    else:
        violations += check_delivery(facts, promised)
        for of_subscription in facts.subscriptions().values():
            asked.update(["H5"] if facts.audit else [])
            asked.update(_asked_of_deliveries(of_subscription))
    return Judgement(violations, asked)


def _asked_of_publishing(facts: Facts, promised: Promises) -> Iterator[str]:
    if facts.audit:
        yield "H2"
    if facts.sent_ok or facts.refused:
        yield "H1"
    if facts.sent_ok and promised.deduplication:
        yield "H3"
    if len(facts.sent_ok) > 1:
        yield "H4"


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
