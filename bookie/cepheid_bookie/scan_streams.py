"""A connection of the scan port as used on the loop: bytes in, bytes out, plain or through TLS.

The loop's own socket calls do not support TLS, and its TLS transports do not share the socket. Here the socket stays ours, since
scan threads send blocks of the entry log on it (run_sender.py); only one of loop and thread uses it at a time.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Any, TypeVar

from cepheid_security import certificate_expires_at_ms, certificate_names
from cepheid_security.certificate_revocations import why_revoked
from cepheid_security.tls import CertificateRule

T = TypeVar("T")


class ScanStream:
    """A connection without TLS. Scan threads send on `connection`."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    @property
    def role(self) -> str:
        """The common name of the reader's certificate; "" without one."""
        return ""

    @property
    def expires_at_ms(self) -> int | None:
        """When the reader's certificate expires; None without one."""
        return None

    def why_revoked(self) -> str | None:
        """Return a sentence when the reader's certificate was revoked since the handshake, None when it was not."""
        return None

    async def open(self) -> None:
        """Return when the connection can be used. Raises OSError."""

    async def receive_some(self, size_bytes: int) -> bytes:
        """Return up to `size_bytes`, none at the end. Raises OSError."""
        return await asyncio.get_running_loop().sock_recv(self.connection, size_bytes)

    async def send_all(self, data: bytes) -> None:
        """Raises OSError."""
        await asyncio.get_running_loop().sock_sendall(self.connection, data)

    async def receive(self, size_bytes: int) -> bytes:
        """Return exactly this many bytes. Raises EOFError, OSError."""
        data = b""
        while len(data) < size_bytes:
            more = await self.receive_some(size_bytes - len(data))
            if not more:
                raise EOFError("the reader closed the connection")
            data += more
        return data

    async def wait_writable(self) -> None:
        await _wait(self.connection, for_reading=False)


class TlsScanStream(ScanStream):
    """The server's side of a connection with TLS. `certificate_role`: which name in the client's certificate is its role."""

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, certificate_role: CertificateRule) -> None:
        secured = context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False, suppress_ragged_eofs=True)
        super().__init__(secured)
        self._secured = secured
        self._certificate_role = certificate_role

    @property
    def role(self) -> str:
        certificate: Any = self._secured.getpeercert()
        names = certificate_names(certificate, self._certificate_role)
        return names[0] if names else ""

    @property
    def expires_at_ms(self) -> int | None:
        certificate: Any = self._secured.getpeercert()
        return certificate_expires_at_ms(certificate)

    def why_revoked(self) -> str | None:
        return why_revoked(self._secured)

    async def open(self) -> None:
        await self._until_done(self._secured.do_handshake)

    async def receive_some(self, size_bytes: int) -> bytes:
        return await self._until_done(lambda: self._secured.recv(size_bytes))

    async def send_all(self, data: bytes) -> None:
        # OpenSSL accepts all of it or none, and needs the same bytes in the next attempt.
        await self._until_done(lambda: self._secured.send(data))

    async def _until_done(self, step: Callable[[], T]) -> T:
        while True:
            try:
                return step()
            except ssl.SSLWantReadError:
                await _wait(self._secured, for_reading=True)
            except ssl.SSLWantWriteError:
                await _wait(self._secured, for_reading=False)


async def _wait(connection: socket.socket, *, for_reading: bool) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def on_ready() -> None:
        if not ready.done():
            ready.set_result(None)

    number = connection.fileno()
    (loop.add_reader if for_reading else loop.add_writer)(number, on_ready)
    try:
        await ready
    finally:
        (loop.remove_reader if for_reading else loop.remove_writer)(number)
