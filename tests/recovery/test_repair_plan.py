"""What a worker does about a mark: tables."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest

from cepheid_metadata import RepairMark, ShortReason
from cepheid_recovery.repair_plan import plan_repair
from tests.recovery.test_shortage import ledger

LOST, DRAINING, EMPTY, DAMAGED = ShortReason.LOST, ShortReason.DRAINING, ShortReason.EMPTY_DISK, ShortReason.DAMAGED


def first_free(spares: str) -> object:
    def choose(ensemble: Sequence[str], excluded: Collection[str], position: int) -> str | None:
        return next((name for name in spares if name not in ensemble and name not in excluded), None)

    return choose


def mark(**bookies: ShortReason) -> RepairMark:
    return RepairMark(ledger_id=7, bookies=bookies, copies_left=2, short_entries=0, short_bytes=0, since_ms=0)


@pytest.mark.parametrize(
    ("bookies", "registered", "draining", "spares", "moves", "checks", "left"),
    [
        ({"c": LOST}, "ab", "", "d", {2: "d"}, [], []),
        ({"c": LOST}, "abc", "", "d", {}, [], []),  # it came back
        ({"b": LOST, "c": LOST}, "a", "", "de", {1: "d", 2: "e"}, [], []),
        ({"b": LOST, "c": LOST}, "a", "", "d", {1: "d"}, [], ["c"]),
        ({"c": LOST}, "ab", "", "", {}, [], ["c"]),
        ({"c": DRAINING}, "abc", "c", "d", {2: "d"}, [], []),
        ({"c": DRAINING}, "abc", "", "d", {}, [], []),  # the operator changed their mind
        ({"c": DRAINING}, "ab", "", "d", {}, [], ["c"]),
        ({"c": DRAINING}, "abc", "c", "", {}, [], ["c"]),
        ({"c": LOST}, "abd", "d", "d", {}, [], ["c"]),  # a draining bookie gets no copies
        ({"c": EMPTY}, "abc", "", "d", {}, [2], []),
        ({"c": DAMAGED}, "abc", "", "d", {}, [2], []),
        ({"c": DAMAGED}, "ab", "", "d", {}, [], ["c"]),
        ({"c": DAMAGED}, "abc", "c", "d", {2: "d"}, [], []),
        ({"x": LOST}, "abc", "", "d", {}, [], []),  # the record does not name it any more
    ],
)
def test_plan_of_a_closed_ledger(
    bookies: dict[str, ShortReason],
    registered: str,
    draining: str,
    spares: str,
    moves: dict[int, str],
    checks: list[int],
    left: list[str],
) -> None:
    plan = plan_repair(ledger((0, "abc")), mark(**bookies), registered, draining, first_free(spares))  # type: ignore[arg-type]
    done = [(part.moves, part.checks) for part in plan.fragments]
    assert (done, sorted(plan.left)) == ([(moves, checks)] if moves or checks else [], left)


@pytest.mark.parametrize(("registered", "moves", "checks"), [("ab", {2: "d"}, []), ("abc", {}, [2])])
def test_copies_of_a_damaged_bookie_that_is_lost_move_unless_it_has_just_come_back(
    registered: str, moves: dict[int, str], checks: list[int]
) -> None:
    plan = plan_repair(ledger((0, "abc")), mark(c=DAMAGED), registered, "", first_free("d"), lost="c")  # type: ignore[arg-type]
    assert [(part.moves, part.checks) for part in plan.fragments] == [(moves, checks)]


def test_the_open_fragment_is_left_to_its_writer_and_earlier_ones_are_repaired() -> None:
    record = ledger((0, "abc"), (4, "acd"), last=None)
    plan = plan_repair(record, mark(c=LOST), "abd", "", first_free("e"))  # type: ignore[arg-type]
    assert plan.open_bookies == ["c"]
    assert [(part.first_entry_id, part.last_entry_id, part.moves) for part in plan.fragments] == [(0, 3, {2: "e"})]


def test_a_living_writer_is_not_asked_to_leave_a_bookie_whose_copy_is_damaged() -> None:
    plan = plan_repair(ledger((0, "abc"), last=None), mark(c=DAMAGED), "abc", "", first_free("d"))  # type: ignore[arg-type]
    assert (plan.open_bookies, list(plan.left)) == ([], ["c"])
