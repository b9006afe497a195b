"""A streaming query's decisions against a planner of the test's making: what a batch takes, what is repeated, what ends it."""

from __future__ import annotations

import threading
import time
import timeit
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from pyspark.sql.types import BinaryType, StructField, StructType

from cepheid_decode import (
    BadOptionError,
    DataLossError,
    Fragment,
    HistoryPlan,
    LedgerHistory,
    MessagePosition,
    PlanUnavailableError,
    SchemaVersion,
    TopicHistory,
    TopicSelection,
)
from cepheid_scan.ledger_ends import LedgerEnd
from cepheid_spark.data_loss import SeenLedgers, find_loss
from cepheid_spark.offsets import EntryPosition, StreamOffset
from cepheid_spark.options import parse_options
from cepheid_spark.stream_query import StreamQuery
from cepheid_spark.stream_reader import CepheidStreamReader
from cepheid_spark.stream_state import Snapshot, StreamState, pause_after
from cepheid_spark.topic_view import TopicView

A, B = "persistent://public/default/a", "persistent://public/default/b"
ENTRY_BYTES = 1000


def ledger(ledger_id: int, entries: int, *, is_open: bool = False) -> LedgerHistory:
    fragments = (Fragment(0, ("bookie",)),)
    return LedgerHistory(ledger_id, entries - 1, is_open, entries * ENTRY_BYTES, None if is_open else 1, 1, 1, fragments, b"")


class Known:
    """A planner and a watch of ends: both say what the test says."""

    def __init__(self) -> None:
        self.chains: dict[str, list[LedgerHistory]] = {}
        self.incarnation = "i"
        self.schemas: dict[str, tuple[SchemaVersion, ...]] = {}
        self.moved: dict[tuple[str, int], int] = {}
        self.moved_bytes: dict[tuple[str, int], int] = {}  # where they are told, too
        self.failure: PlanUnavailableError | None = None
        self.plans = 0
        self.gone: dict[int, int] | None = {}  # last entries of ledgers that went, as records tell
        self.asked: list[range] = []  # what of them

    def topics(self, selection: TopicSelection) -> list[str]:
        return sorted(self.chains)

    def plan(self, topics: Sequence[str], *, schemas: bool = False) -> HistoryPlan:
        self.plans += 1
        if self.failure is not None:
            raise self.failure
        versions = {topic: self.schemas.get(topic, ()) for topic in topics} if schemas else {}
        return HistoryPlan(tuple(map(self._history, topics)), {"bookie": "h:1"}, schemas=versions)

    def _history(self, topic: str) -> TopicHistory:
        return TopicHistory(topic, -1, self.incarnation, tuple(self.chains[topic]))

    def gone_ledgers(self, topic: str, incarnation: str, ids: range) -> dict[int, int] | None:
        self.asked.append(ids)
        if self.gone is None:
            return None
        return {ledger_id: last for ledger_id, last in self.gone.items() if ledger_id in ids}

    def subscription_position(self, topic: str, subscription: str) -> MessagePosition:
        raise NotImplementedError

    def update(self, plan: HistoryPlan) -> None:
        pass

    def ends(self) -> dict[tuple[str, int], LedgerEnd]:
        return {key: LedgerEnd(last, self.moved_bytes.get(key, 0)) for key, last in self.moved.items()}

    def close(self) -> None:
        pass


class Bench:
    def __init__(self, **options: str) -> None:
        self.known = Known()
        self.options = options
        self.published_ms: dict[EntryPosition, int] = {}  # what reading an entry tells
        self.entries_read: list[EntryPosition] = []
        self.begin()

    @property
    def given(self) -> dict[str, str]:
        return {"adminUrl": "http://nobody:1", "topics": "a", "subscription": "none", "metadataRetry": "0ms", **self.options}

    def begin(self) -> None:
        """A new process."""
        parsed = parse_options(self.given, streaming=True)
        self.state = StreamState(self.known, self.known, parsed.topics, discovery_s=0.0, retry_s=0.0)  # type: ignore[arg-type]
        self.state._start = lambda: None  # type: ignore[method-assign]  # looks are the test's
        self.query = StreamQuery(parsed, self.state, None, self._starts, publish_time_ms=self._publish_time_ms)

    def _publish_time_ms(self, plan: HistoryPlan, view: TopicView, entry: EntryPosition) -> int | None:
        self.entries_read.append(entry)
        if entry not in self.published_ms:
            raise PlanUnavailableError("no bookie answers")
        return self.published_ms[entry]

    def _starts(self, snapshot: Snapshot) -> dict[str, MessagePosition]:
        """Latest."""
        starts: dict[str, MessagePosition] = {}
        for topic, view in snapshot.views.items():
            last = view.history.ledgers[-1]
            starts[topic] = MessagePosition(last.ledger_id, last.last_entry_id + 1)
        return starts

    def latest(self, start: StreamOffset, *, is_limited: bool = True) -> StreamOffset:
        return self.query.latest(start, is_limited=is_limited)

    def read(self, start: StreamOffset, end: StreamOffset) -> list[tuple[str, int, int, int]]:
        tasks = self.query.plan(start, end)
        return [(each.topic[-1], each.ledger_id, each.first_entry_id, each.last_entry_id) for task in tasks for each in task.pieces]

    def tasks(self, start: StreamOffset, end: StreamOffset) -> list[Any]:
        tasks = self.query.plan(start, end)
        return [[(piece.ledger_id, piece.first_entry_id, piece.last_entry_id) for piece in task.pieces] for task in tasks]


def at(**positions: Iterable[int]) -> StreamOffset:
    return StreamOffset({f"persistent://public/default/{name}": EntryPosition(*place) for name, place in positions.items()})


