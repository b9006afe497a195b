"""Ends of thousands of open ledgers: bookies are asked at a pace that leaves them to others. What is asked: test_planners.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from threading import Timer
from typing import Any

import pytest

from cepheid_decode import Fragment, HistoryPlan, LedgerHistory, PlanUnavailableError, TopicHistory
from cepheid_rpc import LacAnswer, LacRequest, Status, encode_group, encode_lac_answer
from cepheid_scan import ledger_ends
from cepheid_scan.ledger_ends import EndWatch, LedgerEnd, end_told, newest_ends

BOOKIES = {"a": "a:1", "b": "b:1"}
ANSWER = encode_lac_answer(LacAnswer(Status.NO_LEDGER))


class _Answer:
    """Comes when somebody waits for it."""

    def __init__(self, taken: Callable[[], None]) -> None:
        self._taken = taken

    def result(self, timeout: float) -> bytes:
        self._taken()
        return ANSWER


class CountedCalls:
    def __init__(self) -> None:
        self.open = self.most_open = self.asked = 0

    def ask(self, address: str, request: LacRequest, timeout_s: float) -> Any:
        self.asked += 1
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        return _Answer(self._taken)

    def _taken(self) -> None:
        self.open -= 1


class ParkedCalls(CountedCalls):
    """Nothing moves: no answer comes."""

    def ask(self, address: str, request: LacRequest, timeout_s: float) -> Any:
        self.asked += 1
        return Future()

    def close(self) -> None:
        pass


def ledgers_of(count: int) -> list[LedgerHistory]:
    return [LedgerHistory(number, -1, True, None, None, 2, 2, (Fragment(0, ("a", "b")),), b"") for number in range(count)]


def test_many_ledgers_are_asked_some_at_a_time() -> None:
    calls = CountedCalls()
    ends = newest_ends(ledgers_of(1_001), BOOKIES, 60.0, calls)  # type: ignore[arg-type]
    assert [end.last_entry_id for end in ends] == [-1] * 1_001
    assert calls.asked == 2_002
    assert calls.most_open == 400


class HungCalls:
    """The bookie `a` says nothing for as long as it is waited for; `b` answers within a few milliseconds."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, float]] = []

    def ask(self, address: str, request: LacRequest, timeout_s: float) -> Any:
        self.asked.append((address, timeout_s))
        future: Future[bytes] = Future()
        after_s, end = (0.02, partial(future.set_result, ANSWER))
        if address == BOOKIES["a"]:
            after_s, end = timeout_s, partial(future.set_exception, RuntimeError("no answer in time"))
        timer = Timer(after_s, end)
        timer.daemon = True
        timer.start()
        return future


def test_a_bookie_that_hangs_takes_no_time_from_ledgers_that_are_asked_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_ends, "_AT_ONCE", 3)
    calls = HungCalls()
    ends = newest_ends(ledgers_of(12), BOOKIES, 0.5, calls)  # type: ignore[arg-type]
    assert [end.last_entry_id for end in ends] == [-1] * 12
    assert {timeout_s for _, timeout_s in calls.asked} == {0.5}, "each has the time that a bookie is given"
    assert sum(address == BOOKIES["a"] for address, _ in calls.asked) == 3, "and nobody waits for that one again"
    with pytest.raises(PlanUnavailableError, match="no answer in time"):
        newest_ends(ledgers_of(4), {"a": "a:1"}, 0.05, calls)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_watch_of_many_ledgers_begins_with_a_few() -> None:
    watch = EndWatch()
    watch._calls = calls = ParkedCalls()  # type: ignore[assignment]
    try:
        began = time.monotonic()
        watch.update(HistoryPlan(tuple(TopicHistory(f"t{one.ledger_id}", -1, "x", (one,)) for one in ledgers_of(1_000)), BOOKIES))
        while calls.asked < 2_000:
            asked, after_s = calls.asked, time.monotonic() - began
            assert asked <= 10 + after_s / 0.001, f"{asked} within {after_s:.2f} s"
            assert after_s < 60
            time.sleep(0.01)
    finally:
        watch.close()


@pytest.mark.parametrize(
    ("first", "lac", "explicit_lac", "end"),
    [
        (9, 8, 8, LedgerEnd(8, 900)),  # 1000 bytes up to entry 9: 100 each
        (9, 8, 9, LedgerEnd(9, 1000)),
        (9, 3, -1, LedgerEnd(3, 400)),
        (9, -1, -1, LedgerEnd(-1, 0)),
        (0, -1, 100_000, LedgerEnd(100_000, 0)),  # it has not got what lies behind: nobody says how large that is
    ],
)
def test_the_size_up_to_an_end_is_told_by_who_has_it(first: int, lac: int, explicit_lac: int, end: LedgerEnd) -> None:
    group = encode_group(7, first, lac, 990, [b"0123456789"])
    assert end_told(LacAnswer(Status.OK, max(lac, explicit_lac), explicit_lac, group), 7) == end
    assert end_told(LacAnswer(Status.OK, max(lac, explicit_lac), explicit_lac, group), 8) == LedgerEnd(explicit_lac, 0)
    assert end_told(LacAnswer(Status.NO_ENTRY), 7) == LedgerEnd(-1, 0)
    assert end_told(LacAnswer(Status.IO_ERROR), 7) is None
