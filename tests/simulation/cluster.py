"""The bookies of a world: real ones on simulated disks.

    SimBookie    down ──start──► starting (real Bookie.open: replay) ──promises kept? (S2)──► serving ──crash──► down

A crash is decided by the plan: at any disk operation, or from outside at any step. It is the process alone or the machine
(power loss); after it only the disk is left, or nothing, or an old copy of it.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import random
from collections.abc import Callable, Coroutine
from typing import Any

from cepheid_bookie import Bookie, BookieSettings, GarbageCollector, MetadataCookies, MetadataLedgers
from cepheid_bookie.bookie_life import load_life
from cepheid_bookie.memory_index import MemoryBlockIndex
from cepheid_metadata import (
    BookieLife,
    BookieRegistration,
    MetadataError,
    Registration,
    available_bookies,
    keys,
    readonly_bookies,
)
from cepheid_ports import CepheidError
from tests.simulation.checks_storage import BookieProbe, DeletionProbe, Promises, check_promises, promises_of
from tests.simulation.faults import FaultPlan
from tests.simulation.history import History
from tests.simulation.node import Node, NodeCrashed
from tests.simulation.sim_directory import SESSION_S
from tests.simulation.sim_disk import SimDisk
from tests.simulation.sim_network import Network
from tests.simulation.sim_store import SimStore, SimTree
from tests.simulation.sim_worker import sim_ports

KIB = 1 << 10


def bookie_settings(bookie_id: str) -> BookieSettings:
    """Small, so that a few hundred entries roll segments and logs, fill the cache and take checkpoints."""
    return BookieSettings(
        bookie_id=bookie_id,
        cluster_id="simulated",
        journal_segment_bytes=64 * KIB,
        write_cache_bytes=16 * KIB,
        block_bytes=4 * KIB,
        log_bytes=64 * KIB,
        checkpoint_interval_s=0.7,
        min_free_journal_bytes=0,
        min_free_data_bytes=0,
        retry_s=0.2,
        loaded_ledgers=4,
        gc_interval_s=1.5,
        gc_mass_ledgers=10_000,
        disk_check_interval_s=0.2,
    )


class SimBookie:
    def __init__(
        self,
        bookie_id: str,
        tree: SimTree,
        network: Network,
        plan: FaultPlan,
        history: History,
        *,
        on_down: Callable[[SimBookie], None] = lambda _: None,
        on_fence: Callable[[SimBookie], None] = lambda _: None,
        registers: bool = False,
    ) -> None:
        self.id = bookie_id
        self.settings = bookie_settings(bookie_id)
        self.disk = SimDisk(plan.random)
        self.index = MemoryBlockIndex()
        self.node = Node(bookie_id, 0)
        self.node.alive = False
        self.bookie: Bookie | None = None
        self.power_lost = False
        self.down_since_s = 0.0
        self.work_delay_s: float | None = None  # for scripts: how long every work of its threads takes
        self.observed = True  # False: without checks of every entry, for scripts with very many
        self.accepts_empty_disk = False  # an operator's word, given with `lose_disk`
        self.refused: CepheidError | None = None  # at the last start
        self.may_refuse = False  # for scripts in which it must
        self._copy: tuple[SimDisk, MemoryBlockIndex] | None = None
        self._tree = tree
        self._network = network
        self._plan = plan
        self._history = history
        self._on_down = on_down
        self._on_fence = on_fence
        self._registers = registers
        self._outside = contextvars.copy_context()  # of no process
        self.store: SimStore | None = None
        self._loop = asyncio.get_running_loop()

    def __repr__(self) -> str:
        return f"<SimBookie {self.id} {'serving' if self.serving else 'starting' if self.node.alive else 'down'}>"

    @property
    def serving(self) -> bool:
        return self.id in self._network.hosts

    @property
    def writable(self) -> bool:
        return self.bookie is not None and self.bookie.writable

    def start(self) -> asyncio.Task[None]:
        """Begins a new process on the disk as it is. The task ends when it serves, or has crashed on the way."""
        assert not self.node.alive, f"{self!r} is running"
        self.node = Node(self.id, self.node.incarnation + 1)
        self.node.on_crash.append(self._after_crash)
        self.disk.on_operation, self.disk.on_read = self._on_disk_operation, self._on_disk_read
        self.index.before_sync = lambda: self._on_disk_operation("sync", "index")
        return self.node.start(self._open(self.node), name="open")

    async def _open(self, node: Node) -> None:
        ports = sim_ports(self._loop, self._plan.random, self._work_delay_s)
        store = self.store = SimStore(self._tree, self._plan, f"{self.id}#{node.incarnation}")
        node.on_crash.append(lambda: self._loop.call_later(SESSION_S, store.abandon, context=self._outside))
        cookies = MetadataCookies(store, {})
        try:
            bookie = await Bookie.open(
                self.settings, self.disk, self.index, ports, cookies=cookies, accept_empty_disk=self.accepts_empty_disk
            )
            probe = BookieProbe(self.id, bookie, self.disk, self._history, lambda: self._on_fence(self))
            served = probe if self.observed else bookie
            promises = promises_of(self._history.bookie(self.id))
            await check_promises(self.id, self.id, bookie, self._history, promises)
        except (NodeCrashed, OSError, MetadataError) as error:  # an injected failure at start: an operator starts it again
            self._history.note(f"{self.id} ended while it started: {error!r}")
            node.crash()
            return
        except CepheidError as error:
            self.refused = error
            node.crash()
            if not self.may_refuse:
                self._history.violated("S8", f"{self.id} refuses to start after a crash: {error!r}")
            return
        self.bookie = bookie
        bookie.on_failed = self._on_failed
        store = SimStore(self._tree, self._plan, f"{self.id}#{node.incarnation}")
        node.on_crash.append(store.abandon)
        collector = GarbageCollector(DeletionProbe(self.id, bookie, self._history), MetadataLedgers(store, ports))  # type: ignore[arg-type]
        collector.start()
        self._history.note(f"{self.id}#{node.incarnation} serves")
        self._network.serve(self.id, node, served)
        if self._registers:
            await self._register(bookie, store, node)

    async def _register(self, bookie: Bookie, store: SimStore, node: Node) -> None:
        """As a bookie's role does, but that it shows no health page."""
        addresses = {"grpc": self.id}
        record = BookieRegistration(
            bookie_id=self.id, incarnation=bookie.cookie.incarnation, addresses=addresses, process=f"{node.incarnation}"
        )
        places = available_bookies(store), readonly_bookies(store)
        registration = Registration(
            store,
            self.id,
            places,
            record,
            is_past=lambda found: found.addresses == addresses,
            patience_s=10,
            on_failed=self._on_failed,
        )
        bookie.on_writable = lambda writable: registration.move(0 if writable else 1)
        await registration.start(0 if bookie.writable else 1)

    def replay_copy(self, seed: str) -> Coroutine[Any, Any, None]:
        """Power loss without the loss: opens a bookie on a copy of what is durable now, and asks it for all that was promised."""
        disk, index = self.disk.copy_after_power_loss(random.Random(seed)), _synced_copy(self.index)
        return self._replay(seed, disk, index, promises_of(self._history.bookie(self.id)))

    async def _replay(self, seed: str, disk: SimDisk, index: MemoryBlockIndex, promises: Promises) -> None:
        ports = sim_ports(self._loop, random.Random(f"{seed}/ports"), lambda: 0.0)
        try:
            bookie = await Bookie.open(self.settings, disk, index, ports)
        except CepheidError as error:
            self._history.violated("S8", f"{self.id} would refuse to start after power loss now: {error!r}")
            return
        await check_promises(f"a copy of {self.id}'s disk at {self._history.now_s:.6f} s", self.id, bookie, self._history, promises)
        await bookie.aclose()

    def crash(self, *, power: bool) -> None:
        """From outside, between two steps of the process."""
        self.power_lost = power
        self.node.crash()

    def lose_disk(self) -> None:
        """The machine burns down. It is rebuilt under its old id, on empty disks, and whoever starts it says so."""
        self._forget(SimDisk(self._plan.random), MemoryBlockIndex())
        self.accepts_empty_disk = True

    def keep_copy(self) -> None:
        """A snapshot of the disks as they are."""
        self._copy = self.disk.copy_after_power_loss(random.Random(f"{self.id}/copy")), _synced_copy(self.index)

    @property
    def has_old_copy(self) -> bool:
        """It was made before metadata heard of the bookie's life the last time: a younger one cannot be told from the original."""
        node = self._tree.nodes.get(keys.bookie_life_key(self.id))
        if self._copy is None or node is None:
            return False
        return load_life(self._copy[0], "copy") < BookieLife.decode(node.value, self.id).life

    def restore_copy(self) -> None:
        """Instead of the disks."""
        assert self._copy is not None
        self._forget(*self._copy)
        self._copy = None

    def _forget(self, disk: SimDisk, index: MemoryBlockIndex) -> None:
        if self.node.alive:
            self.crash(power=True)
        self._history.note(f"{self.id} lost its disks")
        self._history.bookie(self.id).forgotten_through = max(self._history.creators, default=-1)
        self.disk, self.index = disk, index

    def _on_failed(self, error: BaseException) -> None:
        """The bookie gave up: its process ends, and is started again, a moment later."""
        self._history.note(f"{self.id} failed: {error!r}")
        node = self.node
        self._loop.call_later(0.01, node.crash)

    def _after_crash(self) -> None:
        power, self.power_lost = self.power_lost, False
        self.down_since_s = self._loop.time() if self.serving else 0.0
        self._history.note(f"{self.id}#{self.node.incarnation} {'lost power' if power else 'crashed'}")
        self._network.stop_serving(self.id, noticed=not power)
        self.disk = self.disk.power_loss() if power else self.disk.process_crash()
        self.index.crash()
        self.bookie = None
        self._on_down(self)

    def _on_disk_operation(self, operation: str, path: str) -> None:
        plan, faults = self._plan, self._plan.faults
        if plan.strikes("crash at a disk operation", faults.crash_at_disk):
            self.power_lost = plan.random.random() < 0.6
            raise NodeCrashed(f"{operation} {path}")
        if operation == "sync" and plan.strikes("failed sync", faults.sync_error):
            raise OSError(errno.EIO, "injected failure of sync", path)
        if operation in ("pwrite", "pwritev") and plan.strikes("failed write", faults.write_error):
            raise OSError(errno.EIO, "injected failure of write", path)

    def _on_disk_read(self, path: str) -> None:
        if self._plan.strikes("failed read", self._plan.faults.read_error):
            raise OSError(errno.EIO, "injected failure of read", path)

    def _work_delay_s(self) -> float:
        plan, faults = self._plan, self._plan.faults
        if self.work_delay_s is not None:
            return self.work_delay_s
        if plan.strikes("slow disk", faults.slow_sync):
            return plan.between(faults.slow_sync_s)
        return plan.between(faults.disk_delay_s)


def _synced_copy(index: MemoryBlockIndex) -> MemoryBlockIndex:
    copy = MemoryBlockIndex()
    copy._synced = index._synced.copy()
    copy.crash()
    return copy
