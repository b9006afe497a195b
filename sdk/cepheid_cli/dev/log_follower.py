"""The end of a log file, and what is written to it from now on."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

POLL_S = 0.1


def last_lines(path: Path, count: int) -> list[str]:
    """Empty when nothing was logged yet."""
    try:
        with path.open(errors="replace") as log:
            return list(deque(log, maxlen=count))
    except FileNotFoundError:
        return []


def follow_log(path: Path) -> None:
    """Prints what comes, until Ctrl-C."""
    try:
        for text in _appended(path):
            print(text, end="", flush=True)
    except KeyboardInterrupt:
        pass


def _appended(path: Path) -> Iterator[str]:
    path.touch()
    with path.open(errors="replace") as log:
        log.seek(0, 2)
        while True:
            if text := log.read():
                yield text
            else:
                time.sleep(POLL_S)
