"""Stored entries of one ledger in one buffer, and their metadata as columns.

    │header 36│ 0x0e02 │size│broker's│ 0x0e01 │crc│ size │ MessageMetadata │ payload │header 36│ …
               └─ optional ────────┘ └ optional ┘

The header is the bookies' (cepheid_rpc). The broker's part is skipped. The checksum was verified when the message was published,
and since then the digest of the entry covers it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cepheid_decode.decode_fields import Bools, Bytes, FieldTable, Ints, big_endian_32
from cepheid_decode.decode_payloads import joined
from cepheid_decode.decode_records import MESSAGE_METADATA, Properties, parse_records
from cepheid_rpc import HEADER_BYTES, EntryGroup

PRODUCER_NAME, SEQUENCE_ID, PUBLISH_TIME, PROPERTIES, REPLICATED_FROM, PARTITION_KEY = 1, 2, 3, 4, 5, 6
COMPRESSION, UNCOMPRESSED_SIZE, NUM_MESSAGES, EVENT_TIME, ENCRYPTION_KEYS, SCHEMA_VERSION = 8, 9, 11, 12, 13, 16
KEY_IS_BASE64, ORDERING_KEY, MARKER_TYPE, TRANSACTION, NULL_VALUE = 17, 18, 20, 22, 25
UUID, NUM_CHUNKS, CHUNKED_BYTES, CHUNK_ID, NULL_KEY = 26, 27, 28, 29, 30

NO_BYTES = "its entry has no bytes that are undamaged: see the warnings of this read"
_SIZE_BYTES = 4
_CHECKSUM_BYTES = 6
_BROKER_PREFIX_BYTES = 6


@dataclass(slots=True)
class EntryTable:
    """One row per entry. `refused`: why the metadata of an entry cannot be read; then its values in the columns have no meaning."""

    data: Bytes
    entry_ids: Ints
    stored_starts: Ints  # after the bookies' header
    stored_ends: Ints
    metadata_starts: Ints  # as stored; the columns may refer to a plain form of it
    payload_starts: Ints
    payload_ends: Ints
    fields: FieldTable
    properties: Properties
    refused: dict[int, str]

    def __len__(self) -> int:
        return len(self.entry_ids)

    def metadata_bytes(self, row: int) -> bytes:
        return self.data[self.metadata_starts[row] : self.payload_starts[row]].tobytes()

    def payload_bytes(self, row: int) -> bytes:
        """Return the payload as stored."""
        return self.data[self.payload_starts[row] : self.payload_ends[row]].tobytes()

    @property
    def readable(self) -> Bools:
        readable = np.ones(len(self), bool)
        readable[list(self.refused)] = False
        return readable


def parse_entries(groups: Sequence[EntryGroup]) -> EntryTable:
    """Return the entries of consecutive groups."""
    data, group_starts = _in_one_buffer(groups)
    counts = np.array([len(group.ends) for group in groups])
    first_rows = np.cumsum(counts) - counts
    ends = np.concatenate([np.asarray(group.ends, np.uint32) for group in groups]) + np.repeat(group_starts, counts)
    entry_ids = np.arange(len(ends)) + np.repeat(np.array([group.first_entry_id for group in groups]) - first_rows, counts)
    starts = np.concatenate(([0], ends[:-1]))
    starts[first_rows] = group_starts
    starts += HEADER_BYTES
    metadata_starts, metadata_ends, broken = _metadata_ranges(data, starts, ends)
    records = parse_records(data, metadata_starts, metadata_ends, MESSAGE_METADATA)
    refused = records.refused
    for row in np.flatnonzero(broken).tolist():
        size_bytes = ends[row] - starts[row]
        refused[row] = f"{size_bytes} bytes are too few for the metadata that they announce" if size_bytes else NO_BYTES
    return EntryTable(
        data=records.data,
        entry_ids=entry_ids,
        stored_starts=starts,
        stored_ends=ends,
        metadata_starts=metadata_starts,
        payload_starts=metadata_ends,
        payload_ends=ends,
        fields=records.fields,
        properties=records.properties,
        refused=refused,
    )


def _in_one_buffer(groups: Sequence[EntryGroup]) -> tuple[Bytes, Ints]:
    """Return a buffer with all groups and the padding, and where each begins. Groups that share one such buffer are not copied:
    that would take a fifth as long as decoding them."""
    views = [memoryview(group.data) for group in groups]
    whole = views[0].obj
    if isinstance(whole, np.ndarray) and all(view.obj is whole for view in views):
        begin = _address(whole)
        return whole, np.array([_address(np.frombuffer(view, np.uint8)) - begin for view in views])
    sizes = np.array([len(view) for view in views])
    return joined(views), np.cumsum(sizes) - sizes


def _address(data: Bytes) -> int:
    return int(data.__array_interface__["data"][0])


def _metadata_ranges(data: Bytes, starts: Ints, ends: Ints) -> tuple[Ints, Ints, Bools]:
    """Return where MessageMetadata begins and ends, and the entries in which it does not fit: theirs is empty."""
    at = starts
    for marker, in_broker_prefix in ((0x02, True), (0x01, False)):
        # In entries of a few bytes, this reads bytes of the next entry or of the padding, which are ignored below.
        marked = (data[at] == 0x0E) & (data[at + 1] == marker) & (ends - at >= _CHECKSUM_BYTES)
        if not marked.any():
            continue
        skipped = big_endian_32(data, at + 2) + _BROKER_PREFIX_BYTES if in_broker_prefix else _CHECKSUM_BYTES
        at = np.minimum(np.where(marked, at + skipped, at), ends)
    metadata_starts = at + _SIZE_BYTES
    metadata_ends = metadata_starts + big_endian_32(data, at)
    broken = (metadata_starts > ends) | (metadata_ends > ends)
    if broken.any():
        metadata_starts, metadata_ends = np.where(broken, ends, metadata_starts), np.where(broken, ends, metadata_ends)
    return metadata_starts, metadata_ends, broken
