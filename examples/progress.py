"""Waits for a condition as long as there is progress, so that a slow machine does not fail but a stuck one does."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from cepheid_ports import CepheidError

_POLL_S = 0.05


class DemoStalledError(CepheidError):
    """There was no progress for a long time."""


def wait_while_moving(condition: Callable[[], bool], progress: Callable[[], object], *, stall_s: float, logs: Path) -> None:
    """Wait until `condition()` is true, calling `progress()` at each check and once more at the end.

    Raises DemoStalledError if `progress()` returns the same value for `stall_s` seconds; the error refers to `logs`.
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
