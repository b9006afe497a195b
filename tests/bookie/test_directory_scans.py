"""What tools read of entry logs and journal segments: every block and record, and damage by its offset."""

from __future__ import annotations

from pathlib import Path

import pytest

from cepheid_bookie import RealDisk
from cepheid_bookie.entry_block import HEADER_BYTES, encode_block_to
from cepheid_bookie.entry_log import EntryLogWriter, log_path
from cepheid_bookie.entry_log_scan import LogBlock, LogDamage, scan_log
from cepheid_bookie.journal_format import BATCH_HEADER_BYTES, encode_entries_to, segment_path
from cepheid_bookie.journal_scan import FoundRecord, JournalDamage, SegmentScan
from cepheid_bookie.journal_writer import JournalPosition, JournalWriter
from cepheid_bookie.write_cache import CachedLedger
from cepheid_rpc import Buffer, EntryGroup, encode_group
from tests.bookie.bookie_support import KEY, KiB, group_of


class Log:
    """Entry log 1: blocks of ledgers 1, 2 and 3 in one flush, one of ledger 4 in the next."""

    def __init__(self, directory: Path, *flushes: list[EntryGroup]) -> None:
        disk = RealDisk(directory)
        disk.mkdir("entrylog")
        writer = EntryLogWriter(disk, block_bytes=4 * KiB, log_bytes=1 << 20)
        self.blocks = []
        for groups in flushes or ([group_of(ledger_id, 0, 5) for ledger_id in (1, 2, 3)], [group_of(4, 0, 5)]):
            self.blocks += writer.append([(group.ledger_id, cached(group)) for group in groups])
        writer.close()
        self.path = directory / log_path(1)
        self._disk = disk

    def damage(self, offset: int, content: bytes) -> None:
        data = bytearray(self.path.read_bytes())
        data[offset : offset + len(content)] = content
        self.path.write_bytes(data)

    def scan(self) -> list[LogBlock | LogDamage]:
        file = self._disk.open(log_path(1))
        try:
            return list(scan_log(file, 1))
        finally:
            file.close()

    def ledgers(self) -> list[int | str]:
        """Ledger ids of intact blocks; what else there is in words."""
        return [_short(item) for item in self.scan()]


def cached(group: EntryGroup) -> CachedLedger:
    ledger = CachedLedger()
    ledger.add(group)
    return ledger


def _short(item: LogBlock | LogDamage) -> int | str:
    if isinstance(item, LogDamage):
        return "damage"
    return f"{'' if item.intact else 'damaged '}{'searched ' if item.searched else ''}{item.ref.ledger_id}".strip()


def test_every_block_of_an_entry_log_is_found_where_the_writer_put_it(tmp_path: Path) -> None:
    log = Log(tmp_path)
    assert [item.ref for item in log.scan() if isinstance(item, LogBlock)] == log.blocks


@pytest.mark.parametrize(
    ("block", "at", "content", "found"),
    [
        (1, HEADER_BYTES + 30, b"~~", ["1", "damaged 2", "3", "4"]),  # in an entry: the others of the block are intact
        (1, 4, b"~~~~", ["1", "damaged 2", "3", "4"]),  # the checksum itself
        (1, 8, b"~", ["1", "damage", "3", "4"]),  # the ledger id: no entry is one of that ledger
        (1, 24, b"\xff\xff", ["1", "damage", "searched 3", "searched 4"]),  # the count: where the block ends is not known
        (1, 0, bytes(HEADER_BYTES), ["1", "damage", "searched 3", "searched 4"]),
        (3, 8, b"~", ["1", "2", "3", "damage"]),  # the last block of the file
    ],
)  # fmt: skip
def test_a_damaged_block_hides_no_other(tmp_path: Path, block: int, at: int, content: bytes, found: list[str]) -> None:
    log = Log(tmp_path)
    log.damage(log.blocks[block].offset + at, content)
    assert log.ledgers() == found


def test_a_block_that_a_client_stored_in_an_entry_is_found_only_by_a_search(tmp_path: Path) -> None:
    parts: list[Buffer] = []
    encode_block_to(parts, group_of(9, 0, 2))
    planted = encode_group(1, 0, -1, 0, [b"".join(parts)])
    log = Log(tmp_path, [planted, group_of(2, 0, 3)])
    assert log.ledgers() == ["1", "2"]
    log.damage(log.blocks[0].offset + 4, b"~~~~")
    assert log.ledgers() == ["damaged 1", "2"], "its bounds are known: nothing is searched for in it"
    log.damage(log.blocks[0].offset, bytes(HEADER_BYTES))
    assert log.ledgers() == ["damage", "searched 9", "searched 2"]


@pytest.mark.parametrize("planted", [group_of(-9, 0, 2), EntryGroup(9, 0, [40, 20], b"~" * 60), EntryGroup(9, 0, [60], b"~" * 60)])
def test_a_search_finds_no_block_whose_entries_are_not_intact(tmp_path: Path, planted: EntryGroup) -> None:
    parts: list[Buffer] = []
    encode_block_to(parts, planted)
    log = Log(tmp_path, [encode_group(1, 0, -1, 0, [b"".join(parts)]), group_of(2, 0, 3)])
    log.damage(log.blocks[0].offset, bytes(HEADER_BYTES))
    assert log.ledgers() == ["damage", "searched 2"]


