"""What a Key_Shared subscription sends, without I/O: all messages of one key to one consumer at a time, in order.

    topic ──reads──► entry ──hash──► owner ─┬► can take it ──► Send ──► outstanding ──acknowledged──► gone
                                            └► cannot, or the key waits ──► waiting ──read back──► Send
                                                                               ▲
                         redelivery asked for (count + 1), consumer left ──────┘

Rules
1. An entry is outstanding at one consumer at most, and only the owner of its hash gets it (key_owners.py).
2. No entry is sent before a waiting earlier one with the same hash; it waits behind that. Redeliveries are in order, too.
3. A hash that moved to another consumer waits while an earlier one holds entries of it, until those are acknowledged or that
   consumer leaves, unless the subscription allows delivery out of order.
4. Other keys continue meanwhile, past at most `max_waiting_entries` waiting entries. Every wait has an event that ends it: the
   consumer can take messages, acknowledges or leaves, or one with the missing range connects.
5. A hash with a partly sent chunked message stays with its consumer until the last chunk is sent: the consumer cannot acknowledge
   the first chunks before that, so rule 3 would wait forever. If they are acknowledged anyway, it moves.
6. A batch is routed by its first key. Entries with a delivery time set by their producer are sent when it is reached: as they asked
   for it, later entries of their key do not wait for them; from then on they are ordered like redelivered entries.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cepheid_broker.dispatch.back_reader import BackReader
from cepheid_broker.dispatch.counted_group import CountedGroup, Run
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
    SendAll,
    Why,
    counts_of,
)
from cepheid_broker.dispatch.forward_reader import ForwardReader
from cepheid_broker.dispatch.holders import MAX_REASONS, Holder, Holders, positions_of
from cepheid_broker.dispatch.key_hash import key_text
from cepheid_broker.dispatch.key_owners import KeyOwners
from cepheid_broker.dispatch.key_places import KeyPlaces
from cepheid_metadata import Position

READ_BACK_FACTOR = 4  # more than one consumer can take, as entries that wait for others are sent along


@dataclass(slots=True)
class _Share:
    """One consumer's part of a group."""

    runs: list[Run] = field(default_factory=list)
    messages: int = 0

    def add(self, entry_id: int, messages: int) -> None:
        if self.runs and self.runs[-1][1] == entry_id - 1:
            self.runs[-1] = (self.runs[-1][0], entry_id)
        else:
            self.runs.append((entry_id, entry_id))
        self.messages += messages


