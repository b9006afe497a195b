"""A bookie in this process, as a ledger client sees it.

wake ──► (next turn) ──► next_message ──► Bookie.add ──► on_answers
                ▲ pauses while the bookie is full, and continues when it has room
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from cepheid_rpc import (
    MAX_MESSAGE_BYTES,
    AddAnswer,
    AddRequest,
    AddSource,
    AddStream,
    BookieUnavailableError,
    ExplicitLac,
    LacAnswer,
    LacRequest,
    ReadAnswer,
    ReadRequest,
    Status,
)


class LocalBookie(Protocol):
    """The interface of a bookie that a connection in the same process uses."""

    @property
    def bookie_id(self) -> str: ...

    @property
    def is_full(self) -> bool: ...

    def add(self, requests: Sequence[AddRequest], on_answers: Callable[[Sequence[AddAnswer]], None]) -> None: ...

    async def read_lac(self, request: LacRequest) -> LacAnswer: ...

    def read(self, request: ReadRequest) -> AsyncIterator[ReadAnswer]: ...

    async def write_lac(self, request: ExplicitLac) -> Status: ...


class LocalAddStream:
    """Pulls from its source once per turn; what the source receives meanwhile is sent together."""

    def __init__(self, bookie: LocalBookie, source: AddSource, on_closed: Callable[[LocalAddStream], None]) -> None:
        self._bookie = bookie
        self._source = source
        self._on_closed = on_closed
        self._pull_due = False
        self._open = True

    def wake(self) -> None:
        if not self._pull_due and self._open:
            self._pull_due = True
            asyncio.get_running_loop().call_soon(self._pull)

    async def aclose(self) -> None:
        """Close the stream. Later answers are dropped: the source then does not know the fate of their entries."""
        self._open = False
        self._on_closed(self)

    def on_broken(self, reason: str) -> None:
        if self._open:
            self._open = False
            self._on_closed(self)
            self._source.on_broken(BookieUnavailableError(f"bookie {self._bookie.bookie_id} {reason}"))

    def _pull(self) -> None:
        self._pull_due = False
        if not self._open or self._bookie.is_full:  # the bookie wakes its connections when it has room
            return
        requests = self._source.next_message(MAX_MESSAGE_BYTES)
        if requests:
            self._bookie.add(requests, self._on_answers)
            self.wake()  # what exceeds this message is sent in the next turn, after other streams had theirs

    def _on_answers(self, answers: Sequence[AddAnswer]) -> None:
        if self._open:
            self._source.on_answers(answers)


class LocalConnection:
    """A `BookieConnection` to a bookie in this process; created by `Bookie.connection`."""

    def __init__(self, bookie: LocalBookie, on_closed: Callable[[LocalConnection], object]) -> None:
        self._bookie = bookie
        self._on_closed = on_closed
        self._streams: dict[LocalAddStream, None] = {}

    @property
    def bookie_id(self) -> str:
        return self._bookie.bookie_id

    def open_add_stream(self, source: AddSource) -> AddStream:
        stream = LocalAddStream(self._bookie, source, on_closed=lambda closed: self._streams.pop(closed, None))
        self._streams[stream] = None
        return stream

    async def read_lac(self, request: LacRequest) -> LacAnswer:
        return await self._bookie.read_lac(request)

    def read(self, request: ReadRequest) -> AsyncIterator[ReadAnswer]:
        return self._bookie.read(request)

    async def write_lac(self, request: ExplicitLac) -> Status:
        return await self._bookie.write_lac(request)

    async def aclose(self) -> None:
        for stream in list(self._streams):
            await stream.aclose()
        self._on_closed(self)

    def wake(self) -> None:
        """Continue: the bookie has room again."""
        for stream in self._streams:
            stream.wake()

    def on_bookie_stopped(self, reason: str) -> None:
        for stream in list(self._streams):
            stream.on_broken(reason)
