"""Random histories of the writer core against a model of what bookies hold and what metadata may say.

The model knows nothing of the core's bookkeeping. It keeps, per bookie, the entries that are durable there, and every version
of the fragments that may be in force: during a change two of them. It asserts after each step
- L3: each confirmed entry is on Qa bookies of its write set under *every* version that may be in force;
- L4: confirmed ids rise without gaps; two changes never overlap; fragments start where the record allows (L1, L2);
- newcomers get all entries of their share from the start of their fragment on, and nobody comes back.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cepheid_ledger.writer_state import (
    BegunChange,
    ChangeEnsemble,
    Confirm,
    Effect,
    FailLedger,
    SendAdd,
    WriterState,
)

BOOKIES = "abcdefghijklmnopqr"
CONFIGURATIONS = [(3, 3, 2), (2, 2, 1), (4, 4, 2), (3, 2, 1), (4, 3, 2), (3, 3, 3), (6, 2, 2)]  # E, Qw, Qa

Fragments = dict[int, tuple[str, ...]]


class Model:
    """Bookies answer in order, late or never; changes begin, are refused, fail without a trace, or come into force late.

    A step that is not possible now does nothing.
    """

    def __init__(self, sizes: tuple[int, int, int]) -> None:
        self.size, self.write_quorum, self.ack_quorum = sizes
        self.state = WriterState(tuple(BOOKIES[: self.size]), self.ack_quorum, write_quorum=self.write_quorum)
        self.sent: dict[str, list[int]] = {bookie: [] for bookie in BOOKIES}  # on their way
        self.stored: dict[str, set[int]] = {bookie: set() for bookie in BOOKIES}
        self.versions: list[Fragments] = [{0: tuple(BOOKIES[: self.size])}]  # one of them is in force
        self.wanted = False
        self.begun: BegunChange | None = None
        self.replaced: dict[str, str] = {}
        self.gone: set[str] = set()  # lost, or replaced
        self.leaving: set[str] = set()  # somebody wants them to be left; they are well
        self.pushed = self.confirmed = -1
        self.failed = False

    def write_set(self, fragments: Fragments, entry_id: int) -> list[str]:
        ensemble = fragments[max(first for first in fragments if first <= entry_id)]
        return [ensemble[(entry_id + i) % self.size] for i in range(self.write_quorum)]

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendAdd(bookies, first, last):
                    self.send(bookies, first, last)
                case Confirm(last):
                    assert last > self.confirmed, "confirmed twice, or backwards"
                    self.confirmed = last
                case ChangeEnsemble():
                    assert not self.wanted, "two changes at once"
                    self.wanted = True
                case FailLedger():
                    self.failed = True

    def send(self, bookies: tuple[str, ...], first: int, last: int) -> None:
        for bookie in bookies:
            for run_first, run_last in self.state.share(bookie, first, last):
                self.sent[bookie] += range(run_first, run_last + 1)

    def append(self, count: int) -> None:
        if self.failed:
            return
        send = self.state.append(count)
        assert (send.first, send.last) == (self.pushed + 1, self.pushed + count)
        self.pushed = send.last
        self.perform([send])

    def answer(self, index: int, count: int) -> None:
        if waiting := [bookie for bookie in BOOKIES if self.sent[bookie]]:
            self.take_answers(waiting[index % len(waiting)], count)

    def all_but_the_failed_answer(self) -> None:
        for bookie in BOOKIES:
            if self.sent[bookie] and bookie not in self.gone:
                self.take_answers(bookie, len(self.sent[bookie]))

    def take_answers(self, bookie: str, count: int) -> None:
        answered, self.sent[bookie] = self.sent[bookie][:count], self.sent[bookie][count:]
        self.stored[bookie].update(answered)
        if (confirm := self.state.on_added(bookie, answered[-1])) is not None:
            self.perform([confirm])

    def fail(self, index: int, stored: int, deadly: bool) -> None:
        """Some of what was on its way may have been stored. Seldom fewer than Qa are left: that ends most histories."""
        living = [bookie for bookie in self.state.ensemble if bookie not in self.gone]
        if not living or (len(living) <= self.ack_quorum + self.size - self.write_quorum and not deadly):
            return
        bookie = living[index % len(living)]
        self.stored[bookie].update(self.sent[bookie][:stored])
        self.gone.add(bookie)
        if stored:  # nothing else comes; with 0 late answers may still arrive
            self.sent[bookie].clear()
        self.perform(self.state.on_add_failed(bookie))

    def leave(self, index: int) -> None:
        """It goes on answering, and everything goes on as before where there is no spare."""
        bookie = self.state.ensemble[index % self.size]
        if not self.failed:
            self.leaving.add(bookie)
            self.perform(self.state.on_leave(bookie))

    def begin(self, count: int) -> None:
        if not self.wanted or self.failed or len(self.versions) == 2:
            return
        begun = self.begun = self.state.begin_change()
        assert begun.from_entry_id == self.confirmed + 1
        assert set(begun.failed) <= self.gone | self.leaving
        named = {bookie for ensemble in self.versions[0].values() for bookie in ensemble}
        spares = [bookie for bookie in BOOKIES if bookie not in named | self.gone]
        self.replaced = dict(zip(begun.failed, spares[:count], strict=False))
        self.state.keep_unreplaced(self.replaced)
        if not self.replaced:
            self.decide_against()
            return
        before = self.versions[0]
        last = max(before)
        assert begun.from_entry_id >= last, "a fragment that starts before the last one"
        ensemble = tuple(self.replaced.get(bookie, bookie) for bookie in before[last])
        self.versions.append({**before, begun.from_entry_id: ensemble})

    def in_force(self, supplied: bool) -> None:
        if len(self.versions) == 1:
            return
        del self.versions[0]
        self.wanted = False
        assert self.begun is not None
        start, newcomers = self.begun.from_entry_id, list(self.replaced.values())
        self.gone.update(self.replaced)
        if not supplied:
            self.gone.update(newcomers)
        self.perform(self.state.on_ensemble_changed(self.replaced, supplied=supplied))
        assert self.state.ensemble == self.versions[0][max(self.versions[0])]
        for newcomer in newcomers if supplied else []:
            share = [e for e in range(start, self.pushed + 1) if newcomer in self.write_set(self.versions[0], e)]
            assert self.sent[newcomer] == share, f"{newcomer} lacks or has too much"

    def without_a_trace(self, again: bool) -> None:
        if len(self.versions) == 1:
            return
        del self.versions[1]
        if not again:
            self.decide_against()

    def decide_against(self) -> None:
        self.wanted = False
        self.perform(self.state.on_change_impossible())

    def a_spare_may_have_appeared(self) -> None:
        self.perform(self.state.retry_change())

    def check(self) -> None:
        self.confirmed_entries_have_their_quorum_whatever_metadata_says()
        self.the_core_agrees_on_what_was_confirmed()
        self.what_enough_living_bookies_hold_is_confirmed()

    def confirmed_entries_have_their_quorum_whatever_metadata_says(self) -> None:
        for fragments in self.versions:
            for entry_id in range(self.confirmed + 1):
                holders = [bookie for bookie in self.write_set(fragments, entry_id) if entry_id in self.stored[bookie]]
                assert len(holders) >= self.ack_quorum, f"entry {entry_id} is on {holders} of {fragments}"

    def the_core_agrees_on_what_was_confirmed(self) -> None:
        assert self.confirmed == self.state.last_add_confirmed <= self.state.last_add_pushed == self.pushed

    def what_enough_living_bookies_hold_is_confirmed(self) -> None:
        """No entry hangs: with every failure decided, what Qa living bookies of the write set hold is confirmed (V3)."""
        if self.wanted or self.failed or self.confirmed == self.pushed:
            return
        fragments, entry_id = self.versions[0], self.confirmed + 1
        alive = [bookie for bookie in self.write_set(fragments, entry_id) if bookie not in self.gone]
        held = [bookie for bookie in alive if entry_id in self.stored[bookie]]
        assert len(held) < self.ack_quorum, f"entry {entry_id} is on {held} and not confirmed"


STEPS: dict[str, dict[str, Sequence[Any]]] = {
    "append": {"count": range(1, 6)},
    "answer": {"index": range(8), "count": range(1, 7)},
    "all_but_the_failed_answer": {},
    "fail": {"index": range(6), "stored": range(4), "deadly": [False] * 7 + [True]},
    "leave": {"index": range(6)},
    "begin": {"count": [3, 3, 3, 2, 1, 0]},
    "in_force": {"supplied": [True, True, True, False]},
    "without_a_trace": {"again": [False, True]},
    "a_spare_may_have_appeared": {},
}
Step = tuple[str, dict[str, Any]]


def steps() -> st.SearchStrategy[Step]:
    choices = [st.fixed_dictionaries({k: st.sampled_from(v) for k, v in values.items()}) for values in STEPS.values()]
    return st.one_of(*(st.tuples(st.just(name), values) for name, values in zip(STEPS, choices, strict=True)))


def run(sizes: tuple[int, int, int], history: Iterable[Step]) -> Model:
    model = Model(sizes)
    for name, arguments in history:
        getattr(model, name)(**arguments)
        model.check()
    return model


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(CONFIGURATIONS), st.lists(steps(), min_size=5, max_size=60))
def test_confirmed_entries_survive_every_version_of_metadata(sizes: tuple[int, int, int], history: list[Step]) -> None:
    run(sizes, history)


def random_history(seed: int) -> tuple[tuple[int, int, int], list[Step]]:
    rng = random.Random(seed)
    names = list(STEPS)
    drawn = [rng.choice(names) for _ in range(80)]
    history = [(name, {key: rng.choice(values) for key, values in STEPS[name].items()}) for name in drawn]
    return rng.choice(CONFIGURATIONS), history


def run_many(seeds: int) -> list[Model]:
    return [run(*random_history(seed)) for seed in range(seeds)]


@pytest.mark.slow
def test_many_random_histories_hold_and_reach_what_they_should() -> None:
    models = run_many(500)
    assert sum(model.failed for model in models) < 250, "most histories go on"
    assert sum(len(model.versions[0]) for model in models) > 700, "fragments were begun"
    assert sum(model.confirmed for model in models) > 8_000


# The model is worth something only if it finds defects


def _count_failed_bookies(self: WriterState) -> Any:
    failed, begun, self._failed, self._begun = self._failed, self._begun, {}, None
    try:
        return CONFIRM(self)
    finally:
        self._failed, self._begun = failed, begun


def _start_at_the_end(self: WriterState, replaced: dict[str, str], *, supplied: bool = True) -> Any:
    """Newcomers get what is unconfirmed at the end of the change, not what is above its start."""
    effects = CHANGED(self, replaced, supplied=supplied)
    lac = self.last_add_confirmed
    return [SendAdd(e.bookies, max(e.first, lac + 1), e.last) if isinstance(e, SendAdd) else e for e in effects]


def _newcomers_hold_everything(self: WriterState, replaced: dict[str, str], *, supplied: bool = True) -> Any:
    effects = CHANGED(self, replaced, supplied=supplied)
    for bookie in replaced.values():
        self._acked_through[bookie] = self.last_add_pushed
    return effects


def _remember_successors(self: WriterState, replaced: dict[str, str], *, supplied: bool = True) -> Any:
    SUCCESSORS.update(replaced)
    return CHANGED(self, replaced, supplied=supplied)


def _replaced_bookies_count(self: WriterState, bookie: str, last: int) -> Any:
    """The late answer of a bookie that left is taken for its successor's: what A -> B -> A would do."""
    successor = SUCCESSORS.get(bookie, "")
    if bookie in self._departed and successor in self._receivers:
        self._acked_through[successor] = max(self._acked_through[successor], last)
        return self._confirm()
    return ADDED(self, bookie, last)


