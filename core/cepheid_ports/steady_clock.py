"""Wall-clock time by which data may be given up: never faster than the loop's since it was made.

A wall clock that jumps ahead expires nothing; one that jumps back only delays, also when it is right again (`stamp_ms`).
One that was wrong when this was made cannot be told from a right one: what must not go by it alone asks `age_s` too.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from cepheid_ports.ports import Ports


class SteadyClock:
    def __init__(self, ports: Ports) -> None:
        self._wall_ms = ports.wall_ms
        self._made_at_ms = ports.wall_ms()
        self._made_at = asyncio.get_running_loop().time()

    def __repr__(self) -> str:
        return f"<SteadyClock {self.now_ms()} ms>"

    @property
    def age_s(self) -> float:
        """By the loop's clock, which is sane."""
        return asyncio.get_running_loop().time() - self._made_at

    def now_ms(self) -> int:
        """By which something is old enough: rather too early."""
        return min(self._wall_ms(), self._by_the_loop_ms)

    def stamp_ms(self) -> int:
        """From which something will be counted as old: rather too late. Else a clock that was set back makes it old at once."""
        return max(self._wall_ms(), self._by_the_loop_ms)

    @property
    def _by_the_loop_ms(self) -> int:
        return self._made_at_ms + int(1_000 * self.age_s)


def iso_time(at_ms: int) -> str:
    """Return `2026-09-27T12:00:00.000Z`: the form of `connectedSince` and similar fields (docs/reference/shapes.md §4)."""
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
