"""A rule that others always forestall is never seen to fail: with all others silent, each of these speaks by itself."""

from __future__ import annotations

import pytest

from tests.simulation.history import History, InvariantViolation
from tests.simulation.scenario_runner import run

ALONE = (
    ("S11", "20_blank_bookie_old_id", "take a blank bookie for a new one"),
    ("L5", "20_blank_bookie_old_id", "take a blank bookie for a new one"),
    ("S11", "20_blank_bookie_old_id", "limbo takes regular adds"),
    ("L6", "04d_the_loser_dies_between_two_copies", "recover without waiting for copies"),
)


@pytest.mark.parametrize(("rule", "scenario", "mutant"), ALONE)
def test_a_rule_speaks_when_all_others_are_silent(rule: str, scenario: str, mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    violated = History.violated

    def only(self: History, found: str, message: str) -> None:
        if found == rule:
            violated(self, found, message)

    monkeypatch.setattr(History, "violated", only)
    outcome = run(scenario, mutant)
    assert isinstance(outcome.failure, InvariantViolation), outcome.describe()
    assert outcome.failure.rule == rule
