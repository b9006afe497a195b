"""Which keys a consumer asks for: `keySharedMeta` of SUBSCRIBE, checked (protocol.md §12.3).

Consumers of a Key_Shared subscription share keys by it. A reader alone on an Exclusive subscription gets only keys in its ranges.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from cepheid_broker.dispatch.effects import HashRange
from cepheid_broker.dispatch.key_hash import HASHES
from cepheid_broker.dispatch.key_owners import AutoSplit, KeyOwners, Sticky
from cepheid_broker.errors import ConsumerAssignError
from cepheid_wire import pulsar_api_pb2 as pb

MAX_RANGES = 1000


@dataclass(frozen=True, slots=True)
class KeySharing:
    """A consumer's key sharing. `ranges` are its own; the rest is the same for all consumers of the subscription."""

    sticky: bool = False
    out_of_order: bool = False
    ranges: tuple[HashRange, ...] = ()

    def __str__(self) -> str:
        return f"{'sticky' if self.sticky else 'auto-split'}, {'out-of-order delivery' if self.out_of_order else 'in order'}"

    def conflict(self, other: KeySharing, holder: str) -> ConsumerAssignError | None:
        """Return the error if this is incompatible with `other`, of the consumer called `holder`."""
        if (self.sticky, self.out_of_order) != (other.sticky, other.out_of_order):
            return ConsumerAssignError(f"the key-shared mode is {self}; consumer {holder!r} of the subscription has {other}")
        if (overlap := _overlap(self.ranges, other.ranges)) is None:
            return None
        (first, last), (its_first, its_last) = overlap
        message = f"hash range {first}..{last} overlaps {its_first}..{its_last} of consumer {holder!r}"
        return ConsumerAssignError(message, first=first, last=last, holder=holder)

    def new_owners(self) -> KeyOwners:
        return Sticky() if self.sticky else AutoSplit()


def _overlap(ours: tuple[HashRange, ...], theirs: tuple[HashRange, ...]) -> tuple[HashRange, HashRange] | None:
    """Return a pair that overlaps; both arguments are sorted and without overlaps of their own."""
    i = j = 0
    while i < len(ours) and j < len(theirs):
        if ours[i][1] < theirs[j][0]:
            i += 1
        elif theirs[j][1] < ours[i][0]:
            j += 1
        else:
            return ours[i], theirs[j]
    return None


def key_sharing_of(ask: pb.CommandSubscribe) -> KeySharing:
    """Return the key sharing asked for; auto-split in order without the field (old clients) and for types that ignore keys.

    Raises ConsumerAssignError.
    """
    if ask.subType not in (pb.CommandSubscribe.Key_Shared, pb.CommandSubscribe.Exclusive):
        return KeySharing()
    meta = ask.keySharedMeta
    sticky = ask.HasField("keySharedMeta") and meta.keySharedMode == pb.STICKY
    ranges: tuple[HashRange, ...] = ()
    if sticky:
        if not 1 <= len(meta.hashRanges) <= MAX_RANGES:
            raise ConsumerAssignError(f"a sticky consumer needs 1 to {MAX_RANGES} hash ranges, not {len(meta.hashRanges)}")
        ranges = tuple(sorted((asked.start, asked.end) for asked in meta.hashRanges))
        _check(ranges)
    return KeySharing(sticky, meta.allowOutOfOrderDelivery, ranges)


def _check(ranges: tuple[HashRange, ...]) -> None:
    for first, last in ranges:
        if not 0 <= first <= last < HASHES:
            raise ConsumerAssignError(
                f"hash range {first}..{last} is invalid: ranges are within 0..{HASHES - 1}", first=first, last=last
            )
    for (first, last), (following, its_last) in pairwise(ranges):
        if following <= last:
            raise ConsumerAssignError(f"hash ranges {first}..{last} and {following}..{its_last} of one consumer overlap")
