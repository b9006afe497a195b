"""The bookies of a world: real ones on simulated disks.

    SimBookie    down ──start──► starting (real Bookie.open: replay) ──promises kept? (S2)──► serving ──crash, stop──► down
                                          └──refused──► its operator does what the error says (`damage`)

A crash is decided by the plan: at any disk operation, or from outside at any step. It is the process alone or the machine
(power loss); after it only the disks are left, or some of them, or nothing, or an old copy.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from cepheid_bookie import (
    Bookie,
    BookieIdentity,
    GarbageCollector,
    MetadataCookies,
    MetadataDamage,
    MetadataLedgers,
    StorageSettings,
)
from cepheid_bookie.bookie_life import load_life
from cepheid_bookie.disk import Disk
from cepheid_metadata import (
    BookieCookie,
    BookieLife,
    BookieRegistration,
    MetadataError,
    Registration,
    available_bookies,
    keys,
    readonly_bookies,
)
from cepheid_ports import CepheidError, TaskOwner
from tests.simulation.checks.disk import DiskChecks, last_batch, last_segment, lies_in, proven_batches
from tests.simulation.checks.history import History
from tests.simulation.checks.storage import BookieProbe, DeletionProbe, Promises, check_promises, promises_of
from tests.simulation.faults.plan import FaultPlan
from tests.simulation.world.node import Node, NodeCrashed
from tests.simulation.world.sim_directory import SESSION_S
from tests.simulation.world.sim_disk import SimDisk
from tests.simulation.world.sim_index import SimBlockIndex
from tests.simulation.world.sim_network import Network
from tests.simulation.world.sim_store import SimStore, SimTree
from tests.simulation.world.sim_worker import sim_ports

KIB = 1 << 10
DISK_BYTES = 4 << 30  # more than the settings warn of, so that there are spare journal segments
RECLAIM_S = (0.05, 1.5)
"""Between two passes over the entry logs that are asked for besides those of the collector."""


def bookie_settings() -> StorageSettings:
    """Small, so that a few hundred entries roll segments and logs, fill the cache and take checkpoints."""
    return StorageSettings(
        journal_segment_bytes=64 * KIB,
        journal_spare_segments=2,
        write_cache_bytes=16 * KIB,
        block_bytes=4 * KIB,
        log_bytes=16 * KIB,
        checkpoint_interval_s=0.7,
        min_free_journal_bytes=0,
        min_free_data_bytes=0,
        retry_s=0.2,
        waiting_bytes=8 * KIB,
        journal_queue_bytes=64 * KIB,
        loaded_ledgers=4,
        gc_interval_s=1.0,
        scrub_period_s=1.0,
        gc_mass_ledgers=10_000,
        disk_check_interval_s=0.2,
        slow_disk_s=0.0,
        stalled_disk_s=0.0,
        compaction_minor_share=0.9,  # so that logs are compacted all the time
        compaction_major_share=0.9,
        compaction_bytes_s=1 << 30,
        compaction_reserve_bytes=0,
    )


@dataclass(frozen=True, slots=True)
class Machine:
    """What a bookie stores on, as it was bought."""

    two_disks: bool = False  # the journal has one of its own
    sector_bytes: int = 512


def some_machine(rng: random.Random) -> Machine:
    return Machine(two_disks=rng.random() < 0.5, sector_bytes=rng.choice((512, 512, 4096)))


@dataclass(slots=True)
class Damage:
    """Something is wrong with the disks of a bookie that does not run. Its next start says so, and `repair` does what it says."""

    what: str
    repair: Callable[[], None]
    may_go_unnoticed: bool = False
    rule: str = "S11"
    starts_in_limbo: bool = False  # instead of being refused


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
        machine: Machine = Machine(),
    ) -> None:
        self.id = bookie_id
        self.identity = BookieIdentity(bookie_id, "simulated")
        self.settings = bookie_settings()
        self.node = Node(bookie_id, 0)
        self.node.alive = False
        self.clock = plan.clocks.of(bookie_id)
        self.bookie: Bookie | None = None
        self.power_lost = False
        self.down_since_s = 0.0
        self.work_delay_s: float | None = None  # for scripts: how long every work of its threads takes
        self.slow_thread = ""  # "journal" or "flush": whose disk takes long …
        self.slow_thread_s = (0.0, 0.0)  # … so long
        self.scrubs = False  # its scrubber runs
        self.observed = True  # False: without checks of every entry, for scripts with very many
        self.accepts_empty_disk = False  # an operator's word, for the next start that serves
        self.damage: Damage | None = None
        self.refused: CepheidError | None = None  # at the last start
        self.may_refuse = False  # for scripts in which it must
        self.gone = False  # for good: it is never started again
        self._limbo_below = 0  # when it served last
        self._machine = machine
        self._copy: tuple[SimDisk, SimDisk, SimBlockIndex] | None = None
        self._tree = tree
        self._network = network
        self._plan = plan
        self._history = history
        self._on_down = on_down
        self._on_fence = on_fence
        self._registers = registers
        self.checks = DiskChecks(bookie_id, history)
        self._outside = contextvars.copy_context()  # of no process
        self._stopping = False
        self._stop_under_way: asyncio.Task[None] | None = None
        self._closing: list[Callable[[], Coroutine[Any, Any, None]]] = []  # what a graceful stop closes, in order
        self.store: SimStore | None = None
        self._loop = asyncio.get_running_loop()
        self.disk, self.journal_disk, self.index = self._blank()

    def __repr__(self) -> str:
        return f"<SimBookie {self.id} {'serving' if self.serving else 'starting' if self.node.alive else 'down'}>"

    @property
    def serving(self) -> bool:
        return self.id in self._network.hosts

    @property
    def writable(self) -> bool:
        return self.bookie is not None and self.bookie.writable

    @property
    def has_two_disks(self) -> bool:
        return self.disk is not self.journal_disk

    @property
    def disks(self) -> tuple[SimDisk, ...]:
        return (self.disk, self.journal_disk) if self.has_two_disks else (self.disk,)

    def is_durable(self, data: bytes) -> bool:
        """Whether some file holds `data` whole, come what may."""
        return any(disk.is_durable(data) for disk in self.disks)

    def has_decayed(self, ledger_id: int, entry_id: int) -> bool:
        """Whether it may be unable to read that entry, though nothing fails at the moment."""
        return lies_in(self.index, ledger_id, entry_id, self.disk.damaged_files())

    def start(self) -> asyncio.Task[None]:
        """Begins a new process on the disks as they are. The task ends when it serves, or has crashed on the way."""
        assert not self.node.alive, f"{self!r} is running"
        self.node = Node(self.id, self.node.incarnation + 1)
        self.node.on_crash.append(self._after_crash)
        for disk in self.disks:
            disk.on_operation, disk.on_read, disk.on_loss = self._on_disk_operation, self._on_disk_read, self._plan.saw
        self.index.on_operation, self.index.on_look = self._on_index_operation, self._on_index_look
        return self.node.start(self._open(self.node), name="open")

    async def _open(self, node: Node) -> None:
        ports = sim_ports(self._plan.random, self._work_delay_s, self.clock)
        store = self.store = SimStore(self._tree, self._plan, f"{self.id}#{node.incarnation}")
        node.on_crash.append(lambda: self._loop.call_later(SESSION_S, store.abandon, context=self._outside))
        cookies = MetadataCookies(store, {})
        try:
            bookie = await Bookie.open(
                self.identity,
                self.settings,
                self.disk,
                self.index,
                ports,
                journal_disk=self.journal_disk,
                cookies=cookies,
                accept_empty_disk=self.accepts_empty_disk,
                listed_at_start=1,  # so that the others have to be found while it serves
            )
            if self.damage is not None and not self._is_noticed(self.damage, bookie):
                self._history.violated(self.damage.rule, f"{self.id} starts as if it were whole: {self.damage.what}")
            self._check_limbo(bookie.cookie.limbo_below)
            self.damage, self.accepts_empty_disk = None, False
            probe = BookieProbe(self.id, bookie, self, self._history, lambda: self._on_fence(self))
            served = probe if self.observed else bookie
            promises = promises_of(self._history.bookie(self.id))
            await check_promises(self.id, self.id, bookie, self._history, promises)
        except (NodeCrashed, OSError, MetadataError) as error:  # an injected failure at start: an operator starts it again
            self._history.note(f"{self.id} ended while it started: {error!r}")
            node.crash()
            return
        except CepheidError as error:
            self._on_refused(node, error)
            return
        self.bookie = bookie
        bookie.on_failed = self._on_failed
        reclaiming = TaskOwner(f"{self.id}-reclaiming")
        rng = self._plan.stream(f"reclaims of {self.id}#{node.incarnation}")

        async def amid_deletion(probe: DeletionProbe) -> None:
            reclaiming.start(self._reclaim_once(probe), name="reclaim")
            await asyncio.sleep(rng.uniform(0.0, 0.05))

        deletions = DeletionProbe(self.id, bookie, self._history, amid_deletion if self._registers else None)
        collector = GarbageCollector(deletions, MetadataLedgers(store, ports))  # type: ignore[arg-type]
        collector.start()
        if self.scrubs:
            self.scrub()
        if self._registers:
            reclaiming.start(self._reclaim(deletions, rng), name="reclaim")
        self._closing = [reclaiming.aclose, collector.aclose, bookie.aclose, store.aclose]
        self._history.note(f"{self.id}#{node.incarnation} serves")
        self._network.serve(self.id, node, served)
        if self._registers:
            await self._register(bookie, store, node)

    def scrub(self) -> None:
        """Start the scrubber of the process that serves."""
        assert self.bookie is not None
        assert self.store is not None
        self.scrubs = True
        ports = sim_ports(self._plan.random, self._work_delay_s, self.clock)
        self.bookie.start_scrubber(MetadataDamage(self.store, self.id, ports))

    async def _reclaim(self, bookie: DeletionProbe, rng: random.Random) -> None:
        """Between the collector's passes, as when the disk is full. In worlds, not in scripts."""
        while True:
            await asyncio.sleep(rng.uniform(*RECLAIM_S))
            await self._reclaim_once(bookie)

    async def _reclaim_once(self, bookie: DeletionProbe) -> None:
        try:
            await bookie.reclaim(urgent=True)
        except Exception as error:  # of its disks: the next one begins from the start
            self._history.note(f"{self.id} reclaims no space: {error!r}")

    def _check_limbo(self, limbo_below: int) -> None:
        """S8: what a crash leaves is not taken for damage."""
        lost = limbo_below <= self._limbo_below or self.damage is not None or self.accepts_empty_disk
        self._history.check("S8", lost, lambda: f"{self.id} starts in limbo below {limbo_below}, and has lost nothing")
        self._limbo_below = limbo_below

    def _is_noticed(self, damage: Damage, bookie: Bookie) -> bool:
        in_limbo = damage.starts_in_limbo and bookie.cookie.limbo_below > self._history.bookie(self.id).forgotten_through
        return in_limbo or damage.may_go_unnoticed

    def _on_refused(self, node: Node, error: CepheidError) -> None:
        self.refused = error
        self._history.note(f"{self.id} refuses to start: {error!r}")
        node.crash()
        if self.damage is not None:
            damage, self.damage = self.damage, None
            damage.repair()
        elif not self.may_refuse:
            self._history.violated("S8", f"{self.id} refuses to start after a crash: {error!r}")

    async def _register(self, bookie: Bookie, store: SimStore, node: Node) -> None:
        """As a bookie's role does, but that it shows no health page."""
        addresses = {"grpc": self.id}
        record = BookieRegistration(
            bookie_id=self.id, incarnation=bookie.cookie.registered_as, addresses=addresses, process=f"{node.incarnation}"
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
        self._closing.insert(0, registration.aclose)
        await registration.start(0 if bookie.writable else 1)

    def stop(self) -> asyncio.Task[None]:
        """As an operator stops it: takes no more, finishes what it has, leaves. A crash may come first."""
        assert self.serving, f"{self!r} is not serving"
        if self._stop_under_way is None:
            self._stop_under_way = self.node.start(self._stop(self.node), name="stop")
        return self._stop_under_way

    async def _stop(self, node: Node) -> None:
        for close in list(self._closing):
            await close()
        self._stopping = True
        node.crash()

    def replay_copy(self, seed: str) -> Coroutine[Any, Any, None]:
        """Power loss without the loss: opens a bookie on a copy of what is durable now, and asks it for all that was promised."""
        return self._replay(seed, self._copy_of_disks(seed), promises_of(self._history.bookie(self.id)))

    async def _replay(self, seed: str, copy: tuple[SimDisk, SimDisk, SimBlockIndex], promises: Promises) -> None:
        disk, journal_disk, index = copy
        decayed = disk.damaged_files()
        ports = sim_ports(random.Random(f"{seed}/ports"), lambda _: 0.0, self.clock)

        def has_decayed(ledger_id: int, entry_id: int) -> bool:
            return lies_in(index, ledger_id, entry_id, decayed)

        try:
            bookie = await Bookie.open(self.identity, self.settings, disk, index, ports, journal_disk=journal_disk)
        except CepheidError as error:
            self._history.violated("S8", f"{self.id} would refuse to start after power loss now: {error!r}")
            return
        who = f"a copy of {self.id}'s disk at {self._history.now_s:.6f} s"
        await check_promises(who, self.id, bookie, self._history, promises, has_decayed)
        await bookie.aclose()

    def crash(self, *, power: bool) -> None:
        """From outside, between two steps of the process."""
        self.power_lost = power
        self.node.crash()

    # -- what happens to its disks --------------------------------------------------------------------------------------

    def lose_disk(self) -> None:
        """The machine burns down. It is rebuilt under its old id, on empty disks, and whoever starts it says so."""
        self._forget(*self._blank())
        self.accepts_empty_disk = True

    def blank(self) -> None:
        """As `lose_disk`, but somebody starts it as if nothing had happened."""
        self._forget(*self._blank())
        self.damage = Damage("its disks are empty", self.give_word)

    def blank_but_for_cookie(self) -> None:
        """Somebody made empty disks look like the old ones."""
        disk, journal_disk, index = self._blank()
        self._crash_if_alive()
        for old, new in ((self.disk, disk), (self.journal_disk, journal_disk)):
            if (found := old.durable_files().get("VERSION")) is not None:
                new.put_back("VERSION", bytes(found))
        index._now.stamp = index._synced.stamp = self.index.stamp()
        self._forget(disk, journal_disk, index)
        self.damage = Damage("its disks are empty but for the cookies", self.give_word)

    def lose_one(self, which: str) -> None:
        """One of its directories is empty: "data", "journal" or "index"."""
        self._crash_if_alive()
        self._count_loss()
        disk, journal_disk, index = self._blank()
        if which == "index":
            self.index = index
        elif which == "journal":
            assert self.has_two_disks, f"{self!r} has one disk"
            self.journal_disk = journal_disk
        else:
            assert self.has_two_disks, f"{self!r} has one disk"
            self.disk = disk
        self.damage = Damage(f"its {which} directory is empty", self.lose_disk)

    def lose_cookie(self) -> None:
        """The stamp of one directory is gone. Its operator has a copy of that file."""
        self._crash_if_alive()
        disk = self._plan.random.choice(self.disks)
        which, content = self.disks.index(disk), disk.take_away("VERSION")
        self.damage = Damage("the cookie of a directory is gone", lambda: self.disks[which].put_back("VERSION", content))

    def decay_journal(self, rng: random.Random) -> bool:
        """One bit of what the next start needs and can tell from a torn end; its operator gets that sector back. False: its
        mark has passed all of that, when the power was lost."""
        self._crash_if_alive()
        proven = proven_batches(self.disks)
        if proven:
            path, offset, size = rng.choice(proven)
            place, bit = offset + rng.randrange(size), rng.randrange(8)
            self.journal_disk.flip_bit(path, place, bit)
            self.damage = Damage(
                "a bit of its journal flipped", lambda: self.journal_disk.flip_bit_back(path, place, bit), rule="S8"
            )
        return bool(proven)

    def decay_end_of_journal(self, rng: random.Random) -> bool:
        """One bit of the last batch that was synced: the next start can tell it from a torn one. False: nothing can be told."""
        synced = last_batch(self.disks) if self.node.alive else None
        self._crash_if_alive()
        if synced is None or synced != last_batch(self.disks):
            return False  # there is none; or the batch in flight, or a new segment, is behind it
        path, offset, size = synced
        self.journal_disk.flip_bit(path, offset + rng.randrange(size), rng.randrange(8))
        self.count_lost_end_of_journal("a bit of the end of its journal flipped")
        return True

    def cut_journal(self, rng: random.Random) -> bool:
        """The last segment of the journal is shorter than it was. False: there is none."""
        self._crash_if_alive()
        path = last_segment(self.disks)
        if path is None:
            return False
        size = len(self.journal_disk.durable_content(path))
        self.journal_disk.cut_off(path, rng.randrange(rng.choice((size, size // 4, 100)) or 1))
        self.count_lost_end_of_journal("its journal was cut off")
        return True

    def lose_journal_files(self) -> None:
        """Its cookies are there, and no file of its journal is. The next start says so, and its operator brings them back."""
        self._crash_if_alive()
        disk = self.journal_disk
        files = {f"journal/{name}": disk.take_away(f"journal/{name}") for name in disk.listdir("journal")}

        def bring_back() -> None:
            for path, content in files.items():
                self.journal_disk.put_back(path, content)

        self.damage = Damage("the files of its journal are gone", bring_back, rule="S8")

    def count_lost_end_of_journal(self, what: str) -> None:
        """What is left of its disks counts as lost, too."""
        self._count_loss()

        def must_start() -> None:
            self._history.violated("S8", f"{self.id} refuses to start, and has nothing intact behind the damage: {what}")

        self.damage = Damage(what, must_start, rule="S8", starts_in_limbo=True)

    def give_word(self) -> None:
        """Its operator says that what is missing is lost."""
        self.accepts_empty_disk = True

    def keep_copy(self) -> None:
        """A snapshot of the disks as they are."""
        self._copy = self._copy_of_disks(f"{self.id}/copy")

    @property
    def has_old_copy(self) -> bool:
        """It was made before metadata heard of the bookie's life the last time: a younger one cannot be told from the original."""
        node = self._tree.nodes.get(keys.bookie_life_key(self.id))
        if self._copy is None or node is None:
            return False
        disk: Disk = self._copy[0]
        return load_life(disk, "copy") < BookieLife.decode(node.value, self.id).life

    def restore_copy(self) -> None:
        """Instead of the disks, whatever was wrong with them. A copy from before they were lost and stamped anew is refused."""
        assert self._copy is not None
        node = self._tree.nodes.get(keys.bookie_cookie_key(self.id))
        recorded = None if node is None else BookieCookie.decode(node.value, self.id).incarnation.encode()
        is_foreign = self._copy[2].stamp() != recorded
        self._forget(*self._copy)
        self._copy = None
        self.damage = Damage("its disks are of an earlier life", self.lose_disk, may_go_unnoticed=True) if is_foreign else None

    def _blank(self) -> tuple[SimDisk, SimDisk, SimBlockIndex]:
        def new_disk() -> SimDisk:
            return SimDisk(self._plan.random, capacity_bytes=DISK_BYTES, sector_bytes=self._machine.sector_bytes)

        disk = new_disk()
        return disk, new_disk() if self._machine.two_disks else disk, SimBlockIndex()

    def _copy_of_disks(self, seed: str) -> tuple[SimDisk, SimDisk, SimBlockIndex]:
        rng = random.Random(seed)
        copies = [disk.copy_after_power_loss(rng) for disk in self.disks]
        return copies[0], copies[-1], self.index.copy_after_power_loss()

    def _crash_if_alive(self) -> None:
        if self.node.alive:
            self.crash(power=True)

    def _forget(self, disk: SimDisk, journal_disk: SimDisk, index: SimBlockIndex) -> None:
        self._crash_if_alive()
        self._history.note(f"{self.id} lost its disks")
        self._count_loss()
        self.disk, self.journal_disk, self.index = disk, journal_disk, index

    def _count_loss(self) -> None:
        self._history.bookie(self.id).lose_disks(max(self._history.creators, default=-1), self._history.now_s)

    # -- what happens to its process ------------------------------------------------------------------------------------

    def _on_failed(self, error: BaseException) -> None:
        """The bookie gave up: its process ends, and is started again, a moment later."""
        self._history.note(f"{self.id} failed: {error!r}")
        node = self.node
        self._loop.call_later(0.01, node.crash)

    def _after_crash(self) -> None:
        power, self.power_lost = self.power_lost, False
        how = "stopped" if self._stopping else "lost power" if power else "crashed"
        self._stopping, self._stop_under_way = False, None
        self.down_since_s = self._loop.time() if self.serving else 0.0
        self._history.note(f"{self.id}#{self.node.incarnation} {how}")
        self._network.stop_serving(self.id, noticed=not power)
        after = [disk.power_loss() if power else disk.process_crash() for disk in self.disks]
        self.disk, self.journal_disk = after[0], after[-1]
        self.index.crash()
        self.bookie = None
        self._on_down(self)

    def _on_disk_operation(self, operation: str, path: str) -> None:
        self.checks.before(operation, path, self.disks, self.index)
        plan, faults = self._plan, self._plan.faults
        most_to_lose = 3.0 if operation == "sync" else 1.0
        if plan.strikes("crash at a disk operation", faults.crash_at_disk * most_to_lose):
            self.power_lost = plan.random.random() < 0.6
            raise NodeCrashed(f"{operation} {path}")
        if plan.strikes("paused at a disk operation", faults.pause_at_disk) and not self.node.paused:
            self.pause(plan.random.choice(faults.pause_s))
        if operation == "sync" and plan.strikes("failed sync", faults.sync_error):
            raise OSError(errno.EIO, "injected failure of sync", path)
        if operation in ("pwrite", "pwritev") and plan.strikes("write cut short", faults.write_error):
            raise OSError(errno.EIO, "injected failure of write", path)

    def pause(self, pause_s: float) -> None:
        """The process takes no step for a while. Beyond its session, metadata gives it up."""
        node, store = self.node, self.store
        node.pause()
        if store is not None and pause_s > SESSION_S:
            self._loop.call_later(SESSION_S, lambda: node.paused and store.expire(), context=self._outside)
            self._loop.call_later(pause_s + 0.1, store.renew, context=self._outside)
        self._loop.call_later(pause_s, lambda: node.paused and node.resume(), context=self._outside)

    def free_space(self) -> None:
        for disk in self.disks:
            disk.full = False
        self.index.full = False

    def end_lasting_faults(self) -> None:
        self.free_space()
        self.clock.correct()
        self.slow_thread = ""
        if self.node.paused:
            self.node.resume()
        if self.store is not None:
            self.store.catch_up()
            self.store.renew()

    def _on_disk_read(self, path: str, offset: int) -> None:
        if path.startswith("journal/"):
            self.checks.before_journal_read(path, offset, self.disks)
        if self._plan.strikes("failed read", self._plan.faults.read_error):
            raise OSError(errno.EIO, "injected failure of read", path)

    def _on_index_operation(self, operation: str, path: str) -> None:
        self._on_disk_operation(operation, path)
        if self._plan.strikes("failed write of the index", self._plan.faults.index_error):
            raise OSError(errno.EIO, "injected failure of the index", path)

    def _on_index_look(self) -> None:
        if self._plan.strikes("failed read of the index", self._plan.faults.index_error):
            raise OSError(errno.EIO, "injected failure of the index")

    def _work_delay_s(self, thread: str) -> float:
        plan, faults = self._plan, self._plan.faults
        if self.work_delay_s is not None:
            return self.work_delay_s
        if self.slow_thread and thread.endswith(self.slow_thread):
            return plan.lasting(self.slow_thread_s)
        if plan.strikes("slow disk", faults.slow_sync):
            return plan.lasting(faults.slow_sync_s)
        if plan.strikes("work of a disk takes 10 to 30 s", faults.stuck_sync):
            return plan.lasting(faults.stuck_sync_s)
        return plan.between(faults.disk_delay_s)
