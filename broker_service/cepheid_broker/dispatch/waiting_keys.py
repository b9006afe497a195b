"""Entries that a Key_Shared core could not send when their turn came, or must send again: by the hash of their key, in order.

    entry ──► hash ──► its door: the consumer that gets it as soon as it can take messages
                   └──► no door: the hash has no owner, or another consumer still holds earlier entries of it

Only the first entry of a hash may be sent (rule 2 of dispatch_key_shared.py); entries are read back by doors.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from cepheid_broker.dispatch.counted_group import Run
from cepheid_broker.dispatch.effects import AckView
from cepheid_broker.dispatch.position_set import PositionSet, acknowledged_of
from cepheid_metadata import Position


@dataclass(slots=True, eq=False)
class WaitingKey:
    key_hash: int
    positions: list[Position] = field(default_factory=list)  # sorted; most are added at the end and removed at the front
    door: int | None = None
    since_ms: int = 0
    example: str | None = None  # one of the keys with this hash, if an entry of it was parsed

    @property
    def first(self) -> Position:
        return self.positions[0]


class WaitingKeys:
    def __init__(self) -> None:
        self.entries = 0
        self._keys: dict[int, WaitingKey] = {}  # by hash
        self._hash_at: dict[int, dict[int, int]] = {}  # ledger → entry → hash
        self._doors: dict[int, PositionSet] = {}  # never empty
        self._open: dict[int, None] = {}  # consumers that can take messages
        self._ready: dict[int, PositionSet] = {}  # doors of open consumers, so that choosing skips all others

    def __repr__(self) -> str:
        return f"<WaitingKeys {self.entries} entries of {len(self._keys)} keys, {len(self._doors)} doors>"

    def __contains__(self, key_hash: int) -> bool:
        return key_hash in self._keys

    def __iter__(self) -> Iterator[WaitingKey]:
        return iter(self._keys.values())

    def get(self, key_hash: int) -> WaitingKey | None:
        return self._keys.get(key_hash)

    def hashes_in(self, ledger_id: int) -> dict[int, int]:
        """Return entry → hash for all waiting entries of the ledger."""
        return self._hash_at.get(ledger_id, {})

    def at_door(self, consumer: int) -> PositionSet | None:
        return self._doors.get(consumer)

    def add(self, key_hash: int, ledger_id: int, entry_id: int) -> WaitingKey:
        key = self._keys.get(key_hash)
        if key is None:
            key = self._keys[key_hash] = WaitingKey(key_hash)
        position = Position(ledger_id, entry_id)
        if not key.positions or key.positions[-1] < position:
            key.positions.append(position)
        else:
            insort(key.positions, position)
        self._hash_at.setdefault(ledger_id, {})[entry_id] = key_hash
        self.entries += 1
        if key.door is not None:
            self._door(key.door).add(ledger_id, entry_id)
        return key

    def discard(self, ledger_id: int, entry_id: int) -> None:
        hashes = self._hash_at.get(ledger_id)
        if hashes is None or (key_hash := hashes.pop(entry_id, None)) is None:
            return
        if not hashes:
            del self._hash_at[ledger_id]
        self.entries -= 1
        key = self._keys[key_hash]
        del key.positions[bisect_left(key.positions, (ledger_id, entry_id))]
        if not key.positions:
            del self._keys[key_hash]
        if key.door is not None:
            door = self._doors[key.door]
            door.discard(ledger_id, entry_id)
            if not door:
                self._remove(key.door)

    def discard_range(self, ledger_id: int, first: int, last: int) -> None:
        for entry_id in self._in_range(ledger_id, first, last):
            self.discard(ledger_id, entry_id)

    def keep_only(self, ledger_id: int, first: int, last: int, runs: Sequence[Run]) -> None:
        """Discard the waiting entries in `first..last` outside of the runs (sorted): they are acknowledged."""
        start = first
        for run_first, run_last in runs:
            if run_first > start:
                self.discard_range(ledger_id, start, run_first - 1)
            start = run_last + 1
        if start <= last:
            self.discard_range(ledger_id, start, last)

    def forget_acknowledged(self, acks: AckView) -> None:
        for ledger_id, hashes in list(self._hash_at.items()):
            for entry_id in acknowledged_of(acks, ledger_id, hashes):
                self.discard(ledger_id, entry_id)

    def _in_range(self, ledger_id: int, first: int, last: int) -> list[int]:
        hashes = self._hash_at.get(ledger_id, {})
        if last - first < len(hashes):
            return [entry_id for entry_id in range(first, last + 1) if entry_id in hashes]
        return [entry_id for entry_id in hashes if first <= entry_id <= last]

    def move(self, key: WaitingKey, door: int | None) -> None:
        if door == key.door:
            return
        if key.door is not None:
            old = self._doors[key.door]
            for position in key.positions:
                old.discard(*position)
            if not old:
                self._remove(key.door)
        key.door = door
        if door is not None:
            new = self._door(door)
            for position in key.positions:
                new.add(*position)

    def clear(self) -> None:
        self.entries = 0
        self._keys.clear()
        self._hash_at.clear()
        self._doors.clear()
        self._ready.clear()

    def doors(self) -> Iterator[tuple[int, PositionSet]]:
        """Return the consumers that entries wait for."""
        return iter(self._doors.items())

    def open(self, consumer: int) -> None:
        """Note that the consumer can take messages."""
        self._open[consumer] = None
        if (door := self._doors.get(consumer)) is not None:
            self._ready[consumer] = door

    def close(self, consumer: int) -> None:
        """Note that the consumer cannot take messages, or has left."""
        if consumer in self._open:
            del self._open[consumer]
            self._ready.pop(consumer, None)

    def first_ready(self) -> int | None:
        """Return the consumer with the earliest waiting entry, of those that can take messages and have one."""
        first: tuple[Position, int] | None = None
        for consumer, positions in self._ready.items():
            position = positions.first()
            assert position is not None, "doors are removed with their last entry"
            if first is None or position < first[0]:
                first = position, consumer
        return None if first is None else first[1]

    def _door(self, consumer: int) -> PositionSet:
        door = self._doors.get(consumer)
        if door is None:
            door = self._doors[consumer] = PositionSet()
            if consumer in self._open:
                self._ready[consumer] = door
        return door

    def _remove(self, consumer: int) -> None:
        del self._doors[consumer]
        self._ready.pop(consumer, None)
