"""The Key_Shared core: owners of hashes, order per key while consumers come and go, and that it never stops without a reason."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from cepheid_broker.dispatch.counted_group import Chunk
from cepheid_broker.dispatch.dispatch_key_shared import READ_BACK_FACTOR, KeySharedDispatch
from cepheid_broker.dispatch.effects import DispatchLimits, DispatchPolicies, Idle, Read, ReadBack
from cepheid_broker.dispatch.key_owners import Sticky
from cepheid_metadata import Position
from tests.broker.dispatch_histories import SharingHistories
from tests.broker.dispatch_world import LIMITS, Acks, ByHand, World


def by_hand(acks: Acks, limits: DispatchLimits, policies: DispatchPolicies) -> KeySharedDispatch:
    return KeySharedDispatch(acks, limits, policies, ByHand())


def join(world: World, *consumers: int, permits: int = 100) -> None:
    for key in consumers:
        world.core.on_consumer_joined(key, name=f"c{key}")
        world.core.on_permits(key, permits)


def sent(world: World) -> list[tuple[int, int]]:
    return [(consumer, position.entry_id) for consumer, position, _ in world.sent]


def acknowledge(world: World, consumer: int, *entries: int) -> None:
    for entry_id in entries:
        world.acks.acknowledge(Position(3, entry_id))
        world.core.on_acked(consumer, [Position(3, entry_id)])


def keyed(*hashes: int) -> World:
    world = World(by_hand)
    for key_hash in hashes:
        world.append(1, key_hash=key_hash)
    return world


def test_a_key_that_moved_waits_for_who_holds_it_and_says_so() -> None:
    world = keyed(0, 1)
    join(world, 1)
    world.settle()
    join(world, 2)  # gets hash 1
    world.append(1, key_hash=1)
    world.append(1, key_hash=0)
    world.now_ms += 2500
    world.settle()
    assert sent(world) == [(1, 0), (1, 1), (1, 3)], "other keys go on"
    (why,) = [why for why in world.core.why() if why.idle is Idle.KEY_DRAINING]
    assert (why.consumer, why.position) == ("c1", Position(3, 1))
    assert why.key == "hash 1"
    assert "acknowledges" in why.until
    assert "the first is 3:2" in why.details
    acknowledge(world, 1, 1)
    world.settle()
    assert sent(world)[3:] == [(2, 2)]


def test_a_key_goes_on_at_once_when_its_holder_leaves_or_skipping_frees_it() -> None:
    for ends in ("leave", "skip"):
        world = keyed(1)
        join(world, 1)
        world.settle()
        join(world, 2)
        world.append(1, key_hash=1)
        world.settle()
        world.sent.clear()
        if ends == "leave":
            join(world, 3)
            world.core.on_consumer_left(1)
        else:
            world.acks.acknowledge(Position(3, 0))
            world.core.on_cursor_moved()
        world.settle()
        assert [entry for _, entry in sent(world)] == ([0, 1] if ends == "leave" else [1])


def test_a_refused_entry_goes_before_later_ones_of_its_key() -> None:
    world = keyed(1, 1)
    join(world, 1, permits=2)
    world.settle()
    world.core.on_redeliver(1, [Position(3, 0)])
    world.append(1, key_hash=1)
    world.core.on_permits(1, 10)
    world.settle()
    assert [(position.entry_id, count) for _, position, count in world.sent] == [(0, 0), (1, 0), (0, 1), (2, 0)]


def test_entries_that_are_due_wait_for_their_keys_turn() -> None:
    world = keyed(1)
    join(world, 1)
    world.settle()
    join(world, 2)  # gets hash 1, which the first consumer still holds
    for delay_ms in (1000, 0, 500):
        world.append(1, key_hash=1, deliver_at_ms=delay_ms and world.now_ms + delay_ms)
    world.settle()
    world.now_ms += 1000
    world.settle()
    assert sent(world) == [(1, 0)]
    acknowledge(world, 1, 0)
    world.settle()
    assert sent(world)[1:] == [(2, 1), (2, 2), (2, 3)], "and then they come in order"


def test_an_entry_that_is_due_while_a_later_one_of_its_key_is_read_back_goes_first() -> None:
    world = keyed(1)
    world.append(1, key_hash=1, deliver_at_ms=world.now_ms + 1000)
    world.append(1, key_hash=1)
    join(world, 1)
    world.settle()
    world.sent.clear()
    world.core.on_redeliver(1, [Position(3, 2)])
    world.reads_at_once = False
    world.settle()
    assert isinstance(world.reads[-1], ReadBack)
    world.now_ms += 1000
    world.core.on_clock(world.now_ms)
    world.reads_at_once = True
    while world.reads:
        world.finish_read(0)
    world.settle()
    assert sent(world) == [(1, 1), (1, 2)]


def test_keys_in_nobodys_range_wait_by_name_until_somebody_has_it() -> None:
    world = World(lambda acks, limits, policies: KeySharedDispatch(acks, limits, policies, Sticky()))
    world.append(1, key_hash=500)
    world.append(1, key_hash=5)
    world.core.on_consumer_joined(1, name="low", hash_ranges=[(0, 99)])
    world.core.on_permits(1, 10)
    world.settle()
    assert sent(world) == [(1, 1)]
    (why,) = [why for why in world.core.why() if why.idle is Idle.RANGE_HOLE]
    assert (why.key, why.position) == ("hash 500", Position(3, 0))
    world.core.on_consumer_joined(2, name="high", hash_ranges=[(100, 65535)])
    world.core.on_permits(2, 10)
    world.settle()
    assert sent(world)[1:] == [(2, 0)]


def test_no_more_than_the_bound_is_looked_past() -> None:
    world = keyed(*[1] * 30, 0)
    join(world, 1)
    join(world, 2, permits=0)
    world.settle()
    reasons = {why.idle: why for why in world.core.why()}
    assert Idle.TOO_MANY_WAITING in reasons
    assert reasons[Idle.NO_PERMITS].consumer == "c2"
    assert f"{LIMITS.max_waiting_entries} entries wait for it, the first is 3:0" in reasons[Idle.NO_PERMITS].details
    world.core.on_permits(2, 100)
    world.settle()
    assert sorted(entry for _, entry in sent(world)) == list(range(31))


def test_a_key_stays_where_the_first_chunks_of_a_message_are() -> None:
    world = keyed()
    world.append(1, Chunk("p-1", is_last=False), key_hash=1)
    join(world, 1)
    world.settle()
    join(world, 2)  # gets hash 1, which cannot move yet
    world.append(1, Chunk("p-1", is_last=True), key_hash=1)
    world.append(1, key_hash=1)
    world.settle()
    assert sent(world) == [(1, 0), (1, 1)]
    acknowledge(world, 1, 0, 1)
    world.settle()
    assert sent(world)[2:] == [(2, 2)]


@pytest.mark.parametrize("ends", ["skipped", "acknowledged"])
def test_a_key_moves_on_when_the_rest_of_a_chunked_message_never_comes(ends: str) -> None:
    world = keyed()
    world.append(1, Chunk("p-1", is_last=False), key_hash=1)
    join(world, 1, permits=1)
    world.settle()
    join(world, 2)  # gets hash 1
    if ends == "skipped":
        world.acks.acknowledge(Position(3, 0))
        world.core.on_cursor_moved()
    else:
        acknowledge(world, 1, 0)
    world.append(1, key_hash=1)
    world.settle()
    assert sent(world) == [(1, 0), (2, 1)], "it does not wait for the permits of who got the first chunk"


def test_what_was_skipped_is_not_read() -> None:
    world = keyed(*[1] * 40)
    join(world, 1, permits=0)
    for position in world.topic.positions()[:30]:
        world.acks.acknowledge(position)
    world.core.on_cursor_moved()
    world.reads_at_once = False
    world.core.on_permits(1, 100)
    world.settle()
    (read,) = world.reads
    assert isinstance(read, Read)
    assert read.position == Position(3, 30)


def test_no_more_of_large_batches_is_read_back_than_permits_may_pay_for() -> None:
    world = World(by_hand)
    join(world, 1, 2, permits=0)
    for key_hash in [0] * 3 + [1] * 9:
        world.append(100, key_hash=key_hash)
    world.core.on_permits(1, 1000)
    world.core.on_permits(2, 1)
    world.settle()
    assert sent(world) == [(1, 0), (1, 1), (1, 2), (2, 3)], "and the others wait"
    world.reads_at_once = False
    world.core.on_permits(2, 99 + 100)
    world.settle()
    (read,) = world.reads
    assert isinstance(read, ReadBack)
    assert (read.first, read.last) == (4, 3 + READ_BACK_FACTOR)


class KeySharedHistories(SharingHistories):
    """H10 on top: of one hash nothing overtakes, and nobody gets it while another holds some of it."""

    HASHES = 5
    in_order = True

    def new_core(self, acks: Acks, limits: DispatchLimits, policies: DispatchPolicies) -> KeySharedDispatch:
        self.owners = ByHand()
        return KeySharedDispatch(acks, limits, policies, self.owners, in_order=self.in_order)

    @precondition(lambda self: 0 < len(self.permits) < self.MAX_CONSUMERS)
    @rule(chunks=st.integers(1, 2))
    def a_key_moves_between_chunks(self, chunks: int) -> None:
        self.append_chunks(chunks, 0)
        self.world.settle()
        self.join(0, 50)

    def of_hash(self, key_hash: int) -> list[Position]:
        return [p for p in self.world.topic.positions() if self.world.topic[p].key_hash == key_hash]

    def check_sent(self, consumer: int, position: Position) -> None:
        entry = self.world.topic[position]
        same = self.of_hash(entry.key_hash)
        waiting = [p for p in self.unsent() if p in same and p < position and not self.is_delayed(p)]
        assert not waiting, f"{position} overtakes {waiting} (H10)"
        elsewhere = [p for p in same if self.holder.get(p, consumer) != consumer]
        if self.in_order:
            assert not elsewhere, f"{position} goes to {consumer} while {elsewhere} are with another (H10)"
        if not any(self.world.topic[p].chunk for p in same):
            assert self.owners.owner(entry.key_hash) == consumer

    def cannot_go(self, position: Position) -> bool:
        """Its consumer cannot take it, or its key waits."""
        key_hash = self.world.topic[position].key_hash
        holders = {self.holder[p] for p in self.of_hash(key_hash) if p in self.holder}
        owner = self.owners.owner(key_hash)
        able = self.able()
        if any(self.world.topic[p].chunk for p in self.of_hash(key_hash)) and any(key not in able for key in self.permits):
            return True  # the hash may be kept by another than its owner (rule 5)
        return owner not in able or (self.in_order and bool(holders - {owner}))


class OutOfOrderHistories(KeySharedHistories):
    in_order = False


KeySharedHistories.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
OutOfOrderHistories.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
test_random_histories = KeySharedHistories.TestCase
test_random_histories_out_of_order = OutOfOrderHistories.TestCase