class KeySharedDispatch:
    def __init__(
        self, acks: AckView, limits: DispatchLimits, policies: DispatchPolicies, owners: KeyOwners, *, in_order: bool = True
    ) -> None:
        self._acks = acks
        self._limits = limits
        self._forward = ForwardReader(limits.read_ahead_bytes, acks.first_unacknowledged())
        self._back = BackReader()
        self._delayed = DelayedEntries(limits.max_delayed_entries)
        self._delayed.enabled = policies.delayed_delivery
        self._holders = Holders(policies)
        self._able: dict[int, Holder] = {}  # consumers that can take messages
        self._places = KeyPlaces(owners, self._holders, in_order=in_order, max_chunked_messages=limits.max_chunked_messages)
        self._waiting = self._places.waiting

    def __repr__(self) -> str:
        return f"<KeySharedDispatch {len(self._holders)} consumers, {self._places!r}>"

    # Events: consumers

    def on_consumer_joined(
        self, consumer: int, *, name: str = "", priority: int = 0, hash_ranges: Sequence[HashRange] | None = None
    ) -> None:
        self._holders.add(Holder(consumer, name, priority))
        self._places.join(consumer, hash_ranges)

    def on_consumer_left(self, consumer: int) -> None:
        holder = self._holders.remove(consumer)
        if holder is None:
            return
        self._cannot(consumer)
        self._places.leave(holder)
        if not self._holders:
            self.on_rewind()

    def on_permits(self, consumer: int, messages: int) -> bool:
        if (holder := self._holders.by_key.get(consumer)) is not None:
            holder.permits += messages
            self._note(holder)
        return True

    def on_writable(self, consumer: int, writable: bool) -> None:
        if (holder := self._holders.by_key.get(consumer)) is not None:
            holder.writable = writable
            self._note(holder)

    def on_policies(self, policies: DispatchPolicies) -> None:
        self._holders.on_policies(policies)
        for holder in self._holders:
            self._note(holder)
        self._delayed.enabled = policies.delayed_delivery

    def _note(self, holder: Holder) -> None:
        """Update whether the consumer can take messages."""
        if holder.can_take:
            self._able[holder.key] = holder
            self._waiting.open(holder.key)
        else:
            self._cannot(holder.key)

    def _cannot(self, consumer: int) -> None:
        self._able.pop(consumer, None)
        self._waiting.close(consumer)

    # Events: entries

    def on_appended(self, tail: CountedGroup | None = None) -> None:
        self._forward.on_appended()

    def on_clock(self, now_ms: int) -> None:
        self._holders.now_ms = now_ms
        for due in self._delayed.take_due(now_ms):
            self._places.wait(due.key_hash, due.ledger_id, due.entry_id)

    def on_read(self, read: Read | ReadBack, groups: Sequence[CountedGroup], *, to_end: bool) -> None:
        if isinstance(read, ReadBack):
            for first, last in self._back.on_read(read, groups):
                self._waiting.discard_range(read.ledger_id, first, last)
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
            if self._waiting.entries:
                self._waiting.discard(ledger_id, entry_id)
            self._places.on_acked(Position(ledger_id, entry_id))
        if elsewhere:
            for holder, ledger_id, entry_id in self._holders.holding(elsewhere):
                self._settle(holder, ledger_id, entry_id)

    def on_cursor_moved(self) -> None:
        for key_hash in self._holders.settle_acknowledged(self._acks):
            self._places.release(key_hash)
        self._waiting.forget_acknowledged(self._acks)
        self._places.on_cursor_moved(self._acks)
        self._delayed.forget_acknowledged(self._acks)
        self._forward.skip_to(self._acks.first_unacknowledged())
        for holder in self._holders:
            self._note(holder)

    def on_redeliver(self, consumer: int, positions: Iterable[Position] | None) -> None:
        """Send entries again; None: all outstanding at this consumer. Entries not outstanding there are ignored (rule 1)."""
        holder = self._holders.by_key.get(consumer)
        if holder is None:
            return
        for ledger_id, entry_id in positions_of(holder) if positions is None else positions:
            key_hash = self._holders.settle(holder, ledger_id, entry_id)
            if key_hash is not None:
                self._acks.count_redelivery(ledger_id, entry_id)
                self._places.wait(key_hash, ledger_id, entry_id)
                self._places.release(key_hash)
        self._note(holder)

    def on_rewind(self) -> None:
        """Free everything unacknowledged, after a seek or when the last consumer left."""
        assert not any(holder.outstanding for holder in self._holders), "rule 1: close the consumers first"
        self._places.clear()
        self._back.rewind()
        self._delayed.clear()
        self._forward.rewind(self._acks.first_unacknowledged())

    def _settle(self, holder: Holder, ledger_id: int, entry_id: int) -> bool:
        """Release the entry from the consumer; return False if it was not outstanding there."""
        was_blocked = holder.blocked
        key_hash = self._holders.settle(holder, ledger_id, entry_id)
        if key_hash is None:
            return False
        self._places.release(key_hash)
        if was_blocked:
            self._note(holder)
        return True

    # Decisions

    def next_effect(self) -> Effect | None:
        while self._able and not self._holders.blocked:
            if (read_back := self._plan_read_back()) is not None:
                return read_back
            if self._back.pending:
                if sends := self._send_again():
                    return SendAll(sends)
                continue
            if not self._is_full and (read := self._forward.plan_read()) is not None:
                return read
            if sends := self._send_new():
                return SendAll(sends)
            if not self._has_work():
                return None
        return None

    @property
    def _is_full(self) -> bool:
        return self._waiting.entries >= self._limits.max_waiting_entries

    def _has_work(self) -> bool:
        """Return whether something can be done for the consumers that can take messages."""
        if self._back.pending:
            return True
        if self._back.is_free and self._waiting.first_ready() is not None:
            return True
        head = self._forward.head()
        if head is None:
            return self._forward.can_read and not self._is_full
        return self._can_pass(head.counted, head.next_entry_id)

    def _can_pass(self, counted: CountedGroup, entry_id: int) -> bool:
        """Return whether the next entry can be sent, or has room to wait."""
        if not self._acks.unacknowledged_runs(counted.ledger_id, entry_id, entry_id):
            return True
        if self._delayed.must_wait(counted, entry_id, self._holders.now_ms):
            return not self._delayed.is_full
        if not self._is_full:
            return True
        key_hash = _hash_in(counted, entry_id)
        receiver = self._places.receiver(key_hash)
        return receiver is not None and receiver.can_take and key_hash not in self._waiting

    def _plan_read_back(self) -> ReadBack | None:
        if not self._back.is_free:
            return None
        while (consumer := self._waiting.first_ready()) is not None:
            positions, holder = self._waiting.at_door(consumer), self._able[consumer]
            assert positions is not None
            takes = -(-holder.permits // holder.last_messages)  # estimated entries
            wanted = min(self._limits.read_back_entries, READ_BACK_FACTOR * takes)
            span = positions.first_span(wanted, self._limits.read_back_gap)
            assert span is not None
            ledger_id, first, last = span
            waiting_before = self._waiting.entries
            self._waiting.keep_only(ledger_id, first, last, self._acks.unacknowledged_runs(ledger_id, first, last))
            if self._waiting.entries == waiting_before:
                return self._back.plan(ledger_id, first, last)
        return None

    def _send_again(self) -> list[Send]:
        while self._back.pending:
            head = self._back.pending.popleft()
            counted, waiting = head.counted, self._waiting.hashes_in(head.counted.ledger_id)
            runs = self._acks.unacknowledged_runs(counted.ledger_id, head.next_entry_id, counted.last)
            shares: dict[int, _Share] = {}
            for entry_id in [e for first, last in runs for e in range(first, last + 1) if e in waiting]:
                key = self._waiting.get(waiting[entry_id])
                assert key is not None
                holder = None if key.door is None else self._able.get(key.door)
                if holder is None or key.first != (counted.ledger_id, entry_id):
                    continue  # it keeps waiting and is read again
                self._waiting.discard(counted.ledger_id, entry_id)
                self._give(holder, counted, entry_id, key.key_hash, shares)
            if shares:
                return self._sends(counted, shares)
        return []

    def _send_new(self) -> list[Send]:
        while self._able and (head := self._forward.head()) is not None:
            counted = head.counted
            shares: dict[int, _Share] = {}
            next_entry_id = self._share_out(counted, head.next_entry_id, shares)
            self._forward.advance(next_entry_id)
            if shares:
                return self._sends(counted, shares)
            if next_entry_id <= counted.last:
                break
        return []

    def _share_out(self, counted: CountedGroup, start: int, shares: dict[int, _Share]) -> int:
        """Give entries to their consumers, and make those wait that cannot be sent now. Return the entry to continue with."""
        ledger_id, able, waiting = counted.ledger_id, self._able, self._waiting
        for first, last in self._acks.unacknowledged_runs(ledger_id, start, counted.last):
            for entry_id in range(first, last + 1):
                if not able:
                    return entry_id
                key_hash = _hash_in(counted, entry_id)
                if counted.deliver_at_ms is not None and self._delayed.must_wait(counted, entry_id, self._holders.now_ms):
                    if self._delayed.is_full:
                        return entry_id
                    self._delayed.add(counted, entry_id, key_hash)
                    continue
                receiver = self._places.receiver(key_hash)
                if receiver is not None and receiver.key in able and key_hash not in waiting:
                    self._give(receiver, counted, entry_id, key_hash, shares)
                elif self._is_full:
                    return entry_id
                else:
                    key = self._places.wait(key_hash, ledger_id, entry_id)
                    if key.door is None and key.example is None:
                        key.example = key_text(counted.group.payload(entry_id))
        return counted.last + 1

    def _give(self, holder: Holder, counted: CountedGroup, entry_id: int, key_hash: int, shares: dict[int, _Share]) -> None:
        messages = counted.messages_in(entry_id, entry_id)
        share = shares.get(holder.key)
        if share is None:
            share = shares[holder.key] = _Share()
        share.add(entry_id, messages)
        self._places.hold(key_hash, holder)
        holder.permits -= messages
        holder.last_messages = messages
        if holder.permits <= 0:
            self._cannot(holder.key)
        if counted.chunks is not None and (chunk := counted.chunks.get(entry_id)) is not None:
            self._places.note_chunk(chunk, key_hash, holder, Position(counted.ledger_id, entry_id))

    def _sends(self, counted: CountedGroup, shares: dict[int, _Share]) -> list[Send]:
        sends = []
        for consumer, share in shares.items():
            holder = self._holders.by_key[consumer]
            self._holders.hold(holder, counted, share.runs, share.messages)
            if holder.blocked:
                self._cannot(consumer)
            counts = counts_of(self._acks, counted.ledger_id, share.runs)
            sends.append(Send(consumer, counted, share.runs, share.messages, counts))
        return sends

    # Reasons

    def why(self) -> list[Why]:
        if not self._able or self._holders.blocked:
            return self._holders.why_none_can_take()
        if self._has_work():
            return []
        forward, back, reasons = self._forward, self._back, list[Why]()
        if back.reading or forward.reading:
            reasons.append(Why(Idle.READING, position=None if back.reading else forward.position))
        if back.failed or forward.failed:
            reasons.append(Why(Idle.READ_FAILED, position=None if back.failed else forward.position))
        if self._is_full:
            details = f"{self._waiting.entries} entries wait, the bound is {self._limits.max_waiting_entries}"
            reasons.append(Why(Idle.TOO_MANY_WAITING, position=forward.next_position, details=details))
        reasons += self._why_doors()
        reasons += self._places.why()
        reasons += self._delayed.why(self._holders.now_ms)
        return reasons if reasons and not forward.at_end else [*reasons, self._holders.why_at_end()]

    def _why_doors(self) -> list[Why]:
        """Return why consumers that entries wait for cannot take them."""
        reasons: list[Why] = []
        for consumer, positions in self._waiting.doors():
            if consumer not in self._able and len(reasons) < MAX_REASONS:
                why = self._holders.why_not(self._holders.by_key[consumer])
                details = f"{len(positions)} entries wait for it, the first is {positions.first()}; {why.details}"
                reasons.append(Why(why.idle, why.consumer, None, why.position, why.until, why.since_s, details))
        return reasons

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
        return self._places.owners.ranges_of(consumer)

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
        return self._waiting.entries

    @property
    def pending_bytes(self) -> int:
        return self._forward.pending_bytes + self._back.pending_bytes


def _hash_in(counted: CountedGroup, entry_id: int) -> int:
    assert counted.hashes is not None, "the driver of this core counts groups with hashes"
    return counted.hashes[entry_id - counted.first]