def test_nothing_new_is_the_start_itself_and_what_is_new_is_seen_without_a_look() -> None:
    bench = Bench()
    bench.known.chains[A] = [ledger(7, 5), ledger(9, 2, is_open=True)]
    initial = bench.query.initial()
    assert bench.query.initial() is initial, "asked for twice"
    assert initial.starts == {A: MessagePosition(9, 2)}
    assert bench.latest(initial) is initial
    plans = bench.known.plans
    bench.known.moved[A, 9] = 4
    end = bench.latest(initial)
    assert (end.ends, end.starts) == ({A: EntryPosition(9, 4)}, initial.starts)
    assert bench.known.plans == plans, "from memory"
    assert bench.read(initial, end) == [("a", 9, 2, 4)]
    assert bench.latest(end) is end


def test_an_older_look_never_moves_a_stream_back() -> None:
    bench = Bench()
    bench.known.chains[A] = [ledger(9, 2, is_open=True)]
    start = at(a=(9, 40))
    assert bench.latest(start) is start


def test_what_was_seen_of_an_open_ledger_stays_seen() -> None:
    bench = Bench()
    bench.known.chains[A] = [ledger(9, 2, is_open=True)]
    start = at(a=(9, 1))
    assert bench.latest(start) is start
    bench.known.moved[A, 9] = 4
    end = bench.latest(start)
    bench.known.moved.clear()
    bench.state.look()  # of a broker that knows less
    assert bench.latest(start) == end
    assert bench.read(start, end) == [("a", 9, 2, 4)]


def test_a_batch_is_repeated_with_the_same_tasks_after_the_topic_has_gone_on() -> None:
    bench = Bench(targetPartitionBytes="1mb")
    bench.known.chains[A] = [ledger(7, 3000), ledger(9, 500, is_open=True)]
    start = at(a=(7, 99))
    end = bench.latest(start)
    tasks = bench.tasks(start, end)
    assert len(tasks) > 2
    heavier = replace(ledger(9, 9000), size_bytes=9000 * 20 * ENTRY_BYTES)
    bench.known.chains[A] = [ledger(7, 3000), heavier, ledger(12, 9, is_open=True)]
    bench.begin()
    assert bench.tasks(start, end) == tasks


def test_the_look_back_of_the_options_is_planned() -> None:
    bench = Bench(chunkLookback="2500")
    bench.known.chains[A] = [ledger(7, 3000), ledger(9, 500, is_open=True)]
    start = at(a=(9, 99))
    (task,) = bench.query.plan(start, bench.latest(start))
    (tail,) = task.pieces[0].before
    assert (tail.ledger_id, tail.first_entry_id, tail.last_entry_id) == (7, 500, 2999)


def test_the_first_batch_is_repeated_from_where_it_began_though_latest_has_moved() -> None:
    bench = Bench()
    bench.known.chains[A] = [ledger(9, 2, is_open=True)]
    initial = bench.query.initial()
    bench.known.moved[A, 9] = 4
    end = bench.latest(initial)
    bench.known.chains[A] = [ledger(9, 8, is_open=True)]
    bench.begin()
    assert bench.read(bench.query.initial(), end) == [("a", 9, 2, 4)]
    assert bench.read(end, bench.latest(end)) == [("a", 9, 5, 7)]


def test_new_topics_begin_with_their_first_entry_and_the_end_says_so() -> None:
    bench = Bench()
    bench.known.chains[A] = [ledger(9, 2, is_open=True)]
    start = at(a=(9, 1))
    assert bench.latest(start) is start
    bench.known.chains[B] = [ledger(20, 0, is_open=True)]
    bench.state.look()
    assert bench.latest(start) is start, "it is empty: no batch of nothing"
    bench.known.moved[B, 20] = 2
    end = bench.latest(start)
    assert end.starts == {B: MessagePosition(20, 0)}
    assert bench.read(start, end) == [("b", 20, 0, 2)]
    bench.known.chains[B] = [ledger(21, 5, is_open=True)]  # its beginning is trimmed: a replay must notice
    bench.begin()
    with pytest.raises(DataLossError, match="after 20:-1"):
        bench.query.plan(start, end)


def test_available_now_ends_at_what_was_there_when_it_began() -> None:
    bench = Bench(maxEntriesPerTrigger="4", minBytesPerTrigger="1gb")
    bench.known.chains[A] = [ledger(9, 10, is_open=True)]
    bench.query.prepare_available_now()
    bench.known.moved[A, 9] = 50
    bench.known.chains[B] = [ledger(20, 5)]
    offset, ends = at(a=(9, -1)), []
    while (end := bench.latest(offset)) is not offset:
        ends.append(end.ends[A].entry_id)
        offset = end
    assert ends == [3, 7, 9]


def test_limits_hold_but_for_trigger_once_and_little_is_waited_for() -> None:
    bench = Bench(maxBytesPerTrigger="3000", minBytesPerTrigger="2000", maxTriggerDelay="1h")
    bench.known.chains[A] = [ledger(9, 1, is_open=True)]
    start = at(a=(9, -1))
    assert bench.latest(start) is start
    bench.known.moved[A, 9] = 9
    assert bench.latest(start).ends[A] == EntryPosition(9, 2)
    assert bench.latest(start, is_limited=False).ends[A] == EntryPosition(9, 9)


