"""What a Shared subscription sends, without I/O: many consumers, each entry to one of them.

    topic ──reads──► pending ──┐
    replay ─reads─► read back ─┴─► the consumer whose turn it is ──Send──► outstanding ──acknowledged──► gone
       ▲                                                                       │
       └──────────── redelivery asked for (count + 1), consumer left ──────────┘

Rules
1. An entry is outstanding at one consumer at most. It becomes free again when redelivery is asked for or its consumer leaves.
2. What is to be sent again goes before what was never sent.
3. Consumers with the lowest priority number are served as long as one of them can take messages; equal ones in turn.
4. Chunks of one message go to one consumer, in order; while that one cannot take them they are reserved for it, and others go on.
5. A consumer that holds `max_unacked_messages` gets no more until half of them are acknowledged; its permits stay.
6. Redelivery counts live as long as the entry is unacknowledged and the topic is loaded; leaving does not raise them.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping

from cepheid_broker.counted_group import Chunk, CountedGroup, Run
from cepheid_broker.dispatch import AckView, DispatchLimits, Effect, ForwardReader, Idle, Pending, Read, ReadBack, Send
from cepheid_broker.position import Position
from cepheid_broker.position_set import PositionSet
from cepheid_broker.turns import SharedConsumer, Turns

_NO_LIMIT = 1 << 62
_NO_COUNTS: dict[int, int] = {}


class SharedDispatch:
    def __init__(self, acks: AckView, limits: DispatchLimits) -> None:
        self._acks = acks
        self._limits = limits
        self._forward = ForwardReader(limits.read_ahead_bytes, acks.first_unacknowledged())
        self._consumers: dict[int, SharedConsumer] = {}
        self._turns = Turns()
        self._replay = PositionSet()
        self._read_back: deque[Pending] = deque()
        self._read_back_ticket = 0
        self._reading_back = False
        self._read_back_failed = False
        self._redelivery_counts: dict[int, dict[int, int]] = {}
        self._chunk_owners: OrderedDict[str, SharedConsumer] = OrderedDict()

    def __repr__(self) -> str:
        return f"<SharedDispatch {len(self._consumers)} consumers, {len(self._replay)} to replay, idle: {self.why_idle()}>"

    # Events: consumers

    def on_consumer_joined(self, key: int, *, priority: int = 0) -> None:
        self._consumers[key] = SharedConsumer(key, priority)
        self._turns.add_priority(priority)

    def on_consumer_left(self, key: int) -> None:
        consumer = self._consumers.pop(key, None)
        if consumer is None:
            return
        consumer.left = True
        if not self._consumers:
            self.on_rewind()
            return
        for ledger_id, entries in consumer.outstanding.items():
            self._replay.add_all(ledger_id, entries)
        for position in consumer.reserved:
            self._replay.add(*position)
        self._chunk_owners = OrderedDict((uuid, owner) for uuid, owner in self._chunk_owners.items() if owner is not consumer)

    def on_permits(self, key: int, messages: int) -> None:
        if (consumer := self._consumers.get(key)) is not None:
            consumer.permits += messages
            self._turns.queue(consumer)

    def on_writable(self, key: int, writable: bool) -> None:
        if (consumer := self._consumers.get(key)) is not None:
            consumer.writable = writable
            self._turns.queue(consumer)

    # Events: entries

    def on_appended(self) -> None:
        self._forward.on_appended()

    def on_read(self, read: Read, groups: list[CountedGroup]) -> None:
        self._forward.on_read(read, groups)

    def on_read_back(self, read: ReadBack, groups: Iterable[CountedGroup]) -> None:
        """`groups` may start later than asked for: what is missing in front was trimmed and will never come."""
        if read.ticket != self._read_back_ticket:
            return
        self._reading_back = False
        expected = read.first
        for counted in groups:
            if counted.ledger_id != read.ledger_id or counted.first > read.last:
                break
            if counted.first > expected:
                self._give_up(read.ledger_id, expected, counted.first - 1)
            self._read_back.append(Pending(counted, max(read.first, counted.first)))
            expected = counted.last + 1
        if expected == read.first:  # nothing of the span exists any more
            self._give_up(read.ledger_id, read.first, read.last)

    def on_read_failed(self, ticket: int) -> bool:
        return self._forward.on_read_failed(ticket)

    def on_read_back_failed(self, ticket: int) -> bool:
        if ticket != self._read_back_ticket:
            return False
        self._reading_back, self._read_back_failed = False, True
        return True

    def on_retry(self) -> None:
        self._read_back_failed = False
        self._forward.on_retry()

    # Events: acknowledgements

    def on_acked(self, key: int | None, positions: Iterable[Position]) -> None:
        """`key`: who says it; an entry outstanding elsewhere is acknowledged all the same (protocol.md §15)."""
        acking = self._consumers.get(key) if key is not None else None
        for ledger_id, entry_id in positions:
            if acking is None or not self._settle(acking, ledger_id, entry_id):
                for consumer in self._consumers.values():
                    if consumer is not acking and self._settle(consumer, ledger_id, entry_id):
                        break
            if self._replay:
                self._replay.discard(ledger_id, entry_id)
            counts = self._redelivery_counts.get(ledger_id)
            if counts is not None and counts.pop(entry_id, None) is not None and not counts:
                del self._redelivery_counts[ledger_id]

    def on_redeliver(self, key: int, positions: Iterable[Position] | None) -> None:
        """None: everything outstanding at this consumer. What is not outstanding there is ignored (rule 1)."""
        consumer = self._consumers.get(key)
        if consumer is None:
            return
        if positions is None:
            positions = [Position(ledger, entry) for ledger, entries in consumer.outstanding.items() for entry in entries]
        for ledger_id, entry_id in positions:
            if self._settle(consumer, ledger_id, entry_id):
                counts = self._redelivery_counts.setdefault(ledger_id, {})
                counts[entry_id] = counts.get(entry_id, 0) + 1
                self._replay.add(ledger_id, entry_id)

    def on_rewind(self) -> None:
        """Everything unacknowledged is free again: after a seek, or when the last consumer left."""
        assert not any(consumer.outstanding for consumer in self._consumers.values()), "rule 1: close the consumers first"
        self._replay.clear()
        self._read_back.clear()
        self._read_back_ticket += 1
        self._reading_back = self._read_back_failed = False
        self._chunk_owners.clear()
        for consumer in self._consumers.values():
            consumer.reserved.clear()
        self._turns.restart(self._consumers.values())
        first = self._acks.first_unacknowledged()
        self._redelivery_counts = {ledger: c for ledger, c in self._redelivery_counts.items() if ledger >= first.ledger_id}
        self._forward.rewind(first)

    # Decisions

    def next_effect(self) -> Effect | None:
        while (turn := self._turns.now()) is not None:
            if (read_back := self._plan_read_back()) is not None:
                return read_back
            if (read := self._forward.plan_read()) is not None:
                return read
            send = self._send_again(turn)
            if send is None and not self._replay:  # rule 2
                send = self._send_new(turn)
            if send is not None:
                return send
            if not self._has_work():
                return None
        return None

    def why_idle(self) -> Idle | None:
        if not self._consumers:
            return Idle.NO_CONSUMER
        if self._turns.now() is None:
            with_permits = [consumer for consumer in self._consumers.values() if consumer.permits > 0]
            if not with_permits:
                return Idle.NO_PERMITS
            return Idle.SOCKET_FULL if any(not consumer.blocked for consumer in with_permits) else Idle.TOO_MANY_UNACKED
        if self._has_work():
            return None
        if self._reading_back or self._forward.reading:
            return Idle.READING
        if self._read_back_failed or self._forward.failed:
            return Idle.READ_FAILED
        if any(consumer.reserved for consumer in self._consumers.values()):
            return Idle.CHUNKS_RESERVED
        return Idle.AT_END

    def _has_work(self) -> bool:
        """Whether the consumer whose turn it is can make something happen now."""
        if self._read_back:
            return True
        if not self._reading_back and not self._read_back_failed and self._wanted_back() is not None:
            return True
        forward = self._forward
        if not (forward.reading or forward.failed or forward.at_end) and forward.head() is None:
            return True
        return forward.head() is not None and not self._replay

    def _wanted_back(self) -> PositionSet | None:
        """The positions to read again that somebody could take now."""
        if self._replay:
            return self._replay
        for consumer in self._consumers.values():
            if consumer.reserved and consumer.can_take:
                return consumer.reserved
        return None

    def _plan_read_back(self) -> ReadBack | None:
        if self._reading_back or self._read_back_failed or self._read_back:
            return None
        while (wanted := self._wanted_back()) is not None:
            span = wanted.first_span(self._limits.read_back_entries, self._limits.read_back_gap)
            assert span is not None
            ledger_id, first, last = span
            if self._acks.unacknowledged_runs(ledger_id, first, last):
                self._reading_back = True
                self._read_back_ticket += 1
                return ReadBack(ledger_id, first, last, self._read_back_ticket)
            wanted.discard_range(ledger_id, first, last)  # acknowledged meanwhile, cumulatively or through the admin API
        return None

    def _send_again(self, turn: SharedConsumer) -> Send | None:
        while self._read_back:
            head = self._read_back[0]
            counted = head.counted
            runs = self._members(counted, head.next_entry_id)
            unacked = [run for first, last in runs for run in self._acks.unacknowledged_runs(counted.ledger_id, first, last)]
            send, next_entry_id = self._send_from(counted, unacked, turn)
            if next_entry_id > counted.last:
                self._read_back.popleft()
            else:
                head.next_entry_id = next_entry_id
            if send is not None:
                for first, last in send.runs:
                    self._replay.discard_range(counted.ledger_id, first, last)
                return send
        return None

    def _members(self, counted: CountedGroup, first: int) -> list[Run]:
        """What of a group read back is still wanted, by anybody or by the owner of its chunks."""
        runs = self._replay.runs(counted.ledger_id, first, counted.last)
        if counted.chunks is not None:
            for consumer in self._consumers.values():
                runs += consumer.reserved.runs(counted.ledger_id, first, counted.last)
            runs.sort()
        return runs

    def _send_new(self, turn: SharedConsumer) -> Send | None:
        while (head := self._forward.head()) is not None:
            counted = head.counted
            runs = list(self._acks.unacknowledged_runs(counted.ledger_id, head.next_entry_id, counted.last))
            send, next_entry_id = self._send_from(counted, runs, turn)
            self._forward.advance(next_entry_id)
            if send is not None:
                return send
            if not turn.can_take:
                return None
        return None

    def _send_from(self, counted: CountedGroup, runs: list[Run], turn: SharedConsumer) -> tuple[Send | None, int]:
        """What of `runs` goes out next, and the entry to go on with."""
        if counted.chunks is not None:
            runs, chunk_entry_id = _before_first_chunk(runs, counted.chunks)
            if not runs and chunk_entry_id >= 0:
                return self._send_chunk(counted, chunk_entry_id, counted.chunks[chunk_entry_id], turn), chunk_entry_id + 1
        else:
            chunk_entry_id = -1
        if not runs:
            return None, counted.last + 1
        alone = self._turns.is_alone(turn)
        taken, messages = counted.take(runs, turn.permits, _NO_LIMIT if alone else self._limits.round_robin_entries)
        if taken != runs:
            return self._send(turn, counted, taken, messages), taken[-1][1] + 1
        return self._send(turn, counted, taken, messages), chunk_entry_id if chunk_entry_id >= 0 else counted.last + 1

    def _send_chunk(self, counted: CountedGroup, entry_id: int, chunk: Chunk, turn: SharedConsumer) -> Send | None:
        first_again = self._replay.first()
        if first_again is not None and first_again < (counted.ledger_id, entry_id):
            return None  # perhaps an earlier chunk, asked for again while this one was read: it stays, and is read once more
        owner = self._chunk_owners.get(chunk.uuid)
        if owner is None:
            owner = self._chunk_owners[chunk.uuid] = turn
            if len(self._chunk_owners) > self._limits.max_chunked_messages:
                self._forget_oldest_chunked_message()
        if not owner.can_take:
            self._replay.discard(counted.ledger_id, entry_id)
            owner.reserved.add(counted.ledger_id, entry_id)
            return None
        # An earlier chunk may still be reserved and on its way: this one must not overtake it.
        earlier = owner.reserved.first()
        if earlier is not None and earlier < (counted.ledger_id, entry_id):
            self._replay.discard(counted.ledger_id, entry_id)
            owner.reserved.add(counted.ledger_id, entry_id)
            return None
        owner.reserved.discard(counted.ledger_id, entry_id)
        if chunk.is_last:
            del self._chunk_owners[chunk.uuid]
        return self._send(owner, counted, [(entry_id, entry_id)], counted.messages_in(entry_id, entry_id))

    def _forget_oldest_chunked_message(self) -> None:
        """Its producer most likely died between two chunks."""
        _, owner = self._chunk_owners.popitem(last=False)
        for position in owner.reserved:  # also of other messages: their owner is still known, they are reserved again
            self._replay.add(*position)
        owner.reserved.clear()

    def _send(self, consumer: SharedConsumer, counted: CountedGroup, runs: list[Run], messages: int) -> Send:
        consumer.permits -= messages
        consumer.unacked_messages += messages
        consumer.blocked = consumer.unacked_messages >= self._limits.max_unacked_messages
        outstanding = consumer.outstanding.setdefault(counted.ledger_id, {})
        for first, last in runs:
            outstanding.update(zip(range(first, last + 1), counted.counts_in(first, last), strict=True))
        self._turns.end(consumer)
        return Send(consumer.key, counted, runs, messages, self._counts_in(counted.ledger_id, runs))

    def _counts_in(self, ledger_id: int, runs: list[Run]) -> Mapping[int, int]:
        counts = self._redelivery_counts.get(ledger_id)
        if counts is None:
            return _NO_COUNTS
        return {e: counts[e] for first, last in runs for e in range(first, last + 1) if e in counts}

    def _settle(self, consumer: SharedConsumer, ledger_id: int, entry_id: int) -> bool:
        """The entry is outstanding at the consumer no more. False: it was not."""
        entries = consumer.outstanding.get(ledger_id)
        if entries is None or (messages := entries.pop(entry_id, None)) is None:
            return False
        if not entries:
            del consumer.outstanding[ledger_id]
        consumer.unacked_messages -= messages
        if consumer.blocked and consumer.unacked_messages <= self._limits.max_unacked_messages // 2:
            consumer.blocked = False
            self._turns.queue(consumer)
        return True

    def _give_up(self, ledger_id: int, first: int, last: int) -> None:
        self._replay.discard_range(ledger_id, first, last)
        for consumer in self._consumers.values():
            consumer.reserved.discard_range(ledger_id, first, last)

    # Figures

    def permits(self, key: int) -> int:
        consumer = self._consumers.get(key)
        return 0 if consumer is None else consumer.permits

    def unacked_messages(self, key: int) -> int | None:
        consumer = self._consumers.get(key)
        return 0 if consumer is None else consumer.unacked_messages

    def is_blocked(self, key: int) -> bool:
        consumer = self._consumers.get(key)
        return consumer is not None and consumer.blocked

    @property
    def read_position(self) -> Position:
        head = self._forward.head()
        return Position(head.counted.ledger_id, head.next_entry_id) if head is not None else self._forward.position

    @property
    def pending_bytes(self) -> int:
        return self._forward.pending_bytes + sum(pending.counted.size_bytes for pending in self._read_back)


def _before_first_chunk(runs: list[Run], chunks: Mapping[int, Chunk]) -> tuple[list[Run], int]:
    """The runs in front of the first entry that is a chunk, and that entry (-1: none)."""
    chunk_entry_id = min((e for e in chunks for first, last in runs if first <= e <= last), default=-1)
    if chunk_entry_id < 0:
        return runs, -1
    before = [(first, min(last, chunk_entry_id - 1)) for first, last in runs if first < chunk_entry_id]
    return before, chunk_entry_id
