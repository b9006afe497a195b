"""One contract for every block index: searches are complete, keys never replace each other, batches are whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rocksdict import WriteBatch

from cepheid_bookie.block_index import BlockIndex, BlockRef
from cepheid_bookie.disk import DirectoryInUseError
from cepheid_bookie.errors import FormatVersionError, IndexCorruptError
from cepheid_bookie.ledger_record import LedgerRecord
from cepheid_bookie.memory_index import MemoryBlockIndex
from cepheid_bookie.rocks_index import RocksBlockIndex

KEY = b"k" * 16
Reopen = Callable[[], BlockIndex]


@pytest.fixture(params=["memory", "rocks"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Reopen]:
    """Gives the index; called again, closes it and opens it anew."""
    current: BlockIndex | None = None
    memory = MemoryBlockIndex()

    def opened() -> BlockIndex:
        nonlocal current
        if current is not None:
            current.close()
        if request.param == "memory":
            memory.crash()
            current = memory
        else:
            current = RocksBlockIndex(tmp_path / "index")
        return current

    yield opened
    if current is not None:
        current.close()


def ref(first: int, last: int, *, ledger: int = 7, log: int = 1, offset: int = 0) -> BlockRef:
    return BlockRef(ledger, first, last, log, offset, 100)


def ids(blocks: list[BlockRef]) -> list[tuple[int, int]]:
    return [(block.first_entry_id, block.last_entry_id) for block in blocks]


def test_blocks_that_begin_at_one_id_do_not_replace_each_other(reopen: Reopen) -> None:
    index = reopen()
    index.write([ref(0, 9, log=1)], {})
    index.write([ref(0, 4, log=2)], {})  # sent again by a recovery
    for entry_id in range(10):
        assert index.find(7, entry_id, entry_id, 10), f"entry {entry_id} vanished"


def test_ledgers_are_listed_in_slices_with_their_tombstones(reopen: Reopen) -> None:
    index = reopen()
    assert (index.largest_ledger_id(), index.ledger_ids(-1, 10)) == (None, [])
    living, deleted = LedgerRecord(KEY), LedgerRecord(KEY, fenced=True, deleted_at_ms=5)
    index.write([ref(0, 9, ledger=3)], {0: living, 3: deleted, 300: living, (1 << 62): living})
    index.put_stamp(b"stamp")
    assert index.ledger_ids(-1, 2) == [(0, False), (3, True)]
    assert index.ledger_ids(3, 10) == [(300, False), (1 << 62, False)]
    assert index.ledger_ids(1 << 62, 10) == []
    assert index.largest_ledger_id() == 1 << 62


def test_a_short_block_inside_a_long_one_hides_nothing(reopen: Reopen) -> None:
    index = reopen()
    index.write([ref(0, 9, log=1), ref(5, 5, log=2)], {})
    found = index.find(7, 4, 9, 10)
    covered = {i for block in found for i in range(block.first_entry_id, block.last_entry_id + 1)}
    assert set(range(4, 10)) <= covered
    assert ids(index.find(7, 7, 7, 1)) == [(0, 9)]


def test_gaps_are_found_between_blocks_and_never_inside(reopen: Reopen) -> None:
    index = reopen()
    index.write([ref(0, 1), ref(5, 6), ref(20, 29)], {})
    assert ids(index.find(7, 0, 100, 10)) == [(0, 1), (5, 6), (20, 29)]
    assert ids(index.find(7, 2, 4, 10)) == []
    assert ids(index.find(7, 2, 5, 10)) == [(5, 6)]
    assert ids(index.find(7, 30, 1 << 62, 10)) == []
    assert ids(index.find(7, 0, 100, 2)) == [(0, 1), (5, 6)]


def test_ledgers_do_not_see_each_other(reopen: Reopen) -> None:
    index = reopen()
    index.write([ref(0, 9, ledger=6), ref(3, 4, ledger=7), ref(0, 9, ledger=8)], {})
    assert ids(index.find(7, 0, 100, 10)) == [(3, 4)]
    assert index.find(5, 0, 100, 10) == []
    assert (index.last_entry_id(6), index.last_entry_id(7), index.last_entry_id(9)) == (9, 4, -1)


def test_the_last_entry_is_the_largest_not_that_of_the_last_key(reopen: Reopen) -> None:
    index = reopen()
    index.write([ref(0, 50), ref(10, 12)], {})
    assert index.last_entry_id(7) == 50


def test_records_and_blocks_survive_and_are_listed_in_order(reopen: Reopen) -> None:
    index = reopen()
    records = {9: LedgerRecord(KEY, fenced=True), 300: LedgerRecord(KEY, explicit_lac=4), 2: LedgerRecord(KEY)}
    index.write([ref(0, 1, ledger=9), ref(0, 1, ledger=2, log=3)], records)
    index.put_stamp(b"me")
    index = reopen()
    assert list(index.records()) == [(2, records[2]), (9, records[9]), (300, records[300])]
    assert index.record(9) == records[9]
    assert index.record(10) is None
    assert [(block.ledger_id, block.log_id) for block in index.blocks()] == [(2, 3), (9, 1)]
    assert index.stamp() == b"me"


def test_deletion_takes_blocks_summary_and_record_together(reopen: Reopen) -> None:
    index = reopen()
    tombstone = LedgerRecord(KEY, fenced=True, deleted_at_ms=5)
    for ledger in (6, 7, 8):
        index.write([ref(0, 3, ledger=ledger), ref(4, 9, ledger=ledger)], {ledger: LedgerRecord(KEY)})
    index.delete_ledgers({6: None, 7: tombstone})
    index = reopen()
    assert [block.ledger_id for block in index.blocks()] == [8, 8]
    assert list(index.records()) == [(7, tombstone), (8, LedgerRecord(KEY))]
    assert index.last_entry_id(7) == -1
    index.write([ref(2, 2, ledger=7)], {})  # an id that comes back finds nothing of its past
    assert ids(index.find(7, 0, 9, 10)) == [(2, 2)]


def test_an_index_that_is_open_elsewhere_or_lacks_a_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "index"
    index = RocksBlockIndex(path)
    with pytest.raises(DirectoryInUseError, match="is in use by another process"):
        RocksBlockIndex(path)
    index.close()
    (path / "CURRENT").write_text("MANIFEST-999999\n")
    with pytest.raises(IndexCorruptError, match="is damaged: IO error: No such file"):
        RocksBlockIndex(path)


def test_many_ledgers_are_deleted_in_small_batches(tmp_path: Path) -> None:
    """A batch holds the interpreter's lock: deleting 10,000 ledgers in one would stop the loop for tens of milliseconds."""
    index = RocksBlockIndex(tmp_path / "index")
    index.write([ref(0, 9, ledger=ledger) for ledger in range(2_000)], {ledger: LedgerRecord(KEY) for ledger in range(2_000)})
    write, batches = index._write, []

    def count(batch: WriteBatch) -> None:
        batches.append(batch.len())
        write(batch)

    with mock.patch.object(index, "_write", count):
        index.delete_ledgers(dict.fromkeys(range(1_999)))
    assert max(batches) <= 503
    assert [block.ledger_id for block in index.blocks()] == [ledger for ledger, _ in index.records()] == [1_999]
    index.close()


