"""Wall clocks of simulated machines: each has its own, wrong by a little, and now and then by days. Loop time stays sane.

    true time ──offset, rate──► what `Ports.wall_ms` of every process on that machine shows

Rule 1: a clock belongs to the machine: a process that is started again finds it as wrong as it was.
Rule 2: people may be shown anything; nothing acknowledged, and nothing that somebody has yet to read, may vanish by it.
"""

from __future__ import annotations

import asyncio
import random

from tests.simulation.world.virtual_loop import START_S

_START_MS = 1_700_000_000_000
DAY_MS = 86_400_000
JUMPS_MS = (-365 * DAY_MS, -2 * DAY_MS, -3_600_000, -5_000, 5_000, 3_600_000, 2 * DAY_MS, 9 * DAY_MS, 365 * DAY_MS)


def true_ms() -> int:
    return _START_MS + int((asyncio.get_running_loop().time() - START_S) * 1000)


class MachineClock:
    def __init__(self, offset_ms: int = 0, rate: float = 1.0) -> None:
        self._shown_ms = float(offset_ms + _START_MS)  # … at `_since_s`
        self._since_s = START_S
        self._rate = rate

    def __repr__(self) -> str:
        return f"<MachineClock {self.wall_ms() - true_ms():+} ms, {self._rate:.4f} s a second>"

    def wall_ms(self) -> int:
        return int(self._shown_ms + (asyncio.get_running_loop().time() - self._since_s) * 1000 * self._rate)

    def jump(self, by_ms: int) -> None:
        """As an operator or a time server sets it."""
        self._become(self.wall_ms() + by_ms, self._rate)

    def drift(self, rate: float) -> None:
        """From now on it shows so many seconds for one."""
        self._become(self.wall_ms(), rate)

    def correct(self) -> None:
        self._become(true_ms(), 1.0)

    def _become(self, shown_ms: int, rate: float) -> None:
        self._shown_ms, self._rate = float(shown_ms), rate
        self._since_s = asyncio.get_running_loop().time()


class MachineClocks:
    """By machine. `skew_s` and `drift` bound how wrong they are from the first moment."""

    def __init__(self, seed: str, skew_s: float, drift: float) -> None:
        self._seed = seed
        self._skew_s = skew_s
        self._drift = drift
        self._clocks: dict[str, MachineClock] = {}

    def of(self, machine: str) -> MachineClock:
        if machine not in self._clocks:
            rng = random.Random(f"{self._seed}/clock/{machine}")
            offset_ms = int(1000 * rng.uniform(-self._skew_s, self._skew_s))
            self._clocks[machine] = MachineClock(offset_ms, 1.0 + rng.uniform(-self._drift, self._drift))
        return self._clocks[machine]
