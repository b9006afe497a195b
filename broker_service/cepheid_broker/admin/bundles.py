"""Bundles: even ranges of a namespace's hash space, as the API writes them.

4 bundles → 0x00000000, 0x40000000, 0x80000000, 0xc0000000, 0xffffffff      the upper end belongs to the last one only
"""

from __future__ import annotations

import zlib
from typing import Any

from cepheid_wire import TopicName

_HASH_END = 0xFFFFFFFF


def boundaries(count: int) -> list[str]:
    """`count` + 1 values, first 0x00000000, last 0xffffffff (docs/reference/shapes.md §2, BundlesData)."""
    return [*(f"0x{start:08x}" for start in _starts(count)), f"0x{_HASH_END:08x}"]


def bundles_data(count: int) -> dict[str, Any]:
    return {"boundaries": boundaries(count), "numBundles": count}


def bundle_of(topic: TopicName, count: int) -> str:
    """The range that holds the topic: CRC-32 of its full name, as Pulsar's NamespaceBundleFactory hashes it."""
    hashed = zlib.crc32(str(topic).encode())
    index = max(index for index, start in enumerate(_starts(count)) if start <= hashed)
    ends = boundaries(count)
    return f"{ends[index]}_{ends[index + 1]}"


def _starts(count: int) -> list[int]:
    step = (_HASH_END + 1) // count
    return [index * step for index in range(count)]
