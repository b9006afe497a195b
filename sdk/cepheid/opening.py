"""The result of `client.producer(…)` and similar calls: `await` it, or use it with `async with`, which also closes it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar


class Closeable(Protocol):
    async def close(self) -> None: ...


T = TypeVar("T", bound=Closeable)


class Opening(Generic[T]):
    """An object that can be opened. Nothing happens until it is awaited or entered."""

    def __init__(self, open_it: Callable[[], Awaitable[T]]) -> None:
        self._open = open_it
        self._opened: T | None = None

    def __await__(self) -> Generator[Any, None, T]:
        return self._open().__await__()

    async def __aenter__(self) -> T:
        self._opened = await self._open()
        return self._opened

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._opened is not None:
            await self._opened.close()
