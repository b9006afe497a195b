"""Work that is finished although its caller may give up: cancelling it half-way would leave an unknown outcome behind."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from cepheid_managed_ledger.errors import ManagedLedgerClosedError
from cepheid_ports import TaskOwner

T = TypeVar("T")


async def finish(tasks: TaskOwner, work: Coroutine[Any, Any, T], *, name: str) -> T:
    """What `work` returns or raises. Cancelling the caller does not cancel it; its bound in time is its own.

    Raises ManagedLedgerClosedError when `tasks` is closed before `work` is done: the caller was not cancelled, and may have
    somebody to answer."""
    task = tasks.start(_outcome(work), name=name)
    task.add_done_callback(lambda _: work.close())  # `tasks` may be closed before its first step: then nobody awaited it
    outcome: T | Exception
    try:
        outcome = await asyncio.shield(task)
    except asyncio.CancelledError:
        caller = asyncio.current_task()
        if not task.cancelled() or (caller is not None and caller.cancelling()):
            raise
        raise ManagedLedgerClosedError(f"{name} was given up: whoever did it is closed") from None
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


async def _outcome(work: Coroutine[Any, Any, T]) -> T | Exception:
    """Errors belong to whoever awaits `finish`, not to the owner of the task."""
    try:
        return await work
    except Exception as error:
        return error