def _late_news_counts(self: WriterState, bookie: str, last: int) -> Any:
    dropped, failed, begun = self._dropped, self._failed, self._begun
    self._dropped, self._failed, self._begun = {}, {}, None
    try:
        return ADDED(self, bookie, last)
    finally:
        self._dropped, self._failed, self._begun = dropped, failed, begun


def _start_too_low(self: WriterState) -> BegunChange:
    begun = BEGIN(self)
    self._begun = BegunChange(begun.failed, max(0, begun.from_entry_id - 1))
    return self._begun


def _count_what_is_left(self: WriterState) -> Any:
    """Bookies that are only to be left count until their successors are in force."""
    begun, self._begun = self._begun, None
    try:
        return CONFIRM(self)
    finally:
        self._begun = begun


def _leave_without_return(self: WriterState) -> Any:
    """A bookie that has no successor is dropped, although it is well."""
    self._failed.update(self._leaving)
    self._leaving.clear()
    return IMPOSSIBLE(self)


def _stop_confirming(self: WriterState) -> Any:
    return None if self._departed else CONFIRM(self)


SUCCESSORS: dict[str, str] = {}
CONFIRM, CHANGED, ADDED = WriterState._confirm, WriterState.on_ensemble_changed, WriterState.on_added
BEGIN, IMPOSSIBLE = WriterState.begin_change, WriterState.on_change_impossible


