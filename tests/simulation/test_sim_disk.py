"""The simulated disk loses what it may lose, and nothing else."""

from __future__ import annotations

import errno
import random

import pytest

from cepheid_bookie.disk import DirectoryInUseError
from tests.simulation.world.node import NodeCrashed
from tests.simulation.world.sim_disk import NAME_LOST, SimDisk
from tests.simulation.world.sim_medium import SECTOR_BYTES, STALE, TORN


def new_disk(seed: int = 1) -> SimDisk:
    return SimDisk(random.Random(seed))


def file_with(disk: SimDisk, path: str, data: bytes) -> None:
    """A file whose content and name are durable."""
    file = disk.open(path, create=True)
    file.pwrite(data, 0)
    file.sync()
    disk.sync_dir(".")


def content(disk: SimDisk, path: str) -> bytes:
    return disk.open(path).pread(1 << 20, 0)


def test_synced_data_under_a_synced_name_survives_power_loss() -> None:
    for seed in range(20):
        disk = new_disk(seed)
        file_with(disk, "a", b"kept")
        assert content(disk.power_loss(), "a") == b"kept"


def test_an_unsynced_write_survives_wholly_partly_by_sectors_or_not_at_all() -> None:
    old, new = b"o" * 4 * SECTOR_BYTES, b"n" * 4 * SECTOR_BYTES
    outcomes = set()
    for seed in range(60):
        disk = new_disk(seed)
        file_with(disk, "a", old)
        disk.open("a").pwrite(new, 0)
        assert content(disk, "a") == new, "the process itself reads what it wrote"
        after = content(disk.power_loss(), "a")
        sectors = [after[start : start + SECTOR_BYTES] for start in range(0, len(after), SECTOR_BYTES)]
        assert all(sector in (b"o" * SECTOR_BYTES, b"n" * SECTOR_BYTES) for sector in sectors)
        outcomes.add("".join(chr(sector[0]) for sector in sectors))
    assert {"oooo", "nnnn"} < outcomes
    assert len(outcomes) > 6, "mixtures happen"
    assert any(outcome.endswith("n") and "o" in outcome for outcome in outcomes), "also a good end behind a bad middle"


def test_sectors_are_those_of_the_file_not_of_the_write() -> None:
    for seed in range(40):
        disk = new_disk(seed)
        file_with(disk, "a", b"o" * 3 * SECTOR_BYTES)
        disk.open("a").pwrite(b"n" * SECTOR_BYTES, 300)
        after = content(disk.power_loss(), "a")
        first, second = after[300:SECTOR_BYTES], after[SECTOR_BYTES : 300 + SECTOR_BYTES]
        assert len(set(first)) == 1
        assert len(set(second)) == 1


def test_the_grown_part_of_a_file_may_show_what_lay_there_before() -> None:
    seen = set()
    for seed in range(200):
        disk = new_disk(seed)
        file_with(disk, "old", b"S" * 8 * SECTOR_BYTES)
        file_with(disk, "a", b"")
        file = disk.open("a")
        file.preallocate(4 * SECTOR_BYTES)
        file.pwrite(b"n" * SECTOR_BYTES, 3 * SECTOR_BYTES)
        seen.update(content(disk.power_loss(), "a"))
    assert seen == set(b"\x00Sn")


def test_a_name_made_without_directory_sync_may_vanish() -> None:
    survived = set()
    for seed in range(40):
        disk = new_disk(seed)
        file = disk.open("a", create=True)
        file.pwrite(b"x", 0)
        file.sync()
        survived.add(disk.power_loss().exists("a"))
    assert survived == {True, False}


def test_a_rename_without_directory_sync_may_be_undone_but_never_mixes() -> None:
    outcomes = set()
    for seed in range(60):
        disk = new_disk(seed)
        file_with(disk, "mark", b"old")
        file_with(disk, "mark.tmp", b"new")
        disk.rename("mark.tmp", "mark")
        after = disk.power_loss()
        outcomes.add((content(after, "mark"), after.exists("mark.tmp")))
    assert outcomes == {(b"old", True), (b"new", False)}


