"""One timer per broker, not one per cursor, that saves dirty cursors.

on_changed ──► note(store) ──cursor_flush_s──► store.save_dirty() of every noted topic, a bounded number at a time
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from cepheid_ports import TaskOwner

_TOPICS_AT_ONCE = 256  # their writes meet in the metadata store's group commit


class DirtyCursors(Protocol):
    async def save_dirty(self) -> None:
        """Save the dirty cursors. Reports its own failures, and notes itself again after one."""


class CursorFlusher:
    def __init__(self, flush_s: float) -> None:
        self._flush_s = flush_s
        self._noted: dict[DirtyCursors, None] = {}
        self._tasks = TaskOwner("cursor-flusher")
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<CursorFlusher {len(self._noted)} topics noted>"

    def note(self, dirty: DirtyCursors) -> None:
        self._noted[dirty] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._flush_s, self._start)

    def forget(self, dirty: DirtyCursors) -> None:
        self._noted.pop(dirty, None)

    async def aclose(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await self._tasks.aclose()

    def _start(self) -> None:
        self._timer = None
        noted, self._noted = list(self._noted), {}
        self._tasks.start(self._flush(noted), name="flush")

    async def _flush(self, noted: list[DirtyCursors]) -> None:
        for start in range(0, len(noted), _TOPICS_AT_ONCE):
            await asyncio.gather(*(dirty.save_dirty() for dirty in noted[start : start + _TOPICS_AT_ONCE]))
