"""The network between ledger clients and bookies: implements `cepheid_rpc.BookieConnection` over messages that may go wrong.

    client node                          network                         bookie node
    BookieChannel ◄─next_message─ SimAddStream ──delay, FIFO──► Host.bookie.add(requests, on_answers)
          ▲──────on_answers──────────────┴──◄──delay, FIFO─────────────────┘
    read_lac, read, write_lac            a call of its own each: calls overtake each other and the add streams

Rules:
1. Inside one add stream, and inside one call, messages keep their order and none is missing in the middle: a lost message
   takes its connection with it. Between streams and calls any order may happen.
2. A connection belongs to one incarnation of the bookie's process. A process that ends resets it at once; a machine that ends
   is only noticed after `silence_s` (half-open).
3. A partition holds messages back, in one direction or both. Healed in time it lets them through, late; else the connection
   breaks after `silence_s`.
4. A duplicated add message arrives a second time, late, whatever became of its connection; nobody hears the second answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Protocol

from cepheid_ports import CepheidError
from cepheid_rpc import (
    MAX_MESSAGE_BYTES,
    AddAnswer,
    AddRequest,
    AddSource,
    BookieUnavailableError,
    DigestMismatchError,
    EntryGroup,
    ExplicitLac,
    LacAnswer,
    LacRequest,
    MalformedGroupError,
    ReadAnswer,
    ReadRequest,
    Status,
)
from tests.simulation.faults import FaultPlan
from tests.simulation.node import Node, NodeCrashed

_WRITE_S = (0.0, 0.0005)  # how long a transport takes to take a message: what arrives meanwhile travels together
_SPACING_S = 1e-9


class ServedBookie(Protocol):
    def add(self, requests: Sequence[AddRequest], on_answers: Callable[[Sequence[AddAnswer]], None]) -> None: ...

    async def read_lac(self, request: LacRequest) -> LacAnswer: ...

    def read(self, request: ReadRequest) -> AsyncIterator[ReadAnswer]: ...

    async def write_lac(self, request: ExplicitLac) -> Status: ...


class Host:
    """One incarnation of a bookie's process, reachable while it serves."""

    def __init__(self, node: Node, bookie: ServedBookie) -> None:
        self.node = node
        self.bookie = bookie

    def add(self, requests: Sequence[AddRequest], on_answers: Callable[[Sequence[AddAnswer]], None]) -> None:
        """As the gRPC server does: what was damaged on its way is refused at the door."""
        good: list[AddRequest] = []
        for request in requests:
            group = request.group
            try:
                group.verify()
            except (DigestMismatchError, MalformedGroupError):
                on_answers([AddAnswer(group.ledger_id, group.first_entry_id, group.last_entry_id, Status.BAD_DIGEST)])
            else:
                good.append(request)
        if good:
            self.bookie.add(good, on_answers)


class Network:
    def __init__(self, plan: FaultPlan) -> None:
        self.plan = plan
        self.hosts: dict[str, Host] = {}
        self._blocked: dict[tuple[str, str, str], None] = {}
        self._held: list[tuple[tuple[str, str, str], Callable[[], None]]] = []
        self._streams: list[SimAddStream] = []
        self._calls: list[_Call] = []

    def connections(self, node: Node) -> SimConnections:
        return SimConnections(self, node)

    # -- what happens to machines and wires -----------------------------------------------------------------------------

    def serve(self, bookie_id: str, node: Node, bookie: ServedBookie) -> None:
        self.hosts[bookie_id] = Host(node, bookie)

    def stop_serving(self, bookie_id: str, *, noticed: bool) -> None:
        """The process is gone; `noticed`: its machine says so to whoever is connected."""
        host = self.hosts.pop(bookie_id, None)
        for wire in [*self._streams, *self._calls]:
            if host is not None and wire.host is host:
                wire.break_off(f"{bookie_id} ended", 0.0 if noticed else self.plan.faults.silence_s)

    def block(self, sender: str, receiver: str, kind: str = "") -> None:
        """Holds back messages from now on: all, or those of one kind (add, lac, fence, read, recovery read, … answer)."""
        self._blocked[(sender, receiver, kind)] = None

    def unblock(self, sender: str, receiver: str, kind: str = "") -> None:
        self._blocked.pop((sender, receiver, kind), None)
        held, self._held = self._held, []
        for message, deliver in held:
            if self.is_blocked(*message):
                self._held.append((message, deliver))
            else:
                deliver()

    def is_blocked(self, sender: str, receiver: str, kind: str) -> bool:
        return (sender, receiver, kind) in self._blocked or (sender, receiver, "") in self._blocked

    def held(self, kind: str) -> int:
        """How many messages of a kind wait for an end of a partition."""
        return sum(message[2] == kind for message, _ in self._held)

    def heal(self) -> None:
        for message in list(self._blocked):
            self.unblock(*message)

    # -- for connections ------------------------------------------------------------------------------------------------

    def delay_s(self) -> float:
        faults = self.plan.faults
        if self.plan.strikes("message late", faults.late):
            return self.plan.between(faults.late_s)
        return self.plan.between(faults.delay_s)

    def pass_wire(self, sender: str, receiver: str, kind: str, deliver: Callable[[], None]) -> bool:
        """Delivers, or holds back what runs into a partition; tells which."""
        if self._blocked and self.is_blocked(sender, receiver, kind):
            self._held.append(((sender, receiver, kind), deliver))
            return False
        deliver()
        return True

    def add_stream(self, stream: SimAddStream) -> None:
        self._streams.append(stream)

    def add_call(self, call: _Call) -> None:
        self._calls.append(call)

    def forget(self, wire: SimAddStream | _Call) -> None:
        if isinstance(wire, SimAddStream):
            self._streams.remove(wire)
        else:
            self._calls.remove(wire)


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


