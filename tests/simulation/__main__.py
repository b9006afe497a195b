"""Runs seeds and says what they did.

python -m tests.simulation --seeds 200 --cores 2      the seeds 0..199, in two processes
python -m tests.simulation --seeds 50 --fresh         seeds nobody has seen
python -m tests.simulation --seeds 40 --branches      and which branches of the cores they, and the scenarios, go through
python -m tests.simulation --seed 0x5eed --trace      one seed, step by step
python -m tests.simulation --seed 0x5eed --shrink     a failing one, made smaller, step by step
python -m tests.simulation --seed 0x5eed --digest     a hash of all that happens: compare it with another machine's
python -m tests.simulation --scenario 01 --trace      one scenario, line by line; with --mutant NAME a mistake is in the code
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Collection, Sequence, Set
from pathlib import Path

from tests.simulation.campaign import Totals, run_campaign
from tests.simulation.cuts import Cuts, parse_numbers
from tests.simulation.faults.kinds import KINDS
from tests.simulation.mutants.catalogue import MUTANTS, SCENARIO_MUTANTS
from tests.simulation.seeds import FIRST_FRESH, Outcome, fresh_seeds, run_seed
from tests.simulation.shrink import shrink

_OF_ONE_SEED = ("without", "skip", "operations", "digest", "shrink")
_OF_MANY_SEEDS = ("branches", "fresh", "seeds", "start", "cores")
_INVARIANTS = Path(__file__).parents[2] / "docs" / "invariants.md"
_USUALLY = {"seeds": 100, "start": 0, "cores": 1}
"""What they are when not given. Not defaults of the parser's: `--seeds 100 --seed 3` would look like `--seed 3`."""


def main() -> int:
    arguments = _parse()
    if arguments.scenario is not None:
        return _play(arguments.scenario, arguments.mutant, arguments.only, trace=arguments.trace)
    cuts = Cuts(arguments.without, arguments.skip, arguments.operations)
    if arguments.seed is None:
        fresh = fresh_seeds(arguments.seeds) if arguments.fresh else range(arguments.start, arguments.start + arguments.seeds)
        if arguments.branches:
            return _show_branches(list(fresh), arguments.cores)
        return _run_many(list(fresh), arguments.cores, arguments.mutant)
    if arguments.shrink:
        return _shrink(arguments.seed, cuts, arguments.mutant)
    traced, mutant = arguments.trace or arguments.digest, arguments.mutant
    outcome = run_seed(arguments.seed, trace=traced, cuts=cuts, mutant=mutant, only=arguments.only)
    if arguments.trace:
        print("\n".join(outcome.trace))
    if arguments.digest:
        print(f"{outcome.digest()}  {len(outcome.trace)} lines, Python {sys.version_info.major}.{sys.version_info.minor}")
    print(outcome.describe())
    return 1 if outcome.failure else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )

    def number(text: str) -> int:
        return int(text, 0)

    parser.add_argument("--seeds", type=int, help="how many seeds to run (100)")
    parser.add_argument("--start", type=number, help="the first of them (0)")
    parser.add_argument("--fresh", action="store_true", help=f"random seeds from {FIRST_FRESH:#x} on instead")
    parser.add_argument("--cores", type=int, help="in so many processes (1)")
    parser.add_argument("--seed", type=number, help="run this one only")
    parser.add_argument("--scenario", metavar="NUMBER", help="play this one instead of seeds")
    parser.add_argument("--branches", action="store_true", help="which branches of the cores the seeds and all scenarios take")
    parser.add_argument("--trace", action="store_true", help="with --seed or --scenario: print everything that happens")
    parser.add_argument("--digest", action="store_true", help="with --seed: print a hash of everything that happens")
    parser.add_argument("--shrink", action="store_true", help="with --seed: leave out all that the failure does not need")
    parser.add_argument("--without", type=parse_numbers, default=frozenset(), help="faults to leave out, by number: 3-9,14")
    parser.add_argument("--skip", type=parse_numbers, default=frozenset(), help="actions of visitors and operators to leave out")
    parser.add_argument("--operations", type=int, help="with --seed: how many operations are wanted before the faults end")
    parser.add_argument(
        "--mutant", choices=[*MUTANTS, *SCENARIO_MUTANTS], metavar="NAME", help="with this known mistake put into the code"
    )
    parser.add_argument("--only", metavar="RULE", help="with --seed or --scenario: all rules but this one are muted")
    arguments = parser.parse_args()
    given = {name for name, value in vars(arguments).items() if value != parser.get_default(name)}
    for name, usual in _USUALLY.items():
        if name not in given:
            setattr(arguments, name, usual)
    if (why := _why_senseless(arguments, given)) is not None:
        parser.error(why)
    return arguments


