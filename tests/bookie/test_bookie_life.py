"""Scenario 21: a disk that comes back as it was some time ago is known as an old copy, refused, or accepted into limbo."""

from __future__ import annotations

import errno
import random

import pytest

from cepheid_bookie import Bookie, BookieState, GarbageCollector, MetadataCookies, MetadataLedgers
from cepheid_bookie.bookie_life import load_life, save_life
from cepheid_bookie.disk import SyncFailedError
from cepheid_bookie.errors import CookieError
from cepheid_metadata import LedgerIds, MemoryStore, MemoryTree, StoreUnavailableError
from cepheid_ports import Ports
from cepheid_rpc import LacRequest, Status
from tests.bookie.bookie_support import IDENTITY, KEY, Machine, add, added, group_of, read_all
from tests.simulation.world.sim_disk import SimDisk
from tests.support import wait_until

LEDGER = 7


class Snapshots:
    """A machine with metadata; `take` copies its disks, `put_back` brings the copy back."""

    def __init__(self, seed: int = 0) -> None:
        self.machine = Machine(seed)
        self.tree = MemoryTree()
        self.store = MemoryStore(self.tree)
        self.cookies = MetadataCookies(self.store, {})
        self._kept: tuple[SimDisk, dict[str, object]] | None = None

    async def start(self, *, accept: bool = False) -> Bookie:
        machine = self.machine
        machine.index.closed = False
        return await Bookie.open(
            IDENTITY, machine.settings, machine.disk, machine.index, machine.ports(), cookies=self.cookies, accept_empty_disk=accept
        )

    def take(self) -> None:
        """Of a stopped bookie, or of a running one as far as it is durable."""
        self._disk = self.machine.disk.copy_after_power_loss(random.Random(1))
        self._index = self.machine.index._synced.copy()

    def put_back(self) -> None:
        self.machine.disk = self._disk.copy_after_power_loss(random.Random(2))
        self.machine.index._synced = self._index.copy()
        self.machine.index.before_sync = lambda: None
        self.machine.index.crash()


async def a_life_after_the_copy(world: Snapshots) -> None:
    await LedgerIds(world.store).take()
    bookie = await world.start()
    await added(bookie, group_of(LEDGER, 0, 3))
    await bookie.aclose()
    world.take()
    bookie = await world.start()
    await added(bookie, group_of(LEDGER, 3, 3))
    await bookie.read_lac(LacRequest(LEDGER + 1, KEY, fence=True))
    await bookie.aclose()
    world.put_back()


async def test_an_old_copy_does_not_start() -> None:
    """It would deny entries 3..5, and take adds for a ledger that it had fenced."""
    world = Snapshots()
    await a_life_after_the_copy(world)
    for _ in range(2):
        with pytest.raises(CookieError, match=r"are an old copy, .* was left at life 1, metadata knows 2; bring back"):
            await world.start()


async def test_an_old_copy_is_accepted_into_limbo_with_what_it_has() -> None:
    world = Snapshots()
    await a_life_after_the_copy(world)
    for accept in (True, False):  # and it stays there
        bookie = await world.start(accept=accept)
        assert bookie.cookie.limbo_below == 1_001
        assert bookie.cookie.registered_as == f"{bookie.cookie.incarnation}.1001", "brokers drop their ids of before"
        entries, missing = await read_all(bookie, LEDGER, 0, 5, fence=True)
        assert (list(entries), set(missing.values())) == ([0, 1, 2], {Status.UNKNOWN})
        (refused,) = await add(bookie, group_of(LEDGER + 1, 0))
        assert refused.status is Status.READ_ONLY
        await bookie.aclose()


@pytest.mark.parametrize("operation", range(0, 40, 1))
async def test_accepting_an_old_copy_cut_anywhere_is_refused_again_or_in_limbo(operation: int) -> None:
    for seed in range(2):
        world = Snapshots(seed)
        machine = world.machine
        await a_life_after_the_copy(world)
        machine.crash_at(operation)

        async def open_accepting(world: Snapshots = world, **_: object) -> Bookie:
            return await world.start(accept=True)

        async def nothing(_: Bookie) -> None: ...

        machine.open = open_accepting  # type: ignore[method-assign]
        crashed = await machine.run_until_crash(nothing)
        machine.restart(power_loss=seed == 0)
        if not crashed:
            return
        try:
            bookie = await world.start()
        except CookieError as error:
            assert "old copy" in str(error)  # noqa: PT017 - either outcome is right
            bookie = await world.start(accept=True)
        _, missing = await read_all(bookie, LEDGER, 3, 5, fence=True)
        assert set(missing.values()) == {Status.UNKNOWN}
        await bookie.aclose()


