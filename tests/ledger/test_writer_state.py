"""The writer core: what is confirmed when, and what happens when bookies fail. Random histories: test_writer_history.py."""

from __future__ import annotations

import pytest

from cepheid_ledger.striping import runs_at, write_windows
from cepheid_ledger.writer_state import BegunChange, ChangeEnsemble, Confirm, FailLedger, SendAdd, WriterState

ABC = ("a", "b", "c")
ABCD = ("a", "b", "c", "d")


def change(state: WriterState, replaced: dict[str, str]) -> list[object]:
    """Begun and in force in one step."""
    state.begin_change()
    return list(state.on_ensemble_changed(replaced))


@pytest.mark.parametrize(
    ("ack_quorum", "acked_through", "confirmed"),
    [
        (2, (9, 4, -1), 4),  # the second best answer decides
        (2, (9, -1, -1), -1),  # one copy is no quorum
        (3, (9, 9, 4), 4),
        (1, (3, -1, -1), 3),
    ],
)
def test_confirms_what_ack_quorum_bookies_hold(ack_quorum: int, acked_through: tuple[int, ...], confirmed: int) -> None:
    state = WriterState(ABC, ack_quorum)
    state.append(10)
    for bookie, last in zip(ABC, acked_through, strict=True):
        if last >= 0:
            state.on_added(bookie, last)
    assert state.last_add_confirmed == confirmed


def test_an_append_goes_to_the_whole_ensemble_with_the_next_ids() -> None:
    state = WriterState(ABC, 2)
    assert state.append(3) == SendAdd(ABC, 0, 2)
    assert state.append(1) == SendAdd(ABC, 3, 3)


def test_an_answer_is_confirmed_once() -> None:
    state = WriterState(ABC, 2)
    state.append(1)
    assert state.on_added("a", 0) is None
    assert state.on_added("b", 0) == Confirm(0)
    assert state.on_added("c", 0) is None


def test_while_the_ensemble_changes_only_bookies_of_both_ensembles_count() -> None:
    state = WriterState(ABC, 2)
    state.append(10)
    state.on_added("a", 6)
    state.on_added("b", 9)
    assert state.on_add_failed("b") == [ChangeEnsemble(("b",))]
    assert state.on_added("a", 8) is None, "b holds 8 too, but the change that is on its way takes its place away"
    assert state.begin_change() == BegunChange(("b",), from_entry_id=7)
    assert state.on_added("c", 7) == Confirm(7), "a and c are in the old and the new ensemble"
    assert state.on_ensemble_changed({"b": "d"}) == [SendAdd(("d",), 7, 9)], "from the start of the fragment on, not from LAC + 1"
    assert state.on_added("d", 8) == Confirm(8)


def test_the_start_of_the_fragment_is_taken_when_the_change_begins() -> None:
    state = WriterState(ABC, 2)
    state.append(10)
    state.on_add_failed("b")
    state.on_added("a", 5)
    assert state.on_added("c", 5) == Confirm(5), "while the change waits for its turn"
    assert state.begin_change().from_entry_id == 6
    assert state.on_ensemble_changed({"b": "d"}) == [SendAdd(("d",), 6, 9)]


def test_a_bookie_that_was_done_without_before_it_was_replaced_is_short() -> None:
    """Its fragment names it for 0 to 5, which were confirmed after it had failed. Found by seed 0x41 of the simulator (V5)."""
    state = WriterState(ABC, 2)
    state.append(10)
    state.on_add_failed("b")
    assert state.short == (), "a newcomer may still get all of it"
    state.on_added("a", 5)
    state.on_added("c", 5)
    assert state.short == ("b",), "as it stands when the writer closes the ledger now"
    change(state, {"b": "d"})
    assert state.short == ("b",)


def test_a_bookie_that_was_replaced_with_all_its_entries_or_is_slow_is_not_short() -> None:
    state = WriterState(ABC, 2)
    state.append(10)
    state.on_added("b", 5)
    state.on_added("c", 5)
    assert state.short == (), "a is slow"
    state.on_add_failed("b")
    change(state, {"b": "d"})
    assert state.short == ()


