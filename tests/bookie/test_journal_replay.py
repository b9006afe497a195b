"""Torn tail or damage of synced data: cut the one, refuse to start on the other. Marks."""

from __future__ import annotations

import contextlib
import errno
import random

import pytest

from cepheid_bookie.errors import JournalCorruptError, JournalMissingError, MarkCorruptError
from cepheid_bookie.journal_format import ALIGNMENT, SegmentHeader, encode_segment_header, segment_path
from cepheid_bookie.journal_mark import START, MarkFile
from cepheid_bookie.journal_replay import JournalReplay, ReplayReport
from cepheid_bookie.journal_tail import SECTOR_BYTES
from cepheid_bookie.journal_writer import JournalPosition, JournalSpaceError
from tests.bookie.bookie_support import KiB
from tests.bookie.test_journal import new_disk, new_writer, replayed, write
from tests.simulation.world.node import NodeCrashed
from tests.simulation.world.sim_disk import SimDisk


def written(batches: int, *, size: int = 5_000, seed: int = 0):  # type: ignore[no-untyped-def]
    """A disk with that many synced batches, and the position behind each."""
    disk = new_disk(seed)
    writer = new_writer(disk)
    return disk, [write(writer, first, size=size) for first in range(batches)]


def forget_size(disk: SimDisk, segment_id: int) -> None:
    """Make a segment one of an older release, whose headers do not tell their size."""
    file = disk.open(segment_path(segment_id))
    file.pwrite(bytes(12), 48)
    file.sync()


def cut(disk: SimDisk, segment_id: int, size_bytes: int) -> None:
    """What a broken file system or an operator does to a file."""
    file = disk.open(segment_path(segment_id))
    file.truncate(size_bytes)
    file.sync()


def replay_of(disk: SimDisk, mark: JournalPosition = START) -> tuple[list[int], ReplayReport]:
    replay = JournalReplay(disk, mark)
    return [record.group.first_entry_id for record in replay.records()], replay.report  # type: ignore[union-attr]


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


@pytest.mark.parametrize("seed", range(150))
def test_crashes_after_batches_that_a_full_disk_refused_are_never_taken_for_damage(seed: int) -> None:
    rng = random.Random(seed)
    disk, start, first = new_disk(seed), START, 0
    for _ in range(4):  # lives of the bookie
        writer = new_writer(disk, start)
        disk.crash_at = disk.operations + rng.randrange(1, 40)
        synced = first
        with contextlib.suppress(NodeCrashed):
            while True:
                if rng.random() < 0.4:
                    disk.fail(rng.choice(("pwritev", "pwritev", "pwrite", "preallocate")), "journal/", errno.ENOSPC)
                with contextlib.suppress(JournalSpaceError):
                    write(writer, first, size=rng.choice((20, 900, 5_000, 20_000)))
                    synced = first = first + 1
        disk = disk.power_loss() if rng.random() < 0.6 else disk.process_crash()
        found, report = replay_of(disk)
        assert report.damage is None
        assert sorted(set(found)) == list(range(len(set(found))))
        assert synced <= len(set(found)) <= synced + 1
        start, first = report.end, len(set(found))


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


def test_damage_of_the_last_batch_of_a_segment_stops_the_start_if_the_next_segment_proves_it() -> None:
    disk, positions = written(40)
    assert positions[-1].segment_id > 2
    last_of_first = max(index for index, position in enumerate(positions) if position.segment_id == 1)
    path, offset = place_of(positions, last_of_first)
    disk.flip_bit(path, offset + 100)
    with pytest.raises(JournalCorruptError, match=f"ends at batch {last_of_first} "):
        replayed(disk)


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


def test_a_segment_whose_creation_by_an_older_release_was_cut_is_removed() -> None:
    disk, positions = written(3)
    forget_size(disk, 1)
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
    """Seed 0x2b of the simulator: the system shows a header that no later sync writes, and a start went on from it.

    Of an older release: a segment of this one gets its name after the sync of its header.
    """
    disk = new_disk(seed)
    file = disk.open(segment_path(1), create=True)
    file.preallocate(64 * KiB)
    file.pwrite(encode_segment_header(SegmentHeader(1, 1, bytes(16), 0))[:48], 0)
    disk.fail("sync", "journal/")
    with pytest.raises(OSError, match="sync"):
        file.sync()
    disk = disk.process_crash()
    replay = JournalReplay(disk, START)
    assert list(replay.records()) == []
    assert replay.report.end == JournalPosition(1, 1, ALIGNMENT)
    assert list(JournalReplay(disk.power_loss(), replay.report.end).records()) == []


