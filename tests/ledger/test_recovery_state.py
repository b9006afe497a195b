"""The recovery core against the worked decisions of ledger-protocol §17, and against a model under random answers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cepheid_ledger.recovery_state import FenceCoverage, RecoveryReads, write_set_positions
from cepheid_rpc import EntryGroup, encode_group

LEDGER = 7


def entries(first: int, last: int) -> EntryGroup:
    return encode_group(LEDGER, first, first - 1, 0, [b"%d" % entry_id for entry_id in range(first, last + 1)])


@pytest.mark.parametrize(
    ("write_quorum", "ack_quorum", "answers", "covered"),
    [
        (3, 2, "--?", True),
        (3, 2, "-??", False),
        (3, 2, "+??", False),
        (3, 2, "+--", True),
        (3, 3, "-??", True),
        (2, 2, "?+", True),
        (2, 1, "-?", False),
        (3, 1, "--?", False),
        (5, 3, "--???", False),
        (1, 1, "-", True),
        (1, 1, "?", False),
    ],
)
def test_fencing_coverage_without_striping(write_quorum: int, ack_quorum: int, answers: str, covered: bool) -> None:
    coverage = FenceCoverage(write_quorum, write_quorum, ack_quorum)
    for position, answer in enumerate(answers):
        assert not coverage.is_impossible or not covered
        (coverage.on_unknown if answer == "?" else coverage.on_fenced)(position)
    assert coverage.is_covered is covered
    assert coverage.is_impossible is not covered


@pytest.mark.parametrize(
    ("ensemble_size", "write_quorum", "ack_quorum", "fenced", "covered"),
    [
        (4, 3, 2, (0, 2), False),  # window BCD has one answer only
        (4, 3, 2, (0, 1, 2), True),
        (5, 2, 2, (0, 2, 4), True),
        (5, 2, 2, (0, 2), False),  # leaves DE
    ],
)
def test_fencing_coverage_with_striping(
    ensemble_size: int, write_quorum: int, ack_quorum: int, fenced: Sequence[int], covered: bool
) -> None:
    coverage = FenceCoverage(ensemble_size, write_quorum, ack_quorum)
    for position in range(ensemble_size):
        (coverage.on_fenced if position in fenced else coverage.on_unknown)(position)
    assert coverage.is_covered is covered
    assert coverage.is_impossible is not covered


@pytest.mark.parametrize(
    ("write_quorum", "ack_quorum", "answers", "decision"),
    [
        (3, 2, "--?", "absent"),
        (3, 2, "-??", "unknown"),  # it may be on both that did not answer: acknowledged
        (3, 2, "+??", "present"),
        (3, 2, "+--", "present"),
        (3, 2, "--+", "absent"),  # two noes came first: it was never acknowledged
        (3, 3, "-??", "absent"),
        (2, 2, "?+", "present"),
        (2, 1, "-?", "unknown"),
        (3, 1, "--?", "unknown"),
        (5, 3, "--???", "unknown"),
        (5, 3, "---??", "absent"),
    ],
)
def test_the_decision_about_one_entry(write_quorum: int, ack_quorum: int, answers: str, decision: str) -> None:
    reads = RecoveryReads(write_quorum, write_quorum, ack_quorum, first_entry_id=5)
    for position, answer in enumerate(answers):
        if answer == "+":
            reads.on_copies(entries(5, 5))
        elif answer == "-":
            reads.on_no(position, 5, 100)
        else:
            reads.on_unknown(position, 5, 100)
    if decision == "present":
        assert reads.take_present() == [entries(5, 5)]
        assert reads.next_entry_id == 6
    else:
        assert reads.take_present() == []
        assert reads.last_entry_id == (4 if decision == "absent" else None)
    if decision == "unknown":
        assert all(reads.is_heard(position) for position in range(write_quorum)), "nobody is left to ask"


def test_copies_above_the_first_absent_entry_are_ignored() -> None:
    reads = RecoveryReads(3, 3, 2, first_entry_id=0)
    reads.on_copies(entries(2, 3))  # a hole at 1 is legal: 2 and 3 were half written
    reads.on_copies(entries(0, 0))
    reads.on_no(1, 1, 1)
    reads.on_no(2, 1, 9)
    assert reads.take_present() == [entries(0, 0)]
    assert reads.last_entry_id == 0


def test_copies_are_decided_in_order_whoever_answers_first() -> None:
    reads = RecoveryReads(3, 3, 2, first_entry_id=0)
    reads.on_copies(entries(2, 3))
    assert reads.take_present() == []
    reads.on_copies(entries(0, 1))
    ids = [(group.first_entry_id, group.last_entry_id) for group in reads.take_present()]
    assert ids == [(0, 1), (2, 2), (3, 3)]


def test_noes_of_bookies_outside_the_write_set_do_not_count() -> None:
    """E 4, Qw 2: entry 5 belongs to positions 1 and 2; the others never had it, which says nothing."""
    assert write_set_positions(5, 4, 2) == (1, 2)
    reads = RecoveryReads(4, 2, 2, first_entry_id=5)
    reads.on_no(0, 5, 9)
    reads.on_no(3, 5, 9)
    assert reads.last_entry_id is None
    reads.on_no(1, 5, 9)
    assert reads.last_entry_id == 4


def test_write_sets_of_large_entry_ids_are_computed_in_full_width() -> None:
    assert write_set_positions((1 << 40) + 3, 4, 2) == (3, 0)


@given(st.data())
def test_any_answers_are_decided_as_the_model_decides(data: st.DataObject) -> None:
    """The model looks at each entry alone, at the moment of each answer: present once a copy came, absent once enough noes."""
    write_quorum = data.draw(st.integers(1, 4))
    ack_quorum = data.draw(st.integers(1, write_quorum))
    reads = RecoveryReads(write_quorum, write_quorum, ack_quorum, first_entry_id=0)
    noes: dict[int, set[int]] = {}
    present: list[int] = []
    copies: set[int] = set()
    end: int | None = None
    answers = st.tuples(st.sampled_from("+-?"), st.integers(0, write_quorum - 1), st.integers(0, 6), st.integers(0, 3))
    for kind, position, first, count in data.draw(st.lists(answers, max_size=25)):
        last = first + count
        if kind == "+":
            reads.on_copies(entries(first, last))
            copies |= set(range(first, last + 1))
        elif kind == "-":
            reads.on_no(position, first, last)
            for entry_id in range(first, last + 1):
                noes.setdefault(entry_id, set()).add(position)
        else:
            reads.on_unknown(position, first, last)
        while end is None:
            entry_id = len(present)
            if entry_id in copies:
                present.append(entry_id)
            elif len(noes.get(entry_id, ())) >= write_quorum - ack_quorum + 1:
                end = entry_id - 1
            else:
                break
    found = [e for group in reads.take_present() for e in range(group.first_entry_id, group.last_entry_id + 1)]
    assert found == present
    assert reads.last_entry_id == end
