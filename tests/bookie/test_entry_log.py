"""Blocks and logs: nothing twice, nothing missing; damage is noticed and stays where it is; failed flushes leave nothing."""

from __future__ import annotations

import errno
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cepheid_bookie.entry_block import MAX_ENTRIES, decode_block, encode_block_to, plan_blocks
from cepheid_bookie.entry_log import EntryLogReader, EntryLogWriter, list_logs, log_path
from cepheid_bookie.errors import BlockCorruptError
from cepheid_bookie.write_cache import CachedLedger
from cepheid_rpc import Buffer, EntryGroup
from tests.bookie.bookie_support import KiB, group_of
from tests.simulation.world.sim_disk import SimDisk


def new_disk() -> SimDisk:
    disk = SimDisk(random.Random(1))
    disk.mkdir("entrylog")
    disk.sync_dir("")
    return disk


def new_log(disk: SimDisk, *, block_bytes: int = 4 * KiB, log_bytes: int = 64 * KiB) -> EntryLogWriter:
    return EntryLogWriter(disk, block_bytes=block_bytes, log_bytes=log_bytes)


def ledgers_of(*groups: EntryGroup) -> list[tuple[int, CachedLedger]]:
    ledgers: dict[int, CachedLedger] = {}
    for group in groups:
        ledgers.setdefault(group.ledger_id, CachedLedger()).add(group)
    return sorted(ledgers.items())


def block_of(group: EntryGroup) -> bytes:
    parts: list[Buffer] = []
    assert encode_block_to(parts, group) == sum(map(len, parts))
    return b"".join(parts)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), min_size=1, max_size=25), st.sampled_from([100, 300, 2_000]))
def test_blocks_hold_every_entry_once_without_gaps_and_within_the_size(added: list[tuple[int, int]], block_bytes: int) -> None:
    ledger = CachedLedger()
    for first, count in added:
        ledger.add(group_of(7, first, count))
    blocks = list(plan_blocks(ledger.groups, block_bytes))
    held = [entry_id for block in blocks for entry_id in range(block.first_entry_id, block.last_entry_id + 1)]
    assert held == sorted({i for first, count in added for i in range(first, first + count)})
    for block in blocks:
        block.verify()
        assert (
            len(block.data) <= block_bytes
            or len(block) == 1
            or len(block.data) - len(block.entry(block.last_entry_id)) < block_bytes
        )


def test_a_block_is_bounded_in_entries() -> None:
    blocks = list(plan_blocks([group_of(7, 0, MAX_ENTRIES + 5, size=0)], 1 << 30))
    assert [len(block) for block in blocks] == [MAX_ENTRIES, 5]


def test_a_block_comes_back_as_it_was() -> None:
    group = group_of(7, 40, 9, size=100)
    assert decode_block(block_of(group)) == group


@pytest.mark.parametrize("place", range(0, 400, 11))
def test_a_flipped_bit_anywhere_in_a_block_is_noticed(place: int) -> None:
    data = bytearray(block_of(group_of(7, 40, 3, size=100)))
    data[place % len(data)] ^= 16
    with pytest.raises(BlockCorruptError):
        decode_block(bytes(data))


@pytest.mark.parametrize("cut", [0, 3, 31, 40, 200])
def test_a_short_block_is_noticed(cut: int) -> None:
    with pytest.raises(BlockCorruptError):
        decode_block(block_of(group_of(7, 40, 3, size=100))[:cut])


def test_a_log_is_read_block_by_block() -> None:
    disk = new_disk()
    writer, reader = new_log(disk), EntryLogReader(disk, open_logs=2)
    groups = [group_of(ledger_id, 0, 20, size=500) for ledger_id in (3, 5)]
    refs = writer.append(ledgers_of(*groups))
    refs += writer.append(ledgers_of(group_of(3, 20, 2)))
    assert refs[-1].first_entry_id == 20
    assert refs[-1].offset % 4096 == 0
    assert [reader.read_block(ref).first_entry_id for ref in refs] == [ref.first_entry_id for ref in refs]
    before = [reader.read_block(ref) for ref in refs]
    survivor = EntryLogReader(disk.power_loss(), open_logs=2)  # append synced all of it
    assert [survivor.read_block(ref) for ref in refs] == before


def test_logs_roll_and_their_ids_go_up_from_the_largest_on_disk() -> None:
    disk = new_disk()
    for _ in range(3):
        writer = new_log(disk)
        refs = writer.append(ledgers_of(*[group_of(7, i * 10, 10, size=1_000) for i in range(10)]))
        writer.close()
        assert len({ref.log_id for ref in refs}) == 2
    assert list_logs(disk) == [1, 2, 3, 4, 5, 6]
    disk.unlink(log_path(2))
    assert new_log(disk).append(ledgers_of(group_of(1, 0)))[0].log_id == 7


def test_damage_is_reported_in_its_place_and_its_neighbours_are_read() -> None:
    disk = new_disk()
    writer, reader = new_log(disk), EntryLogReader(disk, open_logs=2)
    refs = [ref for i in range(4) for ref in writer.append(ledgers_of(group_of(7, i, size=300)))]
    disk.flip_bit(log_path(1), refs[1].offset + 100)
    with pytest.raises(BlockCorruptError, match=f"offset {refs[1].offset}"):
        reader.read_block(refs[1])
    assert [reader.read_block(refs[index]).first_entry_id for index in (0, 2, 3)] == [0, 2, 3]


def test_a_block_that_is_not_the_one_the_index_means_is_noticed() -> None:
    disk = new_disk()
    writer, reader = new_log(disk), EntryLogReader(disk, open_logs=2)
    ref = writer.append(ledgers_of(group_of(7, 0, 3)))[0]
    with pytest.raises(BlockCorruptError, match="the index says"):
        reader.read_block(ref._replace(ledger_id=8))


@pytest.mark.parametrize("operation", ["create", "pwrite", "pwritev", "sync", "sync_dir"])
def test_a_failed_flush_gives_its_space_back_and_the_next_one_begins_a_new_log(operation: str) -> None:
    disk = new_disk()
    writer = new_log(disk)
    kept = writer.append(ledgers_of(group_of(7, 0, 10, size=100)))
    used = disk.used_bytes()
    many = ledgers_of(*[group_of(7, i * 10, 10, size=1_000) for i in range(1, 12)])  # rolls to a second log
    disk.fail(operation, "entrylog", errno.ENOSPC)
    with pytest.raises(OSError, match="injected"):
        writer.append(many)
    assert disk.used_bytes() <= used + 4 * KiB
    refs = writer.append(many)
    assert min(ref.log_id for ref in refs) > 1
    reader = EntryLogReader(disk, open_logs=2)
    for ref in kept + refs:
        assert reader.read_block(ref).first_entry_id == ref.first_entry_id


def test_the_reader_keeps_few_logs_open_and_forgets_deleted_ones() -> None:
    disk = new_disk()
    refs = []
    for i in range(6):
        writer = new_log(disk)
        refs += writer.append(ledgers_of(group_of(7, i)))
    reader = EntryLogReader(disk, open_logs=2)
    for ref in refs + refs[::-1]:
        reader.read_block(ref)
    reader.forget(6)
    disk.unlink(log_path(6))
    with pytest.raises(FileNotFoundError):
        reader.read_block(refs[5])
    reader.close()
