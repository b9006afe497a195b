"""The tail cache: what it serves equals what was appended, within its budget; the oldest goes first, pins apart."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cepheid_managed_ledger import TailCache
from cepheid_managed_ledger.tail_cache import TopicTail, cost_of, front_of
from cepheid_metadata import Position
from cepheid_rpc import EntryGroup, encode_group
from tests.managed_ledger.topic_world import payloads_of


def group(ledger_id: int, first: int, count: int = 1, size: int = 10) -> EntryGroup:
    payloads = [f"{ledger_id}:{first + index}".encode().ljust(size, b".") for index in range(count)]
    return encode_group(ledger_id, first, first - 1, 0, payloads)


def names(groups: list[EntryGroup] | None) -> list[str] | None:
    return None if groups is None else [payload.rstrip(b".").decode() for payload in payloads_of(groups)]


class Topic:
    def __init__(self, cache: TailCache) -> None:
        self.needed_from: Position | None = None
        self.tail: TopicTail = cache.open_tail(lambda: self.needed_from)
        self.tail.note_reader()
        self.last = Position(1, -1)

    def add(self, count: int = 1, size: int = 10, *, ledger_id: int | None = None) -> EntryGroup:
        first = self.last.entry_id + 1 if ledger_id in (None, self.last.ledger_id) else 0
        added = group(ledger_id or self.last.ledger_id, first, count, size)
        self.tail.add(added, self.last)
        self.last = Position(added.ledger_id, added.last_entry_id)
        return added

    def read(self, entry_id: int, ledger_id: int = 1, max_entries: int = 100, max_bytes: int = 1 << 20) -> list[str] | None:
        return names(self.tail.read(Position(ledger_id, entry_id), max_entries=max_entries, max_bytes=max_bytes))


def in_loop(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


async def test_reads_from_exactly_the_position_within_both_limits() -> None:
    cache = TailCache(1 << 20)
    topic = Topic(cache)
    topic.add(3)
    topic.add(2)
    topic.add(1, ledger_id=4)
    assert topic.read(0) == ["1:0", "1:1", "1:2", "1:3", "1:4", "4:0"]
    assert topic.read(2) == ["1:2", "1:3", "1:4", "4:0"]
    assert topic.read(1, max_entries=3) == ["1:1", "1:2", "1:3"]
    assert topic.read(1, max_bytes=1) == ["1:1"], "at least one entry"
    assert topic.read(3, max_bytes=2 * (36 + 10)) == ["1:3", "1:4"]
    assert topic.read(0, ledger_id=4) == ["4:0"]
    assert topic.read(0, ledger_id=2) is None
    assert topic.read(5) is None
    assert (cache.hits, cache.misses) == (6, 2)


async def test_a_large_entry_that_does_not_fit_ends_the_read_though_smaller_ones_behind_it_would() -> None:
    """Seeds 0x9 and 0xc of the simulator: consumers were never sent what had been left out."""
    topic = Topic(TailCache(1 << 20))
    topic.tail.add(encode_group(1, 0, -1, 0, [b"1:0", b"1:1".ljust(500, b".")]), topic.last)
    topic.last = Position(1, 1)
    topic.add(1)
    assert topic.read(0, max_bytes=400) == ["1:0"]
    assert topic.read(0, max_bytes=1000) == ["1:0", "1:1", "1:2"]


async def test_the_oldest_group_of_the_process_goes_first_when_the_budget_is_used_up() -> None:
    cache = TailCache(4 * cost_of(group(1, 0)))
    a, b = Topic(cache), Topic(cache)
    a.needed_from = Position(1, 0)  # a pin is no excuse over the budget
    a.add()
    b.add()
    a.add()
    b.add()
    assert cache.used_bytes == cache.limit_bytes
    a.add()
    assert a.read(0) is None
    assert a.read(1) == ["1:1", "1:2"]
    assert b.read(0) == ["1:0", "1:1"]
    b.add(ledger_id=2)
    assert b.read(0) is None
    assert b.read(1) == ["1:1", "2:0"]
    assert cache.statistics().evicted_by_size == 2


async def test_old_groups_go_unless_an_active_consumer_needs_them() -> None:
    cache = TailCache(1 << 20, keep_s=0.0)
    topic, other = Topic(cache), Topic(cache)
    for _ in range(3):
        topic.add()
        other.add()
    topic.needed_from = Position(1, 1)
    await asyncio.sleep(0.001)
    cache.evict_old()
    assert topic.read(0) is None
    assert topic.read(1) == ["1:1", "1:2"]
    assert len(other.tail) == 0
    topic.needed_from = None
    cache.evict_old()
    assert len(topic.tail) == 0
    assert cache.used_bytes == 0
    assert cache.statistics().evicted_by_age == 6


async def test_a_topic_that_nobody_reads_is_not_cached() -> None:
    cache = TailCache(1 << 20, idle_bytes=2_000)
    topic = Topic(cache)
    topic.add(size=1_500)
    topic.add(size=1_500)
    assert len(topic.tail) == 2
    topic.add(size=1_500)
    assert len(topic.tail) == 0
    assert cache.used_bytes == 0
    topic.tail.note_reader()
    topic.add()
    assert topic.read(3) == ["1:3"]
    assert topic.read(2) is None


async def test_a_gap_starts_the_tail_anew() -> None:
    topic = Topic(TailCache(1 << 20))
    topic.add()
    topic.last = Position(1, 4)  # 1..4 did not come through the cache
    topic.add()
    assert topic.read(0) is None
    assert topic.read(5) == ["1:5"]


@pytest.mark.parametrize(
    ("max_entries", "max_bytes", "at_least_one", "entries"),
    [(9, 999, False, 4), (3, 999, False, 3), (9, 2 * 46, False, 2), (9, 2 * 46 - 1, False, 1), (9, 45, False, 0), (9, 45, True, 1)],
)
def test_front_of_a_group(max_entries: int, max_bytes: int, at_least_one: bool, entries: int) -> None:
    front = front_of(group(1, 7, 4), max_entries, max_bytes, at_least_one=at_least_one)
    assert (0 if front is None else len(front)) == entries
    assert front is None or front.first_entry_id == 7


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_agrees_with_a_list_of_everything(data: st.DataObject) -> None:
    """Whatever is evicted: a hit has the topic's bytes from the position on, and what is cached is the end of each topic."""

    async def main() -> None:
        cache = TailCache(data.draw(st.integers(500, 8_000)), keep_s=1_000.0, idle_bytes=1 << 20)
        topics = [Topic(cache), Topic(cache)]
        everything: list[list[EntryGroup]] = [[], []]
        for _ in range(data.draw(st.integers(1, 60))):
            which = data.draw(st.integers(0, 1))
            ledger_id = topics[which].last.ledger_id + data.draw(st.sampled_from([0, 0, 0, 2]))
            added = topics[which].add(data.draw(st.integers(1, 5)), data.draw(st.integers(0, 60)), ledger_id=ledger_id)
            everything[which].append(added)
            assert cache.used_bytes <= cache.limit_bytes
        cached_bytes = 0
        for topic, groups in zip(topics, everything, strict=True):
            cached = groups[len(groups) - len(topic.tail) :]
            cached_bytes += sum(map(cost_of, cached))
            expected = [name for one in cached for name in names([one]) or []]
            for before, one in enumerate(groups):
                for entry_id in range(one.first_entry_id, one.last_entry_id + 1):
                    found = topic.read(entry_id, one.ledger_id)
                    if before < len(groups) - len(cached):
                        assert found is None
                    else:
                        assert found == expected[expected.index(f"{one.ledger_id}:{entry_id}") :]
        assert cache.used_bytes == cached_bytes
        for topic in topics:
            cache.close_tail(topic.tail)
        assert cache.used_bytes == 0

    in_loop(main())
