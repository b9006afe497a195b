"""Delays between attempts: twice as long each time, up to a limit, with some randomness."""

from __future__ import annotations

import random


class Backoff:
    """Delays of one sequence of attempts. `reset` after a success."""

    def __init__(self, first_s: float = 0.1, limit_s: float = 10.0) -> None:
        self._first_s = first_s
        self._limit_s = limit_s
        self._next_s = first_s

    def next_s(self) -> float:
        """Return the next delay in seconds. Up to a fifth is subtracted at random, so that clients do not retry in step."""
        delay_s, self._next_s = self._next_s, min(2 * self._next_s, self._limit_s)
        return delay_s * (1 - 0.2 * random.random())

    def reset(self) -> None:
        self._next_s = self._first_s
