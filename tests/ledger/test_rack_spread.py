"""Spreading ledgers over racks: ensembles against the best that exists, replacements, weights, and what could be better."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from cepheid_ledger.rack_spread import (
    Candidate,
    PlacementMove,
    Vacancy,
    arrange,
    best_for_vacancy,
    can_separate,
    choose_candidates,
    most_of_each_rack,
    placement_shortfall,
    repeated_racks,
    weights_by_free_space,
)
from cepheid_ports import region_of

RACKS = {"a": "1", "b": "1", "c": "2", "d": "2", "e": "3", "x": None}


def candidates_in(*racks: str) -> list[Candidate]:
    return [Candidate(f"b{number}", rack, 1.0) for number, rack in enumerate(racks)]


def racks_of(ensemble: tuple[str, ...], candidates: list[Candidate]) -> list[str]:
    rack_of = {candidate.bookie: candidate.rack for candidate in candidates}
    return [rack_of[bookie] for bookie in ensemble]


def fewest_possible(candidates: list[Candidate], size: int, write_quorum: int) -> int:
    """By trying all ensembles."""
    orders = dict.fromkeys(itertools.permutations([candidate.rack for candidate in candidates], size))
    return min(repeated_racks(racks, write_quorum) for racks in orders)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2), (3, 1), (2, 2, 1), (3, 2), (4, 1), (3, 2, 1), (2, 2, 2), (4, 2), (6,)])
def test_no_ensemble_is_spread_over_more_racks_than_the_chosen_one(sizes: tuple[int, ...]) -> None:
    candidates = candidates_in(*(f"r{rack}" for rack, count in enumerate(sizes) for _ in range(count)))
    for size in range(1, len(candidates) + 1):
        for write_quorum in range(1, size + 1):
            possible = fewest_possible(candidates, size, write_quorum)
            separable = can_separate([candidate.rack for candidate in candidates], size, write_quorum)
            assert separable == (possible == 0), (size, write_quorum)
            for seed in range(5):
                rng = random.Random(seed)
                ensemble = arrange(choose_candidates([], candidates, size, rng), write_quorum, rng)
                assert len(set(ensemble)) == size
                assert repeated_racks(racks_of(ensemble, candidates), write_quorum) == possible, (size, write_quorum, seed)


@pytest.mark.parametrize("sizes", [(3, 3, 2), (3, 3, 3, 1), (4, 4, 4, 2, 1), (6, 6, 6, 5, 5, 4, 2)])
def test_large_ensembles_separate_racks_wherever_counting_says_that_it_can_be_done(sizes: tuple[int, ...]) -> None:
    candidates = candidates_in(*(f"r{rack}" for rack, count in enumerate(sizes) for _ in range(count)))
    rng = random.Random(1)
    for size in range(2, len(candidates) + 1):
        for write_quorum in range(2, len(sizes) + 1):
            if write_quorum > size or not can_separate([one.rack for one in candidates], size, write_quorum):
                continue
            most = most_of_each_rack(size, write_quorum)
            ensemble = arrange(choose_candidates([], candidates, size, rng, most_of_rack=most), write_quorum, rng)
            assert repeated_racks(racks_of(ensemble, candidates), write_quorum) == 0, (size, write_quorum)


def test_regions_decide_between_racks_that_are_as_good() -> None:
    candidates = candidates_in("eu/1", "eu/2", "eu/3", "us/1", "us/2", "us/3")
    for seed in range(50):
        rng = random.Random(seed)
        ensemble = arrange(choose_candidates([], candidates, 4, rng), 2, rng)
        regions = [region_of(rack) for rack in racks_of(ensemble, candidates)]
        assert repeated_racks(regions, 2) == 0, "each neighbour is in the other region"


def test_the_choice_depends_on_the_generator_alone() -> None:
    candidates = candidates_in("1", "1", "2", "2", "3", "4")
    chosen = [choose_candidates([], candidates, 4, random.Random(7)) for _ in range(2)]
    assert chosen[0] == chosen[1]
    assert arrange(chosen[0], 2, random.Random(3)) == arrange(chosen[1], 2, random.Random(3))


def test_bookies_are_chosen_in_proportion_to_their_weights() -> None:
    candidates = [Candidate("small", "", 1.0), Candidate("large", "", 3.0)]
    rng = random.Random(1)
    counts = Counter(choose_candidates([], candidates, 1, rng)[0].bookie for _ in range(4_000))
    assert 2_850 < counts["large"] < 3_150


@pytest.mark.parametrize(
    ("free_bytes", "weights"),
    [
        ({}, {"a": 1, "b": 1, "c": 1}),
        ({"a": 10, "b": 20}, {"a": 10, "b": 20, "c": 10}),  # unknown: the smallest known one
        ({"a": 10, "b": 20, "c": 1_000}, {"a": 10, "b": 20, "c": 60}),  # at most three times the median
        ({"a": 0, "b": 20, "c": 20}, {"a": 1, "b": 20, "c": 20}),  # a full one can still be the last choice
        ({"a": 0, "b": 0, "c": 0}, {"a": 1, "b": 1, "c": 1}),
        ({"b": 7, "gone": 1}, {"a": 7, "b": 7, "c": 7}),  # others do not count
    ],
)
def test_weights_are_free_bytes_within_bounds(free_bytes: dict[str, int], weights: dict[str, float]) -> None:
    assert weights_by_free_space("abc", free_bytes) == weights


@pytest.mark.parametrize(
    ("ensemble", "position", "write_quorum", "best", "strict"),
    [
        ("ace", 0, 3, "b", "b"),  # only its own rack has no other copy
        ("acx", 2, 3, "e", "e"),
        ("aec", 1, 3, "", ""),  # no candidate at all
        ("acbe", 3, 2, "d", "d"),  # rack 2 has no copy in its write sets, although it has one in the ensemble
        ("ab", 1, 2, "cde", "cde"),
    ],
)
def test_a_replacement_repeats_as_few_racks_as_can_be(
    ensemble: str, position: int, write_quorum: int, best: str, strict: str
) -> None:
    racks = {bookie: rack for bookie, rack in RACKS.items() if rack is not None}
    candidates = [Candidate(bookie, racks[bookie], 1.0) for bookie in "abcde" if bookie not in ensemble and best]
    vacancy = Vacancy(tuple(ensemble), position, write_quorum)
    assert "".join(one.bookie for one in best_for_vacancy(candidates, vacancy, racks)) == best
    assert "".join(one.bookie for one in best_for_vacancy(candidates, vacancy, racks, strict=True)) == strict


def test_where_every_candidate_repeats_a_rack_only_strict_placement_has_none() -> None:
    racks = {bookie: rack for bookie, rack in RACKS.items() if rack is not None}
    (repeating,) = candidates = [Candidate("b", "1", 1.0)]
    vacancy = Vacancy.of("e", ("a", "c", "e"), {}, 3)
    assert best_for_vacancy(candidates, vacancy, racks) == [repeating]
    assert best_for_vacancy(candidates, vacancy, racks, strict=True) == []


def test_a_replacement_takes_account_of_those_chosen_before_it() -> None:
    racks = {"a": "1", "b": "2", "c": "3", "n": "4", "o": "4", "p": "5"}
    candidates = [Candidate(bookie, racks[bookie], 1.0) for bookie in "op"]
    vacancy = Vacancy.of("b", ("a", "b", "c"), {"a": "n"}, 3)
    assert [one.bookie for one in best_for_vacancy(candidates, vacancy, racks)] == ["p"]


@pytest.mark.parametrize(
    ("ensemble", "write_quorum", "available", "moves"),
    [
        ("ace", 3, "bd", []),  # three racks already
        ("abc", 3, "d", []),  # rack 2 is there already, and no other one has a bookie
        ("abc", 3, "de", [(0, "a", "e")]),
        ("abcd", 4, "e", [(0, "a", "e")]),  # one of two repetitions can be mended
        ("abc", 3, "abce", [(0, "a", "e")]),  # members are no candidates
        ("abc", 3, "", []),
        ("ab", 2, "cde", [(0, "a", "cde")]),  # each of them would do
        ("ab", 1, "cde", []),  # one copy of each entry cannot be too near another one
        ("acbd", 2, "e", []),  # neighbours are in different racks
        ("acdb", 2, "e", [(0, "a", "e")]),  # a and b are neighbours, since positions form a ring, and so are c and d
        ("axc", 3, "bde", []),  # of x nothing is known
        ("abc", 3, "x", []),  # nor does it help
    ],
)
def test_what_would_spread_an_ensemble_better(
    ensemble: str, write_quorum: int, available: str, moves: list[tuple[int, str, str]]
) -> None:
    found = placement_shortfall(ensemble, write_quorum, RACKS, list(available))
    assert list(found) == [PlacementMove(position, bookie, tuple(candidates)) for position, bookie, candidates in moves]


def test_a_shortfall_of_several_positions_is_mended_move_by_move() -> None:
    racks = {name: name[0] for name in ("1a", "1b", "1c", "2a", "3a", "3b")}
    moves = placement_shortfall(["1a", "1b", "1c"], 3, racks, ["3b", "2a", "3a"])
    assert moves == (PlacementMove(0, "1a", ("2a", "3a", "3b")), PlacementMove(1, "1b", ("3a", "3b")))
