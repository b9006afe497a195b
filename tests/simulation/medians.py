"""How many fresh seeds it takes until a mutant is caught: the median of ten runs, for each of them, as a table in Markdown.

python -m tests.simulation.medians --cores 2                       all mutants (takes an hour)
python -m tests.simulation.medians --mutant "fence not by reads"   one
python -m tests.simulation.medians --cores 2 --write               and into the table of README.md; other rows stay
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.simulation.campaign import Hunt, run_hunts
from tests.simulation.mutants import MUTANTS
from tests.simulation.seeds import fresh_seeds

RUNS = 10
MOST_SEEDS = 1_000
"""After so many a run gives up: the mutant counts as not caught."""

HEAD = ["| mutant | caught by | seeds until caught: median | least..most | runs |", "|---|---|---|---|---|"]
README = Path(__file__).with_name("README.md")
_BEGIN = "<!-- written by tests.simulation.medians -->"
_END = "<!-- until here -->"


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
        missed = f", {self.missed} without success" if self.missed else ""
        median = f"{statistics.median(self.seeds):g}"
        return f"| {mutant} | {rules} | {median} | {min(self.seeds)}..{max(self.seeds)}{missed} | {len(self.seeds)} |"


def measure(mutants: Sequence[str], *, runs: int, most_seeds: int = MOST_SEEDS, cores: int = 1) -> dict[str, Catches]:
    hunts = [Hunt(mutant, fresh_seeds(most_seeds)) for mutant in mutants for _ in range(runs)]
    catches = {mutant: Catches() for mutant in mutants}
    for hunt, outcomes in run_hunts(hunts, cores=cores):
        of_mutant = catches[hunt.mutant]
        of_mutant.add(len(outcomes), outcomes[-1].rule)
        if len(of_mutant.seeds) == runs:
            print(of_mutant.row(hunt.mutant), flush=True)  # now: all of them take long
    return catches


def rows_of_readme() -> dict[str, str]:
    """By mutant."""
    table = README.read_text(encoding="utf-8").partition(_BEGIN)[2].partition(_END)[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and line not in HEAD]
    return {row.split(" | ")[0].removeprefix("| "): row for row in rows}


def write(rows: Mapping[str, str]) -> None:
    """Rows of mutants that are no more go; one that was never measured says so."""
    text = README.read_text(encoding="utf-8")
    before, after = text.partition(_BEGIN)[0], text.partition(_BEGIN)[2].partition(_END)[2]
    known = {**rows_of_readme(), **rows}
    table = [known.get(mutant, f"| {mutant} | | not measured yet | | |") for mutant in MUTANTS]
    README.write_text("\n".join([before + _BEGIN, *HEAD, *table, _END + after]), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.medians", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--mutant", action="append", choices=MUTANTS, metavar="NAME", help="only this one; may be repeated")
    parser.add_argument("--runs", type=int, default=RUNS, help=f"how many runs the median is of ({RUNS})")
    parser.add_argument("--most-seeds", type=int, default=MOST_SEEDS, help=f"after which a run gives up ({MOST_SEEDS})")
    parser.add_argument("--cores", type=int, default=1, help="in so many processes (1)")
    parser.add_argument("--write", action="store_true", help="write what was measured into README.md")
    arguments = parser.parse_args()
    print("\n".join(HEAD))
    mutants = arguments.mutant or list(MUTANTS)
    catches = measure(mutants, runs=arguments.runs, most_seeds=arguments.most_seeds, cores=arguments.cores)
    if arguments.write:
        write({mutant: of_mutant.row(mutant) for mutant, of_mutant in catches.items()})
    return 1 if any(of_mutant.missed for of_mutant in catches.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
