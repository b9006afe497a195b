"""What metadata no longer has goes, after two looks and a third; what it has, or might have, stays."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

import pytest

from cepheid_bookie import Bookie, GarbageCollector, MetadataLedgers, StorageSettings
from cepheid_bookie import bookie as bookie_module
from cepheid_bookie.block_index import BlockRef
from cepheid_bookie.disk import SyncFailedError
from cepheid_bookie.entry_log import list_logs, log_path
from cepheid_bookie.errors import IndexCorruptError
from cepheid_bookie.ledger_record import LedgerRecord
from cepheid_metadata import (
    DeletedLedgers,
    Found,
    Fragment,
    InGrace,
    LedgerMetadata,
    LedgerState,
    MemoryStore,
    MemoryTree,
    keys,
    ledger_records,
)
from cepheid_metadata.ledger_records import LedgerIdCounter
from cepheid_metadata.repair_views import RepairRefusedError, confirm_missing, missing_views
from cepheid_metadata.repositories import Records
from cepheid_ports import Ports
from cepheid_rpc import ExplicitLac, LacRequest, Status
from tests.bookie.bookie_support import KEY, KiB, Machine, add, added, entries_of, group_of, read_all, settle, small_settings
from tests.support import wait_until


class Metadata:
    """A script: what each listing says, and what direct reads say."""

    def __init__(self, *ledgers: int) -> None:
        self.ledgers = set(ledgers)
        self.hidden: set[int] = set()  # a follower that lags does not list these
        self.in_grace: dict[int, InGrace] = {}
        self.given_up: list[int] = []
        self.purged: set[int] = set()
        self.failing = False
        self.failing_reads = False
        self.during_listing: Callable[[], Awaitable[None]] | None = None

        self.restored = False
        self.next_id = 10_000
        self.reported: list[tuple[int, int]] = []  # ledgers held and missing
        self.confirmed = False

    async def report_if_restored(self, bookie: Bookie) -> bool:
        return self.restored

    async def purge(self, give_up: Collection[int] = ()) -> Mapping[int, InGrace]:
        self.given_up += give_up
        for ledger_id in give_up:
            del self.in_grace[ledger_id]
        return dict(self.in_grace)

    async def were_purged(self, ledger_ids: Collection[int]) -> Collection[int]:
        return self.purged.intersection(ledger_ids)

    async def listing(self) -> Collection[int]:
        listed = (self.ledgers - self.hidden).union(self.in_grace)
        if self.during_listing is not None:
            await self.during_listing()
        if self.failing:
            raise ConnectionError("the listing ended early")
        return listed

    async def absent(self, ledger_ids: Sequence[int]) -> list[int]:
        if self.failing_reads:
            raise ConnectionError("the session is lost")
        return [ledger_id for ledger_id in ledger_ids if ledger_id not in self.ledgers and ledger_id not in self.in_grace]

    async def next_ledger_id(self) -> int:
        return self.next_id

    async def report_missing(self, bookie_id: str, held: int, missing: Collection[int]) -> bool:
        self.reported.append((held, len(missing)))
        return self.confirmed

    async def withdraw_missing(self, bookie_id: str) -> None:
        self.reported.clear()

    async def record(self, ledger_id: int) -> None:
        return None

    async def is_marked(self, ledger_id: int) -> bool:
        return False

    async def touch(self, found: Found[LedgerMetadata]) -> bool:
        raise AssertionError(f"ledger {found.record.ledger_id} is touched")


def closed_record(ledger_id: int) -> LedgerMetadata:
    return LedgerMetadata(
        ledger_id=ledger_id,
        ensemble_size=1,
        write_quorum=1,
        ack_quorum=1,
        state=LedgerState.CLOSED,
        fragments=(Fragment(first_entry_id=0, ensemble=("bookie-1",)),),
        last_entry_id=4,
        length_bytes=100,
        creation_token=1,
        created_at_ms=0,
    )


async def filled(bookie: Bookie, *ledgers: int) -> None:
    for ledger_id in ledgers:
        await added(bookie, group_of(ledger_id, 0, 5))


async def test_a_ledger_goes_at_the_second_pass_that_misses_it() -> None:
    async with Machine().bookie() as bookie:
        await filled(bookie, 1, 2, 3)
        metadata = Metadata(1, 3)
        collector = GarbageCollector(bookie, metadata)
        assert (await collector.collect()).deleted == ()
        assert (await collector.collect()).deleted == (2,)
        assert bookie.ledgers() == [1, 3]
        _, missing = await read_all(bookie, 2, 0, 4)
        assert set(missing.values()) == {Status.NO_LEDGER}
        assert await read_all(bookie, 3, 0, 4) == (entries_of([group_of(3, 0, 5)]), {})


async def test_a_deleted_ledger_refuses_its_old_writer_and_stays_refused_after_a_restart() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        await filled(bookie, 1, 2)
        collector = GarbageCollector(bookie, Metadata(1))
        await collector.collect()
        await collector.collect()
        assert [a.status for a in await add(bookie, group_of(2, 5))] == [Status.FENCED]
        assert [a.status for a in await add(bookie, group_of(2, 5), recovery=True)] == [Status.FENCED]
        assert (await bookie.read_lac(LacRequest(2, KEY, fence=True))).status is Status.NO_LEDGER
        assert await bookie.write_lac(ExplicitLac(2, 3, KEY)) is Status.NO_LEDGER
    machine.restart()
    async with machine.bookie() as bookie:
        assert [a.status for a in await add(bookie, group_of(2, 5))] == [Status.FENCED]
        machine.now_ms += int(bookie.settings.tombstone_s * 1000) + 1
        await bookie.reclaim()
        assert [a.status for a in await add(bookie, group_of(2, 5))] == [Status.FENCED]  # a clock that jumps takes nothing away
    machine.restart()
    async with machine.bookie(tombstone_s=0.01) as bookie:
        await asyncio.sleep(0.01)
        await bookie.reclaim()  # nobody who could still write to it is alive
        await added(bookie, group_of(2, 5))


async def test_a_tombstone_made_by_a_clock_that_was_behind_stays_when_the_clock_is_set_right() -> None:
    machine = Machine()
    right_ms, machine.now_ms = machine.now_ms, machine.now_ms - 365 * 86_400_000
    async with machine.bookie() as bookie:
        await filled(bookie, 1, 2)
        collector = GarbageCollector(bookie, Metadata(1))
        await collector.collect()
        await collector.collect()
        machine.now_ms = right_ms
        await bookie.reclaim()
        assert [a.status for a in await add(bookie, group_of(2, 5))] == [Status.FENCED]
    machine.restart()
    async with machine.bookie() as bookie:
        await bookie.reclaim()
        assert [a.status for a in await add(bookie, group_of(2, 5))] == [Status.FENCED]


async def test_a_tombstone_made_while_the_clock_was_set_back_stays_when_it_is_right_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bookie_module, "_SEEN_S", 0.0)  # as if the bookie had run for a day
    machine = Machine()
    async with machine.bookie() as bookie:
        await filled(bookie, 1, 2)
        right_ms, machine.now_ms = machine.now_ms, machine.now_ms - 365 * 86_400_000
        await bookie.delete_ledgers([2])
        machine.now_ms = right_ms
        await bookie.reclaim()
        assert [a.status for a in await add(bookie, group_of(2, 5))] == [Status.FENCED]


async def test_after_a_restore_of_metadata_nothing_is_deleted_and_what_was_suspected_before_does_not_count() -> None:
    async with Machine().bookie() as bookie:
        await filled(bookie, 1, 2)
        metadata = Metadata(1)
        collector = GarbageCollector(bookie, metadata)
        await collector.collect()
        metadata.restored = True
        for _ in range(3):
            assert (await collector.collect()).refused_restored
        metadata.restored = False
        assert (await collector.collect()).deleted == ()
        assert (await collector.collect()).deleted == (2,)


@pytest.mark.parametrize("what", ["failing", "failing_reads"])
async def test_metadata_that_goes_away_during_a_pass_deletes_nothing_and_forgets_what_was_suspected(what: str) -> None:
    async with Machine().bookie() as bookie:
        await filled(bookie, 1, 2)
        metadata = Metadata(1)
        collector = GarbageCollector(bookie, metadata)
        await collector.collect()
        setattr(metadata, what, True)
        with pytest.raises(ConnectionError):
            await collector.collect()
        setattr(metadata, what, False)
        assert (await collector.collect()).deleted == ()
        assert bookie.ledgers() == [1, 2]


async def test_a_ledger_that_only_a_lagging_follower_misses_stays() -> None:
    async with Machine().bookie() as bookie:
        await filled(bookie, 1, 2)
        metadata = Metadata(1, 2)
        metadata.hidden = {2}
        collector = GarbageCollector(bookie, metadata)
        for _ in range(4):
            assert (await collector.collect()).deleted == ()
        assert bookie.ledgers() == [1, 2]


async def test_a_ledger_created_during_a_listing_is_no_suspect() -> None:
    """The local snapshot comes first: BookKeeper once did it the other way round."""
    async with Machine().bookie() as bookie:
        await filled(bookie, 1)
        metadata = Metadata(1)
        collector = GarbageCollector(bookie, metadata)

        async def create() -> None:  # in metadata after the listing had passed its place, then written here
            ledger_id = 50 + len(metadata.ledgers)
            metadata.ledgers.add(ledger_id)
            await filled(bookie, ledger_id)

        metadata.during_listing = create
        for _ in range(3):
            assert (await collector.collect()).absent == 0
        assert bookie.ledgers() == [1, 51, 52, 53]


async def test_a_damaged_index_keeps_the_logs_and_no_ledger_that_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A walk over the index never ends well then, and no log can be known to be dead."""
    machine = Machine()
    async with machine.bookie() as bookie:
        await filled(bookie, 1, 2, 3)
        await bookie.checkpoint()
        damage = IndexCorruptError("the block index /data/index is damaged: Corruption: block checksum mismatch")
        record = machine.index.record

        def broken_record(ledger_id: int) -> LedgerRecord | None:
            if ledger_id == 2:
                raise damage
            return record(ledger_id)

        def broken_walk(last: BlockRef | None, limit: int) -> list[BlockRef]:
            raise damage

        monkeypatch.setattr(machine.index, "record", broken_record)
        monkeypatch.setattr(machine.index, "blocks_after", broken_walk)
        bookie._ledgers._loaded.clear()  # as after a restart
        collector = GarbageCollector(bookie, Metadata())
        for _ in range(2):
            with pytest.raises(IndexCorruptError):
                await collector.collect()
        assert bookie.ledgers() == [2]


