"""The publish time that a stream began with: of its checkpoint, never of the options that a restart happens to give."""

from __future__ import annotations

from typing import Any

import pytest

from cepheid_scan import MessagePosition
from cepheid_spark.offsets import StreamOffset
from tests.spark.test_stream_query import A, Bench, at, ledger

FIRST, LATER = "1000", "5000000"  # as of a job that says "an hour ago" each time it starts


def since(bench: Bench, end: StreamOffset) -> int | None:
    """What the tasks of the batch that ends there leave out."""
    return bench.query.spec(end, ("value",), ()).row_filter.publish_from_ms


def test_a_restart_with_another_time_reads_the_backlog_and_repeats_batches_as_they_were() -> None:
    bench = Bench(startingTimestamp=FIRST)
    bench.known.chains[A] = [ledger(9, 2, is_open=True)]
    initial = bench.query.initial()
    bench.known.moved[A, 9] = 4
    end = bench.latest(initial)
    assert since(bench, end) == 1000
    bench.options["startingTimestamp"] = LATER
    bench.begin()
    bench.known.moved[A, 9] = 8
    anew = bench.query.initial()
    assert bench.read(anew, end) == [("a", 9, 2, 4)]
    assert since(bench, end) == 1000, "the batch is repeated, though Spark asks for the initial offset anew"
    later = bench.latest(end)
    assert bench.read(end, later) == [("a", 9, 5, 8)]
    assert since(bench, later) == 1000, "what came while the query was down"


def test_a_time_that_is_left_out_or_comes_later_changes_nothing() -> None:
    bench = Bench(startingTimestamp=FIRST)
    bench.known.chains[A] = [ledger(9, 2, is_open=True)]
    first = bench.query.initial()
    del bench.options["startingTimestamp"]
    bench.begin()
    bench.known.moved[A, 9] = 4
    assert since(bench, bench.latest(first)) == 1000
    bench.options["startingTimestamp"] = LATER
    bench.begin()
    assert since(bench, bench.latest(at(a=(9, 0)))) is None


@pytest.mark.parametrize("number", [1, 2])
def test_offsets_of_formats_without_a_time_leave_nothing_out(number: int) -> None:
    bench = Bench(startingTimestamp=LATER)
    bench.known.chains[A] = [ledger(9, 5, is_open=True)]
    old: Any = {"v": number, "t": {A: [9, 1]}, "from": {A: [9, 1]}}
    end = bench.latest(StreamOffset.from_json(old))
    assert (end.since_ms, since(bench, end)) == (None, None)


def test_the_time_goes_from_offset_to_offset() -> None:
    initial = StreamOffset.initial({A: MessagePosition(7, 5)}, None, {}, 0)
    assert initial.to_json()["since"] == 0, "1970 is a time"
    assert initial.moved_to({}, cut={}, found={}, incarnations={}).since_ms == 0