@pytest.mark.parametrize("older_release", [False, True])
@pytest.mark.parametrize("size_bytes", [0, 47, 60, 4_096, 5_000, 12_288, 20_000, 64 * KiB - 1])
def test_a_segment_shorter_than_it_was_is_damaged_and_one_of_an_older_release_is_cut(size_bytes: int, older_release: bool) -> None:
    disk, positions = written(6)
    if older_release:
        forget_size(disk, 1)
    cut(disk, 1, size_bytes)
    kept = sum(position.offset <= size_bytes for position in positions)
    found, report = replay_of(disk)
    assert found[:kept] == list(range(kept))
    assert found[kept:] in ([], [kept]), "only the padding of a batch was cut"
    if size_bytes < 60:
        assert report.damage is not None, "whoever wrote it, a segment without a header may have had batches"
    elif older_release:
        assert (report.damage, report.unsized_bytes) == (None, size_bytes)
    else:
        assert report.damage is not None
        assert (report.damage.file, report.damage.offset) == (segment_path(1), report.end.offset)
        assert f"it has {size_bytes} bytes" in report.damage.proof


@pytest.mark.parametrize("older_release", [False, True])
@pytest.mark.parametrize("size_bytes", [0, 47, 60, 8_000])
def test_a_segment_that_ends_before_the_mark_is_damaged(size_bytes: int, older_release: bool) -> None:
    disk, positions = written(4)
    if older_release:
        forget_size(disk, 1)
    cut(disk, 1, size_bytes)
    found, report = replay_of(disk, positions[2])
    assert found == []
    assert report.end == positions[2]
    assert report.damage is not None


def test_a_segment_that_is_as_long_as_it_was_is_whole() -> None:
    disk, positions = written(3)
    found, report = replay_of(disk)
    assert (found, report.end) == ([0, 1, 2], positions[-1])
    assert (report.damage, report.cut_offset, report.unsized_bytes) == (None, None, None)


@pytest.mark.parametrize("where", [0, 30, 60, 4_000])
def test_a_flipped_bit_in_the_last_batch_is_damage_if_the_segment_tells_its_size(where: int) -> None:
    disk, positions = written(3)
    path, offset = place_of(positions, 2)
    disk.flip_bit(path, offset + where, bit=3)
    found, report = replay_of(disk)
    assert (found, report.end, report.cut_offset) == ([0, 1], positions[1], offset)
    assert report.damage is not None
    assert (report.damage.file, report.damage.offset) == (path, offset)
    forget_size(disk, 1)
    found, report = replay_of(disk)
    assert (found, report.cut_offset, report.damage) == ([0, 1], offset, None)


@pytest.mark.parametrize("size_bytes", [0, 10, 4_096, 8 * KiB])
def test_a_shortened_segment_that_has_a_successor_is_judged_by_it(size_bytes: int) -> None:
    """The start that found the damage began the next segment where the damaged one ended; or it proves what is missing."""
    disk, positions = written(3)
    cut(disk, 1, size_bytes)
    _, report = replay_of(disk)
    write(new_writer(disk, JournalPosition(report.end.sequence, 1, 0)), 77)
    found, again = replay_of(disk)
    assert (found[-1], again.damage) == (77, None)
    whole, positions = written(3)
    write(new_writer(whole, positions[-1]), 77)
    cut(whole, 1, size_bytes)
    with pytest.raises(JournalCorruptError, match="proves that batches up to 3 were synced"):
        replay_of(whole)


def test_a_segment_without_header_after_one_that_tells_its_size_is_damaged() -> None:
    disk, positions = written(3)
    disk.open(segment_path(2), create=True).preallocate(64 * KiB)
    disk.sync_dir("journal")
    found, report = replay_of(disk)
    assert (found, report.end) == ([0, 1, 2], positions[-1])
    assert report.damage is not None
    assert report.damage.file == segment_path(2)


def test_a_missing_segment_stops_the_start() -> None:
    disk, positions = written(40)
    disk.unlink(segment_path(2))
    with pytest.raises(JournalMissingError, match=r"0000000000000002\.journal is missing.*--accept-empty-disk"):
        replayed(disk)
    disk.unlink(segment_path(1))
    with pytest.raises(JournalMissingError, match=r"0000000000000001\.journal is missing"):
        replayed(disk, positions[2])
    assert replayed(disk, next(position for position in positions if position.segment_id == 3))  # below the mark nothing is needed


def test_a_torn_tail_stays_a_torn_tail_after_the_mark_moved_there_and_a_segment_follows() -> None:
    """The next life begins a new segment with the sequence of the batch that was cut."""
    disk, positions = written(3)
    path, offset = place_of(positions, 2)
    disk.open(path).pwrite(bytes(SECTOR_BYTES), offset + 2 * SECTOR_BYTES)
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
