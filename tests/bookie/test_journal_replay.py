"""Torn tail or damage of synced data: cut the one, refuse to start on the other. Marks."""

from __future__ import annotations

import random

import pytest

from cepheid_bookie.errors import JournalCorruptError, JournalMissingError, MarkCorruptError
from cepheid_bookie.journal_format import ALIGNMENT, segment_path
from cepheid_bookie.journal_mark import START, MarkFile
from cepheid_bookie.journal_replay import JournalReplay
from cepheid_bookie.journal_writer import JournalPosition
from tests.bookie.bookie_support import KiB
from tests.bookie.test_journal import new_disk, new_writer, replayed, write
from tests.simulation.world.node import NodeCrashed


def written(batches: int, *, size: int = 5_000, seed: int = 0):  # type: ignore[no-untyped-def]
    """A disk with that many synced batches, and the position behind each."""
    disk = new_disk(seed)
    writer = new_writer(disk)
    return disk, [write(writer, first, size=size) for first in range(batches)]


def place_of(positions: list[JournalPosition], batch: int) -> tuple[str, int]:
    """File and offset of batch number `batch` (from 0)."""
    before = positions[batch - 1] if batch else None
    at = positions[batch]
    offset = before.offset if before is not None and before.segment_id == at.segment_id else ALIGNMENT
    return segment_path(at.segment_id), offset


@pytest.mark.parametrize("seed", range(40))
def test_a_torn_last_batch_is_cut_whole(seed: int) -> None:
    """The power goes while a batch is written or synced: any subset of its sectors is there, stale bytes between them."""
    disk, _ = written(3, seed=seed)
    writer = new_writer(disk, START)
    del writer
    replay = JournalReplay(disk, START)
    assert len(list(replay.records())) == 3
    crashing = new_writer(disk, replay.report.end)
    write(crashing, 3, size=20)
    disk.crash_at = disk.operations + 1  # the write happens, the sync does not
    with pytest.raises(NodeCrashed):
        write(crashing, 4, size=20_000)
    survivor = disk.power_loss()
    assert replayed(survivor) in ([0, 1, 2, 3], [0, 1, 2, 3, 4])


@pytest.mark.parametrize("seed", range(150))
def test_power_loss_at_any_operation_keeps_what_was_synced_and_adds_nothing(seed: int) -> None:
    rng = random.Random(seed)
    disk, start, first = new_disk(seed), START, 0
    mark, below_mark = START, 0
    for _ in range(4):  # lives of the bookie
        writer = new_writer(disk, start)
        disk.crash_at = disk.operations + rng.randrange(1, 40)
        synced = first
        try:
            while True:
                write(writer, first, size=rng.choice((20, 900, 5_000, 20_000)))
                synced = first = first + 1
        except NodeCrashed:
            disk = disk.power_loss() if rng.random() < 0.7 else disk.process_crash()
        replay = JournalReplay(disk, mark)
        found = [record.group.first_entry_id for record in replay.records()]  # type: ignore[union-attr]
        assert found == list(range(below_mark, below_mark + len(found)))
        start, first = replay.report.end, below_mark + len(found)
        assert synced <= first <= synced + 1, "all that was acknowledged, and at most the batch in flight besides"
        if rng.random() < 0.5:  # a checkpoint before the next batch
            mark, below_mark = start, first


@pytest.mark.parametrize("batch", [0, 4, 8])
@pytest.mark.parametrize("where", [0, 20, 60, 4_000])
def test_damage_before_a_later_batch_stops_the_start(batch: int, where: int) -> None:
    disk, positions = written(10)
    path, offset = place_of(positions, batch)
    disk.flip_bit(path, offset + where, bit=3)
    with pytest.raises(JournalCorruptError) as caught:
        replayed(disk)
    assert (caught.value.facts["file"], caught.value.facts["offset"]) == (path, offset)
    assert "restore" in str(caught.value)


def test_zeros_in_place_of_a_synced_batch_stop_the_start() -> None:
    """What a record format without batches takes for the end of the file."""
    disk, positions = written(6)
    path, offset = place_of(positions, 2)
    disk.open(path).pwrite(bytes(8 * KiB), offset)
    with pytest.raises(JournalCorruptError, match=f"offset {offset} "):
        replayed(disk)


def test_damage_of_the_last_batch_is_a_torn_tail_only_while_no_segment_follows() -> None:
    disk, positions = written(40)
    assert positions[-1].segment_id > 2
    last_of_first = max(index for index, position in enumerate(positions) if position.segment_id == 1)
    path, offset = place_of(positions, last_of_first)
    disk.flip_bit(path, offset + 100)
    with pytest.raises(JournalCorruptError, match=f"ends at batch {last_of_first} "):
        replayed(disk)
    whole, positions = written(40)
    path, offset = place_of(positions, 39)
    whole.flip_bit(path, offset + 100)
    assert replayed(whole) == list(range(39))


