"""Answers acknowledgements once they are durable: one save of the cursor serves all that wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cepheid_ports import TaskOwner

if TYPE_CHECKING:
    from cepheid_managed_ledger import Cursor

OnSaved = Callable[[Exception | None], None]


class AckSaver:
    """Pending answers of one subscription."""

    def __init__(self, cursor: Cursor, tasks: TaskOwner) -> None:
        self._cursor = cursor
        self._tasks = tasks
        self._waiting: list[OnSaved] = []
        self._saving = False

    def __repr__(self) -> str:
        return f"<AckSaver {len(self._waiting)} waiting>"

    def when_saved(self, on_saved: OnSaved) -> None:
        """Call `on_saved` when everything acknowledged so far is durable, or with the error."""
        self._waiting.append(on_saved)
        if not self._saving:
            self._saving = True
            self._tasks.start(self._save(), name="save-acknowledgements")

    async def _save(self) -> None:
        try:
            while self._waiting:
                wanted, self._waiting = self._waiting, []
                failure: Exception | None = None
                try:
                    await self._cursor.saved()
                except Exception as error:  # whatever it is, all waiting callers get an answer
                    failure = error
                for on_saved in wanted:
                    on_saved(failure)
        finally:
            self._saving = False
