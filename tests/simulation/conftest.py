"""What the tests of this folder share: the seeds of CI and the hunt for the mutants, each run once, on all cores."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

from tests.simulation.campaign import Hunt, Totals, run_campaign, run_hunts
from tests.simulation.mutants import MUTANTS
from tests.simulation.seeds import Outcome, kept_seeds, seeds_of_the_code

FIXED_SEEDS = 80
FRESH_SEEDS = int(os.environ.get("CEPHEID_FRESH_SEEDS", "200"))
MOST_SEEDS_OF_A_MUTANT = 200
RARE = {"trim by a size that grows": 500, "wait for metadata after a silence": 500}
"""Their medians are 67 and 86: one time in eight, or in five, none of the first 200 seeds notices."""
CORES = min(os.cpu_count() or 1, 8)


@pytest.fixture(scope="module", autouse=True)
def _collect_only_what_worlds_leave() -> Iterator[None]:
    """What the rest of the test run has left in memory is no business of the simulator.

    Garbage is collected after every seed: behind some thousand other tests that took as long as the seed.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def ci_run() -> Totals:
    """The fixed seeds, those that found a bug once, and others whenever a line of the code has changed."""
    seeds = dict.fromkeys([*range(FIXED_SEEDS), *kept_seeds(), *seeds_of_the_code(FRESH_SEEDS)])  # a kept one may be a fixed one
    return run_campaign(list(seeds), cores=CORES)


@pytest.fixture(scope="session")
def mutant_hunts() -> dict[str, list[Outcome]]:
    """Each mutant's runs over the fixed seeds; the last one failed, or all held."""
    hunts = [Hunt(mutant, range(RARE.get(mutant, MOST_SEEDS_OF_A_MUTANT))) for mutant in MUTANTS]
    return {hunt.mutant: outcomes for hunt, outcomes in run_hunts(hunts, cores=CORES)}
