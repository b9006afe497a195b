"""The Exclusive core: order, permits, rewinds, and that it never stops without a reason."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cepheid_broker.dispatch import DispatchLimits, DispatchPolicies, Idle
from cepheid_broker.dispatch_failover import FailoverDispatch
from cepheid_broker.position import Position
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
    world.core.on_read(read, [])  # answered from before the append
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


class ExclusiveHistories(RuleBasedStateMachine):
    """Random histories: what was sent since the last rewind is exactly the unacknowledged entries in order, without a gap."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(new_core)
        self.world.on_sent = self.on_sent  # type: ignore[method-assign]
        self.world.reads_at_once = False
        self.consumer = 0
        self.joined = False
        self.writable = True
        self.permits = 0
        self.next_index = 0  # into the topic's positions: everything before was sent or found acknowledged
        self.received: list[Position] = []

    @property
    def core(self) -> FailoverDispatch:
        assert isinstance(self.world.core, FailoverDispatch)
        return self.world.core

    def on_sent(self, consumer: int, positions: list[Position]) -> None:
        assert self.joined
        assert consumer == self.consumer
        assert self.writable
        everything = self.world.topic.positions()
        for position in positions:
            assert self.permits > 0, "an entry was sent without a permit"
            index = everything.index(position)
            skipped = everything[self.next_index : index]
            assert index >= self.next_index, f"{position} was sent out of order"
            assert all(p in self.world.acks.acknowledged for p in skipped), f"skipped {skipped}"
            assert position not in self.world.acks.acknowledged
            self.permits -= self.world.topic.ledgers[position.ledger_id][position.entry_id].messages
            self.next_index = index + 1
            self.received.append(position)

    def rewound(self) -> None:
        self.next_index = 0

    @rule(messages=st.integers(1, 6), entries=st.integers(1, 9))
    def append(self, messages: int, entries: int) -> None:
        for _ in range(entries):
            self.world.append(messages)

    @rule()
    def roll(self) -> None:
        self.world.topic.roll()

    @precondition(lambda self: not self.joined)
    @rule()
    def join(self) -> None:
        self.consumer += 1
        self.joined, self.writable, self.permits = True, True, 0
        self.rewound()
        self.core.on_consumer_joined(self.consumer)

    @precondition(lambda self: self.joined)
    @rule()
    def leave(self) -> None:
        self.joined = False
        self.core.on_consumer_left(self.consumer)
        self.rewound()

    @precondition(lambda self: self.joined)
    @rule(messages=st.integers(1, 20))
    def flow(self, messages: int) -> None:
        self.permits += messages
        self.core.on_permits(self.consumer, messages)

    @rule(stale=st.integers(1, 5))
    def flow_of_a_gone_consumer(self, stale: int) -> None:
        self.core.on_permits(-stale, 100)

    @rule(writable=st.booleans())
    def socket(self, writable: bool) -> None:
        self.writable = writable if self.joined else True
        self.core.on_writable(self.consumer, writable)

    @precondition(lambda self: self.received)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        self.world.acks.acknowledged |= set(data.draw(st.lists(st.sampled_from(self.received), max_size=8)))

    @precondition(lambda self: self.joined)
    @rule()
    def redeliver(self) -> None:
        self.core.on_redeliver(self.consumer, None)
        self.rewound()

    @precondition(lambda self: self.world.reads)
    @rule(fails=st.sampled_from([True, False, False, False]), as_asked=st.booleans(), entries=st.integers(1, 6), data=st.data())
    def end_read(self, fails: bool, as_asked: bool, entries: int, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.world.reads) - 1))
        if fails:
            self.world.fail_read(index)
        else:
            self.world.finish_read(index, max_entries=entries, as_asked=as_asked)

    @precondition(lambda self: self.world.failed)
    @rule()
    def retry(self) -> None:
        self.world.failed.pop()
        self.core.on_retry()

    @invariant()
    def sends_whatever_it_can(self) -> None:
        self.world.settle()
        assert self.permits == self.core.permits(self.consumer) or not self.joined
        if not (self.joined and self.writable and self.permits > 0) or self.world.idle in (Idle.READING, Idle.READ_FAILED):
            return
        missed = [p for p in self.world.topic.positions()[self.next_index :] if p not in self.world.acks.acknowledged]
        assert not missed, f"{missed} could be sent, idle because {self.world.idle}"


ExclusiveHistories.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
test_random_histories = ExclusiveHistories.TestCase
