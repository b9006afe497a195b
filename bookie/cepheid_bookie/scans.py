"""Reads that bypass the brokers (Spark, `cepheid read`): whole ledgers, many at once, never at the cost of an add.

    request ──► ticket? ──► room? ──► separate EntryReader: threads, byte budget ──► turn ──► chunk
                  │ no        │ no
                  ▼           ▼
            UNAUTHORIZED   OVERLOADED, with the time to wait before a retry

Rule 1: scans have their own threads and their own byte budget: neither adds nor brokers' reads wait for them at a disk.
Rule 2: all scans together send one chunk per turn of the loop, so an add waits for one chunk at most, however many scans there are.
Rule 3: a scan whose client does not read holds a chunk in memory: the more scans are open, the smaller are the chunks of a new one.
Rule 4: `authorize` checks every request before anything about the ledger is disclosed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from cepheid_bookie.entry_reader import EntryReader, ReadCounters, StoredRun, refuse_range
from cepheid_rpc import MAX_MESSAGE_BYTES, ReadAnswer, ReadRequest, Status

AuthorizeRead: TypeAlias = Callable[[bytes, int, int, int], Status]
"""`(ticket, ledger_id, first_entry_id, last_entry_id)`: OK, or why not."""

CACHED_GROUPS = 64
"""Limit of groups per chunk from the write cache: a group of one small entry costs the loop as much as 10 KB of a large one."""


def accept_every_ticket(ticket: bytes, ledger_id: int, first_entry_id: int, last_entry_id: int) -> Status:
    """Accept every ticket: for a bookie without security."""
    return Status.OK


class LoopTurns:
    """Lets one waiter continue per turn of the loop."""

    def __init__(self) -> None:
        self.waits = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._due = False

    async def wait(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._due:
            self._due = True
            loop.call_soon(self._next)
        else:
            self.waits += 1
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next(self) -> None:
        while self._waiting and (turn := self._waiting.popleft()):
            if not turn.done():  # else its scan was given up
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._next)
                return
        self._due = False


@dataclass(slots=True)
class ScanCounters:
    """Counters of `Scans` besides those of reading (`ReadCounters`)."""

    requests: int = 0
    refused: int = 0
    unauthorized: int = 0
    sent_bytes: int = 0


class Scans:
    """The scans of a bookie, at most `open` at a time. Each holds one chunk until its reader takes it, and gRPC a copy or two.

    All chunks together have at most 2 MiB per scan that may be open.
    """

    def __init__(self, reader: EntryReader, *, open_scans: int, retry_s: float) -> None:
        self.authorize: AuthorizeRead = accept_every_ticket
        self.open = 0
        self.counters = ScanCounters()
        self.turns = LoopTurns()
        self._reader = reader
        self._limit = open_scans
        self._chunk_bytes = 0  # of all open scans
        self._retry_ms = max(1, round(1000 * retry_s))

    def __repr__(self) -> str:
        return f"<Scans: {self.open} of {self._limit} open>"

    @property
    def reads(self) -> ReadCounters:
        return self._reader.counters

    def stop(self) -> None:
        self._reader.stop()

    def refuse(self, request: ReadRequest) -> ReadAnswer | None:
        """Return why this request is refused, or None. The refusal discloses nothing about the ledger."""
        if request.fence:
            return refuse_range(request, Status.BAD_REQUEST)  # a recovery reads as a broker does
        status = self.authorize(request.ticket, request.ledger_id, request.first_entry_id, request.last_entry_id)
        if status is not Status.OK:
            self.counters.unauthorized += 1
            return refuse_range(request, status)
        if self.open >= self._limit:
            self.counters.refused += 1
            return refuse_range(request, Status.OVERLOADED, retry_after_ms=self._retry_ms)
        return None

    async def read(self, request: ReadRequest) -> AsyncGenerator[ReadAnswer, None]:
        """Read for a request that was not refused, called in the same turn."""
        with self._opened(request) as chunk_bytes:
            first, last = request.first_entry_id, request.last_entry_id
            chunks = self._reader.read(request.ledger_id, first, last, request.max_bytes, urgent=False, chunk_bytes=chunk_bytes)
            async with aclosing(chunks):
                async for chunk in chunks:
                    await self._wait_to_send(chunk)
                    yield chunk

    async def read_stored(self, request: ReadRequest) -> AsyncGenerator[ReadAnswer | StoredRun, None]:
        """Read like `read`, for callers that take blocks as stored. A run of them uses neither memory nor a turn of the loop."""
        with self._opened(request) as chunk_bytes:
            first, last = request.first_entry_id, request.last_entry_id
            chunks = self._reader.read_stored(request.ledger_id, first, last, request.max_bytes, chunk_bytes=chunk_bytes)
            async with aclosing(chunks):
                async for chunk in chunks:
                    if isinstance(chunk, StoredRun):
                        self.counters.sent_bytes += chunk.size_bytes
                    else:
                        await self._wait_to_send(chunk)
                    yield chunk

    @contextmanager
    def _opened(self, request: ReadRequest) -> Iterator[int]:
        """Count the scan as open; yield the size of its chunks."""
        self.counters.requests += 1
        self.open += 1
        chunk_bytes = self._chunk_bytes_for(request)
        self._chunk_bytes += chunk_bytes
        try:
            yield chunk_bytes
        finally:
            self.open -= 1
            self._chunk_bytes -= chunk_bytes

    async def _wait_to_send(self, chunk: ReadAnswer) -> None:
        await self.turns.wait()
        self.counters.sent_bytes += sum(len(group.data) for group in chunk.groups)

    def _chunk_bytes_for(self, request: ReadRequest) -> int:
        """Return the chunk size: as requested while all open scans have less than 1 MiB per scan that may be open (rule 3)."""
        room_bytes = self._limit * MAX_MESSAGE_BYTES - self._chunk_bytes
        return max(MAX_MESSAGE_BYTES, min(request.chunk_bytes, room_bytes))
