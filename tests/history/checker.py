"""Judges a history: every rule that it breaks, by number (docs/invariants.md)."""

from __future__ import annotations

from collections.abc import Sequence

from tests.history.events import Event
from tests.history.rules_delivery import check_delivery
from tests.history.rules_publish import check_publishing
from tests.history.rules_served import check_served
from tests.history.verdict import Facts, Promises, Violation


def check(events: Sequence[Event], promises: Promises | None = None) -> list[Violation]:
    facts, promised = Facts(events), promises or Promises()
    check_consumers = check_served if promised.noted_at_servers else check_delivery
    return [*check_publishing(facts, promised), *check_consumers(facts, promised)]