@pytest.mark.parametrize(("place", "last"), [("9:4", (9, 3)), ("9:0", (7, 4)), ("9:-1", (7, 4)), ("8:3", (7, 4))])
def test_an_end_of_the_options_is_reached_and_not_passed_and_a_later_one_goes_on_there(place: str, last: tuple[int, int]) -> None:
    bench = Bench(endingOffsets=f'{{"a": "{place}"}}')
    bench.known.chains[A] = [ledger(7, 5), ledger(9, 10, is_open=True)]
    start = at(a=(7, 1))
    end = bench.latest(start)
    assert end.ends[A] == EntryPosition(*last)
    read = bench.read(start, end)
    assert bench.latest(end) is end
    bench.options["endingOffsets"] = '{"a": "9:8"}'
    bench.begin()
    read += bench.read(end, bench.latest(end))
    entries = [(ledger_id, entry) for _, ledger_id, first, until in read for entry in range(first, until + 1)]
    assert entries == [(7, 2), (7, 3), (7, 4), *((9, entry) for entry in range(8))]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"endingTimestamp": "5"}, "endingTimestamp.* ends a batch read.* publish_time"),
        ({"publishedUntil": "5"}, "publishedUntil.* ends a batch read.* publish_time"),
        ({"endingOffsets": '{"a": "9:4:2"}'}, f"{A}: 9:4:2 is inside a batch.* give 9:4 to leave.* 9:5 to read"),
        ({"endingOffsets": '{"a": "9:4"}'}, None),
        ({"endingOffsets": "latest"}, None),
    ],
)
def test_ends_that_a_stream_cannot_have_are_refused(options: dict[str, str], said: str | None) -> None:
    """One by time would leave rows out for ever and never end; what follows one inside a batch would never be read."""
    parsed = parse_options({"adminUrl": "http://nobody:1", "topics": "a", **options}, streaming=True)
    schema = StructType([StructField("value", BinaryType())])
    if said is None:
        CepheidStreamReader(schema, parsed)
    else:
        with pytest.raises(BadOptionError, match=said):
            CepheidStreamReader(schema, parsed)


@pytest.mark.parametrize("fails", [True, False])
def test_what_was_trimmed_is_an_error_or_skipped_and_counted(fails: bool) -> None:
    bench = Bench(failOnDataLoss=str(fails))
    bench.known.chains[A] = [ledger(7, 5), ledger(8, 5), ledger(9, 5, is_open=True)]
    start = at(a=(7, 1))
    bench.state.look()
    bench.known.chains[A] = [ledger(9, 5, is_open=True)]
    bench.state.look()
    if fails:
        with pytest.raises(DataLossError, match="at least 8 entries after 7:1"):
            bench.latest(start)
        return
    bench.known.chains[A] = [ledger(10, 0, is_open=True)]
    bench.state.look()
    plans = bench.known.plans
    for _ in range(5):
        assert bench.latest(start) is start
    assert bench.known.plans == plans + 1, "one more look, not one each time"
    bench.known.moved[A, 10] = 4
    end = bench.latest(start)
    assert bench.read(start, end) == [("a", 10, 0, 4)]
    assert bench.query.lost_entries == 13
    assert bench.query.lag()["lost"] == 13


@pytest.mark.parametrize("fails", [True, False])
def test_a_deleted_topic_is_an_error_or_leaves_the_offset(fails: bool) -> None:
    bench = Bench(failOnDataLoss=str(fails), topics="a,b")
    bench.known.chains = {A: [ledger(7, 5)], B: [ledger(9, 5, is_open=True)]}
    start = at(a=(7, 4), b=(9, 4))
    assert bench.latest(start) is start
    del bench.known.chains[A]
    bench.state.look()
    assert bench.latest(start) is start, "one look may be wrong"
    bench.state.look()
    if fails:
        with pytest.raises(DataLossError, match="deleted"):
            bench.latest(start)
    else:
        end = bench.latest(start)
        assert list(end.ends) == [B]
        assert bench.read(start, end) == []
        assert bench.latest(end) is end


def test_a_look_that_keeps_failing_ends_the_query_and_one_that_fails_does_not() -> None:
    bench = Bench()
    bench.known.chains[A] = [ledger(9, 2, is_open=True)]
    start = at(a=(9, 1))
    assert bench.latest(start) is start
    bench.state._retry_s = 0.05
    bench.state._on_failure(PlanUnavailableError("nobody answers"), time.monotonic())
    assert bench.latest(start) is start
    bench.state._failing_since -= 0.05
    with pytest.raises(PlanUnavailableError, match="nobody answers"):
        bench.latest(start)


def test_without_a_broker_a_stream_says_that_nothing_holds_its_data() -> None:
    options = parse_options({"metadata": "zk://h:1", "topics": "a"}, streaming=True)
    with pytest.raises(BadOptionError, match="subscription=none"):
        StreamQuery(options, None, None, lambda _: {})  # type: ignore[arg-type]
    assert StreamQuery(replace(options, has_lease=False), None, None, lambda _: {})  # type: ignore[arg-type]


def test_the_lag_of_entries_that_are_older_than_the_process_does_not_start_from_zero() -> None:
    bench = Bench()
    bench.known.chains[A] = [ledger(1, 10, is_open=True)]
    hour_ago_ms = int(time.time() * 1000) - 3_600_000
    bench.published_ms = {EntryPosition(1, 5): hour_ago_ms, EntryPosition(1, 6): hour_ago_ms + 600_000}
    start = StreamOffset({A: EntryPosition(1, 3)})
    for _ in range(2):
        bench.begin()  # a new process
        bench.query.latest(start, is_limited=False)
        bench.query._last = StreamOffset({A: EntryPosition(1, 4)})
        assert bench.query.lag()["lagMs"] >= 3_600_000
    bench.query._last = StreamOffset({A: EntryPosition(1, 5)})
    for _ in range(3):
        bench.state.look()
        assert 3_000_000 <= bench.query.lag()["lagMs"] < 3_600_000
    assert bench.entries_read == [EntryPosition(1, 5), EntryPosition(1, 5), EntryPosition(1, 6)], "each once a process"
    bench.query._last = StreamOffset({A: EntryPosition(1, 6)})
    for _ in range(3):
        bench.state.look()
        assert bench.query.lag()["lagMs"] < 3_000_000, "not known: no bookie answers"
    assert len(bench.entries_read) == 4, "one that failed is not tried again at each look"
    bench.known.moved[A, 1] = 10
    bench.query._last = StreamOffset({A: EntryPosition(1, 9)})
    assert bench.query.lag()["lagEntries"] == 1
    assert len(bench.entries_read) == 4, "when it came was seen"


