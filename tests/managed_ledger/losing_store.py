"""Store wrappers for bad days: answers that get lost after the write was applied, writes that never arrive, writes that wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from cepheid_metadata import MemoryTree, Op, OpResult, Put, StoreUnavailableError
from tests.managed_ledger.topic_world import MortalStore


class LosingStore(MortalStore):
    """`lose(ops)` decides for each multi: None: as usual, "answer": applied, "request": not applied; both raise "unknown"."""

    def __init__(self, tree: MemoryTree) -> None:
        super().__init__(tree)
        self.lose: Callable[[Sequence[Op]], str | None] = lambda _: None
        self.unreachable = False
        self.lost = 0
        self.late: list[Sequence[Op]] = []

    async def multi(self, ops: Sequence[Op]) -> list[OpResult]:
        self._check_reachable()
        fate = self.lose(ops)
        if fate is None:
            return await super().multi(ops)
        self.lost += 1
        if fate == "answer":
            await super().multi(ops)
        elif fate == "late":
            self.late.append(ops)
        raise StoreUnavailableError("the connection broke", outcome_unknown=True)

    async def get(self, key: str):  # type: ignore[no-untyped-def]
        self._check_reachable()
        return await super().get(key)

    async def put(self, key: str, value: bytes, expected_version: int) -> int:
        self._check_reachable()
        return await super().put(key, value, expected_version)

    async def create(self, key: str, value: bytes, *, ephemeral: bool = False, sequential: bool = False) -> str:
        self._check_reachable()
        return await super().create(key, value, ephemeral=ephemeral, sequential=sequential)

    async def deliver_late(self) -> None:
        """Requests that everybody had given up arrive after all."""
        late, self.late = self.late, []
        for ops in late:
            await super().multi(ops)

    def _check_reachable(self) -> None:
        if self.unreachable:
            raise StoreUnavailableError("the store is away")


class SteppingStore(MortalStore):
    """Every call takes some loop turns, so that others can come in between, or cancel."""

    turns = 2

    async def _pause(self) -> None:
        for _ in range(self.turns):
            await asyncio.sleep(0)

    async def get(self, key: str):  # type: ignore[no-untyped-def]
        await self._pause()
        found = await super().get(key)
        await self._pause()
        return found

    async def children(self, key: str) -> list[str]:
        await self._pause()
        return await super().children(key)

    async def multi(self, ops: Sequence[Op]) -> list[OpResult]:
        await self._pause()
        results = await super().multi(ops)
        await self._pause()
        return results

    async def create(self, key: str, value: bytes, *, ephemeral: bool = False, sequential: bool = False) -> str:
        await self._pause()
        made = await super().create(key, value, ephemeral=ephemeral, sequential=sequential)
        await self._pause()
        return made

    async def put(self, key: str, value: bytes, expected_version: int) -> int:
        await self._pause()
        version = await super().put(key, value, expected_version)
        await self._pause()
        return version


def changes(ops: Sequence[Op], part: str) -> bool:
    """Does this write change a key below /part?"""
    return any(isinstance(op, Put) and op.key.startswith(f"/{part}/") for op in ops)