@pytest.mark.parametrize("segment", [1, 2])
def test_a_damaged_segment_header_stops_the_start_if_the_segment_was_used(segment: int) -> None:
    disk, positions = written(14)
    assert positions[-1].segment_id == 2
    disk.flip_bit(segment_path(segment), 20)
    with pytest.raises(JournalCorruptError, match="offset 0"):
        replayed(disk)


def test_a_segment_that_lost_its_header_and_its_first_batch_was_used_if_any_batch_is_there() -> None:
    disk, positions = written(3)
    disk.open(segment_path(1)).pwrite(bytes(positions[0].offset), 0)
    with pytest.raises(JournalCorruptError, match="offset 0"):
        replayed(disk)


def test_a_segment_whose_creation_was_cut_is_removed() -> None:
    disk, positions = written(3)
    file = disk.open(segment_path(2), create=True)
    file.preallocate(64 * KiB)
    disk.sync_dir("journal")
    replay = JournalReplay(disk, START)
    assert len(list(replay.records())) == 3
    assert replay.report.end == positions[-1]
    assert disk.listdir("journal") == ["0000000000000001.journal"]
    write(new_writer(disk, replay.report.end), 3)
    assert replayed(disk) == [0, 1, 2, 3]


@pytest.mark.parametrize("seed", range(10))
def test_a_header_whose_sync_failed_is_on_the_disk_when_a_mark_may_point_behind_it(seed: int) -> None:
    """Seed 0x2b of the simulator: the system shows a header that no later sync writes, and a start went on from it."""
    disk = new_disk(seed)
    disk.fail("sync", "journal/")
    with pytest.raises(OSError, match="sync"):
        write(new_writer(disk), 0, size=20)
    disk = disk.process_crash()
    replay = JournalReplay(disk, START)
    assert list(replay.records()) == []
    assert replay.report.end == JournalPosition(1, 1, ALIGNMENT)
    assert list(JournalReplay(disk.power_loss(), replay.report.end).records()) == []


def test_a_missing_segment_stops_the_start() -> None:
    disk, positions = written(40)
    disk.unlink(segment_path(2))
    with pytest.raises(JournalMissingError, match=r"0000000000000002\.journal is missing"):
        replayed(disk)
    disk.unlink(segment_path(1))
    with pytest.raises(JournalMissingError, match=r"0000000000000001\.journal is missing"):
        replayed(disk, positions[2])
    assert replayed(disk, next(position for position in positions if position.segment_id == 3))  # below the mark nothing is needed


def test_a_torn_tail_stays_a_torn_tail_after_the_mark_moved_there_and_a_segment_follows() -> None:
    """The next life begins a new segment with the sequence of the batch that was cut."""
    disk, positions = written(3)
    disk.flip_bit(*place_of(positions, 2))
    replay = JournalReplay(disk, START)
    assert len(list(replay.records())) == 2
    assert replay.report.cut_offset == positions[1].offset
    write(new_writer(disk, replay.report.end), 77)
    assert replayed(disk, replay.report.end) == [77]
    assert replayed(disk) == [0, 1, 77]


@pytest.mark.parametrize("seed", range(60))
def test_power_loss_while_a_mark_is_saved_leaves_the_old_or_the_new_one(seed: int) -> None:
    disk = new_disk(seed)
    marks = [JournalPosition(10 * n, n, 4096 * n) for n in range(1, 6)]
    saved = START
    mark = MarkFile(disk)
    mark.load()
    disk.crash_at = disk.operations + random.Random(seed).randrange(0, 26)
    attempted = START
    try:
        for position in marks:
            attempted = position
            mark.save(position)
            saved = position
    except NodeCrashed:
        pass
    found = MarkFile(disk.power_loss())
    found.load()
    assert found.current in (saved, attempted)
    assert found.older <= found.current


def test_one_damaged_generation_falls_back_to_the_other_and_two_are_an_error() -> None:
    disk = new_disk()
    mark = MarkFile(disk)
    for n in (1, 2, 3):
        mark.save(JournalPosition(n, n, 4096))
    disk.flip_bit("mark.1", 20)  # generation 3
    found = MarkFile(disk)
    found.load()
    assert found.current == JournalPosition(2, 2, 4096)
    disk.flip_bit("mark.0", 20)
    with pytest.raises(MarkCorruptError):
        MarkFile(disk).load()


def test_a_mark_never_moves_back() -> None:
    mark = MarkFile(new_disk())
    mark.save(JournalPosition(5, 1, 4096))
    with pytest.raises(AssertionError):
        mark.save(JournalPosition(4, 1, 4096))
