"""Every entry of a range in exactly one piece, in order, whatever the ledgers; tasks small enough to be sent with every attempt."""

from __future__ import annotations

import pickle
from itertools import pairwise
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cepheid_decode import BadOptionError, Fragment, HistoryPlan, LedgerHistory, MessagePosition, ScanTask, TopicHistory
from cepheid_scan.entry_source import EntrySource
from cepheid_scan.scan_task import LookBack
from cepheid_scan.splits import (
    BEFORE_ENTRIES,
    MAX_STREAM_PIECES,
    MAX_TASK_BYTES,
    TopicRange,
    cut_ranges,
    fragments_of,
)

BOOKIES = {f"bookie-{number}.storage.example": f"10.0.0.{number}:3181" for number in range(12)}
NAMES = list(BOOKIES)
TICKET = b"ct0." + b"t" * 150


def ledger(
    ledger_id: int, entries: int, size_bytes: int = 0, starts: tuple[int, ...] = (0,), *, is_open: bool = False
) -> LedgerHistory:
    fragments = tuple(
        Fragment(start, tuple(NAMES[(ledger_id + number + place) % len(NAMES)] for place in range(3)))
        for number, start in enumerate(starts)
    )
    return LedgerHistory(ledger_id, entries - 1, is_open, size_bytes or 100 * entries, 0, 3, 3, fragments, b"k" * 16)


def plan_of(*histories: TopicHistory) -> HistoryPlan:
    return HistoryPlan(histories, BOOKIES, tickets={"persistent://public/default/t": TICKET})


def topic_of(*ledgers: LedgerHistory, name: str = "persistent://public/default/t") -> TopicHistory:
    return TopicHistory(name, -1, "x", ledgers)


def whole(history: TopicHistory) -> TopicRange:
    return TopicRange(history, MessagePosition(0, 0), MessagePosition(1 << 60, 0))


def entries_of(tasks: list[ScanTask]) -> list[tuple[str, int, int]]:
    return [
        (piece.topic, piece.ledger_id, entry_id)
        for task in tasks
        for piece in task.pieces
        for entry_id in range(piece.first_entry_id, piece.last_entry_id + 1)
    ]


@st.composite
def histories(draw: st.DrawFn) -> list[TopicHistory]:
    made: list[TopicHistory] = []
    ledger_id = 0
    for number in range(draw(st.integers(1, 3))):
        ledgers: list[LedgerHistory] = []
        for _ in range(draw(st.integers(0, 9))):
            ledger_id += draw(st.integers(1, 3))
            entries = draw(st.integers(0, 60))
            starts = (0, *sorted(draw(st.sets(st.integers(1, max(1, entries)), max_size=3))))
            ledgers.append(ledger(ledger_id, entries, draw(st.integers(0, 10_000)), starts))
        made.append(TopicHistory(f"persistent://a/b/t-partition-{number}", number, "x", tuple(ledgers)))
    return made


@st.composite
def ranges(draw: st.DrawFn) -> list[TopicRange]:
    wanted: list[TopicRange] = []
    for history in draw(histories()):
        place = st.builds(MessagePosition, st.integers(0, 40), st.integers(0, 62), st.sampled_from([-1, -1, 0, 1, 5]))
        first, end = draw(place), draw(place)
        wanted.append(TopicRange(history, min(first, end), max(first, end)))
    return wanted


def expected_of(wanted: list[TopicRange]) -> list[tuple[str, int, int]]:
    """Entries of which at least one message may be in the range."""
    return [
        (each.history.topic, part.ledger_id, entry_id)
        for each in wanted
        for part in each.history.ledgers
        for entry_id in range(part.last_entry_id + 1)
        if (part.ledger_id, entry_id) >= (each.first.ledger_id, each.first.entry_id)
        and (
            (part.ledger_id, entry_id) < (each.end.ledger_id, each.end.entry_id)
            or ((part.ledger_id, entry_id) == (each.end.ledger_id, each.end.entry_id) and each.end.batch_index > 0)
        )
    ]


@pytest.mark.slow
@given(ranges(), st.integers(1, 20_000), st.integers(1, 9))
def test_every_entry_is_in_one_piece_in_order(wanted: list[TopicRange], target_bytes: int, min_tasks: int) -> None:
    plan = plan_of(*(each.history for each in wanted))
    tasks = cut_ranges(wanted, plan, target_bytes=target_bytes, min_tasks=min_tasks)
    assert entries_of(tasks) == expected_of(wanted)
    assert all(task.pieces for task in tasks)


