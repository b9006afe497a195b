"""Bookies as a simulated client process sees them: `cepheid_rpc.BookieConnection` over the wires of `sim_network.py`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from cepheid_rpc import AddSource, ExplicitLac, LacAnswer, LacRequest, ReadAnswer, ReadRequest, Status
from tests.simulation.world.node import Node
from tests.simulation.world.sim_network import Host, Network
from tests.simulation.world.sim_wire import Call, SimAddStream


class SimConnections:
    """The registry of one client process (`cepheid_ledger.BookieConnections`)."""

    def __init__(self, network: Network, node: Node) -> None:
        self._network = network
        self._node = node
        self._connections: dict[str, SimConnection] = {}

    def get(self, bookie_id: str) -> SimConnection:
        if bookie_id not in self._connections:
            self._connections[bookie_id] = SimConnection(self._network, self._node, bookie_id)
        return self._connections[bookie_id]


class SimConnection:
    """One bookie as seen by one client process."""

    def __init__(self, network: Network, node: Node, bookie_id: str) -> None:
        self._network = network
        self._node = node
        self._bookie_id = bookie_id

    def __repr__(self) -> str:
        return f"<SimConnection {self._node.name} to {self._bookie_id}>"

    @property
    def bookie_id(self) -> str:
        return self._bookie_id

    def open_add_stream(self, source: AddSource) -> SimAddStream:
        return SimAddStream(self._network, self._node, self._bookie_id, source)

    async def read_lac(self, request: LacRequest) -> LacAnswer:
        return await self._ask("fence" if request.fence else "lac", lambda host: host.bookie.read_lac(request))

    async def write_lac(self, request: ExplicitLac) -> Status:
        return await self._ask("explicit lac", lambda host: host.bookie.write_lac(request))

    async def read(self, request: ReadRequest) -> AsyncIterator[ReadAnswer]:
        kind = "recovery read" if request.fence else "read"
        call = Call(self._network, self._node, self._bookie_id, kind)

        async def serve(host: Host) -> None:
            async for chunk in host.bookie.read(request):
                call.answer(chunk)
            call.answer(None)

        try:
            call.start(serve)
            while (chunk := await call.next_answer()) is not None:
                yield chunk
        finally:
            call.finish()

    async def aclose(self) -> None:
        pass

    @property
    def is_outdated(self) -> bool:
        return False

    @property
    def is_adding(self) -> bool:
        return True  # it remembers nothing of failures: no need for another one

    async def abandon(self, reason: str) -> None:
        raise NotImplementedError("simulated bookies do not move")

    async def _ask(self, kind: str, ask: Callable[[Host], Coroutine[Any, Any, Any]]) -> Any:
        call = Call(self._network, self._node, self._bookie_id, kind)

        async def serve(host: Host) -> None:
            call.answer(await ask(host))

        try:
            call.start(serve)
            return await call.next_answer()
        finally:
            call.finish()
