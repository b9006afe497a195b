"""The signal with which a closed reader ends the waits of its threads.

    ScanReader.close ──► StopSignal.set ──┬─► pauses are over
                                          ├─► reads of bookies are closed
                                          └─► `check` and `pause` raise StoppedError

Rule: being stopped is an error, never an end: it must not look like the end of the rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StoppedError(Exception):
    """The rows are no longer wanted."""

    def __init__(self) -> None:
        super().__init__("stopped by the reader")


class StopSignal:
    """The signal of one reader and all of its threads; set once, for good."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_set = False
        self._ends: list[Callable[[], object]] = []

    def set(self) -> None:
        """Set the signal, from any thread, but not from a signal handler that interrupts what it ends, which may hold the locks."""
        with self._changed:
            self._is_set = True
            self._changed.notify_all()
            ends = list(self._ends)
        for end in ends:
            end()

    def is_set(self) -> bool:
        return self._is_set

    def check(self) -> None:
        """Raise StoppedError if it is set."""
        if self._is_set:
            raise StoppedError

    def pause(self, duration_s: float) -> None:
        """Wait; raises StoppedError as soon as it is set."""
        with self._changed:
            self._changed.wait_for(self.is_set, duration_s)
        self.check()

    @contextmanager
    def ending(self, end: Callable[[], object]) -> Iterator[None]:
        """Have `set` call `end` inside the block, from any thread, perhaps twice. Raises StoppedError if it is set already."""
        with self._changed:
            self.check()
            self._ends.append(end)
        try:
            yield
        finally:
            with self._changed:
                self._ends.remove(end)
