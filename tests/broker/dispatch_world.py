"""A topic, cursors and sockets in memory for the dispatch cores: performs their effects, reads answered at once or later."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cepheid_broker.dispatch.counted_group import Chunk, CountedGroup
from cepheid_broker.dispatch.effects import (
    Announce,
    DispatchCore,
    DispatchLimits,
    DispatchPolicies,
    Effect,
    Idle,
    Read,
    ReadBack,
    Send,
    SendAll,
)
from cepheid_metadata import Position
from cepheid_rpc import EntryGroup

ENTRY_BYTES = 100
_MOST_EFFECTS = 1_000
"""Until a core must have none. Random histories need 26, a test with 600 entries more than 600. With many more, a core that never
ends takes minutes to be shrunk."""


LIMITS = DispatchLimits(
    read_ahead_bytes=12 * ENTRY_BYTES,
    round_robin_entries=3,
    read_back_entries=7,
    read_back_gap=2,
    max_chunked_messages=5,
    max_waiting_entries=12,
    max_delayed_entries=8,
)


@dataclass(frozen=True, slots=True)
class Entry:
    messages: int = 1
    chunk: Chunk | None = None
    deliver_at_ms: int = 0
    key_hash: int = 0


class Topic:
    """Ledgers of entries."""

    def __init__(self) -> None:
        self.ledgers: dict[int, list[Entry]] = {3: []}

    def append(self, entry: Entry) -> Position:
        last = max(self.ledgers)
        self.ledgers[last].append(entry)
        return Position(last, len(self.ledgers[last]) - 1)

    def __getitem__(self, position: Position) -> Entry:
        return self.ledgers[position.ledger_id][position.entry_id]

    def roll(self) -> None:
        self.ledgers[max(self.ledgers) + 2] = []

    def positions(self) -> list[Position]:
        return [Position(ledger, entry) for ledger in sorted(self.ledgers) for entry in range(len(self.ledgers[ledger]))]

    def read(self, position: Position, max_entries: int) -> list[CountedGroup]:
        groups = []
        for ledger in sorted(self.ledgers):
            entries = self.ledgers[ledger]
            first = position.entry_id if ledger == position.ledger_id else 0
            first = max(first, 0)
            if ledger < position.ledger_id or first >= len(entries) or max_entries <= 0:
                continue
            last = min(len(entries), first + max_entries) - 1
            groups.append(self._group(ledger, first, last))
            max_entries -= last - first + 1
        return groups

    def ends_with(self, group: CountedGroup) -> bool:
        return Position(group.ledger_id, group.last) == max(self.positions())

    def _group(self, ledger: int, first: int, last: int) -> CountedGroup:
        entries = list(enumerate(self.ledgers[ledger][first : last + 1], first))
        group = EntryGroup(ledger, first, [ENTRY_BYTES * (i + 1) for i in range(len(entries))], bytes(ENTRY_BYTES * len(entries)))
        return CountedGroup(
            group,
            [entry.messages for _, entry in entries],
            {entry_id: entry.chunk for entry_id, entry in entries if entry.chunk is not None} or None,
            deliver_at_ms={entry_id: entry.deliver_at_ms for entry_id, entry in entries if entry.deliver_at_ms} or None,
            hashes=[entry.key_hash for _, entry in entries],
        )


class Acks:
    def __init__(self, topic: Topic) -> None:
        self._topic = topic
        self.acknowledged: set[Position] = set()
        self.counts: dict[int, dict[int, int]] = {}

    def first_unacknowledged(self) -> Position:
        for position in self._topic.positions():
            if position not in self.acknowledged:
                return position
        ledger = max(self._topic.ledgers)
        return Position(ledger, len(self._topic.ledgers[ledger]))

    def unacknowledged_runs(self, ledger_id: int, first: int, last: int) -> list[tuple[int, int]]:
        runs: list[tuple[int, int]] = []
        for entry in range(first, last + 1):
            if Position(ledger_id, entry) in self.acknowledged:
                continue
            if runs and runs[-1][1] == entry - 1:
                runs[-1] = (runs[-1][0], entry)
            else:
                runs.append((entry, entry))
        return runs

    def acknowledge(self, position: Position) -> None:
        self.acknowledged.add(position)
        self.counts.get(position.ledger_id, {}).pop(position.entry_id, None)

    def reset(self, position: Position) -> None:
        """Everything before is acknowledged, nothing from there on; counts from there on stay."""
        self.acknowledged = {p for p in self._topic.positions() if p < position}
        for p in self.acknowledged:
            self.counts.get(p.ledger_id, {}).pop(p.entry_id, None)

    def redelivery_counts_in(self, ledger_id: int) -> Mapping[int, int]:
        return self.counts.get(ledger_id, {})

    def count_redelivery(self, ledger_id: int, entry_id: int) -> None:
        if Position(ledger_id, entry_id) not in self.acknowledged:
            counts = self.counts.setdefault(ledger_id, {})
            counts[entry_id] = counts.get(entry_id, 0) + 1


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


class World:
    """Drives one core the way `Dispatcher` does."""

    def __init__(self, new_core: Callable[[Acks, DispatchLimits, DispatchPolicies], DispatchCore], **policies: int) -> None:
        self.topic = Topic()
        self.acks = Acks(self.topic)
        self.limits = LIMITS
        self.core = new_core(self.acks, LIMITS, DispatchPolicies(**policies))  # type: ignore[arg-type]
        self.reads: list[Read | ReadBack] = []  # under way
        self.found_nothing: set[int] = set()  # tickets of reads that were asked for when there was nothing to read
        self.failed: list[int] = []
        self.sent: list[tuple[int, Position, int]] = []  # consumer, position, redelivery count
        self.announced: dict[int, bool] = {}
        self.reads_at_once = True
        self.now_ms = 1_000_000

    @property
    def idle(self) -> Idle | None:
        """The first reason; None: there is something to do."""
        reasons = self.core.why()
        return reasons[0].idle if reasons else None

    def settle(self) -> None:
        """Performs effects until the core has none."""
        self.core.on_clock(self.now_ms)
        for _ in range(_MOST_EFFECTS):
            effect = self.core.next_effect()
            if effect is None:
                reasons = self.core.why()
                assert reasons, f"does nothing and cannot say why: {self.core!r}"
                assert all(why.until and str(why) for why in reasons)
                return
            self._perform(effect)
        raise AssertionError(f"endless effects: {self.core!r}")

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Send():
                self._send(effect)
            case SendAll(sends):
                assert len({send.consumer for send in sends}) == len(sends) > 0
                for send in sends:
                    self._send(send)
            case Announce(consumer, is_active):
                self.announced[consumer] = is_active
            case Read() | ReadBack():
                self.reads.append(effect)
                if isinstance(effect, Read) and not self.topic.read(effect.position, 1):
                    self.found_nothing.add(effect.ticket)
                if self.reads_at_once:
                    self.finish_read(0)

    def _send(self, send: Send) -> None:
        counted, counts = send.counted, send.redelivery_counts
        positions = [Position(counted.ledger_id, e) for first, last in send.runs for e in range(first, last + 1)]
        assert positions, "an empty send"
        assert send.messages == sum(counted.messages_in(e.entry_id, e.entry_id) for e in positions)
        self.on_sent(send.consumer, positions)
        self.sent += [(send.consumer, position, counts.get(position.entry_id, 0)) for position in positions]

    def on_sent(self, consumer: int, positions: list[Position]) -> None:
        """Hook for the models."""

    def finish_read(self, index: int, *, max_entries: int = 5, as_asked: bool = False) -> None:
        """`as_asked`: nothing, if there was nothing when the read was asked for."""
        read = self.reads.pop(index)
        if isinstance(read, Read):
            stale = as_asked and read.ticket in self.found_nothing
            groups = [] if stale else self.topic.read(read.position, max_entries)
            self.core.on_read(read, groups, to_end=not groups or self.topic.ends_with(groups[-1]))
        else:
            wanted = Position(read.ledger_id, read.first)
            self.core.on_read(read, self.topic.read(wanted, min(max_entries, read.last - read.first + 1)), to_end=False)

    def fail_read(self, index: int) -> None:
        if self.core.on_read_failed(self.reads.pop(index)):
            self.failed.append(1)

    def append(self, messages: int = 1, chunk: Chunk | None = None, **fields: int) -> Position:
        position = self.topic.append(Entry(messages, chunk, **fields))
        # A driver knows most of the time what was appended, and sometimes only that something was.
        known = position.entry_id % 3 != 2
        send = self.core.on_appended(self.topic.read(position, 1)[0] if known else None)
        if send is not None:
            self._send(send)
        return position