def test_worked_example_of_an_ensemble_change() -> None:
    """ledger-protocol §17: fragment 0:[A B C], LAC 7, pending 8 (A, B) and 9; B fails, then C during the change."""
    state = WriterState(ABC, 2)
    state.append(10)
    state.on_added("a", 7)
    state.on_added("c", 7)
    state.on_added("b", 8)
    assert state.last_add_confirmed == 7
    state.on_add_failed("b")
    assert state.begin_change() == BegunChange(("b",), 8)
    assert state.on_added("a", 8) is None, "8 is on A and B, but B is leaving: incomplete again"
    assert state.on_add_failed("c") == [], "one change at a time"
    # The change of b is in force; c, which failed meanwhile, is next, from the same start.
    assert state.on_ensemble_changed({"b": "d"}) == [SendAdd(("d",), 8, 9), ChangeEnsemble(("c",))]
    assert state.begin_change() == BegunChange(("c",), 8), "start = last key: that fragment is replaced"
    assert state.ensemble == ("a", "d", "c"), "a place keeps its position"
    assert state.on_added("d", 8) == Confirm(8), "a and d stay whatever becomes of the second change"
    assert state.on_ensemble_changed({"c": "f"}) == [SendAdd(("f",), 8, 9)]
    assert state.on_added("a", 9) is None
    assert state.on_added("f", 9) == Confirm(9)
    assert state.ensemble == ("a", "d", "f")


def test_several_failures_before_the_change_begins_are_one_change() -> None:
    state = WriterState(ABC, 1)
    state.append(1)
    assert state.on_add_failed("b") == [ChangeEnsemble(("b",))]
    assert state.on_add_failed("c") == []
    assert state.begin_change() == BegunChange(("b", "c"), 0)
    assert state.on_ensemble_changed({"b": "d", "c": "e"}) == [SendAdd(("d", "e"), 0, 0)]


def test_an_attempt_that_left_no_trace_begins_anew_with_all_that_failed() -> None:
    state = WriterState(ABC, 1)
    state.append(5)
    state.on_add_failed("b")
    assert state.begin_change() == BegunChange(("b",), 0)
    state.on_added("a", 2)
    state.on_add_failed("c")
    assert state.begin_change() == BegunChange(("b", "c"), 3)


def test_a_newcomer_that_fails_is_replaced_too_and_nobody_comes_back() -> None:
    state = WriterState(ABC, 2)
    state.append(1)
    state.on_add_failed("a")
    change(state, {"a": "d"})
    state.on_add_failed("d")
    assert set(state.unusable) == {"a", "b", "c", "d"}
    state.begin_change()
    with pytest.raises(AssertionError, match="brings back"):
        state.on_ensemble_changed({"d": "a"})


def test_acks_of_a_replaced_bookie_no_longer_count() -> None:
    state = WriterState(ABC, 2)
    state.append(1)
    state.on_added("a", 0)
    state.on_add_failed("a")
    change(state, {"a": "d"})
    assert state.on_added("a", 0) is None
    assert state.on_added("b", 0) is None, "only b holds entry 0 under the present ensemble"
    assert state.on_added("d", 0) == Confirm(0)


def test_without_a_spare_the_others_go_on_while_they_reach_the_ack_quorum() -> None:
    state = WriterState(ABC, 2)
    state.append(2)
    state.on_added("a", 1)
    state.on_add_failed("c")
    assert state.on_change_impossible() == []
    assert state.dropped == ("c",)
    assert state.append(1) == SendAdd(("a", "b"), 2, 2), "the failed one gets nothing more"
    assert state.on_added("c", 1) is None, "late news"
    assert state.on_added("b", 2) == Confirm(1)
    assert state.on_add_failed("b") == [ChangeEnsemble(("b", "c"))], "a new attempt is one for all that failed"
    assert state.on_change_impossible() == [FailLedger(("c", "b"))]
    assert state.on_added("a", 2) is None


def test_what_a_dropped_bookie_acknowledged_before_it_failed_still_counts() -> None:
    state = WriterState(ABC, 2)
    state.append(2)
    state.on_added("c", 1)
    state.on_add_failed("c")
    assert state.on_added("a", 0) is None, "c may be replaced"
    assert state.on_change_impossible() == [Confirm(0)], "it was not: metadata names it, and it holds entry 0"
    assert state.on_added("a", 1) == Confirm(1)