def test_a_log_that_ends_in_the_middle_of_a_block_gives_the_blocks_before_it(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.path.write_bytes(log.path.read_bytes()[: log.blocks[3].offset + 40])
    assert log.ledgers() == ["1", "2", "3", "damage"]


def test_a_damaged_header_of_a_log_is_named_and_its_blocks_are_read(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.damage(0, b"~~")
    assert log.ledgers() == ["damage", "1", "2", "3", "4"]


class Segment:
    """Journal segment 1: batches 1 to 4, with two records each, of ledgers 1 to 4."""

    def __init__(self, directory: Path) -> None:
        disk = RealDisk(directory)
        disk.mkdir("journal")
        writer = JournalWriter(disk, JournalPosition(1, 0, 0), segment_bytes=64 * KiB, new_nonce=lambda: b"n" * 16)
        self.offsets = []  # of batches
        for ledger_id in (1, 2, 3, 4):
            parts: list[Buffer] = []
            size = sum(encode_entries_to(parts, KEY, group_of(ledger_id, 5 * part, 5)) for part in (0, 1))
            self.offsets.append(writer.write_batch(parts, size, 2).offset - 4 * KiB)
        writer.close()
        self.path = directory / segment_path(1)
        self._disk = disk

    def damage(self, offset: int, content: bytes) -> None:
        data = bytearray(self.path.read_bytes())
        data[offset : offset + len(content)] = content
        self.path.write_bytes(data)

    def scan(self, start: int = 0) -> list[FoundRecord | JournalDamage]:
        file = self._disk.open(segment_path(1))
        try:
            return list(SegmentScan(file, 1).contents(start))
        finally:
            file.close()

    def found(self, start: int = 0) -> list[int | str]:
        return [_ledger_of(item) for item in self.scan(start)]


def _ledger_of(item: FoundRecord | JournalDamage) -> int | str:
    if isinstance(item, JournalDamage):
        return "torn" if item.torn else "damaged"
    return int(item.record.group.ledger_id)  # type: ignore[union-attr]


def test_every_record_of_a_segment_is_found_and_reading_can_begin_in_the_middle(tmp_path: Path) -> None:
    segment = Segment(tmp_path)
    assert segment.found() == [1, 1, 2, 2, 3, 3, 4, 4]
    assert segment.found(segment.offsets[2]) == [3, 3, 4, 4]
    assert segment.found(segment.offsets[2] + 1) == [4, 4]
    first = segment.scan()[0]
    assert isinstance(first, FoundRecord)
    assert (first.offset, first.sequence) == (4096 + BATCH_HEADER_BYTES, 1)


@pytest.mark.parametrize(
    ("batch", "at", "content", "found"),
    [
        (1, 10, b"~", [1, 1, "damaged", 3, 3, 4, 4]),  # a batch header
        (1, 100, b"~", [1, 1, "damaged", 2, 3, 3, 4, 4]),  # a record whose end is known
        (1, BATCH_HEADER_BYTES + 4, b"\xff", [1, 1, "damaged", 3, 3, 4, 4]),  # the length of a record
        (3, 100, b"~", [1, 1, 2, 2, 3, 3, "damaged", 4]),  # the last batch, which was written whole
        (3, 512, bytes(4096 - 512), [1, 1, 2, 2, 3, 3, 4, "torn"]),  # the last batch, cut by a power loss
    ],
)  # fmt: skip
def test_damage_in_a_journal_is_named_and_what_follows_is_read(
    tmp_path: Path, batch: int, at: int, content: bytes, found: list[int | str]
) -> None:
    segment = Segment(tmp_path)
    segment.damage(segment.offsets[batch] + at, content)
    assert segment.found() == found


def test_remains_of_a_batch_below_a_later_one_are_not_a_batch(tmp_path: Path) -> None:
    """Older releases left them when a full disk had refused a batch."""
    segment = Segment(tmp_path)
    data = segment.path.read_bytes()
    segment.damage(segment.offsets[3], data[segment.offsets[1] : segment.offsets[2]])
    assert segment.found() == [1, 1, 2, 2, 3, 3, "damaged"]


def test_a_segment_without_its_header_is_read_by_the_nonce_of_its_first_batch(tmp_path: Path) -> None:
    segment = Segment(tmp_path)
    segment.damage(0, bytes(60))
    assert segment.found() == ["damaged", 1, 1, 2, 2, 3, 3, 4, 4]
    segment.damage(segment.offsets[0], b"~")
    assert segment.found() == ["damaged", "damaged"]


def test_a_segment_of_a_newer_release_is_named(tmp_path: Path) -> None:
    segment = Segment(tmp_path)
    segment.damage(8, b"\x07")
    file = RealDisk(tmp_path).open(segment_path(1))
    assert SegmentScan(file, 1).problem == "journal segment 0000000000000001 has format 7, this bookie reads 1 and 2"
    file.close()
