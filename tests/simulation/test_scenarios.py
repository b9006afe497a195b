"""Every scenario holds; and with a known mistake put in, it fails by a rule that speaks of it."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from tests.simulation.faults import CALM
from tests.simulation.scenario_language import Scenario, all_scenarios
from tests.simulation.scenario_runner import Outcome, run
from tests.simulation.world import World

SCENARIOS = all_scenarios()
MISTAKES = [(scenario, mutant) for scenario in SCENARIOS for mutant in scenario.mutants]


@functools.cache
def played(stem: str) -> Outcome:
    """Without a mistake, once for all tests that ask."""
    return run(stem, trace=True)


@functools.cache
def mistaken(stem: str, mutant: str) -> Outcome:
    return run(stem, mutant)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.stem)
def test_it_holds(scenario: Scenario) -> None:
    outcome = played(scenario.stem)
    assert outcome.failure is None, "\n".join([*outcome.trace[-40:], outcome.describe()])


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.stem)
def test_each_rule_of_its_head_is_looked_at(scenario: Scenario) -> None:
    """By a check on the way, by a line that names it, or since one of its mistakes fails by it."""
    looked_at = {*played(scenario.stem).checked, *(line.rule for line in scenario.lines)}
    looked_at.update(mistaken(scenario.stem, mutant).rule for mutant in scenario.mutants)
    idle = [rule for rule in scenario.holds if rule not in looked_at]
    assert not idle, f"{scenario.stem} claims {', '.join(idle)}, and nothing in it could fail by that"


@pytest.mark.parametrize(("scenario", "mutant"), MISTAKES, ids=[f"{scenario.stem} {mutant}" for scenario, mutant in MISTAKES])
def test_a_mistake_is_found_out(scenario: Scenario, mutant: str) -> None:
    outcome = mistaken(scenario.stem, mutant)
    assert outcome.failure is not None, f"{scenario.stem} holds with {mutant!r}"
    assert outcome.rule in scenario.mutants[mutant], outcome.describe()


@pytest.mark.parametrize(
    ("number", "mutant", "rule"), [("01", "fence not by reads", "L5"), ("15", "let checkpoints overlap", "S8")]
)
def test_the_harm_itself_is_seen_also_when_what_leads_to_it_is_not(number: str, mutant: str, rule: str) -> None:
    outcome = run(number, mutant, only=rule)
    assert outcome.rule == rule, outcome.describe()


@pytest.mark.parametrize("seed", range(3))
def test_40_duplicate_delivery_of_rpc_in_whole_worlds(seed: int) -> None:
    """Not a text: everything that clients do, and each of its adds, fences and reads arrives twice, the second time late."""
    World(seed, faults=replace(CALM, duplicate=1.0), operations=150).run()
