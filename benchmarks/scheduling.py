"""Processes that take what processor time nobody else wants. Run as a module it spins: `python -m benchmarks.scheduling idle`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

CLASSES = ("idle", "normal")


def enter_class(name: str) -> None:
    """Of this process and what it starts from now on. Does nothing where the system has no such class."""
    if name == "idle" and sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def yield_as_a_session(pid: int, name: str) -> None:
    """Where Linux groups processes (sched(7), autogroup) it weighs whole sessions, and the class counts within one alone."""
    group = Path(f"/proc/{pid}/autogroup")
    if name == "idle" and group.exists():
        group.write_text("19")


if __name__ == "__main__":
    enter_class(sys.argv[1])
    while True:
        pass