async def test_mass_absence_stops_everything() -> None:
    machine = Machine(settings=small_settings(gc_mass_ledgers=10, gc_mass_ratio=0.5))
    async with machine.bookie() as bookie:
        await filled(bookie, *range(1, 13))
        collector = GarbageCollector(bookie, Metadata())
        for _ in range(3):
            result = await collector.collect()
            assert (result.refused_mass, result.deleted) == (True, ())
        assert len(bookie.ledgers()) == 12
        collector = GarbageCollector(bookie, Metadata(*range(1, 8)))
        await collector.collect()
        assert (await collector.collect()).deleted == (8, 9, 10, 11, 12)


async def test_a_mass_absence_is_kept_and_shown_until_an_operator_confirms_it() -> None:
    machine = Machine(settings=small_settings(gc_mass_ledgers=10, gc_mass_ratio=0.5))
    async with machine.bookie() as bookie:
        await filled(bookie, *range(1, 13))
        metadata = Metadata(1, 2)
        collector = GarbageCollector(bookie, metadata)
        assert (await collector.collect()).refused_mass
        assert metadata.reported == [(12, 10)]
        assert bookie.statistics().missing_ledgers == 10
        metadata.confirmed = True
        await collector.collect()
        assert (await collector.collect()).deleted == tuple(range(3, 13)), "two comparisons as ever"
        await collector.collect()
        assert metadata.reported == [], "withdrawn"
        assert bookie.statistics().missing_ledgers == 0