def test_an_idle_question_takes_no_time() -> None:
    bench = Bench()
    bench.known.chains = {f"{A}-partition-{number}": [ledger(number, 5, is_open=True)] for number in range(1000)}
    start = StreamOffset({topic: EntryPosition(chain[0].ledger_id, 4) for topic, chain in bench.known.chains.items()})
    fewer = StreamOffset({**start.ends, f"{A}-partition-7": EntryPosition(7, 3)})
    waiting = Bench(minBytesPerTrigger="1gb")
    waiting.known.chains = bench.known.chains
    for ask in (lambda: bench.latest(start), bench.query.lag, lambda: waiting.latest(fewer)):
        ask()
        rounds = [timeit.timeit(ask, number=10) for _ in range(20)]
        assert min(rounds) / 10 < 0.003  # 0.1 ms on an idle machine
    assert bench.latest(start) is start
    assert bench.query.lag()["lagEntries"] == 0
    assert waiting.latest(fewer) is fewer


def test_one_slow_look_does_not_close_the_eyes_for_long() -> None:
    """A broker was away for half a minute: it is back with a new ledger, which only a look can show."""
    assert pause_after(30.0, 0.01, is_moving=False) == 1.0
    assert pause_after(0.01, 30.0, is_moving=True) == 0.25
    assert pause_after(0.2, 0.3, is_moving=True) == pytest.approx(4.0), "what it costs the broker each time"
    assert pause_after(30.0, None, is_moving=False) == pause_after(30.0, 30.0, is_moving=False) == 30.0


@pytest.mark.slow
def test_a_look_that_breaks_ends_the_query_instead_of_showing_an_old_picture_for_ever() -> None:
    class Broken(Known):
        def plan(self, topics: Sequence[str], *, schemas: bool = False) -> HistoryPlan:
            raise KeyError("ledgers")

    broken = Broken()
    state = StreamState(broken, broken, TopicSelection(names=(A,)), discovery_s=0.0, retry_s=0.0)  # type: ignore[arg-type]
    broken.chains[A] = [ledger(9, 2, is_open=True)]
    state._snapshot = Snapshot(1, {}, HistoryPlan((), {}))
    failed = threading.Event()
    on_failure = state._on_failure

    def on_failure_and_stop(error: Any, began: float) -> None:
        on_failure(error, began)
        state._stopped.set()
        failed.set()

    state._on_failure = on_failure_and_stop  # type: ignore[method-assign]
    state._start()
    assert failed.wait(120)
    with pytest.raises(PlanUnavailableError, match="KeyError"):
        state.current()
    state.close()


def test_a_ledger_that_went_together_with_the_one_that_was_read_is_missed() -> None:
    bench = Bench()
    bench.known.chains[A] = [ledger(7, 5), ledger(8, 3), ledger(9, 1, is_open=True)]
    bench.state.look()
    bench.known.chains[A] = [ledger(9, 1, is_open=True)]
    bench.state.look()
    with pytest.raises(DataLossError, match="at least 3 entries after 7:4"):
        bench.latest(at(a=(7, 4)))


@pytest.mark.parametrize("nobody_knows", [False, True])
@pytest.mark.parametrize("incarnation", ["i", None])
def test_an_idle_partition_whose_broker_starts_anew_goes_on(incarnation: str | None, nobody_knows: bool) -> None:
    """Its empty ledger goes and another one comes, each time: nobody is asked about it but once."""
    bench = Bench()
    if nobody_knows:
        bench.known.gone = None
    start = at(a=(7, -1)) if incarnation is None else of(incarnation, a=(7, -1))
    for ledger_id in (7, 9, 12, 15):
        bench.known.chains[A] = [ledger(ledger_id, 0, is_open=True)]
        for _ in range(3):
            bench.state.look()
            assert bench.latest(start) is start
    assert bench.known.asked == [range(7, 9), range(9, 12), range(12, 15)]
    bench.known.moved[A, 15] = 4
    end = bench.latest(start)
    assert (end.ends, end.starts) == ({A: EntryPosition(15, 4)}, {A: MessagePosition(15, 0)})
    assert bench.read(start, end) == [("a", 15, 0, 4)]
    assert bench.query.lost_entries == 0
    bench.begin()
    assert bench.read(start, end) == [("a", 15, 0, 4)], "again, by another process, which has seen nothing go"
    assert len(bench.known.asked) == 3


