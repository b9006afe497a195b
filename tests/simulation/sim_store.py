"""The metadata store as a process sees it across a network: requests take time, are refused, or lose their answer.

    request ──delay, FIFO──► MemoryStore (one session of the shared MemoryTree) ──delay──► answer
                  └ refused: StoreUnavailableError                 └ lost: StoreUnavailableError(outcome_unknown=True)

`SimTree` shows every committed write to whoever keeps the history, with the process that made it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from cepheid_metadata import (
    MemoryStore,
    MemoryTree,
    Op,
    OpResult,
    SessionState,
    StoreUnavailableError,
    Versioned,
    Watch,
)
from tests.simulation.faults import FaultPlan

T = TypeVar("T")
_SPACING_S = 1e-9


class SimTree(MemoryTree):
    def __init__(self) -> None:
        super().__init__()
        self.on_commit: Callable[[Sequence[Op], str], None] | None = None
        self.writer = "world"  # the process whose request is being served

    def apply(self, ops: Sequence[Op], session_id: int) -> list[OpResult]:
        results = super().apply(ops, session_id)
        if self.on_commit is not None:
            self.on_commit(ops, self.writer)
        return results


class SimStore:
    """One session of one process. Implements `MetadataStore`."""

    def __init__(self, tree: SimTree, plan: FaultPlan, process: str) -> None:
        self.memory = MemoryStore(tree)
        self._tree = tree
        self._plan = plan
        self._process = process
        self.loses_answer: Callable[[Sequence[Op]], bool] = lambda _: False  # for scripts: of which applied writes
        self._last_arrival_s = 0.0

    async def get(self, key: str) -> Versioned | None:
        return await self._ask(lambda: self.memory.get(key))

    async def exists(self, key: str) -> bool:
        return await self._ask(lambda: self.memory.exists(key))

    async def children(self, key: str) -> list[str]:
        return await self._ask(lambda: self.memory.children(key))

    async def create(self, key: str, value: bytes, *, ephemeral: bool = False, sequential: bool = False) -> str:
        return await self._ask(lambda: self.memory.create(key, value, ephemeral=ephemeral, sequential=sequential), write=True)

    async def put(self, key: str, value: bytes, expected_version: int) -> int:
        return await self._ask(lambda: self.memory.put(key, value, expected_version), write=True)

    async def delete(self, key: str, expected_version: int | None) -> None:
        await self._ask(lambda: self.memory.delete(key, expected_version), write=True)

    async def multi(self, ops: Sequence[Op]) -> list[OpResult]:
        results = await self._ask(lambda: self._multi(ops), write=True)
        if results is None:
            raise StoreUnavailableError("the connection to the metadata store was lost", outcome_unknown=True)
        return results

    async def _multi(self, ops: Sequence[Op]) -> list[OpResult] | None:
        """None: applied, and nobody will hear of it."""
        results = await self.memory.multi(ops)
        return None if self.loses_answer(ops) else results

    async def sync(self, key: str) -> None:
        await self._ask(lambda: self.memory.sync(key))

    async def watch(self, key: str) -> Watch:
        return await self._ask(lambda: self.memory.watch(key))

    async def watch_children(self, key: str) -> Watch:
        return await self._ask(lambda: self.memory.watch_children(key))

    @property
    def session_state(self) -> SessionState:
        return self.memory.session_state

    def subscribe(self, on_session: Callable[[SessionState], None]) -> Callable[[], None]:
        return self.memory.subscribe(on_session)

    async def aclose(self) -> None:
        await self.memory.aclose()

    def abandon(self) -> None:
        """The process is gone; the store notices at once (a session that lingers is a fault of its own)."""
        if self.memory.session_state is not SessionState.LOST:
            self.memory.expire_session()

    async def _ask(self, act: Callable[[], Awaitable[T]], *, write: bool = False) -> T:
        plan, faults = self._plan, self._plan.faults
        loop = asyncio.get_running_loop()
        # A session's requests are served in the order they were made, as ZooKeeper promises.
        self._last_arrival_s = max(loop.time() + plan.between(faults.metadata_delay_s), self._last_arrival_s + _SPACING_S)
        await _sleep_until(self._last_arrival_s)
        if plan.strikes("metadata refused", faults.refused):
            raise StoreUnavailableError("the metadata store cannot be reached")
        self._tree.writer = self._process
        try:
            result = await act()  # the memory store never waits: nobody else writes meanwhile
        finally:
            self._tree.writer = "world"
        await asyncio.sleep(plan.between(faults.metadata_delay_s))
        if write and plan.strikes("metadata answer lost", faults.lost_answer):
            raise StoreUnavailableError("the connection to the metadata store was lost", outcome_unknown=True)
        return result


async def _sleep_until(when_s: float) -> None:
    reached: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    timer = asyncio.get_running_loop().call_at(when_s, lambda: reached.done() or reached.set_result(None))
    try:
        await reached
    finally:
        timer.cancel()