def test_a_spare_that_appears_later_takes_the_place_of_a_dropped_bookie() -> None:
    state = WriterState(ABC, 2)
    state.append(4)
    assert state.retry_change() == []
    state.on_added("a", 1)
    state.on_added("b", 1)
    state.on_add_failed("c")
    state.on_change_impossible()
    assert state.retry_change() == [ChangeEnsemble(("c",))]
    assert state.retry_change() == [], "one change at a time"
    assert state.dropped == ("c",), "still under-replicated"
    assert change(state, {"c": "d"}) == [SendAdd(("d",), 2, 3)]
    assert (state.dropped, state.receivers) == ((), ("a", "b", "d"))


def test_one_spare_for_two_failed_bookies() -> None:
    state = WriterState(ABC, 2)
    state.append(2)
    state.on_add_failed("b")
    state.on_add_failed("c")
    assert change(state, {"b": "d"}) == [SendAdd(("d",), 0, 1)]
    assert (state.dropped, state.ensemble) == (("c",), ("a", "d", "c"))
    state.on_added("a", 1)
    assert state.on_added("d", 1) == Confirm(1)


def test_newcomers_that_cannot_be_supplied_are_dropped_and_replaced_by_the_next_change() -> None:
    state = WriterState(ABC, 2)
    state.append(2)
    state.on_add_failed("c")
    state.begin_change()
    assert state.on_ensemble_changed({"c": "d"}, supplied=False) == []
    assert (state.dropped, state.ensemble, state.receivers) == (("d",), ("a", "b", "d"), ("a", "b"))
    assert state.on_added("d", 1) is None
    state.on_added("a", 1)
    assert state.on_added("b", 1) == Confirm(1)
    assert state.retry_change() == [ChangeEnsemble(("d",))]
    assert state.begin_change() == BegunChange(("d",), 2)


def test_a_bookie_can_be_done_without_when_it_lags_behind_what_is_confirmed() -> None:
    state = WriterState(ABC, 2)
    state.append(2)
    assert not state.can_do_without("c")
    state.on_added("a", 0)
    state.on_added("b", 0)
    assert state.can_do_without("c")
    assert not state.can_do_without("a"), "it holds everything that is confirmed"
    state.on_add_failed("b")
    assert not state.can_do_without("c"), "b is out: a alone does not reach the quorum"
    state.on_change_impossible()
    assert not state.can_do_without("c")


def test_recovery_starts_behind_what_is_confirmed() -> None:
    state = WriterState(ABC, 2, last_entry_id=41)
    assert state.append(2) == SendAdd(ABC, 42, 43)


def test_nothing_is_confirmed_while_it_is_looked_up_whose_ledger_it_is() -> None:
    state = WriterState(ABC, 2)
    state.append(2)
    state.hold_back()
    assert [state.on_added(bookie, 1) for bookie in ABC] == [None, None, None]
    assert state.release() == Confirm(1)
    state.fail()
    assert state.release() is None


def test_a_ledger_that_failed_while_it_was_looked_up_confirms_nothing() -> None:
    state = WriterState(ABC, 2)
    state.append(2)
    state.hold_back()
    for bookie in ABC:
        state.on_added(bookie, 1)
    state.fail()
    assert state.release() is None
    assert state.last_add_confirmed == -1


def test_a_failed_ledger_looks_for_no_spare() -> None:
    state = WriterState(ABC, 2)
    state.on_add_failed("b")
    state.on_change_impossible()
    state.fail()
    assert state.retry_change() == []


def test_a_change_of_a_striped_ledger_stops_no_entry_that_it_does_not_concern() -> None:
    state = WriterState(ABCD, 2, write_quorum=2)
    state.append(6)
    for bookie in ABCD:
        state.on_added(bookie, 3)
    state.on_add_failed("d")
    state.begin_change()
    state.on_added("a", 5)
    assert state.on_added("b", 5) == Confirm(4), "entry 4 is on a and b; 5 waits for c"
    assert state.on_added("c", 5) == Confirm(5)
    state.append(2)
    assert state.on_ensemble_changed({"d": "e"}) == [SendAdd(("e",), 4, 7)]
    state.append(2)
    assert [state.on_added(bookie, 9) for bookie in "abc"] == [None, None, None], "6 is on c and e"
    assert state.on_added("e", 7) == Confirm(9), "8 and 9 are not on e"


