"""The scrubber: damage is found, reported and mended, nothing becomes a denial, and the disk is left to others."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Sequence
from typing import Any

import pytest

from cepheid_bookie import Bookie, damaged_blocks, scrubber
from cepheid_bookie.block_check import Run
from cepheid_bookie.block_index import BlockRef
from cepheid_bookie.damaged_blocks import DamageReport, Outlook
from cepheid_bookie.disk import SyncFailedError
from cepheid_bookie.entry_block import HEADER_BYTES
from cepheid_bookie.entry_log import log_path
from cepheid_bookie.errors import IndexCorruptError
from cepheid_bookie.ledger_record import LedgerRecord
from cepheid_bookie.scrubber import PIECE_BYTES
from cepheid_metadata import StoreUnavailableError
from cepheid_rpc import ReadRequest, Status
from tests.bookie.bookie_support import Machine, added, entries_of, group_of, read_all, settle, small_settings
from tests.support import wait_until

pytestmark = pytest.mark.virtual_time

GROUPS = [group_of(7, first, 5, size=900) for first in range(0, 20, 5)]
EVERYTHING = entries_of(GROUPS)


class Reports:
    """What was reported; raises while metadata is `away`."""

    def __init__(self, outlook: Outlook = Outlook.REPAIR) -> None:
        self.outlook = outlook
        self.seen: list[tuple[int, list[Run]]] = []
        self.away = False

    async def report(self, ledger_id: int, entries: Sequence[Run]) -> DamageReport:
        if self.away:
            raise StoreUnavailableError("metadata is away")
        self.seen.append((ledger_id, list(entries)))
        return DamageReport(self.outlook, "persistent://public/default/orders")


async def filled(bookie: Bookie) -> Reports:
    await added(bookie, *GROUPS)
    await bookie.checkpoint()
    bookie.scrubber.damaged.reports = reports = Reports()
    return reports


def block_of(machine: Machine, entry_id: int) -> BlockRef:
    return next(block for block in machine.index.blocks() if block.first_entry_id <= entry_id <= block.last_entry_id)


def flip(machine: Machine, entry_id: int) -> BlockRef:
    """One bit of the payload of an entry; entries have 36 + 900 bytes."""
    block = block_of(machine, entry_id)
    machine.disk.flip_bit(log_path(block.log_id), block.offset + block.length - 936 * (block.last_entry_id - entry_id) - 10)
    return block


def damaged(bookie: Bookie, outlook: Outlook = Outlook.REPAIR) -> int:
    return bookie.statistics().scrub.damaged[outlook]


async def mend(bookie: Bookie, rounds: int = 2) -> None:
    for _ in range(rounds):
        await bookie.scrubber.damaged.look_again()
        await bookie.checkpoint()


async def test_a_flipped_bit_is_found_named_and_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        reports = await filled(bookie)
        block = flip(machine, 7)
        await bookie.scrubber.scrub_all()
        await bookie.scrubber.scrub_all()
        figures = bookie.statistics().scrub
        assert reports.seen == [(7, [(7, 7)])]
        assert (figures.found, damaged(bookie)) == (1, 1)
        assert figures.blocks == 2 * len(list(machine.index.blocks()))
        (record,) = [record for record in caplog.records if record.message == "block.damaged"]
        facts: dict[str, Any] = record.__dict__
        assert (facts["ledger_id"], facts["topic"], facts["entries"]) == (7, "persistent://public/default/orders", "7..7")
        assert facts["place"] == f"{log_path(block.log_id)} at offset {block.offset}"


async def test_a_sound_block_that_readers_have_in_memory_does_not_hide_the_damage() -> None:
    """Repair reads what this bookie has before it copies."""
    machine = Machine()
    async with machine.bookie() as bookie:
        await filled(bookie)
        assert (await read_all(bookie, 7, 0, 19))[1] == {}
        flip(machine, 7)
        assert (await read_all(bookie, 7, 7, 7))[1] == {}, "it is in memory"
        await bookie.scrubber.scrub_all()
        assert (await read_all(bookie, 7, 0, 19))[1] == {7: Status.BAD_DIGEST}


async def test_a_check_of_copies_reads_the_disk_although_the_block_is_in_memory() -> None:
    """`cepheid ledgers verify`, and the checks of repair, would call a copy sound that only memory has."""
    machine = Machine()
    async with machine.bookie() as bookie:
        reports = await filled(bookie)
        assert (await read_all(bookie, 7, 0, 19))[1] == {}
        flip(machine, 7)
        assert (await read_all(bookie, 7, 7, 7))[1] == {}, "it is in memory"
        missing = [
            (part.first_entry_id, part.last_entry_id, part.status)
            async for answer in bookie.read(ReadRequest(7, 0, 19, 1 << 20, from_disk=True))
            for part in answer.missing
        ]
        assert missing == [(7, 7, Status.BAD_DIGEST)]
        await bookie.scrubber.damaged.look_at_suspects()
        assert reports.seen == [(7, [(7, 7)])], "and it is repaired"


@pytest.mark.parametrize(("ledger_id", "statuses"), [(7, []), (8, [Status.OVERLOADED])])
async def test_a_check_of_copies_waits_for_a_hanging_journal_in_bounds_and_only_for_what_is_in_memory(
    ledger_id: int, statuses: list[Status]
) -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        await added(bookie, group_of(7, 0))
        await bookie.checkpoint()
        machine.workers["journal"].hold()
        adding = asyncio.create_task(added(bookie, group_of(8, 0)))
        await settle()
        answers = [answer async for answer in bookie.read(ReadRequest(ledger_id, 0, 0, 1 << 20, from_disk=True))]
        assert [part.status for answer in answers for part in answer.missing] == statuses
        machine.workers["journal"].release()
        await adding


@pytest.mark.parametrize("place", [0, 4, 8, 16, 24, 28, HEADER_BYTES])  # magic, checksum, ledger, entry, count, bytes, table
async def test_every_part_of_a_block_is_compared(place: int) -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        await filled(bookie)
        block = block_of(machine, 7)
        machine.disk.flip_bit(log_path(block.log_id), block.offset + place)
        await bookie.scrubber.scrub_all()
        assert list(bookie.scrubber.damaged.blocks) == [block]


@pytest.mark.parametrize("from_end", [900_000, 300_000, 10, None])
async def test_a_block_larger_than_a_piece_is_compared_to_its_end(from_end: int | None) -> None:
    machine = Machine(settings=small_settings(block_bytes=1 << 20, write_cache_bytes=4 << 20))
    async with machine.bookie() as bookie:
        await added(bookie, group_of(7, 0, 125, size=8000))
        await bookie.checkpoint()
        (block,) = machine.index.blocks()
        assert block.length > 3 * PIECE_BYTES
        if from_end is not None:
            machine.disk.flip_bit(log_path(block.log_id), block.offset + block.length - from_end)
        await bookie.scrubber.scrub_all()
        figures = bookie.statistics().scrub
        assert (figures.blocks, figures.bytes) == (1, block.length)
        assert list(bookie.scrubber.damaged.blocks) == ([] if from_end is None else [block])


async def test_a_log_that_is_gone_while_the_index_needs_it_is_damage() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        await filled(bookie)
    for path in machine.disk.durable_paths("entrylog"):
        machine.disk.take_away(path)
    machine.restart()
    async with machine.bookie() as bookie:
        bookie.scrubber.damaged.reports = reports = Reports()
        await bookie.scrubber.scrub_all()
        assert sorted(run for _, runs in reports.seen for run in runs) == [
            (block.first_entry_id, block.last_entry_id) for block in machine.index.blocks()
        ]
        assert set((await read_all(bookie, 7, 0, 19))[1].values()) == {Status.IO_ERROR}


async def test_a_block_is_mended_once_its_entries_were_copied_again() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        await filled(bookie)
        block = flip(machine, 7)
        await bookie.scrubber.scrub_all()
        await mend(bookie)
        assert damaged(bookie) == 1, "entry 7 is nowhere else"
        await added(bookie, group_of(7, 7, size=900), recovery=True)  # as a replication worker does
        await bookie.checkpoint()
        entries, missing = await read_all(bookie, 7, 0, 19)
        assert (entries, missing) == (EVERYTHING, {}), "the good copy is given, and the damaged one not asked"
        await mend(bookie)
        assert (damaged(bookie), bookie.statistics().scrub.mended) == (0, 1)
        assert not machine.index.contains(block)
    machine.restart()
    async with machine.bookie() as bookie:
        assert await read_all(bookie, 7, 0, 20) == (EVERYTHING, {20: Status.NO_ENTRY})
        await bookie.scrubber.scrub_all()
        assert bookie.statistics().scrub.found == 0


async def test_copies_on_their_way_to_a_block_are_waited_for() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        reports = await filled(bookie)
        flip(machine, 7)
        await bookie.scrubber.scrub_all()
        await added(bookie, group_of(7, 7, size=900), recovery=True)

        async def adds_of_a_look() -> int:
            before = bookie.statistics().entries_added
            await bookie.scrubber.damaged.look_again()
            return bookie.statistics().entries_added - before

        assert await adds_of_a_look() == 0
        assert len(reports.seen) == 1, "a copy in the journal and the cache is no damage"
        await bookie.checkpoint()
        assert await adds_of_a_look() == 3, "the other entries of the block are added again"
        assert await adds_of_a_look() == 0, "once"
        await bookie.checkpoint()
        assert await adds_of_a_look() == 0
        assert damaged(bookie) == 0


async def test_a_checksum_that_is_damaged_itself_needs_no_replica() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        reports = await filled(bookie)
        block = block_of(machine, 7)
        machine.disk.flip_bit(log_path(block.log_id), block.offset + 4)
        await bookie.scrubber.scrub_all()
        await mend(bookie)
        assert (reports.seen, damaged(bookie), machine.index.contains(block)) == ([], 0, False)
        assert await read_all(bookie, 7, 0, 19) == (EVERYTHING, {})


async def test_a_damaged_block_stays_while_an_entry_of_it_is_nowhere_else() -> None:
    """However often it is looked at: an entry that the index lost would be denied."""
    machine = Machine()
    async with machine.bookie() as bookie:
        await filled(bookie)
        block = block_of(machine, 7)
        machine.disk.flip_bit(log_path(block.log_id), block.offset)  # all its entries
        await bookie.scrubber.scrub_all()
        held = range(block.first_entry_id, block.last_entry_id + 1)
        for entry_id in held:
            assert (await read_all(bookie, 7, entry_id, entry_id))[1] == {entry_id: Status.BAD_DIGEST}
            await added(bookie, group_of(7, entry_id, size=900), recovery=True)
            await bookie.checkpoint()
            await bookie.scrubber.damaged.look_again()
            assert machine.index.contains(block) == (entry_id < held[-1])
        assert await read_all(bookie, 7, 0, 19) == (EVERYTHING, {})


async def test_a_block_stays_when_the_others_leave_the_index_at_the_last_moment() -> None:
    """Compaction may move them between the look and the removal."""
    machine = Machine()
    async with machine.bookie() as bookie:
        await filled(bookie)
        block = flip(machine, 7)
        await bookie.scrubber.scrub_all()
        for entry_id in range(block.first_entry_id, block.last_entry_id + 1):
            await added(bookie, group_of(7, entry_id, size=900), recovery=True)
        await bookie.checkpoint()
        flush = machine.workers["flush"]
        flush.hold()
        looking = asyncio.ensure_future(bookie.scrubber.damaged.look_again())
        await settle()
        (other,) = [found for found in machine.index.overlapping(7, 7, 7) if found != block]
        machine.index.remove_blocks([other])
        flush.release()
        await looking
        assert machine.index.contains(block)
        assert (await read_all(bookie, 7, 7, 7))[1] == {7: Status.BAD_DIGEST}


@pytest.mark.parametrize("operation", range(40))
async def test_power_may_be_lost_at_any_step_of_mending(operation: int) -> None:
    """Whatever the next process finds, it denies nothing, and mends what is left."""
    machine = Machine(operation)

    async def life(bookie: Bookie) -> None:
        await filled(bookie)
        flip(machine, 7)
        machine.crash_at(operation)
        await bookie.scrubber.scrub_all()
        await added(bookie, group_of(7, 7, size=900), recovery=True)
        await bookie.checkpoint()
        await mend(bookie)
        assert damaged(bookie) == 0

    crashed = await machine.run_until_crash(life)
    assert not (crashed and operation == 39), "the sweep reaches the end of mending"
    machine.restart()
    async with machine.bookie() as bookie:
        entries, missing = await read_all(bookie, 7, 0, 19)
        assert missing.items() <= {7: Status.BAD_DIGEST}.items()
        assert entries.items() <= EVERYTHING.items()
        await bookie.scrubber.scrub_all()
        await added(bookie, group_of(7, 7, size=900), recovery=True)
        await bookie.checkpoint()
        await mend(bookie)
        assert damaged(bookie) == 0
        assert await read_all(bookie, 7, 0, 19) == (EVERYTHING, {})


async def test_a_copy_that_is_damaged_too_does_not_count() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        await filled(bookie)
        first = flip(machine, 7)
        await added(bookie, group_of(7, 7, size=900), recovery=True)
        await bookie.checkpoint()
        copy = next(block for block in machine.index.blocks() if (block.first_entry_id, block.last_entry_id) == (7, 7))
        machine.disk.flip_bit(log_path(copy.log_id), copy.offset + copy.length - 10)
        await bookie.scrubber.scrub_all()
        await mend(bookie)
        assert set(bookie.scrubber.damaged.blocks) == {first, copy}
        assert (await read_all(bookie, 7, 0, 19))[1] == {7: Status.BAD_DIGEST}


async def test_the_number_of_remembered_blocks_is_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(damaged_blocks, "MOST_DAMAGED", 2)
    machine = Machine()
    async with machine.bookie() as bookie:
        await filled(bookie)
        for entry_id in (0, 7, 13, 19):
            flip(machine, entry_id)
        for _ in range(2):
            await bookie.scrubber.scrub_all()
            assert (damaged(bookie), bookie.statistics().scrub.found) == (2, 2)
        assert caplog.text.count("block.too_many_damaged") == 1
        for entry_id in (0, 7):
            flip(machine, entry_id)
        await bookie.scrubber.damaged.look_again()
        await bookie.scrubber.scrub_all()
        assert {block.first_entry_id for block in bookie.scrubber.damaged.blocks} == {10, 19}, "no block was passed over"


async def test_a_read_that_failed_once_is_no_damage() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        reports = await filled(bookie)
        machine.disk.fail("pread", "entrylog/")
        await bookie.scrubber.scrub_all()
        assert (reports.seen, bookie.statistics().scrub.found) == ([], 0)


async def test_a_ledger_deleted_while_it_is_scrubbed_is_no_damage() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        reports = await filled(bookie)
        block = flip(machine, 7)
        await bookie.delete_ledgers([7])
        bookie.scrubber.damaged.suspect(block)
        await bookie.reclaim()
        await bookie.scrubber.scrub_all()
        assert (reports.seen, bookie.statistics().scrub.found) == ([], 0)


async def test_a_damaged_block_whose_ledger_is_deleted_is_forgotten() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        await filled(bookie)
        flip(machine, 7)
        await bookie.scrubber.scrub_all()
        await bookie.delete_ledgers([7])
        await bookie.scrubber.damaged.look_again()
        assert (damaged(bookie), bookie.statistics().scrub.mended) == (0, 0)


@pytest.mark.parametrize("told_by", ["reader", "compaction"])
async def test_damage_that_others_find_takes_the_same_way(told_by: str) -> None:
    machine = Machine()
    async with machine.bookie(scrub_period_s=0) as bookie:
        reports = await filled(bookie)
        flip(machine, 7)
        bookie.start_scrubber(reports)
        if told_by == "reader":
            await read_all(bookie, 7, 6, 6)
        else:
            bookie.on_damaged(7, 0, 19)
        await wait_until(lambda: bool(reports.seen), what="a report")
        assert reports.seen[0] == (7, [(7, 7)])
        assert bookie.statistics().scrub.blocks == 0, "nothing is walked with a period of 0"


async def test_an_outage_of_metadata_delays_the_report() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        reports = await filled(bookie)
        reports.away = True
        flip(machine, 7)
        await bookie.scrubber.scrub_all()
        assert damaged(bookie) == 1
        reports.away = False
        await mend(bookie)
        assert reports.seen[0] == (7, [(7, 7)])


async def test_damage_without_a_replica_is_counted_apart() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        reports = await filled(bookie)
        reports.outlook = Outlook.NO_REPLICA
        flip(machine, 7)
        await bookie.scrubber.scrub_all()
        assert (damaged(bookie), damaged(bookie, Outlook.NO_REPLICA)) == (0, 1)


async def test_damage_and_progress_are_known_after_a_restart() -> None:
    machine = Machine(settings=small_settings(scrub_period_s=1000.0))
    async with machine.bookie() as bookie:
        reports = await filled(bookie)
        flip(machine, 0)
        bookie.start_scrubber(reports)
        await wait_until(lambda: bool(reports.seen), what="the first pass")
    machine.restart()
    async with machine.bookie() as bookie:
        bookie.start_scrubber(Reports())
        await wait_until(lambda: damaged(bookie) == 1, what="the damage of the earlier process")
        assert bookie.statistics().scrub.blocks == 0, "that part of the pass is done"


async def test_a_damaged_progress_file_begins_the_pass_again(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        await filled(bookie)
        await bookie.scrubber.scrub_all()
    machine.disk.flip_bit("SCRUB", 12)
    machine.restart()
    async with machine.bookie() as bookie:
        await bookie.scrubber.scrub_all()
        assert bookie.statistics().scrub.blocks == len(list(machine.index.blocks()))
    assert "scrub.progress_lost" in caplog.text


async def test_a_progress_that_cannot_be_saved_stops_nothing() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        reports = await filled(bookie)
        flip(machine, 7)
        machine.disk.fail("sync", "SCRUB", errno.ENOSPC)
        await bookie.scrubber.scrub_all()
        assert reports.seen
        assert bookie.failure is None


async def test_a_failed_sync_of_the_progress_stops_the_bookie() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        await filled(bookie)
        machine.disk.fail("sync", "SCRUB")
        await bookie.scrubber.scrub_all()
        assert isinstance(bookie.failure, SyncFailedError)


async def test_a_failed_sync_of_a_removal_from_the_index_stops_the_bookie() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        await filled(bookie)
        flip(machine, 7)
        await bookie.scrubber.scrub_all()
        await added(bookie, *GROUPS[1:2], recovery=True)
        await bookie.checkpoint()
        machine.index.before_sync = fails
        with pytest.raises(SyncFailedError):
            await bookie.scrubber.damaged.look_again()
        machine.index.before_sync = lambda: None
        assert isinstance(bookie.failure, SyncFailedError)
        assert bookie.statistics().scrub.mended == 0


def fails() -> None:
    raise OSError(errno.EIO, "the disk does not answer")


@pytest.mark.deadline(100_000)
async def test_a_pass_takes_its_period_and_the_next_one_begins_with_the_next() -> None:
    period_s = 50.0
    machine = Machine(settings=small_settings(scrub_period_s=period_s, scrub_bytes_s=1 << 30))
    async with machine.bookie() as bookie:
        groups = [group_of(7, first, 64, size=8000) for first in range(0, 640, 64)]  # 5 MB: some pieces
        for group in groups:
            await added(bookie, group)
            await bookie.checkpoint()
        loop = asyncio.get_running_loop()
        bookie.start_scrubber(Reports())
        began, start_ms = loop.time(), machine.now_ms
        ends: list[float] = []
        for _ in range(2):
            blocks = len(list(machine.index.blocks())) * (len(ends) + 1)
            while bookie.statistics().scrub.blocks < blocks:
                await asyncio.sleep(0.5)
                machine.now_ms = start_ms + int(1000 * (loop.time() - began))
            ends.append(loop.time() - began)
        assert 0.5 * period_s < ends[0] < period_s
        assert period_s + 0.5 * period_s < ends[1] < 2 * period_s


async def test_the_scrubber_waits_while_others_use_the_disk_but_not_for_ever() -> None:
    machine = Machine(settings=small_settings(scrub_period_s=0.01, scrub_bytes_s=64 << 10))
    async with machine.bookie() as bookie:
        reports = await filled(bookie)
        bookie._open_reads = 1
        bookie.start_scrubber(reports)
        await asyncio.sleep(0.4)
        await settle()
        assert bookie.statistics().scrub.blocks == 0
        await asyncio.sleep(0.3)
        assert bookie.statistics().scrub.blocks > 0
        bookie._open_reads = 0


async def test_a_bookie_that_is_always_busy_is_scrubbed_within_the_period(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scrubber, "PIECE_BYTES", 1024)
    caplog.set_level(logging.INFO)
    machine = Machine(settings=small_settings(scrub_period_s=5.0))
    async with machine.bookie() as bookie:
        reports = await filled(bookie)
        bookie._open_reads = 1
        bookie.start_scrubber(reports)
        await asyncio.sleep(5.0)
        assert "scrub.pass_ended" in caplog.text
        bookie._open_reads = 0


def damage_index(monkeypatch: pytest.MonkeyPatch, machine: Machine, *ledger_ids: int) -> None:
    """From now on these ledgers cannot be read in the index; a call that comes to one of them raises, as RocksDB does."""
    index = machine.index
    record, blocks_after, find, contains = index.record, index.blocks_after, index.find, index.contains

    def damaged() -> IndexCorruptError:
        error = IndexCorruptError("the block index /data/index is damaged: Corruption: block checksum mismatch")
        index.damage = index.damage or error
        index.on_damage(error)
        return error

    def broken_record(ledger_id: int) -> LedgerRecord | None:
        if ledger_id in ledger_ids:
            raise damaged()
        return record(ledger_id)

    def broken_find(ledger_id: int, first: int, last: int, max_blocks: int) -> list[BlockRef]:
        if ledger_id in ledger_ids:
            raise damaged()
        return find(ledger_id, first, last, max_blocks)

    def broken_contains(block: BlockRef) -> bool:
        if block.ledger_id in ledger_ids:
            raise damaged()
        return contains(block)

    def broken_walk(last: BlockRef | None, limit: int) -> list[BlockRef]:
        found = blocks_after(last, limit)
        if any(block.ledger_id in ledger_ids for block in found):
            raise damaged()
        return found

    for broken in (broken_record, broken_find, broken_contains):
        monkeypatch.setattr(index, broken.__name__.removeprefix("broken_"), broken)
    monkeypatch.setattr(index, "blocks_after", broken_walk)


async def test_a_damaged_index_makes_the_bookie_read_only_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        await added(bookie, *GROUPS, group_of(8, 0))
        await bookie.checkpoint()
        damage_index(monkeypatch, machine, 7)
        assert set((await read_all(bookie, 7, 0, 19))[1].values()) == {Status.IO_ERROR}
        await settle()
        assert bookie.read_only_reason.startswith("its block index is damaged: stop it and make a new index with")
        assert bookie.is_unfit, "not registered, so that what it holds is repaired elsewhere"
        assert (await read_all(bookie, 8, 0, 0)) == (entries_of([group_of(8, 0)]), {})
        assert caplog.text.count("bookie.index_damaged") == 1


async def test_a_pass_goes_on_after_a_damaged_part_of_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        for ledger_id in range(5, 40):
            await added(bookie, group_of(ledger_id, 0))
        await filled(bookie)
        damage_index(monkeypatch, machine, 10, 11, 12)
        before = len(list(machine.index.blocks()))
        await bookie.scrubber.scrub_all()
        assert before - 8 < bookie.statistics().scrub.blocks < before, "at most as many again as are damaged are passed over"


async def test_what_is_suspected_in_a_damaged_part_of_the_index_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        await added(bookie, group_of(8, 0))
        await filled(bookie)
        lost = next(block for block in machine.index.blocks() if block.ledger_id == 8)
        flip(machine, 7)
        damage_index(monkeypatch, machine, 8)
        bookie.scrubber.damaged.suspect(lost)
        bookie.on_damaged(7, 7, 7)
        await bookie.scrubber.damaged.look_at_suspects()
        assert damaged(bookie) == 1
