"""The Shared core: turns, priorities, redelivery, chunks, limits, and that it never stops without a reason."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import pytest
from hypothesis import settings

from cepheid_broker.dispatch.counted_group import Chunk
from cepheid_broker.dispatch.dispatch_shared import SharedDispatch
from cepheid_broker.dispatch.effects import DispatchLimits, DispatchPolicies, Idle
from cepheid_broker.dispatch.holders import Holders
from cepheid_metadata import Position
from tests.broker.dispatch_histories import SharingHistories
from tests.broker.dispatch_world import LIMITS, Acks, World


def world_with(entries: int, consumers: int = 0, *, permits: int = 100, max_unacked: int = 1000) -> World:
    world = World(SharedDispatch, max_unacked_per_consumer=max_unacked)
    for _ in range(entries):
        world.append(1)
    for key in range(1, consumers + 1):
        world.core.on_consumer_joined(key)
        world.core.on_permits(key, permits)
    return world


def shares(world: World) -> Counter[int]:
    return Counter(consumer for consumer, _, _ in world.sent)


def shared(world: World) -> SharedDispatch:
    assert isinstance(world.core, SharedDispatch)
    return world.core


def test_consumers_take_turns() -> None:
    world = world_with(60, consumers=3)
    world.settle()
    assert set(shares(world).values()) == {20}


def test_a_lower_priority_number_is_served_first() -> None:
    world = world_with(30)
    for key, priority in ((1, 5), (2, 0)):
        world.core.on_consumer_joined(key, priority=priority)
        world.core.on_permits(key, 20)
    world.settle()
    assert shares(world) == {2: 20, 1: 10}


def test_nothing_is_kept_of_consumers_that_left() -> None:
    world = world_with(0, consumers=1)
    for key in range(2, 100):
        world.core.on_consumer_joined(key, priority=key % 7)
        world.core.on_permits(key, 10)
        world.append(1)
        world.settle()
        world.core.on_consumer_left(key)
    assert repr(shared(world)._turns) == "<Turns {0: 1}>"


def test_redelivery_raises_the_count_and_goes_first() -> None:
    world = world_with(5, consumers=1)
    world.settle()
    world.sent.clear()
    world.core.on_redeliver(1, [Position(3, 1), Position(3, 3)])
    world.append(1)
    world.settle()
    assert [(p.entry_id, count) for _, p, count in world.sent] == [(1, 1), (3, 1), (5, 0)]
    world.sent.clear()
    world.core.on_redeliver(1, [Position(3, 1)])
    world.settle()
    assert [(p.entry_id, count) for _, p, count in world.sent] == [(1, 2)]


def test_what_a_consumer_leaves_behind_goes_to_the_others_with_its_count_as_it_was() -> None:
    world = world_with(8, consumers=2)
    world.settle()
    left = [p for consumer, p, _ in world.sent if consumer == 1]
    world.sent.clear()
    world.core.on_consumer_left(1)
    world.settle()
    assert [(consumer, p, count) for consumer, p, count in world.sent] == [(2, p, 0) for p in left]


def test_acknowledgements_of_anything_cost_no_look_at_every_consumer_for_each() -> None:
    world = world_with(4, consumers=50, permits=1)
    world.settle()
    with mock.patch.object(Holders, "settle", autospec=True, side_effect=Holders.settle) as settle:
        world.core.on_acked(2, [Position(3, entry) for entry in range(1000)])
    assert settle.call_count <= 1000 + 4
    assert [world.core.unacked_messages(consumer) for consumer in range(1, 51)] == [0] * 50


def test_a_moved_cursor_costs_what_is_outstanding_and_not_that_for_every_consumer() -> None:
    world = world_with(600, consumers=20, permits=30)
    world.settle()
    assert len(world.sent) == 600
    world.acks.acknowledge(Position(3, 0))
    with mock.patch.object(world.acks, "unacknowledged_runs", wraps=world.acks.unacknowledged_runs) as asked:
        world.core.on_cursor_moved()
    assert sum(last - first + 1 for _, first, last in (call.args for call in asked.call_args_list)) <= 600
    assert sum(world.core.unacked_messages(consumer) or 0 for consumer in range(1, 21)) == 599


@pytest.mark.parametrize("entry_id", [-1, 1 << 32, (1 << 63) - 1])
def test_an_acknowledgement_of_what_cannot_be_an_entry_is_ignored(entry_id: int) -> None:
    world = world_with(4, consumers=1, permits=4)
    world.settle()
    world.core.on_redeliver(1, [Position(3, 0)])  # waits to be sent again
    world.acks.acknowledge(Position(3, 1))
    world.core.on_acked(1, [Position(3, entry_id), Position(3, 1)])
    assert world.core.unacked_messages(1) == 2


def test_redelivery_of_what_another_consumer_holds_is_ignored() -> None:
    world = world_with(8, consumers=2)
    world.settle()
    of_first = [p for consumer, p, _ in world.sent if consumer == 1]
    world.sent.clear()
    world.core.on_redeliver(2, of_first)
    world.settle()
    assert world.sent == []


def test_too_many_unacknowledged_messages_block_until_half_are_acknowledged() -> None:
    world = world_with(30, consumers=1, permits=1000, max_unacked=10)
    world.settle()
    held = [p for _, p, _ in world.sent]
    assert world.idle is Idle.TOO_MANY_UNACKED
    assert len(held) >= 10
    sent_before = len(world.sent)
    for index, position in enumerate(held):
        world.acks.acknowledged.add(position)
        world.core.on_acked(1, [position])
        world.settle()
        if len(held) - index - 1 > 5:
            assert len(world.sent) == sent_before, "resumed above half"
    assert len(world.sent) > sent_before


def test_the_limit_of_the_subscription_blocks_all_until_half_is_acknowledged() -> None:
    world = World(SharedDispatch, max_unacked_per_subscription=10)
    for _ in range(20):
        world.append(1)
    for key in (1, 2):
        world.core.on_consumer_joined(key, name=f"c{key}")
        world.core.on_permits(key, 100)
    world.settle()
    world.now_ms += 4000
    world.core.on_clock(world.now_ms)
    (why,) = world.core.why()
    assert (why.idle, why.since_s) == (Idle.SUBSCRIPTION_UNACKED, 4.0)
    assert "no more than 5" in why.until
    held = [(consumer, position) for consumer, position, _ in world.sent]
    assert len(held) >= 10
    for consumer, position in held[: len(held) - 5]:
        assert len(world.sent) == len(held), "resumed above half"
        world.acks.acknowledge(position)
        world.core.on_acked(consumer, [position])
        world.settle()
    assert len(world.sent) > len(held)


def test_a_change_of_limits_is_in_force_at_once() -> None:
    world = world_with(30, consumers=1, permits=1000, max_unacked=5)
    world.settle()
    assert world.idle is Idle.TOO_MANY_UNACKED
    world.core.on_policies(DispatchPolicies(0, 0))
    world.settle()
    assert len(world.sent) == 30
    world.core.on_policies(DispatchPolicies(max_unacked_per_consumer=7))
    world.append(1)
    world.settle()
    assert (len(world.sent), world.idle) == (30, Idle.TOO_MANY_UNACKED)


def test_delayed_entries_wait_for_their_time_and_say_so() -> None:
    world = world_with(0, consumers=1)
    world.append(1, deliver_at_ms=world.now_ms + 5000)
    world.append(1)
    world.append(1, deliver_at_ms=world.now_ms + 2000)
    world.settle()
    assert [p.entry_id for _, p, _ in world.sent] == [1]
    assert world.core.wake_at_ms == world.now_ms + 2000
    reasons = [why for why in world.core.why() if why.idle is Idle.DELAYED]
    assert [why.position for why in reasons] == [Position(3, 2)]
    world.now_ms += 2000
    world.settle()
    assert [p.entry_id for _, p, _ in world.sent] == [1, 2]
    world.core.on_policies(DispatchPolicies(delayed_delivery=False))
    world.settle()
    assert [p.entry_id for _, p, _ in world.sent] == [1, 2, 0], "the policy lets go what was held back"


def test_reading_stops_when_as_many_are_delayed_as_may_be() -> None:
    world = world_with(0, consumers=1)
    for _ in range(40):
        world.append(1, deliver_at_ms=world.now_ms + 1000)
    world.append(1)
    world.settle()
    assert world.sent == []
    assert Idle.TOO_MANY_DELAYED in {why.idle for why in world.core.why()}
    assert shared(world).delayed_entries < 2 * LIMITS.max_delayed_entries
    world.now_ms += 1000
    world.settle()
    assert len(world.sent) == 41


def test_chunks_of_one_message_stay_with_one_consumer_while_others_go_on() -> None:
    world = world_with(0, consumers=2, permits=1)
    world.append(1, Chunk("p-0", is_last=False))
    world.settle()
    (owner, _, _) = world.sent[0]
    other = 3 - owner
    world.append(1, Chunk("p-0", is_last=False))
    world.append(1)
    world.append(1, Chunk("p-0", is_last=True))
    world.settle()
    assert [(c, p.entry_id) for c, p, _ in world.sent] == [(owner, 0), (other, 2)], "the plain entry passed the reserved chunk"
    world.core.on_permits(other, 10)
    world.settle()
    assert world.idle is Idle.CHUNKS_RESERVED
    world.core.on_permits(owner, 10)
    world.settle()
    assert [(c, p.entry_id) for c, p, _ in world.sent][2:] == [(owner, 1), (owner, 3)]


def test_chunks_of_a_consumer_that_left_all_go_to_the_same_other_one() -> None:
    world = world_with(0, consumers=3, permits=100)
    for index in range(4):
        world.append(1, Chunk("p-0", is_last=index == 3))
        if index < 2:
            world.settle()
    owner = world.sent[0][0]
    world.core.on_consumer_left(owner)
    world.sent.clear()
    world.settle()
    assert [p.entry_id for _, p, _ in world.sent] == [0, 1, 2, 3]
    assert len({consumer for consumer, _, _ in world.sent}) == 1


def test_a_chunk_does_not_overtake_an_earlier_one_that_is_read_back() -> None:
    world = world_with(0, consumers=2, permits=100)
    for _ in range(2):
        world.append(1, Chunk("p-0", is_last=False))
    world.settle()
    owner = world.sent[0][0]
    world.reads_at_once = False
    world.append(1, Chunk("p-0", is_last=True))
    world.settle()
    world.core.on_consumer_left(owner)  # its chunks must be read back, and the last one is read for the first time
    world.settle()
    world.sent.clear()
    while world.reads:
        world.finish_read(0)  # the forward read ends first
        world.settle()
    assert [p.entry_id for _, p, _ in world.sent] == [0, 1, 2]


def test_a_chunk_asked_for_again_is_not_overtaken_by_one_that_was_being_read_back() -> None:
    world = world_with(0, consumers=1, permits=100)
    for _ in range(2):
        world.append(1, Chunk("p-0", is_last=False))
    world.settle()
    world.reads_at_once = False
    world.core.on_redeliver(1, None)
    world.sent.clear()
    world.settle()
    world.finish_read(0, max_entries=1)
    world.settle()  # chunk 0 is sent, chunk 1 is being read
    world.core.on_redeliver(1, [Position(3, 0)])
    while world.reads:
        world.finish_read(0)
        world.settle()
    assert [p.entry_id for _, p, _ in world.sent] == [0, 0, 1]


def test_the_rest_of_a_chunked_message_stays_with_who_holds_any_of_it() -> None:
    world = world_with(0, consumers=2)
    world.append(1, Chunk("p-0", is_last=False))
    world.append(1, Chunk("p-0", is_last=False))
    world.settle()
    owner = world.sent[0][0]
    world.acks.acknowledge(Position(3, 0))
    world.core.on_cursor_moved()  # the first one was skipped
    world.append(1)
    world.append(1, Chunk("p-0", is_last=True))
    world.settle()
    assert {c for c, p, _ in world.sent if p.entry_id != 2} == {owner}


def test_no_chunk_is_lost_when_the_oldest_chunked_message_is_forgotten() -> None:
    world = world_with(0)
    for key, permits in ((1, 1), (2, 4)):
        world.core.on_consumer_joined(key)
        world.core.on_permits(key, permits)
    for number in range(LIMITS.max_chunked_messages):
        world.append(1, Chunk(f"p-{number}", is_last=False))
    world.settle()
    first, second = (next(c for c, p, _ in world.sent if p.entry_id == entry) for entry in (0, 1))
    assert (first, second) == (1, 2), "neither has permits left"
    world.core.on_consumer_joined(3)
    world.core.on_permits(3, 1)
    for number in (0, 1):
        world.append(1, Chunk(f"p-{number}", is_last=True))
    world.settle()
    world.append(1)
    world.settle()  # consumer 3 takes it: the last chunks are reserved for the others
    world.reads_at_once = False
    world.core.on_permits(2, 10)
    world.settle()
    world.append(1, Chunk("one more", is_last=False))  # the oldest is forgotten
    world.append(1, Chunk("p-2", is_last=True))
    world.settle()
    world.finish_read(1)  # the forward read ends first
    world.settle()
    world.core.on_permits(1, 10)
    while world.reads:
        world.finish_read(len(world.reads) - 1)
        world.settle()
    assert {p.entry_id for _, p, _ in world.sent} == set(range(10))


def test_entries_that_were_trimmed_do_not_hold_up_redelivery() -> None:
    world = world_with(4, consumers=1)
    world.settle()
    world.topic.roll()
    world.append(1)
    world.settle()
    world.core.on_redeliver(1, None)
    world.sent.clear()
    del world.topic.ledgers[3]
    world.settle()
    assert [p for _, p, _ in world.sent] == [Position(5, 0)]
    assert world.idle is Idle.AT_END


def test_a_chunk_reserved_for_a_consumer_that_left_goes_in_order_with_what_was_left_behind() -> None:
    world = world_with(0)
    for key in (1, 2):
        world.core.on_consumer_joined(key)
    world.core.on_permits(1, 1)
    for chunk in (Chunk("p-0", is_last=False), Chunk("p-0", is_last=True), None):
        world.append(1, chunk)
        world.settle()
    world.core.on_permits(2, 1)
    world.settle()
    assert [(c, p.entry_id) for c, p, _ in world.sent] == [(1, 0), (2, 2)], "chunk 1 is reserved for consumer 1"
    world.core.on_consumer_joined(3)
    for gone in (1, 2):
        world.core.on_consumer_left(gone)
    world.core.on_permits(3, 10)
    world.sent.clear()
    world.settle()
    assert [(c, p.entry_id) for c, p, _ in world.sent] == [(3, 0), (3, 1), (3, 2)]


class SharedHistories(SharingHistories):
    def new_core(self, acks: Acks, limits: DispatchLimits, policies: DispatchPolicies) -> SharedDispatch:
        return SharedDispatch(acks, limits, policies)

    def check_sent(self, consumer: int, position: Position) -> None:
        chunk = self.world.topic[position].chunk
        # A chunk never sent may have waited for a consumer that left: it goes in order with what that one left behind.
        if position not in self.was_sent and chunk is None and not self.world.topic[position].deliver_at_ms:
            again = [p for p in self.unsent() if p in self.was_sent and self.world.topic[p].chunk is None]
            assert not again, f"{position} is new, and goes before {again}, which were refused or left behind"
        if chunk is not None and len(self.chunk_positions(chunk.uuid)) > 1 and not self.some_are_forgotten():
            earlier = [p for p in self.chunk_positions(chunk.uuid) if p < position and p not in self.world.acks.acknowledged]
            assert all(self.holder.get(p) == consumer for p in earlier), "chunks at two consumers, or out of order"

    def cannot_go(self, position: Position) -> bool:
        reserved = any(why.idle is Idle.CHUNKS_RESERVED for why in self.core.why())
        return reserved and self.world.topic[position].chunk is not None


SharedHistories.TestCase.settings = settings(max_examples=50, stateful_step_count=50, deadline=None)
test_random_histories = SharedHistories.TestCase
