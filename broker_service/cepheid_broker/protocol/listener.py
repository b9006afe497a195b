"""The protocol ports, without and with TLS: accept connections, know them, close them."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from typing import Any

from cepheid_broker.protocol.connection import Connection
from cepheid_broker.protocol.services import Services
from cepheid_ports import CepheidError
from cepheid_security import ServerTls

log = logging.getLogger(__name__)

BACKLOG = 1024
CONNECTIONS_PER_TURN = 200
"""Connections whose permissions are checked again in one turn of the loop."""


class PortInUseError(CepheidError):
    """The address cannot be listened on."""

    hint = "stop the process that has it (`ss -ltnp` names it), or choose another: `--port`, `--admin-port`; address: `--host`"


class _RefusedConnection(asyncio.Protocol):
    """One too many: closed as soon as it is there."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


class Listener:
    def __init__(self, services: Services, tls: ServerTls | None = None) -> None:
        self._services = services
        self._tls = tls
        self._servers: list[asyncio.Server] = []
        self.connections: dict[Connection, None] = {}
        self.accepted = 0
        self.refused = 0
        self._changed_tenants: dict[str | None, None] = {}
        self._looking = False
        if services.authorizer is not None:
            services.authorizer.on_changed.append(self._on_permissions_changed)
        self.port = 0
        """0: not open."""
        self.tls_port = 0

    def __repr__(self) -> str:
        return f"<Listener port {self.port or self.tls_port}, {len(self.connections)} connections>"

    async def start(self) -> None:
        """Raises PortInUseError."""
        settings = self._services.settings
        if settings.has_plain_ports:
            self.port = await self._listen(settings.port, None)
        if self._tls is not None:
            self.tls_port = await self._listen(settings.tls.port, self._tls)

    async def _listen(self, port: int, tls: ServerTls | None) -> int:
        host, loop = self._services.settings.host, asyncio.get_running_loop()
        limits: dict[str, Any] = {}
        if tls is not None:
            limits = {"ssl": tls.context, "ssl_handshake_timeout": self._services.settings.connection.handshake_timeout_s}
        try:
            server = await loop.create_server(self._accept, host, port, backlog=BACKLOG, **limits)
        except OSError as error:
            if not isinstance(error, socket.gaierror) and error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES):
                raise
            raise PortInUseError(f"cannot listen on {host}:{port}: {error.strerror}", host=host, port=port) from None
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    def _accept(self) -> asyncio.Protocol:
        if len(self.connections) >= self._services.settings.max_connections:
            self.refused += 1
            if self.refused & (self.refused - 1) == 0:  # the 1st, 2nd, 4th, 8th …
                log.warning("connection.refused", extra={"connections": len(self.connections), "refused": self.refused})
            return _RefusedConnection()
        return Connection(self._services, self._on_made, self._on_lost)

    def _on_made(self, connection: Connection) -> None:
        """With TLS, after the handshake: of one that fails, nobody would hear the end."""
        self.connections[connection] = None
        self.accepted += 1

    def _on_lost(self, connection: Connection) -> None:
        self.connections.pop(connection, None)

    def _on_permissions_changed(self, tenant: str | None) -> None:
        self._changed_tenants[tenant] = None
        if not self._looking:
            self._looking = True
            self._services.tasks.start(self._look_at_connections(), name="check-permissions")

    async def _look_at_connections(self) -> None:
        """All connections, with pauses in which others are served. Changes that come meanwhile lead to one more walk."""
        try:
            while self._changed_tenants:
                tenants = [None] if None in self._changed_tenants else list(self._changed_tenants)
                self._changed_tenants = {}
                for count, connection in enumerate(list(self.connections), 1):
                    for tenant in tenants:
                        connection.on_permissions_changed(tenant)
                    if count % CONNECTIONS_PER_TURN == 0:
                        await asyncio.sleep(0)
        finally:
            self._looking = False

    def stop_accepting(self) -> None:
        for server in self._servers:
            server.close()

    def close_connections(self, reason: str) -> None:
        for connection in list(self.connections):
            connection.close(reason)
