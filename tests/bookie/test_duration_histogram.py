"""Durations by upper bound."""

from __future__ import annotations

import math

from cepheid_bookie.duration_histogram import DurationHistogram


def test_a_duration_is_counted_once_at_the_first_bound_that_holds_it() -> None:
    times = DurationHistogram()
    for duration_s in (0.0, 0.0005, 0.000501, 0.004, 60.0):
        times.observe(duration_s)
    found = {bound: count for bound, count in times.buckets() if count}
    assert found == {0.0005: 2, 0.001: 1, 0.005: 1, math.inf: 1}
    assert math.isclose(times.total_s, 60.005001)
    assert [bound for bound, _ in times.buckets()] == sorted(bound for bound, _ in times.buckets())
