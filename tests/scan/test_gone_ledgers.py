"""Records of ledgers that left their chains, asked for by many topics; with brokers: test_planners.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from cepheid_decode import AdminRefusedError, PlanSource
from cepheid_scan.gone_ledgers import GoneLedgers
from cepheid_scan.plan_service import PlanServicePlanner


def name(number: int) -> str:
    return f"persistent://public/default/t-partition-{number}"


class Ledgers:
    """As many as `count`; every tenth is of a cursor, the others by turns of 50 partitions. Odd ones are deleted."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.pages = 0
        self.refuses = False
        self.damaged: list[int] = []
        self.hides_damaged = False

    def get(self, path: str, query: Mapping[str, Any]) -> Any:
        assert path == "/cepheid/v1/ledgers"
        self.pages += 1
        if self.refuses:
            raise AdminRefusedError("not for you", status=403)
        there = range(1 if query["deleted"] == "true" else 0, self.count, 2)
        ids = [one for one in there if one > query["above"]][: query["limit"]]
        ledgers = [{"ledger": self.record(one)} for one in ids if one not in self.damaged]
        damaged = [{"ledger_id": one, "error": "garbage"} for one in ids if one in self.damaged]
        if self.hides_damaged:  # as from a role that is not a super-user
            return {"ledgers": ledgers, "damaged": [], "incomplete": bool(damaged), "next": None}
        return {"ledgers": ledgers, "damaged": damaged, "next": ids[-1] if len(ids) == query["limit"] else None}

    def record(self, ledger_id: int) -> dict[str, Any]:
        use = "cursors" if ledger_id % 10 == 0 else "entries"
        custom = {"topic": name(ledger_id % 50), "incarnation": "i", "use": use}
        return {"ledger_id": ledger_id, "last_entry_id": -1 if ledger_id % 10 == 5 else ledger_id, "custom": custom}


def expected(number: int, ids: range) -> dict[int, int]:
    return {one: one for one in ids if one % 50 == number and one % 10 not in (0, 5)}


def test_all_partitions_that_are_in_doubt_read_the_records_once() -> None:
    """A broker was started again: each of its idle partitions asks, since about the same time."""
    ledgers = Ledgers(15_000)
    gone = GoneLedgers(ledgers.get)
    for number in range(50):
        ids = range(700 - 13 * number, 14_000 + 11 * number)
        assert gone.of(name(number), "i", ids) == expected(number, ids)
        assert gone.of(name(number), "j", ids) == {}
        if number == 0:
            first = ledgers.pages
    assert first <= 16
    assert ledgers.pages - first <= 16, "for what lies beyond"
    pages = ledgers.pages
    assert gone.of(name(3), "i", range(600, 9000)) == expected(3, range(600, 9000))
    assert ledgers.pages == pages
    gone.forget()
    assert gone.of(name(3), "i", range(600, 800)) == expected(3, range(600, 800))
    assert ledgers.pages == pages + 2


def test_too_many_are_not_asked_for_again_and_again() -> None:
    ledgers = Ledgers(100_000)
    gone = GoneLedgers(ledgers.get)
    assert gone.of(name(1), "i", range(90_000)) is None
    pages = ledgers.pages
    assert gone.of(name(2), "i", range(90_000)) is None
    assert gone.of(name(3), "i", range(95_000)) is None
    assert ledgers.pages == pages <= 20
    assert gone.of(name(2), "i", range(90)) == expected(2, range(90))


def test_who_may_not_ask_knows_nothing() -> None:
    ledgers = Ledgers(10)
    ledgers.refuses = True
    assert GoneLedgers(ledgers.get).of(name(1), "i", range(5)) is None


@pytest.mark.parametrize("hides_damaged", [False, True])
def test_a_damaged_record_leaves_the_ledgers_around_it_unknown_instead_of_gone(hides_damaged: bool) -> None:
    ledgers = Ledgers(1000)
    ledgers.damaged, ledgers.hides_damaged = [701], hides_damaged
    gone = GoneLedgers(ledgers.get)
    assert gone.of(name(1), "i", range(650, 750)) is None
    assert gone.of(name(1), "i", range(100)) == expected(1, range(100))


def test_a_plan_makes_records_old(monkeypatch: pytest.MonkeyPatch) -> None:
    ledgers = Ledgers(100)
    planner = PlanServicePlanner(PlanSource(admin_url="http://nowhere"))
    monkeypatch.setattr(planner, "_http", ledgers)
    for _ in range(2):
        assert planner.gone_ledgers(name(1), "i", range(100)) == expected(1, range(100))
    assert ledgers.pages == 2
    planner.plan([])
    planner.gone_ledgers(name(1), "i", range(100))
    assert ledgers.pages == 4