def test_several_restarts_of_brokers_during_one_batch_are_no_loss() -> None:
    bench = Bench()
    for ledger_id in (7, 9, 12, 15):
        bench.known.chains[A] = [ledger(ledger_id, 0, is_open=True)]
        bench.state.look()
    start = of("i", a=(7, -1))
    assert bench.latest(start) is start
    assert bench.known.asked == [range(7, 15)]


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize(
    ("position", "before", "gone", "lost"),
    [
        ((7, -1), [ledger(7, 0, is_open=True)], {7: 2}, 3),  # written, ended and trimmed between two looks
        ((7, -1), [ledger(7, 0, is_open=True)], {8: 1}, 2),  # so was another one behind it
        ((7, 4), [ledger(7, 5, is_open=True)], {7: 6, 8: 0}, 3),
        ((7, 4), [ledger(7, 5), ledger(8, 0, is_open=True)], {7: 4, 8: 1}, 2),
        ((7, 4), [ledger(7, 5, is_open=True)], {}, 0),  # it had entries: its record is not kept any more
    ],
)
def test_what_went_unseen_with_entries_is_a_loss_with_their_number(
    position: tuple[int, int], before: list[LedgerHistory], gone: dict[int, int], lost: int, fails: bool
) -> None:
    bench = Bench(failOnDataLoss=str(fails))
    bench.known.chains[A], bench.known.gone = before, gone
    start = of("i", a=position)
    bench.state.look()
    assert bench.latest(start) is start
    bench.known.chains[A] = [ledger(9, 0, is_open=True)]
    if fails:
        bench.state.look()
        with pytest.raises(DataLossError, match=f"{lost or 'an unknown number of'} entries"):
            bench.latest(start)
        return
    for _ in range(3):
        bench.state.look()
        assert bench.latest(start) is start
    assert len(bench.known.asked) == 1, "once, not at each look"
    bench.known.moved[A, 9] = 1
    end = bench.latest(start)
    assert bench.read(start, end) == [("a", 9, 0, 1)]
    assert bench.query.lost_entries == lost


@pytest.mark.parametrize(
    ("position", "before"),
    [
        ((7, 4), [ledger(7, 5, is_open=True)]),  # ended and trimmed by the owner that came next
        ((7, 4), [ledger(7, 5), ledger(8, 0, is_open=True)]),
    ],
)
def test_what_was_read_to_its_end_as_its_record_says_is_not_missed(position: tuple[int, int], before: list[LedgerHistory]) -> None:
    bench = Bench()
    bench.known.chains[A], bench.known.gone = before, {7: 4}
    start = of("i", a=position)
    bench.state.look()
    bench.known.chains[A] = [ledger(9, 0, is_open=True)]
    bench.state.look()
    assert bench.latest(start) is start


@pytest.mark.parametrize(
    ("position", "gone", "head", "is_lost"),
    [
        ((7, -1), {}, 0, False),  # there is no entry in the topic: it is idle
        ((7, -1), {}, 2, True),  # there are some, and records of others may be over: nobody knows for how long nobody looked
        ((7, -1), {7: 0}, 0, True),
        ((7, 4), {7: 4}, 2, False),  # while there is the record of one, there are those of all that were trimmed behind it
        ((7, 4), {7: 4, 8: 3}, 2, True),
        ((7, 4), {}, 0, True),
    ],
)
def test_a_query_that_comes_back_asks_what_went_while_it_was_away(
    position: tuple[int, int], gone: dict[int, int], head: int, is_lost: bool
) -> None:
    bench = Bench()
    bench.known.chains[A], bench.known.gone = [ledger(9, head, is_open=True)], gone
    start = of("i", a=position)
    if is_lost:
        with pytest.raises(DataLossError, match="ledger 7 was trimmed"):
            bench.latest(start)
    else:
        end = bench.latest(start)
        assert end.ends == ({A: EntryPosition(9, head - 1)} if head else start.ends)
        bench.latest(end)
        assert bench.known.asked == [range(7, 9)]


def test_a_restart_that_takes_the_ledgers_of_many_idle_topics_costs_one_look() -> None:
    bench = Bench(topics="a,b")
    bench.known.chains = {A: [ledger(7, 0, is_open=True)], B: [ledger(8, 0, is_open=True)]}
    bench.state.look()
    bench.known.chains = {A: [ledger(9, 0, is_open=True)], B: [ledger(10, 0, is_open=True)]}
    bench.state.look()
    plans, start = bench.known.plans, of("i", a=(7, -1), b=(8, -1))
    assert bench.latest(start) is start
    assert bench.known.plans == plans + 1
    assert bench.known.asked == [range(7, 9), range(8, 10)]


def test_what_was_seen_behind_a_ledger_that_nobody_saw_is_missed_without_a_record() -> None:
    bench = Bench()
    for chain in ([ledger(9, 3, is_open=True)], [ledger(11, 0, is_open=True)]):
        bench.known.chains[A] = chain
        bench.state.look()
    with pytest.raises(DataLossError, match="at least 3 entries after 7:-1"):
        bench.latest(of("i", a=(7, -1)))


def test_an_empty_ledger_that_goes_from_behind_others_makes_nothing_doubtful() -> None:
    bench = Bench()
    start = of("i", a=(7, 4))
    for chain in ([ledger(7, 5), ledger(9, 2), ledger(11, 0, is_open=True)], [ledger(9, 2), ledger(13, 0, is_open=True)]):
        bench.known.chains[A] = chain
        bench.state.look()
    assert bench.latest(start).ends == {A: EntryPosition(9, 1)}
    assert bench.known.asked == []


def test_what_was_seen_to_go_is_asked_of_nobody() -> None:
    bench = Bench(failOnDataLoss="false")
    start = of("i", a=(7, 1))
    for chain in ([ledger(7, 5), ledger(9, 1, is_open=True)], [ledger(9, 1, is_open=True)]):
        bench.known.chains[A] = chain
        bench.state.look()
        bench.latest(start)
    assert bench.query.lost_entries == 3
    assert bench.known.asked == []


