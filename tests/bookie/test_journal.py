"""Format, writer and group commit of the journal."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
from collections.abc import Sequence
from typing import Any

import pytest

from cepheid_bookie.background_pace import BackgroundPace
from cepheid_bookie.errors import FormatVersionError
from cepheid_bookie.journal import Journal
from cepheid_bookie.journal_format import (
    ALIGNMENT,
    EntriesRecord,
    LedgerStateRecord,
    align,
    decode_records,
    decode_segment_header,
    encode_entries_to,
    encode_ledger_to,
)
from cepheid_bookie.journal_mark import START
from cepheid_bookie.journal_replay import JournalReplay
from cepheid_bookie.journal_writer import JournalPosition, JournalSpaceError, JournalWriter
from cepheid_bookie.ledger_record import LedgerRecord, decode_record, encode_record
from cepheid_rpc import Buffer
from tests.bookie.bookie_support import KEY, InlineWorker, KiB, group_of
from tests.simulation.world.node import NodeCrashed
from tests.simulation.world.sim_disk import SimDisk, SimFile


def new_disk(seed: int = 0) -> SimDisk:
    disk = SimDisk(random.Random(seed))
    disk.mkdir("journal")
    disk.sync_dir("")
    return disk


def new_writer(disk: SimDisk, start: JournalPosition = START, segment_bytes: int = 64 * KiB) -> JournalWriter:
    return JournalWriter(disk, start, segment_bytes=segment_bytes, new_nonce=lambda: disk.random.randbytes(16))


def record_of(ledger_id: int, first: int, count: int = 1, size: int = 10) -> tuple[list[Buffer], int]:
    parts: list[Buffer] = []
    return parts, encode_entries_to(parts, KEY, group_of(ledger_id, first, count, size=size))


def write(writer: JournalWriter, first: int, size: int = 10) -> JournalPosition:
    parts, bytes_ = record_of(7, first, size=size)
    return writer.write_batch(parts, bytes_, 1)


def replayed(disk: SimDisk, mark: JournalPosition = START) -> list[int]:
    records = JournalReplay(disk, mark).records()
    return [record.group.first_entry_id for record in records if isinstance(record, EntriesRecord)]


def test_records_come_back_as_they_were() -> None:
    parts: list[Buffer] = []
    group, record = group_of(7, 3, 4), LedgerRecord(KEY, fenced=True, explicit_lac=5)
    encode_entries_to(parts, KEY, group)
    encode_ledger_to(parts, 9, record)
    assert decode_records(memoryview(b"".join(parts)), 2) == [EntriesRecord(KEY, group), LedgerStateRecord(9, record)]


@pytest.mark.parametrize("place", range(0, 120, 3))
def test_a_flipped_bit_anywhere_in_a_record_is_noticed(place: int) -> None:
    parts: list[Buffer] = []
    encode_entries_to(parts, KEY, group_of(7, 3, 2))
    data = bytearray(b"".join(parts))
    data[place % len(data)] ^= 4
    assert decode_records(memoryview(data), 1) is None


def test_a_record_of_an_unknown_type_is_refused_by_name() -> None:
    parts: list[Buffer] = []
    encode_ledger_to(parts, 9, LedgerRecord(KEY))
    data = bytearray(b"".join(parts))
    data[8] = 77
    from crc32c import crc32c

    data[:4] = crc32c(data[4:]).to_bytes(4, "little")
    with pytest.raises(FormatVersionError, match="type 77"):
        decode_records(memoryview(data), 1)


def test_ledger_records_merge_and_never_take_back() -> None:
    first, second = LedgerRecord(KEY, fenced=True, explicit_lac=3), LedgerRecord(b"o" * 16, explicit_lac=1, deleted_at_ms=9)
    assert first.merge(second) == LedgerRecord(KEY, True, 3, 9)
    assert decode_record(encode_record(first)) == first
    with pytest.raises(FormatVersionError):
        decode_record(b"\x02" + encode_record(first)[1:])


def test_batches_begin_at_aligned_places_and_segments_roll() -> None:
    disk = new_disk()
    writer = new_writer(disk)
    positions = [write(writer, first, size=5_000) for first in range(20)]
    assert all(position.offset % ALIGNMENT == 0 for position in positions)
    assert [position.sequence for position in positions] == list(range(2, 22))
    assert len(disk.listdir("journal")) == len({position.segment_id for position in positions}) > 1
    assert replayed(disk) == list(range(20))
    assert replayed(disk, positions[11]) == list(range(12, 20))


def test_a_batch_larger_than_a_segment_gets_one_of_its_own() -> None:
    disk = new_disk()
    writer = new_writer(disk, segment_bytes=8 * KiB)
    for first in range(3):
        write(writer, first, size=100 * KiB)
    assert replayed(disk) == [0, 1, 2]


@pytest.mark.parametrize("full_from", range(6))
def test_a_full_disk_leaves_the_journal_usable_and_no_half_batch_in_the_way(full_from: int) -> None:
    """Whichever operation runs out of space: what was synced stays, the refused batch goes, later ones follow."""
    disk = new_disk()
    writer = new_writer(disk)
    write(writer, 0, size=40_000)
    seen = 0

    def on_operation(name: str, _: str) -> None:
        nonlocal seen
        if name in ("create", "preallocate", "pwrite", "pwritev"):
            seen += 1
            if seen > full_from:
                raise OSError(errno.ENOSPC, "no space left")

    disk.on_operation = on_operation
    refused = written = 0
    for first in range(1, 5):
        try:
            write(writer, first, size=30_000)
            written = first
        except JournalSpaceError:
            refused += 1
    assert refused
    disk.on_operation = None
    write(writer, 99, size=100)
    assert replayed(disk) == [*range(written + 1), 99]
    assert replayed(disk.power_loss()) == [*range(written + 1), 99]


class Commits:
    """A journal on a held worker, and what it reported."""

    def __init__(self, disk: SimDisk, batch_bytes: int = 8 * KiB) -> None:
        self.worker = InlineWorker(lambda: None)
        self.reports: list[tuple[list[Any], BaseException | None]] = []
        self.journal = Journal(new_writer(disk), self.worker, START, self.on_batch, BackgroundPace(KiB), batch_bytes=batch_bytes)

    def on_batch(self, completions: Sequence[Any], error: BaseException | None) -> None:
        self.reports.append((list(completions), error))

    def append(self, first: int, size: int = 10) -> None:
        self.journal.append(*record_of(7, first, size=size), first)

    async def settle(self) -> None:
        for _ in range(50):
            await asyncio.sleep(0)


async def test_what_comes_while_a_batch_is_in_flight_travels_together() -> None:
    commits = Commits(new_disk())
    commits.worker.hold()
    commits.append(0)
    await commits.settle()
    for first in range(1, 6):
        commits.append(first)
    commits.journal.append_marker("marker")
    commits.append(6)
    await commits.settle()
    assert commits.reports == []
    commits.worker.release()
    await commits.settle()
    assert commits.reports == [([0], None), ([1, 2, 3, 4, 5, "marker", 6], None)]
    assert commits.journal.idle
    assert commits.journal.queued_bytes == 0
    assert commits.journal.durable.sequence == 3


async def test_a_batch_is_bounded() -> None:
    commits = Commits(new_disk(), batch_bytes=4 * KiB)
    for first in range(10):
        commits.append(first, size=1_500)
    await commits.settle()
    assert [completions for completions, _ in commits.reports] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]


async def test_a_marker_alone_writes_nothing_and_comes_back_in_a_later_turn() -> None:
    disk = new_disk()
    commits = Commits(disk)
    commits.journal.append_marker("m")
    assert commits.reports == []
    await commits.settle()
    assert commits.reports == [(["m"], None)]
    assert disk.listdir("journal") == []


async def test_after_a_failed_sync_nothing_is_written_or_durable_any_more() -> None:
    disk = new_disk()
    commits = Commits(disk)
    commits.append(0)
    await commits.settle()
    disk.fail("sync", "journal/")
    commits.append(1)
    await commits.settle()
    commits.append(2)
    commits.journal.append_marker("m")
    await commits.settle()
    assert [completions for completions, _ in commits.reports] == [[0], [1], [2, "m"]]
    assert [error is None for _, error in commits.reports] == [True, False, False]
    assert commits.journal.durable.sequence == 2
    assert replayed(disk.power_loss()) in ([0], [0, 1])


def test_alignment_rounds_up() -> None:
    assert [align(n) for n in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]


def test_a_full_disk_that_takes_all_but_the_padding_of_a_batch_is_no_damage_after_the_next_segment() -> None:
    """The refused batch is whole on the disk, and the segment behind it begins with the same sequence: that proves no loss."""
    disk = new_disk()
    writer = new_writer(disk)
    write(writer, 0)
    written_whole = SimFile.pwritev

    def full_at_the_padding(file: SimFile, buffers: Sequence[Buffer], offset: int) -> None:
        written_whole(file, buffers[:-1], offset)
        raise OSError(errno.ENOSPC, "no space left")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimFile, "pwritev", full_at_the_padding)
        with pytest.raises(JournalSpaceError):
            write(writer, 1)
    write(writer, 2, size=100 * KiB)  # goes to a segment of its own
    assert [first for first in replayed(disk) if first != 1] == [0, 2]


def test_remains_of_refused_batches_are_overwritten_before_the_next_batch() -> None:
    """They would pass for damage of it, or of what follows it."""
    disk = new_disk()
    writer = new_writer(disk)
    end = write(writer, 0)
    for size in (30_000, 9_000):
        disk.fail("pwritev", "journal/", errno.ENOSPC)
        with pytest.raises(JournalSpaceError):
            write(writer, 1, size=size)
    disk.fail("pwrite", "journal/", errno.ENOSPC)
    with pytest.raises(JournalSpaceError):
        write(writer, 1)
    after = write(writer, 2, size=100)
    content = disk.durable_content("journal/0000000000000001.journal")
    assert after.offset == end.offset + ALIGNMENT
    assert not any(content[after.offset :])
    assert replayed(disk.power_loss()) == [0, 2]


def test_a_batch_never_makes_its_segment_longer() -> None:
    """The first one of a segment was refused, and a larger one comes next."""
    disk = new_disk()
    writer = new_writer(disk, segment_bytes=16 * KiB)
    disk.fail("pwritev", "journal/", errno.ENOSPC)
    with pytest.raises(JournalSpaceError):
        write(writer, 0)
    assert write(writer, 1, size=20 * KiB).segment_id == 2
    assert [len(content) for content in disk.durable_files().values()] == [16 * KiB, 28 * KiB]
    assert replayed(disk.power_loss()) == [1]


@pytest.mark.parametrize("operation", range(8))
@pytest.mark.parametrize("power_loss", [True, False])
def test_a_segment_that_is_named_has_its_size_and_its_header(operation: int, power_loss: bool) -> None:
    for seed in range(5):
        disk = new_disk(seed)
        disk.crash_at = disk.operations + operation
        with contextlib.suppress(NodeCrashed):
            write(new_writer(disk), 0)
        disk = disk.power_loss() if power_loss else disk.process_crash()
        replay = JournalReplay(disk, START)
        assert len(list(replay.records())) <= 1
        assert replay.report.damage is None
        for content in (disk.durable_content(path) for path in disk.durable_files() if path.endswith(".journal")):
            header = decode_segment_header(bytes(content))
            assert header is not None
            assert header.size_bytes == len(content) == 64 * KiB
