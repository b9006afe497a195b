"""One HTTP connection of the admin port: uvicorn's protocol with time limits, and with a place in the connection limits.

    made ──header_timeout_s──► head complete ──transfer_timeout_s──► body complete ──► answered ──keepalive_s──► next request
                                                                     └─ answer not read for transfer_timeout_s: aborted

Rule: a connection that waits for its client always has a timer. uvicorn alone has one only after an answer, and any byte ends it.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from cepheid_broker.admin.authentication import CERTIFICATE
from cepheid_broker.admin.cross_site import PROBES, send_reason
from cepheid_broker.settings import AdminSettings
from cepheid_ports import host_port
from cepheid_security.certificate_revocations import why_revoked
from cepheid_security.connection_limits import ConnectionLimits
from cepheid_security.handshakes import TLS_HELLO

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_HEAD_BYTES = 64 << 10
"""Limit of request line and headers. The longest names in a path have some kilobytes."""


@dataclass(frozen=True, slots=True)
class ProtocolFactory:
    """Makes the protocol of each new connection; uvicorn calls it instead of its own class."""

    settings: AdminSettings
    limits: ConnectionLimits[AdminProtocol] = field()
    on_tls: Callable[[str], None] = field(default=lambda _address: None)
    """Called with the address of a client that spoke TLS to the port without TLS."""
    on_refused: Callable[[str, str], None] = field(default=lambda _peer, _reason: None)
    """Called with address and reason for each request that is refused before the application sees it."""

    def __call__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> AdminProtocol:
        return AdminProtocol(self, config, server_state, app_state, _loop)


class AdminProtocol(HttpToolsProtocol):
    """An HTTP connection with the timers described in the module."""

    def __init__(
        self,
        factory: ProtocolFactory,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._settings = factory.settings
        self._limits = factory.limits
        self._waiting: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._in_head = False
        self._head_bytes = 0
        self._is_first = True
        self._factory = factory
        self.timeout_keep_alive = factory.settings.keepalive_s  # type: ignore[assignment]  # its timer takes fractions, too

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        admission = self._limits.admit(self, self.client[0] if self.client else "")
        if admission.dropped is not None:
            admission.dropped.transport.abort()
        if admission.limited_by is not None:
            self.app = ProbesOnly(self.app, admission.limited_by)
        if (tls := transport.get_extra_info("ssl_object")) is not None:
            self.app = WithCertificate(self.app, tls, lambda reason: self._factory.on_refused(self._peer(), reason))
        self._wait(self._settings.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_watching_writes()
        self._limits.release(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_first:
            self._is_first = False
            if data.startswith(TLS_HELLO) and self.scheme == "http":
                self._factory.on_tls(self.client[0] if self.client else "?")
                self.transport.abort()
                return
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(
                    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"the head of a request has {MAX_HEAD_BYTES:,} bytes at most"
                )
        elif self._waiting is None and self._is_idle() and self.timeout_keep_alive_task is None:
            self._wait(self._settings.keepalive_s)  # an empty line between requests ended uvicorn's timer

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        self._wait(self._settings.header_timeout_s)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._wait(self._settings.transfer_timeout_s)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._stop_waiting()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._watch_writes()

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writes()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop_watching_writes()

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _wait(self, timeout_s: float) -> None:
        """Limit the time until the client's next step."""
        self._stop_waiting()
        self._waiting = self.loop.call_later(timeout_s, self._on_timeout)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _watch_writes(self) -> None:
        """Limit the time in which the client must read what was written."""
        self._stop_watching_writes()
        self._writing = self.loop.call_later(self._settings.transfer_timeout_s, self._on_unread)

    def _stop_watching_writes(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def _on_timeout(self) -> None:
        self._waiting = None
        if self.flow.read_paused:  # the client may have sent it: an earlier request is still being handled
            self._wait(self._settings.transfer_timeout_s)
        elif self._in_head:
            self._limits.timed_out += 1
            self._refuse(
                HTTPStatus.REQUEST_TIMEOUT, f"the head of the request took more than {self._settings.header_timeout_s:g} s"
            )
        elif not self._is_idle():
            self._limits.timed_out += 1
            self._refuse(
                HTTPStatus.REQUEST_TIMEOUT, f"the body of the request took more than {self._settings.transfer_timeout_s:g} s"
            )
        else:
            self._close()

    def _close(self) -> None:
        """Close the connection once the client has read the answer, or after some time."""
        if not self.transport.is_closing():
            self.transport.close()
            self._watch_writes()

    def _on_unread(self) -> None:
        self._writing = None
        self._limits.timed_out += 1
        self.transport.abort()

    def _peer(self) -> str:
        return host_port(*self.client) if self.client else ""

    def _refuse(self, status: HTTPStatus, reason: str) -> None:
        """Answer instead of the application, and close the connection."""
        if self.transport.is_closing():
            return
        self._factory.on_refused(self._peer(), reason)
        if self._is_idle() or not self.cycle.response_started:
            body = b'{"reason": "%s"}' % reason.encode()
            head = f"HTTP/1.1 {status} {status.phrase}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            self.transport.write(head.encode() + b"Connection: close\r\n\r\n" + body)
        self._close()


class WithCertificate:
    """The application, with the certificate that the client of this connection has shown; {} for none.

    A request is refused, and the connection closed, when the certificate was revoked since the handshake.
    """

    def __init__(self, app: ASGIApp, tls: ssl.SSLObject, on_refused: Callable[[str], None]) -> None:
        self._app = app
        self._tls = tls
        self._on_refused = on_refused
        self._certificate = tls.getpeercert() or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (reason := why_revoked(self._tls)) is not None:
            self._on_refused(reason)
            await send_reason(_closing(send), HTTPStatus.UNAUTHORIZED, f"{reason}: connect again with a new one")
            return
        await self._app({**scope, CERTIFICATE: self._certificate}, receive, send)


class ProbesOnly:
    """The application for a connection above the limits: probes are answered without credentials, all else gets 503."""

    def __init__(self, app: ASGIApp, reason: str) -> None:
        self._app = app
        self._reason = reason

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["raw_path"] not in PROBES:
            await send_reason(send, HTTPStatus.SERVICE_UNAVAILABLE, self._reason)
            return
        # Without credentials, so that passwords are checked on no more connections than the limits allow.
        headers = [header for header in scope["headers"] if header[0] != b"authorization"]
        await self._app({**scope, "headers": headers}, receive, _closing(send))


def _closing(send: Send) -> Send:
    """Return `send` for an answer that ends the connection."""

    async def send_and_close(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        await send(message)

    return send_and_close
