"""Texts of scenarios are understood in one way, or refused with the place and the nearest step."""

from __future__ import annotations

from pathlib import Path

import pytest

from cepheid_ledger.ensemble_change import EnsembleChanger
from tests.simulation.checks.history import InvariantViolation
from tests.simulation.mutants.catalogue import MUTANTS, SCENARIO_MUTANTS
from tests.simulation.scenarios import language, pages, runner
from tests.simulation.scenarios.language import STEPS, Line, ScenarioError, all_scenarios, load, match, scenario_named
from tests.simulation.scenarios.scene import CourseFailed, Scene

HEAD = "scenario: two lines\ncourse: Nothing happens,\n  twice.\nholds: L5, S3\n"


def text(tmp_path: Path, body: str, head: str = HEAD) -> Path:
    path = tmp_path / "99_two_lines.txt"
    path.write_text(f"{head}\n{body}\n", encoding="utf-8")
    return path


def test_a_text_has_a_head_and_lines_that_may_speak_of_a_rule_and_to_the_reader(tmp_path: Path) -> None:
    head = HEAD + "bug: seed 0x1\nmutants: one mistake -> L5; another -> S3, S4\n  a third -> S5\n"
    found = load(text(tmp_path, "# nobody plays this\n1 s pass   [S3]   # why\n\n2 s pass", head))
    assert (found.number, found.title, found.course) == ("99", "two lines", "Nothing happens, twice.")
    assert (found.bug, found.holds) == ("seed 0x1", ("L5", "S3"))
    assert found.mutants == {"one mistake": ("L5",), "another": ("S3", "S4"), "a third": ("S5",)}
    assert [(line.number, line.text, line.rule) for line in found.lines] == [(10, "1 s pass", "S3"), (12, "2 s pass", "")]


@pytest.mark.parametrize(
    ("head", "told"),
    [
        (HEAD.replace("holds", "hold"), "99_two_lines.txt:4: a head has one line each of"),
        (HEAD + "holds: L6\n", "99_two_lines.txt:5: a head has one line each of"),
        ("scenario: alone\n", "lacks course, holds"),
        (HEAD + "mutants: nothing said of rules\n", "written 'its name -> L5, L10'"),
    ],
)
def test_a_head_that_lacks_something_is_refused(tmp_path: Path, head: str, told: str) -> None:
    with pytest.raises(ScenarioError, match=told):
        load(text(tmp_path, "1 s pass", head))


def test_a_line_that_is_no_step_is_refused_with_its_place_and_the_nearest_step(tmp_path: Path) -> None:
    found = load(text(tmp_path, "1 s pass\nb1 looses power"))
    with pytest.raises(
        ScenarioError, match=r"(?s)99_two_lines.txt:7: b1 looses power.*nearest is '\{bookies\} \(loses\|lose\) power'"
    ):
        runner.play(found)


def test_a_line_that_can_be_read_in_two_ways_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "STEPS", dict(STEPS))
    language.step("b1 (crashes|burns)")(lambda scene: None)
    with pytest.raises(ScenarioError, match="can be read in 2 ways"):
        match(Line("99.txt", 1, "b1 crashes"))
    match(Line("99.txt", 1, "b1 burns"))


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("b1 crashes", "there is no bookie b1"),
        ("1 bookie, brokers east and west\nwest recovers A, which ends empty", "there is no ledger A"),
        ("1 bookie, brokers east and west\nnorth crashes", "there is no broker north, but east, west"),
        ("1 bookie, brokers east and west\n" + "east opens ledger A on b1, Qw 1 Qa 1\n" * 2, "there is a ledger A already"),
        ('1 bookie, broker east\neast opens ledger A on b1, Qw 1 Qa 1\neast is told OK for "x"', 'nobody has appended "x"'),
    ],
)
def test_a_name_that_nothing_has_is_refused_with_its_line(tmp_path: Path, body: str, told: str) -> None:
    with pytest.raises(ScenarioError, match=rf"99_two_lines.txt:\d+: .*\n.*{told}"):
        runner.play(load(text(tmp_path, body)))


def test_a_line_that_turns_out_wrong_ends_the_scenario_with_its_rule(tmp_path: Path) -> None:
    opened = '1 bookie, broker east\neast opens ledger A on b1, Qw 1 Qa 1\neast appends "x" to A'
    course = f'{opened}\nb1 lacks "x"\nb1 stores "x"\nb1 lacks "x"  [L5]'
    outcome = runner.play(load(text(tmp_path, course)), trace=True)
    assert outcome.rule == "L5"
    assert outcome.line is not None
    assert outcome.line.number == 11
    assert 'b1 has "x"' in outcome.describe()
    assert any("99_two_lines.txt:11" in line for line in outcome.trace)


@pytest.mark.parametrize(
    ("error", "rule"),
    [
        (CourseFailed("b1 lacks it"), "V3"),
        (TimeoutError("nobody answers"), "V3"),
        (InvariantViolation("S1", "it is not synced"), "S1"),
        (TypeError("one argument too many"), "TypeError"),
        (AssertionError("the product's own"), "AssertionError"),
    ],
    ids=repr,
)
def test_a_line_gives_its_rule_to_what_did_not_come_true_and_to_nothing_else(
    error: Exception, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(scene: Scene) -> None:
        raise error

    monkeypatch.setattr(language, "STEPS", dict(STEPS))
    language.step("it fails")(fails)
    assert runner.play(load(text(tmp_path, "1 bookie, broker east\nit fails  [V3]"))).rule == rule


@pytest.mark.parametrize("number", ["V3", "06c"])
def test_a_patch_that_no_longer_fits_is_no_mistake_that_a_line_noticed(number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def attempt(self: EnsembleChanger, an_argument_of_yesterday: int) -> bool:
        return True

    monkeypatch.setattr(EnsembleChanger, "_attempt", attempt)
    assert runner.run(number).rule == "TypeError"


def test_the_same_scenario_takes_the_same_course_twice() -> None:
    first, second = (runner.run("04c", trace=True) for _ in range(2))
    assert len(first.trace) > 50
    assert first.trace == second.trace


def test_a_scenario_is_found_by_its_number() -> None:
    assert scenario_named("04b").stem == scenario_named("04b_two_recoverers_one_copy_found").stem
    for name, number in (("4", "04"), ("4b", "04b"), ("20_", "20"), ("26", "26"), ("0x465", "0x465"), ("L10", "L10")):
        assert scenario_named(name).number == number


@pytest.mark.parametrize("name", ["14", "", "0", "b", "4z", "half_written"])
def test_a_number_that_no_scenario_has_is_refused_with_those_that_are_there(name: str) -> None:
    with pytest.raises(ScenarioError, match=f"no scenario is called '{name}'; near to it are .*; there are 01, 02, 02b, .*, V3b, "):
        scenario_named(name)


def test_numbers_titles_and_mutants_are_in_order() -> None:
    scenarios = all_scenarios()
    assert len({scenario.number for scenario in scenarios}) == len(scenarios)
    assert len({scenario.title for scenario in scenarios}) == len(scenarios)
    unknown = {name for scenario in scenarios for name in scenario.mutants} - {**MUTANTS, **SCENARIO_MUTANTS}.keys()
    assert not unknown


def test_every_step_is_used() -> None:
    used = {match(line)[0].pattern for scenario in all_scenarios() for line in scenario.lines}
    assert not STEPS.keys() - used


@pytest.mark.page
@pytest.mark.parametrize("path", pages.pages(), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_pages_tell_every_step_and_every_scenario(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    assert page == pages.pages()[path], "python -m tests.simulation.scenarios.pages writes it anew"
