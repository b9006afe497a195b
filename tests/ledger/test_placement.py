"""Choosing bookies."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from cepheid_ledger import NotEnoughBookiesError, RandomPlacement

pytestmark = pytest.mark.virtual_time


def placement(bookies: str, quarantine_s: float = 10.0) -> RandomPlacement:
    return RandomPlacement(lambda: list(bookies), random.Random(1), quarantine_s)


def test_ensembles_are_distinct_and_spread_evenly() -> None:
    chooser = placement("abcde")
    ensembles = [chooser.new_ensemble(3) for _ in range(1_000)]
    assert all(len(set(ensemble)) == 3 for ensemble in ensembles)
    counts = Counter(bookie for ensemble in ensembles for bookie in ensemble)
    assert all(500 < counts[bookie] < 700 for bookie in "abcde")


def test_the_same_generator_chooses_the_same() -> None:
    assert [placement("abcde").new_ensemble(3)] * 2 == [placement("edcba").new_ensemble(3) for _ in range(2)]


def test_too_few_bookies_are_an_error_with_numbers() -> None:
    with pytest.raises(NotEnoughBookiesError, match=r"needs 3 bookies, 2 are available \(start more bookies"):
        placement("ab").new_ensemble(3)


async def test_a_quarantined_bookie_is_chosen_only_when_it_must_be() -> None:
    chooser = placement("abcd", quarantine_s=0.05)
    chooser.quarantine("b")
    assert all("b" not in chooser.new_ensemble(3) for _ in range(50))
    assert "b" in chooser.new_ensemble(4)
    assert chooser.replacement(["a", "c"], ["d"]) == "b"
    assert chooser.replacement(["a", "c"], []) == "d"
    await asyncio.sleep(0.06)
    assert any("b" in chooser.new_ensemble(3) for _ in range(50))


def test_a_replacement_is_outside_of_what_is_excluded() -> None:
    chooser = placement("abcd")
    assert {chooser.replacement(["a"], ["b"]) for _ in range(50)} == {"c", "d"}
    assert chooser.replacement(["a", "b"], ["c", "d"]) is None


async def test_a_bookie_that_fails_again_soon_is_avoided_twice_as_long_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    chooser = RandomPlacement(lambda: list("ab"), random.Random(1), 2.0, 6.0)
    now = 100.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)  # nothing waits meanwhile
    for length in (2.0, 4.0, 6.0, 6.0):
        for _ in range(100):
            chooser.quarantine("a")  # a hundred writers, one failure
        now += length - 0.1
        assert chooser.quarantined() == ["a"]
        assert chooser.replacement((), ()) == "b"
        assert chooser.replacement(("b",), (), doubtful=False) is None
        now += 0.2
        assert chooser.quarantined() == []
    now += 6.0
    chooser.quarantine("a")
    now += 2.1
    assert chooser.quarantined() == [], "well for long enough: it starts anew"
    monkeypatch.undo()


async def test_a_bookie_that_came_back_is_chosen_again_and_its_failures_still_count(monkeypatch: pytest.MonkeyPatch) -> None:
    chooser = RandomPlacement(lambda: list("ab"), random.Random(1), 2.0, 6.0)
    now = 100.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)
    chooser.quarantine("a")
    chooser.forgive("a")
    chooser.forgive("b")  # it never failed
    assert chooser.quarantined() == []
    assert chooser.replacement(("b",), (), doubtful=False) == "a"
    chooser.quarantine("a")
    now += 3.9
    assert chooser.quarantined() == ["a"], "twice as long"
    monkeypatch.undo()


def test_what_is_no_longer_registered_is_never_chosen() -> None:
    registered = list("abcd")
    chooser = RandomPlacement(lambda: registered, random.Random(1))
    registered.remove("d")
    assert all("d" not in chooser.new_ensemble(3) for _ in range(20))
    assert chooser.replacement("abc", ()) is None


async def test_what_is_wrong_with_the_other_bookies_is_said() -> None:
    problems = [f"b{number} is read-only: its disk is full" for number in range(7)]
    chooser = RandomPlacement(lambda: ["a"], random.Random(1), problems=lambda: problems)
    words = r"1 are available: b0 is read-only: its disk is full; .*and 2 more \(free space"
    with pytest.raises(NotEnoughBookiesError, match=words) as caught:
        chooser.new_ensemble(2)
    assert "b5" not in str(caught.value)
    del problems[1:]
    with pytest.raises(NotEnoughBookiesError, match=r"available: b0 is read-only: its disk is full \(free space"):
        chooser.new_ensemble(2)
