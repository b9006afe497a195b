"""Broker processes of a world: real ledger clients and managed ledgers, and with `serves` the real broker on its port.

down ──start──► up ──(serves)──► ready ──┬─ crash: at any step; its session may linger, its machine lose power
  ▲                                      ├─ pause, resume (`node`)
  └──────────────────────────────────────┴─ stop: in good order, as at SIGTERM
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from cepheid_broker.broker import Broker
from cepheid_ledger import LedgerClient, LedgerSettings, RackAwarePlacement
from cepheid_ledger.bookie_directory import BookieDirectory
from cepheid_managed_ledger import ManagedLedgerConfig, ManagedLedgers, ManagedLedgerSettings, TailCache
from cepheid_metadata import (
    LedgerIds,
    MetadataError,
    PageLimits,
    SessionState,
    ledger_records,
)
from cepheid_metadata.chain_pages import LIMITS
from cepheid_ports import CepheidError
from cepheid_security.authenticator import Authenticator
from tests.simulation.checks.history import History
from tests.simulation.checks.ledger import ConnectionsProbe, LedgerClientProbe
from tests.simulation.faults.plan import FaultPlan
from tests.simulation.world.node import Node
from tests.simulation.world.sim_connection import SimConnections
from tests.simulation.world.sim_directory import SESSION_S, SimDirectory
from tests.simulation.world.sim_network import Network
from tests.simulation.world.sim_objects import SimObjects, segments_of
from tests.simulation.world.sim_peers import SimPeers
from tests.simulation.world.sim_serving import SimServing, broker_settings
from tests.simulation.world.sim_store import SimStore, SimTree
from tests.simulation.world.sim_worker import sim_ports

if TYPE_CHECKING:
    from tests.simulation.world.sim_sockets import Sockets

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
    unregistered_bookie_s=0.5,  # bookies stay away for up to 4 s
    ensemble_change_timeout_s=6.0,
    ensemble_retry_s=0.3,
    deletion_grace_s=1.5,
    metadata_timeout_s=5.0,
    reconnect_delay_max_s=1.0,
    explicit_lac_interval_s=0.5,
    idle_check_s=0.5,  # workloads pause that long
)
MANAGED_LEDGER_SETTINGS = ManagedLedgerSettings(
    ledger_max_entries=12,
    ledger_min_age_s=0.0,
    ledger_max_age_s=5.0,
    drain_timeout_s=3.0,
    ledger_failover_timeout_s=6.0,
    metadata_timeout_s=4.0,
    housekeeping_s=1.0,
    orphan_scan_s=2.5,
    cursor_flush_s=0.1,
    cursor_inline_bytes=60,  # so that a few holes move a cursor to its ledger and back
    cursor_part_bytes=40,
    cursor_ledger_max_bytes=2 * KIB,
    append_window_bytes=64 * KIB,  # of worlds: WINDOWS_BYTES
    offload_retry_s=0.5,
)
WINDOWS_BYTES = (2 * KIB, 4 * KIB)
"""Of appends, so that a topic whose bookies or metadata are away for seconds refuses some."""

FEW_LEDGERS = PageLimits(record_ledgers=2, page_ledgers=2, plain_ledgers=3)
"""So that the short chains of worlds are in pages."""


class SimBroker:
    """A broker's machine and its process. Workloads use its ledger clients and managed ledgers; clients connect to (name, PORT)."""

    def __init__(
        self,
        name: str,
        tree: SimTree,
        network: Network,
        plan: FaultPlan,
        history: History,
        directory: SimDirectory | None,
        *,
        sockets: Sockets | None = None,
        objects: SimObjects | None = None,
    ) -> None:
        """Without `directory` it follows the registrations of bookies; without `sockets` it cannot serve; without `objects` it
        offloads nothing."""
        self.name = name
        self.serves = False
        self.orderly = True  # it asks whose a topic is; else it believes that all are its own
        self.ledger_config = ManagedLedgerConfig()  # of topics whose namespace says nothing
        self.broker_settings = broker_settings(name)
        self.authenticator: Authenticator | None = None
        self.peers: SimPeers | None = None
        self.serving: SimServing | None = None
        self.on_down: Callable[[SimBroker], None] = lambda _: None  # its process ended by itself
        self._opened: list[Callable[[], Awaitable[None]]] = []  # closed in reverse
        self._sockets = sockets
        self._objects = objects
        self._outside = contextvars.copy_context()  # of no process
        self._tree = tree
        self._network = network
        self._plan = plan
        self._history = history
        self._directory = directory
        self._loop = asyncio.get_running_loop()
        self.settings = MANAGED_LEDGER_SETTINGS
        self.page_limits = LIMITS
        self.observed = True  # False: see SimBookie
        self.sessions_lost = 0  # that it heard of
        self.node = Node(name, 0)
        self.node.alive = False

    def __repr__(self) -> str:
        return f"<SimBroker {self.process} {'up' if self.node.alive else 'down'}>"

    @property
    def process(self) -> str:
        return f"{self.name}#{self.node.incarnation}"

    @property
    def broker(self) -> Broker:
        """What clients and operators reach."""
        assert self.serving is not None, f"{self!r} does not serve"
        return self.serving.broker

    @property
    def ready(self) -> bool:
        return self.node.alive and self.serving is not None and self.serving.ready

    def start(self) -> None:
        assert not self.node.alive, f"{self!r} is running"
        self.node = Node(self.name, self.node.incarnation + 1)
        self._opened = []
        self.node.context.run(self._build)
        self._history.note(f"{self.process} started")
        if self.serves:
            self.node.context.run(self._build_serving)
            self.node.start(self._serve(), name="serve")

    def _build(self) -> None:
        """In the process's own context: whatever it schedules belongs to it."""
        plan, history, process = self._plan, self._history, self.process
        self.ports = sim_ports(plan.random, lambda _: plan.between(plan.faults.disk_delay_s), plan.clocks.of(self.name))
        self.store = SimStore(self._tree, plan, process)
        self.store.subscribe(self._on_session)
        self._opened.append(self.store.aclose)
        ids = self._ids = LedgerIds(self.store, block=10)
        wires = SimConnections(self._network, self.node)
        if self._directory is None:  # the real one, over registrations
            directory = BookieDirectory(
                self.store, self.ports, LEDGER_SETTINGS, connect=lambda bookie_id, address: wires.get(bookie_id)
            )
            directory.on_new_incarnation = ids.drop_block
            directory.on_back = lambda bookie_id: self.client.on_bookie_back(bookie_id)
            directory.on_gone = lambda bookie_id: self.client.on_bookie_gone(bookie_id)
            self._opened.append(directory.aclose)
            self.node.start(self._follow(directory), name="follow bookies")
            connections, writable = ConnectionsProbe(directory, history, process), directory.writable
        else:
            connections, writable = ConnectionsProbe(wires, history, process), self._directory.writable
        placement = RackAwarePlacement(writable, plan.random, LEDGER_SETTINGS.quarantine_s)
        self.client = LedgerClient(connections, ledger_records(self.store), ids, placement, LEDGER_SETTINGS, self.ports)
        self._opened.append(self.client.aclose)
        self.ledgers = LedgerClientProbe(self.client, history, process)
        self.managed_ledgers = ManagedLedgers(
            self.ledgers if self.observed else self.client,  # type: ignore[arg-type] # behaves as one
            self.store,
            TailCache(8 * KIB, keep_s=0.5),
            self.settings,
            self.ports,
            segments=None if self._objects is None else segments_of(self._objects, self.ports, history),
            page_limits=self.page_limits,
        )
        self._opened.append(self.managed_ledgers.aclose)

    def _build_serving(self) -> None:
        self.serving = SimServing(
            self.name,
            self.broker_settings,
            self.store,
            self._ids,
            self.managed_ledgers,
            self.ledger_config,
            self.ports,
            orderly=self.orderly,
            authenticator=self.authenticator,
            peers=self.peers,
            note=lambda text: self._history.note(f"{self.process}: {text}"),
            on_failed=self._on_failed,
        )
        self._opened.append(self.serving.broker.aclose)

    async def _serve(self) -> None:
        assert self.serving is not None
        try:
            await self.serving.run()
        except CepheidError as error:
            self._on_failed(error)

    def _on_failed(self, error: BaseException) -> None:
        """A part failed for good: the process ends with its reason, in good order or not."""
        node = self.node
        self._history.note(f"{self.process} failed: {error!r}")

        def end() -> None:
            if node.alive:
                self.crash()
                self.on_down(self)

        self._loop.call_later(0.01, end, context=self._outside)

    async def stop(self, patience_s: float = 10.0) -> None:
        """As at SIGTERM; who asks waits until the process has ended. It is killed when that takes too long."""
        node = self.node
        self._history.note(f"{self.process} stops")
        stopping = node.start(self._close(), name="stop")
        await asyncio.wait([stopping], timeout=patience_s)
        if node.alive:
            self._history.note(f"{self.process} {'stopped' if stopping.done() else 'is killed: it takes too long to stop'}")
            node.crash()
            if not stopping.done():
                self.store.abandon()

    async def _close(self) -> None:
        for close in reversed(self._opened):
            try:
                await close()
            except (CepheidError, TimeoutError) as error:
                self._history.note(f"{self.process} does not stop in good order: {error!r}")

    async def _follow(self, directory: BookieDirectory) -> None:
        while True:
            try:
                return await directory.start()
            except MetadataError as error:
                self._history.note(f"{self.process} cannot list bookies: {error!r}")
                await asyncio.sleep(0.3)

    def _on_session(self, state: SessionState) -> None:
        self.sessions_lost += state is SessionState.LOST

    def crash(self, *, power: bool = False, lingers: bool = False) -> None:
        """Between two steps. `power`: of its machine; nobody is told. `lingers`: the metadata store keeps its session for a while,
        as it does after a loss of power, and whenever a process is killed before it says goodbye."""
        self._history.note(f"{self.process} {'lost power' if power else 'crashed'}")
        if power and self._sockets is not None:
            self._sockets.lose_power(self.name)
        self.node.crash()
        if power or lingers:
            self._loop.call_later(SESSION_S, self.store.abandon, context=self._outside)
        else:
            self.store.abandon()
