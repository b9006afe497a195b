"""How much of the backlog a micro-batch takes, and how that is split over topic partitions.

    backlog of each topic ──► enough for a batch? (min bytes, max delay) ──► budget in bytes and in entries ──► entries of each

Rules
1. A budget is kept, but a batch takes one entry at least: an entry above the budget must not end the stream.
2. Every topic with a backlog takes one entry at least, as far as the budget goes; what is left of it is split in proportion to what
   they have behind them, so that all of them reach their ends at about the same time. Where it does not go so far, those come
   first whose last turn is longest ago, of these whose entry is oldest: entries of a ledger pass for equally old, and by age
   alone topics would be drained one after the other.
3. Under Trigger.Once no limit counts; under AvailableNow the maxima do, the minimum does not: it would never end.
4. An entry counts as the average of its own ledger: of the backlog's there may be many more that come next, or far fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from cepheid_spark.topic_view import TopicView


@dataclass(frozen=True, slots=True)
class Backlog:
    """Of one topic: what lies behind `rank`, up to and with `last`. `waiting_since_ms`: its oldest entry; smaller is older. `turn`:
    which batch was the last that took of it; 0: none yet."""

    view: TopicView
    rank: int
    last: int
    waiting_since_ms: float = 0.0
    turn: int = 0

    @property
    def topic(self) -> str:
        return self.view.topic

    @property
    def entries(self) -> int:
        return self.last - self.rank

    @property
    def size_bytes(self) -> float:
        return self.size_of(self.entries)

    def size_of(self, entries: int) -> float:
        """Bytes of the first so many."""
        return self.view.bytes_at(self.rank + entries) - self.view.bytes_at(self.rank)

    def fitting(self, size_bytes: float) -> int:
        """How many of the first ones have no more bytes: `size_of`, the other way round."""
        return min(self.last, self.view.rank_within(self.view.bytes_at(self.rank) + size_bytes)) - self.rank


@dataclass(frozen=True, slots=True)
class Limits:
    """Of a micro-batch; None: none."""

    max_bytes: int | None = None
    max_entries: int | None = None
    min_bytes: int | None = None
    max_delay_s: float = 900.0


NO_LIMITS = Limits()
SizeOf: TypeAlias = Callable[[int, int], float]
Fitting: TypeAlias = Callable[[int, float], int]


def admit(backlogs: Sequence[Backlog], limits: Limits) -> dict[str, int]:
    """Entries of each topic, those with none left out."""
    waiting = [each for each in backlogs if each.entries > 0]
    waiting.sort(key=lambda each: (each.turn, each.waiting_since_ms, each.topic))
    taken = [each.entries for each in waiting]
    if limits.max_bytes is not None:
        taken = split(
            taken,
            limits.max_bytes,
            lambda index, entries: waiting[index].size_of(entries),
            lambda index, size: waiting[index].fitting(size),
        )
    if limits.max_entries is not None:
        most = taken
        taken = split(most, limits.max_entries, lambda _, entries: entries, lambda index, size: min(most[index], int(size)))
    return {each.topic: entries for each, entries in zip(waiting, taken, strict=True) if entries > 0}


def split(parts: Sequence[int], budget: float, size_of: SizeOf, fitting: Fitting) -> list[int]:
    """Entries of each: all of them, or `budget` in all at most (rule 1); whoever comes first is served first.

    `size_of` tells what so many entries of a part take of the budget, `fitting` how many of its entries take no more than so much.
    """
    whole = [size_of(index, entries) for index, entries in enumerate(parts)]
    if sum(whole) <= budget:
        return list(parts)
    taken = [0] * len(parts)
    left = float(budget)
    for index, entries in enumerate(parts):  # one of each
        if entries and ((size := size_of(index, 1)) <= left or not any(taken)):
            taken[index], left = 1, left - size
    behind = [size - size_of(index, 1) if taken[index] else 0.0 for index, size in enumerate(whole)]
    total, shared = sum(behind), max(0.0, left)

    def take(index: int, size: float) -> None:
        nonlocal left
        before = size_of(index, taken[index])
        taken[index] = max(taken[index], fitting(index, before + size))
        left -= size_of(index, taken[index]) - before

    for index, size in enumerate(behind):  # the rest by what is behind
        if size > 0:
            take(index, shared * size / total)
    for index, entries in enumerate(taken):  # what rounding left
        if entries and left > 0:
            take(index, left)
    return taken


class Patience:
    """Whether a batch that is still small should wait for more: at most `max_delay_s` after the batch before it."""

    def __init__(self, limits: Limits, now: float) -> None:
        self._limits = limits
        self._last_batch_at = now

    def is_due(self, backlog_bytes: float, now: float) -> bool:
        """`now` by a monotonic clock, in seconds."""
        least = self._limits.min_bytes
        return least is None or backlog_bytes >= least or now - self._last_batch_at >= self._limits.max_delay_s

    def on_batch(self, now: float) -> None:
        self._last_batch_at = now
