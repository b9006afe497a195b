"""How a reader that is closed ends what its threads wait for.

    ScanReader.close ──► StopSignal.set ──┬─► pauses are over
                                          ├─► reads of bookies are closed, whatever they wait for
                                          └─► who asks gets StoppedError

Rule: to be stopped is an error, never an end: whoever still reads must not take it for the end of the rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StoppedError(Exception):
    """Nobody wants the rows any more."""

    def __init__(self) -> None:
        super().__init__("stopped by the reader")


class StopSignal:
    """Of one reader and all of its threads; set once, and then for good."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_set = False
        self._ends: list[Callable[[], object]] = []

    def set(self) -> None:
        """From any thread. Not from a signal handler in the midst of what it ends: that thread may hold the locks of it."""
        with self._changed:
            self._is_set = True
            self._changed.notify_all()
            ends = list(self._ends)
        for end in ends:
            end()

    def is_set(self) -> bool:
        return self._is_set

    def check(self) -> None:
        """Raises StoppedError when it is set."""
        if self._is_set:
            raise StoppedError

    def pause(self, duration_s: float) -> None:
        """Raises StoppedError, as soon as it is set."""
        with self._changed:
            self._changed.wait_for(self.is_set, duration_s)
        self.check()

    @contextmanager
    def ending(self, end: Callable[[], object]) -> Iterator[None]:
        """Meanwhile `set` calls `end`, which any thread may do, and twice. Raises StoppedError when it is set already."""
        with self._changed:
            self.check()
            self._ends.append(end)
        try:
            yield
        finally:
            with self._changed:
                self._ends.remove(end)
