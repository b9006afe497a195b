"""Which bookies are asked for a range: the order of liking, and covers of striped ledgers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cepheid_scan.replica_order import SUSPECT_S, Suspects, last_reachable, plan_cover, positions_by_liking, write_set


def liked(ensemble: str, first: int = 0, rack: str | None = None, suspects: str = "") -> str:
    racks = {"a": "east", "b": "east", "c": "west", "d": "west"}
    positions = positions_by_liking(ensemble, 7, first, rack=rack, racks=racks, suspects=suspects)
    return "".join(ensemble[position] for position in positions)


def test_tasks_spread_and_each_keeps_its_order() -> None:
    firsts = [liked("abc", first)[0] for first in range(300)]
    assert all(60 <= firsts.count(bookie) <= 140 for bookie in "abc")
    assert liked("abc", 17) == liked("abc", 17)
    assert sorted(liked("abc", 17)) == list("abc")


def test_the_own_rack_goes_first_and_suspects_last() -> None:
    for first in range(20):
        assert sorted(liked("abcd", first, rack="west")[:2]) == ["c", "d"]
        assert liked("abcd", first, rack="west", suspects="c")[0] == "d"
        assert liked("abcd", first, rack="west", suspects="cd")[2] in "cd", "one that answers elsewhere before one that does not"
    assert liked("abx", rack="north") == liked("abx"), "a rack that nobody is in changes nothing"


def test_the_own_region_goes_before_all_others() -> None:
    racks = {"a": "eu/1", "b": "us/1", "c": "eu/2", "d": "1"}
    for first in range(20):
        positions = positions_by_liking("abcd", 7, first, rack="eu/2", racks=racks, suspects="")
        assert positions[:2] == [2, 0]


def test_suspicion_passes() -> None:
    suspects = Suspects()
    suspects.add("a", 100.0)
    assert suspects.among("ab", 100.0 + SUSPECT_S - 0.1) == {"a"}
    assert suspects.among("ab", 100.0 + SUSPECT_S) == frozenset()


@pytest.mark.parametrize(
    ("ensemble_size", "write_quorum", "usable", "cover"),
    [
        (3, 3, [2, 0, 1], {0: 2, 1: 2, 2: 2}),  # one stream, of who is liked best
        (4, 2, [0, 1, 2, 3], {0: 0, 3: 0, 1: 2, 2: 2}),
        (4, 2, [1, 0, 2, 3], {1: 1, 0: 1, 2: 3, 3: 3}),
        (4, 2, [1, 2, 3], {0: 1, 1: 1, 2: 3, 3: 3}),
        (4, 2, [1, 2], None),  # entry 3 is on 3 and 0
        (5, 2, [0, 1, 2, 3, 4], {0: 0, 4: 0, 1: 2, 2: 2, 3: 3}),
        (3, 2, [], None),
    ],
)
def test_as_few_streams_as_hold_everything(
    ensemble_size: int, write_quorum: int, usable: list[int], cover: dict[int, int] | None
) -> None:
    assert plan_cover(0, 99, ensemble_size, write_quorum, usable) == cover


def test_one_entry_takes_one_stream() -> None:
    assert plan_cover(6, 6, 4, 2, [0, 1, 2, 3]) == {2: 2}
    assert plan_cover(7, 8, 4, 2, [0, 1, 2, 3]) == {3: 0, 0: 0}


@given(data=st.data())
def test_covers_are_right_whoever_is_down(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 7))
    quorum = data.draw(st.integers(1, size))
    first = data.draw(st.integers(0, 50))
    last = first + data.draw(st.integers(0, 30))
    usable = data.draw(st.permutations(range(size)))[: data.draw(st.integers(0, size))]
    reachable = last_reachable(first, last, size, quorum, usable)
    assert first - 1 <= reachable <= last
    if reachable < last:
        assert not set(write_set(reachable + 1, size, quorum)) & set(usable)
    if reachable >= first:
        cover = plan_cover(first, reachable, size, quorum, usable)
        assert cover is not None
        for entry_id in range(first, reachable + 1):
            assert cover[entry_id % size] in write_set(entry_id, size, quorum)
            assert cover[entry_id % size] in usable
        assert len(set(cover.values())) <= size
