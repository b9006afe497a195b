"""Writes down what threads of one process see, in one order."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

from tests.history.events import Event


class Recorder:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.counts: Counter[str] = Counter()
        """Events of each kind; failed answers to sends count as "failed"."""
        self._lock = threading.Lock()
        self._started_s = time.monotonic()

    def __repr__(self) -> str:
        return f"<Recorder {len(self.events)} events>"

    def note(self, kind: str, actor: str = "", **fields: Any) -> None:
        """What is asked for is noted before it is done, what was seen after: the order is then never tighter than the truth."""
        with self._lock:
            self.counts["failed" if fields.get("error") else kind] += 1
            self.events.append(Event(kind, at_s=round(time.monotonic() - self._started_s, 6), actor=actor, **fields))
