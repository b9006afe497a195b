"""Streams that start further on in a ledger than it ever goes, and ledgers that end before what was read."""

from __future__ import annotations

import json

import pytest

from cepheid_decode import DataLossError, LedgerHistory, MessagePosition
from cepheid_spark.offsets import EntryPosition, StreamOffset
from tests.spark.test_stream_query import A, B, Bench, ledger, of


def begun(**options: str) -> tuple[Bench, StreamOffset]:
    """At 9:50, where the ledger has ten entries."""
    bench = Bench(topics="a,b", **options)
    bench.known.chains = {A: [ledger(9, 10, is_open=True)], B: [ledger(3, 1, is_open=True)]}
    bench.query._resolve_start = lambda _: {A: MessagePosition(9, 50), B: MessagePosition(3, 1)}
    initial = bench.query.initial()
    assert bench.latest(initial) is initial
    return bench, initial


def written_again(offset: StreamOffset) -> StreamOffset:
    return StreamOffset.from_json(json.loads(json.dumps(offset.to_json())))


@pytest.mark.parametrize("fails", ["true", "false"])
@pytest.mark.parametrize("is_trimmed", [True, False])
@pytest.mark.parametrize("moves_before", [True, False])
def test_a_start_that_its_ledger_never_reaches_is_followed_by_the_next_ledger(
    fails: str, is_trimmed: bool, moves_before: bool
) -> None:
    """The broker starts anew: nothing was read, nothing is lost, and nothing before the start is read."""
    bench, start = begun(failOnDataLoss=fails)
    if moves_before:  # the other topic does, and the first offset is an old one
        bench.known.moved[B, 3] = 1
        start = bench.latest(bench.latest(start))
        bench.known.moved[B, 3] = 2
        start = written_again(bench.latest(start))
        assert start.starts == {A: MessagePosition(9, 50)}
    bench.known.chains[A] = [ledger(9, 12), ledger(11, 0, is_open=True)]
    bench.state.look()
    assert bench.latest(start) is start
    if is_trimmed:
        bench.known.gone = {9: 11}
        bench.known.chains[A] = [ledger(11, 0, is_open=True)]
        bench.state.look()
        assert bench.latest(start) is start
    bench.known.moved[A, 11] = 2
    end = written_again(bench.latest(start))
    assert bench.read(start, end) == [("a", 11, 0, 2)]
    bench.begin()
    assert bench.read(start, end) == [("a", 11, 0, 2)], "again, by another process"
    assert bench.latest(end) is end
    assert bench.query.lost_entries == 0


def test_a_start_that_its_ledger_reaches_later_begins_there() -> None:
    bench, start = begun()
    bench.known.moved[A, 9] = 60
    end = bench.latest(start)
    assert bench.read(start, end) == [("a", 9, 50, 60)]
    bench.known.moved[A, 9] = 61
    assert bench.latest(end).starts == {}


def test_an_empty_ledger_that_such_a_start_names_is_not_missed() -> None:
    bench = Bench()
    bench.known.chains[A] = [ledger(5, 2), ledger(9, 0, is_open=True)]
    bench.query._resolve_start = lambda _: {A: MessagePosition(9, 50)}
    start = bench.query.initial()
    bench.known.chains[A] = [ledger(5, 2), ledger(11, 1, is_open=True)]
    bench.state.look()
    assert bench.read(start, bench.latest(start)) == [("a", 11, 0, 0)]


@pytest.mark.parametrize("gone", [{9: 11}, {9: 11, 11: 3}])
def test_what_is_trimmed_behind_such_a_start_is_missed(gone: dict[int, int]) -> None:
    """Also by a process that has not seen any of it."""
    bench, start = begun()
    bench.known.chains[A], bench.known.gone = [ledger(13, 0, is_open=True)], gone
    bench.begin()
    if gone == {9: 11}:
        assert bench.latest(start) is start
    else:
        with pytest.raises(DataLossError, match="at least 4 entries after 9:49"):
            bench.latest(start)


def test_a_record_of_an_end_before_what_was_read_is_one_of_another_history() -> None:
    bench = Bench()
    bench.known.chains[A], bench.known.gone = [ledger(13, 2, is_open=True)], {9: 11}
    with pytest.raises(DataLossError, match="unknown number of entries after 9:49"):
        bench.latest(of("i", a=(9, 49)))


@pytest.mark.parametrize("behind", [[], [ledger(11, 3, is_open=True)]])
def test_where_a_ledger_ends_before_what_was_read_nothing_is_read_twice(behind: list[LedgerHistory]) -> None:
    """Of a cluster that was restored from an older state."""
    bench, start = Bench(), of("i", a=(9, 49))
    bench.known.chains[A] = [ledger(9, 12), *behind]
    with pytest.raises(DataLossError, match="another history"):
        bench.latest(start)
    bench.options["failOnDataLoss"] = "false"
    bench.begin()
    end = bench.latest(start)
    if behind:
        assert bench.read(start, end) == [("a", 11, 0, 2)]
        assert end.ends == {A: EntryPosition(11, 2)}
        assert bench.latest(end) is end
    else:
        assert end is start
