"""Failing runs get smaller, and fail by the same rule."""

from __future__ import annotations

import pytest

from tests.simulation.cuts import Cuts, format_numbers, parse_numbers
from tests.simulation.seeds import Outcome, run_seed
from tests.simulation.shrink import Shrinker, shrink

MUTANT = "confirm below the ack quorum"


@pytest.mark.parametrize(
    ("numbers", "text"), [((), ""), ((4,), "4"), ((3, 4, 5, 6, 7, 8, 9, 14), "3-9,14"), ((0, 1, 5, 7, 8), "0-1,5,7-8")]
)
def test_numbers_are_written_as_runs_and_read_back(numbers: tuple[int, ...], text: str) -> None:
    assert format_numbers(numbers) == text
    assert parse_numbers(text) == frozenset(numbers)


def test_what_is_left_out_stands_in_the_command() -> None:
    cuts = Cuts(frozenset({3, 4, 9}), frozenset({1}), 120)
    assert Outcome(7, "broken", "S1", cuts).replay() == (
        "python -m tests.simulation --seed 0x7 --without 3-4,9 --skip 1 --operations 120"
    )


def test_only_what_a_failure_needs_is_left() -> None:
    """A run of 40 faults, 10 actions and 200 operations fails when faults 7 and 23, action 4 and 60 operations are in it."""

    def run(cuts: Cuts) -> Outcome:
        wanted = 200 if cuts.operations is None else cuts.operations
        needed = not cuts.faults & {7, 23} and 4 not in cuts.actions and wanted >= 60
        outcome = Outcome(1, "broken" if needed else None, "S1" if needed else "", cuts, faults_dealt=40, actions_taken=10)
        outcome.operations = {"append": wanted}
        return outcome

    shrinker = Shrinker(run(Cuts()), run)
    best = shrinker.shrink()
    assert best.cuts == Cuts(frozenset(range(40)) - {7, 23}, frozenset(range(10)) - {4}, 60)
    assert shrinker.runs < 120


def test_another_failure_is_no_success() -> None:
    def run(cuts: Cuts) -> Outcome:
        return Outcome(1, "broken", "S2" if cuts.faults else "S1", cuts, operations={"append": 1}, faults_dealt=5)

    assert Shrinker(run(Cuts()), run).shrink().cuts.faults == frozenset()


def test_it_stops_when_it_may_run_no_more() -> None:
    def run(cuts: Cuts) -> Outcome:
        return Outcome(1, "broken", "S1", cuts, operations={"append": 1_000}, faults_dealt=1_000)

    shrinker = Shrinker(run(Cuts()), run, most_runs=5)
    shrinker.shrink()
    assert shrinker.runs == 5


@pytest.mark.slow
def test_nothing_happens_by_a_fault_that_is_left_out() -> None:
    whole = run_seed(3)
    bare = run_seed(3, cuts=Cuts(faults=frozenset(range(100_000))))
    assert sum(whole.faults.values()) > 10
    assert not bare.faults
    assert bare.failure is None


@pytest.mark.slow
def test_a_mutants_run_shrinks_to_what_it_needs() -> None:
    """Nothing has to break for an entry to be confirmed by too few bookies."""
    seed = next(seed for seed in range(50) if sum(run_seed(seed, mutant=MUTANT).faults.values()) >= 3)
    shrinker = shrink(seed, mutant=MUTANT)
    assert shrinker is not None
    first, best = shrinker.first, shrinker.best
    assert (first.rule, best.rule) == ("L3", "L3")
    assert sum(best.faults.values()) <= 1
    assert sum(best.operations.values()) < 30
    assert "VIOLATION L3" in best.trace[-1]
    assert run_seed(seed, mutant=MUTANT, cuts=best.cuts, trace=True).digest() == best.digest()


@pytest.mark.slow
def test_a_seed_that_holds_has_nothing_to_shrink() -> None:
    assert shrink(0) is None
