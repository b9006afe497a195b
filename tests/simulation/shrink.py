"""Makes a failing run smaller: leaves out operations, faults and actions as long as the same rule still fails.

    failing run ──► fewer operations? ──► half of the faults? a quarter? … each? ──► the same with actions ──► again

A run that lacks a fault takes another course from there on, and may deal out others under higher numbers: so what can still
be left out is asked of the latest failing run, and not of the first (delta debugging, greedy).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tests.simulation.cuts import NO_CUTS, Cuts
from tests.simulation.seeds import Outcome, run_seed

Run = Callable[[Cuts], Outcome]
MOST_RUNS = 400


class Shrinker:
    """`best` is the smallest failing run so far."""

    def __init__(self, first: Outcome, run: Run, *, most_runs: int = MOST_RUNS) -> None:
        assert first.failure is not None, "nothing to shrink: the run held"
        self.first = self.best = first
        self.runs = 0
        self._run = run
        self._most_runs = most_runs

    def shrink(self) -> Outcome:
        before = None
        while before is not self.best and self.runs < self._most_runs:
            before = self.best
            self._want_fewer_operations()
            self._leave_out(lambda outcome: _left(outcome.faults_dealt, outcome.cuts.faults), _without_faults)
            self._leave_out(lambda outcome: _left(outcome.actions_taken, outcome.cuts.actions), _without_actions)
        return self.best

    def _still_fails(self, cuts: Cuts) -> bool:
        if self.runs >= self._most_runs:
            return False
        self.runs += 1
        outcome = self._run(cuts)
        if outcome.rule != self.best.rule:
            return False
        self.best = outcome
        return True

    def _want_fewer_operations(self) -> None:
        """The smallest number with which it fails, by halving; each number is a run of its own, so this is a good guess only."""
        holds, fails = -1, sum(self.best.operations.values()) if self.best.cuts.operations is None else self.best.cuts.operations
        while fails - holds > 1 and self.runs < self._most_runs:
            middle = (holds + fails) // 2
            if self._still_fails(replace(self.best.cuts, operations=middle)):
                fails = middle
            else:
                holds = middle

    def _leave_out(self, left: Callable[[Outcome], list[int]], without: Callable[[Cuts, list[int]], Cuts]) -> None:
        size = len(left(self.best))
        while size:
            place = 0
            while chunk := left(self.best)[place : place + size]:
                if not self._still_fails(without(self.best.cuts, chunk)):
                    place += size
            size //= 2


def shrink(seed: int, *, mutant: str | None = None, cuts: Cuts = NO_CUTS, most_runs: int = MOST_RUNS) -> Shrinker | None:
    """None: the seed holds. `best` of the answer has the trace."""
    first = run_seed(seed, mutant=mutant, cuts=cuts)
    if first.failure is None:
        return None
    shrinker = Shrinker(first, lambda cuts: run_seed(seed, mutant=mutant, cuts=cuts), most_runs=most_runs)
    shrinker.shrink()
    shrinker.best = run_seed(seed, mutant=mutant, cuts=shrinker.best.cuts, trace=True)
    return shrinker


def _left(numbers: int, cut: frozenset[int]) -> list[int]:
    return [number for number in range(numbers) if number not in cut]


def _without_faults(cuts: Cuts, numbers: list[int]) -> Cuts:
    return replace(cuts, faults=cuts.faults.union(numbers))


def _without_actions(cuts: Cuts, numbers: list[int]) -> Cuts:
    return replace(cuts, actions=cuts.actions.union(numbers))