def test_what_was_not_read_of_a_topic_goes_with_it_though_a_lease_held_it() -> None:
    """It was deleted and made anew between two looks; before the next renewal the lease looks as if nothing was wrong."""
    seen = SeenLedgers()
    was = TopicHistory(A, -1, "i", (ledger(7, 5, is_open=True),))
    now = TopicHistory(A, -1, "j", (ledger(9, 5, is_open=True),))
    for is_known in (False, True):
        if is_known:
            seen.on_view(was, now)
        loss = find_loss(TopicView.of(now), EntryPosition(7, -1), seen, is_held=True)
        assert loss is not None
        assert (loss.doubt is None) is is_known, "there are no records of the one that was deleted"


def test_a_start_within_an_entry_holds_until_its_topic_moves() -> None:
    bench = Bench(topics="a,b", maxEntriesPerTrigger="1")
    bench.known.chains = {A: [ledger(7, 2, is_open=True)], B: [ledger(9, 2, is_open=True)]}
    bench.query._resolve_start = lambda _: {A: MessagePosition(7, 0, 3), B: MessagePosition(9, 1, 5)}
    offset, firsts, starts = bench.query.initial(), [], []
    while (end := bench.latest(offset)) is not offset:
        document = end.to_json()
        assert StreamOffset.from_json(document) == end
        for task in bench.query.plan(offset, end):
            firsts += [(piece.topic[-1], piece.first_entry_id, piece.first_batch_index) for piece in task.pieces]
        starts.append(end.starts)
        offset = end
    assert sorted(firsts) == [("a", 0, 3), ("a", 1, 0), ("b", 1, 5)]
    both, moved = {A: MessagePosition(7, 0, 3), B: MessagePosition(9, 1, 5)}, {B: MessagePosition(9, 1, 5)}
    assert starts == [both, moved, {}], "of the batch in which it moves, and no later one"


def test_a_topic_made_anew_with_lower_ids_is_read_on_where_that_is_accepted() -> None:
    """Of another broker's block of ids, or of a server that was set up again."""
    bench = Bench(failOnDataLoss="false")
    bench.known.chains[A] = [ledger(57, 5, is_open=True)]
    start = at(a=(57, 3))
    bench.state.look()
    bench.known.chains[A] = [ledger(3, 4, is_open=True)]
    bench.state.look()
    end = bench.latest(start)
    assert (end.ends, end.starts) == ({A: EntryPosition(3, 3)}, {A: MessagePosition(3, 0)})
    assert bench.read(start, end) == [("a", 3, 0, 3)]
    bench.begin()
    assert bench.read(start, end) == [("a", 3, 0, 3)], "again, by another process"
    assert bench.latest(end) is end
    assert bench.read(start, replace(at(a=(57, 4)), cut={A: 100})) == [], "a batch that was logged before has nothing left"


def test_a_batch_behind_a_loss_is_of_one_picture() -> None:
    """The second look, for the loss, may show yet another topic: a batch from there to the end of the first would be anything."""
    bench = Bench(failOnDataLoss="false")
    bench.known.chains[A] = [ledger(45, 1, is_open=True)]
    bench.state.look()
    bench.known.chains[A] = [ledger(9, 7, is_open=True)]
    start = at(a=(17, 1))
    end = bench.latest(start)
    assert (end.starts, end.ends) == ({A: MessagePosition(45, 0)}, {A: EntryPosition(45, 0)})
    assert bench.read(start, end) == []
    again = bench.latest(end)
    assert bench.read(end, again) == [("a", 9, 0, 6)]


@pytest.mark.parametrize("heals", [True, False])
def test_a_plan_that_knows_less_than_the_offsets_makes_no_short_batch(heals: bool) -> None:
    bench = Bench()
    full, short = [ledger(7, 5), ledger(9, 2), ledger(11, 0, is_open=True)], [ledger(7, 5), ledger(11, 0, is_open=True)]
    bench.known.chains[A] = short
    start, end = at(a=(7, 2)), at(a=(9, 1))
    end = replace(end, cut={A: 100})
    bench.state.look()
    if heals:
        bench.known.chains[A] = full
        assert bench.read(start, end) == [("a", 7, 3, 4), ("a", 9, 0, 1)]
    else:
        with pytest.raises(DataLossError, match="ends before 9:1"):
            bench.query.plan(start, end)


def test_a_run_of_available_now_is_not_over_before_it_knows_that_a_topic_was_deleted() -> None:
    bench = Bench(topics="a,b")
    bench.known.chains[B] = [ledger(9, 5, is_open=True)]
    bench.query.prepare_available_now()
    with pytest.raises(DataLossError, match="deleted"):
        bench.latest(at(a=(7, 4), b=(9, 4)))


def of(incarnation: str, **positions: Iterable[int]) -> StreamOffset:
    offset = at(**positions)
    return replace(offset, incarnations=dict.fromkeys(offset.ends, incarnation))


ANEW = pytest.mark.parametrize(
    ("position", "chain"),
    [
        ((7, -1), [ledger(5, 3), ledger(9, 2, is_open=True)]),  # lower and higher ids: of one topic it would mean that 7 was empty
        ((7, 2), [ledger(7, 9, is_open=True)]),  # the same id: of a cluster that was set up again
        ((7, -1), [ledger(7, 2, is_open=True)]),  # and nothing was read of it
        ((7, 2), [ledger(9, 1, is_open=True)]),
        ((7, 2), [ledger(3, 1, is_open=True)]),
    ],
)


@ANEW
@pytest.mark.parametrize("is_noticed_while_running", [True, False])
def test_a_topic_made_anew_is_loss_whatever_its_ledgers_ids_are(
    position: tuple[int, int], chain: list[LedgerHistory], is_noticed_while_running: bool
) -> None:
    bench = Bench()
    start = of("i", a=position)
    if is_noticed_while_running:
        bench.known.chains[A] = [ledger(7, position[1] + 1, is_open=True)]
        assert bench.latest(start) is start
    bench.known.chains[A], bench.known.incarnation = chain, "j"
    if is_noticed_while_running:
        bench.state.look()
    with pytest.raises(DataLossError, match=f"deleted and created again.* after 7:{position[1]}"):
        bench.latest(start)


