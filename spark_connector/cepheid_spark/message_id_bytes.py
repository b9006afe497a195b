"""Message ids as clients serialize them: MessageIdData of PulsarApi.proto, for a whole column at once.

08 <ledger> 10 <entry> [18 <partition>] [20 <batch index>]     varints; partition and index only where there are some
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

_MAX_VARINT_BYTES = 10
_TAGS = (0x08, 0x10, 0x18, 0x20)  # ledgerId, entryId, partition, batch_index: fields 1 to 4, all varints


def encode_message_ids(ledger_ids: pa.Array, entry_ids: pa.Array, partitions: pa.Array, batch_indices: pa.Array) -> pa.Array:
    """Binary. A partition of -1 and a batch index that is null are left out, as clients do."""
    import numpy as np
    import pyarrow as pa

    rows = len(ledger_ids)
    table = np.zeros((rows, len(_TAGS) * (1 + _MAX_VARINT_BYTES)), dtype=np.uint8)
    used = np.zeros(table.shape, dtype=bool)
    at = 0
    for tag, column in zip(_TAGS, (ledger_ids, entry_ids, partitions, batch_indices), strict=True):
        numbers = np.asarray(column.cast(pa.int64()).fill_null(-1).to_numpy(zero_copy_only=False), dtype=np.int64)
        given = numbers >= 0
        table[:, at] = tag
        used[:, at] = given
        _put_varints(table, used, at + 1, numbers, given)
        at += 1 + _MAX_VARINT_BYTES
    offsets = np.zeros(rows + 1, dtype=np.int32)
    np.cumsum(used.sum(axis=1), out=offsets[1:])
    return pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(offsets), pa.py_buffer(table[used])])


def _put_varints(table: Any, used: Any, at: int, numbers: Any, given: Any) -> None:
    """One byte of all rows a step; `given`: the rows that have a number."""
    import numpy as np

    left, going = numbers.astype(np.uint64), given.copy()
    for place in range(at, at + _MAX_VARINT_BYTES):
        used[:, place] = going
        more = going & (left >= 0x80)
        table[:, place] = (left & np.uint64(0x7F)).astype(np.uint8) | (more.astype(np.uint8) << 7)
        left >>= np.uint64(7)
        going = more
        if not going.any():
            return
