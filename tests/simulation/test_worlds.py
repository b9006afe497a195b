"""Random worlds: some fixed seeds, those that once found a bug, and some of this state of the code. A failure prints its replay.

More of the fixed seeds run in test_coverage.py, which adds up what they did.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.simulation.seeds import FEWEST_FAULTS, FEWEST_OPERATIONS, kept_seeds, run_seed, seeds_of_the_code
from tests.simulation.world.replays import PARTS, Occasion, Replays
from tests.simulation.world.world import World

REPOSITORY = Path(__file__).parents[2]

FIXED = 6
OF_THE_CODE = 6
"""So many always run: with every second kept seed they take about a hundred seconds of one core."""
FRESH_SEEDS = int(os.environ.get("CEPHEID_FRESH_SEEDS", "60"))
"""So many seeds of the code run with the slow tests."""


def seeds() -> list[Any]:
    of_the_code = seeds_of_the_code(max(FRESH_SEEDS, OF_THE_CODE))
    kept = list(kept_seeds())
    always = dict.fromkeys([*range(FIXED), *kept[::2], *of_the_code[:OF_THE_CODE]])  # a kept one may be a fixed one
    later = dict.fromkeys([*kept[1::2], *of_the_code[OF_THE_CODE:]])
    slow = [pytest.param(seed, marks=pytest.mark.slow) for seed in later if seed not in always]
    return [*map(pytest.param, always), *slow]


@pytest.mark.parametrize("seed", seeds(), ids=hex)
def test_everything_promised_holds(seed: int) -> None:
    outcome = run_seed(seed)
    assert outcome.failure is None, outcome.describe()
    assert sum(outcome.operations.values()) >= FEWEST_OPERATIONS
    assert sum(outcome.faults.values()) >= FEWEST_FAULTS


@pytest.mark.slow
def test_copies_are_replayed_all_over_the_course_of_a_world() -> None:
    for seed in range(3):
        world = World(seed)
        world.run()
        taken = world.replays.taken
        assert len(taken) == PARTS, f"seed {seed}: {world.replays}"
        assert all(progress >= part / PARTS for part, progress in enumerate(taken)), f"seed {seed}: {taken}"
        assert taken[0] < 0.5, f"seed {seed}: {taken}"


def test_a_replay_waits_for_its_occasion_until_the_next_part_begins() -> None:
    progress, taken = 0.0, []
    replays = Replays(random.Random(1), lambda: progress)
    replays._due = [(0.1, "fence"), (0.3, "mark"), (0.6, "any moment"), (0.8, "fence")]
    comes: dict[Occasion, list[int]] = {"fence": [5, 15, 35, 85, 90], "mark": [20, 52], "any moment": [55, 61]}
    for percent in range(100):
        progress = percent / 100
        taken += [(percent, occasion) for occasion, when in comes.items() if percent in when and replays.take(occasion)]
    assert taken == [(15, "fence"), (52, "mark"), (61, "any moment"), (85, "fence")]
    replays._due, replays.taken[1:] = [(0.1, "fence"), (0.3, "mark"), (0.6, "fence"), (0.8, "fence")], []
    assert replays.take("any moment")  # the next part has begun long ago


def test_kept_seeds_say_what_they_found() -> None:
    assert len(kept_seeds()) >= 4
    assert all(len(found) > 20 for found in kept_seeds().values())


def test_a_seed_repeats_itself_to_the_byte_also_after_another_seed() -> None:
    first, other, again = (run_seed(seed, trace=True) for seed in (4, 5, 4))
    assert len(first.trace) > 200
    assert list(first.trace) == list(again.trace)
    assert list(first.trace) != list(other.trace)


@pytest.mark.slow
def test_a_traced_run_is_the_run_that_is_not_traced() -> None:
    traced, plain = run_seed(9, trace=True), run_seed(9)
    assert (traced.operations, traced.faults, traced.checks) == (plain.operations, plain.faults, plain.checks)


@pytest.mark.slow
def test_a_seed_means_the_same_in_any_process(tmp_path: Path) -> None:
    """With other hashes of strings, from another directory, with another place for temporary files, or with asyncio's checks."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    surroundings: list[tuple[list[str], Path, dict[str, str]]] = [
        ([], REPOSITORY, {"PYTHONHASHSEED": "1"}),
        ([], elsewhere, {"PYTHONHASHSEED": "2", "TMPDIR": str(elsewhere), "TZ": "Asia/Tokyo", "LC_ALL": "C"}),
        (["-X", "dev"], elsewhere, {"PYTHONHASHSEED": "3", "HOME": str(elsewhere)}),
    ]
    digests = {digest_in(11, flags, directory, environment) for flags, directory, environment in surroundings}
    assert len(digests) == 1, digests


@pytest.mark.slow
def test_a_seed_means_the_same_for_another_build_of_this_python() -> None:
    """Another interpreter of the same minor version, if this machine has one that finds what is installed here."""
    here = Path(sys.executable).resolve()
    found = shutil.which(f"python3.{sys.version_info.minor}", path="/usr/bin:/usr/local/bin:/opt/homebrew/bin")
    if found is None or Path(found).resolve() == here:
        pytest.skip("no other build of this Python on this machine")
    assert digest_in(11, [], REPOSITORY, {}, python=found) == digest_in(11, [], REPOSITORY, {})


def digest_in(seed: int, flags: list[str], directory: Path, environment: dict[str, str], *, python: str = sys.executable) -> str:
    """What a process of its own prints for the seed."""
    installed = [path for path in sys.path if "site-packages" in path or not path.startswith(sys.base_prefix)]
    result = subprocess.run(
        [python, *flags, "-m", "tests.simulation", "--seed", str(seed), "--digest"],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *installed]), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.split()[0]
