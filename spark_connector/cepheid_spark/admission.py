"""How much of the backlog a micro-batch takes, and how that is split over topic partitions.

    backlog of each topic ──► enough for a batch? (min bytes, max delay) ──► budget in bytes and in entries ──► entries of each

Rules
1. A budget is kept, but a batch takes one entry at least: an entry above the budget must not end the stream.
2. Every topic with a backlog takes one entry at least, as far as the budget goes, oldest first; what is left of it is split in
   proportion to what they have behind them, so that all of them reach their ends at about the same time.
3. Under Trigger.Once no limit counts; under AvailableNow the maxima do, the minimum does not: it would never end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backlog:
    """Of one topic. `waiting_since_ms` orders topics by how long their oldest entry waits; smaller is older."""

    topic: str
    entries: int
    size_bytes: float
    waiting_since_ms: float = 0.0

    @property
    def entry_bytes(self) -> float:
        return self.size_bytes / self.entries if self.entries else 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Of a micro-batch; None: none."""

    max_bytes: int | None = None
    max_entries: int | None = None
    min_bytes: int | None = None
    max_delay_s: float = 900.0


NO_LIMITS = Limits()


def admit(backlogs: Sequence[Backlog], limits: Limits) -> dict[str, int]:
    """Entries of each topic, those with none left out."""
    oldest_first = sorted((each for each in backlogs if each.entries > 0), key=lambda each: (each.waiting_since_ms, each.topic))
    taken = [each.entries for each in oldest_first]
    if limits.max_bytes is not None:
        taken = split(taken, [max(1.0, each.entry_bytes) for each in oldest_first], limits.max_bytes)
    if limits.max_entries is not None:
        taken = split(taken, [1.0] * len(taken), limits.max_entries)
    return {each.topic: entries for each, entries in zip(oldest_first, taken, strict=True) if entries > 0}


def split(wanted: Sequence[int], costs: Sequence[float], budget: float) -> list[int]:
    """Whole units of each, oldest first: `wanted` at most, `budget` at most (rule 1) at `costs` a unit."""
    if sum(count * cost for count, cost in zip(wanted, costs, strict=True)) <= budget:
        return list(wanted)
    taken = [0] * len(wanted)
    left = float(budget)
    for index, cost in enumerate(costs):  # one of each, oldest first
        if wanted[index] > 0 and (cost <= left or not any(taken)):
            taken[index], left = 1, left - cost
    behind = [(wanted[index] - taken[index]) * cost if taken[index] else 0.0 for index, cost in enumerate(costs)]
    total, shared = sum(behind), max(0.0, left)
    for index, cost in enumerate(costs):  # the rest by what is behind
        if behind[index] > 0:
            more = min(wanted[index] - taken[index], int(shared * behind[index] / total / cost))
            taken[index], left = taken[index] + more, left - more * cost
    for index, cost in enumerate(costs):  # what rounding left
        if 0 < taken[index] < wanted[index] and cost <= left:
            more = min(wanted[index] - taken[index], int(left / cost))
            taken[index], left = taken[index] + more, left - more * cost
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
