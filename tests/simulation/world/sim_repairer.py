"""Processes of a world that repair: the real auditor and replication worker, with a session, bookies and connections of their own.

down ──start──► up ──crash, pause, resume──► as a broker, see sim_broker.py
"""

from __future__ import annotations

import asyncio
import contextvars

from cepheid_ledger import ClosedLedger, LedgerClient, RackAwarePlacement
from cepheid_ledger.bookie_directory import BookieDirectory
from cepheid_metadata import LedgerIds, MetadataError, ledger_records
from cepheid_recovery import AutoRecovery, RecoverySettings
from tests.simulation.checks.history import History
from tests.simulation.checks.ledger import ConnectionsProbe, LedgerClientProbe
from tests.simulation.checks.repair import check_recovery
from tests.simulation.faults.plan import FaultPlan
from tests.simulation.world.node import Node
from tests.simulation.world.sim_broker import LEDGER_SETTINGS
from tests.simulation.world.sim_connection import SimConnections
from tests.simulation.world.sim_directory import SESSION_S
from tests.simulation.world.sim_network import Network
from tests.simulation.world.sim_store import SimStore, SimTree
from tests.simulation.world.sim_worker import sim_ports

RECOVERY_SETTINGS = RecoverySettings(
    grace_s=5.0,  # most restarts of a bookie are over by then
    open_ledger_grace_s=3.0,
    walk_interval_s=15.0,
    checks_per_s=100.0,
    poll_s=0.8,
    ledgers_at_once=4,
    retry_s=0.5,
)


class RepairClientProbe(LedgerClientProbe):
    """What repair uses of a ledger client, observed (R4)."""

    def __init__(self, client: LedgerClient, history: History, process: str, settings: RecoverySettings) -> None:
        super().__init__(client, history, process)
        self._settings = settings

    async def recover(self, ledger_id: int, **options: bool) -> ClosedLedger:
        check_recovery(self._history, ledger_id, self._process, self._settings.open_ledger_grace_s)
        return await super().recover(ledger_id, **options)


class SimRepairer:
    def __init__(
        self,
        name: str,
        tree: SimTree,
        network: Network,
        plan: FaultPlan,
        history: History,
        settings: RecoverySettings = RECOVERY_SETTINGS,
    ) -> None:
        self.name = name
        self.settings = settings
        self.node = Node(name, 0)
        self.node.alive = False
        self._outside = contextvars.copy_context()  # of no process
        self._tree = tree
        self._network = network
        self._plan = plan
        self._history = history
        self._loop = asyncio.get_running_loop()

    def __repr__(self) -> str:
        return f"<SimRepairer {self.process} {'up' if self.node.alive else 'down'}>"

    @property
    def process(self) -> str:
        return f"{self.name}#{self.node.incarnation}"

    def start(self) -> None:
        assert not self.node.alive, f"{self!r} is running"
        self.node = Node(self.name, self.node.incarnation + 1)
        self.node.context.run(self._build)
        self._history.note(f"{self.process} started")

    def _build(self) -> None:
        """In the process's own context: whatever it schedules belongs to it."""
        plan, history, process = self._plan, self._history, self.process
        history.repairers[process] = None
        ports = sim_ports(plan.random, lambda _: plan.between(plan.faults.disk_delay_s), plan.clocks.of(self.name))
        self.store = SimStore(self._tree, plan, process)
        wires = SimConnections(self._network, self.node)
        directory = BookieDirectory(self.store, ports, connect=lambda bookie_id, address: wires.get(bookie_id))
        placement = RackAwarePlacement(directory.writable, plan.random, LEDGER_SETTINGS.quarantine_s)
        self.client = LedgerClient(
            ConnectionsProbe(directory, history, process),
            ledger_records(self.store),
            LedgerIds(self.store),
            placement,
            LEDGER_SETTINGS,
            ports,
        )
        directory.on_back = self.client.on_bookie_back
        probe = RepairClientProbe(self.client, history, process, self.settings)
        self.recovery = AutoRecovery(
            process,
            self.store,
            probe,  # type: ignore[arg-type] # behaves as one
            placement,
            directory,
            self.settings,
            ports,
        )
        directory.on_changed = self.recovery.on_bookies_changed
        self.node.start(self._run(directory), name="repair")

    async def _run(self, directory: BookieDirectory) -> None:
        while True:
            try:
                await directory.start()
                break
            except MetadataError as error:
                self._history.note(f"{self.process} cannot list bookies: {error!r}")
                await asyncio.sleep(0.3)
        self.recovery.start()

    def crash(self, *, lingers: bool = False) -> None:
        """Between two steps. `lingers`: the metadata store keeps its session for a while."""
        self._history.note(f"{self.process} crashed")
        self.node.crash()
        if lingers:
            self._loop.call_later(SESSION_S, self.store.abandon, context=self._outside)
        else:
            self.store.abandon()
