"""Every mutant is caught, and by an invariant that speaks of it."""

from __future__ import annotations

import pytest

from tests.simulation.mutants import first_seeds
from tests.simulation.mutants.catalogue import MUTANTS, RULES, SCENARIO_MUTANTS
from tests.simulation.scenarios.language import all_scenarios

KNOWN = first_seeds.load()


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.timeout(1_800)  # some take a hundred seeds
def test_a_mutant_is_caught(name: str) -> None:
    outcomes = first_seeds.hunt_of(name, KNOWN).run()
    caught = outcomes[-1]
    assert caught.failure is not None, f"{len(outcomes)} seeds did not notice"
    assert caught.rule in RULES[name], caught.describe()


@pytest.mark.parametrize("name", [*MUTANTS, *SCENARIO_MUTANTS])
def test_a_mutant_fits_the_code(name: str) -> None:
    """What it replaces is there: after a renaming in the product, this is the first test to say so."""
    with {**MUTANTS, **SCENARIO_MUTANTS}[name]():
        pass


def test_a_mutant_that_worlds_do_not_catch_has_a_scenario_that_does() -> None:
    with_scenarios = {mutant for scenario in all_scenarios() for mutant in scenario.mutants}
    assert SCENARIO_MUTANTS.keys() <= with_scenarios
