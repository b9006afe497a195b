"""Check that a block is as written, and find which of its entries survive. Everything here blocks: call it in a worker.

    BlockCheck     reads a block in pieces and compares checksum and header with what the index says
    assess         for a block that did not match: which entries are intact in other blocks, only in it, or nowhere on this bookie
    other_copies   intact copies of entries in other blocks of the ledger, for a reader that met a damaged block

A block that the index no longer has is not damaged: its ledger was deleted, or its entries were moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from crc32c import crc32c

from cepheid_bookie.block_index import BlockIndex, BlockRef
from cepheid_bookie.entry_block import HEADER_BYTES, UNCHECKED_BYTES, BlockHeader
from cepheid_bookie.entry_log import EntryLogReader, log_path
from cepheid_bookie.errors import BlockCorruptError
from cepheid_rpc import BLOCK_MAGIC, DigestMismatchError, EntryGroup, MalformedGroupError

Run = tuple[int, int]
"""First and last id of consecutive entries, both inclusive."""

_SEARCHED_BYTES = 16 << 20
"""Limit of bytes of other blocks that are read in search of copies."""


class BlockCheck:
    """Reads a block piece by piece, so that a large one occupies neither much memory nor the disk for long."""

    def __init__(self, block: BlockRef) -> None:
        self.block = block
        self.is_done = False
        self.error = ""  # what is wrong with the block; empty: nothing so far
        self._read_bytes = 0
        self._crc = 0
        self._header: BlockHeader | None = None

    def step(self, logs: EntryLogReader, limit_bytes: int) -> int:
        """Read the next piece of up to about `limit_bytes`; return its size. Never raises because the block is damaged."""
        block = self.block
        size = min(block.length - self._read_bytes, max(limit_bytes, HEADER_BYTES))
        try:
            piece = logs.read_once(block.log_id, size, block.offset + self._read_bytes)
        except OSError as error:
            self._finish(str(error))
            return 0
        view = memoryview(piece)
        if self._header is None:
            header = self._header = BlockHeader.decode(view)
            if problem := _contradiction(header, block):
                self._finish(problem)
                return size
            view = view[UNCHECKED_BYTES:]
        self._crc = crc32c(view, self._crc)
        self._read_bytes += size
        if self._read_bytes == block.length:
            matches = self._crc == self._header.crc
            self._finish("" if matches else f"its checksum is {self._crc:#010x}, its header says {self._header.crc:#010x}")
        return size

    def _finish(self, error: str) -> None:
        self.error, self.is_done = error, True


@dataclass(frozen=True, slots=True)
class Assessment:
    """What a second read of a block found. `error` is empty if the block is intact, or no longer in the index.

    `missing`: its entries that are intact nowhere on this bookie. `only_here`: runs that are intact in this block alone.
    `others`: intact blocks that together have all its entries; empty if they do not.
    """

    error: str = ""
    missing: list[Run] = field(default_factory=list)
    only_here: list[EntryGroup] = field(default_factory=list)
    others: list[BlockRef] = field(default_factory=list)
    master_key: bytes = b""


def assess(index: BlockIndex, logs: EntryLogReader, block: BlockRef) -> Assessment:
    """Read the block again and search for its entries. Raises the errors of the index."""
    try:
        logs.read_block(block)
        return Assessment()
    except (BlockCorruptError, OSError) as failure:
        what = failure.args[0] if isinstance(failure, BlockCorruptError) else str(failure)
        error = what.removeprefix(f"{place_of(block)}: ")
    if not index.contains(block):  # checked after the read: a log is deleted only when the index refers to none of its blocks
        return Assessment()
    gaps: list[Run] = [(block.first_entry_id, block.last_entry_id)]
    others: list[BlockRef] = []
    for other in _others(index, block, *gaps[0]):
        try:
            logs.read_block(other)
        except (BlockCorruptError, OSError):
            continue
        left = _without(gaps, [other])
        if left != gaps:
            others.append(other)
        gaps = left
    only_here = _whole_parts(logs, block, gaps)
    record = index.record(block.ledger_id)
    return Assessment(
        error,
        missing=_without(gaps, only_here),
        only_here=only_here,
        others=[] if gaps else others,
        master_key=b"" if record is None else record.master_key,
    )


def other_copies(index: BlockIndex, logs: EntryLogReader, block: BlockRef, gaps: Sequence[Run]) -> list[EntryGroup]:
    """Return intact copies of the entries in `gaps`, ascending and without overlap, from other blocks of the ledger than `block`.

    Raises the errors of the index.
    """
    found: list[EntryGroup] = []
    left = list(gaps)
    if left:
        for other in _others(index, block, left[0][0], left[-1][1]):
            parts = _whole_parts(logs, other, left)
            found += parts
            left = _without(left, parts)
            if not left:
                break
    return sorted(found, key=lambda group: group.first_entry_id)


def whole_runs(group: EntryGroup) -> Iterator[EntryGroup]:
    """Yield the entries of a group that match their own digests, as runs without gaps."""
    first, last = group.first_entry_id, group.last_entry_id
    run_first = first
    for entry_id in range(first, last + 1):
        try:
            group.slice(entry_id, entry_id).verify()
        except (DigestMismatchError, MalformedGroupError):
            if entry_id > run_first:
                yield group.slice(run_first, entry_id - 1)
            run_first = entry_id + 1
    if run_first <= last:
        yield group.slice(run_first, last)


def gaps_between(groups: Iterable[EntryGroup], first: int, last: int) -> list[Run]:
    """Return the entries of `first..last` that none of the groups has."""
    return _without([(first, last)], groups)


def place_of(block: BlockRef) -> str:
    """Return the block's file and offset, for messages."""
    return f"{log_path(block.log_id)} at offset {block.offset}"