@pytest.mark.parametrize("operation", range(0, 30, 2))
async def test_a_start_cut_anywhere_is_no_old_copy(operation: int) -> None:
    world = Snapshots(operation)
    machine = world.machine
    bookie = await world.start()
    await added(bookie, group_of(LEDGER, 0))
    await bookie.aclose()
    for _ in range(3):
        machine.crash_at(operation)

        async def open_it(**_: object) -> Bookie:
            return await world.start()

        async def nothing(_: Bookie) -> None: ...

        machine.open = open_it  # type: ignore[method-assign]
        await machine.run_until_crash(nothing)
        machine.restart()
    bookie = await world.start()
    assert bookie.cookie.limbo_below == 0
    entries, _ = await read_all(bookie, LEDGER, 0, 0)
    assert list(entries) == [0]
    await bookie.aclose()


async def test_lives_are_counted_while_a_bookie_serves() -> None:
    world = Snapshots()
    await LedgerIds(world.store).take()
    world.machine.settings = world.machine.settings.model_copy(update={"gc_interval_s": 0.01})
    bookie = await world.start()
    await added(bookie, group_of(LEDGER, 0))
    world.take()
    collector = GarbageCollector(bookie, MetadataLedgers(world.store, Ports()))
    collector.start()
    await wait_until(lambda: bookie._life is not None and bookie._life.life >= 3, what="two more lives")
    await collector.aclose()
    await bookie.aclose()
    world.put_back()
    with pytest.raises(CookieError, match="old copy"):
        await world.start()


async def test_metadata_away_costs_a_count_and_nothing_else() -> None:
    world = Snapshots()
    bookie = await world.start()
    original = world.cookies.save_life

    async def unavailable(bookie_id: str, life: int) -> None:
        raise StoreUnavailableError("no connection", outcome_unknown=True)

    world.cookies.save_life = unavailable  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailableError):
        await bookie.count_life()
    assert bookie.state is BookieState.SERVING
    world.cookies.save_life = original  # type: ignore[method-assign]
    await bookie.count_life()
    assert await world.cookies.load_life("bookie-1") == 3
    await bookie.aclose()
    await (await world.start()).aclose()


async def test_a_full_disk_starts_and_serves() -> None:
    world = Snapshots()
    await (await world.start()).aclose()

    def on_operation(operation: str, path: str) -> None:
        if operation == "pwrite" and path.startswith("LIFE"):
            raise OSError(errno.ENOSPC, "no space left", path)

    world.machine.disk.on_operation = on_operation
    bookie = await world.start()
    await bookie.count_life()
    assert bookie.state is BookieState.SERVING
    assert await world.cookies.load_life("bookie-1") == 1
    world.machine.disk.on_operation = None
    await bookie.count_life()
    await bookie.aclose()
    assert await world.cookies.load_life("bookie-1") == 2
    await (await world.start()).aclose()


async def test_of_two_processes_on_copies_of_one_disk_one_stops() -> None:
    world = Snapshots()
    first = await world.start()
    await added(first, group_of(LEDGER, 0))
    world.take()
    twin = Snapshots(1)
    twin.store, twin.cookies = world.store, world.cookies
    twin._disk, twin._index = world._disk, world._index
    twin.put_back()
    second = await twin.start()  # takes life 2
    failed: list[BaseException] = []
    first.on_failed = failed.append
    with pytest.raises(CookieError, match="another process runs under this id"):
        await first.count_life()
    assert first.state is BookieState.FAILED
    assert [type(error) for error in failed] == [CookieError]
    await first.aclose()
    await second.aclose()


def test_a_life_that_cannot_be_read_is_not_zero() -> None:
    disk = SimDisk(random.Random(1))
    assert load_life(disk, "here") == 0
    save_life(disk, 12)
    assert load_life(disk, "here") == 12
    disk.open("LIFE").pwrite(b"x", 0)
    with pytest.raises(CookieError, match="in here cannot be read"):
        load_life(disk, "here")


async def test_a_failed_sync_of_the_life_stops_the_bookie() -> None:
    world = Snapshots()
    bookie = await world.start()
    world.machine.disk.fail("sync", "LIFE")
    with pytest.raises(SyncFailedError):
        await bookie.count_life()
    assert bookie.state is BookieState.FAILED
    await bookie.aclose()
