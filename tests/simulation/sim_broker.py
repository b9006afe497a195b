"""Broker processes of a world, as far as storage is concerned: real ledger clients and managed ledgers, process after process."""

from __future__ import annotations

import asyncio

from cepheid_broker.managed_ledger import ManagedLedgers, ManagedLedgerSettings, TailCache
from cepheid_ledger import LedgerClient, LedgerSettings, RandomPlacement
from cepheid_ledger.bookie_directory import BookieDirectory
from cepheid_metadata import (
    LedgerIds,
    MetadataError,
    SessionState,
    ledger_records,
)
from tests.simulation.checks_ledger import ConnectionsProbe, LedgerClientProbe
from tests.simulation.faults import FaultPlan
from tests.simulation.history import History
from tests.simulation.node import Node
from tests.simulation.sim_connection import SimConnections
from tests.simulation.sim_directory import SimDirectory
from tests.simulation.sim_network import Network
from tests.simulation.sim_store import SimStore, SimTree
from tests.simulation.sim_worker import sim_ports

KIB = 1 << 10

LEDGER_SETTINGS = LedgerSettings(
    add_timeout_s=2.0,
    refusal_retry_s=3.0,
    read_timeout_s=2.0,
    speculative_read_s=0.3,
    recovery_timeout_s=2.0,
    recovery_batch_entries=20,
    quarantine_s=2.0,
    quarantine_max_s=5.0,
    ensemble_change_timeout_s=6.0,
    ensemble_retry_s=0.3,
    deletion_grace_s=1.5,
    metadata_timeout_s=5.0,
    reconnect_delay_max_s=1.0,
)
MANAGED_LEDGER_SETTINGS = ManagedLedgerSettings(
    ledger_max_entries=12,
    ledger_min_age_s=0.0,
    ledger_max_age_s=5.0,
    drain_timeout_s=3.0,
    ledger_failover_timeout_s=6.0,
    metadata_timeout_s=4.0,
    housekeeping_s=1.0,
    orphan_scan_s=1.5,
    cursor_flush_s=0.1,
    cursor_inline_bytes=60,  # so that a few holes move a cursor to its ledger and back
    cursor_part_bytes=40,
    cursor_ledger_max_bytes=2 * KIB,
)


class SimBroker:
    """A broker's process as far as storage is concerned; what it does with its client is the workload's business."""

    def __init__(
        self, name: str, tree: SimTree, network: Network, plan: FaultPlan, history: History, directory: SimDirectory
    ) -> None:
        self.name = name
        self._tree = tree
        self._network = network
        self._plan = plan
        self._history = history
        self._directory = directory
        self._loop = asyncio.get_running_loop()
        self.settings = MANAGED_LEDGER_SETTINGS
        self.observed = True  # False: see SimBookie
        self.sessions_lost = 0  # that it heard of
        self.node = Node(name, 0)
        self.node.alive = False

    def __repr__(self) -> str:
        return f"<SimBroker {self.process} {'up' if self.node.alive else 'down'}>"

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
        self.ports = sim_ports(plan.random, lambda _: plan.between(plan.faults.disk_delay_s), plan.clocks.of(self.name))
        self.store = SimStore(self._tree, plan, process)
        self.store.subscribe(self._on_session)
        ids = LedgerIds(self.store, block=10)
        wires = SimConnections(self._network, self.node)
        if self._directory is None:  # the real one, over registrations
            directory = BookieDirectory(self.store, self.ports, connect=lambda bookie_id, address: wires.get(bookie_id))
            directory.on_new_incarnation = ids.drop_block
            directory.on_back = lambda bookie_id: self.client.on_bookie_back(bookie_id)
            self.node.start(self._follow(directory), name="follow bookies")
            connections, writable = ConnectionsProbe(directory, history, process), directory.writable
        else:
            connections, writable = ConnectionsProbe(wires, history, process), self._directory.writable
        placement = RandomPlacement(writable, plan.random, LEDGER_SETTINGS.quarantine_s)
        self.client = LedgerClient(connections, ledger_records(self.store), ids, placement, LEDGER_SETTINGS, self.ports)
        self.ledgers = LedgerClientProbe(self.client, history, process)
        self.managed_ledgers = ManagedLedgers(
            self.ledgers if self.observed else self.client,  # type: ignore[arg-type] # behaves as one
            self.store,
            TailCache(8 * KIB, keep_s=0.5),
            self.settings,
            self.ports,
        )

    async def _follow(self, directory: BookieDirectory) -> None:
        while True:
            try:
                return await directory.start()
            except MetadataError as error:
                self._history.note(f"{self.process} cannot list bookies: {error!r}")
                await asyncio.sleep(0.3)

    def _on_session(self, state: SessionState) -> None:
        self.sessions_lost += state is SessionState.LOST

    def crash(self) -> None:
        self._history.note(f"{self.process} crashed")
        self.node.crash()
        self.store.abandon()