def _with_lower_quorum(self: WriterState) -> Any:
    quorum, self._ack_quorum = self._ack_quorum, max(1, self._ack_quorum - 1)
    try:
        return CONFIRM(self)
    finally:
        self._ack_quorum = quorum


def _moved(self: WriterState, replaced: dict[str, str], *, supplied: bool = True) -> Any:
    effects = CHANGED(self, replaced, supplied=supplied)
    self._acked_through = dict(sorted(self._acked_through.items(), reverse=True))
    return effects


MUTANTS: dict[str, dict[str, Callable[..., Any]]] = {
    "failed bookies count during the change": {"_confirm": _count_failed_bookies},
    "newcomers get only what is above LAC in the end": {"on_ensemble_changed": _start_at_the_end},
    "newcomers count before they answer": {"on_ensemble_changed": _newcomers_hold_everything},
    "answers of replaced bookies count": {"on_ensemble_changed": _remember_successors, "on_added": _replaced_bookies_count},
    "late answers of failed bookies count": {"on_added": _late_news_counts},
    "the fragment starts below LAC + 1": {"begin_change": _start_too_low},
    "bookies that are left count during the change": {"_confirm": _count_what_is_left},
    "a bookie that is well is dropped": {"on_change_impossible": _leave_without_return},
    "nothing is confirmed after a change": {"_confirm": _stop_confirming},
    "one bookie less is enough": {"_confirm": _with_lower_quorum},
    "a place in the ensemble moves": {"on_ensemble_changed": _moved},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MUTANTS))
def test_the_model_finds(name: str) -> None:
    with mock.patch.multiple(WriterState, **MUTANTS[name]), pytest.raises(AssertionError):
        run_many(3_000)
