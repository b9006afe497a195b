"""Which consumer of a Shared or Key_Shared subscription holds which entries unacknowledged, and the limits on these.

    hold ──► outstanding at one consumer ──settle──► acknowledged, or free to be redelivered

Rules
1. A consumer at its limit of messages gets no more until half of them are settled; the same applies to the whole subscription.
2. Limits may change at any time: a consumer is blocked or unblocked at once. 0: no limit.
3. A chunked message counts once, with its last chunk: a consumer blocked inside one could neither acknowledge it nor continue.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from cepheid_broker.dispatch.counted_group import CountedGroup, Run
from cepheid_broker.dispatch.effects import AckView, DispatchPolicies, Idle, Why
from cepheid_broker.dispatch.position_set import PositionSet, acknowledged_of
from cepheid_metadata import Position


@dataclass(slots=True, eq=False)
class Holder:
    """A core's state of one consumer."""

    key: int
    name: str
    priority: int
    permits: int = 0
    writable: bool = True
    blocked: bool = False  # holds too many unacknowledged messages
    blocked_since_ms: int = 0
    left: bool = False
    queued: bool = False
    last_messages: int = 1  # in the last entry given to it, as an estimate for the next ones
    unacked_messages: int = 0
    outstanding: dict[int, dict[int, int]] = field(default_factory=dict)  # ledger → entry → messages, and the key hash in low bits
    reserved: PositionSet = field(default_factory=PositionSet)  # chunks that only this consumer may get

    def __repr__(self) -> str:
        state = f"{self.permits} permits, {self.unacked_messages} unacked{', blocked' if self.blocked else ''}"
        return f"<Holder {self.key} {self.name!r}, {state}>"

    @property
    def can_take(self) -> bool:
        """Whether the consumer itself can take messages; the subscription's limit applies as well."""
        return self.permits > 0 and self.writable and not self.blocked and not self.left


MAX_REASONS = 20  # most reasons in one answer to `why`
COMES_AGAIN_ON = "a negative acknowledgement, a timeout of the client, or when its consumer leaves"
_HASH_BITS = 16
_HASH_MASK = (1 << _HASH_BITS) - 1


