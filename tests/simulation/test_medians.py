"""Medians: what is measured is kept, what is kept is not measured again, and the page tells it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.simulation.campaign import Hunt
from tests.simulation.mutants import medians
from tests.simulation.mutants.catalogue import MUTANTS, RULES
from tests.simulation.mutants.measured import RUNS, Measured, Run, load, save
from tests.simulation.mutants.medians import codes_of, measure
from tests.simulation.scenarios.language import FOLDER, all_scenarios
from tests.simulation.seeds import Outcome

ONE, OTHER, THIRD = "confirm below the ack quorum", "look for no orphans", "skip what did not fit into a read"


def hunter(asked: list[str]) -> medians.Hunter:
    """Each mutant takes as many seeds as its name is long."""

    def hunt(hunts: Iterable[Hunt]) -> Iterator[tuple[Hunt, Run]]:
        for each in hunts:
            asked.append(each.mutant)
            yield each, Run(len(each.mutant), "L3")

    return hunt


def test_a_run_tells_the_seed_that_failed_so_that_it_can_be_replayed() -> None:
    held, failed = Outcome(7, None), Outcome(31, "L3: told too early", "L3")
    assert medians._run_of([held, failed]) == Run(2, "L3", "0x1f")
    assert medians._run_of([held, held]) == Run(2, "")


def test_a_cell_tells_the_median_the_range_and_what_caught_it() -> None:
    measured = Measured("c", "d", (Run(1, "S1"), Run(3, "S2"), Run(2, "S1"), Run(1_000, "")))
    assert str(measured) == "2.5 (1..1000; S1 2, S2 1; 1 in vain, 4 runs)"
    assert str(Measured("c", "d", (Run(2, "S1"),) * RUNS)) == "2 (2..2; S1)"


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    measured = {ONE: Measured("c", "d", (Run(1, "S1", "0x1f"), Run(1_000, ""))), OTHER: Measured("e", "f")}
    save(measured, tmp_path / "medians.json")
    assert load(tmp_path / "medians.json") == measured
    assert [path.name for path in tmp_path.iterdir()] == ["medians.json"]


def test_nothing_is_measured_twice_over_the_same_code() -> None:
    codes, asked = {ONE: "now", OTHER: "now"}, list[str]()
    measured = {ONE: Measured("now", "d", (Run(5, "L3"),) * 2), OTHER: Measured("before", "d", (Run(7, "L3"),) * 3)}
    told = list(measure(codes, measured, hunter(asked), runs=3))
    assert asked == [ONE, OTHER, OTHER, OTHER]  # the quick one first
    assert [len(each.runs) for _, each in told] == [3, 1, 2, 3]  # over other code: from the beginning
    assert list(measure(codes, measured, hunter(asked), runs=3)) == []


def test_what_nobody_knows_is_tried_once_before_anything_is_run_often() -> None:
    asked: list[str] = []
    list(measure({OTHER: "c", ONE: "c", THIRD: "c"}, {THIRD: Measured("c", "d", (Run(1, "L3"),))}, hunter(asked), runs=2))
    assert asked == [ONE, OTHER, THIRD, OTHER, ONE]


def test_it_can_be_stopped_after_any_run() -> None:
    asked: list[str] = []
    measured: dict[str, Measured] = {}
    for _ in measure({ONE: "c"}, measured, hunter(asked), runs=4):
        if len(asked) == 3:
            break
    list(measure({ONE: "c"}, measured, hunter(asked), runs=4))
    assert asked == [ONE] * 4
    assert len(measured[ONE].runs) == 4


def test_what_caught_a_mutant_by_chance_is_shown() -> None:
    caught = Measured("c", "d", (Run(1, "L3", "0xa"), Run(2, "H9", "0xb")))
    assert medians._by_chance(ONE, caught) == "; LOOK: rules.py does not expect H9 (seed 0xb)"
    assert medians._by_chance(ONE, Measured("c", "d", (Run(1, "L3"), Run(9, "")))) == ""


def test_the_file_says_over_which_code_and_by_which_rules_that_are_expected() -> None:
    """When the rules of a mutant become fewer, what was measured before goes: it was caught by something else."""
    measured = load()
    assert [mutant for mutant, each in measured.items() if not each.code] == []
    assert {mutant: unexpected for mutant, each in measured.items() if (unexpected := each.rules.keys() - RULES[mutant])} == {}


def test_the_code_of_a_mutant_is_what_its_seeds_run() -> None:
    codes = codes_of([ONE, OTHER, THIRD])
    assert codes[ONE] == codes[OTHER] != codes[THIRD]  # those are of one module


@pytest.mark.page
def test_the_file_and_the_page_name_no_mutant_that_is_no_more() -> None:
    """That the page tells what the file has, and all mutants is looked at in test_scenario_language.py."""
    assert load().keys() <= MUTANTS.keys()
    assert all(0 < len(each.runs) <= RUNS for each in load().values())
    page = (FOLDER.parent / "README.md").read_text(encoding="utf-8")
    with_scenarios = {mutant for scenario in all_scenarios() for mutant in scenario.mutants}
    assert [mutant for mutant in MUTANTS if f"| {mutant} |" not in page] == []
    assert [mutant for mutant in MUTANTS if page.count(f"| {mutant} |") > 1 and mutant not in with_scenarios] == []
