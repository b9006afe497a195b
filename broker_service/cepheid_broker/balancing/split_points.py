"""Where to cut a bundle: functions of its range and of the topics in it, without I/O.

A cut is the first hash of the upper part. Every function returns None if no cut leaves hashes or topics on both sides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise


def middle(first: int, last: int) -> int | None:
    """Return the middle of the range, which includes both ends."""
    return None if first == last else first + (last - first + 1) // 2


def by_topics(hashes: Sequence[int]) -> int | None:
    """Return the cut that leaves as many topics below it as above."""
    counts: dict[int, float] = {}
    for found in hashes:
        counts[found] = counts.get(found, 0.0) + 1.0
    return by_load(counts)


def by_load(loads: Mapping[int, float]) -> int | None:
    """Return the cut at which the loads of both parts differ least; `loads` are by hash."""
    ordered = sorted(loads.items())
    total, below = sum(loads.values()), 0.0
    best: tuple[float, int] | None = None
    for (lower, load), (upper, _) in pairwise(ordered):
        below += load
        uneven = abs(total - 2 * below)
        if best is None or uneven < best[0]:
            best = uneven, (lower + upper + 1) // 2  # above the lower topic, at or below the upper one
    return None if best is None else best[1]
