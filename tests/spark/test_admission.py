"""How much a micro-batch takes: within its budget, fair to every topic, and never nothing while there is something."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cepheid_decode import Fragment, LedgerHistory, TopicHistory
from cepheid_spark.admission import NO_LIMITS, Backlog, Limits, Patience, admit, split
from cepheid_spark.topic_view import TopicView


def backlog(topic: str, ledgers: Sequence[tuple[int, float]], since_ms: float = 0.0, read: int = 0) -> Backlog:
    """`ledgers`: entries and bytes of each entry."""
    histories = tuple(
        LedgerHistory(number, entries - 1, False, int(entries * entry_bytes), 1, 1, 1, (Fragment(0, ("bookie",)),), b"")
        for number, (entries, entry_bytes) in enumerate(ledgers)
    )
    view = TopicView.of(TopicHistory(topic, -1, "i", histories))
    return Backlog(view, min(read, view.total_entries), view.total_entries, since_ms)


ledgers = st.lists(st.tuples(st.integers(0, 3_000), st.floats(1, 5e6)), max_size=4)
backlogs = st.lists(st.tuples(ledgers, st.floats(0, 1e9), st.integers(0, 4_000)), max_size=30).map(
    lambda found: [backlog(f"t{number}", *each) for number, each in enumerate(found)]
)


def cost(taken: dict[str, int], of: list[Backlog]) -> float:
    return sum(each.size_of(taken.get(each.topic, 0)) for each in of)


@pytest.mark.slow
@given(backlogs, st.integers(1, 10**8))
def test_a_budget_in_bytes_is_kept_but_for_one_entry(found: list[Backlog], max_bytes: int) -> None:
    taken = admit(found, Limits(max_bytes=max_bytes))
    waiting = [each for each in found if each.entries]
    assert all(0 < entries <= next(each.entries for each in waiting if each.topic == topic) for topic, entries in taken.items())
    assert bool(taken) == bool(waiting)
    assert sum(taken.values()) == 1 or cost(taken, found) <= max_bytes + 50  # half a millionth of an entry each
    left = max_bytes - cost(taken, found)
    for each in waiting:  # nothing that would have fitted is left behind, but where a topic had none at all
        if 0 < (entries := taken.get(each.topic, 0)) < each.entries:
            assert each.size_of(entries + 1) - each.size_of(entries) > left - 1
    if waiting:
        assert min(waiting, key=lambda each: (each.waiting_since_ms, each.topic)).topic in taken


@pytest.mark.slow
@given(backlogs, st.integers(1, 10_000))
def test_a_budget_in_entries_is_used_up(found: list[Backlog], max_entries: int) -> None:
    taken = admit(found, Limits(max_entries=max_entries))
    assert sum(taken.values()) == min(max_entries, sum(each.entries for each in found))
    waiting = [each for each in found if each.entries]
    if len(waiting) <= max_entries:
        assert len(taken) == len(waiting), "one entry of each at least"


@pytest.mark.slow
@given(backlogs)
def test_without_limits_all_of_it_is_taken(found: list[Backlog]) -> None:
    assert admit(found, NO_LIMITS) == {each.topic: each.entries for each in found if each.entries}


@pytest.mark.slow
@given(backlogs, st.integers(1, 10**8), st.integers(1, 10_000))
def test_both_limits_hold_together(found: list[Backlog], max_bytes: int, max_entries: int) -> None:
    taken = admit(found, Limits(max_bytes, max_entries))
    assert sum(taken.values()) <= max_entries
    assert sum(taken.values()) == 1 or cost(taken, found) <= max_bytes + 50


@pytest.mark.parametrize(
    ("found", "limits", "taken"),
    [
        ([("a", 900, 1), ("b", 100, 2)], Limits(max_entries=100), {"a": 90, "b": 10}),  # by what is behind them
        ([("a", 900, 1), ("b", 1, 2)], Limits(max_entries=100), {"a": 99, "b": 1}),
        ([("a", 5, 9), ("b", 5, 1), ("c", 5, 5)], Limits(max_entries=2), {"b": 1, "c": 1}),  # too little for all: oldest first
        ([("a", 5, 1)], Limits(max_bytes=10), {"a": 1}),  # an entry above the budget
        ([("a", 5, 1), ("b", 5, 2)], Limits(max_bytes=100), {"a": 1}),
        ([("a", 0, 1)], Limits(max_bytes=100), {}),
    ],
)
def test_the_split_in_examples(found: list[tuple[str, int, float]], limits: Limits, taken: dict[str, int]) -> None:
    assert admit([backlog(topic, [(entries, 100)], since) for topic, entries, since in found], limits) == taken


def test_what_rounding_leaves_is_given_out() -> None:
    assert split([10, 10, 10], 10, lambda _, entries: entries, lambda _, size: int(size)) == [4, 3, 3]


def test_who_had_its_turn_longest_ago_comes_first_and_then_whose_entry_is_oldest() -> None:
    found = [replace(backlog(topic, [(9, 1)], since), turn=turn) for topic, since, turn in [("a", 1, 2), ("b", 3, 1), ("c", 2, 1)]]
    assert admit(found, Limits(max_entries=1)) == {"c": 1}
    assert admit(found, Limits(max_entries=2)) == {"c": 1, "b": 1}


def test_what_comes_next_counts_and_not_the_average_of_the_backlog() -> None:
    """Large entries before many small ones: of the fifty topics one large one fits, and then small ones of those behind theirs."""
    found = [backlog(f"t{number:02}", [(1, 5_000_000), (100_000, 100)], number) for number in range(50)]
    assert admit(found, Limits(max_bytes=6_000_000)) == {"t00": 10_001}
    found = [backlog(each.topic, [(1, 5_000_000), (100_000, 100)], 9, read=int(each.topic != "t07")) for each in found]
    taken = admit(found, Limits(max_bytes=6_000_000))
    assert max(found, key=lambda each: each.size_of(1)).topic == "t07"
    assert len(taken) == 50, "one large entry fits, and small ones of all others"
    assert taken["t07"] > 1
    assert 5_990_000 < cost(taken, found) <= 6_000_000


@pytest.mark.parametrize(
    ("backlog_bytes", "now", "due"), [(50, 1.0, False), (100, 1.0, True), (50, 9.0, False), (50, 10.0, True), (1, 11.0, True)]
)
def test_a_small_batch_waits_so_long_at_most(backlog_bytes: float, now: float, due: bool) -> None:
    assert Patience(Limits(min_bytes=100, max_delay_s=10.0), now=0.0).is_due(backlog_bytes, now) is due


def test_the_wait_begins_again_with_every_batch() -> None:
    patience = Patience(Limits(min_bytes=100, max_delay_s=10.0), now=0.0)
    assert patience.is_due(1, 10.0)
    patience.on_batch(10.0)
    assert not patience.is_due(1, 19.0)
    assert patience.is_due(1, 20.0)
