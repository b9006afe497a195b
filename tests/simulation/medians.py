"""How many fresh seeds it takes until a mutant is caught: the median of ten runs, for each of them, as a table in Markdown.

python -m tests.simulation.medians --cores 2                       all mutants (takes an hour)
python -m tests.simulation.medians --mutant "fence not by reads"   one
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.simulation.campaign import Hunt, run_hunts
from tests.simulation.mutants import MUTANTS
from tests.simulation.seeds import fresh_seeds

RUNS = 10
MOST_SEEDS = 1_000
"""After so many a run gives up: the mutant counts as not caught."""


@dataclass(slots=True)
class Catches:
    """The runs of one mutant: how many seeds each took, and which rule failed."""

    seeds: list[int] = field(default_factory=list)
    rules: Counter[str] = field(default_factory=Counter)
    missed: int = 0

    def add(self, seeds: int, rule: str) -> None:
        self.seeds.append(seeds)
        if rule:
            self.rules[rule] += 1
        else:
            self.missed += 1

    def row(self, mutant: str) -> str:
        rules = ", ".join(f"{rule} ({count})" if len(self.rules) > 1 else rule for rule, count in self.rules.most_common())
        missed = f", {self.missed} runs gave up after {MOST_SEEDS}" if self.missed else ""
        return f"| {mutant} | {rules} | {statistics.median(self.seeds):g} | {min(self.seeds)}..{max(self.seeds)}{missed} |"


HEAD = "| mutant | caught by | seeds until caught: median | least..most |\n|---|---|---|---|"


def measure(mutants: Sequence[str], *, runs: int, cores: int) -> dict[str, Catches]:
    hunts = [Hunt(mutant, fresh_seeds(MOST_SEEDS)) for mutant in mutants for _ in range(runs)]
    catches = {mutant: Catches() for mutant in mutants}
    for hunt, outcomes in run_hunts(hunts, cores=cores):
        catches[hunt.mutant].add(len(outcomes), outcomes[-1].rule)
        if len(catches[hunt.mutant].seeds) == runs:
            print(catches[hunt.mutant].row(hunt.mutant), flush=True)  # now: all of them take long
    return catches


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.medians", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--mutant", action="append", choices=MUTANTS, metavar="NAME", help="only this one; may be repeated")
    parser.add_argument("--runs", type=int, default=RUNS, help=f"how many runs the median is of ({RUNS})")
    parser.add_argument("--cores", type=int, default=1, help="in so many processes (1)")
    arguments = parser.parse_args()
    print(HEAD)
    catches = measure(arguments.mutant or list(MUTANTS), runs=arguments.runs, cores=arguments.cores)
    return 1 if any(of_one.missed for of_one in catches.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
