"""Every order in which a few events can happen to a few consumers and entries, for the cores that share entries among consumers.

    state ──each event that may happen──► core ──► the model checks what it sends ──► a state that was not seen before ──► …
      └──► a fair end: everybody takes, and acknowledges ──► everything was delivered, and the core remembers nothing of it

Random histories (dispatch_histories.py) are longer and larger, and miss the one order in millions that goes wrong; this looks at
all of them. A `Scope` is one state; it is copied by pickling, so it consists of plain objects.
"""

from __future__ import annotations

import pickle
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from cepheid_broker.dispatch.counted_group import Chunk
from cepheid_broker.dispatch.dispatch_key_shared import KeySharedDispatch
from cepheid_broker.dispatch.dispatch_shared import SharedDispatch
from cepheid_broker.dispatch.effects import DispatchLimits, DispatchPolicies, Idle, Read, ReadBack, Send, SendAll
from cepheid_broker.dispatch.key_owners import Sticky
from cepheid_metadata import Position
from tests.broker.dispatch_world import Acks, ByHand, Entry, Topic

Event = tuple[Any, ...]
Core = SharedDispatch | KeySharedDispatch
NewCore = Callable[[Acks, DispatchLimits, DispatchPolicies], Core]
LEDGER = 3
WAITS = frozenset((Idle.READING, Idle.READ_FAILED))
FULL = frozenset((Idle.TOO_MANY_DELAYED, Idle.TOO_MANY_WAITING))
CANNOT = frozenset((Idle.NO_PERMITS, Idle.SOCKET_FULL, Idle.TOO_MANY_UNACKED))
SMALL = DispatchLimits(
    read_ahead_bytes=200,
    round_robin_entries=1,
    read_back_entries=3,
    read_back_gap=1,
    max_chunked_messages=2,
    max_waiting_entries=2,
    max_delayed_entries=2,
)

NO_LIMITS = DispatchPolicies(0, 0)
EVENTS = ("join", "leave", "permits", "socket", "ack", "foreign_ack", "nack", "fail", "skip", "seek", "time")
MAX_CONSUMERS = 5  # at the same time


def shared(acks: Acks, limits: DispatchLimits, policies: DispatchPolicies) -> Core:
    return SharedDispatch(acks, limits, policies)


def key_shared(acks: Acks, limits: DispatchLimits, policies: DispatchPolicies) -> Core:
    return KeySharedDispatch(acks, limits, policies, ByHand())


def out_of_order(acks: Acks, limits: DispatchLimits, policies: DispatchPolicies) -> Core:
    return KeySharedDispatch(acks, limits, policies, ByHand(), in_order=False)


def sticky(acks: Acks, limits: DispatchLimits, policies: DispatchPolicies) -> Core:
    return KeySharedDispatch(acks, limits, policies, Sticky())