def _contradiction(header: BlockHeader, block: BlockRef) -> str:
    """Return how a block's header differs from its index entry; empty if it does not."""
    if header.magic != BLOCK_MAGIC:
        return f"no block begins here: {header.magic.hex()}"
    entries = block.last_entry_id - block.first_entry_id + 1
    length = HEADER_BYTES + 4 * header.entries + header.data_bytes
    found = header.ledger_id, header.first_entry_id, header.entries, length
    if found == (block.ledger_id, block.first_entry_id, entries, block.length):
        return ""
    says = f"{header.ledger_id}:{header.first_entry_id} with {header.entries} entries in {length} bytes"
    return f"its header says {says}, the index {block.ledger_id}:{block.first_entry_id} with {entries} in {block.length}"


def _others(index: BlockIndex, block: BlockRef, first: int, last: int) -> Iterator[BlockRef]:
    """Yield the ledger's other blocks with entries of the range, newest first, up to a bound of bytes."""
    size = 0
    for other in sorted(
        index.overlapping(block.ledger_id, first, last), key=lambda found: (found.log_id, found.offset), reverse=True
    ):
        if other == block:
            continue
        if size and size + other.length > _SEARCHED_BYTES:
            return
        size += other.length
        yield other


def _whole_parts(logs: EntryLogReader, block: BlockRef, wanted: Sequence[Run]) -> list[EntryGroup]:
    """Return the intact ones of the wanted entries in a block that may be damaged."""
    if not wanted:
        return []
    try:
        group = logs.read_block(block, check=False)
    except (BlockCorruptError, OSError):
        return []
    parts: list[EntryGroup] = []
    for first, last in wanted:
        first, last = max(first, group.first_entry_id), min(last, group.last_entry_id)
        if first <= last:
            parts += whole_runs(group.slice(first, last))
    return parts


def _without(runs: Sequence[Run], taken: Iterable[EntryGroup | BlockRef]) -> list[Run]:
    """Return the parts of `runs` that no element of `taken` has."""
    left = list(runs)
    for part in taken:
        left = [
            (first, last)
            for run in left
            for first, last in (
                (run[0], min(run[1], part.first_entry_id - 1)),
                (max(run[0], part.last_entry_id + 1), run[1]),
            )
            if first <= last
        ]
    return left
