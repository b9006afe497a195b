"""Which consumer of a Key_Shared subscription owns which key hashes.

    AutoSplit   8,192 slots of 8 hashes each; all consumers have nearly the same number
                join: each of the others gives some ──► the newcomer     leave: its slots ──► the others     nothing else moves
    Sticky      the ranges that consumers asked for; a hash outside of all ranges has no owner

A consistent-hash ring would also move little, but leaves shares that differ by a factor, as does halving the largest range.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol

from cepheid_broker.dispatch.effects import HashRange
from cepheid_broker.dispatch.key_hash import HASHES

SLOTS = 8192
_SLOT_SHIFT = (HASHES // SLOTS).bit_length() - 1


class KeyOwners(Protocol):
    def owner(self, key_hash: int) -> int | None: ...

    def join(self, consumer: int, ranges: Sequence[HashRange] | None) -> None: ...

    def leave(self, consumer: int) -> None: ...

    def ranges_of(self, consumer: int) -> tuple[HashRange, ...]:
        """Return the ranges that the consumer owns, sorted; neighbours are joined."""


class AutoSplit:
    def __init__(self) -> None:
        self._owner_of_slot: list[int | None] = [None] * SLOTS
        self._slots: dict[int, list[int]] = {}

    def __repr__(self) -> str:
        return f"<AutoSplit over {len(self._slots)} consumers>"

    def owner(self, key_hash: int) -> int | None:
        return self._owner_of_slot[key_hash >> _SLOT_SHIFT]

    def join(self, consumer: int, ranges: Sequence[HashRange] | None = None) -> None:
        assert consumer not in self._slots
        others = list(self._slots.values())
        if not others:
            self._give(consumer, list(range(SLOTS)))
            return
        share = SLOTS // (len(others) + 1)
        keep = -(-(SLOTS - share) // len(others))  # at most this many stay with each of the others
        taken: list[int] = []
        for slots in others:
            surplus = len(slots) - keep
            if surplus > 0:
                taken += slots[-surplus:]
                del slots[-surplus:]
        for slots in others:  # what rounding left
            if len(taken) < share and len(slots) == keep:
                taken.append(slots.pop())
        self._give(consumer, taken)

    def leave(self, consumer: int) -> None:
        freed = self._slots.pop(consumer)
        if not self._slots:
            self._owner_of_slot = [None] * SLOTS
            return
        share = -(-SLOTS // len(self._slots))
        for other, slots in self._slots.items():
            missing = share - len(slots)
            if missing > 0 and freed:
                self._give(other, freed[-missing:])
                del freed[-missing:]
        assert not freed, "shares are rounded up: they have room for all slots"

    def ranges_of(self, consumer: int) -> tuple[HashRange, ...]:
        ranges: list[HashRange] = []
        for slot in sorted(self._slots.get(consumer, ())):
            first, last = slot << _SLOT_SHIFT, ((slot + 1) << _SLOT_SHIFT) - 1
            if ranges and ranges[-1][1] == first - 1:
                first = ranges.pop()[0]
            ranges.append((first, last))
        return tuple(ranges)

    def _give(self, consumer: int, slots: list[int]) -> None:
        self._slots.setdefault(consumer, []).extend(slots)
        for slot in slots:
            self._owner_of_slot[slot] = consumer


class Sticky:
    def __init__(self) -> None:
        self._ranges: list[tuple[int, int, int]] = []  # first, last, consumer; sorted, without overlaps

    def __repr__(self) -> str:
        return f"<Sticky {self._ranges}>"

    def owner(self, key_hash: int) -> int | None:
        at = bisect_right(self._ranges, key_hash, key=_first) - 1
        if at < 0:
            return None
        _, last, consumer = self._ranges[at]
        return consumer if key_hash <= last else None

    def join(self, consumer: int, ranges: Sequence[HashRange] | None) -> None:
        assert ranges, "ranges are checked at SUBSCRIBE (key_sharing.py), also for overlaps"
        self._ranges = sorted([*self._ranges, *((first, last, consumer) for first, last in ranges)])

    def leave(self, consumer: int) -> None:
        self._ranges = [taken for taken in self._ranges if taken[2] != consumer]

    def ranges_of(self, consumer: int) -> tuple[HashRange, ...]:
        return tuple((first, last) for first, last, its_consumer in self._ranges if its_consumer == consumer)


def _first(taken: tuple[int, int, int]) -> int:
    return taken[0]