@dataclass(frozen=True)
class Story:
    """What there is, and how often each event may happen at most. `flow`: the sizes that a FLOW may have."""

    new_core: NewCore
    entries: tuple[Entry, ...]
    there: int = 100  # so many of them from the start; the others are appended
    join: int = 2
    leave: int = 1
    permits: int = 4
    flow: tuple[int, ...] = (1, 2)
    socket: int = 0
    ack: int = 100
    foreign_ack: int = 0  # of what its sender does not hold
    nack: int = 1
    fail: int = 0
    skip: int = 0
    seek: int = 0
    time: int = 0
    slow_reads: bool = False
    ranges: tuple[tuple[int, int], ...] = ()  # of the consumers in the order in which they come, where they choose them
    limits: DispatchLimits = SMALL
    policies: DispatchPolicies = NO_LIMITS

    def many_times(self, factor: int) -> Story:
        """The same entries over and over, and as many more events."""
        entries = tuple(_again(entry, number) for number in range(factor) for entry in self.entries)
        times = {name: factor * getattr(self, name) for name in EVENTS}
        limits = replace(self.limits, max_chunked_messages=len(entries))
        return replace(self, entries=entries, there=len(entries) // 2, limits=limits, **times)


def _again(entry: Entry, number: int) -> Entry:
    chunk = None if entry.chunk is None else Chunk(f"{entry.chunk.uuid}-{number}", entry.chunk.is_last)
    return replace(entry, chunk=chunk, deliver_at_ms=entry.deliver_at_ms and entry.deliver_at_ms + 1000 * number)


class Scope:
    def __init__(self, story: Story) -> None:
        self.story = story
        self.topic = Topic()
        self.left: dict[str, int] = {name: getattr(story, name) for name in EVENTS}  # how often each may still happen
        for entry in story.entries[: story.there]:
            self.topic.append(entry)
        self.acks = Acks(self.topic)
        self.core = story.new_core(self.acks, story.limits, story.policies)
        self.joined = 0
        self.permits: dict[int, int] = {}
        self.writable: dict[int, bool] = {}
        self.ranges: dict[int, tuple[int, int]] = {}
        self.holder: dict[Position, int] = {}
        self.was_sent: set[Position] = set()  # since the core started over
        self.begun: dict[str, tuple[int, tuple[Position, ...]]] = {}  # chunked messages: who got the first chunks, and which
        self.reads: list[tuple[Read | ReadBack, int]] = []  # under way, and how many entries there were when it was asked for
        self.failed = False
        self.now_ms = 1_000_000
        self.settle()

    # Copies

    @staticmethod
    def unpickled(pickled: bytes, story: Story) -> Scope:
        scope: Scope = pickle.loads(pickled)
        scope.story = story
        return scope

    def pickled(self) -> bytes:
        story, self.story = self.story, None  # type: ignore[assignment]
        try:
            return pickle.dumps(self, protocol=5)
        finally:
            self.story = story

    # Events

    def events(self) -> Iterator[Event]:
        left = {name for name, times in self.left.items() if times}
        if "join" in left and len(self.permits) < (len(self.story.ranges) or MAX_CONSUMERS):
            yield ("join",)
        for consumer, permits in self.permits.items():
            if "leave" in left:
                yield "leave", consumer
            if "permits" in left and permits <= 0:
                for messages in self.story.flow:
                    yield "permits", consumer, messages
            if "socket" in left or not self.writable[consumer]:
                yield "socket", consumer
        unacked = [p for p in self.topic.positions() if p not in self.acks.acknowledged]
        for position in unacked:
            if position in self.holder:
                if "ack" in left:
                    yield "ack", position
                if "nack" in left:
                    yield "nack", position
            if "foreign_ack" in left:
                yield "foreign_ack", position
        for index, (read, there) in enumerate(self.reads):
            yield "read", index, 9
            yield "read", index, 1
            if isinstance(read, Read) and there <= read.position.entry_id < len(self.topic.positions()):
                yield "read", index, 0  # answered as it was when it was asked for
            if "fail" in left:
                yield "fail", index
        if self.failed:
            yield ("retry",)
        if "skip" in left and unacked:
            yield ("skip",)
        if "seek" in left:
            yield ("seek",)
        if "time" in left:
            yield ("time",)
        if len(self.topic.positions()) < len(self.story.entries):
            yield ("append",)

    def apply(self, event: Event) -> None:
        name, *arguments = event
        if name in self.left:
            self.left[name] = max(0, self.left[name] - 1)
        getattr(self, f"_do_{name}")(*arguments)
        self.settle()

    def _do_join(self) -> None:
        self.joined += 1
        consumer, ranges = self.joined, None
        self.permits[consumer], self.writable[consumer] = 0, True
        if self.story.ranges:
            self.ranges[consumer] = next(r for r in self.story.ranges if r not in self.ranges.values())
            ranges = [self.ranges[consumer]]
        self.core.on_consumer_joined(consumer, name=f"c{consumer}", hash_ranges=ranges)

    def _do_leave(self, consumer: int) -> None:
        del self.permits[consumer], self.writable[consumer]
        self.ranges.pop(consumer, None)
        self.holder = {p: holder for p, holder in self.holder.items() if holder != consumer}
        if not self.permits:
            self.was_sent.clear()
        self.core.on_consumer_left(consumer)

    def _do_permits(self, consumer: int, messages: int) -> None:
        self.permits[consumer] += messages
        self.core.on_permits(consumer, messages)

    def _do_socket(self, consumer: int) -> None:
        self.writable[consumer] = not self.writable[consumer]
        self.core.on_writable(consumer, self.writable[consumer])

    def _do_ack(self, position: Position) -> None:
        self._acknowledge(position, self.holder.get(position))

    def _do_foreign_ack(self, position: Position) -> None:
        holder = self.holder.get(position)
        self._acknowledge(position, next((consumer for consumer in self.permits if consumer != holder), None))

    def _acknowledge(self, position: Position, by: int | None) -> None:
        self.acks.acknowledge(position)
        self.holder.pop(position, None)
        self._forget_part(position)
        self.core.on_acked(by, [position])

    def _do_nack(self, position: Position) -> None:
        """Of a chunked message: all of it that the consumer has (protocol.md §16)."""
        consumer, chunk = self.holder[position], self.topic[position].chunk
        positions = [position]
        if chunk is not None:
            positions = [p for p in self.chunks_of(chunk.uuid) if self.holder.get(p) == consumer]
        for refused in positions:
            del self.holder[refused]
        self.core.on_redeliver(consumer, positions)

    def _do_read(self, index: int, entries: int) -> None:
        read, _ = self.reads.pop(index)
        if isinstance(read, Read):
            groups = self.topic.read(read.position, entries)
            to_end = not groups or self.topic.ends_with(groups[-1])
            self.core.on_read(read, groups, to_end=to_end)
        else:
            wanted = Position(read.ledger_id, read.first)
            self.core.on_read(read, self.topic.read(wanted, min(entries, read.last - read.first + 1)), to_end=False)

    def _do_fail(self, index: int) -> None:
        read, _ = self.reads.pop(index)
        self.failed |= self.core.on_read_failed(read)

    def _do_retry(self) -> None:
        self.failed = False
        self.core.on_retry()

    def _do_skip(self) -> None:
        position = next(p for p in self.topic.positions() if p not in self.acks.acknowledged)
        self.acks.acknowledge(position)
        self.holder.pop(position, None)
        self._forget_part(position)
        self.core.on_cursor_moved()

    def _do_seek(self) -> None:
        for consumer in list(self.permits):
            self._do_leave(consumer)
        self.acks.reset(Position(LEDGER, 0))
        self.begun.clear()
        self.core.on_rewind()

    def _do_time(self) -> None:
        self.now_ms += 1000

    def _do_append(self) -> None:
        self.topic.append(self.story.entries[len(self.topic.positions())])
        self.core.on_appended()

    # The core, driven as `Dispatcher` does

    def settle(self) -> None:
        self.core.on_clock(self.now_ms)
        for _ in range(200):
            effect = self.core.next_effect()
            if effect is None:
                break
            match effect:
                case Send():
                    self._sent(effect)
                case SendAll(sends):
                    assert len({send.consumer for send in sends}) == len(sends) > 0
                    for send in sends:
                        self._sent(send)
                case Read() | ReadBack():
                    self.reads.append((effect, len(self.topic.positions())))
                    if not self.story.slow_reads:
                        self._do_read(len(self.reads) - 1, 9)
        else:
            raise AssertionError(f"endless effects: {self.core!r}")
        self._forget_what_makes_no_difference()
        self.check()

    def _forget_what_makes_no_difference(self) -> None:
        """Tickets only rise: states that differ in nothing else are the same."""
        forward, back = self.core._forward, self.core._back
        kept: list[tuple[Read | ReadBack, int]] = []
        for read, there in self.reads:
            if isinstance(read, ReadBack) and back.reading and read.ticket == back._ticket:
                kept.append((ReadBack(read.ledger_id, read.first, read.last, 0), 0))
            elif isinstance(read, Read) and forward.reading and read.ticket == forward._ticket:
                kept.append((Read(read.position, 0, 0 if read.appended_before == forward._appended else -1), there))
        self.reads = kept
        forward._ticket = back._ticket = forward._appended = 0

    # The model

    def of_hash(self, key_hash: int) -> list[Position]:
        return [p for p in self.topic.positions() if self.topic[p].key_hash == key_hash]

    def chunks_of(self, uuid: str) -> list[Position]:
        topic = self.topic
        return [p for p in topic.positions() if (chunk := topic[p].chunk) is not None and chunk.uuid == uuid]

    def is_delayed(self, position: Position) -> bool:
        return self.topic[position].deliver_at_ms > self.now_ms

    def is_unsent(self, position: Position) -> bool:
        return position not in self.acks.acknowledged and position not in self.holder

    def owner(self, key_hash: int) -> int | None:
        if self.story.ranges:
            return next((c for c, (first, last) in self.ranges.items() if first <= key_hash <= last), None)
        return list(self.permits)[key_hash % len(self.permits)] if self.permits else None

    def receivers(self, key_hash: int) -> list[int | None]:
        """Its owner; or who was given the first chunks of a message of this hash, and not yet the last one."""
        found: list[int | None] = [
            consumer
            for consumer, parts in self.begun.values()
            if self.topic[parts[0]].key_hash == key_hash and consumer in self.permits
        ]
        return found[:1] or [self.owner(key_hash)]

    def _note_chunk(self, consumer: int, position: Position) -> None:
        if (chunk := self.topic[position].chunk) is not None:
            if chunk.is_last:
                self.begun.pop(chunk.uuid, None)
            else:
                first, parts = self.begun.get(chunk.uuid, (0, ()))
                parts = tuple(sorted({*parts, position})) if first in self.permits else (position,)
                self.begun[chunk.uuid] = first if first in self.permits else consumer, parts

    def _forget_part(self, position: Position) -> None:
        left = {u: (c, tuple(p for p in parts if p != position)) for u, (c, parts) in self.begun.items()}
        self.begun = {uuid: (consumer, parts) for uuid, (consumer, parts) in left.items() if parts}

    def _sent(self, send: Send) -> None:
        consumer, counted = send.consumer, send.counted
        assert self.writable[consumer]
        positions = [Position(counted.ledger_id, e) for first, last in send.runs for e in range(first, last + 1)]
        assert positions, "an empty send"
        assert send.messages == sum(self.topic[position].messages for position in positions)
        for position in positions:
            assert self.permits[consumer] > 0, "an entry was sent without a permit"
            assert position not in self.holder, f"{position} is outstanding twice (H9)"
            assert position not in self.acks.acknowledged, f"{position} is acknowledged (H7)"
            assert not self.is_delayed(position), f"{position} is sent before its time"
            if isinstance(self.core, KeySharedDispatch):
                self._check_key(consumer, position)
            elif (chunk := self.topic[position].chunk) is None:
                again = [p for p in self.was_sent if self.is_unsent(p) and self.topic[p].chunk is None]
                is_new = position not in self.was_sent and not self.topic[position].deliver_at_ms
                assert not (is_new and again), f"{position} is new, and goes before {again}"
            else:
                earlier = [p for p in self.chunks_of(chunk.uuid) if p < position and p not in self.acks.acknowledged]
                assert all(self.holder.get(p) == consumer for p in earlier), "chunks at two consumers, or out of order"
            self._note_chunk(consumer, position)
            self.permits[consumer] -= self.topic[position].messages
            self.holder[position] = consumer
            self.was_sent.add(position)

    def _check_key(self, consumer: int, position: Position) -> None:
        key_hash = self.topic[position].key_hash
        same = self.of_hash(key_hash)
        overtaken = [p for p in same if p < position and self.is_unsent(p) and not self.is_delayed(p)]
        assert not overtaken, f"{position} overtakes {overtaken} (H10)"
        assert consumer in self.receivers(key_hash), f"{position} goes to {consumer}, which does not own its hash"
        if self.story.new_core is not out_of_order:
            elsewhere = [p for p in same if self.holder.get(p, consumer) != consumer]
            assert not elsewhere, f"{position} goes to {consumer} while {elsewhere} are with another (H10)"

    def able(self) -> list[int]:
        blocked = {consumer for consumer in self.permits if self.core.is_blocked(consumer)}
        return [c for c, permits in self.permits.items() if permits > 0 and self.writable[c] and c not in blocked]

    def check(self) -> None:
        """After each event: figures are right, reasons are true, and whatever could be sent was sent."""
        for consumer, permits in self.permits.items():
            assert self.core.permits(consumer) == permits
            held = [self.topic[p] for p, holder in self.holder.items() if holder == consumer]
            counted = sum(entry.messages for entry in held if entry.chunk is None or entry.chunk.is_last)
            assert self.core.unacked_messages(consumer) == counted
        able, reasons = self.able(), self.core.why()
        assert reasons, f"does nothing and cannot say why: {self.core!r}"
        names = [f"c{consumer}" for consumer in able]
        assert not [why for why in reasons if why.idle in CANNOT and why.consumer in names], f"{reasons}: they can"
        idle = {why.idle for why in reasons}
        assert Idle.KEY_DRAINING not in idle or self.holder, "draining, and nobody holds anything"
        assert bool(self.reads) == (Idle.READING in idle) or not able
        if able and not idle & WAITS:
            unsent = [p for p in self.topic.positions() if self.is_unsent(p) and not self.is_delayed(p)]
            missed = [p for p in unsent if self.must_go(p, able)]
            if idle & FULL:  # nothing new is looked at; what was looked at goes on
                missed = [p for p in missed if p < self.core.read_position]
            assert not missed, f"{missed} could be sent to {able}, idle because {idle}"

    def must_go(self, position: Position, able: list[int]) -> bool:
        entry = self.topic[position]
        if isinstance(self.core, SharedDispatch):
            return entry.chunk is None or len(able) == len(self.permits)
        same = self.of_hash(entry.key_hash)
        receivers = self.receivers(entry.key_hash)
        if any(receiver not in able for receiver in receivers):
            return False
        if self.story.new_core is not out_of_order:
            return all(self.holder.get(p, receiver) == receiver for p in same for receiver in receivers)
        return True

    # A fair end

    def check_end(self) -> None:
        """Consumers that behave get everything, whatever happened before; then nothing is remembered of it."""
        self.left = dict.fromkeys(self.left, 9)
        while len(self.topic.positions()) < len(self.story.entries):
            self.apply(("append",))
        while not self.permits or any(self.owner(entry.key_hash) is None for entry in self.story.entries):
            self.apply(("join",))
        for _ in range(3 * len(self.story.entries) + 6):
            self.apply(("time",))
            if self.failed:
                self.apply(("retry",))
            while self.reads:
                self.apply(("read", 0, 9))
            for consumer in self.permits:
                self.apply(("permits", consumer, 1))
                if not self.writable[consumer]:
                    self.apply(("socket", consumer))
            for position, consumer in sorted(self.holder.items()):
                chunk = self.topic[position].chunk
                done = self.acks.acknowledged
                if chunk is None or all(p in done or self.holder.get(p) == consumer for p in self.chunks_of(chunk.uuid)):
                    self.apply(("ack", position))
            if len(self.acks.acknowledged) == len(self.story.entries) and not self.reads:
                break
        left = [p for p in self.topic.positions() if p not in self.acks.acknowledged]
        assert not left, f"{left} are never delivered (H5): {[str(why) for why in self.core.why()]}"
        assert not (remembered := leftovers(self.core)), f"everything is acknowledged, and {remembered} are remembered"


def leftovers(core: Core) -> dict[str, Any]:
    """What a core still knows of entries: nothing, when all of them are acknowledged. (What it has read it keeps until somebody can
    take messages: no more than it may read ahead.)"""
    found: dict[str, Any] = {
        "delayed": len(core._delayed),
        "outstanding": [holder.outstanding for holder in core._holders if holder.outstanding],
        "unacked": core._holders.unacked_messages,
        "to send again": core.replay_entries,
    }
    if isinstance(core, KeySharedDispatch):
        places = core._places
        found |= {"held": places._held, "pins": places._pins, "chunks": len(places._chunks)}
        found |= {"keys": list(places.waiting), "doors": list(places.waiting.doors())}
    else:
        found |= {"chunks": len(core._chunks), "reserved": [holder.reserved for holder in core._holders if holder.reserved]}
    return {name: what for name, what in found.items() if what}


@dataclass(frozen=True)
class Searched:
    states: int
    complete: bool


def search(story: Story, *, max_states: int = 1_000_000, every_end: int = 1) -> Searched:
    """All states that can be reached, nearest first. `every_end`: in one of so many, a fair end is tried."""
    start = Scope(story)
    seen = {start.pickled()}
    queue: deque[tuple[bytes, tuple[Event, ...]]] = deque([(start.pickled(), ())])
    while queue:
        pickled, path = queue.popleft()
        for event in list(Scope.unpickled(pickled, story).events()):
            following = Scope.unpickled(pickled, story)
            try:
                following.apply(event)
                key = following.pickled()
                if key in seen:
                    continue
                seen.add(key)
                if len(seen) % every_end == 0:
                    following.check_end()
            except Exception as error:
                raise AssertionError(f"after {[*path, event]}: {error!r}") from error
            if len(seen) >= max_states:
                return Searched(len(seen), complete=False)
            queue.append((key, (*path, event)))
    return Searched(len(seen), complete=True)


def walk(story: Story, seed: int, events: int) -> None:
    """One long history, at random."""
    chance, path = random.Random(seed), []
    scope = Scope(story)
    try:
        for _ in range(events):
            if not (possible := list(scope.events())):
                break
            path.append(chance.choice(possible))
            scope.apply(path[-1])
        scope.check_end()
    except Exception as error:
        raise AssertionError(f"seed {seed}, after {path}: {error!r}") from error
