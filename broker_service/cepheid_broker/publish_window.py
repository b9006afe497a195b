"""Bytes that were published and not yet answered: they stop a fast producer before memory runs out.

    SEND ──take──► window of its connection ──► budget of the process
    receipt ──give_back──┘                          └── full: every connection that publishes stops reading

Both limits are soft by one frame, which is in memory already, and resume at half, to avoid flapping.
"""

from __future__ import annotations

from collections.abc import Callable


class PublishBudget:
    """Budget of the whole process. At its limit every window that takes bytes pauses; at half all of them resume."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.pauses = 0
        self._paused: dict[PublishWindow, None] = {}

    def __repr__(self) -> str:
        return f"<PublishBudget {self.used_bytes} of {self.limit_bytes} B, {len(self._paused)} connections paused>"

    def take(self, window: PublishWindow, size_bytes: int) -> bool:
        """Take bytes. Return False if the window has to pause; the budget resumes it."""
        self.used_bytes += size_bytes
        if self.used_bytes < self.limit_bytes:
            return True
        self.pauses += 1
        self._paused[window] = None
        return False

    def give_back(self, size_bytes: int) -> None:
        self.used_bytes -= size_bytes
        assert self.used_bytes >= 0
        if self._paused and self.used_bytes <= self.limit_bytes // 2:
            paused, self._paused = self._paused, {}
            for window in paused:
                window.on_budget_free()

    def forget(self, window: PublishWindow) -> None:
        self._paused.pop(window, None)


class PublishWindow:
    """Window of one connection."""

    def __init__(
        self, limit_bytes: int, budget: PublishBudget, pause_reading: Callable[[], None], resume_reading: Callable[[], None]
    ) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.pauses = 0
        self._budget = budget
        self._pause_reading = pause_reading
        self._resume_reading = resume_reading
        self._own_pause = False
        self._budget_pause = False

    def __repr__(self) -> str:
        return f"<PublishWindow {self.used_bytes} of {self.limit_bytes} B{', paused' if self.paused else ''}>"

    @property
    def paused(self) -> bool:
        return self._own_pause or self._budget_pause

    def take(self, size_bytes: int) -> None:
        was_paused = self.paused
        self.used_bytes += size_bytes
        if self.used_bytes >= self.limit_bytes:
            self._own_pause = True
        if not self._budget.take(self, size_bytes):
            self._budget_pause = True
        if self.paused and not was_paused:
            self.pauses += 1
            self._pause_reading()

    def give_back(self, size_bytes: int) -> None:
        self.used_bytes -= size_bytes
        assert self.used_bytes >= 0
        if self._own_pause and self.used_bytes <= self.limit_bytes // 2:
            self._own_pause = False
            self._resume_if_free()
        self._budget.give_back(size_bytes)

    def on_budget_free(self) -> None:
        self._budget_pause = False
        self._resume_if_free()

    def close(self) -> None:
        """Leave the budget after the connection was lost; its pending bytes are still given back when they complete."""
        self._budget.forget(self)

    def _resume_if_free(self) -> None:
        if not self.paused:
            self._resume_reading()
