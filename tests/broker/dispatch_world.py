"""A topic, cursors and sockets in memory for the dispatch cores: performs their effects, reads answered at once or later."""

from __future__ import annotations

from cepheid_broker.counted_group import Chunk, CountedGroup
from cepheid_broker.dispatch import DispatchLimits, Effect, Read, ReadBack, Send
from cepheid_broker.dispatch_exclusive import ExclusiveDispatch
from cepheid_broker.dispatch_shared import SharedDispatch
from cepheid_broker.position import Position
from cepheid_rpc import EntryGroup

ENTRY_BYTES = 100


class Topic:
    """Ledgers of entries; each entry has a number of messages and perhaps is a chunk."""

    def __init__(self) -> None:
        self.ledgers: dict[int, list[tuple[int, Chunk | None]]] = {3: []}
        self.trimmed: set[int] = set()

    def append(self, messages: int, chunk: Chunk | None = None) -> None:
        self.ledgers[max(self.ledgers)].append((messages, chunk))

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

    def _group(self, ledger: int, first: int, last: int) -> CountedGroup:
        entries = self.ledgers[ledger][first : last + 1]
        group = EntryGroup(ledger, first, [ENTRY_BYTES * (i + 1) for i in range(len(entries))], bytes(ENTRY_BYTES * len(entries)))
        chunks = {first + i: chunk for i, (_, chunk) in enumerate(entries) if chunk is not None}
        return CountedGroup(group, [messages for messages, _ in entries], chunks or None)


class Acks:
    def __init__(self, topic: Topic) -> None:
        self._topic = topic
        self.acknowledged: set[Position] = set()

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


class World:
    """Drives one core the way `Subscription` does."""

    def __init__(self, core_type: type[ExclusiveDispatch] | type[SharedDispatch], *, max_unacked: int = 40) -> None:
        self.topic = Topic()
        self.acks = Acks(self.topic)
        limits = DispatchLimits(
            read_ahead_bytes=12 * ENTRY_BYTES,
            max_unacked_messages=max_unacked,
            round_robin_entries=3,
            read_back_entries=7,
            read_back_gap=2,
            max_chunked_messages=5,
        )
        self.core = core_type(self.acks, limits)
        self.reads: list[Read | ReadBack] = []  # under way
        self.found_nothing: set[int] = set()  # tickets of reads that were asked for when there was nothing to read
        self.failed: list[int] = []
        self.sent: list[tuple[int, Position, int]] = []  # consumer, position, redelivery count
        self.reads_at_once = True

    def settle(self) -> None:
        """Performs effects until the core has none."""
        for _ in range(10_000):
            effect = self.core.next_effect()
            if effect is None:
                assert self.core.why_idle() is not None, f"does nothing and cannot say why: {self.core!r}"
                return
            self._perform(effect)
        raise AssertionError(f"endless effects: {self.core!r}")

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Send(consumer, counted, runs, messages, counts):
                positions = [Position(counted.ledger_id, e) for first, last in runs for e in range(first, last + 1)]
                assert positions, "an empty send"
                assert messages == sum(counted.messages_in(e.entry_id, e.entry_id) for e in positions)
                self.on_sent(consumer, positions)
                self.sent += [(consumer, position, counts.get(position.entry_id, 0)) for position in positions]
            case Read() | ReadBack():
                self.reads.append(effect)
                if isinstance(effect, Read) and not self.topic.read(effect.position, 1):
                    self.found_nothing.add(effect.ticket)
                if self.reads_at_once:
                    self.finish_read(0)

    def on_sent(self, consumer: int, positions: list[Position]) -> None:
        """Hook for the models."""

    def finish_read(self, index: int, *, max_entries: int = 5, as_asked: bool = False) -> None:
        """`as_asked`: nothing, if there was nothing when the read was asked for."""
        read = self.reads.pop(index)
        if isinstance(read, Read):
            stale = as_asked and read.ticket in self.found_nothing
            self.core.on_read(read, [] if stale else self.topic.read(read.position, max_entries))
        else:
            assert isinstance(self.core, SharedDispatch)
            wanted = Position(read.ledger_id, read.first)
            self.core.on_read_back(read, self.topic.read(wanted, min(max_entries, read.last - read.first + 1)))

    def fail_read(self, index: int) -> None:
        read = self.reads.pop(index)
        if isinstance(read, Read):
            retry = self.core.on_read_failed(read.ticket)
        else:
            assert isinstance(self.core, SharedDispatch)
            retry = self.core.on_read_back_failed(read.ticket)
        if retry:
            self.failed.append(1)

    def append(self, messages: int, chunk: Chunk | None = None) -> None:
        self.topic.append(messages, chunk)
        self.core.on_appended()