def test_a_synced_rename_stays() -> None:
    for seed in range(20):
        disk = new_disk(seed)
        file_with(disk, "mark", b"old")
        file_with(disk, "mark.tmp", b"new")
        disk.rename("mark.tmp", "mark")
        disk.sync_dir(".")
        assert content(disk.power_loss(), "mark") == b"new"


def test_an_unlink_may_be_undone() -> None:
    outcomes = set()
    for seed in range(40):
        disk = new_disk(seed)
        file_with(disk, "a", b"x")
        disk.unlink("a")
        assert not disk.exists("a")
        outcomes.add(disk.power_loss().exists("a"))
    assert outcomes == {True, False}


def test_a_directory_that_vanishes_takes_its_files_along() -> None:
    outcomes = set()
    for seed in range(40):
        disk = new_disk(seed)
        disk.mkdir("journal")
        disk.open("journal/1", create=True)
        disk.sync_dir("journal")
        after = disk.power_loss()
        outcomes.add((after.exists("journal"), after.exists("journal/1")))
    assert outcomes == {(True, True), (False, False)}


def test_a_crashed_process_leaves_all_it_wrote() -> None:
    disk = new_disk()
    disk.open("a", create=True).pwrite(b"unsynced", 0)
    after = disk.process_crash()
    assert content(after, "a") == b"unsynced"
    with pytest.raises(NodeCrashed):
        disk.open("b", create=True)
    assert not after.durable_files(), "and it is still not durable"


def test_a_crash_falls_on_any_operation_and_a_write_then_leaves_a_prefix() -> None:
    prefixes = set()
    for seed in range(60):
        disk = new_disk(seed)
        disk.crash_at = 1
        file = disk.open("a", create=True)
        with pytest.raises(NodeCrashed):
            file.pwrite(b"12345678", 0)
        with pytest.raises(NodeCrashed):
            file.pread(1, 0)
        prefixes.add(content(disk.process_crash(), "a"))
    assert prefixes == {b"12345678"[:size] for size in range(9)}


def test_a_failed_sync_loses_the_data_and_the_next_one_lies() -> None:
    disk = new_disk()
    file_with(disk, "a", b"old")
    file = disk.open("a")
    file.pwrite(b"new", 0)
    disk.fail("sync", "a")
    with pytest.raises(OSError):
        file.sync()
    file.sync()
    assert content(disk, "a") == b"new", "the page cache still shows it"
    assert content(disk.power_loss(), "a") == b"old"


def test_a_full_disk_refuses_growth_and_takes_overwrites() -> None:
    disk = SimDisk(random.Random(1), capacity_bytes=10)
    file = disk.open("a", create=True)
    file.pwrite(b"12345678", 0)
    with pytest.raises(OSError) as caught:
        file.pwrite(b"123", 8)
    assert caught.value.errno == errno.ENOSPC
    assert file.size() <= 10
    file.pwrite(b"87654321", 0)
    disk.full = True
    assert disk.free_bytes() == 0
    with pytest.raises(OSError):
        disk.open("b", create=True)


def test_a_flipped_bit_stays_flipped() -> None:
    disk = new_disk()
    file_with(disk, "a", b"\x00\x00")
    disk.flip_bit("a", 1, bit=3)
    assert content(disk, "a") == b"\x00\x08"
    assert content(disk.power_loss(), "a") == b"\x00\x08"


def test_a_medium_decays_behind_an_end_whose_cut_is_not_synced() -> None:
    """Found by seed 0x14b3cf9ce: a bookie had cut off the end of an entry log."""
    disk = new_disk()
    file_with(disk, "a", b"\x00" * 100)
    disk.open("a").truncate(10)
    disk.flip_bit("a", 50)
    assert content(disk, "a") == b"\x00" * 10
    with pytest.raises(ValueError, match="no byte 100"):
        disk.flip_bit("a", 100)


def test_injected_errors_hit_one_operation() -> None:
    disk = new_disk()
    file_with(disk, "a", b"x")
    disk.fail("pread", "a")
    with pytest.raises(OSError) as caught:
        content(disk, "a")
    assert caught.value.errno == errno.EIO
    assert content(disk, "a") == b"x"


