"""Serves pages such as /health without a web framework: a few lines of HTTP/1.1, one request per connection.

    GET path ──► route() ──► status, text ──► connection closed

Rules
1. A request that is too large or too slow is cut off: `MAX_REQUEST_BYTES`, `TIMEOUT_S`. Both hold for the TLS handshake as well.
2. Above `MAX_CONNECTIONS`, or `MAX_CONNECTIONS_PER_ADDRESS`, only `PROBES` are answered, so that a flood does not get the process
   restarted (cepheid_security/connection_limits.py).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import parse_qsl

from cepheid_bookie.denials import address_of
from cepheid_bookie.errors import PortInUseError
from cepheid_bookie.listening import listening_socket
from cepheid_ports import RefusalLog, TaskOwner
from cepheid_security import certificate_names
from cepheid_security.connection_limits import ConnectionLimits, PortStatistics
from cepheid_security.tls import CertificateRule
from cepheid_security.tls_acceptor import TlsAcceptor

log = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 16 << 10
MAX_CONNECTIONS = 64
MAX_CONNECTIONS_PER_ADDRESS = 16
PROBES = ("/health", "/ready")
TIMEOUT_S = 10.0
_TEXT = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Page:
    """The answer for one path."""

    text: str
    status: HTTPStatus = HTTPStatus.OK
    content_type: str = _TEXT


@dataclass(frozen=True, slots=True)
class Request:
    """A request and its sender. `role`: a name of the client's certificate, "" without one. `peer`: its address."""

    path: str
    role: str
    peer: str


class _Place:
    """The slot that one connection occupies, from before its TLS handshake to its end."""

    def __init__(self) -> None:
        self.limited_by: str | None = None
        """Why only probes are answered."""
        self.writer: asyncio.StreamWriter | None = None
        """None during the handshake."""


