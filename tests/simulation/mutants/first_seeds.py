"""For each mutant a fixed seed that catches it, in `first_seeds.json`: its test needs one world instead of up to two hundred.

python -m tests.simulation.mutants.first_seeds --cores 2 --write      after changes that made these tests slow

A seed that does not catch its mutant any more, because the code changed, costs time and nothing else: the hunt goes on with
the seeds from 0 on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.simulation.campaign import Hunt, run_hunts
from tests.simulation.mutants.catalogue import MUTANTS, RULES

FILE = Path(__file__).with_name("first_seeds.json")
MOST_SEEDS = 200


def load() -> dict[str, int]:
    found: dict[str, int] = json.loads(FILE.read_text()) if FILE.exists() else {}
    return found


def hunt_of(mutant: str, known: Mapping[str, int]) -> Hunt:
    """Return the hunt that begins with the seed that caught the mutant last."""
    first = [known[mutant]] if mutant in known else []
    return Hunt(mutant, [*first, *(seed for seed in range(MOST_SEEDS) if seed not in first)])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="write first_seeds.json")
    options = parser.parse_args(arguments)
    known = load()
    found: dict[str, int] = {}
    for hunt, outcomes in run_hunts([hunt_of(mutant, known) for mutant in MUTANTS], cores=options.cores):
        caught = outcomes[-1]
        if caught.failure is None or caught.rule not in RULES[hunt.mutant]:
            print(f"{hunt.mutant}: not caught by {len(outcomes)} seeds ({caught.rule or 'no rule'} failed)", flush=True)
            continue
        found[hunt.mutant] = caught.seed
        print(f"{hunt.mutant}: seed {caught.seed} ({caught.rule}) after {len(outcomes)}", flush=True)
        if options.write:
            save({**known, **found})
    if options.write:
        save(found)


def save(found: Mapping[str, int]) -> None:
    """Write one line for each mutant: people who add different ones have nothing to merge."""
    lines = ",\n".join(f"  {json.dumps(mutant)}: {found[mutant]}" for mutant in sorted(found))
    FILE.write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    main()
