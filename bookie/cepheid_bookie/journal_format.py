"""Bytes of the journal. Little-endian; every batch starts at a multiple of 4096, so that no synced sector is ever written again.

    segment file  = segment header │ batch │ batch │ …                  │ zeros (preallocated)
                    segment header │ batch │ batch │ …  │ zeros (64 KiB or more) │ remains of an earlier life
    batch         = batch header │ record │ record │ … │ end marker │ zeros up to the next multiple of 4096

Segment header, 60 bytes at offset 0 (the first batch is at 4096):
    0   8  magic "CPHDJRNL"
    8   4  format version (1 or 2)
    12  4  CRC32C of bytes 16..47
    16  8  segment id
    24  8  sequence of the first batch: the segment before ends exactly below it
    32  16 nonce (random): a batch header of another file, or bytes that a client sent, cannot pass for one of this segment
    48  8  size of the file in bytes, which was preallocated and synced before this header was written
    56  4  CRC32C of bytes 0..55

Older releases wrote zeros from byte 48 on, and no end markers, with format version 1. They ignore both, so they can read what this
release writes as format 1. Only a segment that tells its size can prove damage at its end (`journal_tail.py`). One of format 2
always does, and zeros there are damage. Older releases refuse it; it is written once the cluster's upgrade was finished
(cepheid_metadata/upgrade.py).

The second form is a recycled segment (`journal_writer.py`, rule 6). It needs no format version: zeros follow the last batch in both
forms, and every release tells the batches of an earlier life by their segment id and nonce.

Batch header, 48 bytes:
    0   4  magic "CPB1"
    4   4  CRC32C of bytes 8..47
    8   8  segment id
    16  8  sequence (1, 2, 3, … through all segments, without gaps)
    24  4  bytes of all records
    28  4  number of records
    32  16 nonce of the segment

Record:
    0   4  CRC32C of everything after it
    4   4  bytes after this head of 12
    8   1  type; 9  3 zeros
    12     type 1, entries: master key (16), then the group as `cepheid_rpc.encode_group_to` lays it out
           type 2, ledger: ledger id (8), ledger record (`ledger_record.py`): a fence, an explicit LAC, a master key

End marker: "CPBE", or as much of it as there is room for before the next multiple of 4096. It is not zero, so a batch whose end is
zeros was not written to its end, whatever its last record ends with.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from crc32c import crc32c

from cepheid_bookie.errors import FormatVersionError
from cepheid_bookie.ledger_record import LedgerRecord, decode_record, encode_record
from cepheid_rpc import MASTER_KEY_BYTES, Buffer, EntryGroup, decode_group, encode_group_to

ALIGNMENT = 4096
FORMAT_VERSION = 1
SIZED_FORMAT_VERSION = 2
NONCE_BYTES = 16
END_MARKER = b"CPBE"

_SEGMENT_MAGIC = b"CPHDJRNL"
_SEGMENT = struct.Struct("<8sIIQQ16s")
_SIZE = struct.Struct("<QI")
SEGMENT_HEADER_BYTES = _SEGMENT.size + _SIZE.size
_BATCH_MAGIC = b"CPB1"
_BATCH = struct.Struct("<4sIQQII16s")
BATCH_HEADER_BYTES = _BATCH.size
_HEAD = struct.Struct("<IIBxxx")
_TAIL = struct.Struct("<IBxxx")  # the head without its CRC: what the CRC starts with
HEAD_BYTES = _HEAD.size
_LEDGER_ID = struct.Struct("<q")

ENTRIES = 1
LEDGER = 2


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    segment_id: int
    first_sequence: int
    nonce: bytes
    size_bytes: int  # 0: an older release wrote it, and does not say
    version: int = FORMAT_VERSION


@dataclass(frozen=True, slots=True)
class BatchHeader:
    sequence: int
    size_bytes: int
    records: int


@dataclass(frozen=True, slots=True)
class EntriesRecord:
    master_key: bytes
    group: EntryGroup


@dataclass(frozen=True, slots=True)
class LedgerStateRecord:
    ledger_id: int
    record: LedgerRecord


JournalRecord = EntriesRecord | LedgerStateRecord


def segment_path(segment_id: int) -> str:
    return f"journal/{segment_id:016x}.journal"


def parse_segment_name(name: str) -> int | None:
    stem, dot, suffix = name.partition(".")
    return int(stem, 16) if dot and suffix == "journal" and len(stem) == 16 else None


def align(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def encode_segment_header(header: SegmentHeader) -> bytes:
    body = struct.pack("<QQ16s", header.segment_id, header.first_sequence, header.nonce)
    data = _SEGMENT_MAGIC + struct.pack("<II", header.version, crc32c(body)) + body + struct.pack("<Q", header.size_bytes)
    return data + struct.pack("<I", crc32c(data))


def decode_segment_header(data: bytes) -> SegmentHeader | None:
    """Return None when the bytes are not an intact header. Raises FormatVersionError for an intact one of another version."""
    if len(data) < SEGMENT_HEADER_BYTES:
        return None
    magic, version, crc, segment_id, first_sequence, nonce = _SEGMENT.unpack_from(data)
    if magic != _SEGMENT_MAGIC or crc32c(memoryview(data)[16 : _SEGMENT.size]) != crc:
        return None
    if version not in (FORMAT_VERSION, SIZED_FORMAT_VERSION):
        known = f"{FORMAT_VERSION} and {SIZED_FORMAT_VERSION}"
        message = f"journal segment {segment_id:016x} has format {version}, this bookie reads {known}"
        raise FormatVersionError(message, version=version)
    size_bytes, crc = _SIZE.unpack_from(data, _SEGMENT.size)
    by_an_older_release = version == FORMAT_VERSION and not any(data[_SEGMENT.size : SEGMENT_HEADER_BYTES])
    if not by_an_older_release and crc32c(memoryview(data)[: SEGMENT_HEADER_BYTES - 4]) != crc:
        return None
    return SegmentHeader(segment_id, first_sequence, nonce, size_bytes, version)


def encode_batch_header(segment_id: int, nonce: bytes, header: BatchHeader) -> bytes:
    body = struct.pack("<QQII16s", segment_id, header.sequence, header.size_bytes, header.records, nonce)
    return _BATCH_MAGIC + struct.pack("<I", crc32c(body)) + body


def decode_batch_header(data: bytes, segment_id: int, nonce: bytes | None) -> BatchHeader | None:
    """None unless the bytes begin with an intact batch header of this very segment (None: whose nonce was lost)."""
    if len(data) < BATCH_HEADER_BYTES or data[:4] != _BATCH_MAGIC:
        return None
    _, crc, found_id, sequence, size_bytes, records, found_nonce = _BATCH.unpack_from(data)
    if crc32c(memoryview(data)[8:BATCH_HEADER_BYTES]) != crc or found_id != segment_id or found_nonce != (nonce or found_nonce):
        return None
    return BatchHeader(sequence, size_bytes, records)


def encode_entries_to(parts: list[Buffer], master_key: bytes, group: EntryGroup) -> int:
    """Appends the record of a group to `parts`; returns how many bytes that is. The hot path: once per group, no copy of data."""
    body: list[Buffer] = []
    size = MASTER_KEY_BYTES + encode_group_to(body, group)
    tail = _TAIL.pack(size, ENTRIES) + master_key
    crc = crc32c(tail)
    for part in body:
        crc = crc32c(part, crc)
    parts.append(crc.to_bytes(4, "little") + tail)
    parts += body
    return HEAD_BYTES + size


def encode_ledger_to(parts: list[Buffer], ledger_id: int, record: LedgerRecord) -> int:
    body = _LEDGER_ID.pack(ledger_id) + encode_record(record)
    tail = _TAIL.pack(len(body), LEDGER) + body
    parts.append(crc32c(tail).to_bytes(4, "little") + tail)
    return HEAD_BYTES + len(body)


def decode_records(body: memoryview, count: int) -> list[JournalRecord] | None:
    """The records of a batch (over the same memory), or None when one is damaged or they do not fill the batch exactly.

    Raises FormatVersionError for an intact record of a type this version does not know: skipping it would forget it.
    """
    records: list[JournalRecord] = []
    offset = 0
    for _ in range(count):
        if offset + HEAD_BYTES > len(body):
            return None
        end = end_of_record(body, offset)
        if end > len(body) or not is_record_intact(body, offset, end):
            return None
        records.append(decode_record_at(body, offset, end))
        offset = end
    return records if offset == len(body) else None


def end_of_record(data: Buffer, start: int) -> int:
    """Return where the record at `start` ends, as its head says, which may be damaged."""
    return start + HEAD_BYTES + int(_HEAD.unpack_from(data, start)[1])


def is_record_intact(data: Buffer, start: int, end: int) -> bool:
    return bool(crc32c(memoryview(data)[start + 4 : end]) == _HEAD.unpack_from(data, start)[0])


def decode_record_at(data: memoryview, start: int, end: int) -> JournalRecord:
    """Return the intact record at `start..end-1`, over the same memory. Raises FormatVersionError for one of an unknown type."""
    kind, body = data[start + 8], data[start + HEAD_BYTES : end]
    if kind == ENTRIES:
        group, _ = decode_group(body, MASTER_KEY_BYTES)
        return EntriesRecord(bytes(body[:MASTER_KEY_BYTES]), group)
    if kind == LEDGER:
        return LedgerStateRecord(_LEDGER_ID.unpack_from(body)[0], decode_record(body[_LEDGER_ID.size :]))
    raise FormatVersionError(f"the journal has a record of type {kind}, which this bookie does not know", type=kind)