@pytest.mark.slow
@given(ranges(), st.sampled_from([1, 7, 40, 400, 4000]))
def test_a_cut_by_entries_repeats_wherever_the_entries_lie_by_then(wanted: list[TopicRange], cut: int) -> None:
    plan = plan_of(*(each.history for each in wanted))
    by_topic = {each.history.topic: cut for each in wanted}
    tasks = cut_ranges(wanted, plan, target_bytes=1, entries_per_task=by_topic)
    assert entries_of(tasks) == expected_of(wanted)
    moved = [
        TopicRange(
            TopicHistory(
                each.history.topic,
                each.history.partition,
                "x",
                tuple(ledger(part.ledger_id, part.last_entry_id + 1, part.size_bytes // 2) for part in each.history.ledgers),
            ),
            each.first,
            each.end,
        )
        for each in wanted
    ]
    again = cut_ranges(moved, HistoryPlan((), {}), target_bytes=999, entries_per_task=by_topic)
    assert [entries_of([task]) for task in again] == [entries_of([task]) for task in tasks]


@pytest.mark.slow
@given(ranges(), st.integers(1, 20_000))
def test_bounds_inside_a_batch_are_at_the_ends_alone(wanted: list[TopicRange], target_bytes: int) -> None:
    for each in wanted:
        pieces = [p for task in cut_ranges([each], plan_of(each.history), target_bytes=target_bytes) for p in task.pieces]
        for piece in pieces:
            at_first = (piece.ledger_id, piece.first_entry_id) == (each.first.ledger_id, each.first.entry_id)
            assert piece.first_batch_index == (max(0, each.first.batch_index) if at_first else 0)
            at_end = (piece.ledger_id, piece.last_entry_id) == (each.end.ledger_id, each.end.entry_id)
            assert piece.end_batch_index == (each.end.batch_index if at_end else -1)


def test_an_end_inside_a_batch_is_that_of_the_last_piece_alone() -> None:
    history = TopicHistory("t", -1, "", (ledger(1, 30, 30_000),))
    whole = TopicRange(history, MessagePosition(1, 2, 4), MessagePosition(1, 25, 3))
    pieces = [p for task in cut_ranges([whole], plan_of(history), target_bytes=10_000) for p in task.pieces]
    assert [(p.first_batch_index, p.end_batch_index) for p in pieces] == [(4, -1), (0, -1), (0, 3)]


@pytest.mark.slow
@given(ranges(), st.integers(1, 5_000))
def test_pieces_know_where_their_entries_and_those_before_lie(wanted: list[TopicRange], target_bytes: int) -> None:
    tasks = cut_ranges(wanted, plan_of(*(each.history for each in wanted)), target_bytes=target_bytes)
    by_topic = {each.history.topic: [part for part in each.history.ledgers if part.last_entry_id >= 0] for each in wanted}
    for task in tasks:
        for piece in task.pieces:
            ledgers = by_topic[piece.topic]
            place = next(index for index, part in enumerate(ledgers) if part.ledger_id == piece.ledger_id)
            assert piece.fragments == fragments_of(ledgers[place], 0, piece.last_entry_id), "all before it is looked back at"
            assert {name for fragment in piece.fragments for name in fragment.ensemble} <= {bookie for bookie, _ in task.bookies}
            tails = [(tail.ledger_id, tail.last_entry_id) for tail in piece.before]
            assert tails == [(part.ledger_id, part.last_entry_id) for part in ledgers[place - len(tails) : place]], "without a gap"
            assert all(tail.fragments and not tail.before for tail in piece.before)
            found = piece.first_entry_id + sum(tail.last_entry_id - tail.first_entry_id + 1 for tail in piece.before)
            is_simple = all(len(part.fragments) == 1 for part in ledgers[:place])
            assert found >= BEFORE_ENTRIES or len(tails) >= (min(place, 5) if is_simple else min(place, 1)), (
                "as the look-back needs"
            )


def test_the_look_back_goes_over_eight_small_ledgers_and_no_further() -> None:
    history = topic_of(*(ledger(number, 1) for number in range(40)))
    ranges = [TopicRange(history, MessagePosition(number, 0), MessagePosition(number, 1)) for number in (5, 39)]
    tasks = cut_ranges(ranges, plan_of(history), target_bytes=1)
    early, late = (task.pieces[0].before for task in tasks)
    assert [tail.ledger_id for tail in early] == list(range(5))
    assert [tail.ledger_id for tail in late] == list(range(39 - len(late), 39))
    assert len(late) == 8
    assert max(len(pickle.dumps(task)) for task in tasks) < MAX_TASK_BYTES


def test_pieces_of_a_task_share_the_ledgers_before() -> None:
    history = topic_of(*(ledger(number, 5, 500) for number in range(12)))
    (task,) = cut_ranges([whole(history)], plan_of(history), target_bytes=1 << 20)
    assert [len(piece.before) for piece in task.pieces] == [min(index, 8) for index in range(12)]
    assert len({id(tail) for piece in task.pieces for tail in piece.before}) == 11
    assert len(pickle.dumps(task)) < MAX_TASK_BYTES


def test_a_stream_counts_pieces_wherever_they_lie() -> None:
    for starts in ((0,), (0, 2, 4), tuple(range(9))):
        history = topic_of(*(ledger(number, 10, 1000, starts) for number in range(30)))
        tasks = cut_ranges([whole(history)], plan_of(history), target_bytes=1, entries_per_task={history.topic: 10_000})
        assert [len(task.pieces) for task in tasks] == [MAX_STREAM_PIECES, MAX_STREAM_PIECES, 30 - 2 * MAX_STREAM_PIECES]


def test_tasks_are_as_large_as_asked() -> None:
    history = topic_of(*(ledger(number, 1000, 1_000_000) for number in range(10)))
    tasks = cut_ranges([whole(history)], plan_of(history), target_bytes=250_000)
    assert len(tasks) == 40
    assert {task.size_bytes for task in tasks} == {250_000}
    packed = cut_ranges([whole(history)], plan_of(history), target_bytes=2_500_000)
    assert [task.size_bytes for task in packed] == [2_000_000] * 5, "no small part is cut off a ledger to fill a task"
    nearly = cut_ranges([whole(history)], plan_of(history), target_bytes=2_800_000)
    assert nearly[0].size_bytes == 3_000_000, "and none is left over"


def test_a_small_rest_goes_with_its_ledger() -> None:
    history = topic_of(ledger(1, 110, 110_000))
    assert [task.size_bytes for task in cut_ranges([whole(history)], plan_of(history), target_bytes=100_000)] == [110_000]
    history = topic_of(ledger(1, 150, 150_000))
    assert [task.size_bytes for task in cut_ranges([whole(history)], plan_of(history), target_bytes=100_000)] == [100_000, 50_000]


def test_min_tasks_cuts_smaller() -> None:
    history = topic_of(ledger(1, 1000, 1_000_000))
    assert len(cut_ranges([whole(history)], plan_of(history), target_bytes=128 << 20, min_tasks=8)) == 8


def test_small_topics_share_a_task() -> None:
    many = [topic_of(ledger(number, 5, 500), name=f"persistent://a/b/{number}") for number in range(20)]
    tasks = cut_ranges([whole(each) for each in many], HistoryPlan(tuple(many), BOOKIES), target_bytes=1 << 20)
    assert len(tasks) < 5
    assert sum(len(task.pieces) for task in tasks) == 20


@pytest.mark.parametrize("entries", [1, 40, 1200])
@pytest.mark.parametrize("fragments", [1, 3, 60])
def test_a_pickled_task_stays_small(entries: int, fragments: int) -> None:
    starts = tuple(range(min(fragments, entries)))
    history = topic_of(*(ledger(number, entries, entries * 100, starts) for number in range(60)))
    tasks = cut_ranges([whole(history)], plan_of(history), target_bytes=1 << 30)
    assert entries_of(tasks) == expected_of([whole(history)])
    assert max(len(pickle.dumps(task)) for task in tasks) < MAX_TASK_BYTES
    assert all(task.ticket == TICKET for task in tasks)


def test_a_task_has_the_addresses_that_it_needs_alone() -> None:
    history = topic_of(ledger(1, 10))
    (task,) = cut_ranges([whole(history)], plan_of(history), target_bytes=1 << 20)
    assert dict(task.bookies) == {name: BOOKIES[name] for name in NAMES[1:4]}


def test_tasks_of_several_topics_carry_the_tickets_of_theirs() -> None:
    first, second = topic_of(ledger(1, 10), name="persistent://a/b/x"), topic_of(ledger(2, 10), name="persistent://a/b/y")
    tickets = {"persistent://a/b/x": b"X", "persistent://a/b/y": b"Y"}
    plan = HistoryPlan((first, second), BOOKIES, tickets=tickets)
    (both,) = cut_ranges([whole(first), whole(second)], plan, target_bytes=1 << 20)
    assert both.ticket == b"X Y"
    (one,) = cut_ranges([whole(second)], plan, target_bytes=1 << 20)
    assert one.ticket == b"Y"


def test_too_many_tasks_are_refused_with_advice() -> None:
    history = topic_of(ledger(1, 10_000_000, 10 << 30))
    with pytest.raises(BadOptionError, match="targetPartitionBytes") as refused:
        cut_ranges([whole(history)], plan_of(history), target_bytes=1 << 10)
    assert "50000" in str(refused.value)
    with pytest.raises(BadOptionError, match="at most 50"):
        cut_ranges([whole(history)], plan_of(history), target_bytes=1, min_tasks=60, max_tasks=50)


def test_min_tasks_does_not_lead_to_too_many() -> None:
    history = topic_of(ledger(1, 120, 12_000))
    assert 35 <= len(cut_ranges([whole(history)], plan_of(history), target_bytes=12_000, min_tasks=50, max_tasks=50)) <= 50


@pytest.mark.slow
@pytest.mark.parametrize(("ledgers", "entries"), [(1, 1000), (7, 143), (1000, 1)])
def test_a_stream_is_never_refused_for_its_tasks_and_gets_the_same_ones_again(ledgers: int, entries: int) -> None:
    """Its cut is in the checkpoint: an error would come at every restart."""
    history = topic_of(*(ledger(number, entries) for number in range(ledgers)))
    elsewhere = topic_of(*(ledger(number, entries, size_bytes=9, starts=(0, 2)) for number in range(ledgers)))
    for cut in (1, 3, 10, 19, 20, 21):
        tasks, again = (
            cut_ranges([whole(each)], plan_of(each), target_bytes=1, entries_per_task={each.topic: cut}, max_tasks=50)
            for each in (history, elsewhere)
        )
        assert entries_of(tasks) == entries_of(cut_ranges([whole(history)], plan_of(history), target_bytes=1 << 30))
        assert 25 <= len(tasks) <= 50, "not fewer than need be"
        assert [len(entries_of([task])) for task in tasks] == [len(entries_of([task])) for task in again]


def test_the_lookback_is_bounded() -> None:
    history = topic_of(ledger(1, 50_000), ledger(2, 50_000))
    (before, *_), (after, *_) = (
        [
            piece
            for task in cut_ranges([whole(history)], plan_of(history), target_bytes=1 << 19)
            for piece in task.pieces
            if piece.ledger_id == wanted
        ]
        for wanted in (1, 2)
    )
    assert before.before == ()
    (tail,) = after.before
    assert tail.last_entry_id - tail.first_entry_id + 1 == BEFORE_ENTRIES
    assert all(earlier.ledger_id <= later.ledger_id for earlier, later in pairwise([before, after]))


@pytest.mark.parametrize("place", [(2, 0), (2, 500), (2, 1200), (2, 4999), (3, 700)])
@pytest.mark.parametrize("look_back", [0, 1, 999, 3000, 6000])
@pytest.mark.parametrize("starts", [(0,), (0, 700, 1400, 2100, 2800, 3500, 4200)])
def test_the_look_back_is_as_long_as_it_says_over_ledgers_and_fragments(
    place: tuple[int, int], look_back: int, starts: tuple[int, ...]
) -> None:
    history = topic_of(*(ledger(number, 5000, starts=starts) for number in (1, 2, 3)))
    wanted = TopicRange(history, MessagePosition(*place), MessagePosition(place[0], 5000))
    (task,) = cut_ranges([wanted], plan_of(history), target_bytes=1 << 40, look_back=look_back)
    looked_at: list[tuple[int, int]] = []
    for part in LookBack(cast(EntrySource, None)).parts(task.pieces[0], look_back):
        assert part.fragments[0].first_entry_id <= part.first_entry_id, "it is known where they lie"
        looked_at += [(part.ledger_id, entry_id) for entry_id in range(part.first_entry_id, part.last_entry_id + 1)]
    every = [(number, entry_id) for number in (1, 2, 3) for entry_id in range(5000) if (number, entry_id) < place]
    assert looked_at == every[max(0, len(every) - look_back) :]


def test_a_long_look_back_leaves_tasks_small_and_whole() -> None:
    history = topic_of(*(ledger(number, 10_000, starts=tuple(range(0, 10_000, 50))) for number in range(3)))
    shares = {history.topic: 10_000}
    by_size = cut_ranges([whole(history)], plan_of(history), target_bytes=1 << 30, look_back=1_000_000)
    by_entries = cut_ranges([whole(history)], plan_of(history), target_bytes=1, entries_per_task=shares, look_back=1_000_000)
    assert entries_of(by_size) == entries_of(by_entries) == expected_of([whole(history)])
    assert max(len(pickle.dumps(task)) for task in by_size) < MAX_TASK_BYTES
    assert len(by_entries) == 3
    (tail,) = by_entries[2].pieces[0].before
    assert len(tail.fragments) == 21
    assert tail.first_entry_id == tail.fragments[0].first_entry_id == 10_000 - 21 * 50