@ANEW
def test_a_topic_made_anew_is_read_from_its_first_entry_where_that_is_accepted(
    position: tuple[int, int], chain: list[LedgerHistory]
) -> None:
    bench = Bench(failOnDataLoss="false")
    bench.known.chains[A], bench.known.incarnation = chain, "j"
    start = of("i", a=position)
    end = bench.latest(start)
    everything = [("a", each.ledger_id, 0, each.last_entry_id) for each in chain]
    assert (end.incarnations, end.starts) == ({A: "j"}, {A: MessagePosition(chain[0].ledger_id, 0)})
    assert bench.read(start, end) == everything
    assert bench.latest(end) is end
    bench.begin()
    assert bench.read(start, end) == everything, "again, by another process"
    assert bench.latest(end) is end


@pytest.mark.parametrize("fails", [True, False])
def test_a_batch_of_a_topic_that_was_made_anew_since_it_was_logged_reads_none_of_the_new_one(fails: bool) -> None:
    bench = Bench(failOnDataLoss=str(fails))
    bench.known.chains[A], bench.known.incarnation = [ledger(5, 3), ledger(8, 9, is_open=True)], "j"
    start, end = of("i", a=(7, -1)), replace(of("i", a=(8, 4)), cut={A: 100})
    if fails:
        with pytest.raises(DataLossError, match="deleted and created again"):
            bench.query.plan(start, end)
    else:
        assert bench.read(start, end) == []
        again = bench.latest(end)
        assert bench.read(end, again) == [("a", 5, 0, 2), ("a", 8, 0, 8)]


def test_offsets_of_format_1_are_read_on_and_the_next_batch_says_of_which_incarnation_all_are() -> None:
    bench = Bench(topics="a,b")
    bench.known.chains = {A: [ledger(7, 5, is_open=True)], B: [ledger(9, 2, is_open=True)]}
    old = StreamOffset.from_json({"v": 1, "t": {A: [7, 2], B: [9, 1]}})
    end = bench.latest(old)
    assert bench.read(old, end) == [("a", 7, 3, 4)]
    assert end.incarnations == {A: "i", B: "i"}, "also of the one that did not move"
    bench.known.chains[B], bench.known.incarnation = [ledger(9, 3, is_open=True)], "j"
    bench.begin()
    with pytest.raises(DataLossError, match="deleted and created again"):
        bench.latest(end)


def test_a_lease_is_not_moved_by_positions_of_a_topic_that_is_no_more() -> None:
    bench = Bench()
    moves: dict[str, MessagePosition] = {}

    class Keeper:
        def move(self, firsts: dict[str, MessagePosition]) -> None:
            moves.update(firsts)

    bench.query._keeper = Keeper()  # type: ignore[assignment]
    bench.known.chains[A], bench.known.incarnation = [ledger(9, 2000, is_open=True)], "j"
    bench.query.commit(of("i", a=(9, 1500)))
    assert moves == {}
    bench.query.commit(of("j", a=(9, 1500)))
    assert moves == {A: MessagePosition(9, 501)}