async def test_metadata_that_is_older_than_the_data_deletes_not_even_one_ledger() -> None:
    """A snapshot of ZooKeeper was put back, without a restore that would raise the counter."""
    machine = Machine()
    async with machine.bookie() as bookie:
        await filled(bookie, 1, 2, 3)
        metadata = Metadata(1, 2)
        metadata.next_id = 3
        collector = GarbageCollector(bookie, metadata)
        for _ in range(3):
            result = await collector.collect()
            assert (result.refused_old, result.deleted) == (True, ())
        metadata.next_id = 4
        await collector.collect()
        assert (await collector.collect()).deleted == (3,)


async def test_a_confirmation_is_void_when_more_ledgers_are_missing() -> None:
    store = MemoryStore(MemoryTree())
    ledgers = MetadataLedgers(store, Ports())
    assert not await ledgers.report_missing("b", 30, range(1, 21))
    with pytest.raises(RepairRefusedError, match="misses 20 ledgers now, not 19"):
        await confirm_missing(store, "b", 19)
    await confirm_missing(store, "b", 20)
    assert await ledgers.report_missing("b", 30, range(1, 21))
    assert await ledgers.report_missing("b", 12, range(3, 11)), "some are deleted already"
    assert not await ledgers.report_missing("b", 30, range(1, 22))
    assert not await ledgers.report_missing("b", 30, range(1, 21)), "it has to be confirmed again"
    await ledgers.withdraw_missing("b")
    await ledgers.withdraw_missing("b")
    assert await missing_views(store) == []
    with pytest.raises(RepairRefusedError, match="there is nothing to confirm"):
        await confirm_missing(store, "b", 20)
    await store.aclose()