# Bookies that are left although they may be well


def test_a_bookie_that_is_left_gets_entries_until_its_replacement_is_in_force() -> None:
    state = WriterState(ABC, 2)
    state.append(2)
    assert state.on_leave("b") == [ChangeEnsemble(())]
    assert state.on_leave("b") == [], "that is under way"
    assert state.append(1) == SendAdd(ABC, 2, 2)
    state.on_added("a", 0)
    assert state.on_added("b", 0) == Confirm(0), "no change has begun: metadata names b alone"
    assert state.begin_change() == BegunChange(("b",), 1)
    assert state.on_added("a", 2) is None
    assert state.on_added("b", 2) is None, "b may be replaced by now"
    assert state.on_added("c", 1) == Confirm(1)
    assert state.append(1) == SendAdd(ABC, 3, 3)
    assert state.on_ensemble_changed({"b": "d"}) == [SendAdd(("d",), 1, 3)]
    assert (state.ensemble, state.receivers) == (("a", "d", "c"), ("a", "c", "d"))
    assert state.on_leave("b") == [], "it has left"


def test_a_ledger_without_entries_leaves_a_bookie_in_place() -> None:
    state = WriterState(ABC, 2)
    assert state.on_leave("a") == [ChangeEnsemble(())]
    assert state.begin_change() == BegunChange(("a",), 0)
    assert state.on_ensemble_changed({"a": "d"}) == []
    assert state.append(1) == SendAdd(("b", "c", "d"), 0, 0)


def test_a_bookie_that_cannot_be_replaced_stays_and_what_it_acknowledged_meanwhile_counts() -> None:
    state = WriterState(ABC, 3)
    state.append(1)
    state.on_leave("b")
    state.begin_change()
    assert [state.on_added(bookie, 0) for bookie in ABC] == [None, None, None]
    assert state.on_change_impossible() == [Confirm(0)]
    assert (state.dropped, state.receivers) == ((), ABC)
    assert state.retry_change() == [], "whoever asked asks again"


def test_without_a_spare_a_bookie_that_waits_for_a_change_of_its_own_stays_as_well() -> None:
    """Else the same change would be asked for again at once, and without end (seed 0x23)."""
    state = WriterState(ABC, 2)
    state.on_add_failed("c")
    state.begin_change()
    state.on_change_impossible()
    assert state.dropped == ("c",)
    state.on_leave("b")
    assert state.begin_change().failed == ("c",), "a and b are needed for the quorum"
    assert state.on_change_impossible() == []
    assert (state.dropped, state.receivers) == (("c",), ("a", "b"))


def test_a_change_for_others_does_not_stop_a_bookie_from_counting_that_is_kept() -> None:
    state = WriterState(ABCD, 2)
    state.append(1)
    state.on_add_failed("a")
    assert state.on_leave("b") == [], "the change that is wanted takes it along"
    assert state.begin_change() == BegunChange(("a", "b"), 0), "failed bookies get the spares first"
    state.keep_unreplaced({"a": "e"})
    state.on_added("b", 0)
    assert state.on_added("c", 0) == Confirm(0)
    assert state.on_ensemble_changed({"a": "e"}) == [SendAdd(("e",), 0, 0)]
    assert state.dropped == ()


def test_bookies_are_left_one_after_the_other_where_the_quorum_needs_them() -> None:
    state = WriterState(ABC, 2)
    state.append(1)
    state.on_leave("a")
    state.on_leave("b")
    assert state.begin_change() == BegunChange(("a",), 0), "b and c confirm meanwhile"
    assert state.on_ensemble_changed({"a": "d"}) == [SendAdd(("d",), 0, 0), ChangeEnsemble(())]
    assert state.begin_change() == BegunChange(("b",), 0)


def test_a_bookie_that_fails_while_it_is_left_has_failed() -> None:
    state = WriterState(ABC, 2)
    state.append(1)
    state.on_leave("b")
    state.begin_change()
    assert state.on_add_failed("b") == []
    assert state.on_change_impossible() == []
    assert (state.dropped, state.receivers) == (("b",), ("a", "c"))


