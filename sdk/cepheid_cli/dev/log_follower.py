"""The end of a log file, and what is written to it from now on."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

POLL_S = 0.1


def last_lines(path: Path, count: int) -> list[str]:
    """Empty when nothing was logged yet."""
    try:
        with path.open(errors="replace") as log:
            return _last_lines(log, count)
    except FileNotFoundError:
        return []


def follow_log(path: Path, count: int) -> None:
    """Prints the last lines and what comes behind them, until Ctrl-C."""
    try:
        for text in followed(path, count):
            print(text, end="", flush=True)
    except KeyboardInterrupt:
        pass


def followed(path: Path, count: int) -> Iterator[str]:
    """The last lines, and then without end whatever is appended to them: of one open file, so that nothing falls in between."""
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