class _Wire:
    """What add streams and calls share: two ends, one incarnation of the server, messages in order, an end."""

    def __init__(self, network: Network, node: Node, bookie_id: str, kind: str) -> None:
        self.network = network
        self.node = node
        self.bookie_id = bookie_id
        self.kind = kind
        self.host: Host | None = network.hosts.get(bookie_id)
        self.broken = False
        self._breaking = False
        self._last_to_bookie_s = 0.0
        self._last_to_client_s = 0.0

    def to_bookie(self, act: Callable[[Host], None]) -> None:
        """Sends one message; what it does happens in the bookie's process."""
        faults, plan = self.network.plan.faults, self.network.plan
        if self.host is None:  # nobody listens: refused at once
            self.break_off(f"{self.bookie_id} refused the connection", plan.between(faults.delay_s))
            return
        if self._breaking:
            return  # into the void, until the client notices
        if plan.strikes("message lost", faults.loss):
            self.break_off("silence", faults.silence_s)
            return
        if plan.strikes("reset before the server acted", faults.reset):
            self.break_off("connection reset", plan.between(faults.delay_s))
            return
        loop = asyncio.get_running_loop()
        when = self._last_to_bookie_s = max(loop.time() + self.network.delay_s(), self._last_to_bookie_s + _SPACING_S)
        loop.call_at(when, self._arrive, self.host, act, context=self.host.node.context)

    def _arrive(self, host: Host, act: Callable[[Host], None]) -> None:
        def deliver() -> None:
            if not self._breaking and host.node.alive:
                host.node.call_soon(act, host)

        if not self.network.pass_wire(self.node.name, self.bookie_id, self.kind, deliver):
            self._break_if_silent()

    def to_client(self, act: Callable[[], None]) -> None:
        """As `to_bookie`, the other way; called by the bookie's process."""
        faults, plan = self.network.plan.faults, self.network.plan
        if self._breaking:
            return
        if plan.strikes("answer lost", faults.loss):
            self.break_off("silence", faults.silence_s)
            return
        if plan.strikes("reset after the server acted", faults.reset):
            self.break_off("connection reset", plan.between(faults.delay_s))
            return
        loop = asyncio.get_running_loop()
        when = self._last_to_client_s = max(loop.time() + self.network.delay_s(), self._last_to_client_s + _SPACING_S)
        loop.call_at(when, self._return, act, context=self.node.context)

    def _return(self, act: Callable[[], None]) -> None:
        def deliver() -> None:
            if not self._breaking:
                self.node.call_soon(act)

        if not self.network.pass_wire(self.bookie_id, self.node.name, f"{self.kind} answer", deliver):
            self._break_if_silent()

    def _break_if_silent(self) -> None:
        """A message is stuck in a partition: if that lasts, keepalive ends the connection."""
        silence_s = self.network.plan.faults.silence_s

        def check() -> None:
            network, client, bookie = self.network, self.node.name, self.bookie_id
            if network.is_blocked(client, bookie, self.kind) or network.is_blocked(bookie, client, f"{self.kind} answer"):
                self.break_off("silence", 0.0)

        self.node.call_later(silence_s, check)

    def break_off(self, reason: str, after_s: float) -> None:
        """From now on nothing gets through; the client hears of it after `after_s`."""
        if not self._breaking:
            self._breaking = True
            self.node.call_later(after_s, self._tell_broken, reason)

    def _tell_broken(self, reason: str) -> None:
        if not self.broken:
            self.end()
            self.on_broken(BookieUnavailableError(f"{self.bookie_id}: {reason}", bookie=self.bookie_id))

    def end(self) -> None:
        if not self.broken:
            self.broken = self._breaking = True
            self.network.forget(self)  # type: ignore[arg-type]

    def on_broken(self, error: BookieUnavailableError) -> None:
        raise NotImplementedError


