"""The core of Exclusive and Failover: order, permits, rewinds, who is active, and that it never stops without a reason."""

from __future__ import annotations

from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cepheid_broker.dispatch.dispatch_failover import FailoverDispatch
from cepheid_broker.dispatch.effects import DispatchCore, DispatchLimits, DispatchPolicies, HashRange, Idle
from cepheid_metadata import Position
from tests.broker.dispatch_histories import RARELY
from tests.broker.dispatch_world import Acks, World


def new_core(acks: Acks, limits: DispatchLimits, policies: DispatchPolicies) -> FailoverDispatch:
    return FailoverDispatch(acks, limits)


def world_with(entries: int, *, messages: int = 1) -> World:
    world = World(new_core)
    for _ in range(entries):
        world.append(messages)
    return world


def sent_entries(world: World) -> list[int]:
    return [position.entry_id for _, position, _ in world.sent]


def test_sends_as_many_entries_as_permits_pay_for() -> None:
    world = world_with(10)
    world.core.on_consumer_joined(1)
    world.settle()
    assert world.idle is Idle.NO_PERMITS
    world.core.on_permits(1, 4)
    world.settle()
    assert sent_entries(world) == [0, 1, 2, 3]
    world.core.on_permits(1, 100)
    world.settle()
    assert sent_entries(world) == list(range(10))
    assert world.idle is Idle.AT_END


def test_a_batch_is_sent_whole_and_permits_go_negative() -> None:
    world = world_with(3, messages=10)
    world.core.on_consumer_joined(1)
    world.core.on_permits(1, 11)
    world.settle()
    assert sent_entries(world) == [0, 1]
    assert world.core.permits(1) == -9
    world.core.on_permits(1, 9)
    world.settle()
    assert sent_entries(world) == [0, 1], "zero permits are none"
    world.core.on_permits(1, 1)
    world.settle()
    assert sent_entries(world) == [0, 1, 2]


def test_an_append_while_a_read_is_under_way_is_not_forgotten() -> None:
    world = world_with(0)
    world.reads_at_once = False
    world.core.on_consumer_joined(1)
    world.core.on_permits(1, 10)
    world.settle()
    read = world.reads.pop()
    world.append(1)
    world.core.on_read(read, [], to_end=True)  # answered from before the append
    world.settle()
    assert world.reads, "must look again"


def test_redelivery_starts_again_at_the_first_unacknowledged_entry() -> None:
    world = world_with(5)
    world.core.on_consumer_joined(1)
    world.core.on_permits(1, 100)
    world.settle()
    world.acks.acknowledged |= {Position(3, 0), Position(3, 2)}
    world.sent.clear()
    world.core.on_redeliver(1, None)
    world.settle()
    assert sent_entries(world) == [1, 3, 4]


def test_a_full_socket_stops_the_consumer_and_names_itself() -> None:
    world = world_with(5)
    world.core.on_consumer_joined(1)
    world.core.on_writable(1, False)
    world.core.on_permits(1, 100)
    world.settle()
    assert (world.sent, world.idle) == ([], Idle.SOCKET_FULL)
    world.core.on_writable(1, True)
    world.settle()
    assert len(world.sent) == 5


def test_a_reader_of_some_keys_gets_only_those_in_its_ranges_and_passes_over_the_others() -> None:
    world = World(new_core)
    hashes = [5, 10, 19, 20, 15, 70, 60, 65, 3, 10]
    for key_hash in hashes:
        world.append(key_hash=key_hash)
    world.core.on_consumer_joined(1, hash_ranges=[(10, 19), (60, 65)])
    world.core.on_permits(1, 3)
    world.settle()
    assert sent_entries(world) == [1, 2, 4], "permits pay for what is sent only"
    world.core.on_permits(1, 100)
    world.settle()
    assert sent_entries(world) == [1, 2, 4, 6, 7, 9]
    assert (world.idle, world.core.hash_ranges(1)) == (Idle.AT_END, ((10, 19), (60, 65)))
    for key_hash in (59, 60):
        world.append(key_hash=key_hash)
        world.settle()
    assert sent_entries(world)[6:] == [11], "appended entries too"
    world.core.on_redeliver(1, None)
    world.settle()
    assert sent_entries(world)[7:] == [1, 2, 4, 6, 7, 9, 11]


def names(world: World, *consumers: tuple[int, int, str]) -> None:
    for key, priority, name in consumers:
        world.core.on_consumer_joined(key, priority=priority, name=name)
        world.core.on_permits(key, 100)


