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
4. A duplicated add message or call arrives a second time, late, whatever became of its connection; nobody hears the second answer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from cepheid_rpc import (
    AddAnswer,
    AddRequest,
    DigestMismatchError,
    ExplicitLac,
    LacAnswer,
    LacRequest,
    MalformedGroupError,
    ReadAnswer,
    ReadRequest,
    Status,
)
from tests.simulation.faults.plan import FaultPlan
from tests.simulation.world.node import Node
from tests.simulation.world.sim_wire import Call, SimAddStream


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
        self.slow: dict[str, float] = {}  # bookie → how many times longer its messages take
        self._blocked: dict[tuple[str, str, str], None] = {}
        self._held: list[tuple[tuple[str, str, str], Callable[[], None]]] = []
        self._streams: list[SimAddStream] = []
        self._calls: list[Call] = []

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
        self.slow.clear()
        for message in list(self._blocked):
            self.unblock(*message)

    # -- for connections ------------------------------------------------------------------------------------------------

    def delay_s(self, bookie_id: str) -> float:
        faults = self.plan.faults
        if self.plan.strikes("message late", faults.late):
            return self.plan.lasting(faults.late_s)
        return self.plan.between(faults.delay_s) * self.slow.get(bookie_id, 1.0)

    def pass_wire(self, sender: str, receiver: str, kind: str, deliver: Callable[[], None]) -> bool:
        """Delivers, or holds back what runs into a partition; tells which."""
        if self._blocked and self.is_blocked(sender, receiver, kind):
            self._held.append(((sender, receiver, kind), deliver))
            return False
        deliver()
        return True

    def add_stream(self, stream: SimAddStream) -> None:
        self._streams.append(stream)

    def add_call(self, call: Call) -> None:
        self._calls.append(call)

    def forget(self, wire: SimAddStream | Call) -> None:
        if isinstance(wire, SimAddStream):
            self._streams.remove(wire)
        else:
            self._calls.remove(wire)
