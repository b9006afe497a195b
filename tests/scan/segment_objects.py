"""Objects of ledgers as tests need them: columns of messages beside the raw entries, in small row groups."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cepheid_decode import BadRecordError, Piece, ReadMode, ScanCounters, ScanSpec
from cepheid_decode.columns import MESSAGE_COLUMNS
from cepheid_decode.message_decoder import MessageDecoder
from cepheid_rpc import EntryGroup

OF_MESSAGES = tuple(name for name in MESSAGE_COLUMNS if name not in ("topic", "partition", "message_id", "ledger_id", "entry_id"))
MS = pa.timestamp("ms", "UTC")
SCHEMA = pa.schema(
    [
        ("entry_id", pa.int64()),
        ("raw_entry", pa.binary()),
        *((name, MS if MESSAGE_COLUMNS[name] == pa.timestamp("us", "UTC") else MESSAGE_COLUMNS[name]) for name in OF_MESSAGES),
    ]
)


def write_object(path: Path, piece: Piece, groups: Sequence[EntryGroup], *, entries_per_row_group: int = 10) -> str:
    """The URL. Entries that are no messages, or cannot be decoded, have one row with `raw_entry` alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tables = [_rows(piece, group.slice(entry_id, entry_id)) for group in groups for entry_id in _ids(group)]
    with pq.ParquetWriter(path, SCHEMA, compression="zstd", write_page_checksum=True) as writer:
        for first in range(0, len(tables), entries_per_row_group):
            together = pa.concat_tables(tables[first : first + entries_per_row_group])
            writer.write_table(together, row_group_size=max(1, together.num_rows))
    return f"file://{path}"


def _ids(group: EntryGroup) -> range:
    return range(group.first_entry_id, group.last_entry_id + 1)


def _rows(piece: Piece, entry: EntryGroup) -> pa.Table:
    spec = ScanSpec(ReadMode.MESSAGES, OF_MESSAGES)
    decoder = MessageDecoder(spec, ScanCounters(), lambda asked, count: iter(()))
    try:
        rows = pa.Table.from_batches([*decoder.decode(piece, [entry])], pa.schema([(n, MESSAGE_COLUMNS[n]) for n in OF_MESSAGES]))
    except BadRecordError:
        rows = None
    if rows is None or not rows.num_rows:
        rows = pa.table({name: pa.nulls(1, MESSAGE_COLUMNS[name]) for name in OF_MESSAGES})
    count = rows.num_rows
    raw = [bytes(entry.entry(entry.first_entry_id)), *[None] * (count - 1)]
    columns: list[Any] = [pa.array([entry.first_entry_id] * count), pa.array(raw, pa.binary()), *rows.columns]
    return pa.table(columns, names=SCHEMA.names).cast(SCHEMA)
