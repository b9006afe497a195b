"""Pages of a process that needs no web framework, such as /health: a few lines of HTTP/1.1, one request per connection.

    GET path ──► route() ──► status, text ──► connection closed

Rule: a request is small and quick, or it is cut off: `MAX_REQUEST_BYTES`, `TIMEOUT_S`; connections beyond `MAX_CONNECTIONS` are
closed at once and counted.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import parse_qsl

from cepheid_bookie.errors import PortInUseError
from cepheid_ports import TaskOwner

log = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 16 << 10
MAX_CONNECTIONS = 64
TIMEOUT_S = 10.0
_TEXT = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Page:
    """What one path answers."""

    text: str
    status: HTTPStatus = HTTPStatus.OK
    content_type: str = _TEXT


class HealthServer:
    """`start` once, `aclose` once. Pages are made when they are asked for; `queried` are given the parameters of the request.

    Port 0 lets the system choose: see `port`.
    """

    def __init__(
        self,
        host: str,
        port: int,
        pages: Mapping[str, Callable[[], Page]],
        queried: Mapping[str, Callable[[Mapping[str, str]], Page]] | None = None,
    ) -> None:
        self._host = host
        self.port = port
        self._pages = pages
        self._queried = queried or {}
        self._server: asyncio.Server | None = None
        self._tasks = TaskOwner("health")
        self.refused = 0

    def __repr__(self) -> str:
        return f"<HealthServer {self._host}:{self.port}, {len(self._tasks)} connections>"

    async def start(self) -> None:
        """Raises PortInUseError."""
        try:
            self._server = await asyncio.start_server(self._on_connection, self._host, self.port, limit=MAX_REQUEST_BYTES)
        except OSError as error:
            if not isinstance(error, socket.gaierror) and error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES):
                raise
            message = f"cannot listen on {self._host}:{self.port} for health and metrics: {error.strerror}"
            raise PortInUseError(message, host=self._host, port=self.port) from None
        self.port = self._server.sockets[0].getsockname()[1]

    async def aclose(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
        await self._tasks.aclose()

    def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= MAX_CONNECTIONS:
            self.refused += 1
            writer.transport.abort()
        else:
            self._tasks.start(self._serve(reader, writer), name="request")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                page, with_body = self._answer(await reader.readuntil(b"\r\n\r\n"))
                writer.write(_encode(page, with_body=with_body))
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            log.debug("health.request_dropped", extra={"error": repr(error)})
        finally:
            writer.close()

    def _answer(self, head: bytes) -> tuple[Page, bool]:
        """The page, and whether its body is sent too."""
        method, _, rest = head.partition(b"\r\n")[0].partition(b" ")
        path, _, query = rest.partition(b" ")[0].decode("latin-1").partition("?")
        if method not in (b"GET", b"HEAD"):
            return Page("only GET and HEAD\n", HTTPStatus.METHOD_NOT_ALLOWED), True
        if (make := self._pages.get(path)) is not None:
            page = make()
        elif (make_queried := self._queried.get(path)) is not None:
            page = make_queried(dict(parse_qsl(query)))
        else:
            page = Page(f"there are {', '.join([*self._pages, *self._queried])}\n", HTTPStatus.NOT_FOUND)
        return page, method == b"GET"


def _encode(page: Page, *, with_body: bool) -> bytes:
    body = page.text.encode()
    head = (
        f"HTTP/1.1 {page.status.value} {page.status.phrase}\r\nContent-Type: {page.content_type}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (body if with_body else b"")
