"""Random worlds: a fixed set of seeds, and fresh ones that nobody has seen. A failure prints the command that replays it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.seeds import fresh_seeds, run_seed

FIXED = 80
FRESH = int(os.environ.get("CEPHEID_FRESH_SEEDS", "10"))
FEWEST_OPERATIONS = 200
FEWEST_FAULTS = 3


def check_seed(seed: int) -> None:
    outcome = run_seed(seed)
    assert outcome.failure is None, outcome.describe()
    assert sum(outcome.operations.values()) >= FEWEST_OPERATIONS
    assert sum(outcome.faults.values()) >= FEWEST_FAULTS
    assert len(outcome.checks) > 10, f"only {outcome.checks} were checked"


@pytest.mark.parametrize("seed", range(FIXED))
def test_everything_promised_holds_with_a_fixed_seed(seed: int) -> None:
    check_seed(seed)


@pytest.mark.parametrize("number", range(FRESH))
def test_everything_promised_holds_with_a_fresh_seed(number: int) -> None:
    (seed,) = fresh_seeds(1)
    print(f"seed {seed:#x}")
    check_seed(seed)


def test_a_seed_repeats_itself_to_the_byte() -> None:
    first, second = run_seed(7, trace=True), run_seed(7, trace=True)
    assert len(first.trace) > 200
    assert list(first.trace) == list(second.trace)
    assert list(run_seed(8, trace=True).trace) != list(first.trace)


def test_a_seed_repeats_itself_in_another_process_with_another_hash_seed() -> None:
    traces = {
        subprocess.run(
            [sys.executable, "-m", "tests.simulation", "--seed", "11", "--trace"],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(traces) == 1
    assert "all held" in traces.pop()