class Holders:
    """The consumers, iterated in the order in which they joined."""

    def __init__(self, policies: DispatchPolicies) -> None:
        self.by_key: dict[int, Holder] = {}
        self.unacked_messages = 0
        self.blocked = False  # all of them
        self.blocked_since_ms = 0
        self.now_ms = 0
        self._policies = policies

    def __iter__(self) -> Iterator[Holder]:
        return iter(self.by_key.values())

    def __len__(self) -> int:
        return len(self.by_key)

    def add(self, holder: Holder) -> None:
        self.by_key[holder.key] = holder

    def remove(self, key: int) -> Holder | None:
        """Remove the consumer; the caller frees its `outstanding` entries."""
        holder = self.by_key.pop(key, None)
        if holder is not None:
            holder.left = True
            self.unacked_messages -= holder.unacked_messages
            self._unblock_all()
        return holder

    def hold(self, holder: Holder, counted: CountedGroup, runs: Sequence[Run], messages: int) -> None:
        """Record that the consumer holds these runs. `messages`: in the runs, with each chunk counted as one."""
        outstanding = holder.outstanding.setdefault(counted.ledger_id, {})
        hashes, chunks, base = counted.hashes, counted.chunks, counted.first
        for first, last in runs:
            counts = counted.counts_in(first, last)
            if hashes is None and chunks is None:
                outstanding.update(zip(range(first, last + 1), [count << _HASH_BITS for count in counts], strict=True))
                continue
            for entry_id, count in zip(range(first, last + 1), counts, strict=True):
                if chunks is not None and entry_id in chunks and not chunks[entry_id].is_last:
                    messages -= count  # rule 3
                    count = 0
                outstanding[entry_id] = count << _HASH_BITS | (0 if hashes is None else hashes[entry_id - base])
        holder.unacked_messages += messages
        self.unacked_messages += messages
        policies = self._policies
        if not holder.blocked and 0 < policies.max_unacked_per_consumer <= holder.unacked_messages:
            holder.blocked, holder.blocked_since_ms = True, self.now_ms
        if not self.blocked and 0 < policies.max_unacked_per_subscription <= self.unacked_messages:
            self.blocked, self.blocked_since_ms = True, self.now_ms

    def settle(self, holder: Holder, ledger_id: int, entry_id: int) -> int | None:
        """Release the entry from this consumer. Return the hash of its key; None if it was not outstanding there."""
        entries = holder.outstanding.get(ledger_id)
        if entries is None or (held := entries.pop(entry_id, None)) is None:
            return None
        if not entries:
            del holder.outstanding[ledger_id]
        messages = held >> _HASH_BITS
        holder.unacked_messages -= messages
        self.unacked_messages -= messages
        if holder.blocked and holder.unacked_messages <= self._policies.max_unacked_per_consumer // 2:
            holder.blocked = False
        if self.blocked:
            self._unblock_all()
        return held & _HASH_MASK

    def holding(self, positions: Mapping[int, Mapping[int, object]]) -> list[tuple[Holder, int, int]]:
        """Return which consumer holds which of these entries (by ledger). The cost is bounded by what is outstanding: clients
        may name any entry."""
        found: list[tuple[Holder, int, int]] = []
        for holder in self.by_key.values():
            for ledger_id, asked in positions.items():
                if held := holder.outstanding.get(ledger_id):
                    fewer, more = (asked, held) if len(asked) < len(held) else (held, asked)
                    found += [(holder, ledger_id, entry_id) for entry_id in fewer if entry_id in more]
        return found

    def _unblock_all(self) -> None:
        if self.unacked_messages <= self._policies.max_unacked_per_subscription // 2:
            self.blocked = False

    def on_policies(self, policies: DispatchPolicies) -> None:
        self._policies = policies
        limit = policies.max_unacked_per_consumer
        for holder in self.by_key.values():
            is_over = 0 < limit <= holder.unacked_messages
            if is_over != holder.blocked:
                holder.blocked, holder.blocked_since_ms = is_over, self.now_ms
        is_over = 0 < policies.max_unacked_per_subscription <= self.unacked_messages
        if is_over != self.blocked:
            self.blocked, self.blocked_since_ms = is_over, self.now_ms

    def settle_acknowledged(self, acks: AckView) -> list[int]:
        """Release entries acknowledged by no consumer. Return the hashes of their keys."""
        hashes: list[int] = []
        for holder in self.by_key.values():
            for ledger_id, entries in list(holder.outstanding.items()):
                for entry_id in acknowledged_of(acks, ledger_id, entries):
                    key_hash = self.settle(holder, ledger_id, entry_id)
                    assert key_hash is not None
                    hashes.append(key_hash)
        return hashes

    def why_none_can_take(self) -> list[Why]:
        """Return why no consumer can take messages: for each, those with permits first, up to a limit."""
        if not self.by_key:
            return [Why(Idle.NO_CONSUMER)]
        if self.blocked:
            most = max(self.by_key.values(), key=lambda holder: holder.unacked_messages)
            limit = self._policies.max_unacked_per_subscription
            return [
                Why(
                    Idle.SUBSCRIPTION_UNACKED,
                    consumer=most.name,
                    position=first_held(most),
                    until=f"no more than {limit // 2} are unacknowledged",
                    since_s=self.since_s(self.blocked_since_ms),
                    details=f"{self.unacked_messages} messages are unacknowledged, the limit is {limit}; this consumer holds most, "
                    f"{most.unacked_messages}, from this entry on",
                )
            ]
        ordered = sorted(self.by_key.values(), key=lambda holder: holder.permits <= 0)
        return [self.why_not(holder) for holder in ordered[:MAX_REASONS]]

    def why_not(self, holder: Holder) -> Why:
        """Return why this consumer cannot take messages."""
        held = f"it holds {holder.unacked_messages} unacknowledged messages"
        if holder.permits <= 0:
            return Why(Idle.NO_PERMITS, consumer=holder.name, details=f"it has {holder.permits} permits; {held}")
        if holder.blocked:
            limit = self._policies.max_unacked_per_consumer
            return Why(
                Idle.TOO_MANY_UNACKED,
                consumer=holder.name,
                position=first_held(holder),
                until=f"it holds no more than {limit // 2}",
                since_s=self.since_s(holder.blocked_since_ms),
                details=f"{held}, from this entry on; the limit is {limit}",
            )
        return Why(Idle.SOCKET_FULL, consumer=holder.name, details=f"it has {holder.permits} permits; {held}")

    def why_at_end(self) -> Why:
        """Return the reason at the end, naming the consumer with the oldest unacknowledged entry: the rest of the backlog."""
        oldest = min(
            ((position, holder) for holder in self.by_key.values() if (position := first_held(holder)) is not None),
            key=lambda held: held[0],
            default=None,
        )
        if oldest is None:
            return Why(Idle.AT_END)
        position, holder = oldest
        return Why(
            Idle.AT_END,
            consumer=holder.name,
            position=position,
            until=f"an entry is appended; sent entries are redelivered on {COMES_AGAIN_ON}",
            details=f"{self.unacked_messages} sent messages are not acknowledged; this consumer holds the oldest, "
            f"this entry, and {holder.unacked_messages} in all",
        )

    def since_s(self, since_ms: int) -> float:
        return max(0, self.now_ms - since_ms) / 1000


def first_held(holder: Holder) -> Position | None:
    if not holder.outstanding:
        return None
    ledger_id = min(holder.outstanding)
    return Position(ledger_id, min(holder.outstanding[ledger_id]))


def first_held_of(holder: Holder, key_hashes: Mapping[int, object]) -> dict[int, Position]:
    """Return the earliest entry that the consumer holds of each of these hashes."""
    first: dict[int, Position] = {}
    for ledger_id, entries in holder.outstanding.items():
        for entry_id, key_hash in hashes_held(entries):
            if key_hash in key_hashes:
                position = Position(ledger_id, entry_id)
                first[key_hash] = min(position, first.get(key_hash, position))
    return first


def positions_of(holder: Holder) -> list[Position]:
    return [Position(ledger_id, entry_id) for ledger_id, entries in holder.outstanding.items() for entry_id in entries]


def hashes_held(entries: dict[int, int]) -> Iterator[tuple[int, int]]:
    """Yield the entry id and hash of what is outstanding in one ledger."""
    for entry_id, held in entries.items():
        yield entry_id, held & _HASH_MASK
