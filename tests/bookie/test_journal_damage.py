"""A journal whose end was lost after it had been synced: the bookie starts, denies nothing that it may have lost, and stays so."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import pytest

from cepheid_bookie import Bookie, MetadataCookies
from cepheid_bookie.disk import RealDisk
from cepheid_bookie.errors import JournalCorruptError
from cepheid_bookie.journal_format import segment_path
from cepheid_bookie.journal_tail import SECTOR_BYTES
from cepheid_metadata import LedgerIds, MemoryStore, MemoryTree, StoreUnavailableError
from cepheid_rpc import LacRequest, Status
from tests.bookie.bookie_support import IDENTITY, KEY, KiB, Machine, add, added, group_of, payload_of, read_all
from tests.simulation.world.sim_disk import SimDisk

LEDGER, FENCED, NEW = 7, 8, 2_000  # the ids below 1001 were given out when the end of the journal is lost
SEGMENT = segment_path(1)


class Damaged:
    """A bookie with three entries of LEDGER; the last of them and a fence are in the batches that are lost."""

    def __init__(self, seed: int | str = 0) -> None:
        self.machine = Machine(seed)
        self.ids = LedgerIds(MemoryStore(tree := MemoryTree()))
        self.store = MemoryStore(tree)
        self.cookies: MetadataCookies | None = MetadataCookies(self.store, {})

    async def live(self) -> None:
        await self.ids.take()
        bookie = await self.start()
        await added(bookie, group_of(LEDGER, 0, 2))
        self.mark = bookie._journal.durable  # of the batch that is lost, or the first one
        await bookie.read_lac(LacRequest(FENCED, KEY, fence=True))
        await added(bookie, group_of(LEDGER, 2, size=3 * KiB))
        self.machine.restart()

    @property
    def disk(self) -> SimDisk:
        return self.machine.disk

    async def start(self) -> Bookie:
        machine = self.machine
        machine.index.closed = False
        return await Bookie.open(IDENTITY, machine.settings, machine.disk, machine.index, machine.ports(), cookies=self.cookies)

    def place_of(self, entry: bytes) -> int:
        return self.disk.durable_content(SEGMENT).index(entry)


def cut_off(damaged: Damaged) -> None:
    damaged.disk.cut_off(SEGMENT, damaged.mark.offset)


def flip_bit(damaged: Damaged) -> None:
    """In the last batch. The fence before it is whole, and stays."""
    damaged.disk.flip_bit(SEGMENT, damaged.place_of(payload_of(LEDGER, 2, 3 * KiB)) + 1_000)


DAMAGES = pytest.mark.parametrize("damage", [cut_off, flip_bit])
Damage = Callable[[Damaged], None]


async def assert_in_limbo(bookie: Bookie) -> None:
    """What was lost is unknown on every path, what is left is served, and old ledgers get no regular adds."""
    for fence in (False, True):
        entries, missing = await read_all(bookie, LEDGER, 0, 3, fence=fence)
        assert set(entries) == {0, 1}
        assert set(missing.values()) == {Status.UNKNOWN}
        answer = await bookie.read_lac(LacRequest(FENCED, KEY, fence=fence))
        assert not answer.status.certain_no
    for ledger_id in (LEDGER, FENCED):
        (refused,) = await add(bookie, group_of(ledger_id, 9))
        assert refused.status in (Status.READ_ONLY, Status.FENCED)


@DAMAGES
async def test_what_may_be_lost_is_unknown_and_the_bookie_goes_on_with_new_ledgers(
    damage: Damage, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = Damaged()
    await damaged.live()
    damage(damaged)
    bookie = await damaged.start()
    assert bookie.cookie.limbo_below == 1_001
    (warning,) = [record for record in caplog.records if record.message == "bookie.journal_end_lost"]
    assert warning.file == SEGMENT  # type: ignore[attr-defined]
    assert warning.limbo_below == 1_001  # type: ignore[attr-defined]
    await assert_in_limbo(bookie)
    await added(bookie, group_of(NEW, 0))
    await added(bookie, group_of(LEDGER, 2, size=3 * KiB), recovery=True)
    entries, missing = await read_all(bookie, NEW, 0, 1)
    assert (list(entries), missing) == ([0], {1: Status.NO_ENTRY})
    damaged.machine.restart()
    bookie = await damaged.start()
    entries, _ = await read_all(bookie, LEDGER, 0, 2)
    assert list(entries) == [0, 1, 2], "what recovery brought is there after the next crash"
    assert bookie.cookie.limbo_below == 1_001


@DAMAGES
async def test_a_start_after_the_one_that_found_the_damage_does_not_find_it_again(damage: Damage) -> None:
    """Else each would forget more ledgers, until a batch is written."""
    damaged = Damaged()
    await damaged.live()
    damage(damaged)
    await damaged.start()
    while await damaged.ids.take() < 1_001:
        pass
    for _ in range(3):
        damaged.machine.restart()
        bookie = await damaged.start()
        assert bookie.cookie.limbo_below == 1_001
        await assert_in_limbo(bookie)


@DAMAGES
async def test_a_second_damage_raises_the_watermark(damage: Damage) -> None:
    damaged = Damaged()
    await damaged.live()
    damage(damaged)
    bookie = await damaged.start()
    while await damaged.ids.take() < 1_001:
        pass
    await added(bookie, group_of(1_001, 0))
    damaged.machine.restart()
    last = max(path for path in damaged.disk.durable_files() if path.startswith("journal/"))
    damaged.disk.cut_off(last, 4_096)
    bookie = await damaged.start()
    assert bookie.cookie.limbo_below == 2_001
    _, missing = await read_all(bookie, 1_001, 0, 0)
    assert missing == {0: Status.UNKNOWN}


@DAMAGES
@pytest.mark.parametrize("power_loss", [True, False])
async def test_a_start_cut_anywhere_is_in_limbo_the_next_time(damage: Damage, power_loss: bool) -> None:
    """The watermark is durable before the mark passes the damage."""
    operation, crashed = 0, True
    while crashed:
        damaged = Damaged(f"{operation}")
        await damaged.live()
        damage(damaged)
        machine = damaged.machine
        machine.crash_at(operation)

        async def open_damaged(damaged: Damaged = damaged, **_: object) -> Bookie:
            return await damaged.start()

        async def nothing(_: Bookie) -> None: ...

        machine.open = open_damaged  # type: ignore[method-assign]
        crashed = await machine.run_until_crash(nothing)
        machine.restart(power_loss=power_loss)
        bookie = await damaged.start()
        assert bookie.cookie.limbo_below in (1_001, 1_002), "one start may find the damage twice"
        await assert_in_limbo(bookie)
        operation += 1
    assert operation > 10


@DAMAGES
async def test_nothing_is_passed_while_metadata_does_not_answer(damage: Damage) -> None:
    class Away(MetadataCookies):
        async def next_ledger_id(self) -> int:
            raise StoreUnavailableError("connection lost")

    damaged = Damaged()
    await damaged.live()
    damage(damaged)
    damaged.cookies = Away(damaged.store, {})
    for _ in range(2):
        with pytest.raises(StoreUnavailableError):
            await damaged.start()
    damaged.cookies = MetadataCookies(damaged.store, {})
    bookie = await damaged.start()
    await assert_in_limbo(bookie)


@DAMAGES
async def test_without_metadata_it_refuses_to_start_and_says_where_the_damage_is(damage: Damage) -> None:
    damaged = Damaged()
    damaged.cookies = None
    await damaged.live()
    damage(damaged)
    for _ in range(2):
        with pytest.raises(JournalCorruptError, match="lost what was synced") as caught:
            await damaged.start()
        assert caught.value.facts["file"] == SEGMENT
        assert "--accept-empty-disk" in str(caught.value)


async def test_a_segment_that_ends_before_the_mark_was_damaged_although_nothing_was_to_be_replayed() -> None:
    damaged = Damaged()
    await damaged.live()
    bookie = await damaged.start()
    await bookie.aclose()
    cut_off(damaged)
    bookie = await damaged.start()
    assert bookie.cookie.limbo_below == 1_001
    entries, _ = await read_all(bookie, LEDGER, 0, 2)
    assert list(entries) == [0, 1, 2], "what the mark has passed is in the index"


@pytest.mark.parametrize("seed", range(30))
async def test_a_torn_batch_is_cut_and_denied_with_certainty(seed: int) -> None:
    """Else a power loss of all bookies would make them unsure of what none of them ever answered."""
    damaged = Damaged(seed)
    await damaged.live()
    bookie = await damaged.start()
    await added(bookie, group_of(LEDGER, 3))
    damaged.machine.crash_at(1)  # it is written, and not synced
    pending = asyncio.ensure_future(add(bookie, group_of(LEDGER, 4, 40, size=300), group_of(NEW, 0)))
    await damaged.machine.crashed.wait()
    pending.cancel()
    await asyncio.gather(pending, return_exceptions=True)
    damaged.machine.restart()
    bookie = await damaged.start()
    assert bookie.cookie.limbo_below == 0
    entries, missing = await read_all(bookie, LEDGER, 0, 43)
    assert set(entries) >= {0, 1, 2, 3}
    assert set(missing.values()) <= {Status.NO_ENTRY}


async def test_a_sector_that_a_power_loss_took_is_denied_with_certainty() -> None:
    damaged = Damaged()
    await damaged.live()
    place = damaged.place_of(payload_of(LEDGER, 2, 3 * KiB))
    place += -place % SECTOR_BYTES
    file = damaged.disk.open(SEGMENT)
    file.pwrite(bytes(SECTOR_BYTES), place)
    file.sync()
    bookie = await damaged.start()
    assert bookie.cookie.limbo_below == 0
    _, missing = await read_all(bookie, LEDGER, 0, 2)
    assert missing == {2: Status.NO_ENTRY}


async def test_a_real_file_that_was_cut_off_is_noticed(tmp_path: Path) -> None:
    damaged = Damaged()
    await damaged.ids.take()

    async def start() -> Bookie:
        machine = damaged.machine
        machine.index.closed = False
        return await Bookie.open(
            IDENTITY, machine.settings, RealDisk(tmp_path), machine.index, machine.ports(), cookies=damaged.cookies
        )

    async with aclosing(await start()) as bookie:
        await added(bookie, group_of(LEDGER, 0, 3))
    size = (tmp_path / SEGMENT).stat().st_size
    assert size == damaged.machine.settings.journal_segment_bytes
    async with aclosing(await start()) as bookie:
        assert bookie.cookie.limbo_below == 0
    os.truncate(tmp_path / SEGMENT, size - 1)
    async with aclosing(await start()) as bookie:
        assert bookie.cookie.limbo_below == 1_001
        assert sorted(path.name for path in (tmp_path / "journal").iterdir()) == [f"{number:016x}.journal" for number in (1, 2)]


async def test_a_short_segment_of_an_older_release_starts_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    damaged = Damaged()
    await damaged.live()
    file = damaged.disk.open(SEGMENT)
    file.pwrite(bytes(12), 48)
    file.sync()
    cut_off(damaged)
    bookie = await damaged.start()
    assert bookie.cookie.limbo_below == 0
    (warning,) = [record for record in caplog.records if record.message == "bookie.journal_segment_short"]
    assert warning.bytes == damaged.mark.offset  # type: ignore[attr-defined]
