"""Thirty thousand entries through the cores that share them, while consumers come and go: nothing is remembered at the end."""

from __future__ import annotations

import pickle
import random
from collections.abc import Mapping

import pytest
from pyroaring import BitMap

from cepheid_broker.dispatch.counted_group import Chunk, CountedGroup
from cepheid_broker.dispatch.dispatch_key_shared import KeySharedDispatch
from cepheid_broker.dispatch.dispatch_shared import SharedDispatch
from cepheid_broker.dispatch.effects import DispatchLimits, DispatchPolicies, Read, ReadBack, Send, SendAll
from cepheid_broker.dispatch.key_owners import AutoSplit
from cepheid_metadata import Position
from cepheid_rpc import EntryGroup
from tests.broker.dispatch_scope import Core, leftovers

pytestmark = pytest.mark.slow

ENTRIES = 30_000
GROUP = 500
KEYS = 3000
CONSUMERS = 12
LEDGER = 3
LIMITS = DispatchLimits(read_ahead_bytes=200_000, max_waiting_entries=5000, max_delayed_entries=1000)
POLICIES = DispatchPolicies(max_unacked_per_consumer=3000, max_unacked_per_subscription=20_000)


class OneLedger:
    """`AckView` with bitmaps: this is no test of cursors, and has no time for slow ones."""

    def __init__(self) -> None:
        self.acked = BitMap()
        self.counts: dict[int, int] = {}
        self._first = 0

    def acknowledge(self, entry_id: int) -> None:
        self.acked.add(entry_id)
        self.counts.pop(entry_id, None)

    def first_unacknowledged(self) -> Position:
        while self._first in self.acked:
            self._first += 1
        return Position(LEDGER, self._first)

    def unacknowledged_runs(self, ledger_id: int, first: int, last: int) -> list[tuple[int, int]]:
        wanted = BitMap(range(first, last + 1)) - self.acked
        runs: list[tuple[int, int]] = []
        for entry_id in wanted:
            if runs and runs[-1][1] == entry_id - 1:
                runs[-1] = (runs[-1][0], entry_id)
            else:
                runs.append((entry_id, entry_id))
        return runs

    def redelivery_counts_in(self, ledger_id: int) -> Mapping[int, int]:
        return self.counts

    def count_redelivery(self, ledger_id: int, entry_id: int) -> None:
        if entry_id not in self.acked:
            self.counts[entry_id] = self.counts.get(entry_id, 0) + 1


