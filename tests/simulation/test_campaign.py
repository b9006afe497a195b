"""Campaigns: what many seeds add up to, in one process or several, also when one of them ends."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.simulation.__main__ import main
from tests.simulation.campaign import Hunt, Totals, run_campaign, run_hunts
from tests.simulation.processes import ProcessEnded, run_jobs
from tests.simulation.seeds import Outcome, run_seed
from tests.simulation.world.world import World

README = Path(__file__).with_name("README.md")
MUTANT = "confirm below the ack quorum"
MARK, OVERLAP = "15_mark_regression", "let checkpoints overlap"


@pytest.mark.slow
def test_two_processes_find_what_one_finds() -> None:
    alone, shared = run_campaign(range(4)), run_campaign(range(4), cores=2)
    assert (alone.operations, alone.faults, alone.checks) == (shared.operations, shared.faults, shared.checks)
    assert (alone.seeds, alone.fewest_operations, alone.fewest_faults) == (4, shared.fewest_operations, shared.fewest_faults)


def test_a_failure_is_told_with_the_command_that_replays_it() -> None:
    told: list[Outcome] = []
    totals = run_campaign([0, 1], mutant=MUTANT, on_outcome=told.append)
    assert sorted(outcome.seed for outcome in told) == [0, 1]
    assert [outcome.rule for outcome in totals.failures] == ["L3", "L3"]
    assert f'python -m tests.simulation --seed 0x1 --mutant "{MUTANT}" --trace' in "".join(map(Outcome.describe, told))
    assert "2 failed" in totals.lines()[0]


def end_at_three(number: int) -> int:
    if number == 3:
        os._exit(7)
    return number * number


@pytest.mark.slow
def test_a_process_that_ends_costs_its_own_job_alone() -> None:
    answers = dict(run_jobs(end_at_three, range(6), cores=2))
    ended = answers.pop(3)
    assert answers == {0: 0, 1: 1, 2: 4, 4: 16, 5: 25}
    assert isinstance(ended, ProcessEnded)
    assert "exit code 7" in str(ended)


def test_a_mistake_of_the_simulator_is_a_failed_seed() -> None:
    class Stumbling(World):
        async def _live(self) -> None:
            raise LookupError("nobody is there")

    outcome = run_seed(5, new_world=Stumbling)
    assert outcome.rule == "LookupError"
    assert "nobody is there" in outcome.describe()
    assert "in _live" in outcome.describe()


def test_a_hunt_ends_with_the_first_seed_that_fails() -> None:
    ((_, outcomes),) = run_hunts([Hunt(MUTANT, range(50))])
    assert [outcome.failure is None for outcome in outcomes] == [True] * (len(outcomes) - 1) + [False]


def test_totals_know_their_weakest_seed() -> None:
    totals = Totals()
    for operations, faults in ((300, 9), (250, 4), (400, 7)):
        totals.add(Outcome(1, None, operations={"append": operations}, faults={"crash": faults}, cpu_s=0.5))
    totals.elapsed_s = 3.0
    assert (totals.fewest_operations, totals.fewest_faults) == (250, 4)
    assert totals.lines()[0] == "seeds       3 in 3.0 s (1.00/s), 1.5 core-seconds (2.00 seeds each), 0 failed"
    assert totals.lines()[1] == "operations  950 (633 per core-second, at least 250 a seed): append 950"


def test_the_readme_names_every_file_in_the_table_of_its_folder() -> None:
    files = README.read_text(encoding="utf-8").partition("## Files")[2].partition("## Rules")[0]
    tables = {title.partition("/")[0]: table for title, _, table in (part.partition("\n") for part in files.split("\n### ")[1:])}
    tables[""] = files.partition("\n### ")[0]
    folders = {
        path: path.relative_to(README.parent).parts[0] if path.parent != README.parent else ""
        for path in README.parent.rglob("*.py")
    }
    modules = [path for path in folders if not path.name.startswith(("test_", "conftest"))]
    assert [path.name for path in modules if f"`{path.name}`" not in tables[folders[path]]] == []


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--seeds", "1"], 0, "0 failed"),
        (["--seed", "0x0", "--digest"], 0, "all held"),
        (["--seed", "0x0", "--mutant", MUTANT], 1, "replay: python -m tests.simulation --seed 0x0 --mutant"),
        (["--scenario", "15", "--mutant", OVERLAP, "--only", "S8"], 1, f"--scenario {MARK} --mutant '{OVERLAP}' --only S8 --trace"),
    ],
)
def test_the_command_says_what_came_out(
    flags: list[str], code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["simulation", *flags])
    assert main() == code
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--seeds", "0"], "--seeds and --cores are 1 at least"),
        (["--seeds", "2", "--shrink"], "--shrink is for one seed"),
        (["--seeds", "2", "--trace"], "--trace is for one seed"),
        (["--without", "3"], "--without is for one seed"),
        (["--seed", "1", "--without", "9-3"], "invalid"),
        (["--seeds", "2", "--branches", "--mutant", MUTANT], "without --mutant"),
        (["--seeds", "7", "--only", "S1"], "--only is for one seed or scenario"),
        (["--seed", "7", "--branches"], "--branches is for many seeds, without --seed"),
        (["--scenario", "01", "--branches"], "--branches is for many seeds, without --scenario"),
        (["--seed", "7", "--fresh"], "--fresh is for many seeds"),
        (["--seed", "7", "--scenario", "01"], "one of them"),
        (["--seed", "3", "--seeds", "5"], "--seeds is for many seeds, without --seed"),
        (["--seed", "3", "--seeds", "100"], "--seeds is for many seeds, without --seed"),
        (["--seed", "3", "--start", "7"], "--start is for many seeds, without --seed"),
        (["--seed", "3", "--start", "0"], "--start is for many seeds, without --seed"),
        (["--scenario", "01", "--cores", "4"], "--cores is for many seeds, without --scenario"),
        (["--start", "0", "--fresh"], "--start is for the fixed seeds, without --fresh"),
        (["--operations", "0"], "--operations is for one seed"),
        (["--seed", "7", "--shrink", "--digest"], "--digest is of one run"),
        (["--seed", "7", "--shrink", "--only", "S1"], "--only is for one seed or scenario"),
        (["--seed", "0", "--mutant", MUTANT, "--only", "S99"], "no rule is called 'S99'"),
        (["--scenario", "01", "--only", "s1"], "no rule is called 's1'"),
    ],
)
def test_what_would_be_left_out_in_silence_is_refused(
    flags: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["simulation", *flags])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
