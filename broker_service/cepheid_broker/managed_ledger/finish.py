"""Work that is finished although its caller may give up: cancelling it half-way would leave an unknown outcome behind."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from cepheid_ports import TaskOwner

T = TypeVar("T")


async def finish(tasks: TaskOwner, work: Coroutine[Any, Any, T], *, name: str) -> T:
    """What `work` returns or raises. Cancelling the caller does not cancel it; its bound in time is its own."""
    outcome: T | Exception = await asyncio.shield(tasks.start(_outcome(work), name=name))
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


async def _outcome(work: Coroutine[Any, Any, T]) -> T | Exception:
    """Errors belong to whoever awaits `finish`, not to the owner of the task."""
    try:
        return await work
    except Exception as error:
        return error