async def test_a_mass_of_ledgers_that_metadata_remembers_as_deleted_is_collected() -> None:
    """Nine of ten topics were deleted while the bookie was down. Of ledgers that metadata only lacks, the operator is asked."""
    machine = Machine(settings=small_settings(gc_mass_ledgers=10, gc_mass_ratio=0.5))
    async with machine.bookie() as bookie:
        await filled(bookie, *range(1, 21))
        metadata = Metadata(1, 2)
        metadata.purged = set(range(3, 21))
        collector = GarbageCollector(bookie, metadata)
        await collector.collect()
        assert (await collector.collect()).deleted == tuple(range(3, 21))
        metadata.ledgers.clear()
        await filled(bookie, *range(21, 31))
        assert (await collector.collect()).refused_mass
        assert metadata.reported == [(12, 12)]


async def test_ledgers_purged_before_a_bookie_saw_them_deleted_are_told_from_those_that_metadata_lost() -> None:
    machine, store = Machine(settings=small_settings(gc_mass_ledgers=10, gc_mass_ratio=0.5)), MemoryStore(MemoryTree())
    await Records(store, lambda _: keys.LEDGER_IDS_KEY, LedgerIdCounter).create(None, LedgerIdCounter(next_ledger_id=100))
    deleted, living = DeletedLedgers(store), ledger_records(store)
    for ledger_id in range(1, 21):
        record = closed_record(ledger_id)
        await living.create(ledger_id, record)
        if ledger_id > 2:
            await deleted.delete(Found(record, 0), 0, 0 if ledger_id % 2 else 1000)
    await deleted.purge(1000)
    async with machine.bookie() as bookie:
        await filled(bookie, *range(1, 21))
        collector = GarbageCollector(bookie, MetadataLedgers(store, Ports()))
        await collector.collect()
        assert (await collector.collect()).deleted == tuple(range(3, 21))
        await filled(bookie, *range(21, 41))
        assert (await collector.collect()).refused_mass
    await store.aclose()


@pytest.mark.virtual_time
@pytest.mark.deadline(2000)
async def test_what_is_deleted_is_gone_after_an_interval_and_a_confirmation() -> None:
    machine = Machine()
    assert StorageSettings().gc_interval_s + StorageSettings().gc_confirm_s <= 6 * 60
    async with machine.bookie() as bookie:
        await filled(bookie, 1, *range(100, 1100))
        metadata = Metadata(1, *range(100, 1100))
        collector = GarbageCollector(bookie, metadata)
        collector.start()
        await asyncio.sleep(310)
        metadata.in_grace = {ledger_id: InGrace(0, 50) for ledger_id in range(100, 1100)}
        metadata.ledgers = {1}
        await asyncio.sleep(310)
        assert len(bookie.ledgers()) == 1001
        metadata.purged = set(metadata.in_grace)
        metadata.in_grace.clear()
        passes = collector.passes
        await asyncio.sleep(6 * 60)
        assert bookie.ledgers() == [1]
        assert collector.passes - passes == 2
        await collector.aclose()


def full_machine(**changes: Any) -> Machine:
    return Machine(settings=small_settings(min_free_data_bytes=128 * KiB, space_margin_bytes=32 * KiB, **changes))