def test_a_takeover_starts_at_the_first_unacknowledged_entry() -> None:
    world = world_with(6)
    names(world, (1, 0, "b"))
    world.settle()
    world.acks.acknowledge(Position(3, 0))
    world.acks.acknowledge(Position(3, 2))
    world.sent.clear()
    names(world, (2, 0, "c"))
    world.settle()
    assert world.sent == [], "it is not first in order"
    names(world, (3, 0, "a"))
    world.settle()
    assert [(consumer, position.entry_id) for consumer, position, _ in world.sent] == [(3, 1), (3, 3), (3, 4), (3, 5)]
    assert world.announced == {1: False, 2: False, 3: True}


def test_a_newcomer_hears_its_role_and_a_change_is_told_to_all() -> None:
    world = world_with(0)
    names(world, (1, 0, "a"))
    world.settle()
    assert world.announced == {1: True}
    world.announced.clear()
    names(world, (2, 0, "b"))
    world.settle()
    assert world.announced == {2: False}, "nothing changed for the other one"
    world.announced.clear()
    world.core.on_consumer_left(1)
    world.settle()
    assert world.announced == {2: True}


@pytest.mark.parametrize(
    ("partition_index", "active"),
    [(-1, 1), (0, 1), (1, 2), (2, 1), (3, 2)],  # by name, among the two with the best priority
)
def test_partitions_spread_over_the_consumers_with_the_best_priority(partition_index: int, active: int) -> None:
    world = World(lambda acks, limits, policies: FailoverDispatch(acks, limits, partition_index=partition_index))
    names(world, (3, 5, "a"), (2, 1, "c"), (1, 1, "b"))
    world.append(1)
    world.settle()
    assert {consumer for consumer, _, _ in world.sent[-1:]} == {active}


def test_only_the_active_consumer_may_ask_for_redelivery() -> None:
    world = world_with(3)
    names(world, (1, 0, "a"), (2, 0, "b"))
    world.settle()
    world.sent.clear()
    world.core.on_redeliver(2, None)
    world.settle()
    assert world.sent == []
    world.core.on_redeliver(1, [Position(3, 2)])
    world.settle()
    assert sent_entries(world) == [0, 1, 2]


def test_the_reason_names_the_active_consumer() -> None:
    world = world_with(1)
    names(world, (2, 0, "b"))
    world.core.on_consumer_joined(1, name="a")
    world.settle()
    (why,) = world.core.why()
    assert (why.idle, why.consumer, why.position) == (Idle.NO_PERMITS, "a", Position(3, 0))
    assert "1 more" in why.details


