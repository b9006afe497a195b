"""A metadata session whose writes can be lost, lose their answers, or wait."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from cepheid_metadata import MemoryStore, MemoryTree, Op, SessionLostError, StoreUnavailableError, Versioned


class FaultyStore:
    """Switches: `lose_answers` (how many writes are applied but reported as unknown), `lose_requests` (how many are not
    applied and reported as unknown), `refuse` (how many certainly fail), `unreadable` (how many reads fail), `hang` (writes
    wait for ever), `hang_reads`, `hang_after` (writes are applied, their answers never come), `delay_s` (of a write),
    `lose_session_at_write` (writes certainly fail, after the delay), `refuse_after_loss` (what `refuse` becomes when an answer
    or request was lost), `lose_session` (how many reads end the session). Otherwise the store in memory."""

    def __init__(self, tree: MemoryTree) -> None:
        self._store = MemoryStore(tree)
        self.lose_answers = self.lose_requests = 0
        self.refuse = self.refuse_after_loss = 0
        self.lose_session = 0
        self.lose_session_at_write = False
        self.unreadable = 0
        self.hang = self.hang_reads = self.hang_after = False
        self.delay_s = 0.0
        self.most_at_once = self._at_once = 0
        self.writes: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def get(self, key: str) -> Versioned | None:
        if self.hang_reads:
            await asyncio.get_running_loop().create_future()
        if self.lose_session:
            self.lose_session -= 1
            raise SessionLostError("the session expired")
        if self.unreadable:
            self.unreadable -= 1
            raise StoreUnavailableError("no connection")
        return await self._store.get(key)

    async def create(self, key: str, value: bytes, *, ephemeral: bool = False, sequential: bool = False) -> str:
        await self._before(key)
        made = await self._store.create(key, value, ephemeral=ephemeral, sequential=sequential)
        self._after()
        return made

    async def put(self, key: str, value: bytes, expected_version: int) -> int:
        await self._before(key)
        version = await self._store.put(key, value, expected_version)
        if self.hang_after:
            await asyncio.get_running_loop().create_future()
        self._after()
        return version

    async def multi(self, ops: Sequence[Op]) -> list[Any]:
        await self._before(ops[0].key)
        results = list(await self._store.multi(ops))
        if self.hang_after:
            await asyncio.get_running_loop().create_future()
        self._after()
        return results

    async def delete(self, key: str, expected_version: int | None) -> None:
        await self._before(key)
        await self._store.delete(key, expected_version)
        self._after()

    async def _before(self, key: str) -> None:
        self.writes.append(key)
        if self.hang:
            await asyncio.get_running_loop().create_future()
        if self.refuse:
            self.refuse -= 1
            raise StoreUnavailableError("no connection")
        if self.lose_requests:
            self.lose_requests -= 1
            self.refuse = self.refuse_after_loss
            raise StoreUnavailableError("connection lost", outcome_unknown=True)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            await asyncio.sleep(self.delay_s)
        finally:
            self._at_once -= 1
        if self.lose_session_at_write:
            raise SessionLostError("the session expired before the write was sent")

    def _after(self) -> None:
        if self.lose_answers:
            self.lose_answers -= 1
            self.refuse = self.refuse_after_loss
            raise StoreUnavailableError("connection lost", outcome_unknown=True)
