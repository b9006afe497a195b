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
from cepheid_bookie.journal_scan import FoundRecord, SegmentScan
from cepheid_bookie.journal_tail import SECTOR_BYTES
from cepheid_bookie.journal_writer import JournalPosition, JournalSpaceError, JournalWriter, SpareSegments
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


class RecycledJournal:
    """A journal whose mark follows the segments, so that they are written again. `acknowledged`: first entries above the mark."""

    def __init__(self, seed: int, *, segment_bytes: int = 64 * KiB) -> None:
        self.disk = new_disk(seed)
        self.random = random.Random(seed)
        self.spares = SpareSegments(self.disk, limit=2, segment_bytes=segment_bytes)
        self.writer = JournalWriter(
            self.disk, START, segment_bytes=segment_bytes, new_nonce=lambda: self.disk.random.randbytes(16), spares=self.spares
        )
        self.mark = self.end = START
        self.acknowledged: list[int] = []
        self.next = 0

    def write(self, size: int) -> None:
        first, self.next = self.next, self.next + 1
        at = write(self.writer, first, size=size)
        self.acknowledged.append(first)
        old, self.end = self.end, at
        if old.segment_id not in (0, at.segment_id):
            self.mark, self.acknowledged = at, []
            if not self.spares.add(old.segment_id):
                self.disk.unlink(segment_path(old.segment_id))

    def write_until(self, segment_id: int, sizes: tuple[int, ...] = (10, 10, 3_000, 9_000, 30_000)) -> None:
        while self.end.segment_id < segment_id:
            self.write(self.random.choice(sizes))

    def write_over_old_batches(self) -> str:
        """Return the path of a recycled segment that has a batch with an old one behind it."""
        self.write_until(4, (10,))
        self.write(5_000)
        return segment_path(self.end.segment_id)


@pytest.mark.parametrize("seed", range(120))
def test_a_crash_in_a_recycled_segment_leaves_what_was_acknowledged_and_no_damage(seed: int) -> None:
    journal = RecycledJournal(seed)
    journal.write_until(3)
    journal.disk.crash_at = journal.disk.operations + journal.random.randrange(150)
    with contextlib.suppress(NodeCrashed):
        journal.write_until(12)
    disk = journal.disk.process_crash() if seed % 4 == 0 else journal.disk.power_loss()
    found, report = replay_of(disk, journal.mark)
    assert found in (journal.acknowledged, [*journal.acknowledged, journal.next - 1])
    assert report.damage is None


def test_old_batches_of_a_recycled_segment_are_on_the_disk_and_are_not_part_of_the_journal() -> None:
    journal = RecycledJournal(1)
    path = journal.write_over_old_batches()
    content = journal.disk.durable_content(path)
    assert any(content[start : start + 4] == b"CPB1" for start in range(journal.end.offset, len(content), ALIGNMENT))
    assert not any(content[journal.end.offset : journal.end.offset + ALIGNMENT])
    assert replay_of(journal.disk.power_loss(), journal.mark)[0] == journal.acknowledged
    scan = SegmentScan(journal.disk.power_loss().open(path), journal.end.segment_id)
    assert all(isinstance(item, FoundRecord) for item in scan.contents())


@pytest.mark.parametrize("where", [20, 60, 2_000, 5_000])
def test_a_flipped_bit_in_the_last_batch_of_a_recycled_segment_is_damage(where: int) -> None:
    journal = RecycledJournal(1)
    path = journal.write_over_old_batches()
    journal.disk.flip_bit(path, journal.end.offset - 8 * KiB + where)
    _, report = replay_of(journal.disk.power_loss(), journal.mark)
    assert report.damage is not None


def test_a_recycled_segment_that_lost_its_header_was_in_use_if_it_has_a_batch_of_its_own() -> None:
    journal = RecycledJournal(1)
    path = journal.write_over_old_batches()
    journal.disk.flip_bit(path, 20)
    with pytest.raises(JournalCorruptError, match="segment header"):
        replay_of(journal.disk.power_loss(), journal.mark)


def test_segments_are_written_again_unless_batches_are_large() -> None:
    journal = RecycledJournal(1, segment_bytes=512 * KiB)
    journal.write_until(4, (10,))
    created: list[str] = []
    journal.disk.on_operation = lambda operation, path: created.append(path) if operation == "create" else None
    journal.write_until(7, (10,))
    assert created == []
    journal.write_until(9, (150 * KiB,))
    assert len(created) == 2


def test_spare_segments_are_of_one_size_bounded_and_can_be_dropped() -> None:
    disk = new_disk()
    for segment_id in range(1, 5):
        segment_bytes = (128 if segment_id == 1 else 64) * KiB
        write(new_writer(disk, JournalPosition(1, segment_id - 1, 0), segment_bytes), 0)
    spares = SpareSegments(disk, limit=2, segment_bytes=64 * KiB)
    assert [spares.add(segment_id) for segment_id in range(1, 5)] == [False, True, True, False]
    spares.drop()
    assert disk.listdir("journal") == ["0000000000000001.journal", "0000000000000004.journal"]
    spares.keeps = False
    assert not spares.add(4)


def test_a_spare_segment_that_an_operator_deleted_is_not_missed() -> None:
    journal = RecycledJournal(1)
    journal.write_until(3, (10,))
    for name in journal.disk.listdir("journal"):
        if name.endswith(".spare"):
            journal.disk.unlink(f"journal/{name}")
    journal.write_until(4, (10,))
    assert replay_of(journal.disk.power_loss(), journal.mark)[0] == journal.acknowledged


def test_a_batch_that_does_not_fit_into_a_spare_segment_gets_one_of_its_own() -> None:
    journal = RecycledJournal(1)
    journal.write_until(4, (10,))
    spares = {name for name in journal.disk.listdir("journal") if name.endswith(".spare")}
    assert spares
    journal.write(100 * KiB)
    assert spares <= {*journal.disk.listdir("journal")}
    found, report = replay_of(journal.disk.power_loss(), journal.mark)
    assert (found, report.damage) == (journal.acknowledged, None)


@pytest.mark.parametrize("same_nonce", [True, False])
def test_a_whole_batch_of_another_life_of_the_segment_is_not_replayed(same_nonce: bool) -> None:
    """Its sequence is the one that is expected, and either the segment's nonce or its id is."""
    nonces = {True: b"n" * 16, False: b"o" * 16}
    disks = []
    for segment_id, nonce in ((1, nonces[True]), (2 if same_nonce else 1, nonces[same_nonce])):
        disk = new_disk()
        start = JournalPosition(1, segment_id - 1, 0)
        writer = JournalWriter(disk, start, segment_bytes=64 * KiB, new_nonce=lambda nonce=nonce: nonce)
        for first in range(2):
            write(writer, 10 * segment_id + first)
        disks.append((disk, writer, segment_path(segment_id)))
    (disk, _, path), (other, writer, other_path) = disks
    write(writer, 99)
    old = other.durable_content(other_path)[ALIGNMENT + 2 * ALIGNMENT :][:ALIGNMENT]
    file = disk.open(path)
    file.pwrite(bytes(old), ALIGNMENT + 2 * ALIGNMENT)
    file.sync()
    assert replay_of(disk)[0] == [10, 11]
