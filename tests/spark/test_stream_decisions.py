"""What a stream decides from what it knows: places in a history, what is lost, which topics there are, how far it is behind."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cepheid_decode import Fragment, LedgerHistory, TopicHistory
from cepheid_spark.data_loss import SeenLedgers, find_loss, settled
from cepheid_spark.lag import Sightings, lag_report, waiting_since_ms
from cepheid_spark.offsets import EntryPosition, StreamOffset
from cepheid_spark.progress_listener import figures_of
from cepheid_spark.stream_state import Discovery
from cepheid_spark.topic_view import TopicView

T = "persistent://public/default/t"


def ledger(
    ledger_id: int, entries: int, *, is_open: bool = False, entry_bytes: int = 100, closed_at_ms: int = 1000
) -> LedgerHistory:
    closed = None if is_open else closed_at_ms
    return LedgerHistory(ledger_id, entries - 1, is_open, entries * entry_bytes, closed, 1, 1, (Fragment(0, ("b",)),), b"")


def history(*ledgers: LedgerHistory, incarnation: str = "i") -> TopicHistory:
    return TopicHistory(T, -1, incarnation, ledgers)


def view(*ledgers: LedgerHistory) -> TopicView:
    return TopicView.of(history(*ledgers))


chains = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=8).map(
    lambda steps: [
        (sum(step for step, _ in steps[: index + 1]), entries, index == len(steps) - 1) for index, (_, entries) in enumerate(steps)
    ]
)


@given(chains)
def test_every_entry_has_a_rank_and_is_found_by_it(chain: list[tuple[int, int, bool]]) -> None:
    looked = view(*(ledger(ledger_id, entries, is_open=is_open) for ledger_id, entries, is_open in chain))
    everything = [EntryPosition(ledger_id, entry) for ledger_id, entries, _ in chain for entry in range(entries)]
    assert looked.total_entries == len(everything)
    for rank, position in enumerate(everything, 1):
        assert looked.rank(position) == rank
        assert looked.at_rank(rank) == position
        assert looked.bytes_at(rank) == pytest.approx(100 * rank)
        assert looked.rank_within(100 * rank) == looked.rank_within(100 * rank + 99) == rank
    for ledger_id, _, _ in chain:
        before = sum(position.ledger_id < ledger_id for position in everything)
        assert looked.rank(EntryPosition(ledger_id, -1)) == before


def test_an_end_that_is_seen_later_moves_the_open_ledger_alone() -> None:
    looked = view(ledger(7, 5), ledger(9, 2, is_open=True))
    assert looked.with_end(9, 5).at_rank(11) == EntryPosition(9, 5)
    assert looked.with_end(9, 5).bytes_at(11) == pytest.approx(1100)
    told = looked.with_end(9, 5, 6_000)
    assert told.bytes_at(11) - told.bytes_at(5) == pytest.approx(6_000), "what a bookie says of the size counts"
    assert looked.with_end(9, 5, 10).bytes_at(11) == pytest.approx(700), "but not less than there was"
    assert looked.with_end(9, 0) is looked, "never back"
    assert looked.with_end(7, 50) is looked, "it is closed"
    assert view(ledger(7, 5)).with_end(7, 50).total_entries == 5


@pytest.mark.parametrize(
    ("position", "ledgers", "lost"),
    [
        ((7, 4), [ledger(7, 5), ledger(9, 0, is_open=True)], False),
        ((7, 9), [ledger(7, 5, is_open=True)], False),  # an old look: it is not believed against the position
        ((7, 9), [ledger(7, 5)], True),  # it ends before what was read
        ((7, 4), [ledger(9, 1)], True),  # trimmed
        ((7, -1), [ledger(9, 1)], True),  # trimmed, or it was empty: nobody knows
        ((7, -1), [ledger(5, 1), ledger(9, 1)], False),  # chains lose their heads first: it was empty
        ((7, 2), [ledger(5, 1), ledger(9, 1)], True),  # it was not
        ((7, 2), [ledger(5, 1)], True),  # made anew
        ((7, 2), [], True),
    ],
)
def test_what_a_missing_ledger_means(position: tuple[int, int], ledgers: list[LedgerHistory], lost: bool) -> None:
    assert (find_loss(view(*ledgers), EntryPosition(*position), SeenLedgers(), is_held=False) is not None) is lost


@pytest.mark.parametrize("kept", [(3, 9), (3, 5), (9, 12)])
def test_behind_a_loss_is_the_head_of_what_is_kept(kept: tuple[int, int]) -> None:
    """Ids of a topic that was made anew may be lower, and higher later."""
    loss = find_loss(view(*(ledger(ledger_id, 1) for ledger_id in kept)), EntryPosition(7, 2), SeenLedgers(), is_held=False)
    assert loss is not None
    assert loss.first_kept == kept[0]


@pytest.mark.parametrize(
    ("entry_id", "gone", "lost"),
    [
        (-1, {}, False),
        (-1, None, False),  # nobody knows: a lease is believed
        (-1, {7: 3}, True),  # something else has moved the lease
        (-1, {8: 0}, True),
        (0, {}, True),  # the lease must have failed: it leaves one entry of what was read
    ],
)
def test_an_unread_ledger_of_a_held_topic_was_empty_unless_a_record_says_otherwise(
    entry_id: int, gone: dict[int, int] | None, lost: bool
) -> None:
    kept, seen = view(ledger(9, 1)), SeenLedgers()
    loss = find_loss(kept, EntryPosition(7, entry_id), seen, is_held=True, incarnation="i")
    assert loss is not None
    assert loss.doubt == range(7, 9)
    assert (settled(loss, kept, seen, gone) is not None) is lost


@pytest.mark.parametrize(
    ("was", "position", "entries"),
    [
        (ledger(7, 5), (7, 4), None),  # read to its end
        (ledger(7, 5), (7, 3), 1),
    ],
)
def test_what_was_seen_of_a_ledger_before_it_went_decides(
    was: LedgerHistory, position: tuple[int, int], entries: int | None
) -> None:
    seen = SeenLedgers()
    seen.on_view(history(was, ledger(9, 1)), history(ledger(9, 1)))
    loss = find_loss(view(ledger(9, 1)), EntryPosition(*position), seen, is_held=False)
    assert (loss.entries if loss is not None else None) == entries


@pytest.mark.parametrize(
    ("was", "position"),
    [
        ((ledger(7, 5, is_open=True),), (7, 4)),  # more may have come
        ((ledger(7, 0, is_open=True),), (7, -1)),  # it may have got its first entries
        ((ledger(7, 5), ledger(8, 0, is_open=True)), (7, 4)),  # so may the one behind it
        ((ledger(7, 5),), (7, 4)),  # another one may have come and gone
    ],
)
@pytest.mark.parametrize("incarnation", ["i", None])
@pytest.mark.parametrize("is_missed_between", [True, False])
def test_what_two_looks_did_not_see_may_have_been_something(
    was: tuple[LedgerHistory, ...], position: tuple[int, int], incarnation: str | None, is_missed_between: bool
) -> None:
    seen, now = SeenLedgers(), history(ledger(9, 1, is_open=True))
    if is_missed_between:
        seen.on_missing(history(*was))
    seen.on_view(None if is_missed_between else history(*was), now)
    loss = find_loss(TopicView.of(now), EntryPosition(*position), seen, is_held=False, incarnation=incarnation)
    assert loss is not None
    assert "an unknown number of entries" in str(loss)
    assert ("created again" in str(loss)) is (incarnation is None)
    held = find_loss(TopicView.of(now), EntryPosition(*position), seen, is_held=True, incarnation=incarnation)
    assert held is not None
    assert held.is_held is (position[1] < 0), "a lease keeps what was not read"


def test_looks_of_which_each_shows_the_last_ledger_of_the_one_before_see_everything() -> None:
    looks = [
        history(ledger(7, 5, is_open=True)),
        history(ledger(7, 5), ledger(8, 0, is_open=True)),
        history(ledger(8, 0, is_open=True)),
        history(ledger(8, 3, is_open=True)),
    ]
    seen = SeenLedgers()
    for before, now in pairwise(looks):
        seen.on_view(before, now)
        assert find_loss(TopicView.of(now), EntryPosition(7, 4), seen, is_held=False) is None
    seen.on_view(looks[-1], history(ledger(9, 0, is_open=True)))
    assert find_loss(view(ledger(9, 0, is_open=True)), EntryPosition(7, 4), seen, is_held=False) is not None


def test_a_loss_says_what_where_and_what_to_do() -> None:
    seen = SeenLedgers()
    seen.on_view(history(ledger(7, 5), ledger(8, 3)), history(ledger(9, 1)))
    loss = find_loss(view(ledger(9, 1)), EntryPosition(7, 1), seen, is_held=False)
    assert loss is not None
    text = str(loss.error())
    for said in (T, "at least 6 entries after 7:1 and before ledger 9", "subscription", "failOnDataLoss=false"):
        assert said in text


def test_a_topic_is_gone_when_two_looks_in_a_row_miss_it() -> None:
    discovery = Discovery(30.0)
    assert discovery.is_due(0.0)
    discovery.on_found(["b", "a"], ["a"], 0.0)
    assert discovery.topics == ("a", "b")
    assert not discovery.is_due(29.0)
    assert discovery.is_due(30.0)
    discovery.on_found(["b"], ["a", "b"], 30.0)
    assert discovery.gone == frozenset()
    assert discovery.is_due(30.1), "sure soon"
    discovery.on_found(["a", "b"], ["a", "b"], 30.1)
    discovery.on_found(["b"], ["a", "b"], 60.1)
    assert discovery.gone == frozenset(), "counted anew"
    discovery.on_found(["b"], ["a", "b"], 61.1)
    assert discovery.gone == {"a"}
    assert not discovery.is_due(61.2)


def test_lag_counts_what_is_not_taken_and_how_long_it_waits() -> None:
    looked = view(ledger(7, 5, closed_at_ms=10_000), ledger(9, 2, is_open=True))
    sightings = Sightings()
    sightings.on_end(T, EntryPosition(9, 0), 50_000.0)
    sightings.on_end(T, EntryPosition(9, 1), 60_000.0)
    read = StreamOffset({T: EntryPosition(7, 3)})
    report = lag_report({T: looked}, read, sightings, lost_entries=3, now_ms=61_000.0)
    assert report == {"lagBytes": 300, "lagEntries": 3, "lagMs": 51_000, "lost": 3, "t": {T: [9, 1]}}
    for position, since_ms in (((7, 4), 50_000.0), ((9, 0), 60_000.0), ((9, 1), 61_000.0)):
        assert waiting_since_ms(looked, EntryPosition(*position), sightings, 61_000.0) == since_ms
    assert lag_report({T: looked}, None, sightings, lost_entries=0, now_ms=61_000.0)["lagEntries"] == 7


def test_sightings_stay_bounded_and_late_rather_than_early() -> None:
    sightings = Sightings()
    for number in range(5000):
        sightings.on_end(T, EntryPosition(1, number), float(number))
    for number in (0, 2500, 4998):
        seen_ms = sightings.first_beyond_ms(T, EntryPosition(1, number))
        assert seen_ms is not None
        assert number < seen_ms <= 4999
    assert sum(map(len, sightings._ends.values())) <= 512


@pytest.mark.slow
def test_arithmetic_over_many_ledgers_does_not_walk_through_them() -> None:
    """A thousand times as many ledgers may cost ten times the processor time, but not a hundred times."""

    def seconds(ledgers: int) -> float:
        looked = view(*(ledger(number, 100) for number in range(ledgers)), ledger(ledgers, 1, is_open=True))
        began = time.thread_time()
        for number in range(1000):
            moved = looked.with_end(ledgers, number + 1)
            moved.bytes_at(moved.rank(EntryPosition(ledgers // 2, 50)))
            moved.at_rank(number + 1)
        return time.thread_time() - began

    assert seconds(10_000) < 100 * seconds(10)


def test_progress_of_our_sources_becomes_figures_and_that_of_others_does_not() -> None:
    lag = '{"lagBytes":300,"lagEntries":3,"lagMs":1500,"lost":1,"t":{}}'
    ours = {"latestOffset": lag, "numInputRows": 10, "processedRowsPerSecond": 5.0}
    others = {"latestOffset": {"t": 1}, "numInputRows": 7}
    progress = {"id": "q", "batchId": 4, "durationMs": {"triggerExecution": 250}, "sources": [others, ours, {"numInputRows": 0}]}
    (found,) = figures_of(progress)
    assert (found.query, found.source, found.batch, found.rows, found.lag_s, found.lost_entries) == ("q", 1, 4, 10, 1.5, 1)
    assert found.batch_s == 0.25
