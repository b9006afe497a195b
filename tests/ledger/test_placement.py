"""Choosing bookies."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from cepheid_ledger import NotEnoughBookiesError, NotEnoughRacksError, RackAwarePlacement, Vacancy

pytestmark = pytest.mark.virtual_time


def placement(bookies: str, quarantine_s: float = 10.0) -> RackAwarePlacement:
    return RackAwarePlacement(lambda: list(bookies), random.Random(1), quarantine_s)


def test_ensembles_are_distinct_and_spread_evenly() -> None:
    chooser = placement("abcde")
    ensembles = [chooser.new_ensemble(3, 3) for _ in range(1_000)]
    assert all(len(set(ensemble)) == 3 for ensemble in ensembles)
    counts = Counter(bookie for ensemble in ensembles for bookie in ensemble)
    assert all(500 < counts[bookie] < 700 for bookie in "abcde")


def test_the_same_generator_chooses_the_same() -> None:
    assert [placement("abcde").new_ensemble(3, 3)] * 2 == [placement("edcba").new_ensemble(3, 3) for _ in range(2)]


def test_too_few_bookies_are_an_error_with_numbers() -> None:
    with pytest.raises(NotEnoughBookiesError, match=r"needs 3 bookies, 2 are available \(start more bookies"):
        placement("ab").new_ensemble(3, 3)


async def test_a_quarantined_bookie_is_chosen_only_when_it_must_be() -> None:
    chooser = placement("abcd", quarantine_s=0.05)
    chooser.quarantine("b")
    assert all("b" not in chooser.new_ensemble(3, 3) for _ in range(50))
    assert "b" in chooser.new_ensemble(4, 4)
    assert chooser.replacement(["a", "c"], ["d"]) == "b"
    assert chooser.replacement(["a", "c"], []) == "d"
    await asyncio.sleep(0.06)
    assert any("b" in chooser.new_ensemble(3, 3) for _ in range(50))


def test_a_replacement_is_outside_of_what_is_excluded() -> None:
    chooser = placement("abcd")
    assert {chooser.replacement(["a"], ["b"]) for _ in range(50)} == {"c", "d"}
    assert chooser.replacement(["a", "b"], ["c", "d"]) is None


async def test_a_bookie_that_fails_again_soon_is_avoided_twice_as_long_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    chooser = RackAwarePlacement(lambda: list("ab"), random.Random(1), 2.0, 6.0)
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
    chooser = RackAwarePlacement(lambda: list("ab"), random.Random(1), 2.0, 6.0)
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
    chooser = RackAwarePlacement(lambda: registered, random.Random(1))
    registered.remove("d")
    assert all("d" not in chooser.new_ensemble(3, 3) for _ in range(20))
    assert chooser.replacement("abc", ()) is None


async def test_what_is_wrong_with_the_other_bookies_is_said() -> None:
    problems = [f"b{number} is read-only: its disk is full" for number in range(7)]
    chooser = RackAwarePlacement(lambda: ["a"], random.Random(1), problems=lambda: problems)
    words = r"1 are available: b0 is read-only: its disk is full; .*and 2 more \(free space"
    with pytest.raises(NotEnoughBookiesError, match=words) as caught:
        chooser.new_ensemble(2, 2)
    assert "b5" not in str(caught.value)
    del problems[1:]
    with pytest.raises(NotEnoughBookiesError, match=r"available: b0 is read-only: its disk is full \(free space"):
        chooser.new_ensemble(2, 2)


def in_racks(racks: dict[str, str], *, strict: bool = False, seed: int = 1, without: str = "") -> RackAwarePlacement:
    available = [*racks, *without]
    return RackAwarePlacement(lambda: available, random.Random(seed), racks=lambda: racks, strict=strict)


def test_without_racks_an_ensemble_is_a_sample() -> None:
    for racks in ({}, dict.fromkeys("abcde", "all in one")):
        chooser = RackAwarePlacement(lambda: list("abcde"), random.Random(5), racks=lambda racks=racks: racks)
        assert chooser.new_ensemble(3, 2) == tuple(random.Random(5).sample("abcde", 3))


def test_copies_are_in_different_racks_where_that_is_possible() -> None:
    racks = {"a": "1", "b": "1", "c": "1", "d": "2", "e": "3"}
    for seed in range(50):
        assert {racks[bookie] for bookie in in_racks(racks, seed=seed).new_ensemble(3, 3)} == {"1", "2", "3"}
    assert Counter(racks[bookie] for bookie in in_racks(racks).new_ensemble(4, 4)) == {"1": 2, "2": 1, "3": 1}


def test_bookies_without_a_rack_count_as_one_rack() -> None:
    for seed in range(50):
        ensemble = in_racks({"a": "1", "b": "2"}, without="xyz", seed=seed).new_ensemble(3, 3)
        assert {"a", "b"} < set(ensemble)


def test_strict_placement_refuses_a_second_copy_in_one_rack() -> None:
    racks = {"a": "1", "b": "1", "c": "2"}
    chooser = in_racks(racks, strict=True, without="xy")
    words = (
        r"ledger of 3 bookies needs the 3 copies of each entry in different racks, "
        r"but bookies are only available in: 1 \(2\), 2 \(1\); 2 available bookies "
        r"have no rack \(start bookies in further racks.*unset ledger.strict_racks"
    )
    with pytest.raises(NotEnoughRacksError, match=words):
        chooser.new_ensemble(3, 3)
    assert {racks[bookie] for bookie in chooser.new_ensemble(2, 2)} == {"1", "2"}
    assert not chooser.has_healthy(3, 3)
    assert chooser.has_healthy(2, 2)
    vacancy = Vacancy.of("x", ("a", "c", "x"), {}, 3)
    assert chooser.replacement(("a", "c", "x"), (), vacancy=vacancy) is None
    assert in_racks(racks, without="xy").replacement(("a", "c", "x"), (), vacancy=vacancy) in ("b", "y")


async def test_quarantine_comes_before_racks_except_for_strict_placement() -> None:
    racks = {"a": "1", "b": "1", "c": "2"}
    for strict, used in ((False, {"1"}), (True, {"1", "2"})):
        chooser = in_racks(racks, strict=strict)
        chooser.quarantine("c")
        assert {racks[bookie] for bookie in chooser.new_ensemble(2, 2)} == used
        assert chooser.has_healthy(2, 2) != strict


def test_bookies_with_more_free_space_get_more_ledgers() -> None:
    free_bytes = {"a": 10, "b": 10, "c": 30}
    chooser = RackAwarePlacement(lambda: list("abc"), random.Random(1), free_bytes=lambda: free_bytes)
    counts = Counter(chooser.new_ensemble(1, 1)[0] for _ in range(2_000))
    assert 1_100 < counts["c"] < 1_300
    counts = Counter(chooser.replacement((), ()) for _ in range(2_000))
    assert 1_100 < counts["c"] < 1_300
