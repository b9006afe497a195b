"""How many fresh seeds it takes until a mutant is caught: ten runs of each, the median for the table in README.md.

python -m tests.simulation.mutants.medians --cores 2 --write              all mutants (half an hour); goes on where it stopped
python -m tests.simulation.mutants.medians --mutant "fence not by reads"  one
python -m tests.simulation.mutants.medians --cores 2 --write --missing    what was measured over other code need not be repeated

With --write each run is noted in medians.json when it is over, and README.md written anew behind the last run of a mutant. Runs
over the present code are not repeated, so it may be stopped at any time. Mutants that are found quickly come first.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.simulation.campaign import Hunt, run_hunts
from tests.simulation.mutants.catalogue import MUTANTS, RULES
from tests.simulation.mutants.measured import RUNS, Measured, Run, load, save
from tests.simulation.seeds import Outcome, fresh_seeds

MOST_SEEDS = 1_000
"""After so many a run gives up: the mutant counts as not caught."""

_SEEDS_RUN = ("cepheid_", "tests.simulation.", "tests.history.")
_SEEDS_DO_NOT_RUN = tuple(f"tests.simulation.{name}" for name in ("campaign", "digests", "mutants", "processes"))

Hunter = Callable[[list[Hunt]], Iterable[tuple[Hunt, Run]]]


def codes_of(mutants: Iterable[str]) -> dict[str, str]:
    """By mutant, a hash of what its seeds run: whatever is loaded now, but of the modules of mutants the one with its own."""
    common = _sources()
    codes: dict[str, str] = {}
    for mutant in mutants:
        own = common.copy()
        own.update(_source(MUTANTS[mutant].__module__))
        codes[mutant] = own.hexdigest()[:12]
    return codes


def code_of_seeds() -> str:
    """The same of seeds without a mutant."""
    return _sources().hexdigest()[:12]


def _sources() -> hashlib._Hash:
    sources = hashlib.sha256()
    for name in sorted(sys.modules):
        if name.startswith(_SEEDS_RUN) and not name.startswith(_SEEDS_DO_NOT_RUN):
            sources.update(_source(name))
    return sources


def _source(module: str) -> bytes:
    file = sys.modules[module].__file__
    return module.encode() + b"\0" + (b"" if file is None else Path(file).read_bytes())


def measure(
    codes: Mapping[str, str], measured: dict[str, Measured], hunt: Hunter, *, runs: int, most_seeds: int = MOST_SEEDS
) -> Iterator[tuple[str, Measured]]:
    """Runs what is missing of these mutants (with the code that counts for each), and tells of each run."""

    def hunts(mutants: Iterable[str], most: int) -> list[Hunt]:
        missing = {mutant: runs - _done(measured.get(mutant), codes[mutant]) for mutant in mutants}
        return [Hunt(mutant, fresh_seeds(most_seeds)) for mutant, count in missing.items() for _ in range(min(count, most))]

    def quick(mutant: str) -> float:
        return measured[mutant].median if mutant in measured else math.inf

    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    for mutants, most in ((set(codes) - set(measured), 1), (set(codes), runs)):  # one run of each that nobody knows, then all
        for done, run in hunt(hunts(sorted(mutants, key=lambda mutant: (quick(mutant), mutant)), most)):
            before = measured.get(done.mutant, Measured(codes[done.mutant], today))
            measured[done.mutant] = before.plus(run, codes[done.mutant], today)
            yield done.mutant, measured[done.mutant]


def _done(measured: Measured | None, code: str) -> int:
    return len(measured.runs) if measured is not None and measured.code == code else 0


def _hunter(cores: int) -> Hunter:
    return lambda hunts: ((hunt, _run_of(outcomes)) for hunt, outcomes in run_hunts(hunts, cores=cores))


def _run_of(outcomes: Sequence[Outcome]) -> Run:
    last = outcomes[-1]
    return Run(len(outcomes), last.rule, hex(last.seed) if last.failure is not None else "")


def _by_chance(mutant: str, measured: Measured) -> str:
    """A rule that does not speak of it may have failed for another reason: a bug, or a check that is wrong."""
    others = [f"{run.rule} (seed {run.failed or 'unknown'})" for run in measured.runs if run.rule and run.rule not in RULES[mutant]]
    return f"; LOOK: rules.py does not expect {', '.join(others)}" if others else ""


def write_pages() -> None:
    from tests.simulation.scenarios.pages import write  # loads all steps: no seed runs them

    write()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.mutants.medians", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--mutant", action="append", choices=MUTANTS, metavar="NAME", help="only this one; may be repeated")
    parser.add_argument("--runs", type=int, default=RUNS, help=f"how many runs the median is of ({RUNS})")
    parser.add_argument("--most-seeds", type=int, default=MOST_SEEDS, help=f"after which a run gives up ({MOST_SEEDS})")
    parser.add_argument("--cores", type=int, default=1, help="in so many processes (1)")
    parser.add_argument("--write", action="store_true", help="keep what was measured, in medians.json and README.md")
    parser.add_argument("--missing", action="store_true", help="what has all its runs over other code stays")
    arguments = parser.parse_args()
    measured = {mutant: each for mutant, each in load().items() if mutant in MUTANTS}
    codes = codes_of(arguments.mutant or MUTANTS)
    if arguments.missing:
        codes.update(
            (mutant, each.code) for mutant, each in measured.items() if len(each.runs) >= arguments.runs and mutant in codes
        )
    done = sum(_done(measured.get(mutant), code) >= arguments.runs for mutant, code in codes.items())
    print(f"{done} of {len(codes)} mutants have their {arguments.runs} runs already", flush=True)
    missed = 0
    for mutant, each in measure(codes, measured, _hunter(arguments.cores), runs=arguments.runs, most_seeds=arguments.most_seeds):
        if arguments.write:
            save(measured)
        if len(each.runs) >= arguments.runs:
            missed += each.missed
            print(f"{mutant}: {each}{_by_chance(mutant, each)}", flush=True)  # now: all of them take long
            if arguments.write:
                write_pages()
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
