"""Wall-clock time by which data may be given up: never faster than the loop's since it was made.

A wall clock that jumps ahead expires nothing; one that jumps back only delays. One that was wrong when this was made cannot be
told from a right one: what must not go by it alone asks `age_s` too.
"""

from __future__ import annotations

import asyncio

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
        return min(self._wall_ms(), self._made_at_ms + int(1_000 * self.age_s))