async def fill(machine: Machine, bookie: Bookie, *ledgers: int) -> None:
    """Write 160 KiB to each ledger, in logs of its own, and let the disk have less than the minimum left."""
    for ledger_id in ledgers:
        for first in range(0, 160, 10):
            await added(bookie, group_of(ledger_id, first, 10, size=KiB))
        await bookie.checkpoint()
    await bookie.checkpoint()
    machine.disk.capacity_bytes = machine.disk.used_bytes() + 100 * KiB
    await asyncio.sleep(2 * bookie.settings.disk_check_interval_s)
    await add(bookie, group_of(999, 0))
    await wait_until(lambda: not bookie.writable)


@pytest.mark.virtual_time
@pytest.mark.deadline(2000)
async def test_a_full_disk_is_collected_at_once_and_the_bookie_becomes_writable_by_itself() -> None:
    loop, machine = asyncio.get_running_loop(), full_machine(disk_check_interval_s=2.0)
    async with machine.bookie() as bookie:
        metadata = Metadata(1, 999)  # ledger 2 was deleted
        collector = GarbageCollector(bookie, metadata)
        collector.start()
        await fill(machine, bookie, 1, 2)
        full_at = loop.time()
        await wait_until(lambda: bookie.writable, timeout_s=200)
        assert loop.time() - full_at < 60, "not after storage.gc_interval_s"
        assert bookie.ledgers() in ([1], [1, 999])
        entries, missing = await read_all(bookie, 1, 0, 159)
        assert (len(entries), missing) == (160, {})
        await collector.aclose()


@pytest.mark.virtual_time
@pytest.mark.deadline(2000)
@pytest.mark.parametrize("shorten", [False, True])
async def test_a_full_disk_shortens_the_time_of_grace_only_when_told_to_and_only_as_far_as_it_must(
    shorten: bool, caplog: pytest.LogCaptureFixture
) -> None:
    machine = full_machine(shorten_undelete_on_full_disk=shorten)
    async with machine.bookie() as bookie:
        metadata = Metadata(1, 999)
        metadata.in_grace = {2: InGrace(9_000, 160 * KiB), 3: InGrace(8_000, 160 * KiB)}
        collector = GarbageCollector(bookie, metadata)
        collector.start()
        await fill(machine, bookie, 1, 2, 3)
        await asyncio.sleep(200)
        assert metadata.given_up == ([3] if shorten else [])
        assert bookie.writable is shorten
        waits = [record for record in caplog.records if record.msg == "gc.deleted_ledgers_wait"]
        assert [(record.ledgers, record.bytes) for record in waits] == ([] if shorten else [(2, 320 * KiB)])  # type: ignore[attr-defined]
        await collector.aclose()


async def test_logs_go_when_the_last_of_their_ledgers_has_gone() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        for ledger_id in (1, 2):  # a log or two each
            for first in range(0, 80, 5):
                await added(bookie, group_of(ledger_id, first, 5, size=KiB))
            await bookie.checkpoint()
        logs = machine.disk.listdir("entrylog")
        metadata = Metadata(2)
        collector = GarbageCollector(bookie, metadata)
        await collector.collect()
        result = await collector.collect()
        assert result.deleted == (1,)
        assert result.deleted_logs
        assert not {log_path(log_id) for log_id in result.deleted_logs} & {
            f"entrylog/{name}" for name in machine.disk.listdir("entrylog")
        }
        assert len(machine.disk.listdir("entrylog")) < len(logs), "what was left in one of them has moved to another"
        entries, missing = await read_all(bookie, 2, 0, 79)
        assert (len(entries), missing) == (80, {})


async def test_a_log_stays_until_the_deletion_of_its_ledgers_is_synced() -> None:
    """Visible, and lost with the power: the index would lead to a log that is gone."""
    machine = Machine()
    async with machine.bookie() as bookie:
        for ledger_id in (1, 2):
            for first in range(0, 80, 5):
                await added(bookie, group_of(ledger_id, first, 5, size=KiB))
            await bookie.checkpoint()
        logs = machine.disk.listdir("entrylog")

        def refuse() -> None:
            raise OSError(errno.ENOSPC, "no room for the index")

        machine.index.before_sync = refuse
        with pytest.raises(OSError, match="no room"):
            await bookie.delete_ledgers([1])
        with pytest.raises(OSError, match="no room"):
            await bookie.reclaim()
        assert machine.disk.listdir("entrylog") == logs
        machine.index.before_sync = lambda: None
        assert await bookie.reclaim()
        machine.index.crash()
        left = {block.log_id for block in machine.index.blocks()}
        assert left <= set(list_logs(machine.disk))


