"""Arithmetic of positions, by the worked examples and against a model that lists every entry."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cepheid_managed_ledger.ledger_list import LedgerList
from cepheid_metadata import ChainLedger, Position


def ledger_list(*entries: tuple[int, int], open_last: bool = True) -> LedgerList:
    """(ledger id, entries) …; the last one is being written."""
    ended = [ChainLedger(ledger_id=ledger_id, entries=count, size_bytes=10 * count) for ledger_id, count in entries[:-1]]
    last_id, last_count = entries[-1]
    last = ChainLedger(ledger_id=last_id, entries=None if open_last else last_count)
    ledgers = LedgerList([*ended, last])
    if open_last and last_count:
        ledgers.confirm(last_count - 1, 10 * last_count)
    return ledgers


def at(text: str) -> Position:
    ledger_id, entry_id = text.split(":")
    return Position(int(ledger_id), int(entry_id))


CHAIN = ledger_list((5, 3), (6, 0), (8, 2), (9, 1))


@pytest.mark.parametrize(
    ("position", "following"), [("5:2", "8:0"), ("8:1", "9:0"), ("9:0", "9:1"), ("5:-1", "5:0"), ("4:7", "5:0"), ("9:5", "9:1")]
)
def test_next_position(position: str, following: str) -> None:
    assert CHAIN.next_position(at(position)) == at(following)


@pytest.mark.parametrize(
    ("position", "before"), [("8:0", "5:2"), ("5:0", "5:-1"), ("9:0", "8:1"), ("9:1", "9:0"), ("6:3", "5:2"), ("-1:-1", "5:-1")]
)
def test_previous_position(position: str, before: str) -> None:
    assert CHAIN.previous_position(at(position)) == at(before)


@pytest.mark.parametrize("position", ["6:-1", "6:5", "8:-1", "5:2", "7:0"])
def test_several_positions_name_one_gap(position: str) -> None:
    assert CHAIN.normalise(at(position)) == at("5:2")


@pytest.mark.parametrize(
    ("after", "last", "count"),
    [("5:0", "8:1", 4), ("5:-1", "9:0", 6), ("8:1", "5:0", 0), ("5:2", "8:-1", 0), ("-1:-1", "99:99", 6), ("9:0", "9:7", 0)],
)
def test_count_between(after: str, last: str, count: int) -> None:
    assert CHAIN.count_between(at(after), at(last)) == count


def test_what_is_left_when_everything_before_an_empty_ledger_was_trimmed() -> None:
    ledgers = ledger_list((9, 0))
    assert ledgers.first_position == ledgers.last_position == at("9:-1")
    assert ledgers.normalise(at("8:1")) == at("9:-1")
    assert ledgers.next_position(at("8:1")) == at("9:0")


def test_an_update_keeps_what_is_confirmed_of_the_open_ledger() -> None:
    ledgers = ledger_list((5, 3), (9, 4))
    ledgers.update([ChainLedger(ledger_id=9)])
    assert (ledgers.total_entries, ledgers.total_bytes, ledgers.first_position) == (4, 40, at("9:-1"))
    ledgers.update([ChainLedger(ledger_id=9, entries=4, size_bytes=40), ChainLedger(ledger_id=12)])
    ledgers.confirm(0, 7)
    assert (ledgers.total_entries, ledgers.total_bytes, ledgers.last_position) == (5, 47, at("12:0"))


def test_ids_that_do_not_rise_are_refused() -> None:
    with pytest.raises(AssertionError, match="rise"):
        ledger_list((5, 3), (4, 0))


class Model:
    """Every entry, one by one."""

    def __init__(self, chain: list[tuple[int, int]]) -> None:
        self.chain = chain
        self.entries = [Position(ledger_id, entry) for ledger_id, count in chain for entry in range(count)]

    def before(self, position: Position) -> list[Position]:
        return [entry for entry in self.entries if entry <= position]

    def normalise(self, position: Position) -> Position:
        before = self.before(position)
        return before[-1] if before else Position(self.chain[0][0], -1)

    def next_position(self, position: Position) -> Position:
        after = self.entries[len(self.before(position)) :]
        return after[0] if after else Position(*self.chain[-1])


@st.composite
def chains(draw: st.DrawFn) -> list[tuple[int, int]]:
    ids = sorted(draw(st.sets(st.integers(0, 12), min_size=1, max_size=5)))
    return [(ledger_id, draw(st.integers(0, 4))) for ledger_id in ids]


positions = st.builds(Position, st.integers(-1, 14), st.integers(-1, 6))


@given(chains(), positions, positions, st.booleans())
def test_agrees_with_a_list_of_all_entries(chain: list[tuple[int, int]], a: Position, b: Position, open_last: bool) -> None:
    ledgers, model = ledger_list(*chain, open_last=open_last), Model(chain)
    assert ledgers.rank(a) == len(model.before(a))
    assert ledgers.normalise(a) == model.normalise(a)
    assert ledgers.next_position(a) == model.next_position(a)
    assert ledgers.previous_position(a) == model.normalise(Position(a.ledger_id, a.entry_id - 1))
    assert ledgers.is_valid(a) == (a in model.entries)
    assert ledgers.count_between(a, b) == len([entry for entry in model.entries if a < entry <= b])
    assert ledgers.last_position == (model.entries[-1] if model.entries else ledgers.first_position)
    ids = [ledger_id for ledger_id, _ in chain]
    assert ledgers.is_ended(a.ledger_id) == (a.ledger_id in ids and not (open_last and a.ledger_id == ids[-1]))