class HealthServer:
    """A small HTTP server: `start` once, `aclose` once. Pages are built on request; `queried` get the request's parameters.

    `guard` may refuse a request by returning a page to send instead. Port 0 lets the system choose: see `port`. `tls` returns
    the context of the next connection; None: without TLS. `certificate_role`: which name in a certificate is the role.
    `on_refused` receives address and reason of each refused TLS handshake.
    """

    def __init__(
        self,
        host: str,
        port: int,
        pages: Mapping[str, Callable[[], Page]],
        queried: Mapping[str, Callable[[Mapping[str, str]], Page]] | None = None,
        *,
        guard: Callable[[Request], Page | None] = lambda _request: None,
        tls: Callable[[], ssl.SSLContext] | None = None,
        certificate_role: CertificateRule = "common_name",
        on_refused: Callable[[str, str], None] = lambda _peer, _reason: None,
    ) -> None:
        self._host = host
        self.port = port
        self._pages = pages
        self._queried = queried or {}
        self._guard = guard
        self._tls = tls
        self._certificate_role = certificate_role
        self._on_refused = on_refused
        self._server: asyncio.Server | None = None
        self._acceptor: TlsAcceptor[_Place] | None = None
        self._limits: ConnectionLimits[_Place] = ConnectionLimits(
            MAX_CONNECTIONS, MAX_CONNECTIONS_PER_ADDRESS, port="health", settings=None
        )
        self._tasks = TaskOwner("health")

    def __repr__(self) -> str:
        return f"<HealthServer {self._host}:{self.port}, {len(self._tasks)} connections>"

    @property
    def scheme(self) -> str:
        return "http" if self._tls is None else "https"

    async def start(self) -> None:
        """Open the port. Closes it again when the start is cancelled. Raises PortInUseError."""
        try:
            await self._listen()
        except BaseException:
            await self.aclose()
            raise

    async def _listen(self) -> None:
        try:
            if self._tls is None:
                # In two steps: a cancellation during the second one finds the server here and can close it.
                self._server = await asyncio.start_server(
                    self._on_connection, self._host, self.port, limit=MAX_REQUEST_BYTES, start_serving=False
                )
                await self._server.start_serving()
                self.port = self._server.sockets[0].getsockname()[1]
            else:
                self._acceptor = self._listen_tls(listening_socket(self._host, self.port), self._tls)
                self.port = self._acceptor.port
        except OSError as error:
            if not isinstance(error, socket.gaierror) and error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES):
                raise
            message = f"cannot listen on {self._host}:{self.port} for health and metrics: {error.strerror}"
            raise PortInUseError(message, host=self._host, port=self.port) from None

    def _listen_tls(self, listening: socket.socket, tls: Callable[[], ssl.SSLContext]) -> TlsAcceptor[_Place]:
        def make(place: _Place) -> asyncio.Protocol:
            reader = asyncio.StreamReader(limit=MAX_REQUEST_BYTES)
            return asyncio.StreamReaderProtocol(reader, lambda reader, writer: self._serve_at(place, reader, writer))

        acceptor = TlsAcceptor(
            listening,
            tls,
            handshake_timeout_s=TIMEOUT_S,
            admit=self._admit,
            make=make,
            on_failed=self._limits.release,
            refusals=RefusalLog(),
            plain_hint=lambda: "ask for https://",
            on_refused=self._on_refused,
        )
        acceptor.start()
        return acceptor

    async def aclose(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
        if self._acceptor is not None:
            await self._acceptor.aclose()
        await self._tasks.aclose()

    def statistics(self) -> PortStatistics:
        return self._limits.statistics()

    def _admit(self, address: str) -> _Place:
        place = _Place()
        admission = self._limits.admit(place, address)
        place.limited_by = admission.limited_by
        if (dropped := admission.dropped) is not None:
            if dropped.writer is not None:
                dropped.writer.transport.abort()
            elif self._acceptor is not None:
                self._acceptor.cancel(dropped)
        return place

    def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection without TLS; one with TLS was admitted before its handshake."""
        peer = writer.get_extra_info("peername")
        self._serve_at(self._admit(str(peer[0]) if peer else ""), reader, writer)

    def _serve_at(self, place: _Place, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        place.writer = writer
        task = self._tasks.start(self._serve(place, reader, writer), name="request")
        task.add_done_callback(lambda _: self._limits.release(place))

    async def _serve(self, place: _Place, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                page, with_body = self._answer(await reader.readuntil(b"\r\n\r\n"), writer, place.limited_by)
                writer.write(_encode(page, with_body=with_body))
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            log.debug("health.request_dropped", extra={"error": repr(error)})
        finally:
            writer.close()

    def _answer(self, head: bytes, writer: asyncio.StreamWriter, limited_by: str | None) -> tuple[Page, bool]:
        """Return the page and whether its body is sent."""
        method, _, rest = head.partition(b"\r\n")[0].partition(b" ")
        path, _, query = rest.partition(b" ")[0].decode("latin-1").partition("?")
        if method not in (b"GET", b"HEAD"):
            return Page("only GET and HEAD\n", HTTPStatus.METHOD_NOT_ALLOWED), True
        if path not in self._pages and path not in self._queried:
            page = Page(f"there are {', '.join([*self._pages, *self._queried])}\n", HTTPStatus.NOT_FOUND)
        elif limited_by is not None and path not in PROBES:
            page = Page(f"{limited_by}\n", HTTPStatus.SERVICE_UNAVAILABLE)
        elif (refused := self._guard(_request_of(path, writer, self._certificate_role))) is not None:
            page = refused
        elif (make := self._pages.get(path)) is not None:
            page = make()
        else:
            page = self._queried[path](dict(parse_qsl(query)))
        return page, method == b"GET"


def _request_of(path: str, writer: asyncio.StreamWriter, rule: CertificateRule) -> Request:
    tls = writer.get_extra_info("ssl_object")
    names = () if tls is None else certificate_names(tls.getpeercert(), rule)
    return Request(path, names[0] if names else "", address_of(writer.get_extra_info("peername")))


def _encode(page: Page, *, with_body: bool) -> bytes:
    body = page.text.encode()
    head = (
        f"HTTP/1.1 {page.status.value} {page.status.phrase}\r\nContent-Type: {page.content_type}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (body if with_body else b"")