def _why_senseless(arguments: argparse.Namespace, given: Set[str]) -> str | None:
    """What would be left out in silence, or tells nothing and looks like success."""
    if arguments.seeds < 1 or arguments.cores < 1:
        return "--seeds and --cores are 1 at least"
    if {"seed", "scenario"} <= given:
        return "--seed and --scenario are two things to run: one of them"
    one = next(iter(given & {"seed", "scenario"}), None)
    of_one_seed = _OF_ONE_SEED if one else (*_OF_ONE_SEED, "trace")
    if one != "seed" and (wrong := _first(of_one_seed, given)):
        return f"--{wrong} is for one seed: --seed S"
    if one is not None and (wrong := _first(_OF_MANY_SEEDS, given)):
        return f"--{wrong} is for many seeds, without --{one}"
    if {"shrink", "digest"} <= given:
        return "--digest is of one run: without --shrink"
    if {"start", "fresh"} <= given:
        return "--start is for the fixed seeds, without --fresh"
    if {"branches", "mutant"} <= given:
        return "--branches is of the code as it is, without --mutant"
    return _why_not_only(arguments.only, is_of_one_run=one is not None and "shrink" not in given) if "only" in given else None


def _first(names: Sequence[str], given: Set[str]) -> str | None:
    return next((name for name in names if name in given), None)


def _why_not_only(rule: str, *, is_of_one_run: bool) -> str | None:
    if not is_of_one_run:
        return "--only is for one seed or scenario, and not for --shrink"
    from tests.simulation.mutants.rules_alone import ALONE  # with all steps, which seeds do not need

    if rule in ALONE:
        return None
    return f"--only: no rule is called {rule!r}, and with all of them muted everything holds; there are {', '.join(ALONE)}"


def _play(name: str, mutant: str | None, only: str | None, *, trace: bool) -> int:
    from tests.simulation.scenarios.language import ScenarioError
    from tests.simulation.scenarios.runner import run  # with all steps, which seeds do not need

    try:
        outcome = run(name, mutant, trace, only)
    except ScenarioError as error:
        print(error)
        return 2
    if trace:
        print("\n".join(outcome.trace))
    print(outcome.describe())
    return 1 if outcome.failure else 0


def _run_many(seeds: list[int], cores: int, mutant: str | None) -> int:
    done = 0

    def tell(outcome: Outcome) -> None:
        nonlocal done
        done += 1
        if outcome.failure is not None:
            print(outcome.describe(), flush=True)  # now, also into a file: a long campaign may be cut short
        if sys.stderr.isatty():
            print(f"\r{done}/{len(seeds)}", end="", file=sys.stderr)

    totals = run_campaign(seeds, cores=cores, mutant=mutant, on_outcome=tell)
    print("\n".join(with_what_never_came(totals)))
    return 1 if totals.failures else 0


def with_what_never_came(totals: Totals) -> list[str]:
    """Behind what struck and what was checked, what did not: few seeds miss a lot, a campaign should miss nothing."""
    missed = {"faults": _never("kinds", KINDS, totals.faults), "checks": _never("rules", rule_numbers(), totals.checks)}
    return [each for line in totals.lines() for each in (line, missed.get(line.split()[0], "")) if each]


def _never(called: str, wanted: Sequence[str], came: Collection[str]) -> str:
    return f"{'':11} of {len(wanted)} {called} never: {' · '.join(name for name in wanted if name not in came) or 'none'}"


def rule_numbers(kinds: str = "SLRMTOCHV") -> list[str]:
    """Of all statements that docs/invariants.md makes. Without P and B: random worlds have no permissions and no load balancing."""
    return re.findall(rf"^\| ([{kinds}]\d+) \|", _INVARIANTS.read_text(encoding="utf-8"), re.MULTILINE)


def _show_branches(seeds: list[int], cores: int) -> int:
    # needs the library coverage, which nothing else here does
    from tests.simulation.branch_coverage import UNREACHED, branches_of, excused, excused_and_taken, rare_and_missed, totals

    reports = branches_of(seeds, cores=cores)
    print("\n".join(map(str, reports)))
    print(totals(reports))
    reasons = excused(UNREACHED.read_text())
    rare, missed = rare_and_missed(reports, reasons)
    print(f"rare        {rare} that few seeds take, {rare - len(missed)} of them reached")
    print("\n".join(f"    {name}" for name in missed))
    taken = excused_and_taken(reports, reasons, rare_too=False)
    print(f"excused     {len(reasons) - rare} for other reasons, {len(taken)} of them taken all the same")
    print("\n".join(f"    {name}" for name in taken))
    return 0


def _shrink(seed: int, cuts: Cuts, mutant: str | None) -> int:
    shrinker = shrink(seed, cuts=cuts, mutant=mutant)
    if shrinker is None:
        print(f"seed {seed:#x} holds: there is nothing to shrink")
        return 0
    best = shrinker.best
    print("\n".join(best.trace))
    print(f"{shrinker.first.size()} became {best.size()} in {shrinker.runs} runs")
    print(best.describe())
    return 1


if __name__ == "__main__":
    sys.exit(main())
