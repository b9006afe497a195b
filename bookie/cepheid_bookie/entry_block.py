"""Format of a block: a run of consecutive entries of one ledger, without gaps. Little-endian.

0   4  magic "CPBK"
4   4  CRC32C of everything after it
8   8  ledger id
16  8  first entry id
24  4  entries n
28  4  bytes of data
32  4n end of each entry in the data
..     data: the entries as they were sent (`cepheid_rpc.entry_group`)

Scans get blocks in this format (`cepheid_rpc.scan_protocol`): a change here changes their protocol.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

from crc32c import crc32c

from cepheid_bookie.errors import BlockCorruptError
from cepheid_rpc import BLOCK_MAGIC, Buffer, EntryGroup, MalformedGroupError, merge_groups, stored_groups

_HEADER = struct.Struct("<4sIqqII")
_BODY = struct.Struct("<qqII")
HEADER_BYTES = _HEADER.size
UNCHECKED_BYTES = 8
"""Size of the part at the beginning of a block, magic and checksum, that the checksum does not cover."""
MAX_ENTRIES = 16_384
"""Maximum entries of a block: how far a search for one id may have to step back (block_index.py, rule 2)."""


def plan_blocks(groups: Sequence[EntryGroup], block_bytes: int) -> Iterator[EntryGroup]:
    """Cut a ledger's groups (sorted by first entry id, may overlap) into blocks: each a run without gaps, no id twice.

    A block is closed at `block_bytes`, soft by one entry, and at `MAX_ENTRIES`. One copy of a repeated entry is kept:
    the bytes of an entry are frozen when it is first sent (entry_group.py, rule 1).
    """
    run: list[EntryGroup] = []
    size = count = 0
    next_id = -1
    for group in groups:
        if group.last_entry_id < next_id:
            continue
        if group.first_entry_id < next_id:
            group = group.slice(next_id, group.last_entry_id)
        for piece in _cut(group, block_bytes):
            if run and (
                piece.first_entry_id != next_id or size + len(piece.data) > block_bytes or count + len(piece) > MAX_ENTRIES
            ):
                yield merge_groups(run)
                run, size, count = [], 0, 0
            run.append(piece)
            size += len(piece.data)
            count += len(piece)
            next_id = piece.last_entry_id + 1
    if run:
        yield merge_groups(run)


def _cut(group: EntryGroup, block_bytes: int) -> Iterator[EntryGroup]:
    """Yield the group in pieces that fit a block; mostly it is one piece."""
    while len(group.data) > block_bytes or len(group) > MAX_ENTRIES:
        count = min(max(bisect_right(group.ends, block_bytes), 1), MAX_ENTRIES)
        if count == len(group):
            break
        cut = group.first_entry_id + count
        yield group.slice(group.first_entry_id, cut - 1)
        group = group.slice(cut, group.last_entry_id)
    yield group


def encode_block_to(parts: list[Buffer], group: EntryGroup) -> int:
    """Append the block's bytes to `parts`; return their number."""
    body = _BODY.pack(group.ledger_id, group.first_entry_id, len(group), len(group.data))
    ends = array("I", group.ends).tobytes()
    crc = crc32c(group.data, crc32c(ends, crc32c(body)))
    parts += (BLOCK_MAGIC + crc.to_bytes(4, "little") + body, ends, group.data)
    return HEADER_BYTES + len(ends) + len(group.data)


def uncheck_block(data: bytes) -> EntryGroup:
    """Decode a block that may be damaged. Raises BlockCorruptError only if the bounds of its entries are unknown."""
    try:
        (group,) = stored_groups(memoryview(data))
    except (MalformedGroupError, ValueError) as error:
        raise BlockCorruptError(str(error)) from error
    return group


class BlockHeader(NamedTuple):
    """The first bytes of a block, not checked."""

    magic: bytes
    crc: int
    ledger_id: int
    first_entry_id: int
    entries: int
    data_bytes: int

    @classmethod
    def decode(cls, data: Buffer) -> Self:
        """Parse the header at the start of `data`, which must have at least `HEADER_BYTES` bytes."""
        return cls(*_HEADER.unpack_from(data))


def decode_block(data: bytes) -> EntryGroup:
    """Return the entries of a block, over the same memory. Raises BlockCorruptError unless every byte is as written."""
    if len(data) < HEADER_BYTES or data[:4] != BLOCK_MAGIC:
        raise BlockCorruptError(f"no block begins here: {bytes(data[:8]).hex()}")
    _, expected, ledger_id, first_entry_id, count, size = _HEADER.unpack_from(data)
    view = memoryview(data)
    data_start = HEADER_BYTES + 4 * count
    if data_start + size != len(data) or crc32c(view[8:]) != expected:
        raise BlockCorruptError(
            f"block {ledger_id}:{first_entry_id} ({count} entries, {len(data)} bytes read) does not match its checksum",
            ledger_id=ledger_id,
            entry_id=first_entry_id,
        )
    ends = array("I")
    ends.frombytes(view[HEADER_BYTES:data_start])
    return EntryGroup(ledger_id, first_entry_id, ends, view[data_start:])