async def test_a_failed_sync_of_a_deletion_stops_the_bookie() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        await filled(bookie, 1)

        def refuse() -> None:
            raise OSError(errno.EIO, "the disk does not answer")

        machine.index.before_sync = refuse
        with pytest.raises(SyncFailedError, match="does not answer"):
            await bookie.delete_ledgers([1])
        machine.index.before_sync = lambda: None
        assert isinstance(bookie.failure, SyncFailedError)
        with pytest.raises(OSError, match="the bookie has failed"):
            await bookie.delete_ledgers([1])


async def test_a_deletion_that_failed_leaves_no_blocks_behind_when_a_checkpoint_has_its_tombstone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a restart the ledger is deleted: no collection looks for its blocks again."""
    machine = Machine()
    async with machine.bookie() as bookie:
        await filled(bookie, 1, 2)
        await bookie.checkpoint()

        def refuse(*_: object) -> None:
            raise OSError(errno.ENOSPC, "no room for the index")

        monkeypatch.setattr(machine.index, "delete_ledgers", refuse)
        with pytest.raises(OSError, match="no room"):
            await bookie.delete_ledgers([2])
        monkeypatch.undo()
        await filled(bookie, 3)
        await bookie.checkpoint()
    machine.restart()
    async with machine.bookie() as bookie:
        assert bookie.ledgers() == [1, 3]
        assert {block.ledger_id for block in machine.index.blocks()} == {1, 3}


async def test_deleting_while_a_flush_runs_leaves_nothing_of_the_ledger_behind() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        await filled(bookie, 1, 2)
        machine.workers["flush"].hold()
        checkpoint = asyncio.ensure_future(bookie.checkpoint())
        await settle()
        await added(bookie, group_of(2, 5, 2))
        deletion = asyncio.ensure_future(bookie.delete_ledgers([2]))
        await settle()
        _, missing = await read_all(bookie, 2, 0, 6)
        assert set(missing.values()) == {Status.NO_LEDGER}
        machine.workers["flush"].release()
        await asyncio.gather(checkpoint, deletion)
        await bookie.checkpoint()
        assert {block.ledger_id for block in machine.index.blocks()} == {1}


async def test_a_clock_that_is_set_ahead_does_not_cut_the_time_in_which_a_ledger_can_be_brought_back() -> None:
    store, machine = MemoryStore(MemoryTree()), Machine()
    record = closed_record(2)
    await ledger_records(store).create(2, record)
    await DeletedLedgers(store).delete(Found(record, 0), machine.now_ms, grace_ms=3_600_000)
    ledgers = MetadataLedgers(store, machine.ports())
    machine.now_ms += 365 * 86_400_000
    await ledgers.purge()
    assert await ledgers.absent([2]) == []
    later = MetadataLedgers(store, machine.ports())  # of a process that was started with that clock
    await later.purge()
    assert await later.absent([2]) == [2]


async def test_collects_against_the_real_metadata_package_by_itself() -> None:
    store = MemoryStore(MemoryTree())
    counter: Records[None, LedgerIdCounter] = Records(store, lambda _: keys.LEDGER_IDS_KEY, LedgerIdCounter)
    await counter.create(None, LedgerIdCounter(next_ledger_id=3))
    records = ledger_records(store)
    for ledger_id in (1, 2):
        record = LedgerMetadata(
            ledger_id=ledger_id,
            ensemble_size=1,
            write_quorum=1,
            ack_quorum=1,
            state=LedgerState.OPEN,
            fragments=(Fragment(first_entry_id=0, ensemble=("bookie-1",)),),
            creation_token=1,
            created_at_ms=0,
        )
        await records.create(ledger_id, record)
    machine = Machine(settings=small_settings(gc_interval_s=0.01))
    async with machine.bookie() as bookie:
        await filled(bookie, 1, 2)
        collector = GarbageCollector(bookie, MetadataLedgers(store, Ports()))
        collector.start()
        await wait_until(lambda: collector.passes > 2)
        assert bookie.ledgers() == [1, 2]
        await records.delete(2, None)
        await wait_until(lambda: bookie.ledgers() == [1])
        await collector.aclose()
    await store.aclose()
