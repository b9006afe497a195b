"""What a Shared subscription sends, without I/O: many consumers, each entry to one of them.

    topic ──reads──► pending ──┐
    replay ─reads─► read back ─┴─► the consumer whose turn it is ──Send──► outstanding ──acknowledged──► gone
       ▲                                                                       │
       └──────────── redelivery asked for (count + 1), consumer left ──────────┘

Rules
1. An entry is outstanding at one consumer at most. It becomes free again when redelivery is requested or its consumer leaves.
2. Redeliveries are sent before new entries.
3. Consumers with the lowest priority number are served as long as one of them can take messages; equal ones in turn.
4. Chunks of one message are sent to one consumer, in order; while it cannot take them they are reserved for it, and other entries
   continue.
5. A consumer at its limit of unacknowledged messages gets no more until half of them are settled; it keeps its permits. The same
   applies to all consumers together (holders.py).
6. Redelivery counts belong to the cursor: they last as long as the entry is unacknowledged. A leaving consumer does not raise them.
7. Entries that are not due yet are held back (delayed_entries.py), and sent before new ones once they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from cepheid_broker.dispatch.back_reader import BackReader
from cepheid_broker.dispatch.chunk_owners import ChunkOwners
from cepheid_broker.dispatch.counted_group import Chunk, CountedGroup, Run
from cepheid_broker.dispatch.delayed_entries import DelayedEntries
from cepheid_broker.dispatch.effects import (
    AckView,
    DispatchLimits,
    DispatchPolicies,
    Effect,
    HashRange,
    Idle,
    Read,
    ReadBack,
    Send,
    Why,
    counts_of,
)
from cepheid_broker.dispatch.forward_reader import ForwardReader
from cepheid_broker.dispatch.holders import Holder, Holders, positions_of
from cepheid_broker.dispatch.position_set import PositionSet
from cepheid_broker.dispatch.turns import Turns
from cepheid_metadata import Position

_NO_LIMIT = 1 << 62


class SharedDispatch:
    def __init__(self, acks: AckView, limits: DispatchLimits, policies: DispatchPolicies | None = None) -> None:
        self._acks = acks
        self._limits = limits
        self._forward = ForwardReader(limits.read_ahead_bytes, acks.first_unacknowledged())
        self._back = BackReader()
        self._replay = PositionSet()
        self._delayed = DelayedEntries(limits.max_delayed_entries)
        self._holders = Holders(policies or DispatchPolicies())
        self._turns = Turns()
        self._chunks = ChunkOwners(limits.max_chunked_messages)
        self._reserving: dict[int, Holder] = {}  # consumers with reserved chunks, and perhaps some that had them
        self._delayed.enabled = policies is None or policies.delayed_delivery

    def __repr__(self) -> str:
        return f"<SharedDispatch {len(self._holders)} consumers, {len(self._replay)} to replay, idle: {[*map(str, self.why())]}>"

    # Events: consumers

    def on_consumer_joined(
        self, consumer: int, *, name: str = "", priority: int = 0, hash_ranges: Sequence[HashRange] | None = None
    ) -> None:
        holder = Holder(consumer, name, priority)
        self._holders.add(holder)
        self._turns.join(holder)

    def on_consumer_left(self, consumer: int) -> None:
        holder = self._holders.remove(consumer)
        if holder is None:
            return
        self._turns.leave(holder)
        self._reserving.pop(consumer, None)
        if not self._holders:
            self.on_rewind()
            return
        for ledger_id, entries in holder.outstanding.items():
            self._replay.add_all(ledger_id, entries)
        for position in holder.reserved:
            self._replay.add(*position)
        self._chunks.leave(holder)

    def on_permits(self, consumer: int, messages: int) -> bool:
        if (holder := self._holders.by_key.get(consumer)) is not None:
            holder.permits += messages
            self._turns.queue(holder)
        return True

    def on_writable(self, consumer: int, writable: bool) -> None:
        if (holder := self._holders.by_key.get(consumer)) is not None:
            holder.writable = writable
            self._turns.queue(holder)

    def on_policies(self, policies: DispatchPolicies) -> None:
        self._holders.on_policies(policies)
        for holder in self._holders:
            self._turns.queue(holder)
        self._delayed.enabled = policies.delayed_delivery

    # Events: entries

    def on_appended(self, tail: CountedGroup | None = None) -> None:
        self._forward.on_appended()

    def on_clock(self, now_ms: int) -> None:
        self._holders.now_ms = now_ms
        for due in self._delayed.take_due(now_ms):
            self._replay.add(due.ledger_id, due.entry_id)

    def on_read(self, read: Read | ReadBack, groups: Sequence[CountedGroup], *, to_end: bool) -> None:
        if isinstance(read, ReadBack):
            for first, last in self._back.on_read(read, groups):
                self._give_up(read.ledger_id, first, last)
        elif groups and self._forward.awaits(read):
            end = Position(groups[-1].ledger_id, groups[-1].last + 1)
            now_ms = self._holders.now_ms
            sendable = [part for counted in groups for part in self._delayed.hold_back(counted, self._acks, now_ms)]
            self._forward.on_read_up_to(read, end, sendable, to_end=to_end)
        else:
            self._forward.on_read(read, groups, to_end=to_end)

    def on_read_failed(self, read: Read | ReadBack) -> bool:
        return self._back.on_read_failed(read) if isinstance(read, ReadBack) else self._forward.on_read_failed(read)

    def on_retry(self) -> None:
        self._back.failed = False
        self._forward.on_retry()

    # Events: acknowledgements

    def on_acked(self, consumer: int | None, positions: Iterable[Position]) -> None:
        """Release acknowledged entries, also those outstanding at consumers other than `consumer` (protocol.md §15)."""
        acking = self._holders.by_key.get(consumer) if consumer is not None else None
        elsewhere: dict[int, dict[int, None]] = {}
        for ledger_id, entry_id in positions:
            if acking is None or not self._settle(acking, ledger_id, entry_id):
                elsewhere.setdefault(ledger_id, {})[entry_id] = None
            if self._replay:
                self._replay.discard(ledger_id, entry_id)
            for holder in self._reserving.values():
                holder.reserved.discard(ledger_id, entry_id)
            if self._chunks:
                self._chunks.on_acked(Position(ledger_id, entry_id))
        if elsewhere:
            for holder, ledger_id, entry_id in self._holders.holding(elsewhere):
                self._settle(holder, ledger_id, entry_id)

    def on_cursor_moved(self) -> None:
        self._holders.settle_acknowledged(self._acks)
        self._delayed.forget_acknowledged(self._acks)
        self._forward.skip_to(self._acks.first_unacknowledged())
        self._replay.forget_acknowledged(self._acks)
        self._chunks.forget_acknowledged(self._acks)
        for holder in self._holders:
            holder.reserved.forget_acknowledged(self._acks)
            self._turns.queue(holder)

    def on_redeliver(self, consumer: int, positions: Iterable[Position] | None) -> None:
        """Send entries again; None: all outstanding at this consumer. Entries not outstanding there are ignored (rule 1)."""
        holder = self._holders.by_key.get(consumer)
        if holder is None:
            return
        for ledger_id, entry_id in positions_of(holder) if positions is None else positions:
            if self._settle(holder, ledger_id, entry_id):
                self._acks.count_redelivery(ledger_id, entry_id)
                self._replay.add(ledger_id, entry_id)

    def on_rewind(self) -> None:
        """Free everything unacknowledged, after a seek or when the last consumer left."""
        assert not any(holder.outstanding for holder in self._holders), "rule 1: close the consumers first"
        self._replay.clear()
        self._back.rewind()
        self._delayed.clear()
        self._chunks.clear()
        for holder in self._holders:
            holder.reserved.clear()
        self._turns.restart(self._holders)
        self._forward.rewind(self._acks.first_unacknowledged())

    # Decisions

    def next_effect(self) -> Effect | None:
        while (turn := self._turn()) is not None:
            if (read_back := self._plan_read_back()) is not None:
                return read_back
            if not self._delayed.is_full and (read := self._forward.plan_read()) is not None:
                return read
            send = self._send_again(turn)
            if send is None:
                send = self._send_new(turn)
            if send is not None:
                return send
            if not self._has_work():
                return None
        return None

    def why(self) -> list[Why]:
        if self._turn() is None:
            return self._holders.why_none_can_take()
        if self._has_work():
            return []
        forward, back, reasons = self._forward, self._back, []
        if back.reading or forward.reading:
            reasons.append(Why(Idle.READING, position=self._replay.first() if back.reading else forward.position))
        if back.failed or forward.failed:
            reasons.append(Why(Idle.READ_FAILED, position=self._replay.first() if back.failed else forward.position))
        reasons += [
            Why(Idle.CHUNKS_RESERVED, holder.name, position=holder.reserved.first(), details=str(self._holders.why_not(holder)))
            for holder in self._holders
            if holder.reserved
        ]
        reasons += self._delayed.why(self._holders.now_ms)
        return reasons if reasons and not forward.at_end else [*reasons, self._holders.why_at_end()]

    def _turn(self) -> Holder | None:
        return None if self._holders.blocked else self._turns.now()

    def _has_work(self) -> bool:
        """Return whether the consumer whose turn it is can cause an effect now."""
        if self._back.pending:
            return True
        if not self._back.reading and not self._back.failed and self._wanted_back() is not None:
            return True
        forward = self._forward
        if forward.head() is None:
            return forward.can_read and not self._delayed.is_full
        return not self._replay

    def _wanted_back(self) -> PositionSet | None:
        """Return positions to read again that some consumer could take now."""
        if self._replay:
            return self._replay
        for holder in list(self._reserving.values()):
            if not holder.reserved:
                del self._reserving[holder.key]
            elif holder.can_take:
                return holder.reserved
        return None

    def _plan_read_back(self) -> ReadBack | None:
        if not self._back.is_free:
            return None
        while (wanted := self._wanted_back()) is not None:
            span = wanted.first_span(self._limits.read_back_entries, self._limits.read_back_gap)
            assert span is not None
            ledger_id, first, last = span
            # Entries acknowledged by no consumer would be read back again and again.
            if not wanted.keep_only(ledger_id, first, last, self._acks.unacknowledged_runs(ledger_id, first, last)):
                return self._back.plan(ledger_id, first, last)
        return None

    def _send_again(self, turn: Holder) -> Send | None:
        while self._back.pending:
            head = self._back.pending[0]
            counted = head.counted
            runs = self._members(counted, head.next_entry_id)
            unacked = [run for first, last in runs for run in self._acks.unacknowledged_runs(counted.ledger_id, first, last)]
            send, next_entry_id = self._send_from(counted, unacked, turn)
            if next_entry_id > counted.last:
                self._back.pending.popleft()
            else:
                head.next_entry_id = next_entry_id
            if send is not None:
                for first, last in send.runs:
                    self._replay.discard_range(counted.ledger_id, first, last)
                return send
        return None

    def _members(self, counted: CountedGroup, first: int) -> list[Run]:
        """Return the runs of a group read back that are still wanted, by any consumer or by the owner of their chunks."""
        runs = self._replay.runs(counted.ledger_id, first, counted.last)
        if counted.chunks is not None:
            for holder in self._holders:
                runs += holder.reserved.runs(counted.ledger_id, first, counted.last)
            runs.sort()
        return runs

    def _send_new(self, turn: Holder) -> Send | None:
        # Rule 2 is checked at every step: chunks may be freed in between, and a later one must not overtake them.
        while not self._replay and (head := self._forward.head()) is not None:
            counted = head.counted
            runs = list(self._acks.unacknowledged_runs(counted.ledger_id, head.next_entry_id, counted.last))
            send, next_entry_id = self._send_from(counted, runs, turn)
            self._forward.advance(next_entry_id)
            if send is not None:
                return send
            if not turn.can_take:
                return None
        return None

    def _send_from(self, counted: CountedGroup, runs: list[Run], turn: Holder) -> tuple[Send | None, int]:
        """Return the next Send from `runs`, and the entry to continue with."""
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

    def _send_chunk(self, counted: CountedGroup, entry_id: int, chunk: Chunk, turn: Holder) -> Send | None:
        first_again = self._replay.first()
        if first_again is not None and first_again < (counted.ledger_id, entry_id):
            return None  # an earlier chunk may be redelivered since this was read: it stays, and is read again
        owner = self._chunks.owner(chunk.uuid) or turn
        if (oldest := self._chunks.give(chunk.uuid, owner, Position(counted.ledger_id, entry_id))) is not None:
            self._free_reserved(oldest.owner)
        # An earlier chunk may still be reserved and being read: this one must not overtake it.
        earlier = owner.reserved.first()
        if not owner.can_take or (earlier is not None and earlier < (counted.ledger_id, entry_id)):
            self._replay.discard(counted.ledger_id, entry_id)
            owner.reserved.add(counted.ledger_id, entry_id)
            self._reserving[owner.key] = owner
            return None
        owner.reserved.discard(counted.ledger_id, entry_id)
        if chunk.is_last:
            self._chunks.forget(chunk.uuid)
        return self._send(owner, counted, [(entry_id, entry_id)], counted.messages_in(entry_id, entry_id))

    def _free_reserved(self, owner: Holder) -> None:
        """Free the owner's reserved chunks after one of its messages was forgotten; the others are reserved again when read
        back."""
        for position in owner.reserved:
            self._replay.add(*position)
        owner.reserved.clear()

    def _send(self, holder: Holder, counted: CountedGroup, runs: list[Run], messages: int) -> Send:
        holder.permits -= messages
        self._holders.hold(holder, counted, runs, messages)
        self._turns.end(holder)
        return Send(holder.key, counted, runs, messages, counts_of(self._acks, counted.ledger_id, runs))

    def _settle(self, holder: Holder, ledger_id: int, entry_id: int) -> bool:
        """Release the entry from the consumer; return False if it was not outstanding there."""
        if self._holders.settle(holder, ledger_id, entry_id) is None:
            return False
        if not holder.queued:
            self._turns.queue(holder)
        return True

    def _give_up(self, ledger_id: int, first: int, last: int) -> None:
        self._replay.discard_range(ledger_id, first, last)
        for holder in self._holders:
            holder.reserved.discard_range(ledger_id, first, last)

    # Figures

    @property
    def wake_at_ms(self) -> int | None:
        return self._delayed.first_due_ms

    def permits(self, consumer: int) -> int:
        holder = self._holders.by_key.get(consumer)
        return 0 if holder is None else holder.permits

    def unacked_messages(self, consumer: int) -> int | None:
        holder = self._holders.by_key.get(consumer)
        return 0 if holder is None else holder.unacked_messages

    def hash_ranges(self, consumer: int) -> tuple[HashRange, ...]:
        return ()

    def is_active(self, consumer: int) -> bool:
        return True

    def is_blocked(self, consumer: int) -> bool:
        holder = self._holders.by_key.get(consumer)
        return holder is not None and (holder.blocked or self._holders.blocked)

    @property
    def read_position(self) -> Position:
        return self._forward.next_position

    @property
    def delayed_entries(self) -> int:
        return len(self._delayed)

    @property
    def replay_entries(self) -> int:
        return len(self._replay)

    @property
    def pending_bytes(self) -> int:
        return self._forward.pending_bytes + self._back.pending_bytes


def _before_first_chunk(runs: list[Run], chunks: Mapping[int, Chunk]) -> tuple[list[Run], int]:
    """Return the runs before the first entry that is a chunk, and that entry (-1: none)."""
    chunk_entry_id = min((e for e in chunks for first, last in runs if first <= e <= last), default=-1)
    if chunk_entry_id < 0:
        return runs, -1
    before = [(first, min(last, chunk_entry_id - 1)) for first, last in runs if first < chunk_entry_id]
    return before, chunk_entry_id
