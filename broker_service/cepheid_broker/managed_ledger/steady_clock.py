"""Wall-clock time by which data may be given up: never faster than the loop's since it was made.

A wall clock that jumps ahead expires nothing; one that jumps back only delays.
"""

from __future__ import annotations

import asyncio

from cepheid_ports import Ports


class SteadyClock:
    def __init__(self, ports: Ports) -> None:
        self._wall_ms = ports.wall_ms
        self._made_at_ms = ports.wall_ms()
        self._made_at = asyncio.get_running_loop().time()

    def __repr__(self) -> str:
        return f"<SteadyClock {self.now_ms()} ms>"

    def now_ms(self) -> int:
        elapsed_ms = int(1_000 * (asyncio.get_running_loop().time() - self._made_at))
        return min(self._wall_ms(), self._made_at_ms + elapsed_ms)
