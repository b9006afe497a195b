"""One simulated cluster, one seed: real code on simulated machines, a workload, faults, then peace and an audit.

    start ──► workload + faults (safety is checked at every answer and commit) ──► heal ──► quiet? ──► audit

The seed decides everything: the size of the cluster, the quorums, what clients do, what breaks and when.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from tests.simulation.audit import audit
from tests.simulation.checks_ledger import LedgerRecordChecks
from tests.simulation.cluster import SimBookie, SimBroker
from tests.simulation.commits import CommitChecks
from tests.simulation.faults import FaultPlan, Faults
from tests.simulation.history import History
from tests.simulation.log_watch import LogWatch
from tests.simulation.nemesis import Nemesis
from tests.simulation.node import Node, NodeCrashed
from tests.simulation.sim_network import Network
from tests.simulation.sim_store import SimTree
from tests.simulation.virtual_loop import SimulationError, VirtualLoop
from tests.simulation.workload_ledgers import LedgerWorkload, Quorums

_QUORUMS = ((1, 1, 1), (2, 2, 2), (2, 2, 1), (3, 3, 2), (3, 3, 2), (3, 3, 2), (3, 3, 3))
_MOST_REPLAYS = 4


@dataclass(frozen=True, slots=True)
class Report:
    seed: int
    operations: dict[str, int]
    faults: dict[str, int]
    checks: dict[str, int]
    steps: int
    virtual_s: float
    trace: list[str]


class World:
    def __init__(self, seed: int, *, faults: Faults | None = None, operations: int = 220, trace: bool = False) -> None:
        self.seed = seed
        self.random = random.Random(f"{seed}/world")
        self.plan = FaultPlan(f"{seed}/faults", faults or Faults())
        self.wanted_operations = operations
        self.loop = VirtualLoop()
        self.history = History(self.loop)
        if trace:
            self.history.trace = []
        self.replays = 0

    def run(self) -> Report:
        """Raises InvariantViolation or SimulationError."""
        with LogWatch(self.history, self.loop):
            self.loop.run(self._live())
        history = self.history
        return Report(
            self.seed, history.operations, self.plan.counts, history.checked, self.loop.steps, history.now_s, history.trace or []
        )

    async def _live(self) -> None:
        self._context = contextvars.copy_context()
        self._build()
        for bookie in self.bookies.values():
            await bookie.start()
        for broker in self.brokers.values():
            self.begin(broker)
        nemesis = Nemesis(self)
        while sum(self.history.operations.values()) < self.wanted_operations or self.plan.total() < 3:
            await asyncio.sleep(self.random.expovariate(10.0))
            self._visit_ledgers()
            nemesis.act()
        self.history.note("healing")
        self.plan.heal()
        await nemesis.heal()
        await audit(self)

    def _build(self) -> None:
        plan, history = self.plan, self.history
        self.quorums = Quorums(*self.random.choice(_QUORUMS))
        self.tree = SimTree()
        self.tree.on_commit = CommitChecks(history, LedgerRecordChecks(history)).on_commit
        self.network = Network(plan)
        count = self.quorums.ensemble_size + self.random.randrange(3)
        names = [f"b{number}" for number in range(1, count + 1)]
        self.bookies = {
            name: SimBookie(name, self.network, plan, history, on_down=self._restart_later, on_fence=self._replay_sometimes)
            for name in names
        }
        self.brokers = {name: SimBroker(name, self.tree, self.network, plan, history, names) for name in ("east", "west")}
        self.ledger_workload = LedgerWorkload(self.random, history, self.quorums)

    # -- processes ------------------------------------------------------------------------------------------------------

    def begin(self, broker: SimBroker) -> None:
        """Starts a broker's process and what runs in it."""
        broker.start()
        self.spawn(broker.node, self.ledger_workload.write(broker), "write")

    def spawn(self, node: Node, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Work of a process. A crash inside ends the process; anything else unexpected ends the run."""

        async def guarded() -> None:
            try:
                await work
            except NodeCrashed:
                node.crash()
            except Exception as error:
                if self.loop.failure is None:
                    self.loop.failure = SimulationError(f"{name} of {node.name} failed: {error!r}")
                    self.loop.failure.__cause__ = error

        return node.start(guarded(), name=name)

    def later(self, delay_s: float, act: Callable[[], object]) -> None:
        """Does something outside of all processes, whoever asks for it."""
        self.loop.call_later(delay_s, act, context=self._context)

    def start_outside(self, work: Coroutine[Any, Any, Any], name: str) -> None:
        async def guarded() -> None:
            try:
                await work
            except Exception as error:
                if self.loop.failure is None:
                    self.loop.failure = SimulationError(f"{name} failed: {error!r}")
                    self.loop.failure.__cause__ = error

        self.loop.create_task(guarded(), name=name, context=self._context)

    def _restart_later(self, bookie: SimBookie) -> None:
        self.later(self.random.choice((0.05, 0.3, 1.0, 4.0)), lambda: bookie.node.alive or bookie.start())

    def _replay_sometimes(self, bookie: SimBookie) -> None:
        """Right after a promise: what if power were lost in this instant?"""
        if self.replays < _MOST_REPLAYS and self.random.random() < 0.3:
            self.replay(bookie)

    def replay(self, bookie: SimBookie) -> None:
        self.replays += 1
        self.start_outside(bookie.replay_copy(f"{self.seed}/replay/{self.replays}"), f"replay {self.replays}")

    # -- what clients do ------------------------------------------------------------------------------------------------

    def _visit_ledgers(self) -> None:
        """Somebody recovers or reads some ledger, perhaps the one that is being written."""
        broker = self.random.choice(list(self.brokers.values()))
        open_ledgers = [record.ledger_id for record in self.history.ledgers.values() if not record.is_closed]
        if not broker.node.alive:
            return
        if open_ledgers and self.random.random() < 0.15:
            victim = self.random.choice(open_ledgers)
            self.spawn(broker.node, self.ledger_workload.recover(broker, victim), f"recover {victim}")
        if self.history.ledgers and self.random.random() < 0.3:
            victim = self.random.choice(list(self.history.ledgers))
            self.spawn(broker.node, self.ledger_workload.read(broker, victim), f"read {victim}")
