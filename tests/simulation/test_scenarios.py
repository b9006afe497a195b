"""Every scenario holds; with one of its mistakes put into the code, it fails by a rule that speaks of it. Each rule that its head
names is checked on the way, named by a line, or what one of the mistakes fails by."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.simulation.faults.plan import CALM
from tests.simulation.scenarios.language import Scenario, all_scenarios
from tests.simulation.scenarios.runner import run
from tests.simulation.world.world import World


@pytest.mark.parametrize("scenario", all_scenarios(), ids=lambda scenario: scenario.stem)
def test_it_holds_and_its_mistakes_are_found_out(scenario: Scenario) -> None:
    outcome = run(scenario.stem, trace=True)
    assert outcome.failure is None, "\n".join([*outcome.trace[-40:], outcome.describe()])
    failed_by = set()
    for mutant, rules in scenario.mutants.items():
        mistaken = run(scenario.stem, mutant)
        assert mistaken.failure is not None, f"{scenario.stem} holds with {mutant!r}"
        assert mistaken.rule in rules, mistaken.describe()
        failed_by.add(mistaken.rule)
    idle = set(scenario.holds) - outcome.checked.keys() - {line.rule for line in scenario.lines} - failed_by
    assert not idle, f"{scenario.stem} claims {', '.join(sorted(idle))}, and nothing in it could fail by that"


@pytest.mark.parametrize(
    ("number", "mutant", "rule"), [("01", "fence not by reads", "L5"), ("15", "let checkpoints overlap", "S8")]
)
def test_the_harm_itself_is_seen_also_when_what_leads_to_it_is_not(number: str, mutant: str, rule: str) -> None:
    outcome = run(number, mutant, only=rule)
    assert outcome.rule == rule, outcome.describe()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_40_duplicate_delivery_of_rpc_in_whole_worlds(seed: int) -> None:
    """Not a text: everything that clients do, and each of its adds, fences and reads arrives twice, the second time late."""
    World(seed, faults=replace(CALM, duplicate=1.0), operations=150).run()
