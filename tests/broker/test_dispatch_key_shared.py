"""The Key_Shared core: owners of hashes, order per key while consumers come and go, and that it never stops without a reason."""

from __future__ import annotations

from hypothesis import settings

from cepheid_broker.dispatch import DispatchLimits, DispatchPolicies
from cepheid_broker.dispatch_key_shared import KeySharedDispatch
from cepheid_broker.position import Position
from tests.broker.dispatch_histories import SharingHistories
from tests.broker.dispatch_world import Acks


class ByHand:
    """`KeyOwners` of a test: hash modulo the number of consumers, in the order in which they came."""

    def __init__(self) -> None:
        self.consumers: list[int] = []

    def owner(self, key_hash: int) -> int | None:
        return self.consumers[key_hash % len(self.consumers)] if self.consumers else None

    def join(self, consumer: int, ranges: object) -> None:
        self.consumers.append(consumer)

    def leave(self, consumer: int) -> None:
        self.consumers.remove(consumer)


class KeySharedHistories(SharingHistories):
    """H10 on top: of one hash nothing overtakes, and nobody gets it while another holds some of it."""

    HASHES = 5
    in_order = True

    def new_core(self, acks: Acks, limits: DispatchLimits, policies: DispatchPolicies) -> KeySharedDispatch:
        self.owners = ByHand()
        return KeySharedDispatch(acks, limits, policies, self.owners, in_order=self.in_order)

    def of_hash(self, key_hash: int) -> list[Position]:
        return [p for p in self.world.topic.positions() if self.world.topic[p].key_hash == key_hash]

    def check_sent(self, consumer: int, position: Position) -> None:
        entry = self.world.topic[position]
        same = self.of_hash(entry.key_hash)
        waiting = [p for p in self.unsent() if p in same and p < position and not self.world.topic[p].deliver_at_ms]
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


KeySharedHistories.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
OutOfOrderHistories.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_random_histories = KeySharedHistories.TestCase
test_random_histories_out_of_order = OutOfOrderHistories.TestCase
