"""Checks of what lies on a bookie's disk, whatever the bookie thinks (S6, S7, S9): at the operations that let go of something.

    rename mark.new ──► S6: all that was promised and is below it is in synced log and index
                        S7: it does not move back, and what it points into is durable
    unlink a segment ─► S7: both marks are above it       unlink a log ──► S9: no reference to it
    or make it a spare
    now and then ─────► S9: every reference leads to a block with these entries, as they were sent

The disk model is asked, and the index for what it has synced; the formats are read here once more, from their byte tables.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from typing import Any

from crc32c import crc32c

from cepheid_bookie.block_index import BlockRef
from cepheid_ledger.master_key import master_key_of
from cepheid_metadata import LedgerMetadata
from tests.simulation.checks.history import BookieFacts, History
from tests.simulation.world.sim_disk import SimDisk
from tests.simulation.world.sim_medium import SECTOR_BYTES

_MARK = struct.Struct("<4sIQQQQ")  # journal_mark.py: magic, CRC, generation, sequence, segment id, offset
_SEGMENT = struct.Struct("<8sIIQQ16s")  # journal_format.py: magic, version, CRC, segment id, first sequence, nonce
_BATCH = struct.Struct("<4sIQQII16s")  # journal_format.py: magic, CRC, segment id, sequence, bytes, records, nonce
_BATCHES_AT = 4096  # in a segment; each begins at a multiple of it
_BLOCK = struct.Struct("<4sIqqII")  # entry_block.py: magic, CRC, ledger id, first entry id, entries, bytes of data

Mark = tuple[int, int, int]
"""Sequence, segment id, offset."""


class DiskChecks:
    """Of one bookie, over all its incarnations. `before` is told of each change of its disk that is about to happen."""

    def __init__(self, bookie_id: str, history: History) -> None:
        self._id = bookie_id
        self._history = history
        self._facts: BookieFacts = history.bookie(bookie_id)
        self.on_mark: Callable[[], None] = lambda: None  # one was written, and power loss may take it or not
        self._marking = False

    def before(self, operation: str, path: str, disks: Sequence[SimDisk], index: Any) -> None:
        if operation == "rename" and path.startswith("mark."):
            self._check_mark(disks, index)
            self._marking = True
        elif operation == "sync_dir" and self._marking:
            self._marking = False
            self.on_mark()
        elif operation == "unlink" and path.startswith("journal/"):
            self._check_segment(disks, index, path)
        elif operation == "rename" and path.endswith(".spare"):
            self._check_segment(disks, index, path.removesuffix(".spare"))
        elif operation == "unlink" and path.startswith("entrylog/"):
            self._check_log(index, path)

    def before_journal_read(self, path: str, offset: int, disks: Sequence[SimDisk]) -> None:
        """V8: a start replays what is above the mark, and of its segment looks at the header besides."""
        marks, segment_id = _marks(_files_of(disks)), _segment_id(path)
        _, marked_id, marked_offset = max(marks, default=(1, 0, 0))
        needed = segment_id > marked_id or (segment_id == marked_id and (offset >= marked_offset or offset == 0))
        self._history.check("V8", needed, lambda: f"{self._id} reads {path} at {offset}, its marks are {marks}")

    def scan(self, disks: Sequence[SimDisk], index: Any) -> None:
        """S9: every reference that is synced, by the bytes that are durable."""
        files, damaged = _files_of(disks), [path for disk in disks for path in disk.damaged_files()]
        for blocks in index._synced.blocks.values():
            for block in blocks:
                path = _log_path(block.log_id)
                why = "its log is gone" if path not in files else self._what_is_wrong(block, files[path])
                excused = path in damaged  # then a reader is given an error
                self._history.check("S9", not why or excused, lambda b=block, why=why: f"{self._id}: {b} leads nowhere: {why}")

    # -- inside ---------------------------------------------------------------------------------------------------------

    def _check_mark(self, disks: Sequence[SimDisk], index: Any) -> None:
        files = _files_of(disks)
        mark = next(filter(None, (_mark_in(disk.durable_content("mark.new")) for disk in disks)), None)
        if mark is None:
            self._history.violated("S7", f"{self._id} names a mark that power loss can take")
            return
        known = _marks(files)
        forward = all(mark >= other for other in known)
        self._history.check("S7", forward, lambda: f"{self._id} moves its mark from {known} back to {mark}")
        damaged = [path for disk in disks for path in disk.damaged_files()]
        if not any(path.startswith("journal/") for path in damaged):
            self._check_place(mark, files)
            self._check_below(mark, files, index, damaged)

    def _check_place(self, mark: Mark, files: dict[str, bytearray]) -> None:
        """S7: whoever starts from it finds its segment, which may be empty; 0 is that of a journal that was not begun."""
        segment = files.get(f"journal/{mark[1]:016x}.journal", b"")
        there = mark[1] == 0 or _was_begun(segment)
        self._history.check(
            "S7", there, lambda: f"{self._id} moves its mark to {mark}, of that segment {len(segment)} B survive a power loss"
        )

    def _check_below(self, mark: Mark, files: dict[str, bytearray], index: Any, damaged: Sequence[str]) -> None:
        """S6. What is found in log and index is not looked for again: `scan` does that."""
        history, facts = self._history, self._facts
        above = _journal_above(mark, files)
        for (ledger_id, entry_id), entry in list(facts.unindexed.items()):
            if not history.names(ledger_id, entry_id, self._id) or ledger_id <= facts.forgotten_through:
                del facts.unindexed[ledger_id, entry_id]  # nobody is owed it any more
            elif _is_indexed(ledger_id, entry_id, entry, files, index, damaged):
                del facts.unindexed[ledger_id, entry_id]
                history.check("S6", True, "")
            else:
                kept = any(entry in part for part in above)
                history.check("S6", kept, lambda e=entry_id, i=ledger_id: f"{self._id} forgets {i}:{e} by its mark {mark}")
        for ledger_id in list(facts.unrecorded_fences):
            record = history.ledgers.get(ledger_id)
            if record is None or ledger_id <= facts.forgotten_through:
                del facts.unrecorded_fences[ledger_id]
                continue
            in_index = index._synced.records.get(ledger_id)
            if in_index is not None and in_index.fenced:
                del facts.unrecorded_fences[ledger_id]
                kept = True
            else:  # journal_format.py, record type 2: ledger id; ledger_record.py: version, flags, key
                written = struct.pack("<qBB", ledger_id, 1, 1) + master_key_of(record)
                kept = any(written in part for part in above)
            history.check("S6", kept, lambda i=ledger_id: f"{self._id} forgets its fence of {i} by its mark {mark}")
        self._check_lacs(mark, above, index)

    def _check_lacs(self, mark: Mark, above: Sequence[bytearray], index: Any) -> None:
        """S6, of what idle writers told: that LAC, or a higher one of theirs."""
        history, facts = self._history, self._facts
        for ledger_id, lac in list(facts.unrecorded_lacs.items()):
            record, in_index = history.ledgers.get(ledger_id), index._synced.records.get(ledger_id)
            if record is None or ledger_id <= facts.forgotten_through:
                del facts.unrecorded_lacs[ledger_id]
                continue
            if in_index is not None and in_index.explicit_lac >= lac:
                del facts.unrecorded_lacs[ledger_id]
                kept = True
            else:
                kept = any(_explicit_lac_in(part, record) >= lac for part in above)
            history.check("S6", kept, lambda i=ledger_id, lac=lac: f"{self._id} forgets LAC {lac} of {i} by its mark {mark}")

    def _check_segment(self, disks: Sequence[SimDisk], index: Any, path: str) -> None:
        files = _files_of(disks)
        if not path.endswith(".journal") or not _was_begun(files.get(path, b"")):
            return  # batches come after it has its name, and whether it may lose that to become a spare one was asked then
        marks, segment_id = _marks(files), _segment_id(path)
        if not marks and not index._synced.records:
            return  # a decommissioned one starts over, and its journal comes last; whether it may is S2
        below = len(marks) == 2 and all(segment_id < mark[1] for mark in marks)
        self._history.check("S7", below, lambda: f"{self._id} deletes journal segment {segment_id}, its marks are {marks}")

    def _check_log(self, index: Any, path: str) -> None:
        log_id = int(path.removeprefix("entrylog/").partition(".")[0], 16)
        references = [block for content in (index._now, index._synced) for of in content.blocks.values() for block in of]
        named = [block for block in references if block.log_id == log_id]
        self._history.check("S9", not named, lambda: f"{self._id} deletes {path}, which has {named}")

    def _what_is_wrong(self, block: BlockRef, log: bytearray) -> str:
        data = bytes(log[block.offset : block.offset + block.length])
        if len(data) < _BLOCK.size:
            return f"the log ends at {len(log)}"
        magic, crc, ledger_id, first, count, size = _BLOCK.unpack_from(data)
        if magic != b"CPBK" or crc32c(memoryview(data)[8:]) != crc:
            return "no intact block is there"
        if (ledger_id, first, first + count - 1) != block[:3]:
            return f"there is {ledger_id}:{first}..{first + count - 1}"
        start = len(data) - size
        ends = struct.unpack_from(f"<{count}I", data, _BLOCK.size)
        for entry_id, (begin, end) in enumerate(zip((0, *ends), ends, strict=False), first):
            promised = self._facts.ok.get(ledger_id, {}).get(entry_id)
            if promised is not None and promised != data[start + begin : start + end]:
                return f"entry {entry_id} has other bytes than were answered OK"
        return ""


def _files_of(disks: Sequence[SimDisk]) -> dict[str, bytearray]:
    """What is certain to survive power loss, on all disks together; a name is on one of them, but for cookies."""
    return {path: content for disk in disks for path, content in disk.durable_files().items()}


def _segment_id(path: str) -> int:
    return int(path.removeprefix("journal/").partition(".")[0], 16)


def _was_begun(segment: bytes | bytearray) -> bool:
    """Its header is whole: batches may be in it."""
    if len(segment) < _SEGMENT.size:
        return False
    magic, _, crc, *_ = _SEGMENT.unpack_from(segment)
    return bool(magic == b"CPHDJRNL" and crc32c(memoryview(segment)[16 : _SEGMENT.size]) == crc)


def marked_sequence(disks: Sequence[SimDisk]) -> int:
    """V6: of the first batch that a start would replay."""
    return max((mark[0] for mark in _marks(_files_of(disks))), default=1)


def proven_batches(disks: Sequence[SimDisk]) -> list[tuple[str, int, int]]:
    """S8: path, offset and bytes of each batch that a start has to replay; the batch behind it proves that it was synced."""
    files, proven = _files_of(disks), []
    _, marked_id, marked_offset = max(_marks(files), default=(1, 0, 0))
    for path, segment in files.items():
        if path.startswith("journal/") and _was_begun(segment):
            _, _, _, segment_id, _, nonce = _SEGMENT.unpack_from(segment)
            if segment_id >= marked_id:
                batches = _batches_of(segment, segment_id, nonce, marked_offset if segment_id == marked_id else _BATCHES_AT)
                proven += [(path, offset, size) for offset, size in batches[:-1]]
    return proven


def last_segment(disks: Sequence[SimDisk]) -> str | None:
    """S8: path of the journal segment that no other one follows."""
    return max((path for path in _files_of(disks) if re.fullmatch(r"journal/\w{16}\.journal", path)), default=None)


def last_batch(disks: Sequence[SimDisk]) -> tuple[str, int, int] | None:
    """S8: path, offset and bytes of the last batch that a start has to replay, if nothing behind it proves that it was synced.

    None also for a batch with a sector of zeros: that one may pass for one that was never written.
    """
    path, files = last_segment(disks), _files_of(disks)
    if path is None or not _was_begun(files[path]):
        return None
    segment = files[path]
    _, _, _, segment_id, _, nonce = _SEGMENT.unpack_from(segment)
    _, marked_id, marked_offset = max(_marks(files), default=(1, 0, 0))
    batches = _batches_of(segment, segment_id, nonce, marked_offset if segment_id == marked_id else _BATCHES_AT)
    if segment_id < marked_id or not batches:
        return None
    offset, size = batches[-1]
    sectors = (segment[start : start + SECTOR_BYTES] for start in range(offset, offset + size, SECTOR_BYTES))
    return (path, offset, size) if all(map(any, sectors)) else None


def _batches_of(segment: bytearray, segment_id: int, nonce: bytes, offset: int) -> list[tuple[int, int]]:
    """Offset and bytes of each from there on, by the headers: the last one may be torn."""
    found: list[tuple[int, int]] = []
    while len(segment) >= offset + _BATCH.size:
        magic, crc, its_segment, _, size, _, its_nonce = _BATCH.unpack_from(segment, offset)
        intact = magic == b"CPB1" and crc32c(memoryview(segment)[offset + 8 : offset + _BATCH.size]) == crc
        if not intact or (its_segment, its_nonce) != (segment_id, nonce):
            break
        found.append((offset, _BATCH.size + size))
        offset += -(-(_BATCH.size + size) // _BATCHES_AT) * _BATCHES_AT
    return found


def logs_without_reference(disks: Sequence[SimDisk], index: Any, current_log_id: int) -> list[str]:
    """V6: space that nobody will ever read; but the log that is being written."""
    named = {_log_path(block.log_id) for blocks in index._now.blocks.values() for block in blocks}
    named.add(_log_path(current_log_id))
    there = [f"entrylog/{name}" for disk in disks if disk.exists("entrylog") for name in disk.listdir("entrylog")]
    return [path for path in there if path not in named]


def orphaned_blocks(index: Any) -> list[BlockRef]:
    """V6: blocks of ledgers that are deleted here, or that no search can find: their space never comes back."""
    now = index._now
    lost = [
        ledger_id
        for ledger_id in now.blocks
        if ledger_id not in now.summaries or ledger_id not in now.records or now.records[ledger_id].deleted
    ]
    return [block for ledger_id in lost for block in now.blocks[ledger_id]]


def lies_in(index: Any, ledger_id: int, entry_id: int, logs: Sequence[str]) -> bool:
    """Whether a block with that entry is in one of these entry logs, by the index as its process sees it."""
    blocks = index._now.blocks.get(ledger_id, ()) if logs else ()
    return any(block.first_entry_id <= entry_id <= block.last_entry_id and _log_path(block.log_id) in logs for block in blocks)


def _is_indexed(
    ledger_id: int, entry_id: int, entry: bytes, files: dict[str, bytearray], index: Any, damaged: Sequence[str]
) -> bool:
    """In a log that has decayed since, it need not be there any more: a reader is given an error, and no denial."""
    for block in reversed(index._synced.blocks.get(ledger_id, ())):
        if block.first_entry_id <= entry_id <= block.last_entry_id:
            path = _log_path(block.log_id)
            log = files.get(path, b"")
            if path in damaged or log.find(entry, block.offset, block.offset + block.length) >= 0:
                return True
    return False


def _journal_above(mark: Mark, files: dict[str, bytearray]) -> list[bytearray]:
    """What replay from this mark on would read. Behind the last batch of a segment there may be those of its earlier life."""
    parts = []
    for path, content in files.items():
        if path.startswith("journal/") and path.endswith(".journal") and _was_begun(content):
            _, _, _, segment_id, _, nonce = _SEGMENT.unpack_from(content)
            if segment_id >= mark[1]:
                start = mark[2] if segment_id == mark[1] else _BATCHES_AT
                batches = _batches_of(content, segment_id, nonce, start)
                parts.append(content[start : sum(batches[-1])] if batches else bytearray())
    return parts[::-1]


def _explicit_lac_in(journal: bytearray, record: LedgerMetadata) -> int:
    """The highest; -1: none. journal_format.py, record type 2: ledger id; ledger_record.py: version, flags, key, LAC."""
    head, key = struct.pack("<qB", record.ledger_id, 1), master_key_of(record)
    found = re.finditer(re.escape(head) + b"." + re.escape(key) + b"(.{8})", journal, re.DOTALL)
    return max((int.from_bytes(each[1], "big", signed=True) for each in found), default=-1)


def _marks(files: dict[str, bytearray]) -> list[Mark]:
    found = [_mark_in(files.get(name, b"")) for name in ("mark.0", "mark.1")]
    return [mark for mark in found if mark is not None]


def _mark_in(data: bytes | bytearray) -> Mark | None:
    if len(data) < _MARK.size:
        return None
    magic, crc, _, *mark = _MARK.unpack_from(data)
    intact = magic == b"CPM1" and crc32c(memoryview(data)[8 : _MARK.size]) == crc
    return (mark[0], mark[1], mark[2]) if intact else None


def _log_path(log_id: int) -> str:
    return f"entrylog/{log_id:08x}.log"
