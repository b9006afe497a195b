"""HTTP on the protocol port: redirects clients that know a broker only by its pulsar:// address to its admin API.

    GET /cepheid/v1/plan?topic=T ──► 307, Location: http://ADMIN/cepheid/v1/plan?topic=T      closed once the client has read it

Rules
1. Nothing is served: one request, with a head of at most 8 KB within the handshake timeout, gets one answer. A body is ignored.
2. The path is returned as received, printable ASCII without spaces, so that it cannot end the header that contains it.
3. It counts as a connection of the listener until it is lost, and lasts for the handshake timeout plus the linger at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

MAX_HEAD_BYTES = 8 * 1024
_LINGER_S = 2.0  # for the client to read the answer before data that it sends meanwhile breaks the connection
_METHODS = (b"GET ", b"PUT ", b"POST", b"HEAD", b"DELE", b"OPTI", b"PATC")
_HEAD_END = b"\r\n\r\n"


def is_http(first_bytes: bytes) -> bool:
    return first_bytes[:4] in _METHODS


class HttpRedirect(asyncio.Protocol):
    """Takes over a connection that began with HTTP. `admin_url`: without a path; "" if this broker has no admin API."""

    def __init__(self, admin_url: str, timeout_s: float, on_lost: Callable[[], None]) -> None:
        self._admin_url = admin_url
        self._timeout_s = timeout_s
        self._on_lost = on_lost
        self._head = bytearray()
        self._answered = False

    def __repr__(self) -> str:
        return f"<HttpRedirect to {self._admin_url or 'nowhere'}>"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._timeout_s, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        if self._answered:
            return  # ignore a body
        self._head += data[: MAX_HEAD_BYTES + 1 - len(self._head)]
        if _HEAD_END in self._head:
            self._answer(*self._redirect())
        elif len(self._head) > MAX_HEAD_BYTES:
            self._answer("431 Request Header Fields Too Large", "")

    def connection_lost(self, error: Exception | None) -> None:
        self._timer.cancel()
        self._on_lost()

    def _redirect(self) -> tuple[str, str]:
        line = bytes(self._head).partition(b"\r\n")[0].split(b" ")
        target = line[1] if len(line) == 3 else b""
        if not target.startswith(b"/") or not all(0x21 <= byte <= 0x7E for byte in target):
            return "400 Bad Request", ""
        if not self._admin_url:
            return "503 Service Unavailable", ""
        return "307 Temporary Redirect", self._admin_url + target.decode("ascii")

    def _answer(self, status: str, location: str) -> None:
        self._answered = True
        where = f"Location: {location}\r\n" if location else ""
        self._transport.write(f"HTTP/1.1 {status}\r\n{where}Content-Length: 0\r\nConnection: close\r\n\r\n".encode("ascii"))
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._timer.cancel()
        self._timer = self._loop.call_later(_LINGER_S, self._transport.abort)
