"""Contents of an entry log, read from the file alone: for tools, and for the rebuild of a lost index.

    header (4096) │ block │ block │ zeros to 4096 │ block │ ▒ damaged ▒ │ block │ …
                    found   found                   found   LogDamage     found

Blocks are laid end to end, so the end of one is where the next begins. Damage breaks that chain in one of two ways:

    the head of the damaged block is plausible: an intact block or the end of the file follows   → the chain continues there
    anything else                                                          → search for the next intact block

Rule 1: never search inside a block whose bounds are known: data that a client stored there may look like a block.
Rule 2: a search proves nothing: the block found may be one that a client planted inside the damaged one. So such blocks
are marked (`searched`) up to the end of the file, and are not used unless an operator accepts them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from cepheid_bookie.block_index import BlockRef
from cepheid_bookie.disk import DiskFile
from cepheid_bookie.entry_block import HEADER_BYTES, MAX_ENTRIES, decode_block, uncheck_block
from cepheid_bookie.entry_log import LOG_VERSION, decode_log_header
from cepheid_bookie.errors import BlockCorruptError
from cepheid_rpc import BLOCK_MAGIC, DigestMismatchError, EntryGroup, MalformedGroupError

_ALIGNMENT = 4096  # entry_log.py, rule 2
_BLOCK_HEAD = struct.Struct("<4sIqqII")
_MAX_BLOCK_BYTES = 64 << 20
"""More than any setting allows, with its last entry. A longer length counts as damaged and is not followed."""
_SEARCH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class LogBlock:
    """A block in an entry log. If not intact, its checksum fails, and only entries that match their digests are as written."""

    ref: BlockRef
    intact: bool
    searched: bool  # rule 2


@dataclass(frozen=True, slots=True)
class LogDamage:
    """Bytes `offset..end-1`, in which no block is known."""

    offset: int
    end: int
    reason: str


def log_header_damage(file: DiskFile, log_id: int) -> LogDamage | None:
    """Return what is wrong with the header of a log, or None. Its blocks are read all the same: each has its own checksum."""
    version = decode_log_header(file.pread(_ALIGNMENT, 0), log_id)
    if version == LOG_VERSION:
        return None
    what = "is damaged" if version is None else f"says format {version}, this release reads {LOG_VERSION}"
    return LogDamage(0, min(file.size(), _ALIGNMENT), f"the header of the log {what}")


def scan_log(file: DiskFile, log_id: int) -> Iterator[LogBlock | LogDamage]:
    """Yield the blocks and damage of the log in the order of offsets. Raises OSError."""
    damaged_header = log_header_damage(file, log_id)
    if damaged_header is not None:
        yield damaged_header
    size, offset, searched = file.size(), _ALIGNMENT, False
    while offset < size:
        group, end = _block_at(file, offset, size)
        if group is not None and (not searched or _is_whole(group)):
            yield LogBlock(_ref(group, log_id, offset, end - offset), intact=True, searched=searched)
            offset = end
            continue
        if padding := _padding_at(file, offset, size):
            offset += padding
            continue
        if end and _is_followed(file, end, size):
            yield _damaged_block(file, log_id, offset, end, searched=searched)
            offset = end
            continue
        found = _search(file, offset + 1, size)
        where = "no intact block follows" if found == size else "the block found after it is not certain to be one"
        yield LogDamage(offset, found, f"no block begins here, and {where}")
        offset, searched = found, True


def sound_entries(group: EntryGroup) -> list[int]:
    """Return the ids of the entries in a damaged block that match their own digests."""
    sound = []
    for entry_id in range(group.first_entry_id, group.last_entry_id + 1):
        try:
            group.slice(entry_id, entry_id).verify()
        except (DigestMismatchError, MalformedGroupError):
            continue
        sound.append(entry_id)
    return sound


def _is_whole(group: EntryGroup) -> bool:
    """Whether every entry matches its digest. A checksum alone proves nothing if a client may have written all the bytes."""
    try:
        group.verify()
    except (DigestMismatchError, MalformedGroupError):
        return False
    return True


def _ref(group: EntryGroup, log_id: int, offset: int, length: int) -> BlockRef:
    return BlockRef(group.ledger_id, group.first_entry_id, group.last_entry_id, log_id, offset, length)


def _block_at(file: DiskFile, offset: int, size: int) -> tuple[EntryGroup | None, int]:
    """Return the intact block at `offset` and its end; without one, the end according to a plausible head, or 0."""
    head = file.pread(HEADER_BYTES, offset)
    if len(head) < HEADER_BYTES:
        return None, 0
    _, _, _, _, count, data_bytes = _BLOCK_HEAD.unpack(head)
    length = HEADER_BYTES + 4 * count + data_bytes
    if not 0 < count <= MAX_ENTRIES or length > _MAX_BLOCK_BYTES or offset + length > size:
        return None, 0
    if head[:4] != BLOCK_MAGIC:
        return None, offset + length
    try:
        group = decode_block(file.pread(length, offset))
    except BlockCorruptError:
        return None, offset + length
    return (group if min(group.ledger_id, group.first_entry_id) >= 0 else None), offset + length


def _padding_at(file: DiskFile, offset: int, size: int) -> int:
    """Return how many zeros fill the space between the end of a flush and the next multiple of 4096; 0: other data is here."""
    gap = min(-offset % _ALIGNMENT, size - offset)
    return gap if gap and not any(file.pread(gap, offset)) else 0


def _is_followed(file: DiskFile, end: int, size: int) -> bool:
    """Whether the chain of blocks continues at `end`, or the file ends there."""
    end += _padding_at(file, end, size)
    return end == size or _block_at(file, end, size)[0] is not None


def _damaged_block(file: DiskFile, log_id: int, offset: int, end: int, *, searched: bool) -> LogBlock | LogDamage:
    """Return the block if its head belongs to its entries, as their digests show."""
    try:
        group = uncheck_block(file.pread(end - offset, offset))
    except BlockCorruptError as error:
        return LogDamage(offset, end, f"a block is damaged: {error.args[0]}")
    if not sound_entries(group):
        return LogDamage(
            offset, end, f"no entry of block {group.ledger_id}:{group.first_entry_id}..{group.last_entry_id} is intact"
        )
    return LogBlock(_ref(group, log_id, offset, end - offset), intact=False, searched=searched)


def _search(file: DiskFile, start: int, size: int) -> int:
    """Return the offset of the next intact block at or after `start`, all of whose entries are intact; `size` if there is none."""
    overlap = len(BLOCK_MAGIC) - 1
    while start < size:
        chunk = file.pread(_SEARCH_BYTES + overlap, start)
        place = chunk.find(BLOCK_MAGIC)
        while place >= 0:
            group, _ = _block_at(file, start + place, size)
            if group is not None and _is_whole(group):
                return start + place
            place = chunk.find(BLOCK_MAGIC, place + 1)
        start += _SEARCH_BYTES
    return size