def test_writing_the_same_block_again_changes_nothing(reopen: Reopen) -> None:
    index = reopen()
    for _ in range(2):
        index.write([ref(0, 3), ref(4, 9)], {})
    assert ids(index.find(7, 0, 9, 10)) == [(0, 3), (4, 9)]
    assert len(list(index.blocks())) == 2


def test_a_move_replaces_only_blocks_that_are_still_there(reopen: Reopen) -> None:
    """The others belong to ledgers that were deleted while they were copied."""
    index = reopen()
    index.write([ref(0, 3), ref(4, 9), ref(0, 9, ledger=8)], {8: LedgerRecord(KEY)})
    index.delete_ledgers({8: None})
    moves = [(block, block._replace(log_id=5, offset=40)) for block in (ref(0, 3), ref(0, 9, ledger=8), ref(4, 9, log=2))]
    assert index.move(moves) == 1
    index = reopen()
    assert list(index.blocks()) == [ref(0, 3, log=5, offset=40), ref(4, 9)]
    assert index.find(7, 0, 9, 10) == [ref(0, 3, log=5, offset=40), ref(4, 9)]
    assert (index.last_entry_id(7), index.last_entry_id(8)) == (9, -1)
    assert index.move(moves) == 0


@pytest.mark.parametrize("limit", [1, 2, 3, 100])
def test_a_walk_in_slices_sees_every_block_once_while_the_index_changes(reopen: Reopen, limit: int) -> None:
    index = reopen()
    blocks = [ref(first, first + 1, ledger=ledger, log=log) for ledger in (2, 300, 7) for first in (0, 2) for log in (1, 2)]
    index.write(blocks, {2: LedgerRecord(KEY)})
    seen: list[BlockRef] = []
    while len(found := index.blocks_after(seen[-1] if seen else None, limit)) == limit:
        seen += found
        if len(seen) <= limit:  # what it has passed, and what it stands on, may go
            index.move([(seen[-1], seen[-1]._replace(log_id=0))])
    assert [*seen, *found] == sorted(blocks)