class SimAddStream(_Wire):
    def __init__(self, network: Network, node: Node, bookie_id: str, source: AddSource) -> None:
        super().__init__(network, node, bookie_id, "add")
        self._source = source
        self._pull_due = False
        network.add_stream(self)
        if self.host is None:
            self.break_off(f"{bookie_id} refused the connection", network.delay_s())

    def wake(self) -> None:
        if not self._pull_due and not self.broken:
            self._pull_due = True
            self.node.call_soon(self._pull)

    async def aclose(self) -> None:
        self.end()

    def on_broken(self, error: BookieUnavailableError) -> None:
        self._source.on_broken(error)

    def _pull(self) -> None:
        self._pull_due = False
        if self.broken:
            return
        requests = self._source.next_message(MAX_MESSAGE_BYTES)
        if requests:
            self._send(tuple(requests))
            self._pull_due = True
            self.node.call_later(self.network.plan.between(_WRITE_S), self._pull)

    def _send(self, requests: tuple[AddRequest, ...]) -> None:
        plan = self.network.plan
        if plan.strikes("bit flipped on the wire", plan.faults.corrupt):
            requests = _with_flipped_bit(requests, plan)
        self.to_bookie(lambda host: host.add(requests, self._answer))
        if self.host is not None and plan.strikes("add message duplicated", plan.faults.duplicate):
            self._send_again(requests, self.host)

    def _send_again(self, requests: tuple[AddRequest, ...], host: Host) -> None:
        def arrive() -> None:
            host.add(requests, lambda answers: None)

        delay_s = self.network.plan.between(self.network.plan.faults.late_s)
        asyncio.get_running_loop().call_later(delay_s, arrive, context=host.node.context)

    def _answer(self, answers: Sequence[AddAnswer]) -> None:
        self.to_client(lambda: None if self.broken else self._source.on_answers(answers))


class _Call(_Wire):
    """One request and its answers (one, or several for a read)."""

    def __init__(self, network: Network, node: Node, bookie_id: str, kind: str) -> None:
        super().__init__(network, node, bookie_id, kind)
        self._task: asyncio.Task[Any] | None = None
        self.answers: asyncio.Queue[Any] = asyncio.Queue()
        network.add_call(self)

    def start(self, serve: Callable[[Host], Coroutine[Any, Any, None]]) -> None:
        def act(host: Host) -> None:
            if not self.broken:
                self._task = host.node.start(self._serve(serve, host), name="serve")

        self.to_bookie(act)

    async def _serve(self, serve: Callable[[Host], Coroutine[Any, Any, None]], host: Host) -> None:
        try:
            await serve(host)
        except NodeCrashed:
            host.node.crash()
        except CepheidError as error:  # the gRPC server ends the call with a status: the client knows nothing
            self.answer(BookieUnavailableError(f"{self.bookie_id} failed: {error}", bookie=self.bookie_id))

    def answer(self, answer: Any) -> None:
        self.to_client(lambda: self.answers.put_nowait(answer))

    async def next_answer(self) -> Any:
        """The next answer; None when there are no more. Raises BookieUnavailableError."""
        answer = await self.answers.get()
        if isinstance(answer, BookieUnavailableError):
            raise answer
        return answer

    def finish(self) -> None:
        """The caller wants no more: what still runs for it is cancelled, as an RPC is."""
        self.end()
        task, host = self._task, self.host
        if task is not None and host is not None and not task.done():
            host.node.call_soon(task.cancel)

    def on_broken(self, error: BookieUnavailableError) -> None:
        self.answers.put_nowait(error)


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
        call = _Call(self._network, self._node, self._bookie_id, kind)

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

    async def _ask(self, kind: str, ask: Callable[[Host], Coroutine[Any, Any, Any]]) -> Any:
        call = _Call(self._network, self._node, self._bookie_id, kind)

        async def serve(host: Host) -> None:
            call.answer(await ask(host))

        try:
            call.start(serve)
            return await call.next_answer()
        finally:
            call.finish()


def _with_flipped_bit(requests: tuple[AddRequest, ...], plan: FaultPlan) -> tuple[AddRequest, ...]:
    victim = plan.random.randrange(len(requests))
    request = requests[victim]
    data = bytearray(request.group.data)
    data[plan.random.randrange(len(data))] ^= 1 << plan.random.randrange(8)
    group = EntryGroup(request.group.ledger_id, request.group.first_entry_id, request.group.ends, bytes(data))
    damaged = AddRequest(group, request.master_key, request.recovery)
    return (*requests[:victim], damaged, *requests[victim + 1 :])
