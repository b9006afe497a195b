"""Random histories for the cores that give entries to many consumers, and what must hold in all of them.

rules ──► core ──► on_sent ──► the model: who holds what, who was given what before ──► H5, H6, H7, H9
after every rule: whatever can be sent was sent, or there is a reason       at the end: a fair continuation delivers everything
"""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cepheid_broker.dispatch.counted_group import Chunk
from cepheid_broker.dispatch.effects import DispatchCore, DispatchLimits, DispatchPolicies, Idle
from cepheid_metadata import Position
from tests.broker.dispatch_world import Acks, World

RARELY = st.sampled_from([False, False, False, True])
WAITS = (Idle.READING, Idle.READ_FAILED)
FULL = (Idle.TOO_MANY_DELAYED, Idle.TOO_MANY_WAITING)
PRODUCERS = 3


class SharingHistories(RuleBasedStateMachine):
    """Subclasses say which core, and what is special about it."""

    HASHES = 3
    MAX_CONSUMERS = 4

    def __init__(self) -> None:
        super().__init__()
        self.policies = DispatchPolicies(max_unacked_per_consumer=30, max_unacked_per_subscription=60)
        self.world = World(self.new_core, max_unacked_per_consumer=30, max_unacked_per_subscription=60)
        self.world.on_sent = self.on_sent  # type: ignore[method-assign]
        self.world.reads_at_once = False
        self.next_key = 0
        self.permits: dict[int, int] = {}
        self.writable: dict[int, bool] = {}
        self.holder: dict[Position, int] = {}
        self.nacks: dict[Position, int] = {}
        self.was_sent: set[Position] = set()  # since the core started over
        self.chunked: dict[int, tuple[int, int]] = {}  # producer → number of its chunked message, and chunks of it so far
        self.released: set[Position] = set()  # were there while nothing was held back

    # What subclasses say

    def new_core(self, acks: Acks, limits: DispatchLimits, policies: DispatchPolicies) -> DispatchCore:
        raise NotImplementedError

    def join_core(self, consumer: int, priority: int) -> None:
        self.core.on_consumer_joined(consumer, name=f"c{consumer}", priority=priority)

    def check_sent(self, consumer: int, position: Position) -> None:
        """Before the model takes it in."""

    def cannot_go(self, position: Position) -> bool:
        """An entry that nobody holds, and that need not be sent though some consumer can take messages."""
        return False

    # The model

    @property
    def core(self) -> DispatchCore:
        return self.world.core

    def on_sent(self, consumer: int, positions: list[Position]) -> None:
        assert self.writable[consumer]
        for position in positions:
            entry = self.world.topic[position]
            assert self.permits[consumer] > 0, "an entry was sent without a permit"
            assert position not in self.holder, f"{position} is outstanding twice (H9)"
            assert position not in self.world.acks.acknowledged, f"{position} is acknowledged (H7)"
            assert position in self.released or not self.is_delayed(position), f"{position} is sent before its time"
            self.check_sent(consumer, position)
            self.permits[consumer] -= entry.messages
            self.holder[position] = consumer
            self.was_sent.add(position)
        counts = self.world.acks.counts
        assert all(counts.get(p.ledger_id, {}).get(p.entry_id, 0) == self.nacks.get(p, 0) for p in positions), "counts"

    def is_delayed(self, position: Position) -> bool:
        return self.policies.delayed_delivery and self.world.topic[position].deliver_at_ms > self.world.now_ms

    def unsent(self) -> list[Position]:
        done = self.world.acks.acknowledged
        return [p for p in self.world.topic.positions() if p not in done and p not in self.holder]

    def held_messages(self, consumer: int | None = None) -> int:
        """A chunked message counts with its last chunk."""
        entries = [self.world.topic[p] for p, holder in self.holder.items() if consumer in (None, holder)]
        return sum(entry.messages for entry in entries if entry.chunk is None or entry.chunk.is_last)

    def chunk_positions(self, uuid: str) -> list[Position]:
        topic = self.world.topic
        return [p for p in topic.positions() if (chunk := topic[p].chunk) is not None and chunk.uuid == uuid]

    def free(self, consumer: int | None = None) -> None:
        self.holder = {p: holder for p, holder in self.holder.items() if consumer not in (None, holder)}

    # Rules: the topic

    @initialize(slow_storage=st.booleans(), consumers=st.integers(0, 3), hashes=st.lists(st.integers(0, 9), max_size=25))
    def begin(self, slow_storage: bool, consumers: int, hashes: list[int]) -> None:
        """Something to do from the start, so that short histories meet each other's rules."""
        self.world.reads_at_once = not slow_storage
        for key_hash in hashes:
            self.world.append(1, key_hash=key_hash % self.HASHES)
        for _ in range(consumers):
            self.join(0, 10)

    @rule(messages=st.integers(1, 5), hashes=st.lists(st.integers(0, 9), min_size=1, max_size=9))
    def append(self, messages: int, hashes: list[int]) -> None:
        for key_hash in hashes:
            self.world.append(messages, key_hash=key_hash % self.HASHES)

    @rule(chunks=st.integers(1, 4), producer=st.integers(0, PRODUCERS - 1))
    def append_chunks(self, chunks: int, producer: int) -> None:
        """Messages of three, of several producers at the same time."""
        for _ in range(chunks):
            number, index = self.chunked.get(producer, (producer, 0))
            chunk = Chunk(f"p-{number}", is_last=index == 2)
            self.world.append(1, chunk, key_hash=number % self.HASHES)
            self.chunked[producer] = (number + PRODUCERS, 0) if index == 2 else (number, index + 1)

    @rule(delay_ms=st.integers(1, 500), key_hash=st.integers(0, 9), entries=st.integers(1, 4))
    def append_delayed(self, delay_ms: int, key_hash: int, entries: int) -> None:
        for _ in range(entries):
            self.world.append(1, deliver_at_ms=self.world.now_ms + delay_ms, key_hash=key_hash % self.HASHES)

    @rule()
    def roll(self) -> None:
        self.world.topic.roll()

    @rule(ms=st.integers(1, 300))
    def time_passes(self, ms: int) -> None:
        self.world.now_ms += ms

    # Rules: consumers

    @precondition(lambda self: len(self.permits) < self.MAX_CONSUMERS)
    @rule(priority=st.integers(0, 1), permits=st.sampled_from([0, 3, 50]))
    def join(self, priority: int, permits: int) -> None:
        self.next_key += 1
        self.permits[self.next_key], self.writable[self.next_key] = permits, True
        self.join_core(self.next_key, priority)
        if permits:
            self.core.on_permits(self.next_key, permits)

    @precondition(lambda self: self.permits)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.permits)))
        del self.permits[key], self.writable[key]
        self.free(key)
        if not self.permits:
            self.was_sent.clear()
        self.core.on_consumer_left(key)

    @precondition(lambda self: self.permits)
    @rule(data=st.data(), messages=st.integers(1, 15))
    def flow(self, data: st.DataObject, messages: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.permits)))
        self.permits[key] += messages
        self.core.on_permits(key, messages)

    @precondition(lambda self: self.permits)
    @rule(data=st.data(), writable=st.booleans())
    def socket(self, data: st.DataObject, writable: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.permits)))
        self.writable[key] = writable
        self.core.on_writable(key, writable)

    @rule(gone=st.integers(1, 5))
    def late_commands_of_a_gone_consumer(self, gone: int) -> None:
        self.core.on_permits(-gone, 100)
        self.core.on_redeliver(-gone, None)
        self.core.on_consumer_left(-gone)

    # Rules: acknowledgements

    @precondition(lambda self: self.holder)
    @rule(data=st.data(), by_another=st.booleans())
    def acknowledge(self, data: st.DataObject, by_another: bool) -> None:
        for position in data.draw(st.lists(st.sampled_from(sorted(self.holder)), max_size=8, unique=True)):
            key = self.holder[position]
            self.acknowledge_entry(position, min(self.permits) if by_another else key)

    def acknowledge_entry(self, position: Position, by: int | None) -> None:
        self.world.acks.acknowledge(position)
        self.holder.pop(position, None)
        self.nacks.pop(position, None)
        self.core.on_acked(by, [position])

    @rule(data=st.data())
    def acknowledge_anything(self, data: st.DataObject) -> None:
        """Also what was never sent, or long ago: a client may know it from before."""
        if positions := self.world.topic.positions():
            self.acknowledge_entry(data.draw(st.sampled_from(positions)), min(self.permits, default=None))

    @precondition(lambda self: self.holder)
    @rule(data=st.data())
    def negatively_acknowledge(self, data: st.DataObject) -> None:
        position = data.draw(st.sampled_from(sorted(self.holder)))
        key = self.holder[position]
        chunk = self.world.topic[position].chunk
        positions = [position] if chunk is None else [p for p in self.chunk_positions(chunk.uuid) if self.holder.get(p) == key]
        self.redeliver(key, positions)

    def redeliver(self, key: int, positions: Iterable[Position] | None) -> None:
        for p in list(self.holder) if positions is None else positions:
            if self.holder.get(p) == key:
                del self.holder[p]
                self.nacks[p] = self.nacks.get(p, 0) + 1
        self.core.on_redeliver(key, positions)

    @precondition(lambda self: self.permits)
    @rule(data=st.data())
    def redeliver_all(self, data: st.DataObject) -> None:
        self.redeliver(data.draw(st.sampled_from(sorted(self.permits))), None)

    # Rules: what administrators and crashes do

    @rule(entries=st.integers(1, 6), happens=RARELY)
    def skip(self, entries: int, happens: bool) -> None:
        """Or expire, or clear the backlog: consumers stay, and hear nothing of it."""
        if not happens:
            return
        for position in [p for p in self.world.topic.positions() if p not in self.world.acks.acknowledged][:entries]:
            self.world.acks.acknowledge(position)
            self.holder.pop(position, None)
            self.nacks.pop(position, None)
        self.core.on_cursor_moved()

    @rule(data=st.data(), happens=RARELY)
    def seek(self, data: st.DataObject, happens: bool) -> None:
        if not happens:
            return
        positions = self.world.topic.positions()
        self.disconnect_all()
        if positions:
            target = data.draw(st.sampled_from(positions))
            self.world.acks.reset(target)
            self.nacks = {p: count for p, count in self.nacks.items() if p >= target}
        self.core.on_rewind()

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
        self.world.core = self.new_core(self.world.acks, self.world.limits, self.policies)

    def disconnect_all(self) -> None:
        for key in sorted(self.permits):
            self.core.on_consumer_left(key)
        self.permits.clear()
        self.writable.clear()
        self.holder.clear()
        self.was_sent.clear()

    @rule()
    def trim(self) -> None:
        """Ledgers that are acknowledged throughout are deleted, also while entries of them are being read."""
        ledgers = self.world.topic.ledgers
        for ledger in sorted(ledgers)[:-1]:
            if any(Position(ledger, e) not in self.world.acks.acknowledged for e in range(len(ledgers[ledger]))):
                return
            del ledgers[ledger]

    @rule(
        per_consumer=st.sampled_from([0, 3, 30]),
        per_subscription=st.sampled_from([0, 5, 60]),
        delayed=st.booleans(),
        happens=RARELY,
    )
    def policy_change(self, per_consumer: int, per_subscription: int, delayed: bool, happens: bool) -> None:
        if not happens:
            return
        if not self.policies.delayed_delivery:
            self.released |= set(self.world.topic.positions())
        self.policies = DispatchPolicies(per_consumer, per_subscription, delayed)
        self.core.on_policies(self.policies)

    # Rules: reads

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
        self.append(1, [0])
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

    # What must hold

    def able(self) -> list[int]:
        if any(self.core.is_blocked(key) for key in self.permits) and self.all_blocked():
            return []
        return [k for k, permits in self.permits.items() if permits > 0 and self.writable[k] and not self.core.is_blocked(k)]

    def all_blocked(self) -> bool:
        return all(self.core.is_blocked(key) for key in self.permits)

    @invariant()
    def sends_whatever_it_can(self) -> None:
        self.world.settle()
        for key in self.permits:
            assert self.core.permits(key) == self.permits[key]
            assert self.core.unacked_messages(key) == self.held_messages(key)
            assert (
                self.policies.max_unacked_per_consumer
                or self.policies.max_unacked_per_subscription
                or not self.core.is_blocked(key)
            )
        reasons = {why.idle for why in self.core.why()}
        if not self.able() or reasons & {*WAITS}:
            return
        missed = [p for p in self.unsent() if not self.is_delayed(p) and not self.cannot_go(p)]
        if reasons & {*FULL}:  # nothing new is looked at, but what was looked at goes on
            missed = [p for p in missed if p < self.core.read_position]
        assert not missed, f"{missed} could be sent to {self.able()}, idle because {reasons}"

    def teardown(self) -> None:
        """Liveness: whatever happened, consumers that behave, a clock that runs and storage that answers deliver everything."""
        self.world.reads_at_once = True
        while self.world.reads:
            self.world.finish_read(0)
        self.retry_failed()
        if not self.permits:
            self.join(0, 0)
        self.fill_holes()
        for producer, (_, chunks) in list(self.chunked.items()):
            self.append_chunks(3 - chunks, producer)
        for _ in range(len(self.world.topic.positions()) + 3):
            self.world.now_ms += 1000
            for key in list(self.permits):
                self.writable[key] = True
                self.core.on_writable(key, True)
                self.permits[key] += 20
                self.core.on_permits(key, 20)
            self.world.settle()
            for position, key in sorted(self.holder.items()):
                if self.is_complete(position, key):
                    self.acknowledge_entry(position, key)
            if self.some_are_forgotten():
                self.redeliver_incomplete()
            self.world.settle()
        left = [p for p in self.world.topic.positions() if p not in self.world.acks.acknowledged]
        assert not left, f"{left} are never delivered (H5): {[str(why) for why in self.core.why()]}"
        assert {why.idle for why in self.core.why()} == {Idle.AT_END}

    def is_complete(self, position: Position, consumer: int) -> bool:
        """No client acknowledges a chunked message of which it has not got everything."""
        chunk = self.world.topic[position].chunk
        done = self.world.acks.acknowledged
        return chunk is None or all(p in done or self.holder.get(p) == consumer for p in self.chunk_positions(chunk.uuid))

    def some_are_forgotten(self) -> bool:
        """There were more chunked messages than are remembered: chunks of one may be with two consumers."""
        topic = self.world.topic
        return len({chunk.uuid for p in topic.positions() if (chunk := topic[p].chunk)}) > self.world.limits.max_chunked_messages

    def redeliver_incomplete(self) -> None:
        for key in list(self.permits):
            incomplete = [p for p, holder in sorted(self.holder.items()) if holder == key and not self.is_complete(p, key)]
            self.redeliver(key, incomplete)

    def retry_failed(self) -> None:
        if self.world.failed:
            self.retry()

    def fill_holes(self) -> None:
        """So that every key has somebody."""