def test_all_blocks_with_entries_of_a_range_are_found(reopen: Reopen) -> None:
    index = reopen()
    index.write([ref(0, 9, log=1), ref(5, 5, log=2), ref(8, 12, log=3), ref(13, 20), ref(0, 9, ledger=8)], {})
    assert ids(index.overlapping(7, 5, 12)) == [(0, 9), (5, 5), (8, 12)]
    assert ids(index.overlapping(7, 9, 9)) == [(0, 9), (8, 12)]
    assert ids(index.overlapping(7, 21, 99)) == index.overlapping(6, 0, 99) == []


def test_a_removed_block_is_gone_and_takes_no_other_along(reopen: Reopen) -> None:
    index = reopen()
    index.write([ref(0, 9, log=1), ref(0, 9, log=2), ref(10, 19)], {7: LedgerRecord(KEY)})
    index.remove_blocks([ref(0, 9, log=1)])
    index.remove_blocks([ref(0, 9, log=1), ref(0, 9, ledger=8)])  # what is not there
    index = reopen()
    assert not index.contains(ref(0, 9, log=1))
    assert index.contains(ref(0, 9, log=2))
    assert not index.contains(ref(0, 8, log=2)), "other entries at the same place are another block"
    assert ids(index.find(7, 0, 99, 10)) == [(0, 9), (10, 19)]
    index.remove_blocks([ref(10, 19)])
    assert ids(index.find(7, 0, 99, 10)) == [(0, 9)], "though the summary knows of larger ids"


def test_a_walk_in_slices_sees_every_block_also_when_its_place_was_removed(reopen: Reopen) -> None:
    index = reopen()
    blocks = [ref(0, 3, ledger=6), ref(0, 3, log=1), ref(0, 3, log=2, offset=8), ref(4, 9), ref(0, 3, ledger=9)]
    index.write(blocks, {6: LedgerRecord(KEY)})
    walked: list[BlockRef] = []
    while found := index.blocks_after(walked[-1] if walked else None, 2):
        index.remove_blocks(found)
        walked += found
    assert walked == blocks


