"""Decides how much of the backlog a micro-batch takes, and how that is split over topic partitions.

    backlog of each topic ──► enough for a batch? (min bytes, max delay) ──► budget in bytes and in entries ──► entries of each

Rules
1. A budget is kept, but a batch takes at least one entry: an entry above the budget must not stop the stream.
2. Every topic with a backlog takes at least one entry if the budget suffices; the rest of the budget is split in proportion to
their
   remaining backlogs, so that all of them reach their ends at about the same time. If it does not suffice, the topics come
   first whose last turn is longest ago, then those with the oldest entry: entries of a ledger count as equally old, and by age
   alone topics would be drained one after the other.
3. Under Trigger.Once no limit applies; under AvailableNow the maxima do, but not the minimum: it would never end.
4. An entry's size is the average of its own ledger, since the average of the backlog may differ much from the next entries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from cepheid_spark.topic_view import TopicView


@dataclass(frozen=True, slots=True)
class Backlog:
    """Backlog of one topic: what follows `rank`, up to and including `last`. `waiting_since_ms`: its oldest entry. `turn`:
    the last batch that took some of it; 0: none yet."""

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
        """Return the bytes of the first so many entries."""
        return self.view.bytes_at(self.rank + entries) - self.view.bytes_at(self.rank)

    def fitting(self, size_bytes: float) -> int:
        """Return how many of the first entries fit into this size: the inverse of `size_of`."""
        return min(self.last, self.view.rank_within(self.view.bytes_at(self.rank) + size_bytes)) - self.rank


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a micro-batch; None: no limit."""

    max_bytes: int | None = None
    max_entries: int | None = None
    min_bytes: int | None = None
    max_delay_s: float = 900.0


NO_LIMITS = Limits()
SizeOf: TypeAlias = Callable[[int, int], float]
Fitting: TypeAlias = Callable[[int, float], int]


def admit(backlogs: Sequence[Backlog], limits: Limits) -> dict[str, int]:
    """Return the entries to take from each topic, without topics that have none."""
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
    """Return the entries to take from each part: all of them, or up to `budget` in total (rule 1), earlier parts first.

    `size_of` returns the budget taken by this many entries of a part, `fitting` how many of its entries fit into a budget.
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

    for index, size in enumerate(behind):  # the rest in proportion to the backlog
        if size > 0:
            take(index, shared * size / total)
    for index, entries in enumerate(taken):  # the rest after rounding
        if entries and left > 0:
            take(index, left)
    return taken


class Patience:
    """Decides whether a small batch should wait for more: at most `max_delay_s` after the batch before it."""

    def __init__(self, limits: Limits, now: float) -> None:
        self._limits = limits
        self._last_batch_at = now

    def is_due(self, backlog_bytes: float, now: float) -> bool:
        """Return whether the batch should start. `now`: monotonic clock in seconds."""
        least = self._limits.min_bytes
        return least is None or backlog_bytes >= least or now - self._last_batch_at >= self._limits.max_delay_s

    def on_batch(self, now: float) -> None:
        self._last_batch_at = now
