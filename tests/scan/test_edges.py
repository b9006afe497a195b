"""Starts and ends by publish time, found with a few probes, and never too narrow: clients' clocks do not quite rise."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cepheid_decode import (
    EARLIEST,
    LATEST,
    BadOptionError,
    BadRecordError,
    Edge,
    Fragment,
    HistoryPlan,
    LedgerHistory,
    MessagePosition,
    TopicHistory,
)
from cepheid_scan.edges import end_of, first_of, resolve_edge

TOPIC = "persistent://public/default/t"
SKEW_MS = 50


class ScriptedProbe:
    """Publish times by ledger; counts what is asked. `unreadable`: entries that tell nothing."""

    def __init__(self, times: dict[int, list[int | None]], unreadable: frozenset[tuple[int, int]] = frozenset()) -> None:
        self.times = times
        self.unreadable = unreadable
        self.asked: list[tuple[int, int]] = []

    def publish_time_ms(self, history: TopicHistory, ledger: LedgerHistory, entry_id: int, about_ms: int) -> int | None:
        self.asked.append((ledger.ledger_id, entry_id))
        if (ledger.ledger_id, entry_id) in self.unreadable:
            raise BadRecordError(f"{ledger.ledger_id}:{entry_id} is damaged")
        return self.times[ledger.ledger_id][entry_id]


def ledger(ledger_id: int, entries: int, closed_at_ms: int | None) -> LedgerHistory:
    is_open = closed_at_ms is None
    return LedgerHistory(ledger_id, entries - 1, is_open, entries, closed_at_ms, 1, 1, (Fragment(0, ("b",)),), b"")


def plan_of(*ledgers: LedgerHistory, topic: str = TOPIC) -> HistoryPlan:
    return HistoryPlan((TopicHistory(topic, -1, "x", ledgers),), {})


def resolve(edge: Edge, plan: HistoryPlan, probe: ScriptedProbe, *, is_end: bool, skew_ms: int = SKEW_MS) -> MessagePosition:
    (position,) = resolve_edge(edge, plan, probe, is_end=is_end, skew_ms=skew_ms).values()
    return position


@st.composite
def topics(draw: st.DrawFn) -> tuple[HistoryPlan, ScriptedProbe]:
    """Times that rise but for the skew; ledgers are closed after their last entry was published, by a clock that is off too."""
    sizes = draw(st.lists(st.integers(0, 12), min_size=1, max_size=6))
    now = 10_000
    times: dict[int, list[int | None]] = {}
    ledgers: list[LedgerHistory] = []
    for number, entries in enumerate(sizes):
        mine: list[int | None] = []
        for _ in range(entries):
            now += draw(st.integers(0, 40))
            mine.append(now - draw(st.integers(0, SKEW_MS // 2)))
        times[number * 3] = mine
        is_last = number == len(sizes) - 1
        ledgers.append(ledger(number * 3, entries, None if is_last else now + draw(st.integers(-SKEW_MS // 2, 30))))
    places = [(ledger_id, entry_id) for ledger_id, mine in times.items() for entry_id in range(len(mine))]
    unreadable = draw(st.sets(st.sampled_from(places), max_size=len(places))) if places else set()
    return plan_of(*ledgers), ScriptedProbe(times, frozenset(unreadable))


@pytest.mark.slow
@settings(max_examples=300)
@given(topics(), st.data())
def test_no_message_of_the_range_is_outside_of_the_positions(topic: tuple[HistoryPlan, ScriptedProbe], data: st.DataObject) -> None:
    plan, probe = topic
    published = [one for times in probe.times.values() for one in times if one is not None]
    time_ms = data.draw(st.sampled_from(published or [0])) + data.draw(st.sampled_from([0, 0, 1, -1, SKEW_MS, -SKEW_MS]))
    start = resolve(Edge(publish_time_ms=time_ms), plan, probe, is_end=False)
    end = resolve(Edge(publish_time_ms=time_ms), plan, probe, is_end=True)
    for ledger_id, times in probe.times.items():
        for entry_id, published_ms in enumerate(times):
            assert published_ms is not None
            place = MessagePosition(ledger_id, entry_id)
            assert place >= start or published_ms < time_ms, "left out by the start"
            assert place < end or published_ms >= time_ms, "left out by the end"


def test_a_search_takes_few_probes() -> None:
    ledgers = [ledger(number, 1000, 1000 * (number + 1)) for number in range(1000)]
    times: dict[int, list[int | None]] = {number: [1000 * number + entry for entry in range(1000)] for number in range(1000)}
    probe = ScriptedProbe(times)
    start = resolve(Edge(publish_time_ms=700_500), plan_of(*ledgers), probe, is_end=False, skew_ms=100)
    assert start == MessagePosition(700, 400)
    end = resolve(Edge(publish_time_ms=700_500), plan_of(*ledgers), probe, is_end=True, skew_ms=100)
    assert end == MessagePosition(700, 600)
    assert len(probe.asked) < 45
    assert min(probe.asked)[0] >= 0


def test_ledgers_closed_long_before_are_not_looked_at() -> None:
    ledgers = [ledger(number, 10, 1000 * (number + 1)) for number in range(9)]
    times: dict[int, list[int | None]] = {number: [1000 * number + 100 * entry for entry in range(10)] for number in range(9)}
    probe = ScriptedProbe(times)
    resolve(Edge(publish_time_ms=7_500), plan_of(*ledgers), probe, is_end=False, skew_ms=0)
    assert {ledger_id for ledger_id, _ in probe.asked} <= {7, 8}
    probe.asked.clear()
    resolve(Edge(publish_time_ms=1_500), plan_of(*ledgers), probe, is_end=True, skew_ms=0)
    assert {ledger_id for ledger_id, _ in probe.asked} <= {0, 1}


def test_a_time_before_and_after_everything() -> None:
    plan, probe = plan_of(ledger(5, 3, 100), ledger(6, 2, None)), ScriptedProbe({5: [10, 20, 30], 6: [110, 120]})
    assert resolve(Edge(publish_time_ms=0), plan, probe, is_end=False) == MessagePosition(5, 0)
    assert resolve(Edge(publish_time_ms=9_999), plan, probe, is_end=False) == MessagePosition(6, 2)
    assert resolve(Edge(publish_time_ms=-500), plan, probe, is_end=True) == MessagePosition(5, 0)
    assert resolve(Edge(publish_time_ms=9_999), plan, probe, is_end=True) == MessagePosition(6, 2)


def test_what_was_trimmed_meanwhile_is_older() -> None:
    plan, probe = plan_of(ledger(5, 3, 1000), ledger(6, 2, None)), ScriptedProbe({5: [None] * 3, 6: [110, 120]})
    assert resolve(Edge(publish_time_ms=115), plan, probe, is_end=False, skew_ms=0) == MessagePosition(6, 1)


@pytest.mark.parametrize("is_end", [False, True])
def test_topics_without_entries(is_end: bool) -> None:
    for plan in (plan_of(), plan_of(ledger(4, 0, None))):
        probe = ScriptedProbe({4: []})
        (history,) = plan.topics
        expected = end_of(history)
        assert first_of(history) == expected
        for edge in (EARLIEST, LATEST, Edge(publish_time_ms=5)):
            assert resolve(edge, plan, probe, is_end=is_end) == expected
        assert probe.asked == []


def test_the_ends_of_what_is_kept() -> None:
    plan, probe = plan_of(ledger(5, 3, 100), ledger(6, 2, None)), ScriptedProbe({})
    assert resolve(EARLIEST, plan, probe, is_end=False) == MessagePosition(5, 0)
    assert resolve(LATEST, plan, probe, is_end=True) == MessagePosition(6, 2)
    assert resolve(LATEST, plan, probe, is_end=False) == MessagePosition(6, 2), "a start at the latest: nothing yet"


def test_given_positions_and_what_is_not_named() -> None:
    two = HistoryPlan(
        tuple(TopicHistory(f"{TOPIC}-partition-{index}", index, "x", (ledger(5 + index, 3, None),)) for index in range(2)), {}
    )
    edge = Edge(positions=(("t-partition-0", MessagePosition(5, 1, 7)),))
    found = resolve_edge(edge, two, ScriptedProbe({}), is_end=False, skew_ms=0)
    assert list(found.values()) == [MessagePosition(5, 1, 7), MessagePosition(6, 0)]
    found = resolve_edge(edge, two, ScriptedProbe({}), is_end=True, skew_ms=0)
    assert list(found.values()) == [MessagePosition(5, 1, 7), MessagePosition(6, 3)]
    with pytest.raises(BadOptionError, match="other was given, which is not read"):
        resolve_edge(Edge(positions=(("other", MessagePosition(1, 1)),)), two, ScriptedProbe({}), is_end=False, skew_ms=0)


def test_a_subscription_is_asked_for_each_topic() -> None:
    many = HistoryPlan(tuple(TopicHistory(f"{TOPIC}{index}", -1, "x", (ledger(index, 3, None),)) for index in range(20)), {})

    def ask(topic: str, name: str) -> MessagePosition:
        assert name == "billing"
        return MessagePosition(int(topic.removeprefix(TOPIC)), 1)

    edge = Edge(subscription="billing")
    found = resolve_edge(edge, many, ScriptedProbe({}), is_end=False, skew_ms=0, subscription_position=ask)
    assert list(found.values()) == [MessagePosition(index, 1) for index in range(20)]
    assert all(earlier < later for earlier, later in pairwise(found.values()))
    with pytest.raises(BadOptionError, match="billing"):
        resolve_edge(edge, many, ScriptedProbe({}), is_end=False, skew_ms=0)


def test_entries_that_tell_nothing_are_in_the_range() -> None:
    plan = plan_of(ledger(5, 8, None))
    probe = ScriptedProbe({5: [10, 20, 30, 40, 50, 60, 70, 80]}, frozenset({(5, 3), (5, 4), (5, 5)}))
    assert resolve(Edge(publish_time_ms=55), plan, probe, is_end=False, skew_ms=0) == MessagePosition(5, 3)
    assert resolve(Edge(publish_time_ms=35), plan, probe, is_end=True, skew_ms=0) == MessagePosition(5, 6)
    probe.unreadable = frozenset((5, entry_id) for entry_id in range(8))
    assert resolve(Edge(publish_time_ms=55), plan, probe, is_end=False, skew_ms=0) == MessagePosition(5, 0)
    assert resolve(Edge(publish_time_ms=55), plan, probe, is_end=True, skew_ms=0) == MessagePosition(5, 8)


def test_a_search_among_nothing_but_damage_gives_up() -> None:
    plan = plan_of(ledger(5, 1000, None))
    probe = ScriptedProbe({5: [0] * 1000}, frozenset((5, entry_id) for entry_id in range(1000)))
    with pytest.raises(BadRecordError, match="is damaged"):
        resolve(Edge(publish_time_ms=55), plan, probe, is_end=False)