def test_is_durable_counts_neither_unsynced_data_nor_unsynced_names() -> None:
    disk = new_disk()
    file = disk.open("a", create=True)
    file.pwrite(b"payload", 0)
    assert not disk.is_durable(b"payload")
    file.sync()
    assert not disk.is_durable(b"payload")
    disk.sync_dir(".")
    assert disk.is_durable(b"payload")


def test_behaves_like_a_directory() -> None:
    disk = new_disk()
    disk.mkdir("x/y")
    disk.open("x/y/2", create=True)
    disk.open("x/y/1", create=True)
    assert disk.listdir("x/y") == ["1", "2"]
    assert disk.listdir("") == ["x"]
    disk.unlink("x/y/1")
    with pytest.raises(FileNotFoundError):
        disk.open("x/y/1")
    with pytest.raises(FileNotFoundError):
        disk.open("nowhere/1", create=True)
    file = disk.open("x/y/2")
    file.pwritev([b"ab", b"cd"], 3)
    assert (file.size(), file.pread(10, 2)) == (7, b"\x00abcd")
    file.truncate(4)
    assert file.pread(10, 0) == b"\x00\x00\x00a"


def test_one_process_holds_the_lock_until_it_ends() -> None:
    disk = new_disk()
    disk.lock()
    with pytest.raises(DirectoryInUseError):
        disk.lock()
    disk.process_crash().lock()


def test_the_same_seed_loses_the_same() -> None:
    def run(seed: int) -> bytes:
        disk = new_disk(seed)
        file_with(disk, "a", b"o" * 4000)
        disk.open("a").pwrite(b"n" * 5000, 100)
        return content(disk.power_loss(), "a")

    assert run(5) == run(5)
    assert run(5) != run(6)


def test_a_copy_after_power_loss_leaves_the_disk_alone() -> None:
    contents = set()
    for seed in range(30):
        disk = new_disk()
        file_with(disk, "a", b"old")
        disk.open("a").pwrite(b"new", 0)
        disk.open("b", create=True)
        copy = disk.copy_after_power_loss(random.Random(seed))
        contents.add((content(copy, "a"), copy.exists("b")))
        copy.open("a").pwrite(b"xxx", 0)
        assert (content(disk, "a"), disk.exists("b")) == (b"new", True)
    assert contents == {(a, b) for a in (b"old", b"new") for b in (True, False)}


def test_a_power_loss_tells_what_it_did() -> None:
    seen: dict[str, int] = {}
    for seed in range(200):
        disk = SimDisk(random.Random(seed), sector_bytes=4096)
        disk.on_loss = lambda kind: seen.__setitem__(kind, seen.get(kind, 0) + 1)
        file_with(disk, "old", b"s" * 9000)
        file = disk.open("new", create=True)
        file.pwrite(b"n" * 3 * 4096, 0)
        disk.power_loss()
    assert set(seen) == {TORN, STALE, NAME_LOST}


def test_a_synced_disk_tells_of_no_loss() -> None:
    disk = new_disk()
    disk.on_loss = lambda kind: pytest.fail(kind)
    file_with(disk, "a", b"kept")
    disk.power_loss()


def test_large_sectors_are_lost_or_kept_as_a_whole() -> None:
    found = set()
    for seed in range(100):
        disk = SimDisk(random.Random(seed), sector_bytes=4096)
        file_with(disk, "a", b"o" * 8192)
        disk.open("a").pwrite(b"n" * 8192, 0)
        found.add(content(disk.power_loss(), "a"))
    assert found == {old * 4096 + new * 4096 for old in (b"o", b"n") for new in (b"o", b"n")}


def test_a_file_is_taken_away_and_put_back() -> None:
    disk = new_disk()
    file_with(disk, "VERSION", b"mine")
    taken = disk.take_away("VERSION")
    assert not disk.exists("VERSION")
    disk = disk.power_loss()
    assert not disk.exists("VERSION")
    disk.put_back("VERSION", taken)
    assert content(disk.power_loss(), "VERSION") == b"mine"


def test_paths_are_those_of_what_is_synced() -> None:
    disk = new_disk()
    disk.mkdir("journal")
    for name in ("journal/1", "journal/2"):
        disk.open(name, create=True).pwrite(b"x" * 100, 0)
    disk.open("journal/1").sync()
    assert (disk.durable_paths("journal"), disk.durable_paths("entrylog")) == (["journal/1"], [])
