"""Single connections of the simulated network: the stream of one writer's adds, and calls with their answers.

The rules are those of `sim_network.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cepheid_ports import CepheidError
from cepheid_rpc import MAX_MESSAGE_BYTES, AddAnswer, AddRequest, AddSource, BookieUnavailableError, EntryGroup, ReadAnswer
from tests.simulation.faults.plan import FaultPlan
from tests.simulation.world.node import Node, NodeCrashed

if TYPE_CHECKING:
    from tests.simulation.world.sim_network import Host, Network

_WRITE_S = (0.0, 0.0005)  # how long a transport takes to take a message: what arrives meanwhile travels together
_SPACING_S = 1e-9


class Wire:
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

    def receiver_busy_s(self) -> float:
        """How long nobody at the other end reads: what comes there, and what comes after it, waits."""
        plan = self.network.plan
        if plan.strikes("slow receiver", plan.faults.slow_receiver):
            return plan.lasting(plan.faults.slow_receiver_s)
        return 0.0

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
        when = self._last_to_bookie_s = max(loop.time() + self.network.delay_s(self.bookie_id), self._last_to_bookie_s + _SPACING_S)
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
        when = self._last_to_client_s = max(loop.time() + self.network.delay_s(self.bookie_id), self._last_to_client_s + _SPACING_S)
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


class SimAddStream(Wire):
    def __init__(self, network: Network, node: Node, bookie_id: str, source: AddSource) -> None:
        super().__init__(network, node, bookie_id, "add")
        self._source = source
        self._pull_due = False
        network.add_stream(self)
        if self.host is None:
            self.break_off(f"{bookie_id} refused the connection", network.delay_s(bookie_id))

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
            busy_s = self.receiver_busy_s()
            self._last_to_bookie_s = max(self._last_to_bookie_s, asyncio.get_running_loop().time() + busy_s)
            self._send(tuple(requests))
            self._pull_due = True
            self.node.call_later(busy_s or self.network.plan.between(_WRITE_S), self._pull)

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

        delay_s = self.network.plan.lasting(self.network.plan.faults.late_s)
        asyncio.get_running_loop().call_later(delay_s, arrive, context=host.node.context)

    def _answer(self, answers: Sequence[AddAnswer]) -> None:
        self.to_client(lambda: None if self.broken else self._source.on_answers(answers))


class Call(Wire):
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
        plan = self.network.plan
        if self.host is not None and plan.strikes("call duplicated", plan.faults.duplicate):
            self._start_again(serve, self.host)

    def _start_again(self, serve: Callable[[Host], Coroutine[Any, Any, None]], host: Host) -> None:
        """Late, and nobody hears the answer."""
        again = Call(self.network, self.node, self.bookie_id, self.kind)
        again.end()

        def arrive() -> None:
            host.node.start(again._serve(serve, host), name="serve again")

        delay_s = self.network.plan.lasting(self.network.plan.faults.late_s)
        asyncio.get_running_loop().call_later(delay_s, arrive, context=host.node.context)

    async def _serve(self, serve: Callable[[Host], Coroutine[Any, Any, None]], host: Host) -> None:
        try:
            await serve(host)
        except NodeCrashed:
            host.node.crash()
        except CepheidError as error:  # the gRPC server ends the call with a status: the client knows nothing
            self.answer(BookieUnavailableError(f"{self.bookie_id} failed: {error}", bookie=self.bookie_id))

    def answer(self, answer: Any) -> None:
        plan = self.network.plan
        if (
            isinstance(answer, ReadAnswer)
            and answer.groups
            and plan.strikes("bit of an answer flipped", plan.faults.corrupt_answer)
        ):
            answer = _with_damaged_group(answer, plan)
        if busy_s := self.receiver_busy_s():
            self._last_to_client_s = max(self._last_to_client_s, asyncio.get_running_loop().time() + busy_s)
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


def _with_flipped_bit(requests: tuple[AddRequest, ...], plan: FaultPlan) -> tuple[AddRequest, ...]:
    victim = plan.random.randrange(len(requests))
    request = requests[victim]
    damaged = AddRequest(_damaged(request.group, plan), request.master_key, request.recovery)
    return (*requests[:victim], damaged, *requests[victim + 1 :])


def _with_damaged_group(answer: ReadAnswer, plan: FaultPlan) -> ReadAnswer:
    victim = plan.random.randrange(len(answer.groups))
    groups = (*answer.groups[:victim], _damaged(answer.groups[victim], plan), *answer.groups[victim + 1 :])
    return replace(answer, groups=groups)


def _damaged(group: EntryGroup, plan: FaultPlan) -> EntryGroup:
    data = bytearray(group.data)
    data[plan.random.randrange(len(data))] ^= 1 << plan.random.randrange(8)
    return EntryGroup(group.ledger_id, group.first_entry_id, group.ends, bytes(data))