class OrderedHistories(RuleBasedStateMachine):
    """Random histories (H8): what was sent since the last rewind is exactly the unacknowledged entries in order, without a gap,
    and only to the active consumer."""

    MAX_CONSUMERS = 3
    RANGES: ClassVar[tuple[HashRange, ...]] = ()  # of key hashes, that every consumer chose
    announces = True

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.new_core)
        self.world.on_sent = self.on_sent  # type: ignore[method-assign]
        self.world.reads_at_once = False
        self.next_key = 0
        self.orders: dict[int, tuple[int, str, int]] = {}  # consumer → priority, name, key
        self.permits: dict[int, int] = {}
        self.writable: dict[int, bool] = {}
        self.active: int | None = None
        self.next_index = 0  # into the topic's positions: everything before was sent or found acknowledged
        self.received: list[Position] = []

    def new_core(self, acks: Acks, limits: DispatchLimits, policies: DispatchPolicies) -> FailoverDispatch:
        return FailoverDispatch(acks, limits, partition_index=1, announces=self.announces)

    @property
    def core(self) -> DispatchCore:
        return self.world.core

    def on_sent(self, consumer: int, positions: list[Position]) -> None:
        assert consumer == self.active
        assert self.writable[consumer]
        everything = self.world.topic.positions()
        for position in positions:
            assert self.permits[consumer] > 0, "an entry was sent without a permit"
            index = everything.index(position)
            skipped = everything[self.next_index : index]
            assert index >= self.next_index, f"{position} was sent out of order"
            assert not any(map(self.is_owed, skipped)), f"skipped {skipped}"
            assert self.is_owed(position)
            self.permits[consumer] -= self.world.topic[position].messages
            self.next_index = index + 1
            self.received.append(position)

    def is_owed(self, position: Position) -> bool:
        """Not acknowledged, and of a key that consumers here get."""
        key_hash = self.world.topic[position].key_hash
        is_theirs = not self.RANGES or any(first <= key_hash <= last for first, last in self.RANGES)
        return is_theirs and position not in self.world.acks.acknowledged

    def rewound(self) -> None:
        self.next_index = 0

    def choose(self) -> None:
        best = sorted(order for order in self.orders.values() if order[0] == min(o[0] for o in self.orders.values()))
        active = best[1 % len(best)][2] if best else None
        if active != self.active:
            self.active = active
            self.rewound()

    @initialize(slow_storage=st.booleans(), consumers=st.integers(0, 2), entries=st.integers(0, 20))
    def begin(self, slow_storage: bool, consumers: int, entries: int) -> None:
        """Something to do from the start, so that short histories meet each other's rules."""
        self.world.reads_at_once = not slow_storage
        self.append(1, entries, 0)
        for _ in range(min(consumers, self.MAX_CONSUMERS)):
            self.join(0, "b", 10)

    @rule(messages=st.integers(1, 6), entries=st.integers(1, 9), delay_ms=st.sampled_from([0, 0, 10_000]))
    def append(self, messages: int, entries: int, delay_ms: int) -> None:
        """Delayed ones go at once here (trap 42)."""
        for _ in range(entries):
            key_hash = 3 * len(self.world.topic.positions()) % 10
            self.world.append(messages, deliver_at_ms=delay_ms and self.world.now_ms + delay_ms, key_hash=key_hash)

    @rule()
    def roll(self) -> None:
        self.world.topic.roll()

    @precondition(lambda self: len(self.orders) < self.MAX_CONSUMERS)
    @rule(priority=st.integers(0, 1), name=st.sampled_from("abc"), permits=st.sampled_from([0, 3, 50]))
    def join(self, priority: int, name: str, permits: int) -> None:
        self.next_key += 1
        key = self.next_key
        self.orders[key] = priority, name, key
        self.permits[key], self.writable[key] = permits, True
        self.choose()
        self.core.on_consumer_joined(key, priority=priority, name=name, hash_ranges=self.RANGES)
        self.core.on_permits(key, permits)

    @precondition(lambda self: self.orders)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.orders)))
        del self.orders[key], self.permits[key], self.writable[key]
        self.world.announced.pop(key, None)
        self.choose()
        self.core.on_consumer_left(key)

    @precondition(lambda self: self.orders)
    @rule(data=st.data(), messages=st.integers(1, 20))
    def flow(self, data: st.DataObject, messages: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.orders)))
        self.permits[key] += messages
        if not self.core.on_permits(key, messages):  # a driver does not even ask then
            assert self.core.next_effect() is None

    @rule(gone=st.integers(1, 5))
    def late_commands_of_a_gone_consumer(self, gone: int) -> None:
        self.core.on_permits(-gone, 100)
        self.core.on_redeliver(-gone, None)
        self.core.on_consumer_left(-gone)

    @precondition(lambda self: self.orders)
    @rule(data=st.data(), writable=st.booleans())
    def socket(self, data: st.DataObject, writable: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.orders)))
        self.writable[key] = writable
        self.core.on_writable(key, writable)

    @precondition(lambda self: self.received)
    @rule(data=st.data(), cumulative=st.booleans())
    def acknowledge(self, data: st.DataObject, cumulative: bool) -> None:
        for position in data.draw(st.lists(st.sampled_from(self.received), max_size=8)):
            upto = [p for p in self.world.topic.positions() if p < position] if cumulative else []
            for p in [*upto, position]:
                self.world.acks.acknowledge(p)
            self.core.on_acked(self.active, [position])

    @precondition(lambda self: self.orders)
    @rule(data=st.data())
    def redeliver(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.orders)))
        self.core.on_redeliver(key, None)
        if key == self.active:
            self.rewound()

    @rule(entries=st.integers(1, 6), happens=RARELY)
    def skip(self, entries: int, happens: bool) -> None:
        if not happens:
            return
        for position in [p for p in self.world.topic.positions() if p not in self.world.acks.acknowledged][:entries]:
            self.world.acks.acknowledge(position)
        self.core.on_cursor_moved()

    def disconnect_all(self) -> None:
        for key in sorted(self.orders):
            self.core.on_consumer_left(key)
        for by_consumer in (self.orders, self.permits, self.writable, self.world.announced):
            by_consumer.clear()
        self.active = None

    @rule(data=st.data(), happens=RARELY)
    def seek(self, data: st.DataObject, happens: bool) -> None:
        if not happens:
            return
        self.disconnect_all()
        if positions := self.world.topic.positions():
            self.world.acks.reset(data.draw(st.sampled_from(positions)))
        self.core.on_rewind()
        self.rewound()

    @rule(data=st.data(), happens=RARELY)
    def crash(self, data: st.DataObject, happens: bool) -> None:
        """The cursor comes back as it was saved: some of the last acknowledgements are lost, and the core starts anew."""
        if not happens:
            return
        self.disconnect_all()
        lost = data.draw(st.lists(st.sampled_from(sorted(self.world.acks.acknowledged) or [Position(0, 0)]), max_size=3))
        self.world.acks.acknowledged -= set(lost)
        self.world.reads.clear()
        self.world.failed.clear()
        self.world.found_nothing.clear()
        self.world.core = self.new_core(self.world.acks, self.world.limits, DispatchPolicies())
        self.rewound()

    @precondition(lambda self: self.world.reads)
    @rule(fails=st.sampled_from([True, False, False, False]), as_asked=st.booleans(), entries=st.integers(1, 6), data=st.data())
    def end_read(self, fails: bool, as_asked: bool, entries: int, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.world.reads) - 1))
        if fails:
            self.world.fail_read(index)
        else:
            self.world.finish_read(index, max_entries=entries, as_asked=as_asked)

    @precondition(lambda self: self.world.reads)
    @rule()
    def a_read_answers_from_before_an_append(self) -> None:
        self.append(1, 1, 0)
        self.world.finish_read(len(self.world.reads) - 1, as_asked=True)

    @precondition(lambda self: self.world.reads)
    @rule(reads=st.integers(1, 8))
    def end_some_reads(self, reads: int) -> None:
        for _ in range(reads):
            if self.world.reads:
                self.world.finish_read(0)
                self.world.settle()

    @precondition(lambda self: self.world.failed)
    @rule()
    def retry(self) -> None:
        self.world.failed.clear()
        self.core.on_retry()

    @invariant()
    def sends_whatever_it_can(self) -> None:
        self.world.settle()
        for key, permits in self.permits.items():
            assert self.core.permits(key) == permits
        if self.announces:
            assert self.world.announced == {key: key == self.active for key in self.orders}
        else:
            assert self.world.announced == {}
        active = self.active
        if active is None or not self.writable[active] or self.permits[active] <= 0:
            return
        reasons = {why.idle for why in self.core.why()}
        if reasons & {Idle.READING, Idle.READ_FAILED}:
            return
        missed = list(filter(self.is_owed, self.world.topic.positions()[self.next_index :]))
        assert not missed, f"{missed} could be sent, idle because {reasons}"

    def teardown(self) -> None:
        """Liveness: whatever happened, a consumer that behaves and storage that answers bring everything (H5)."""
        self.world.reads_at_once = True
        while self.world.reads:
            self.world.finish_read(0)
        self.core.on_retry()
        if not self.orders:
            self.join(0, "a", 0)
        assert self.active is not None
        self.writable[self.active] = True
        self.core.on_writable(self.active, True)
        for _ in range(len(self.world.topic.positions()) + 1):
            self.permits[self.active] += 10
            self.core.on_permits(self.active, 10)
            self.world.settle()
            for position in self.received:
                self.world.acks.acknowledge(position)
        left = list(filter(self.is_owed, self.world.topic.positions()))
        assert not left, f"{left} are never delivered: {[str(why) for why in self.core.why()]}"


class ExclusiveHistories(OrderedHistories):
    MAX_CONSUMERS = 1
    announces = False


class HistoriesOfReadersOfSomeKeys(ExclusiveHistories):
    RANGES = ((2, 4), (8, 8))


OrderedHistories.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
ExclusiveHistories.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
test_random_histories_of_failover = OrderedHistories.TestCase
test_random_histories_of_exclusive = ExclusiveHistories.TestCase
HistoriesOfReadersOfSomeKeys.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
test_random_histories_of_readers_of_some_keys = HistoriesOfReadersOfSomeKeys.TestCase


def test_permits_alone_wake_only_who_has_something_to_send() -> None:
    world = world_with(3)
    world.core.on_consumer_joined(1)
    assert world.core.on_permits(1, 2), "entries are to be read"
    world.settle()
    assert world.core.on_permits(1, 100), "an entry waits for permits"
    world.settle()
    assert world.idle is Idle.AT_END
    assert not world.core.on_permits(1, 1)
    assert world.core.next_effect() is None
    world.core.on_consumer_joined(2, name="standby")
    world.settle()
    world.append()
    assert not world.core.on_permits(2, 1), "it is not the active one"
