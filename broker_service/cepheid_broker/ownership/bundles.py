"""Bundles: ranges of a namespace's hash space. A topic is served by the owner of the bundle that the hash of its name is in.

4 equal bundles → 0x00000000, 0x40000000, 0x80000000, 0xc0000000, 0xffffffff      the upper end belongs to the last one only
the first split → 0x00000000, 0x20000000, 0x40000000, 0x80000000, 0xc0000000, 0xffffffff
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise

from cepheid_metadata import NamespaceRecord
from cepheid_wire import NamespaceName, TopicName

_HASH_END = 0xFFFFFFFF
MAX_BUNDLES = 128
"""Maximum of bundles of one namespace: Pulsar's limit for splits (docs/reference/behaviours.md §15)."""

Division = int | tuple[int, ...]
"""How a namespace is divided: the number of its equal ranges or, once a bundle was split, the first hash of each bundle."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """The topics of a namespace whose hashes are from `first` to `last`, both inclusive."""

    namespace: NamespaceName
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.namespace}/{self.range}"

    @property
    def range(self) -> str:
        """The range as written in the API and in keys: the upper end is the next bundle's start, except for the last bundle."""
        end = self.last if self.last == _HASH_END else self.last + 1
        return f"0x{self.first:08x}_0x{end:08x}"

    @property
    def noun(self) -> tuple[str, str, str]:
        """Key parts of the bundle's records."""
        return self.namespace.tenant, self.namespace.local_name, self.range

    def holds(self, topic: TopicName) -> bool:
        return topic.namespace == self.namespace and self.first <= topic_hash(topic) <= self.last

    def parts(self, starts: Sequence[int]) -> list[Bundle]:
        """Return the parts after a split; `starts` are the first hashes of all parts but the first one, ascending."""
        ends = [self.first, *starts, self.last + 1]
        return [Bundle(self.namespace, first, end - 1) for first, end in pairwise(ends)]


def division_of(record: NamespaceRecord) -> Division:
    """Return how the namespace with this record is divided."""
    return record.bundles if record.bundle_starts is None else record.bundle_starts


def boundaries(division: Division) -> list[str]:
    """Return one value more than there are bundles, from 0x00000000 to 0xffffffff (docs/reference/shapes.md §2, BundlesData)."""
    return [*(f"0x{start:08x}" for start in starts_of(division)), f"0x{_HASH_END:08x}"]


def bundles_of(namespace: NamespaceName, division: Division) -> list[Bundle]:
    ends = [*starts_of(division), _HASH_END + 1]
    return [Bundle(namespace, first, end - 1) for first, end in pairwise(ends)]


def bundle_of(topic: TopicName, division: Division) -> Bundle:
    """Return the bundle that holds the topic."""
    starts = starts_of(division)
    index = bisect_right(starts, topic_hash(topic)) - 1
    last = starts[index + 1] - 1 if index + 1 < len(starts) else _HASH_END
    return Bundle(topic.namespace, starts[index], last)


def is_in(bundle: Bundle, division: Division) -> bool:
    """Return whether a namespace with this division has the bundle."""
    starts = starts_of(division)
    index = bisect_right(starts, bundle.first) - 1
    last = starts[index + 1] - 1 if index + 1 < len(starts) else _HASH_END
    return starts[index] == bundle.first and bundle.last == last


def preference(bundle: Bundle, brokers: Iterable[str], preferred: str = "") -> list[str]:
    """Return the ids of brokers, best first. All brokers find the same order, whatever order they know the ids in.

    Rendezvous hashing: a broker's rank depends on its id and the bundle alone, so a broker that joins or leaves moves only its own
    bundles.
    """

    def rank(broker_id: str) -> tuple[bool, bytes]:
        return broker_id != preferred, blake2b(f"{bundle} {broker_id}".encode(), digest_size=8).digest()

    return sorted(dict.fromkeys(brokers), key=rank)


def topic_hash(topic: TopicName) -> int:
    """Return the CRC-32 of the full name, as Pulsar's NamespaceBundleFactory hashes it."""
    return zlib.crc32(str(topic).encode())


def starts_of(division: Division) -> Sequence[int]:
    """Return the first hash of each bundle."""
    if isinstance(division, tuple):
        return division
    step = (_HASH_END + 1) // division
    return range(0, division * step, step)
