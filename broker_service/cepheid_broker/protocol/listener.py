"""The protocol ports, without and with TLS: accept, track and close connections."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from functools import partial

from cepheid_broker.protocol.connection import Connection
from cepheid_broker.protocol.services import Services
from cepheid_ports import CepheidError
from cepheid_security import ServerTls
from cepheid_security.audit import TLS_HANDSHAKE
from cepheid_security.connection_limits import Arrivals, Place
from cepheid_security.tls_acceptor import TlsAcceptor

log = logging.getLogger(__name__)

BACKLOG = 1024
CONNECTIONS_PER_TURN = 200
"""Connections whose permissions are checked again in one turn of the loop."""


class PortInUseError(CepheidError):
    """A listening address that is not available."""

    hint = "stop the process that has it (`ss -ltnp` names it), or choose another: `--port`, `--admin-port`; address: `--host`"


class _RefusedConnection(asyncio.Protocol):
    """A connection above the limit: closed as soon as it is made."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


class Listener:
    """The ports of one broker. Call `start` once, then `stop_accepting` and `close_connections`."""

    def __init__(self, services: Services, tls: ServerTls | None = None) -> None:
        settings = services.settings
        self._services = services
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._acceptor: TlsAcceptor[Place] | None = None
        self._arrivals = Arrivals(
            max_arriving=settings.connection.max_unauthenticated,
            max_arriving_per_address=settings.connection.max_unauthenticated_per_address,
            max_per_address=settings.max_connections_per_address,
        )
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

    @property
    def unauthenticated(self) -> int:
        """Connections in the TLS handshake, or whose CONNECT was not answered yet."""
        return self._arrivals.arriving

    @property
    def failed_handshakes(self) -> int:
        return 0 if self._acceptor is None else self._acceptor.failed

    async def start(self) -> None:
        """Open the ports; if it fails or is cancelled, close those already open. Raises PortInUseError."""
        settings = self._services.settings
        try:
            if settings.has_plain_ports:
                self.port = await self._listen(settings.port)
            if self._tls is not None:
                self._acceptor = self._listen_tls(settings.tls.port, self._tls)
                self.tls_port = self._acceptor.port
        except BaseException:
            self.stop_accepting()
            await self.aclose()
            raise

    async def _listen(self, port: int) -> int:
        host, loop = self._services.settings.host, asyncio.get_running_loop()
        try:
            # In two steps: a cancellation during the second finds the server here, and can close it.
            self._server = server = await loop.create_server(self._accept, host, port, backlog=BACKLOG, start_serving=False)
            await server.start_serving()
        except OSError as error:
            raise _port_in_use(error, host, port) from None
        return int(server.sockets[0].getsockname()[1])

    def _listen_tls(self, port: int, tls: ServerTls) -> TlsAcceptor[Place]:
        host = self._services.settings.host
        try:
            listening = listening_socket(host, port, BACKLOG)
        except OSError as error:
            raise _port_in_use(error, host, port) from None
        acceptor = TlsAcceptor(
            listening,
            lambda: tls.context,
            handshake_timeout_s=self._services.settings.connection.handshake_timeout_s,
            admit=self._admit,
            make=self._make,
            on_failed=Place.free,
            refusals=self._services.refusals,
            plain_hint=lambda: f"port {self.port} is without TLS" if self.port else "this broker has no port without TLS",
            on_refused=lambda peer, reason: self._services.audit.record(
                None, peer, TLS_HANDSHAKE, f"port {self.tls_port}", "denied", reason
            ),
        )
        acceptor.start()
        return acceptor

    def _accept(self) -> asyncio.Protocol:
        """Make a connection without TLS; its address is known once it is made."""
        if self._is_full():
            return _RefusedConnection()
        return self._make(None)

    def _admit(self, address: str) -> Place | None:
        """Return a place for a connection from this address; None: it is refused."""
        if self._is_full():
            return None
        place = self._arrivals.admit(address)
        if isinstance(place, Place):
            return place
        self._note_refused(place)
        return None

    def _make(self, place: Place | None) -> Connection:
        return Connection(self._services, partial(self._on_made, place), self._on_lost)

    def _is_full(self) -> bool:
        is_full = len(self.connections) >= self._services.settings.max_connections
        if is_full:
            self._note_refused(f"{len(self.connections):,} connections are open (max_connections)")
        return is_full

    def _note_refused(self, reason: str) -> None:
        self.refused += 1
        if self.refused & (self.refused - 1) == 0:  # the 1st, 2nd, 4th, 8th …
            extra = {"reason": reason, "connections": len(self.connections), "refused": self.refused}
            log.warning("connection.refused", extra=extra)

    def _on_made(self, place: Place | None, connection: Connection) -> None:
        """Register a connection (with TLS, after the handshake)."""
        place = place or self._admit(connection.host)
        if place is None:
            connection.abandon()
            return
        connection.place = place
        self.connections[connection] = None
        self.accepted += 1

    def _on_lost(self, connection: Connection) -> None:
        self.connections.pop(connection, None)
        if connection.place is not None:
            connection.place.free()

    def _on_permissions_changed(self, tenant: str | None) -> None:
        self._changed_tenants[tenant] = None
        if not self._looking:
            self._looking = True
            self._services.tasks.start(self._look_at_connections(), name="check-permissions")

    async def _look_at_connections(self) -> None:
        """Check the permissions of all connections, with pauses for others. Changes meanwhile lead to another walk."""
        try:
            while self._changed_tenants:
                tenants = [None] if None in self._changed_tenants else list(self._changed_tenants)
                self._changed_tenants = {}
                for count, connection in enumerate(list(self.connections), 1):
                    for tenant in tenants:
                        connection.on_permissions_changed(tenant)
                    if count % CONNECTIONS_PER_TURN == 0:
                        await asyncio.sleep(0)
                for count, connection in enumerate(list(self.connections), 1):
                    for tenant in tenants:
                        await connection.update_watchers(tenant)
                    if count % CONNECTIONS_PER_TURN == 0:
                        await asyncio.sleep(0)
        finally:
            self._looking = False

    def stop_accepting(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._acceptor is not None:
            self._acceptor.stop_accepting()

    async def aclose(self) -> None:
        """End pending handshakes. Connections were closed before."""
        if self._acceptor is not None:
            await self._acceptor.aclose()

    def end_revoked(self) -> None:
        """Close connections whose token or certificate was revoked."""
        for connection in list(self.connections):
            connection.end_if_revoked()

    def close_connections(self, reason: str) -> None:
        for connection in list(self.connections):
            connection.close(reason)


def listening_socket(host: str, port: int, backlog: int) -> socket.socket:
    """Return a socket that listens and does not block. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Created as TCP, as asyncio disables Nagle's delay only for such sockets: it costs 40 ms per answer.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(backlog)
        listening.setblocking(False)
    except OSError:
        listening.close()
        raise
    return listening


def _port_in_use(error: OSError, host: str, port: int) -> OSError | PortInUseError:
    """Return what to raise for a port that cannot be listened on."""
    if not isinstance(error, socket.gaierror) and error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES):
        return error
    return PortInUseError(f"cannot listen on {host}:{port}: {error.strerror}", host=host, port=port)
