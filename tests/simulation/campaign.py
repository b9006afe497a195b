"""Many seeds, in as many processes as there are cores to give, and what they did in all.

A failure is told at once, not at the end. Figures per second are per second of processor time, so that they do not depend on
what else a machine does.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tests.simulation.processes import ProcessEnded, run_jobs
from tests.simulation.seeds import Outcome, run_seed


@dataclass(slots=True)
class Totals:
    seeds: int = 0
    failures: list[Outcome] = field(default_factory=list)
    operations: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    checks: Counter[str] = field(default_factory=Counter)
    fewest_operations: int = 0  # of any seed
    fewest_faults: int = 0
    cpu_s: float = 0.0
    elapsed_s: float = 0.0

    def add(self, outcome: Outcome) -> None:
        operations, faults = sum(outcome.operations.values()), sum(outcome.faults.values())
        self.fewest_operations = min(self.fewest_operations, operations) if self.seeds else operations
        self.fewest_faults = min(self.fewest_faults, faults) if self.seeds else faults
        self.seeds += 1
        self.operations.update(outcome.operations)
        self.faults.update(outcome.faults)
        self.checks.update(outcome.checks)
        self.cpu_s += outcome.cpu_s
        if outcome.failure is not None:
            self.failures.append(outcome)

    def lines(self) -> list[str]:
        rate = self.seeds / self.elapsed_s if self.elapsed_s else 0.0
        lines = [
            f"seeds       {self.seeds} in {self.elapsed_s:.1f} s ({rate:.2f}/s), {self.cpu_s:.1f} core-seconds "
            f"({self._per_core(self.seeds):.2f} seeds each), {len(self.failures)} failed"
        ]
        for title, counter, fewest in (
            ("operations", self.operations, f", at least {self.fewest_operations} a seed"),
            ("faults", self.faults, f", at least {self.fewest_faults} a seed"),
            ("checks", self.checks, ""),
        ):
            kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(counter.items()))
            lines.append(f"{title:11} {counter.total()} ({self._per_core(counter.total()):.0f} per core-second{fewest}): {kinds}")
        if self.failures:
            lines.append("failed      " + " ".join(f"{outcome.seed:#x} ({outcome.rule})" for outcome in self.failures))
        return lines

    def _per_core(self, count: int) -> float:
        return count / self.cpu_s if self.cpu_s else 0.0


def run_campaign(
    seeds: Sequence[int], *, cores: int = 1, mutant: str | None = None, on_outcome: Callable[[Outcome], None] = lambda _: None
) -> Totals:
    """`on_outcome` hears of each seed when it is done; in what order, depends on the machine."""
    totals = Totals()
    began_s = time.monotonic()
    for (seed, _), answer in run_jobs(_run, [(seed, mutant) for seed in seeds], cores=cores):
        outcome = Outcome(seed, str(answer), "process ended", mutant=mutant) if isinstance(answer, ProcessEnded) else answer
        totals.add(outcome)
        on_outcome(outcome)
    totals.elapsed_s = time.monotonic() - began_s
    return totals


@dataclass(frozen=True, slots=True)
class Hunt:
    """A known mistake, and the seeds that have to notice it."""

    mutant: str
    seeds: Sequence[int]

    def run(self) -> list[Outcome]:
        """Until one fails: the last one did, or none."""
        outcomes = []
        for seed in self.seeds:
            outcomes.append(run_seed(seed, mutant=self.mutant))
            if outcomes[-1].failure is not None:
                break
        return outcomes


def run_hunts(hunts: Sequence[Hunt], *, cores: int = 1) -> Iterator[tuple[Hunt, list[Outcome]]]:
    for hunt, answer in run_jobs(Hunt.run, hunts, cores=cores):
        if isinstance(answer, ProcessEnded):
            raise answer
        yield hunt, answer


def _run(job: tuple[int, str | None]) -> Outcome:
    seed, mutant = job
    return run_seed(seed, mutant=mutant)
