"""Many seeds, in as many processes as there are cores to give, and what they did in all.

    seeds ──► share 1 ──► process ──┐ one Outcome a seed
          └─► share k ──► process ──┴──► Totals; a failure is told at once, not at the end

Plain processes that share nothing: a seed means the same in each of them. Figures per second are per second of processor
time, so that they do not depend on what else a machine does.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait

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
    outcomes = (run_seed(seed, mutant=mutant) for seed in seeds) if cores == 1 else _outcomes_of_processes(seeds, cores, mutant)
    for outcome in outcomes:
        totals.add(outcome)
        on_outcome(outcome)
    totals.elapsed_s = time.monotonic() - began_s
    return totals


def _outcomes_of_processes(seeds: Sequence[int], cores: int, mutant: str | None) -> Iterator[Outcome]:
    spawn = multiprocessing.get_context("spawn")  # a fork would copy whatever runs here
    running = {}
    for share in filter(None, (seeds[core::cores] for core in range(cores))):
        receiver, sender = spawn.Pipe(duplex=False)
        process = spawn.Process(target=_run_share, args=(share, mutant, sender), daemon=True)
        process.start()
        sender.close()  # ours: the end of the process is the end of the pipe
        running[receiver] = process, iter(share)
    try:
        while running:
            for receiver in wait(list(running)):
                assert isinstance(receiver, Connection)
                process, expected = running[receiver]
                try:
                    outcome = receiver.recv()
                except EOFError:
                    del running[receiver]
                    process.join()
                    if (seed := next(expected, None)) is not None:
                        yield Outcome(seed, f"its process ended with exit code {process.exitcode}", "process ended")
                    continue
                next(expected)
                yield outcome
    finally:
        for process, _ in running.values():
            process.terminate()
            process.join()


def _run_share(seeds: Sequence[int], mutant: str | None, sender: Connection) -> None:
    for seed in seeds:
        sender.send(run_seed(seed, mutant=mutant))
