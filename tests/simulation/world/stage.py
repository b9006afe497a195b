"""The set on which scripts and random worlds play: machines, wires, metadata, and the eyes on them, all on one virtual loop."""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from tests.simulation.checks.commits import CommitChecks
from tests.simulation.checks.history import History
from tests.simulation.checks.store import StoreChecks
from tests.simulation.faults.plan import CALM, FaultPlan, Faults
from tests.simulation.world.cluster import Machine, SimBookie, some_machine
from tests.simulation.world.log_watch import LogWatch
from tests.simulation.world.node import Node, NodeCrashed
from tests.simulation.world.sim_broker import SimBroker
from tests.simulation.world.sim_directory import SimDirectory
from tests.simulation.world.sim_network import Network
from tests.simulation.world.sim_objects import SimObjects
from tests.simulation.world.sim_sockets import Sockets
from tests.simulation.world.sim_store import SimTree
from tests.simulation.world.virtual_loop import SimulationError, VirtualLoop

T = TypeVar("T")


class Stage:
    """`play` runs a coroutine on it, once. Bookies and brokers are made by `build` and not started."""

    def __init__(self, seed: str, faults: Faults = CALM, *, trace: bool = False, suppressed: frozenset[int] = frozenset()) -> None:
        self.random = random.Random(f"{seed}/stage")  # a str seeds by its bytes, the same in every process
        self.plan = FaultPlan(f"{seed}/faults", faults, suppressed=suppressed)
        self.loop = VirtualLoop()
        self.history = History(self.loop)
        if trace:
            self.history.trace = []
        self.tree = SimTree()
        self.tree.on_commit = CommitChecks(self.history, self.tree.nodes).on_commit
        self.tree.on_registration = self.history.on_registration
        self.history.is_on_disk = self._is_on_disk
        self.history.is_readable = self._is_readable
        self.tree.checks = StoreChecks(self.history, self.tree.nodes)
        self.network = Network(self.plan)
        self.sockets = self.loop.sockets = Sockets(self.loop, self.network)
        self.objects: SimObjects | None = None  # an object store, if there is one
        self.bookies: dict[str, SimBookie] = {}
        self.brokers: dict[str, SimBroker] = {}
        self._context = contextvars.copy_context()

    def play(self, script: Coroutine[Any, Any, T]) -> T:
        """Raises InvariantViolation or SimulationError."""
        with LogWatch(self.history, self.loop):
            return self.loop.run(script)

    def build(self, bookies: int, brokers: Sequence[str] = ("east", "west"), *, registers: bool = False) -> None:
        """`registers`: bookies write where they are, and brokers read it; else everybody just knows."""
        names = [f"b{number}" for number in range(1, bookies + 1)]
        self.bookies = {
            name: SimBookie(
                name,
                self.tree,
                self.network,
                self.plan,
                self.history,
                on_down=self.on_bookie_down,
                on_fence=self.on_fence,
                registers=registers,
                machine=some_machine(self.plan.stream(f"machine of {name}")) if registers else Machine(),
            )
            for name in names
        }
        self.directory = None if registers else SimDirectory(self.bookies)
        self.brokers = {name: self.new_broker(name) for name in brokers}

    def _is_on_disk(self, bookie_id: str, data: bytes) -> bool:
        return bookie_id in self.bookies and self.bookies[bookie_id].is_durable(data)

    def _is_readable(self, bookie_id: str, ledger_id: int, entry_id: int) -> bool:
        return bookie_id in self.bookies and not self.bookies[bookie_id].has_decayed(ledger_id, entry_id)

    def new_broker(self, name: str) -> SimBroker:
        return SimBroker(
            name, self.tree, self.network, self.plan, self.history, self.directory, sockets=self.sockets, objects=self.objects
        )

    def on_bookie_down(self, bookie: SimBookie) -> None:
        """A bookie's process or machine ended. Scripts start it again when they want to."""

    def on_fence(self, bookie: SimBookie) -> None:
        """A bookie is about to answer its first fence of some ledger."""

    def spawn(self, node: Node, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Work of a process. A crash inside ends the process; anything else unexpected ends the run."""

        async def guarded() -> None:
            try:
                await work
            except NodeCrashed:
                node.crash()
            except Exception as error:
                self._fail(f"{name} of {node.name}", error)

        return node.start(guarded(), name=name)

    def start_outside(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Work of no process."""

        async def guarded() -> None:
            try:
                await work
            except Exception as error:
                self._fail(name, error)

        return self.loop.create_task(guarded(), name=name, context=self._context)

    def later(self, delay_s: float, act: Callable[[], object]) -> None:
        """Does something outside of all processes, whoever asks for it."""
        self.loop.call_later(delay_s, act, context=self._context)

    def _fail(self, who: str, error: Exception) -> None:
        if self.loop.failure is None:
            self.loop.failure = SimulationError(f"{who} failed: {error!r}", type(error).__name__)
            self.loop.failure.__cause__ = error
