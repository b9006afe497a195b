"""Work that is done once for all callers that ask for it at the same time.

Each caller may be cancelled; the work is cancelled when its last caller was. All callers get an error of the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

K = TypeVar("K")
T = TypeVar("T")


class SingleFlight(Generic[K, T]):
    def __init__(self, name: str, closed_error: Callable[[], Exception]) -> None:
        self._name = name
        self._closed_error = closed_error
        self._closed = False
        self._flights: dict[K, _Flight[T]] = {}

    def __repr__(self) -> str:
        return f"<SingleFlight {self._name}: {len(self._flights)} under way>"

    def __len__(self) -> int:
        return len(self._flights)

    async def run(self, key: K, work: Callable[[K], Awaitable[T]]) -> T:
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(asyncio.get_running_loop().create_task(self._work(key, work)))
            flight.task.add_done_callback(_retrieve)
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.task)
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if self._closed and current is not None and not current.cancelling():
                raise self._closed_error() from None  # the work was cancelled, not this caller
            raise
        finally:
            flight.waiting -= 1
            if not flight.waiting and not flight.task.done():
                self._forget(key, flight)  # the next caller starts it again
                flight.task.cancel()

    async def aclose(self) -> None:
        """Cancel the running work; its callers get `closed_error`."""
        self._closed = True
        tasks = [flight.task for flight in self._flights.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self, key: K, work: Callable[[K], Awaitable[T]]) -> T:
        flight = self._flights[key]
        try:
            return await work(key)
        finally:
            self._forget(key, flight)

    def _forget(self, key: K, flight: _Flight[T]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]


class _Flight(Generic[T]):
    __slots__ = ("task", "waiting")

    def __init__(self, task: asyncio.Task[T]) -> None:
        self.task = task
        self.waiting = 0


def _retrieve(task: asyncio.Task[T]) -> None:
    """An error that occurs after all callers were cancelled is ignored."""
    if not task.cancelled():
        task.exception()
