"""Runs of consecutive entries of one ledger in one buffer, as they are sent and stored.

    ledger 7, entries 40..42      data = │header 40│payload 40│header 41│payload 41│header 42│payload 42│
                                  ends =                      ▲                    ▲                    ▲

Header of an entry, 36 bytes, big-endian (its own format; the fields are those of BookKeeper's DigestManager):

    offset  size  field
    0       8     ledger id
    8       8     entry id
    16      8     LAC when the entry was first sent (signed, -1 = none): always below the entry id
    24      8     length: sum of the payload bytes of the ledger up to and including this entry
    32      4     CRC32C over bytes 0..31 and the payload

Rule 1: the bytes of an entry are frozen when it is first sent; resends, recovery and repair copy them unchanged.
Rule 2: code that takes a group from the network or a disk verifies it before trusting it.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from crc32c import crc32c

from cepheid_ports import CepheidError

Buffer: TypeAlias = bytes | bytearray | memoryview

HEADER_BYTES = 36
_FIELDS = struct.Struct(">qqqq")
_HEADER = struct.Struct(">qqqqI")
_DIGEST = struct.Struct(">I")
NO_ENTRY_ID = -1
_MAX_ENTRY_ID = (1 << 63) - 1  # limit of a signed 8-byte field: larger ids from a peer could not be answered


class DigestMismatchError(CepheidError):
    """An entry differs from what its writer sent: a bad replica or a transmission error, never "no such entry"."""

    hint = "another replica of the entry should be read"


class MalformedGroupError(CepheidError):
    """Bytes are not a group of entries."""

    hint = "the peer runs another version, or the bytes were damaged in transit"


@dataclass(frozen=True, slots=True)
class EntryHeader:
    ledger_id: int
    entry_id: int
    last_add_confirmed: int
    length: int
    digest: int


class EntryGroup:
    """Entries `first_entry_id .. last_entry_id` (at least one) of one ledger. Must not be changed.

    `ends[i]` is the offset in `data` after entry `first_entry_id + i`; `data` may be a view into a larger buffer. `derived` is
    what a reader computed from the bytes, for the next reader of this object; it is never sent or compared.
    """

    __slots__ = ("data", "derived", "ends", "first_entry_id", "ledger_id")

    def __init__(self, ledger_id: int, first_entry_id: int, ends: Sequence[int], data: Buffer) -> None:
        self.ledger_id = ledger_id
        self.first_entry_id = first_entry_id
        self.ends = ends
        self.data = data
        self.derived: object = None

    def __repr__(self) -> str:
        return f"<EntryGroup {self.ledger_id}:{self.first_entry_id}..{self.last_entry_id}, {self.size_bytes} B>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EntryGroup):
            return NotImplemented
        return (
            (self.ledger_id, self.first_entry_id) == (other.ledger_id, other.first_entry_id)
            and list(self.ends) == list(other.ends)
            and bytes(self.data) == bytes(other.data)
        )

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self.ends)

    @property
    def last_entry_id(self) -> int:
        return self.first_entry_id + len(self.ends) - 1

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    def _start(self, index: int) -> int:
        return self.ends[index - 1] if index else 0

    def entry(self, entry_id: int) -> memoryview:
        """Return header and payload of one entry of the group."""
        index = entry_id - self.first_entry_id
        return memoryview(self.data)[self._start(index) : self.ends[index]]

    def payload(self, entry_id: int) -> memoryview:
        index = entry_id - self.first_entry_id
        return memoryview(self.data)[self._start(index) + HEADER_BYTES : self.ends[index]]

    def payloads(self) -> Iterator[memoryview]:
        """Yield every payload, in order; cheaper than one call for each."""
        view, start = memoryview(self.data), HEADER_BYTES
        for end in self.ends:
            yield view[start:end]
            start = end + HEADER_BYTES

    def header(self, entry_id: int) -> EntryHeader:
        return EntryHeader(*_HEADER.unpack_from(self.data, self._start(entry_id - self.first_entry_id)))

    def slice(self, first_entry_id: int, last_entry_id: int) -> EntryGroup:
        """Return the entries `first_entry_id..last_entry_id` (inclusive, inside the group) over the same memory."""
        first, last = first_entry_id - self.first_entry_id, last_entry_id - self.first_entry_id
        assert 0 <= first <= last < len(self.ends), f"{first_entry_id}..{last_entry_id} outside {self!r}"
        if first == 0 and last == len(self.ends) - 1:
            return self
        start = self._start(first)
        ends = self.ends[first : last + 1] if start == 0 else array("I", [end - start for end in self.ends[first : last + 1]])
        return EntryGroup(self.ledger_id, first_entry_id, ends, memoryview(self.data)[start : self.ends[last]])

    def verify(self) -> None:
        """Raise DigestMismatchError at the first entry with wrong ids or a wrong digest."""
        view, start, expected_id = memoryview(self.data), 0, self.first_entry_id
        for end in self.ends:
            if end - start < HEADER_BYTES:
                raise MalformedGroupError(f"entry {expected_id} of ledger {self.ledger_id} is {end - start} bytes long")
            ledger_id, entry_id, _, _, digest = _HEADER.unpack_from(view, start)
            actual = crc32c(view[start + HEADER_BYTES : end], crc32c(view[start : start + 32]))
            if actual != digest or entry_id != expected_id or ledger_id != self.ledger_id:
                raise DigestMismatchError(
                    f"entry {self.ledger_id}:{expected_id} is damaged: its header has {ledger_id}:{entry_id}, "
                    f"crc {actual:#010x}, expected {digest:#010x}",
                    ledger_id=self.ledger_id,
                    entry_id=expected_id,
                )
            start, expected_id = end, expected_id + 1
        if start != len(view):
            raise MalformedGroupError(f"{len(view) - start} bytes follow the last entry of {self!r}")


def encode_group(
    ledger_id: int, first_entry_id: int, last_add_confirmed: int, length_before: int, payloads: Iterable[Buffer]
) -> EntryGroup:
    """Encode payloads as entries `first_entry_id`, … (ids without gaps) in one new buffer.

    `length_before` is the ledger's length in payload bytes up to the entry before; the group's last header holds the new one.
    """
    parts: list[Buffer] = []
    ends: list[int] = []
    entry_id, length, end = first_entry_id, length_before, 0
    pack, pack_digest = _FIELDS.pack, _DIGEST.pack
    for payload in payloads:
        size = len(payload)
        length += size
        end += HEADER_BYTES + size
        fields = pack(ledger_id, entry_id, last_add_confirmed, length)
        parts += (fields, pack_digest(crc32c(payload, crc32c(fields))), payload)
        ends.append(end)
        entry_id += 1
    assert ends, "a group has at least one entry"
    # An array, as in `decode_group`: caches hold tens of thousands of groups, and each list there would be one more object for
    # the garbage collector to visit while the loop stands still.
    return EntryGroup(ledger_id, first_entry_id, array("I", ends), b"".join(parts))


def merge_groups(groups: Sequence[EntryGroup]) -> EntryGroup:
    """Return one group of adjacent groups of one ledger, in a new buffer."""
    if len(groups) == 1:
        return groups[0]
    ends: list[int] = []
    base = 0
    for group in groups:
        assert not ends or group.first_entry_id == groups[0].first_entry_id + len(ends), "groups are not adjacent"
        ends.extend(base + end for end in group.ends)
        base += len(group.data)
    return EntryGroup(groups[0].ledger_id, groups[0].first_entry_id, array("I", ends), b"".join([group.data for group in groups]))


_GROUP_HEADER = struct.Struct("<qqII")


def encode_group_to(parts: list[Buffer], group: EntryGroup) -> int:
    """Append a group's bytes to `parts` for `b"".join`; return how many bytes that is.

    Layout, little-endian: ledger id (8), first entry id (8), entries n (4), data bytes (4), n ends (4 each), data.
    """
    ends = array("I", group.ends)
    size = len(group.data)
    parts += (_GROUP_HEADER.pack(group.ledger_id, group.first_entry_id, len(ends), size), ends.tobytes(), group.data)
    return _GROUP_HEADER.size + 4 * len(ends) + size


def decode_group(view: memoryview, offset: int) -> tuple[EntryGroup, int]:
    """Return the group at `offset` of `view` (over the same memory) and the offset after it.

    Raises MalformedGroupError if the sizes do not match. Does not verify digests: `EntryGroup.verify` does.
    """
    try:
        ledger_id, first_entry_id, count, size = _GROUP_HEADER.unpack_from(view, offset)
    except struct.error:
        raise MalformedGroupError(f"a group header is cut off at {len(view) - offset} bytes") from None
    data_start = offset + _GROUP_HEADER.size + 4 * count
    if count == 0 or data_start + size > len(view) or ledger_id < 0 or not 0 <= first_entry_id <= _MAX_ENTRY_ID - count:
        raise MalformedGroupError(f"group of {count} entries in {size} bytes does not fit in {len(view) - offset} bytes")
    ends = array("I")
    ends.frombytes(view[data_start - 4 * count : data_start])
    if ends[-1] != size or any(map(int.__ge__, ends[:-1], ends[1:])) or ends[0] < HEADER_BYTES:
        raise MalformedGroupError(f"the entry ends of group {ledger_id}:{first_entry_id} do not rise to {size}")
    return EntryGroup(ledger_id, first_entry_id, ends, view[data_start : data_start + size]), data_start + size
