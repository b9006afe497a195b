"""Bundles: even ranges of a namespace's hash space. A topic is served by whoever owns the bundle that its name falls into.

4 bundles → 0x00000000, 0x40000000, 0x80000000, 0xc0000000, 0xffffffff      the upper end belongs to the last one only
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise

from cepheid_wire import NamespaceName, TopicName

_HASH_END = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Bundle:
    """`first` and `last` include both ends."""

    namespace: NamespaceName
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.namespace}/{self.range}"

    @property
    def range(self) -> str:
        """As the API and the records' keys write it: the upper end is that of the next bundle's start, but for the last one."""
        end = self.last if self.last == _HASH_END else self.last + 1
        return f"0x{self.first:08x}_0x{end:08x}"

    @property
    def noun(self) -> tuple[str, str, str]:
        """Of its records."""
        return self.namespace.tenant, self.namespace.local_name, self.range

    def holds(self, topic: TopicName) -> bool:
        return topic.namespace == self.namespace and self.first <= _hash(topic) <= self.last


def boundaries(count: int) -> list[str]:
    """`count` + 1 values, first 0x00000000, last 0xffffffff (docs/reference/shapes.md §2, BundlesData)."""
    return [*(f"0x{start:08x}" for start in _starts(count)), f"0x{_HASH_END:08x}"]


def bundles_of(namespace: NamespaceName, count: int) -> list[Bundle]:
    ends = [*_starts(count), _HASH_END + 1]
    return [Bundle(namespace, first, end - 1) for first, end in pairwise(ends)]


def bundle_of(topic: TopicName, count: int) -> Bundle:
    """The one that holds the topic."""
    starts = _starts(count)
    index = max(index for index, start in enumerate(starts) if start <= _hash(topic))
    last = starts[index + 1] - 1 if index + 1 < count else _HASH_END
    return Bundle(topic.namespace, starts[index], last)


def preference(bundle: Bundle, brokers: Iterable[str], preferred: str = "") -> list[str]:
    """Ids of brokers, best first: in this order all brokers choose alike, whatever order they know the ids in.

    Rendezvous: each broker's rank for a bundle hangs on these two alone, so a broker that comes or goes moves its own bundles only.
    """

    def rank(broker_id: str) -> tuple[bool, bytes]:
        return broker_id != preferred, blake2b(f"{bundle} {broker_id}".encode(), digest_size=8).digest()

    return sorted(dict.fromkeys(brokers), key=rank)


def _hash(topic: TopicName) -> int:
    """CRC-32 of the full name, as Pulsar's NamespaceBundleFactory hashes it."""
    return zlib.crc32(str(topic).encode())


def _starts(count: int) -> list[int]:
    step = (_HASH_END + 1) // count
    return [index * step for index in range(count)]
