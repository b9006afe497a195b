"""Sockets of the simulated network: `create_server` and `create_connection` of the virtual loop, between machines by name.

    create_server(factory, "east", 6650)                                in a process of the machine "east"
    create_connection(factory, "east", 6650, local_addr=("anna", 0))    from the machine "anna"; in a process: from its machine
         └── request ──► the machine takes it ──► connection_made there, a step of its process
                    ◄── OPEN ──┘                  connection_made here; after it bytes both ways (sim_transport.py)

Rules
1. Callbacks are steps of the process that owns the protocol: never run once it has crashed, held while it is paused. A protocol
   made outside of processes is stopped by nobody.
2. A machine takes connections for a process that sleeps; nobody listens: refused; it has no power, or a partition is in between:
   silence, until the caller's own patience or the system's ends it.
3. A process that ends closes its connections as a kernel does. A machine that loses power says nothing to anybody, and answers what
   comes for its old connections with a reset once it has power again.
4. Partitions (`Network.block`, of everything or of "bytes"), delays and late messages are those of the network; a connection may
   be reset before or after the server acted, fall silent in one direction or both, or its receiver may not read for a while.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.simulation.world.node import Node, current_node
from tests.simulation.world.sim_transport import Mark, SimTransport, Stream

if TYPE_CHECKING:
    from tests.simulation.world.sim_network import Network

Factory = Callable[[], asyncio.BaseProtocol]

_WINDOW_BYTES = 16 << 10
_CONNECT_S = 10.0  # how long the system tries
_FIRST_FREE_PORT = 40_000
_ANY_HOST = (None, "", "0.0.0.0")


class _Name:
    """As much of a socket as servers show."""

    def __init__(self, name: tuple[str, int]) -> None:
        self._name = name

    def getsockname(self) -> tuple[str, int]:
        return self._name


class SimServer:
    """As much of `asyncio.Server` as brokers use."""

    def __init__(self, sockets: Sockets, factory: Factory, name: tuple[str, int], node: Node | None) -> None:
        self.name = name
        self.node = node
        self.sockets = (_Name(name),)
        self.context = contextvars.copy_context()
        self._factory = factory
        self._sockets = sockets

    def __repr__(self) -> str:
        return f"<SimServer {self.name}>"

    def is_serving(self) -> bool:
        return self._sockets.listening(self.name) is self

    def close(self) -> None:
        """Connections stay."""
        self._sockets.stop_listening(self)

    async def start_serving(self) -> None:
        """It has listened since it was made."""

    async def wait_closed(self) -> None:
        pass

    def accept(self, transport: SimTransport) -> None:
        """A step of its process."""
        if self.is_serving():
            transport.open(self._sockets.listened_in(self._factory(), self.name[0]))
        else:
            transport.break_off()


class Sockets:
    """All listeners and connections of a loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, network: Network) -> None:
        self.loop = loop
        self.network = network
        self.context = contextvars.Context()  # of no process: steps of the network itself
        self.window_bytes = _WINDOW_BYTES
        self.dark: dict[str, None] = {}  # machines without power
        self.listened_in: Callable[[Any, str], Any] = lambda protocol, machine: protocol  # for who notes what servers say
        self._servers: dict[tuple[str, int], SimServer] = {}
        self._transports: dict[SimTransport, None] = {}
        self._watched: dict[Node, None] = {}
        self._ports = itertools.count(_FIRST_FREE_PORT)

    def __repr__(self) -> str:
        return f"<Sockets: {list(self._servers)}, {len(self._transports)} ends of connections>"

    # What happens to machines and connections

    def lose_power(self, machine: str) -> None:
        """Before its processes crash. It has power again when one of them starts."""
        self.dark[machine] = None
        for transport in self.ends_at(machine):
            transport.vanish()

    def reset(self, machine: str) -> None:
        """All its connections: both ends hear of it, as soon as anything reaches them."""
        for transport in self.ends_at(machine):
            transport.reset()

    def ends_at(self, machine: str) -> list[SimTransport]:
        return [transport for transport in self._transports if transport.machine == machine]

    def _on_crash(self, node: Node) -> None:
        del self._watched[node]
        self._servers = {name: server for name, server in self._servers.items() if server.node is not node}
        for transport in list(self._transports):
            if transport.node is node:
                transport.break_off()

    # For transports and servers

    def register(self, transport: SimTransport) -> None:
        self._transports[transport] = None
        self._watch(transport.node)

    def forget(self, transport: SimTransport) -> None:
        self._transports.pop(transport, None)

    def listening(self, name: tuple[str, int]) -> SimServer | None:
        return self._servers.get(name)

    def stop_listening(self, server: SimServer) -> None:
        if self._servers.get(server.name) is server:
            del self._servers[server.name]

    def _watch(self, node: Node | None) -> None:
        if node is not None and node not in self._watched:
            self._watched[node] = None
            node.on_crash.append(lambda: self._on_crash(node))

    # For the loop

    def listen(self, factory: Factory, host: str | None, port: int) -> SimServer:
        node = current_node()
        machine = node.name if node is not None else str(host)
        if host not in (machine, *_ANY_HOST):
            raise OSError(errno.EADDRNOTAVAIL, f"{host} is not the machine {machine}")
        name = (machine, port or next(self._ports))
        if name in self._servers:
            raise OSError(errno.EADDRINUSE, f"somebody listens at {name}")
        self.dark.pop(machine, None)
        self._watch(node)
        server = self._servers[name] = SimServer(self, factory, name, node)
        return server

    async def connect(self, factory: Factory, host: str, port: int, machine: str | None) -> tuple[SimTransport, Any]:
        """Raises OSError: refused, broken while it was made, or timed out."""
        node = current_node()
        name = (machine or (node.name if node is not None else "outside"), next(self._ports))
        self.dark.pop(name[0], None)
        connected: asyncio.Future[Any] = self.loop.create_future()

        def on_open(transport: SimTransport) -> None:
            if connected.done():
                transport.break_off()  # whoever asked has given up
                return
            transport.open(factory())
            connected.set_result(transport)

        caller = SimTransport(self, name, (host, port), contextvars.copy_context(), node, on_open)
        self._later(host, lambda: self._request(caller, connected, (host, port)))
        try:
            async with asyncio.timeout(_CONNECT_S):
                await connected
        except BaseException:
            if caller.opened:
                caller.abort()
            else:
                caller.vanish()  # what comes for it is answered with a reset
            raise
        return caller, caller.protocol

    def _later(self, server: str, step: Callable[[], None]) -> None:
        """A step of the network, as late as a message."""
        self.loop.call_later(self.network.delay_s(server), step, context=self.context)

    def _request(self, caller: SimTransport, connected: asyncio.Future[Any], name: tuple[str, int]) -> None:
        """A request for a connection has come as far as the wire to the server's machine."""

        def arrive() -> None:
            if caller.gone or name[0] in self.dark:
                return
            server = self._servers.get(name)
            if server is None:
                self._later(name[0], lambda: self._refuse(caller, connected, name))
                return
            taken = SimTransport(self, name, caller.get_extra_info("sockname"), server.context, server.node, server.accept)
            caller.out, taken.out = Stream(self, caller, taken, name[0]), Stream(self, taken, caller, name[0])
            self.loop.call_soon(server.accept, taken, context=server.context)
            taken.out.mark(Mark.OPEN)

        self.network.pass_wire(caller.machine, name[0], "bytes", arrive)

    def _refuse(self, caller: SimTransport, connected: asyncio.Future[Any], name: tuple[str, int]) -> None:
        def arrive() -> None:
            if not connected.done():
                connected.set_exception(ConnectionRefusedError(errno.ECONNREFUSED, f"nobody listens at {name}"))

        self.network.pass_wire(name[0], caller.machine, "bytes", arrive)


class SocketCalls:
    """What a loop has for sockets (a mixin). `sockets` is set by whoever makes the network."""

    sockets: Sockets

    async def create_server(self, protocol_factory: Factory, host: Any = None, port: Any = None, **_: Any) -> Any:
        return self.sockets.listen(protocol_factory, host, port or 0)

    async def create_connection(
        self, protocol_factory: Factory, host: Any = None, port: Any = None, *, local_addr: Any = None, **_: Any
    ) -> Any:
        """`local_addr`: (machine, ignored), for clients, which live in no process."""
        machine = None if local_addr is None else local_addr[0]
        return await self.sockets.connect(protocol_factory, host, port, machine)
