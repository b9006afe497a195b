"""Ends of thousands of open ledgers: bookies are asked at a pace that leaves them to others. What is asked: test_planners.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from cepheid_rpc import LacAnswer, LacRequest, Status, encode_lac_answer
from cepheid_scan import Fragment, HistoryPlan, LedgerHistory, TopicHistory
from cepheid_scan.ledger_ends import EndWatch, newest_ends

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