blocks_strategy = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 12)), max_size=20)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memory", "rocks"])
@given(st.lists(blocks_strategy, max_size=4), st.integers(0, 60), st.integers(0, 30), st.integers(1, 6))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
def test_a_search_finds_every_indexed_entry(
    kind: str, flushes: list[list[tuple[int, int]]], first: int, count: int, max_blocks: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        index: BlockIndex = MemoryBlockIndex() if kind == "memory" else RocksBlockIndex(Path(directory) / "index")
        held: set[int] = set()
        for log, blocks in enumerate(flushes):
            index.write([ref(start, start + n - 1, log=log, offset=i) for i, (start, n) in enumerate(blocks)], {})
            held.update(i for start, n in blocks for i in range(start, start + n))
        last = first + count
        found = index.find(7, first, last, max_blocks)
        covered = {i for block in found for i in range(block.first_entry_id, block.last_entry_id + 1)}
        until = last if len(found) < max_blocks else found[-1].last_entry_id
        asked = set(range(first, min(last, until) + 1))
        assert asked & held <= covered
        assert len(found) <= max_blocks
        assert all(a.last_entry_id < b.last_entry_id for a, b in pairwise(found)), "no block twice, in order"
        assert index.last_entry_id(7) == max(held, default=-1)
        index.close()


def test_the_memory_index_forgets_what_was_not_synced() -> None:
    index = MemoryBlockIndex()
    index.write([ref(0, 3)], {7: LedgerRecord(KEY)})

    def power_loss() -> None:
        raise RuntimeError("power")

    index.before_sync = power_loss
    with pytest.raises(RuntimeError):
        index.write([ref(4, 9)], {7: LedgerRecord(KEY, fenced=True)})
    assert index.last_entry_id(7) == 9, "visible before it is synced, as in a database"
    index.crash()
    assert (index.last_entry_id(7), index.record(7)) == (3, LedgerRecord(KEY))


def test_an_index_of_another_version_is_refused(tmp_path: Path) -> None:
    index = RocksBlockIndex(tmp_path / "index")
    index._db.put(b"V", b"\0\0\0\x63")
    index.close()
    with pytest.raises(FormatVersionError, match="format 99"):
        RocksBlockIndex(tmp_path / "index")


_WRITER = """
import sys
from cepheid_bookie.block_index import BlockRef
from cepheid_bookie.ledger_record import LedgerRecord
from cepheid_bookie.rocks_index import RocksBlockIndex
index = RocksBlockIndex(sys.argv[1])
n = 0
while True:
    records = {ledger: LedgerRecord(b"k" * 16, explicit_lac=n) for ledger in range(3)}
    index.write([BlockRef(ledger, n * 10, n * 10 + 9, n, 0, 100) for ledger in range(3)], records)
    print(n, flush=True)
    n += 1
"""


def _killed_after(path: Path, batches: int) -> Path:
    """An index whose process was killed after that many synced batches; returns the database's log, which holds them."""
    with subprocess.Popen([sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) >= batches:
                process.kill()
                break
    return max(path.glob("*.log"), key=lambda log: log.stat().st_size)


@pytest.mark.slow
def test_damage_inside_the_log_of_the_database_is_an_error_and_never_a_shorter_index(tmp_path: Path) -> None:
    """Dropped silently, the synced batches behind it would be certain noes for entries that are there, and fences undone."""
    log = _killed_after(tmp_path / "index", 20)
    data = bytearray(log.read_bytes())
    data[len(data) // 2] ^= 1
    log.write_bytes(data)
    with pytest.raises(IndexCorruptError, match="is damaged"):
        RocksBlockIndex(tmp_path / "index")


@pytest.mark.parametrize(
    "ask",
    [
        lambda index: index.find(7, 5_000, 5_100, 100),
        lambda index: list(index.blocks()),  # short, it would condemn entry logs that are alive
        lambda index: index.blocks_after(None, 1 << 20),  # likewise
        lambda index: list(index.records()),  # short, it would forget ledgers and their fences
    ],
)
def test_damage_inside_a_table_of_the_database_is_an_error_and_never_the_end_of_a_search(
    tmp_path: Path, ask: Callable[[BlockIndex], object]
) -> None:
    path = tmp_path / "index"
    index = RocksBlockIndex(path)
    index.write(
        [ref(n * 10, n * 10 + 9) for n in range(2_000)], {ledger: LedgerRecord(KEY, fenced=True) for ledger in range(2_000)}
    )
    index._db.flush(True)
    index.close()
    (table,) = path.glob("*.sst")
    data = bytearray(table.read_bytes())
    for place in range(500, len(data) * 9 // 10, 1_000):
        data[place] ^= 0x55
    table.write_bytes(data)
    index = RocksBlockIndex(path)
    with pytest.raises(Exception, match="Corruption"):
        ask(index)
    index.close()


def test_a_batch_cut_at_the_end_of_the_log_of_the_database_is_no_damage(tmp_path: Path) -> None:
    """Power went while it was written: nobody was told that it is there."""
    log = _killed_after(tmp_path / "index", 20)
    log.write_bytes(log.read_bytes()[:-30])
    index = RocksBlockIndex(tmp_path / "index")
    assert index.last_entry_id(0) >= 19 * 10 + 9
    index.close()


@pytest.mark.parametrize("after", [1, 200])
def test_rocksdb_keeps_every_batch_it_reported_through_sigkill_and_each_one_whole(tmp_path: Path, after: int) -> None:
    path = tmp_path / "index"
    process = subprocess.Popen([sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    reported = -1
    for line in process.stdout:
        reported = int(line)
        if reported >= after:
            os.kill(process.pid, signal.SIGKILL)
            break
    for line in process.stdout.read().split():
        reported = int(line)
    process.wait()
    process.stdout.close()
    index = RocksBlockIndex(path)
    lacs = {ledger: record.explicit_lac for ledger, record in index.records()}
    assert len(set(lacs.values())) == 1, "half a batch"
    assert lacs[0] in (reported, reported + 1)
    for ledger in range(3):
        assert index.last_entry_id(ledger) == lacs[0] * 10 + 9
        assert len(index.find(ledger, 0, 1 << 60, 10_000)) == lacs[0] + 1
    index.close()
