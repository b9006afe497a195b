"""Log lines about events that peers can repeat as often as they like: the first at once, then one for many every 30 seconds.

producer.refused  0.0 s  logged          0.1 s, 0.3 s, 0.7 s … counted          30.2 s  logged, repeated=12

Events that differ each time, such as names that a client invents, are logged too, up to MAX_LINES in a window; the first line of
the next window gives the number of those that were not logged.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

log = logging.getLogger(__name__)

WINDOW_S = 30.0
MAX_KEYS = 1000
MAX_LINES = 1000


_DETAILS = re.compile(r"'[^']*'|[0-9]+")


def without_details(reason: str) -> str:
    """Return a reason without the parts that a peer may choose: as `key`, reasons that differ only in them count as the same."""
    return _DETAILS.sub("", reason)


class RefusalLog:
    """One per broker. Keys above the limit are removed, oldest first; they count as new when they occur again."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[str, Hashable], tuple[float, int]] = OrderedDict()  # time of logging; repetitions since
        self._window_from = 0.0
        self._lines = self._unlogged = 0  # since then

    def note(self, event: str, key: Hashable, *, level: int = logging.INFO, **extra: Any) -> None:
        """`key` defines what counts as the same, for example a topic and a code."""
        now = asyncio.get_running_loop().time()
        logged_at, repeated = self._seen.get((event, key), (-WINDOW_S, 0))
        if now - logged_at < WINDOW_S:
            self._seen[event, key] = (logged_at, repeated + 1)
            return
        if not self._has_room(now):
            return
        if repeated:
            extra["repeated"] = repeated
        if self._unlogged:
            extra["unlogged"], self._unlogged = self._unlogged, 0
        log.log(level, event, extra=extra)
        self._seen[event, key] = (now, 0)
        self._seen.move_to_end((event, key))
        if len(self._seen) > MAX_KEYS:
            self._seen.popitem(last=False)

    def _has_room(self, now: float) -> bool:
        if now - self._window_from >= WINDOW_S:
            self._window_from, self._lines = now, 0
        if self._lines >= MAX_LINES:
            self._unlogged += 1
            return False
        self._lines += 1
        return True