def test_a_bookie_that_failed_or_was_dropped_is_not_left_again() -> None:
    state = WriterState(ABC, 2)
    state.on_add_failed("b")
    assert state.on_leave("b") == []
    state.on_change_impossible()
    assert state.on_leave("b") == []
    assert state.on_leave("x") == []


# Striping


@pytest.mark.parametrize(
    ("position", "first", "last", "runs"),
    [
        (0, 0, 9, [(0, 0), (3, 4), (7, 8)]),  # E 4, Qw 2: position p holds entries p - 1 and p, mod 4
        (2, 0, 9, [(1, 2), (5, 6), (9, 9)]),
        (2, 2, 5, [(2, 2), (5, 5)]),
        (2, 3, 4, []),
    ],
)
def test_runs_of_a_position(position: int, first: int, last: int, runs: list[tuple[int, int]]) -> None:
    assert runs_at(position, first, last, ensemble_size=4, write_quorum=2) == runs


@pytest.mark.parametrize(("size", "write_quorum"), [(3, 2), (4, 2), (4, 3), (5, 2), (5, 4)])
def test_runs_and_windows_are_two_views_of_one_rule(size: int, write_quorum: int) -> None:
    base = 2**31 - 3  # full width: no cast to 32 bits on the way
    held = {
        (entry_id, position)
        for position in range(size)
        for first, last in runs_at(position, base, base + 20, size, write_quorum)
        for entry_id in range(first, last + 1)
    }
    windows = write_windows(size, write_quorum)
    assert held == {(entry_id, p) for entry_id in range(base, base + 21) for p in windows[entry_id % size]}


def test_striped_entries_are_confirmed_in_order_by_their_own_write_sets() -> None:
    state = WriterState(ABCD, 2, write_quorum=2)
    assert state.append(4) == SendAdd(ABCD, 0, 3)
    assert state.share("c", 0, 3) == [(1, 2)]
    assert state.on_added("c", 2) is None
    assert state.on_added("b", 1) is None, "1 is on b and c, but 0 comes first"
    assert state.on_added("a", 0) == Confirm(1), "b answered through 1, so it holds 0"
    assert state.on_added("a", 3) is None
    assert state.on_added("d", 3) == Confirm(3)


def test_worked_example_of_striping() -> None:
    """ledger-protocol §17: E 4, Qw 2; replacing C re-sends only ids with id mod 4 in {1, 2}."""
    state = WriterState(ABCD, 2, write_quorum=2)
    assert [entry_id for first, last in state.share("b", 5, 5) for entry_id in range(first, last + 1)] == [5]
    assert state.share("c", 5, 5) == [(5, 5)]
    assert state.share("a", 5, 5) == state.share("d", 5, 5) == []
    state.append(12)
    state.on_add_failed("c")
    assert change(state, {"c": "e"}) == [SendAdd(("e",), 0, 11)]
    resent = [entry_id for first, last in state.share("e", 0, 11) for entry_id in range(first, last + 1)]
    assert resent == [entry_id for entry_id in range(12) if entry_id % 4 in (1, 2)]


def test_a_striped_ledger_needs_its_quorum_in_every_write_set() -> None:
    state = WriterState(ABCD, 1, write_quorum=2)
    state.on_add_failed("b")
    assert state.on_change_impossible() == [], "every two neighbours have one left"
    state.on_add_failed("c")
    assert state.on_change_impossible() == [FailLedger(("b", "c"))], "entry 1 has nobody"


def test_a_striped_ledger_stops_at_the_first_entry_without_its_quorum() -> None:
    state = WriterState(("a", "b", "c", "d", "e", "f"), 2, write_quorum=2)
    state.append(12)
    for bookie in "abcef":
        state.on_added(bookie, 11)
    assert state.last_add_confirmed == 1, "entry 2 is on c and d"
    state.on_add_failed("d")
    assert change(state, {"d": "g"}) == [SendAdd(("g",), 2, 11)]
    assert state.last_add_confirmed == 1
    assert state.on_added("g", 3) == Confirm(7), "8 is the next on c and g"
