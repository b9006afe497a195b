"""The encoding of a cursor's state, which is complete however many holes there are.

    byte 0       format, 1 or 2
    then         mark-delete position: ledger id, entry id            8 + 8
                 bitmaps n, then n × (ledger id, size, bytes)         4, then 8 + 4 + size    portable roaring format
                 batches m, then m × (ledger id, entry id, messages, mask)    4, then 8 + 8 + 4 + ceil(messages / 8)
    format 2     redelivered k, then k × (ledger id, count, size, bytes)      4, then 8 + 4 + 4 + size    entries of this count
                 sequence ids s, then s × (size of name, name, id)    4, then 2 + size + 8
    last 4       CRC32C of everything before: bitmaps are decoded by native code, which must not see damage

Integers are little-endian. Source of the bitmaps' format: RoaringFormatSpec. Without counts and sequence ids format 1 is written,
which every release reads.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from crc32c import crc32c
from pyroaring import BitMap

from cepheid_managed_ledger.ack_set import MAX_BATCH_MESSAGES, AckSet, Batch
from cepheid_managed_ledger.delivery_counts import DeliveryCounts
from cepheid_managed_ledger.errors import CursorStateDamagedError, CursorStateNewerError
from cepheid_managed_ledger.ledger_list import LedgerList
from cepheid_metadata import Position

FORMAT = 2
MAX_SEQUENCE_ID = (1 << 64) - 1  # uint64 of the wire
_HEAD = struct.Struct("<Bqq")
_COUNT = struct.Struct("<I")
_BITMAP = struct.Struct("<qI")
_BATCH = struct.Struct("<qqI")
_REDELIVERED = struct.Struct("<qII")
_NAME = struct.Struct("<H")
_SEQUENCE_ID = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class CursorState:
    """The state of a cursor, independent of any chain."""

    mark_delete: Position
    acked: Mapping[int, BitMap] = field(default_factory=dict)
    batches: Mapping[Position, Batch] = field(default_factory=dict)
    redelivered: Sequence[tuple[int, int, BitMap]] = ()  # ledger id, count, which entries have it
    sequence_ids: Mapping[str, int] = field(default_factory=dict)

    @property
    def furthest(self) -> Position:
        """The last entry that the state mentions."""
        acked = (Position(ledger_id, entries.max()) for ledger_id, entries in self.acked.items() if entries)
        redelivered = (Position(ledger_id, entries.max()) for ledger_id, _, entries in self.redelivered if entries)
        return max((self.mark_delete, *acked, *self.batches, *redelivered))

    def ack_set(self, ledgers: LedgerList) -> AckSet:
        return AckSet.restored(ledgers, self.mark_delete, self.acked.items(), self.batches.items())

    def counts(self, ack_set: AckSet) -> DeliveryCounts:
        """Return the delivery counts of entries that exist and are not acknowledged."""
        counts = DeliveryCounts()
        for ledger_id, count, entries in self.redelivered:
            counts.restore(ledger_id, ack_set.unacknowledged_among(ledger_id, entries), count)
        return counts


_NO_COUNTS = DeliveryCounts()


def encode_state(
    ack_set: AckSet,
    counts: DeliveryCounts = _NO_COUNTS,
    sequence_ids: Mapping[str, int] | None = None,
    batches: EncodedBatches | None = None,
) -> bytes:
    """Return the encoded state.

    `batches`: if there are many, encoded before this moment (without what was acknowledged of them since).
    """
    version = FORMAT if counts or sequence_ids else 1
    parts: list[bytes] = [_HEAD.pack(version, *ack_set.mark_delete), _COUNT.pack(len(ack_set.acked))]
    for ledger_id, entries in ack_set.acked.items():
        bitmap = _bytes_of(entries)
        parts += (_BITMAP.pack(ledger_id, len(bitmap)), bitmap)
    if batches is None:
        batches = EncodedBatches()
        for ledger_id, some in ack_set.batches.items():
            batches.add(ledger_id, some.items())
    parts += (_COUNT.pack(batches.count), *batches.parts)
    if version >= 2:
        parts += _encode_counts(counts)
        parts += _encode_sequence_ids(sequence_ids or {})
    body = b"".join(parts)
    return body + _COUNT.pack(crc32c(body))


class EncodedBatches:
    """Encoded batches: the part of a state that takes long to encode, a microsecond for each batch."""

    __slots__ = ("count", "parts")

    def __init__(self) -> None:
        self.count = 0
        self.parts: list[bytes] = []

    def add(self, ledger_id: int, batches: Iterable[tuple[int, Batch]]) -> None:
        """Add batches of one ledger."""
        for entry_id, (mask, messages) in batches:
            self.count += 1
            self.parts += (_BATCH.pack(ledger_id, entry_id, messages), mask.to_bytes((messages + 7) // 8, "little"))


def _bytes_of(entries: BitMap) -> bytes:
    entries.run_optimize()  # changes only the representation
    return entries.serialize()


def _encode_counts(counts: DeliveryCounts) -> list[bytes]:
    groups = list(counts.groups())
    parts = [_COUNT.pack(len(groups))]
    for ledger_id, count, entries in groups:
        bitmap = _bytes_of(entries)
        parts += (_REDELIVERED.pack(ledger_id, count, len(bitmap)), bitmap)
    return parts


def _encode_sequence_ids(sequence_ids: Mapping[str, int]) -> list[bytes]:
    parts: list[bytes] = [_COUNT.pack(len(sequence_ids))]
    for name, sequence_id in sequence_ids.items():
        encoded = name.encode()
        parts += (_NAME.pack(len(encoded)), encoded, _SEQUENCE_ID.pack(sequence_id))
    return parts


def decode_state(data: bytes) -> CursorState:
    """Return the decoded state. Raises CursorStateDamagedError, CursorStateNewerError."""
    if len(data) < _HEAD.size + 3 * _COUNT.size:
        raise CursorStateDamagedError(f"cursor state is cut off at {len(data)} bytes", size_bytes=len(data))
    body = memoryview(data)[: -_COUNT.size]
    (expected,) = _COUNT.unpack_from(data, len(body))
    if (actual := crc32c(body)) != expected:
        message = f"cursor state of {len(data)} bytes is damaged: crc {actual:#010x}, expected {expected:#010x}"
        raise CursorStateDamagedError(message, size_bytes=len(data))
    if body[0] > FORMAT:
        message = f"cursor state has format {body[0]}; this release knows formats up to {FORMAT}"
        raise CursorStateNewerError(message, format=body[0], known_format=FORMAT)
    try:
        return _decode_body(body)
    except (struct.error, ValueError) as error:
        raise CursorStateDamagedError(f"cursor state of {len(data)} bytes is not cursor state: {error}") from None


class _Reading:
    """The position of the decoder in a state."""

    __slots__ = ("_body", "_offset")

    def __init__(self, body: memoryview) -> None:
        self._body = body
        self._offset = 0

    def take(self, form: struct.Struct) -> tuple[Any, ...]:
        values = form.unpack_from(self._body, self._offset)
        self._offset += form.size
        return values

    def take_count(self) -> int:
        (count,) = self.take(_COUNT)
        return int(count)

    def take_bytes(self, size: int) -> bytes:
        self._offset += size
        return bytes(self._body[self._offset - size : self._offset])

    def end(self) -> None:
        if self._offset != len(self._body):
            raise ValueError(f"{len(self._body) - self._offset} bytes follow")


def _decode_body(body: memoryview) -> CursorState:
    reading = _Reading(body)
    version, mark_ledger_id, mark_entry_id = reading.take(_HEAD)
    acked: dict[int, BitMap] = {}
    for _ in range(reading.take_count()):
        ledger_id, size = reading.take(_BITMAP)
        acked[ledger_id] = BitMap.deserialize(reading.take_bytes(size))
    batches: dict[Position, Batch] = {}
    for _ in range(reading.take_count()):
        ledger_id, entry_id, messages = reading.take(_BATCH)
        if not 0 < messages <= MAX_BATCH_MESSAGES:
            raise ValueError(f"a batch of {messages} messages")
        mask = int.from_bytes(reading.take_bytes((messages + 7) // 8), "little")
        batches[Position(ledger_id, entry_id)] = (mask, messages)
    redelivered: list[tuple[int, int, BitMap]] = []
    sequence_ids: dict[str, int] = {}
    if version >= 2:
        for _ in range(reading.take_count()):
            ledger_id, count, size = reading.take(_REDELIVERED)
            redelivered.append((ledger_id, count, BitMap.deserialize(reading.take_bytes(size))))
        for _ in range(reading.take_count()):
            (size,) = reading.take(_NAME)
            name = reading.take_bytes(size).decode()
            (sequence_ids[name],) = reading.take(_SEQUENCE_ID)
    reading.end()
    return CursorState(Position(mark_ledger_id, mark_entry_id), acked, batches, redelivered, sequence_ids)
