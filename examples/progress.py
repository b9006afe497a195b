"""Wait for a condition for as long as something moves, so that a slow machine does not fail and a stuck one does."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from cepheid_ports import CepheidError

_POLL_S = 0.05


class DemoStalledError(CepheidError):
    """Nothing moved for a long time."""


def wait_while_moving(condition: Callable[[], bool], progress: Callable[[], object], *, stall_s: float, logs: Path) -> None:
    """Wait until `condition()` is true, with a call of `progress()` at each look and a last one after it.

    Raises DemoStalledError when `progress()` has returned the same for `stall_s` seconds; `logs` is where the error says to look.
    """
    moved_at, last = time.monotonic(), progress()
    while not condition():
        now = progress()
        if now != last:
            moved_at, last = time.monotonic(), now
        if time.monotonic() - moved_at > stall_s:
            raise DemoStalledError(f"nothing moved for {stall_s:.0f} s at {now}: see the logs in {logs}")
        time.sleep(_POLL_S)
    progress()
