"""Runs seeds and says what they did.

python -m tests.simulation --seeds 200            the seeds 0..199
python -m tests.simulation --seeds 50 --fresh     seeds nobody has seen
python -m tests.simulation --seed 0x5eed --trace  one seed, step by step
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.simulation.seeds import FIRST_FRESH, Outcome, fresh_seeds, run_seed


def main() -> int:
    arguments = _parse()
    if arguments.seed is not None:
        return _run_one(arguments.seed, trace=arguments.trace)
    seeds = fresh_seeds(arguments.seeds) if arguments.fresh else range(arguments.start, arguments.start + arguments.seeds)
    return _run_many(list(seeds))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds to run (100)")
    parser.add_argument("--start", type=lambda text: int(text, 0), default=0, help="the first of them (0)")
    parser.add_argument("--fresh", action="store_true", help=f"random seeds from {FIRST_FRESH:#x} on instead")
    parser.add_argument("--seed", type=lambda text: int(text, 0), help="run this one only")
    parser.add_argument("--trace", action="store_true", help="with --seed: print everything that happens")
    return parser.parse_args()


def _run_one(seed: int, *, trace: bool) -> int:
    outcome = run_seed(seed, trace=trace)
    if trace:
        print("\n".join(outcome.trace))
    print(outcome.describe())
    return 1 if outcome.failure else 0


def _run_many(seeds: list[int]) -> int:
    operations: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    checks: Counter[str] = Counter()
    failures: list[Outcome] = []
    began = time.monotonic()
    for done, seed in enumerate(seeds, 1):
        outcome = run_seed(seed)
        operations.update(outcome.operations)
        faults.update(outcome.faults)
        checks.update(outcome.checks)
        if outcome.failure:
            failures.append(outcome)
            print(outcome.describe(), flush=True)  # now, also into a file: a long campaign may be cut short
        if sys.stderr.isatty():
            print(f"\r{done}/{len(seeds)}", end="", file=sys.stderr)
    elapsed_s = time.monotonic() - began
    print(f"seeds       {len(seeds)} in {elapsed_s:.1f} s: {len(seeds) / elapsed_s:.2f}/s, {len(failures)} failed")
    for title, counter in (("operations", operations), ("faults", faults), ("checks", checks)):
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(counter.items()))
        print(f"{title:11} {counter.total()} ({counter.total() / elapsed_s:.0f}/s): {kinds}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