def test_a_topic_that_is_new_begins_where_it_did_when_the_lease_held_it() -> None:
    """What was trimmed between the look that found it and the lease was nobody's, and is no loss."""
    bench = Bench(topics="a,b")
    bench.known.chains[A] = [ledger(7, 5, is_open=True)]
    start = at(a=(7, 4))

    class Keeper:
        name = "s"
        held: ClassVar[set[str]] = {A}

        def covers(self, topic: str) -> bool:
            return topic in self.held

        def has_held(self, topic: str) -> bool:
            return topic in self.held

        def want(self, topic: str, first: MessagePosition) -> None:
            pass

        def forget(self, topics: Iterable[str]) -> None:
            pass

    bench.query._keeper = Keeper()  # type: ignore[assignment]
    bench.query._adopt = lambda *_: None  # type: ignore[method-assign]
    bench.query._keeper.check = lambda: None  # type: ignore[method-assign]
    bench.known.chains[B] = [ledger(20, 3), ledger(21, 2, is_open=True)]
    assert bench.latest(start) is start, "it is not held yet"
    bench.known.chains[B] = [ledger(21, 2, is_open=True)]
    Keeper.held = {A, B}
    bench.known.moved[A, 7] = 5  # there is something to do
    end = bench.latest(start)
    assert end.starts == {B: MessagePosition(21, 0)}
    assert bench.read(start, end) == [("a", 7, 5, 5), ("b", 21, 0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize(("tasks", "least"), [("50000", 30_000), ("40000", 30_000), ("1", 1)])  # tasks are of whole entries
def test_a_batch_has_no_more_tasks_than_are_planned_whatever_is_asked_for(tasks: str, least: int) -> None:
    """They are refused where they are planned: after the offset is written."""
    bench = Bench(minPartitions=tasks)
    bench.known.chains[A] = [ledger(7, 120_000, is_open=True)]
    start = at(a=(7, -1))
    end = bench.latest(start)
    assert least <= len(bench.query.plan(start, end)) <= 50_000
    assert sum(120_000 / cut for cut in end.cut.values()) <= 50_000


@pytest.mark.slow
def test_a_checkpoint_whose_batch_has_too_many_tasks_is_read_on() -> None:
    bench = Bench(targetPartitionBytes="1gb")
    bench.known.chains[A] = [ledger(7, 120_000, is_open=True)]
    start, end = at(a=(7, -1)), replace(at(a=(7, 119_999)), cut={A: 2})
    tasks = bench.tasks(start, end)
    assert 30_000 <= len(tasks) <= 50_000
    assert sum(last - first + 1 for task in tasks for _, first, last in task) == 120_000
    bench.options["targetPartitionBytes"] = "1mb"
    bench.begin()
    assert bench.tasks(start, end) == tasks


def of_size(ledger_id: int, entries: int, entry_bytes: int, *, is_open: bool = False) -> LedgerHistory:
    return replace(ledger(ledger_id, entries, is_open=is_open), size_bytes=entries * entry_bytes)


@pytest.mark.parametrize("largest_first", [True, False])
def test_a_batch_keeps_to_its_bytes_by_the_average_of_each_ledger(largest_first: bool) -> None:
    """Not by that of the backlog, in which few large entries would pass for many of middling size."""
    sizes = [(10, 5_000_000), (1000, 100)]
    (few, much), (many, little) = sizes if largest_first else sizes[::-1]
    bench = Bench(maxBytesPerTrigger="6000000")
    bench.known.chains[A] = [of_size(7, few, much), of_size(9, many, little, is_open=True)]
    offset, taken = at(a=(7, -1)), []
    while (end := bench.latest(offset)) is not offset:
        pieces = bench.read(offset, end)
        taken.append(sum((last - first + 1) * (much if ledger_id == 7 else little) for _, ledger_id, first, last in pieces))
        offset = end
    assert sum(taken) == 50_100_000
    assert max(taken) <= 6_000_000
    assert len(taken) <= 12


def test_within_a_ledger_entries_count_as_its_average() -> None:
    """How large each is, nobody tells: the ends of ledgers and their sizes are all that is known (docs/spark.md)."""
    bench = Bench(maxBytesPerTrigger="1000000")
    bench.known.chains[A] = [of_size(7, 1010, (1000 * 100 + 10 * 5_000_000) // 1010, is_open=True)]
    start = at(a=(7, -1))
    assert bench.latest(start).ends[A] == EntryPosition(7, 19), "in truth 2000 bytes"
    late = at(a=(7, 999))
    assert bench.latest(late).ends[A] == EntryPosition(7, 1009), "in truth 50 MB"


def test_large_entries_of_many_topics_share_the_bytes_and_each_topic_gets_its_turn() -> None:
    names = [f"t{number:02}" for number in range(50)]
    bench = Bench(maxBytesPerTrigger="6mb", topics=",".join(names))
    bench.known.chains = {
        f"persistent://public/default/{name}": [
            replace(of_size(number, 2, 5_000_000), closed_at_ms=number),
            of_size(100 + number, 20, 100, is_open=True),
        ]
        for number, name in enumerate(names)
    }
    offset, batches = at(**{name: (number, -1) for number, name in enumerate(names)}), 0
    while (end := bench.latest(offset)) is not offset:
        tasks = bench.query.plan(offset, end)
        pieces = [each for task in tasks for each in task.pieces]
        entries = [(piece.ledger_id, piece.last_entry_id - piece.first_entry_id + 1) for piece in pieces]
        assert sum(count * (5_000_000 if ledger_id < 100 else 100) for ledger_id, count in entries) <= 6 << 20
        offset, batches = end, batches + 1
    assert all(bench.state.current().views[topic].total_entries == 22 for topic in offset.ends)
    assert {place.entry_id for place in offset.ends.values()} == {19}
    assert batches <= 110


def test_entries_that_come_between_two_looks_count_with_what_bookies_say_of_their_size() -> None:
    bench = Bench(maxBytesPerTrigger="6mb")
    bench.known.chains[A] = [of_size(7, 1, 100, is_open=True)]
    start = bench.latest(at(a=(7, -1)))
    bench.known.moved[A, 7], bench.known.moved_bytes[A, 7] = 2000, 100 + 2000 * (1 << 20)
    assert bench.latest(start).ends[A] == EntryPosition(7, 6), "the ledger's average is 1 MiB, less a little"


@pytest.mark.parametrize("limit", [{"maxEntriesPerTrigger": "10"}, {"maxBytesPerTrigger": "10000"}])
def test_topics_take_turns_where_a_batch_is_too_small_for_all(limit: dict[str, str]) -> None:
    """By age they would be drained one after the other: all entries of a closed ledger pass for equally old."""
    names = [f"t{number:02}" for number in range(20)]
    bench = Bench(topics=",".join(names), **limit)
    chains = {
        name: [replace(ledger(number, 50), closed_at_ms=number), ledger(100 + number, 1)] for number, name in enumerate(names)
    }
    bench.known.chains = {f"persistent://public/default/{name}": chain for name, chain in chains.items()}
    offset = at(**{name: (number, -1) for number, name in enumerate(names)})
    for _ in range(2):
        offset = bench.latest(offset)
    assert {place.entry_id for place in offset.ends.values()} == {0}, "one of each"
    for _ in range(100):
        offset = bench.latest(offset)
    assert bench.latest(offset) is offset, "all of them are at their ends at the same time"


def test_each_topic_takes_one_entry_at_least_and_entries_are_limited_besides() -> None:
    bench = Bench(maxBytesPerTrigger="100000", maxEntriesPerTrigger="8", topics="a,b")
    bench.known.chains = {A: [of_size(7, 2, 90_000), of_size(8, 900, 1)], B: [of_size(9, 500, 10, is_open=True)]}
    start = at(a=(7, -1), b=(9, -1))
    end = bench.latest(start)
    taken = bench.read(start, end)
    assert {topic for topic, *_ in taken} == {"a", "b"}
    assert sum(last - first + 1 for *_, first, last in taken) <= 8
