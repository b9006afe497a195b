"""What is never asked is never found: the fixed seeds check every invariant, suffer every kind of fault, take every branch."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.simulation.__main__ import rule_numbers, with_what_never_came
from tests.simulation.branch_coverage import (
    RARE,
    UNREACHED,
    Branch,
    CoreReport,
    branches_of,
    excused,
    excused_and_taken,
    merged,
    rare_and_missed,
)
from tests.simulation.campaign import Totals, run_campaign
from tests.simulation.faults.kinds import KINDS
from tests.simulation.mutants.rules_alone import ALONE, fails_alone
from tests.simulation.seeds import FEWEST_FAULTS, FEWEST_OPERATIONS, Outcome, run_seed

CORRECTNESS = Path(__file__).parents[2] / "docs" / "correctness.md"
CORES = min(os.cpu_count() or 1, 8)
FIXED_SEEDS = 60
MOST_FIXED_SEEDS = 400
FIXED_AT_ONCE = 20
OPERATIONS = ("append refused", "open without a new ledger", "trim", "trim for clients")
"""Else nothing here would notice that what comes behind a refusal is taken, or that retention deletes too much."""
TRACED_AT_ONCE = 12
MOST_TRACED = 120


def test_the_numbers_are_read_from_the_page() -> None:
    assert len(rule_numbers()) == len(set(rule_numbers())) > 50
    assert {"S1", "L14", "M10", "O4", "C8", "H13", "V9"} <= set(rule_numbers())


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_the_fixed_seeds_check_every_rule_and_suffer_every_fault() -> None:
    totals = run_fixed_seeds(never)
    assert never(totals) == []
    assert totals.fewest_operations >= FEWEST_OPERATIONS
    assert totals.fewest_faults >= FEWEST_FAULTS
    assert [number for number in totals.checks if number not in rule_numbers()] == []


def never(totals: Totals) -> list[str]:
    """The rules, kinds of faults and operations that have not come yet."""
    came = {*totals.checks, *totals.faults, *totals.operations}
    return [name for name in (*rule_numbers(), *KINDS, *OPERATIONS) if name not in came]


def run_fixed_seeds(missing: Callable[[Totals], list[str]]) -> Totals:
    """More of them while something is missing. They are fixed so that a commit passes always or never."""
    totals = Totals()
    for first in range(0, MOST_FIXED_SEEDS, FIXED_AT_ONCE):
        if first >= FIXED_SEEDS and not missing(totals):
            break
        run_campaign(range(first, first + FIXED_AT_ONCE), cores=CORES, on_outcome=totals.add)
        assert not totals.failures, "\n".join(outcome.describe() for outcome in totals.failures)
    return totals


def test_further_seeds_run_while_something_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []

    def run_one(seeds: Sequence[int], *, on_outcome: Callable[[Outcome], None], **_: int) -> None:
        ran.append(seeds[0])
        on_outcome(Outcome(seeds[0], None, faults={"rare": 1} if seeds[0] == 120 else {}))

    monkeypatch.setattr("tests.simulation.test_coverage.run_campaign", run_one)
    run_fixed_seeds(lambda totals: [] if totals.faults["rare"] else ["rare"])
    assert ran == [0, 20, 40, 60, 80, 100, 120]
    ran.clear()
    run_fixed_seeds(lambda totals: [])
    assert ran == [0, 20, 40]


def test_a_fixed_seed_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_one(seeds: Sequence[int], *, on_outcome: Callable[[Outcome], None], **_: int) -> None:
        on_outcome(Outcome(seeds[0], "M3: all is lost", "M3"))

    monkeypatch.setattr("tests.simulation.test_coverage.run_campaign", run_one)
    with pytest.raises(AssertionError, match="M3: all is lost"):
        run_fixed_seeds(never)


def test_every_rule_has_a_mistake_that_it_is_to_catch_alone() -> None:
    assert sorted(ALONE) == sorted(rule_numbers("SLRMTOCHVPB"))


@pytest.mark.parametrize(
    "rule",
    [pytest.param(rule, marks=[] if isinstance(where, str) else pytest.mark.slow) for rule, (_, where) in ALONE.items()],
)
@pytest.mark.timeout(1_800)
def test_a_rule_catches_its_mistake_while_all_others_are_muted(rule: str) -> None:
    by, runs = fails_alone(rule)
    mutant, where = ALONE[rule]
    assert by == rule, f"{mutant!r} is not noticed by {rule} in {runs} runs, {where!r} and others: can it fail?"


def test_a_muted_rule_is_counted_and_not_heard() -> None:
    mutant = "confirm below the ack quorum"
    heard, muted = run_seed(1, mutant=mutant), run_seed(1, mutant=mutant, only="L6")
    assert (heard.rule, muted.rule) == ("L3", "L6")
    assert muted.checks["L3"] > heard.checks["L3"]
    assert muted.replay().endswith("--only L6")


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_every_branch_of_the_cores_is_taken_or_excused() -> None:
    """Few seeds do, mostly; what they miss by chance, since the course of seeds changes with every change, later ones take.

    No excuse may be needless: no scenario takes that branch. Seeds are not asked: what one of them takes by chance may be excused
    as rare. `--branches` names what they took in spite of another reason.
    """
    reasons = excused(UNREACHED.read_text())
    of_scenarios = branches_of([], cores=CORES)
    known = {name for report in of_scenarios for name in report.names}
    assert [name for name in reasons if name not in known] == [], f"{UNREACHED.name} excuses branches that are not there"
    needless = excused_and_taken(of_scenarios, reasons)
    assert not needless, f"these are taken, take them out of {UNREACHED.name}:\n" + "\n".join(needless)
    reports = of_scenarios
    for first in range(0, MOST_TRACED, TRACED_AT_ONCE):
        if not unexcused(reports, reasons):
            break
        reports = merged([reports, branches_of(range(first, first + TRACED_AT_ONCE), cores=CORES, with_scenarios=False)])
    missed = unexcused(reports, reasons)
    assert not missed, f"take them, or say in {UNREACHED.name} why not:\n" + "\n".join(missed)


@pytest.mark.page
def test_the_page_tells_how_many_branches_are_excused() -> None:
    """In round numbers: a tenth off is near enough."""
    told = re.search(
        r"about (\d+)\. Most of these .*; about (\d+) by\s+nothing.*About (\d+) are excused", CORRECTNESS.read_text(), re.DOTALL
    )
    assert told is not None
    reasons = list(excused(UNREACHED.read_text()).values())
    by_nothing = [reason for reason in reasons if reason.startswith("A gap") or "not seen to be taken" in reason]
    rare = [reason for reason in reasons if reason.startswith(RARE)]
    for number, counted in zip(map(int, told.groups()), (reasons, by_nothing, rare), strict=True):
        assert abs(number - len(counted)) <= len(counted) / 10, f"{CORRECTNESS.name} says about {number}, and it is {len(counted)}"


def unexcused(reports: list[CoreReport], reasons: dict[str, str]) -> list[str]:
    return [branch.name for report in reports for branch in report.missed if branch.name not in reasons]


def test_what_one_run_takes_another_need_not() -> None:
    here, there, nowhere = (Branch("core", name, line) for line, name in enumerate(("here", "there", "nowhere"), 1))
    names = frozenset({"here", "there", "nowhere"})
    first, second = CoreReport("core", 3, (there, nowhere), names), CoreReport("core", 3, (here, nowhere), names)
    reports = merged([[first], [second]])
    assert reports == [CoreReport("core", 3, (nowhere,), names)]
    assert unexcused(reports, {"nowhere": "it cannot be"}) == []
    assert unexcused(reports, {}) == ["nowhere"]


def test_a_rare_branch_that_no_seed_takes_is_named() -> None:
    names = frozenset({"rare", "rarer", "guard"})
    reports = [CoreReport("core", 3, (Branch("core", "rarer", 1), Branch("core", "guard", 2)), names)]
    reasons = {"rare": f"{RARE}: why", "rarer": f"{RARE}, and so on", "guard": "It cannot be."}
    assert rare_and_missed(reports, reasons) == (2, ["rarer"])
    assert rare_and_missed([], excused(UNREACHED.read_text()))[0] > 10


def test_an_excuse_of_what_is_taken_is_named() -> None:
    reports = [CoreReport("core", 3, (Branch("core", "guard", 1),), frozenset({"guard", "rare", "common"}))]
    reasons = {"rare": f"{RARE}: why", "common": "It cannot be.", "guard": "It cannot be.", "of another file": "It is not there."}
    assert excused_and_taken(reports, reasons) == ["rare", "common"]
    assert excused_and_taken(reports, reasons, rare_too=False) == ["common"]


def test_a_campaign_tells_what_never_came() -> None:
    totals = Totals()
    totals.add(
        Outcome(1, None, operations={"append": 1}, faults=dict.fromkeys(KINDS[2:], 1), checks=dict.fromkeys(rule_numbers(), 1))
    )
    lines = with_what_never_came(totals)
    assert [line for line in lines if not line.startswith(" ")] == totals.lines()
    titles = [line.split()[0] for line in lines]
    assert lines[titles.index("faults") + 1] == f"            of {len(KINDS)} kinds never: {KINDS[0]} · {KINDS[1]}"
    assert lines[titles.index("checks") + 1] == f"            of {len(rule_numbers())} rules never: none"


def test_an_excuse_needs_a_reason() -> None:
    assert excused("a A.b: if c: → d\na A.b: if c: → e\n    because\n    of f\n\n# no\ng H.i: j → k\n    l\n") == {
        "a A.b: if c: → d": "because of f",
        "a A.b: if c: → e": "because of f",
        "g H.i: j → k": "l",
    }
    with pytest.raises(AssertionError, match="no reason"):
        excused("a A.b: if c: → d\n")
