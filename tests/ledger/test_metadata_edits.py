"""Edits of a ledger's metadata and the automaton they keep to (L1)."""

from __future__ import annotations

from typing import Any

import pytest

from cepheid_ledger import assert_legal_change
from cepheid_ledger.metadata_edits import closed, in_recovery
from cepheid_metadata import Fragment, LedgerMetadata, LedgerState


def fragment(first: int, ensemble: str) -> Fragment:
    return Fragment(first_entry_id=first, ensemble=tuple(ensemble))


def ledger(**changes: Any) -> LedgerMetadata:
    return LedgerMetadata(
        ledger_id=7,
        ensemble_size=3,
        write_quorum=3,
        ack_quorum=2,
        state=LedgerState.OPEN,
        fragments=(fragment(0, "abc"), fragment(8, "adc")),
        last_entry_id=None,
        length_bytes=None,
        creation_token=1,
        created_at_ms=0,
    ).replace(**changes)


CLOSED = ledger(state=LedgerState.CLOSED, last_entry_id=9, length_bytes=90)
IN_RECOVERY = ledger(state=LedgerState.IN_RECOVERY)


def test_closing_keeps_everything_but_state_and_end() -> None:
    assert closed(ledger(), 9, 90) == CLOSED
    assert closed(IN_RECOVERY, 9, 90) == CLOSED


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        (8, [(0, "abc"), (8, "adf")]),  # the same start replaces: nothing in it was confirmed
        (9, [(0, "abc"), (8, "adc"), (9, "adf")]),
    ],
)
def test_fragments_that_a_recovery_kept_in_memory_are_added_at_the_end(first: int, expected: list[tuple[int, str]]) -> None:
    after = closed(IN_RECOVERY, 9, 90, [fragment(first, "adf")])
    assert [(f.first_entry_id, "".join(f.ensemble)) for f in after.fragments] == expected


@pytest.mark.parametrize("before", [CLOSED, IN_RECOVERY])
def test_recovery_begins_once(before: LedgerMetadata) -> None:
    with pytest.raises(AssertionError):
        in_recovery(before)


def test_nothing_closes_twice() -> None:
    with pytest.raises(AssertionError):
        closed(CLOSED, 9, 90)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (CLOSED, ledger()),
        (CLOSED, IN_RECOVERY),
        (IN_RECOVERY, ledger()),
        (CLOSED, CLOSED.replace(last_entry_id=10)),
        (CLOSED, CLOSED.replace(length_bytes=91)),
        (ledger(), ledger(ack_quorum=3)),
        (ledger(), ledger(ledger_id=8)),
        (ledger(), ledger(fragments=(fragment(0, "abc"),))),
        (ledger(), ledger(fragments=(fragment(0, "abc"), fragment(7, "adc")))),
    ],
)
def test_changes_that_break_the_automaton_are_seen(before: LedgerMetadata, after: LedgerMetadata) -> None:
    with pytest.raises(AssertionError):
        assert_legal_change(before, after)


@pytest.mark.parametrize("after", [ledger(), IN_RECOVERY, CLOSED, ledger(fragments=(fragment(0, "abe"), fragment(8, "adc")))])
def test_legal_changes_pass(after: LedgerMetadata) -> None:
    assert_legal_change(ledger(), after)
