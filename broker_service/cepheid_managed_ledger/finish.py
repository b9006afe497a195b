"""Finishes work although its caller may be cancelled: stopping it half-way would leave an unknown outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from cepheid_managed_ledger.errors import ManagedLedgerClosedError
from cepheid_ports import TaskOwner

T = TypeVar("T")


async def finish(tasks: TaskOwner, work: Coroutine[Any, Any, T], *, name: str) -> T:
    """Return or raise the outcome of `work`. Cancelling the caller does not cancel it; it has its own time limit.

    Raises ManagedLedgerClosedError if `tasks` is closed before `work` is done: the caller was not cancelled, and may owe an answer.
    """
    task = tasks.start(_outcome(work), name=name)
    task.add_done_callback(lambda _: work.close())  # `tasks` may be closed before its first step: then it was never awaited
    outcome: T | Exception
    try:
        outcome = await asyncio.shield(task)
    except asyncio.CancelledError:
        caller = asyncio.current_task()
        if not task.cancelled() or (caller is not None and caller.cancelling()):
            raise
        raise ManagedLedgerClosedError(f"{name} was given up because its owner was closed") from None
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


async def _outcome(work: Coroutine[Any, Any, T]) -> T | Exception:
    """Return an error instead of raising it: it belongs to the caller of `finish`, not to the owner of the task."""
    try:
        return await work
    except Exception as error:
        return error
