"""Choice of a message's partition.

key                      the partition of the key's hash: the same as with the official clients
no key, "round_robin"    one partition after the other; the partition stays the same while a batch is being filled
no key, "single"         always the same one, chosen at random when the producer is opened
a function               what it returns: `router(key, partitions) -> index`
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Literal

from cepheid.errors import UsageError

Router = Callable[[str | None, int], int]
Routing = Literal["round_robin", "single"] | Router
KeyHash = Literal["java_string", "boost", "murmur3"]

_MASK_32 = 0xFFFF_FFFF
_MASK_31 = 0x7FFF_FFFF


def java_string_hash(key: str) -> int:
    """Return Java's `String.hashCode` with the sign bit cleared: over UTF-16 units, like Pulsar's Java client."""
    value = 0
    units = key.encode("utf-16-le", "surrogatepass")
    for index in range(0, len(units), 2):
        value = (31 * value + (units[index] | units[index + 1] << 8)) & _MASK_32
    return value & _MASK_31


def murmur3_hash(key: bytes) -> int:
    """Return the 32-bit Murmur3 hash (x86, seed 0) with the sign bit cleared."""
    value, size = 0, len(key)
    for start in range(0, size - 3, 4):
        value ^= _murmur3_mix(int.from_bytes(key[start : start + 4], "little"))
        value = (value << 13 | value >> 19) & _MASK_32
        value = (value * 5 + 0xE6546B64) & _MASK_32
    if rest := key[size & ~3 :]:
        value ^= _murmur3_mix(int.from_bytes(rest, "little"))
    value ^= size
    value = (value ^ value >> 16) * 0x85EBCA6B & _MASK_32
    value = (value ^ value >> 13) * 0xC2B2AE35 & _MASK_32
    return (value ^ value >> 16) & _MASK_31


def _murmur3_mix(block: int) -> int:
    block = block * 0xCC9E2D51 & _MASK_32
    block = (block << 15 | block >> 17) & _MASK_32
    return block * 0x1B873593 & _MASK_32


_MASK_64 = (1 << 64) - 1


def boost_hash(key: bytes) -> int:
    """Return the 64-bit hash of text that Boost has computed since version 1.81 (`hash_range` of container_hash), cut to 31 bits.

    The official Python client 3.13 uses it: the tests compare.
    """
    step, factor = 0x9E3779B97F4A7C15, 0xDF442D22CE4859B9
    weight = _boost_mix(step, factor)
    value = weight ^ len(key)
    whole = len(key) & ~7
    for start in range(0, whole, 8):
        weight = (weight + step) & _MASK_64
        value ^= _boost_mix(int.from_bytes(key[start : start + 8], "little") + weight & _MASK_64, factor)
    rest = key[whole:]
    size, block = len(rest), 0
    if size >= 4:
        block = int.from_bytes(rest[-4:], "little") << 8 * (size - 4) & _MASK_64 | int.from_bytes(rest[:4], "little")
    elif size:
        middle, last = size - 1 & 2, size >> 1
        block = rest[middle] << 8 * middle | rest[last] << 8 * last | rest[0]
    weight = (weight + step) & _MASK_64
    value ^= _boost_mix(block + weight & _MASK_64, factor)
    return _boost_mix(value + weight & _MASK_64, factor) & _MASK_31


def _boost_mix(one: int, other: int) -> int:
    product = one * other
    return (product & _MASK_64) ^ (product >> 64)


_HASHES: dict[str, Callable[[str], int]] = {
    "java_string": java_string_hash,
    "boost": lambda key: boost_hash(key.encode()),
    "murmur3": lambda key: murmur3_hash(key.encode()),
}


class PartitionChooser:
    """Chooses among `partitions`, which may grow."""

    def __init__(self, partitions: int, routing: Routing, key_hash: KeyHash) -> None:
        if not callable(routing) and routing not in ("round_robin", "single"):
            raise UsageError(f"routing must be 'round_robin', 'single' or a function, got {routing!r}")
        if key_hash not in _HASHES:
            raise UsageError(f"key_hash must be one of {', '.join(_HASHES)}, got {key_hash!r}")
        self.partitions = partitions
        self._routing = routing
        self._hash = _HASHES[key_hash]
        self._turn = random.randrange(partitions)

    def choose(self, key: str | None) -> int:
        """Return the index of the partition for a message. Raises UsageError if a function returns an invalid index."""
        if callable(self._routing):
            index = self._routing(key, self.partitions)
            if not 0 <= index < self.partitions:
                raise UsageError(f"the routing function returned {index!r}; the topic has {self.partitions} partitions")
            return index
        if key is None:
            return self._turn % self.partitions
        return self._hash(key) % self.partitions

    def goes_by_turn(self, key: str | None) -> bool:
        """Return whether such a message may be sent to any partition."""
        return key is None and not callable(self._routing)

    def skip(self) -> int:
        """Return the index of the next partition, as that of this turn is unusable."""
        self._turn = (self._turn + 1) % self.partitions
        return self._turn

    def on_batch_ended(self) -> None:
        """Move to the next partition: the batch of messages without a key is full or was sent."""
        if self._routing == "round_robin":
            self._turn = (self._turn + 1) % self.partitions
