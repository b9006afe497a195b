"""The protocol port: accepts connections, knows them, closes them."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket

from cepheid_broker.protocol.connection import Connection
from cepheid_broker.protocol.services import Services
from cepheid_ports import CepheidError

log = logging.getLogger(__name__)

BACKLOG = 1024


class PortInUseError(CepheidError):
    """The address cannot be listened on."""

    hint = "stop the process that has it (`ss -ltnp` names it), or choose another: `--port`, `--admin-port`; address: `--host`"


class _RefusedConnection(asyncio.Protocol):
    """One too many: closed as soon as it is there."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


class Listener:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._server: asyncio.Server | None = None
        self.connections: dict[Connection, None] = {}
        self.accepted = 0
        self.refused = 0
        self.port = 0

    def __repr__(self) -> str:
        return f"<Listener port {self.port}, {len(self.connections)} connections>"

    async def start(self) -> None:
        """Raises PortInUseError."""
        host, port = self._services.settings.host, self._services.settings.port
        try:
            self._server = await asyncio.get_running_loop().create_server(self._accept, host, port, backlog=BACKLOG)
        except OSError as error:
            if not isinstance(error, socket.gaierror) and error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES):
                raise
            raise PortInUseError(f"cannot listen on {host}:{port}: {error.strerror}", host=host, port=port) from None
        self.port = self._server.sockets[0].getsockname()[1]

    def _accept(self) -> asyncio.Protocol:
        if len(self.connections) >= self._services.settings.max_connections:
            self.refused += 1
            if self.refused & (self.refused - 1) == 0:  # the 1st, 2nd, 4th, 8th …
                log.warning("connection.refused", extra={"connections": len(self.connections), "refused": self.refused})
            return _RefusedConnection()
        connection = Connection(self._services, self._on_lost)
        self.connections[connection] = None
        self.accepted += 1
        return connection

    def _on_lost(self, connection: Connection) -> None:
        self.connections.pop(connection, None)

    def stop_accepting(self) -> None:
        if self._server is not None:
            self._server.close()

    def close_connections(self, reason: str) -> None:
        for connection in list(self.connections):
            connection.close(reason)
