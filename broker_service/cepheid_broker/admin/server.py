"""The admin port: open at once, served as soon as the web framework is there.

    start ──► port listens ──► a thread imports the framework and builds the application ──► uvicorn serves, in the broker's loop
              └─ requests wait in its backlog meanwhile, and the broker serves its clients

Rules
1. Nothing heavy is imported with this module: importing the framework takes longer than starting the rest of a broker.
2. Signals, logging and the loop belong to the process, not to uvicorn.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from cepheid_broker.admin.connection_limits import AdminServerStatistics, ConnectionLimits
from cepheid_broker.admin.context import AdminContext
from cepheid_broker.protocol import PortInUseError
from cepheid_ports import TaskOwner

if TYPE_CHECKING:
    from uvicorn import Server

    from cepheid_broker.admin.admin_protocol import AdminProtocol

log = logging.getLogger(__name__)

_BACKLOG = 256


class AdminServer:
    """`start` once, `aclose` once. Port 0 lets the system choose: see `port`. `on_failed` hears of it when serving fails."""

    def __init__(
        self,
        context: AdminContext,
        host: str,
        port: int,
        *,
        on_failed: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._context = context
        self._host = host
        self.port = port
        self._tasks = TaskOwner("admin", on_failed)
        self._server: Server | None = None
        settings = context.settings
        self._limits: ConnectionLimits[AdminProtocol] = ConnectionLimits(
            settings.max_connections, settings.max_connections_per_address
        )
        self._listening: socket.socket | None = None

    def __repr__(self) -> str:
        return f"<AdminServer {self._host}:{self.port}{'' if self._server is None else ', serving'}>"

    def statistics(self) -> AdminServerStatistics:
        return self._limits.statistics()

    def listen(self) -> None:
        """Takes the port; requests wait in its backlog. Called by `start` unless it was before. Raises PortInUseError."""
        if self._listening is None:
            self._listening = self._open_port()

    async def start(self) -> None:
        """Returns when requests are answered. Raises PortInUseError."""
        self.listen()
        listening = self._listening
        assert listening is not None
        try:
            importer = self._context.broker.ports.new_worker("admin-import", 1)
            try:
                server = await importer.run(self._build)
            finally:
                await importer.aclose()
            await server.startup(sockets=[listening])
        except BaseException:
            listening.close()
            raise
        self._listening = None  # uvicorn's now
        self._server = server
        self._tasks.start(server.main_loop(), name="serve")
        log.info("admin.started", extra={"host": self._host, "port": self.port})

    async def aclose(self) -> None:
        """Requests under way are answered, within the grace of the settings."""
        server, self._server = self._server, None
        await self._tasks.aclose()
        if self._listening is not None:
            self._listening.close()
        if server is not None:
            await server.shutdown()

    def _open_port(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        # Named TCP, since asyncio switches Nagle's delay off only for sockets that say so: 40 ms per answer.
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((self._host, self.port))
            listening.listen(_BACKLOG)
            listening.setblocking(False)
        except OSError as error:
            listening.close()
            if not isinstance(error, socket.gaierror) and error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES):
                raise
            message = f"cannot listen on {self._host}:{self.port} for the admin API: {error.strerror}"
            raise PortInUseError(message, host=self._host, port=self.port) from None
        self.port = listening.getsockname()[1]
        return listening

    def _build(self) -> Server:
        """In a thread: imports and routes take hundreds of milliseconds."""
        from uvicorn import Config, Server

        from cepheid_broker.admin.admin_protocol import ProtocolFactory
        from cepheid_broker.admin.app import create_app
        from cepheid_broker.admin.cross_site import AdminHosts, CrossSiteGuard

        settings = self._context.settings
        config = Config(
            CrossSiteGuard(create_app(self._context), AdminHosts.of(self._context.broker.settings)),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=max(1, round(settings.stop_grace_s)),
        )
        config.load()
        config.http_protocol_class = ProtocolFactory(settings, self._limits)  # type: ignore[assignment]  # it is only called
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # it has a line for each request that is not HTTP
        server = Server(config)
        server.lifespan = config.lifespan_class(config)  # what Server.serve does, which would take the process's signals too
        return server
