"""Bytes of a cursor's state. All of it, however many holes there are.

    byte 0       format, 1
    then         mark-delete position: ledger id, entry id            8 + 8
                 bitmaps n, then n × (ledger id, size, bytes)         4, then 8 + 4 + size    portable roaring format
                 batches m, then m × (ledger id, entry id, messages, mask)    4, then 8 + 8 + 4 + ceil(messages / 8)
    last 4       CRC32C of everything before: bitmaps are decoded by native code, which must not see damage

Integers are little-endian. Source of the bitmaps' format: RoaringFormatSpec.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

from crc32c import crc32c
from pyroaring import BitMap

from cepheid_broker.managed_ledger.ack_set import MAX_BATCH_MESSAGES, AckSet, Batch
from cepheid_broker.managed_ledger.errors import CursorStateDamagedError
from cepheid_broker.managed_ledger.ledger_list import LedgerList
from cepheid_metadata import Position

FORMAT = 1
_HEAD = struct.Struct("<Bqq")
_COUNT = struct.Struct("<I")
_BITMAP = struct.Struct("<qI")
_BATCH = struct.Struct("<qqI")


@dataclass(frozen=True, slots=True)
class CursorState:
    """What an `AckSet` holds, apart from any chain."""

    mark_delete: Position
    acked: Mapping[int, BitMap] = field(default_factory=dict)
    batches: Mapping[Position, Batch] = field(default_factory=dict)

    def ack_set(self, ledgers: LedgerList) -> AckSet:
        return AckSet.restored(ledgers, self.mark_delete, self.acked.items(), self.batches.items())


def encode_state(ack_set: AckSet) -> bytes:
    parts: list[bytes] = [_HEAD.pack(FORMAT, *ack_set.mark_delete), _COUNT.pack(len(ack_set.acked))]
    for ledger_id, entries in ack_set.acked.items():
        entries.run_optimize()  # changes the representation alone
        bitmap = entries.serialize()
        parts += (_BITMAP.pack(ledger_id, len(bitmap)), bitmap)
    parts.append(_COUNT.pack(sum(map(len, ack_set.batches.values()))))
    for ledger_id, batches in ack_set.batches.items():
        for entry_id, (mask, messages) in batches.items():
            parts += (_BATCH.pack(ledger_id, entry_id, messages), mask.to_bytes((messages + 7) // 8, "little"))
    body = b"".join(parts)
    return body + _COUNT.pack(crc32c(body))


def decode_state(data: bytes) -> CursorState:
    """Raises CursorStateDamagedError."""
    if len(data) < _HEAD.size + 3 * _COUNT.size:
        raise CursorStateDamagedError(f"cursor state is cut off at {len(data)} bytes", size_bytes=len(data))
    body = memoryview(data)[: -_COUNT.size]
    (expected,) = _COUNT.unpack_from(data, len(body))
    if (actual := crc32c(body)) != expected:
        message = f"cursor state of {len(data)} bytes is damaged: crc {actual:#010x}, expected {expected:#010x}"
        raise CursorStateDamagedError(message, size_bytes=len(data))
    if body[0] > FORMAT:
        message = f"cursor state has format {body[0]}; this release knows formats up to {FORMAT}"
        raise CursorStateDamagedError(message, format=body[0], known_format=FORMAT)
    try:
        return _decode_body(body)
    except (struct.error, ValueError) as error:
        raise CursorStateDamagedError(f"cursor state of {len(data)} bytes is not cursor state: {error}") from None


def _decode_body(body: memoryview) -> CursorState:
    _, mark_ledger_id, mark_entry_id = _HEAD.unpack_from(body)
    offset = _HEAD.size
    (bitmaps,) = _COUNT.unpack_from(body, offset)
    offset += _COUNT.size
    acked: dict[int, BitMap] = {}
    for _ in range(bitmaps):
        ledger_id, size = _BITMAP.unpack_from(body, offset)
        offset += _BITMAP.size + size
        acked[ledger_id] = BitMap.deserialize(bytes(body[offset - size : offset]))
    (count,) = _COUNT.unpack_from(body, offset)
    offset += _COUNT.size
    batches: dict[Position, Batch] = {}
    for _ in range(count):
        ledger_id, entry_id, messages = _BATCH.unpack_from(body, offset)
        if not 0 < messages <= MAX_BATCH_MESSAGES:
            raise ValueError(f"a batch of {messages} messages")
        size = (messages + 7) // 8
        offset += _BATCH.size + size
        batches[Position(ledger_id, entry_id)] = (int.from_bytes(body[offset - size : offset], "little"), messages)
    if offset != len(body):
        raise ValueError(f"{len(body) - offset} bytes follow")
    return CursorState(Position(mark_ledger_id, mark_entry_id), acked, batches)
