"""Every mutant is caught, and by an invariant that speaks of it."""

from __future__ import annotations

import pytest

from tests.simulation.mutant_rules import RULES
from tests.simulation.mutants import MUTANTS
from tests.simulation.seeds import Outcome


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.timeout(900)  # the first one waits for all of them
def test_a_mutant_is_caught(name: str, mutant_hunts: dict[str, list[Outcome]]) -> None:
    outcomes = mutant_hunts[name]
    caught = outcomes[-1]
    assert caught.failure is not None, f"{len(outcomes)} seeds did not notice"
    print(f"{name}: {caught.rule} after {len(outcomes)} seeds: {caught.failure}")
    assert caught.rule in RULES[name], caught.describe()
