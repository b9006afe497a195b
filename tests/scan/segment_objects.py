"""Objects of ledgers, written as brokers write them, with small row groups."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from cepheid_decode import Piece, SchemaVersion
from cepheid_rpc import EntryGroup
from cepheid_tiered import segment_format
from cepheid_tiered.segment_writer import SegmentWriter
from cepheid_wire import TopicName


def write_object(
    path: Path,
    piece: Piece,
    groups: Sequence[EntryGroup],
    *,
    row_group_bytes: int = 1000,
    schemas: Sequence[SchemaVersion] = (),
) -> str:
    """The URL."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with mock.patch.object(segment_format, "ROW_GROUP_ENTRY_BYTES", row_group_bytes):
        writer = SegmentWriter(TopicName.parse(piece.topic), piece.ledger_id, schemas)
        parts = writer.add(groups)
        path.write_bytes(b"".join([*parts, *writer.finish()[0]]))
    return f"file://{path}"
