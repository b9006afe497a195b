"""The admin port: bound at once, served as soon as the web framework is imported.

    start ──► port listens ──► a thread imports the framework and builds the application ──► uvicorn serves, in the broker's loop
              └─ requests wait in its backlog meanwhile, and the broker serves its clients

Rules
1. This module imports nothing large: importing the framework takes longer than starting the rest of a broker.
2. Signals, logging and the loop belong to the process, not to uvicorn.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cepheid_broker.admin.context import AdminContext
from cepheid_broker.protocol import PortInUseError, listening_socket
from cepheid_ports import RefusalLog, TaskOwner
from cepheid_security import ServerTls
from cepheid_security.audit import TLS_HANDSHAKE
from cepheid_security.authenticator import Authenticator
from cepheid_security.connection_limits import Arrivals, ConnectionLimits, Place, PortStatistics
from cepheid_security.tls_acceptor import TlsAcceptor

if TYPE_CHECKING:
    from uvicorn import Server

    from cepheid_broker.admin.admin_protocol import AdminProtocol

log = logging.getLogger(__name__)

_BACKLOG = 256
_MAX_HANDSHAKES = 256
_MAX_HANDSHAKES_PER_ADDRESS = 64
"""Limits of connections in the TLS handshake; a normal client's handshake takes two round trips."""


@dataclass(frozen=True, slots=True)
class SharedAdminPorts:
    """Listening sockets from which several broker processes of one machine accept: the first to accept answers."""

    plain: socket.socket | None = None
    tls: socket.socket | None = None


NO_SHARED_PORTS = SharedAdminPorts()


def open_admin_port(host: str, port: int) -> socket.socket:
    """Return a listening socket for the admin API. Raises PortInUseError."""
    try:
        return listening_socket(host, port, _BACKLOG)
    except OSError as error:
        if not isinstance(error, socket.gaierror) and error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES):
            raise
        message = f"cannot listen on {host}:{port} for the admin API: {error.strerror}"
        raise PortInUseError(message, host=host, port=port) from None