class Churn:
    def __init__(self, kind: str, seed: int) -> None:
        self.chance = random.Random(seed)
        self.acks = OneLedger()
        if kind == "shared":
            self.core: Core = SharedDispatch(self.acks, LIMITS, POLICIES)
        else:
            self.core = KeySharedDispatch(self.acks, LIMITS, POLICIES, AutoSplit())
        self.new_core_bytes = self.core_bytes()
        self.counts: list[int] = []
        self.hashes: list[int] = []
        self.chunks: dict[int, Chunk] = {}
        self.due_ms: dict[int, int] = {}
        self.held: dict[int, dict[int, None]] = {}  # consumer → entries
        self.now_ms = 0
        self.joined = 0

    def core_bytes(self) -> int:
        acks, self.core._acks = self.core._acks, None  # type: ignore[assignment]
        size_bytes = len(pickle.dumps(self.core))
        self.core._acks = acks
        return size_bytes

    # The topic

    def append(self, entries: int) -> None:
        for _ in range(entries):
            entry_id = len(self.counts)
            self.counts.append(self.chance.choice((1, 1, 1, 20)))
            self.hashes.append(self.chance.randrange(KEYS) * 21)
            if self.chance.random() < 0.02:
                self.due_ms[entry_id] = self.now_ms + self.chance.randrange(1, 2000)
            elif self.chance.random() < 0.02:  # a message of two chunks, of which the second may never come
                self.counts[-1] = 1
                self.chunks[entry_id] = Chunk(f"p-{entry_id}", is_last=False)
                if self.chance.random() < 0.8:
                    self.counts.append(1)
                    self.hashes.append(self.hashes[-1])
                    self.chunks[entry_id + 1] = Chunk(f"p-{entry_id}", is_last=True)
        self.core.on_appended()

    def group(self, first: int, last: int) -> CountedGroup:
        count, entries = last - first + 1, range(first, last + 1)
        return CountedGroup(
            EntryGroup(LEDGER, first, [100 * (i + 1) for i in range(count)], b""),
            self.counts[first : last + 1],
            {e: self.chunks[e] for e in entries if e in self.chunks} or None,
            deliver_at_ms={e: self.due_ms[e] for e in entries if e in self.due_ms} or None,
            hashes=self.hashes[first : last + 1],
        )

    def settle(self) -> None:
        self.core.on_clock(self.now_ms)
        while (effect := self.core.next_effect()) is not None:
            match effect:
                case Send():
                    self.sent(effect)
                case SendAll(sends):
                    for send in sends:
                        self.sent(send)
                case Read() | ReadBack():
                    self.answer(effect)

    def answer(self, read: Read | ReadBack) -> None:
        if self.chance.random() < 0.02:
            self.core.on_read_failed(read)
            self.core.on_retry()
            return
        end = len(self.counts) - 1
        first = read.position.entry_id if isinstance(read, Read) else read.first
        last = min(end, first + GROUP - 1 if isinstance(read, Read) else read.last)
        self.core.on_read(read, [self.group(first, last)] if first <= last else [], to_end=last == end)

    def sent(self, send: Send) -> None:
        entries = [entry_id for first, last in send.runs for entry_id in range(first, last + 1)]
        assert not any(entry_id in held for held in self.held.values() for entry_id in entries), "outstanding twice (H9)"
        self.held[send.consumer].update(dict.fromkeys(entries))

    # What happens

    def turn(self) -> None:
        event = self.chance.random()
        if len(self.held) < 2 or (event < 0.05 and len(self.held) < CONSUMERS):
            self.joined += 1
            self.held[self.joined] = {}
            self.core.on_consumer_joined(self.joined, name=f"c{self.joined}", priority=self.joined * (self.joined % 3))
        elif event < 0.1:
            consumer = self.chance.choice(list(self.held))
            del self.held[consumer]
            self.core.on_consumer_left(consumer)
        elif event < 0.13:
            self.skip(50)
        elif event < 0.135:
            self.seek()
        self.now_ms += 50
        for consumer in list(self.held):
            self.work(consumer)
        self.settle()

    def work(self, consumer: int) -> None:
        """It acknowledges most of what it has, refuses some, and asks for more."""
        self.core.on_writable(consumer, self.chance.random() < 0.9)
        entries = list(self.held[consumer])
        refused = [e for e in entries if self.chance.random() < 0.05]
        done = [e for e in entries if e not in refused and self.chance.random() < 0.7]
        for entry_id in refused:
            del self.held[consumer][entry_id]
        self.core.on_redeliver(consumer, [Position(LEDGER, e) for e in refused])
        self.acknowledge(self.chance.choice([consumer, consumer, *self.held]), consumer, done)
        self.core.on_permits(consumer, self.chance.randrange(1, 400))

    def acknowledge(self, by: int, holder: int, entries: list[int]) -> None:
        for entry_id in entries:
            self.acks.acknowledge(entry_id)
            del self.held[holder][entry_id]
        self.core.on_acked(by, [Position(LEDGER, e) for e in entries])

    def skip(self, entries: int) -> None:
        first = self.acks.first_unacknowledged().entry_id
        for entry_id in range(first, min(first + entries, len(self.counts))):
            self.acks.acknowledge(entry_id)
            for held in self.held.values():
                held.pop(entry_id, None)
        self.core.on_cursor_moved()

    def seek(self) -> None:
        """A little back."""
        for consumer in list(self.held):
            self.core.on_consumer_left(consumer)
        self.held.clear()
        target = max(0, self.acks.first_unacknowledged().entry_id - 300)
        self.acks.acked = BitMap(range(target))
        self.acks._first = target
        self.core.on_rewind()


@pytest.mark.parametrize("kind", ["shared", "key_shared"])
def test_nothing_is_remembered_of_entries_and_consumers_that_are_gone(kind: str) -> None:
    churn = Churn(kind, seed=4)
    while len(churn.counts) < ENTRIES:
        churn.append(GROUP)
        for _ in range(3):
            churn.turn()
    for _ in range(3000):
        if churn.acks.first_unacknowledged().entry_id >= len(churn.counts):
            break
        churn.turn()
    assert churn.acks.first_unacknowledged().entry_id == len(churn.counts), "all are delivered and acknowledged"
    churn.now_ms += 10_000
    for consumer in churn.held:
        churn.core.on_writable(consumer, True)
        churn.core.on_permits(consumer, 1_000_000)
    churn.settle()
    assert leftovers(churn.core) == {}
    for consumer in list(churn.held):
        churn.core.on_consumer_left(consumer)
    assert churn.core_bytes() < churn.new_core_bytes + 200, "as small as a new one"
