"""The writer core: what is confirmed when, and what happens when bookies fail. Tables first, then random histories."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cepheid_ledger.writer_state import ChangeEnsemble, Confirm, Effect, FailLedger, SendAdd, WriterState

ABC = ("a", "b", "c")


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


def test_nothing_is_confirmed_while_the_ensemble_changes() -> None:
    state = WriterState(ABC, 2)
    state.append(10)
    state.on_added("a", 6)
    state.on_added("b", 6)
    assert state.last_add_confirmed == 6
    assert state.on_add_failed("b") == [ChangeEnsemble(("b",), from_entry_id=7)]
    assert state.on_added("a", 9) is None
    assert state.on_added("c", 9) is None, "entry 9 has two copies, but the new fragment starts at 7"
    assert state.last_add_confirmed == 6


def test_worked_example_of_an_ensemble_change() -> None:
    """ledger-protocol §17: fragment 0:[A B C], LAC 7, pending 8 (A, B) and 9; B fails, then C during the change."""
    state = WriterState(ABC, 2)
    state.append(10)
    state.on_added("a", 7)
    state.on_added("c", 7)
    state.on_added("b", 8)
    state.on_added("a", 8)
    assert state.last_add_confirmed == 8
    assert state.on_add_failed("b") == [ChangeEnsemble(("b",), 9)]
    assert state.on_add_failed("c") == [], "one change at a time"
    # The change of b is in force; c, which failed meanwhile, is next, from the same start.
    assert state.on_ensemble_changed({"b": "d"}) == [SendAdd(("d",), 9, 9), ChangeEnsemble(("c",), 9)]
    assert state.ensemble == ("a", "d", "c"), "a place keeps its position"
    assert state.on_added("d", 9) is None
    assert state.on_ensemble_changed({"c": "f"}) == [SendAdd(("f",), 9, 9)]
    assert state.on_added("a", 9) == Confirm(9)
    assert state.ensemble == ("a", "d", "f")


def test_acks_of_a_replaced_bookie_no_longer_count() -> None:
    state = WriterState(ABC, 2)
    state.append(1)
    state.on_added("a", 0)
    state.on_add_failed("a")
    state.on_ensemble_changed({"a": "d"})
    assert state.on_added("a", 0) is None
    assert state.on_added("b", 0) is None, "only b holds entry 0 under the present ensemble"
    assert state.on_added("d", 0) == Confirm(0)


def test_a_bookie_that_left_does_not_come_back() -> None:
    state = WriterState(ABC, 2)
    state.append(1)
    state.on_add_failed("a")
    state.on_ensemble_changed({"a": "d"})
    assert "a" in state.unusable
    state.on_add_failed("d")
    with pytest.raises(AssertionError, match="brings back"):
        state.on_ensemble_changed({"d": "a"})


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
    state.on_add_failed("b")
    assert state.on_change_impossible() == [FailLedger(("c", "b"))]
    assert state.on_added("a", 2) is None


def test_what_a_dropped_bookie_acknowledged_before_it_failed_still_counts() -> None:
    state = WriterState(ABC, 2)
    state.append(2)
    state.on_added("c", 1)
    state.on_add_failed("c")
    state.on_change_impossible()
    assert state.on_added("a", 1) == Confirm(1)


def test_a_bookie_can_be_done_without_when_it_lags_behind_what_is_confirmed() -> None:
    state = WriterState(ABC, 2)
    state.append(2)
    assert not state.can_do_without("c")
    state.on_added("a", 0)
    state.on_added("b", 0)
    assert state.can_do_without("c")
    assert not state.can_do_without("a"), "it holds everything that is confirmed"
    state.on_add_failed("b")
    state.on_change_impossible()
    assert not state.can_do_without("c"), "b is out: a alone does not reach the quorum"


def test_recovery_starts_behind_what_is_confirmed() -> None:
    state = WriterState(ABC, 2, last_entry_id=41)
    assert state.append(2) == SendAdd(ABC, 42, 43)
    state.on_added("a", 43)
    assert state.on_added("b", 42) == Confirm(42)


@given(st.integers(1, 5), st.data())
def test_the_quorum_is_exact(size: int, data: st.DataObject) -> None:
    """For any answers: entry e is confirmed exactly when Qa bookies hold everything up to e."""
    ensemble = tuple("abcde"[:size])
    ack_quorum = data.draw(st.integers(1, size))
    state = WriterState(ensemble, ack_quorum)
    state.append(8)
    held = {bookie: data.draw(st.integers(-1, 7), label=bookie) for bookie in ensemble}
    for bookie, last in held.items():
        if last >= 0:
            state.on_added(bookie, last)
    expected = max(e for e in range(-1, 8) if e < 0 or sum(last >= e for last in held.values()) >= ack_quorum)
    assert state.last_add_confirmed == expected


class WriterHistory(RuleBasedStateMachine):
    """A writer, bookies that store what they get, and metadata. Invariants L3 and L4 after each step.

    `stored` is what a bookie holds, `sent` what is on its way; a change is decided at once or later, with or without a
    spare, and late answers of bookies that left still arrive.
    """

    def __init__(self) -> None:
        super().__init__()
        self.state = WriterState(ABC, 2)
        self.fragments: dict[int, tuple[str, ...]] = {0: ABC}
        self.sent: dict[str, list[tuple[int, int]]] = {bookie: [] for bookie in "abcdefghij"}
        self.stored: dict[str, set[int]] = {bookie: set() for bookie in "abcdefghij"}
        self.change: ChangeEnsemble | None = None
        self.confirmed = -1
        self.failed = False

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendAdd(bookies, first, last):
                    for bookie in bookies:
                        self.sent[bookie].append((first, last))
                case Confirm(last):
                    assert last > self.confirmed, "confirmed twice, or backwards"
                    assert self.change is None, "confirmed while the ensemble changes"
                    self.confirmed = last
                case ChangeEnsemble():
                    assert self.change is None, "two changes at once"
                    assert effect.from_entry_id == self.confirmed + 1
                    self.change = effect
                case FailLedger():
                    self.failed = True

    @precondition(lambda self: not self.failed)
    @rule(count=st.integers(1, 3))
    def append(self, count: int) -> None:
        self.perform([self.state.append(count)])

    @rule(bookie=st.sampled_from("abcdefghij"), heard=st.booleans())
    def answer(self, bookie: str, heard: bool) -> None:
        if self.sent[bookie]:
            first, last = self.sent[bookie].pop(0)
            self.stored[bookie] |= set(range(first, last + 1))
            if heard and (confirm := self.state.on_added(bookie, last)) is not None:
                self.perform([confirm])
            if not heard:
                self.lose(bookie)

    def lose(self, bookie: str) -> None:
        self.sent[bookie].clear()
        self.perform(self.state.on_add_failed(bookie))

    @rule(bookie=st.sampled_from("abcdefghij"))
    def fail(self, bookie: str) -> None:
        if bookie in self.state.ensemble:
            self.lose(bookie)

    @precondition(lambda self: self.change is not None)
    @rule(data=st.data())
    def change_ensemble(self, data: st.DataObject) -> None:
        change = self.change
        assert change is not None
        spares = [bookie for bookie in "abcdefghij" if bookie not in self.state.unusable]
        replaced = dict(zip(change.failed, spares, strict=False))
        self.change = None
        if not replaced or data.draw(st.booleans()):
            self.perform(self.state.on_change_impossible())
            return
        ensemble = tuple(replaced.get(bookie, bookie) for bookie in self.state.ensemble)
        assert max(self.fragments) <= change.from_entry_id
        self.fragments[change.from_entry_id] = ensemble
        self.perform(self.state.on_ensemble_changed(replaced))
        assert self.state.ensemble == ensemble

    @invariant()
    def confirmed_entries_are_on_ack_quorum_bookies_that_metadata_names(self) -> None:
        for entry_id in range(self.confirmed + 1):
            first = max(key for key in self.fragments if key <= entry_id)
            holders = [bookie for bookie in self.fragments[first] if entry_id in self.stored[bookie]]
            assert len(holders) >= 2, f"entry {entry_id} is on {holders} of {self.fragments}"

    @invariant()
    def lac_is_what_was_confirmed(self) -> None:
        assert self.confirmed == self.state.last_add_confirmed <= self.state.last_add_pushed


TestWriterHistory = WriterHistory.TestCase
