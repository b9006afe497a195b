"""Histogram of durations by upper bound, for quantiles over any time and any number of bookies."""

from __future__ import annotations

from bisect import bisect_left

_BOUNDS_S = (
    0.0005,
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.5,
    1.0,
    5.0,
    float("inf"),
)  # from a sync of flash to that of a dying disk


class DurationHistogram:
    """A histogram at one bisect per observation: for groups, never for entries."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._counts = [0] * len(_BOUNDS_S)

    def __repr__(self) -> str:
        return f"<DurationHistogram {sum(self._counts)} in {self.total_s:.3f} s>"

    def observe(self, duration_s: float) -> None:
        self.total_s += duration_s
        self._counts[bisect_left(_BOUNDS_S, duration_s)] += 1

    def buckets(self) -> tuple[tuple[float, int], ...]:
        """Pairs (upper bound in seconds, observations above the bound before), ascending; the last bound is infinity."""
        return tuple(zip(_BOUNDS_S, self._counts, strict=True))
