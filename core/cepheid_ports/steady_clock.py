"""Wall-clock time for the expiry of data: since its creation, it never runs faster than the loop's clock.

If the wall clock jumps ahead, nothing expires; if it jumps back, expiry is only delayed, also after it is corrected (`stamp_ms`).
A clock that was wrong when this was created cannot be detected: code that must not rely on it alone also checks `age_s`.
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
        """By the loop's clock, which is monotonic."""
        return asyncio.get_running_loop().time() - self._made_at

    def now_ms(self) -> int:
        """Use it to decide whether something is old enough: it is rather too early."""
        return min(self._wall_ms(), self._by_the_loop_ms)

    def stamp_ms(self) -> int:
        """Use it to record when something starts to age: it is rather too late. Otherwise, after the clock was set back, it would
        be old at once."""
        return max(self._wall_ms(), self._by_the_loop_ms)

    @property
    def _by_the_loop_ms(self) -> int:
        return self._made_at_ms + int(1_000 * self.age_s)


def iso_time(at_ms: int) -> str:
    """Return `2026-09-27T12:00:00.000Z`: the form of `connectedSince` and similar fields (docs/reference/shapes.md §4)."""
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