class AdminServer:
    """The admin API's server; `start` once, `aclose` once.

    Port 0 lets the system choose: see `port`. `on_failed` is called if serving fails.
    """

    def __init__(
        self,
        context: AdminContext,
        host: str,
        port: int,
        *,
        tls_port: int = 0,
        tls: ServerTls | None = None,
        has_plain_port: bool = True,
        authenticator: Authenticator | None = None,
        shared: SharedAdminPorts = NO_SHARED_PORTS,
        on_failed: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._context = context
        self._host = host
        self.port = port if has_plain_port else 0
        """Port without TLS; 0 while it is not open."""
        self.tls_port = tls_port if tls is not None else 0
        self._has_plain_port = has_plain_port
        self._tls = tls
        self._authenticator = authenticator
        self._shared = shared
        self._tasks = TaskOwner("admin", on_failed)
        self._built: Server | None = None
        self._server: Server | None = None
        settings = context.settings
        self._limits: ConnectionLimits[AdminProtocol] = ConnectionLimits(
            settings.max_connections, settings.max_connections_per_address
        )
        self._acceptors: list[TlsAcceptor[Place]] = []
        self._refusals = RefusalLog()
        self._listening: list[socket.socket] | None = None  # the port without TLS, if there is one, and then that with TLS

    def __repr__(self) -> str:
        return f"<AdminServer {self._host}:{self.port or self.tls_port}{'' if self._server is None else ', serving'}>"

    def statistics(self) -> PortStatistics:
        return self._limits.statistics()

    def listen(self) -> None:
        """Bind the ports; requests wait in their backlogs. `start` calls it unless it was called before. Raises PortInUseError."""
        if self._listening is None:
            self._listening = []
            try:
                if self._has_plain_port:
                    self._listening.append(open_admin_port(self._host, self.port))
                    self.port = self._listening[-1].getsockname()[1]
                if self._tls is not None:
                    self._listening.append(open_admin_port(self._host, self.tls_port))
                    self.tls_port = self._listening[-1].getsockname()[1]
            except PortInUseError:
                self._close_ports()
                raise

    async def build(self) -> Server:
        """Import the web framework and build the application, in a thread; otherwise `start` does it."""
        if self._built is None:
            importer = self._context.broker.ports.new_worker("admin-import", 1)
            try:
                self._built = await importer.run(self._build)
            finally:
                await importer.aclose()
        return self._built

    async def start(self) -> None:
        """Return when requests are answered. Raises PortInUseError."""
        self.listen()
        assert self._listening is not None
        try:
            server = await self.build()
            plain = self._listening[: int(self._has_plain_port)]
            if self._shared.plain is not None and self._has_plain_port:
                plain.append(self._shared.plain)
            await server.startup(sockets=plain)
            if self._tls is not None:
                self._serve_tls(server, self._tls, self._listening[-1])
                if self._shared.tls is not None:
                    self._serve_tls(server, self._tls, self._shared.tls)
        except BaseException:
            self._close_ports()
            raise
        self._listening = None  # now owned by uvicorn
        self._server = server
        self._tasks.start(server.main_loop(), name="serve")
        log.info("admin.started", extra={"host": self._host, "port": self.port or self.tls_port})

    async def aclose(self) -> None:
        """Stop; requests in progress are answered within the grace period of the settings."""
        server, self._server = self._server, None
        self._close_ports()  # all ports before the first await: a cancelled stop leaves none of them open
        for acceptor in self._acceptors:
            acceptor.stop_accepting()
        if server is not None:
            for served in server.servers:
                served.close()
        await self._tasks.aclose()
        for acceptor in self._acceptors:
            await acceptor.aclose()
        if server is not None:
            await server.shutdown()

    def _serve_tls(self, server: Server, tls: ServerTls, listening: socket.socket) -> None:
        """Serve the port with TLS by uvicorn's protocol: uvicorn itself has one context for all of its own sockets."""
        arrivals = Arrivals(
            max_arriving=_MAX_HANDSHAKES,
            max_arriving_per_address=_MAX_HANDSHAKES_PER_ADDRESS,
            max_per_address=_MAX_HANDSHAKES,  # open connections are the matter of `ConnectionLimits`
        )

        def admit(address: str) -> Place | None:
            place = arrivals.admit(address)
            if isinstance(place, Place):
                return place
            self._refusals.note("admin.connection_refused", address, level=logging.WARNING, peer=address, reason=place)
            return None

        def make(place: Place) -> asyncio.Protocol:
            place.free()
            new: Any = server.config.http_protocol_class
            protocol: asyncio.Protocol = new(
                config=server.config, server_state=server.server_state, app_state=server.lifespan.state
            )
            return protocol

        acceptor = TlsAcceptor(
            listening,
            lambda: tls.context,
            handshake_timeout_s=self._context.settings.header_timeout_s,
            admit=admit,
            make=make,
            on_failed=Place.free,
            refusals=self._refusals,
            plain_hint=lambda: f"http:// is on port {self.port}" if self.port else "this port is for https:// alone",
            on_refused=lambda peer, reason: self._audit_handshake(peer, self.tls_port, reason),
        )
        self._acceptors.append(acceptor)
        acceptor.start()

    def _close_ports(self) -> None:
        for listening in self._listening or ():
            if listening.fileno() >= 0:
                # uvicorn may already accept from it, and the loop would take the next file with this number for the port.
                asyncio.get_running_loop().remove_reader(listening)
                listening.close()

    def _audit_handshake(self, peer: str, port: int, reason: str) -> None:
        self._context.broker.audit.record(None, peer, TLS_HANDSHAKE, f"admin port {port}", "denied", reason)

    def _audit_request(self, peer: str, reason: str) -> None:
        self._context.broker.audit.record(None, peer, "request", "admin port", "denied", reason)

    def _note_tls(self, address: str) -> None:
        where = f"https:// is on port {self.tls_port}" if self.tls_port else "this broker has no TLS"
        reason = f"it speaks TLS to the port without TLS; {where}"
        self._refusals.note("admin.connection_refused", (address, "tls"), level=logging.WARNING, peer=address, reason=reason)
        self._audit_handshake(address, self.port, reason)

    def _build(self) -> Server:
        """Build the application; runs in a thread, as imports and routes take hundreds of milliseconds."""
        from uvicorn import Config, Server

        from cepheid_broker.admin.admin_protocol import ProtocolFactory
        from cepheid_broker.admin.app import create_app
        from cepheid_broker.admin.authentication import AdminAuthentication, CertificateRequired
        from cepheid_broker.admin.cross_site import AdminHosts, CrossSiteGuard

        settings = self._context.settings
        app = create_app(self._context)
        if self._authenticator is not None:
            broker = self._context.broker
            app = AdminAuthentication(app, self._authenticator, broker.audit, broker.settings.authentication.certificate_role)
        if self._context.broker.settings.tls.client_certificates == "required":
            app = CertificateRequired(app, self._context.broker.audit)
        config = Config(
            CrossSiteGuard(app, AdminHosts.of(self._context.broker.settings)),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=max(1, round(settings.stop_grace_s)),
        )
        config.load()
        config.http_protocol_class = ProtocolFactory(settings, self._limits, self._note_tls, self._audit_request)  # type: ignore[assignment]  # it is only called
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # it logs a line for each request that is not HTTP
        server = Server(config)
        server.lifespan = config.lifespan_class(config)  # as in Server.serve, which would also take over the process's signals
        return server
