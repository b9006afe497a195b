"""HTTP/1.1 on asyncio for admin calls: a connection for each call, without a library."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from cepheid.admin.exchange import (
    MAX_REDIRECTS,
    Answer,
    Ask,
    Place,
    StoredMessage,
    ask,
    check_status,
    head_of,
    no_answer,
    redirected,
    value_of,
)
from cepheid.errors import ClosedError, ConnectError, TimedOutError

if TYPE_CHECKING:
    from cepheid.credentials import Security

MAX_HEAD_BYTES = 64 * 1024
_PIECE_BYTES = 1 << 18


class AsyncCalls:
    """Makes the calls of one `Admin`. Each has its own connection, so they may run concurrently."""

    def __init__(self, places: tuple[Place, ...], security: Security, *, request_timeout_s: float) -> None:
        self._places = places
        self._security = security
        self._timeout_s = request_timeout_s
        self._tls: ssl.SSLContext | None = None
        self.is_closed = False

    async def call(self, method: str, path: str, query: Mapping[str, Any] | None = None, body: Any = None) -> Any:
        """Return the decoded answer. Raises RefusedError and its subclasses, ConnectError, TimedOutError, ClosedError.

        Cancelled: the broker may or may not have executed the call.
        """
        return value_of(await self._answer(ask(method, path, query, body)))

    async def message(self, method: str, path: str, query: Mapping[str, Any] | None = None) -> StoredMessage:
        """Return a stored message. Raises the errors of `call`."""
        answer = await self._answer(ask(method, path, query))
        return StoredMessage(answer.content, answer.headers)

    async def pieces(self, method: str, path: str, query: Mapping[str, Any] | None = None) -> AsyncIterator[bytes]:
        """Yield the body in pieces as they arrive, each within the time limit. Raises the errors of `call`, also between pieces."""
        wanted = ask(method, path, query)
        async with self._exchange(wanted) as (answer, body):
            if answer.status >= 300:
                check_status(wanted, Answer(answer.status, answer.headers, b"".join([piece async for piece in body])))
            async for piece in body:
                yield piece

    async def _answer(self, wanted: Ask) -> Answer:
        try:
            async with asyncio.timeout(self._timeout_s):
                async with self._exchange(wanted) as (answer, body):
                    answer = Answer(answer.status, answer.headers, b"".join([piece async for piece in body]))
        except TimeoutError:
            what = f"{wanted.method} {wanted.target}"
            raise TimedOutError(f"{self._places[0]} did not answer {what} within {self._timeout_s} s") from None
        check_status(wanted, answer)
        return answer

    @asynccontextmanager
    async def _exchange(self, wanted: Ask) -> AsyncIterator[tuple[Answer, AsyncIterator[bytes]]]:
        """Send a request, following redirects, and yield the head of its answer with the pieces of its body."""
        if self.is_closed:
            raise ClosedError("the admin client is closed")
        authorization = await self._security.authorization()
        place, streams = await self._connect_any()
        for left in reversed(range(MAX_REDIRECTS + 1)):
            reader, writer = streams
            try:
                head = await self._send(wanted, place, authorization, reader, writer)
                if (elsewhere := redirected(wanted, place, head.status, head.headers)) is None:
                    yield head, self._body(place, head, reader)
                    return
            finally:
                writer.close()
            wanted, place = elsewhere
            if left:
                streams = await self._connect(place)
        raise ConnectError(f"{wanted.method} {wanted.target} was redirected {MAX_REDIRECTS} times, last to {place}")

    async def _connect_any(self) -> tuple[Place, tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Connect to the first address that accepts the connection."""
        for place in self._places[:-1]:
            try:
                return place, await self._connect(place)
            except ConnectError:
                continue
        return self._places[-1], await self._connect(self._places[-1])

    async def _connect(self, place: Place) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if place.over_tls and self._tls is None:
            self._tls = self._security.tls_context()
        try:
            return await asyncio.open_connection(
                place.host, place.port, ssl=self._tls if place.over_tls else None, limit=MAX_HEAD_BYTES
            )
        except OSError as error:
            raise no_answer(place, error) from None

    async def _send(
        self, wanted: Ask, place: Place, authorization: str | None, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Answer:
        """Return the answer's head, without content."""
        lines = [f"{wanted.method} {wanted.target} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in head_of(wanted, place, authorization).items()]
        try:
            writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + (wanted.body or b""))
            await writer.drain()
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            version, status, *_ = head[0].split(" ")
            if not version.startswith("HTTP/1."):
                raise ValueError(f"it begins with {head[0][:80]!r}")
            fields = (line.partition(":") for line in head[1:] if line)
            return Answer(int(status), {name.strip().lower(): value.strip() for name, _, value in fields}, b"")
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            raise no_answer(place, error) from None

    async def _body(self, place: Place, head: Answer, reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
        """Yield the content, in any of the three ways to mark its end. Raises ConnectError if it breaks off or pauses too long."""

        async def in_time(read: Coroutine[Any, Any, bytes]) -> bytes:
            async with asyncio.timeout(self._timeout_s):
                return await read

        try:
            if head.headers.get("transfer-encoding", "").lower() == "chunked":
                while size_bytes := int((await in_time(reader.readline())).partition(b";")[0], 16):
                    yield await in_time(reader.readexactly(size_bytes))
                    await in_time(reader.readexactly(2))
                return
            left = int(head.headers.get("content-length", "-1")) if head.status != 204 else 0
            while left and (piece := await in_time(reader.read(_PIECE_BYTES if left < 0 else min(left, _PIECE_BYTES)))):
                left -= len(piece) if left > 0 else 0
                yield piece
            if left > 0:
                raise EOFError(f"{left} bytes are missing")
        except (OSError, EOFError, ValueError) as error:
            raise ConnectError(f"the answer of {place} broke off: {error or type(error).__name__}") from None
