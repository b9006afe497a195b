"""Follows a log file from its last lines on."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

POLL_S = 0.1


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last lines; empty if nothing was logged yet."""
    try:
        with path.open(errors="replace") as log:
            return _last_lines(log, count)
    except FileNotFoundError:
        return []


def follow_log(path: Path, count: int) -> None:
    """Print the last lines and later ones, until Ctrl-C."""
    try:
        for text in followed(path, count):
            print(text, end="", flush=True)
    except KeyboardInterrupt:
        pass


def followed(path: Path, count: int) -> Iterator[str]:
    """Yield the last lines, then appended lines without end, from one open file, so that none is lost in between."""
    path.touch()
    with path.open(errors="replace") as log:
        yield "".join(_last_lines(log, count))
        while True:
            if text := log.read():
                yield text
            else:
                time.sleep(POLL_S)


def _last_lines(log: TextIO, count: int) -> list[str]:
    return list(deque(log, maxlen=count))
