"""Rows as the protobuf library reads them, message by message: what the decoder must equal. And entries to decode."""

from __future__ import annotations

import base64
import datetime
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import cramjam
import numpy as np
import pyarrow as pa

from cepheid_bookie.entry_block import encode_block_to
from cepheid_decode import BadRecordError, OnBadRecord, Piece, ReadMode, ReadSettings, RowFilter, ScanCounters, ScanSpec
from cepheid_decode.columns import MESSAGE_COLUMNS
from cepheid_decode.decode_fields import PADDING_BYTES
from cepheid_decode.message_decoder import MessageDecoder
from cepheid_rpc import Buffer, EntryGroup, encode_group, stored_groups
from cepheid_wire import BadTailError, decode_batch, decompress, encode_batch, encode_tail, parse_metadata, split_tail
from cepheid_wire import pulsar_api_pb2 as pb
from cepheid_wire.payload_decryption import PayloadDecryptor

TOPIC = "persistent://public/default/t-partition-3"
LEDGER_ID = 12
ALL_COLUMNS = tuple(MESSAGE_COLUMNS)
EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
MAX_TIME_MS = 253_402_300_799_999


def piece(entries: int, **changes: Any) -> Piece:
    fields: dict[str, Any] = {"first_entry_id": 0, "last_entry_id": entries - 1}
    return Piece(TOPIC, 3, LEDGER_ID, **{**fields, "ensemble_size": 1, "write_quorum": 1, "fragments": (), **changes})


def groups_of(tails: Sequence[bytes], per_group: int = 1000, first_entry_id: int = 0) -> list[EntryGroup]:
    return [
        encode_group(LEDGER_ID, first_entry_id + start, -1, 0, tails[start : start + per_group])
        for start in range(0, len(tails), per_group)
    ]


def decode(
    tails: Sequence[bytes],
    columns: Sequence[str] = ALL_COLUMNS,
    *,
    on_bad_record: OnBadRecord = OnBadRecord.FAIL,
    row_filter: RowFilter | None = None,
    per_group: int = 1000,
    counters: ScanCounters | None = None,
    of_piece: Piece | None = None,
    before: Sequence[bytes] = (),
    settings: ReadSettings | None = None,
    decryptor: PayloadDecryptor | None = None,
) -> list[dict[str, Any]]:
    """Rows of entries 0.. of a ledger. `before`: entries right before the piece's, for messages in chunks."""
    of_piece = of_piece or piece(len(tails))
    settings = settings or ReadSettings()
    spec = ScanSpec(ReadMode.MESSAGES, tuple(columns), row_filter or RowFilter(), on_bad_record, settings=settings)

    def look_back(asked: Piece, count: int) -> Iterator[EntryGroup]:
        assert asked is of_piece
        yield from groups_of(before[-count:], per_group)

    def rows_of(groups: Sequence[EntryGroup], counters: ScanCounters) -> list[dict[str, Any]]:
        decoder = MessageDecoder(spec, counters, look_back, decryptor)
        rows: list[dict[str, Any]] = []
        for batch in [*decoder.decode(of_piece, groups), *decoder.finish(of_piece)] if groups else []:
            batch.validate(full=True)
            rows += [{**row, "properties": dict(row["properties"])} if "properties" in row else row for row in batch.to_pylist()]
        return rows

    groups = groups_of(tails, per_group, of_piece.first_entry_id)
    rows = rows_of(groups, counters or ScanCounters())
    assert rows_of(as_received(groups), ScanCounters()) == rows, "where entries lie makes no difference"
    return rows


def values_before_failure(batches: Iterable[pa.RecordBatch]) -> tuple[list[Any], str]:
    """The column `value` of what is given out before a BadRecordError, and its text."""
    found: list[Any] = []
    try:
        for batch in batches:
            found += batch.column("value").to_pylist()
    except BadRecordError as error:
        return found, str(error)
    raise AssertionError("no record failed")


def as_received(groups: Sequence[EntryGroup]) -> list[EntryGroup]:
    """As the blocks of a frame: all in one buffer, in which they are decoded without being copied."""
    parts: list[Buffer] = []
    for group in groups:
        encode_block_to(parts, group)
    buffer = np.frombuffer(b"".join((*parts, bytes(PADDING_BYTES))), np.uint8)
    return list(stored_groups(memoryview(buffer.data)[: len(buffer) - PADDING_BYTES]))


def single(payload: bytes = b"value", **fields: Any) -> bytes:
    return encode_tail(metadata(**fields), payload)


def batched(messages: Sequence[tuple[pb.SingleMessageMetadata, bytes]], **fields: Any) -> bytes:
    payload = encode_batch(messages)
    described = metadata(num_messages_in_batch=len(messages), **fields)
    return encode_tail(described, compress(described.compression, payload, described))


def metadata(**fields: Any) -> pb.MessageMetadata:
    properties = fields.pop("properties", {})
    made = pb.MessageMetadata(**{"producer_name": "p", "sequence_id": 5, "publish_time": 1_700_000_000_123, **fields})
    made.properties.extend(pb.KeyValue(key=key, value=value) for key, value in properties.items())
    return made


def message(payload: bytes = b"value", **fields: Any) -> tuple[pb.SingleMessageMetadata, bytes]:
    properties = fields.pop("properties", {})
    made = pb.SingleMessageMetadata(payload_size=len(payload), **fields)
    made.properties.extend(pb.KeyValue(key=key, value=value) for key, value in properties.items())
    return made, payload


def compress(codec: int, payload: bytes, described: pb.MessageMetadata | None = None) -> bytes:
    if described is not None and codec:
        described.uncompressed_size = len(payload)
    match codec:
        case pb.LZ4:
            return bytes(cramjam.lz4.compress_block(payload, store_size=False))
        case pb.ZLIB:
            return zlib.compress(payload)
        case pb.ZSTD:
            return bytes(cramjam.zstd.compress(payload))
        case pb.SNAPPY:
            return bytes(cramjam.snappy.compress_raw(payload))
    return payload


def reference_rows(tails: Sequence[bytes]) -> list[dict[str, Any]]:
    """Raises BadTailError where the decoder must raise BadRecordError. No chunks, markers, transactions, encryption."""
    return [row for entry_id, tail in enumerate(tails) for row in _entry_rows(entry_id, tail)]


def _entry_rows(entry_id: int, tail: bytes) -> Iterator[dict[str, Any]]:
    described = parse_metadata(tail)
    payload = bytes(split_tail(tail)[1])
    if described.compression:
        payload = decompress(described.compression, payload, described.uncompressed_size)
    if not described.HasField("num_messages_in_batch"):
        yield _row(entry_id, -1, described, described, payload)
        return
    if described.num_messages_in_batch < 1:
        raise BadTailError("a batch of no messages")
    for index, (inner, body) in enumerate(list(decode_batch(payload, described.num_messages_in_batch))):
        if not inner.compacted_out:
            yield _row(entry_id, index, described, inner, bytes(body))


def _row(entry_id: int, index: int, described: pb.MessageMetadata, inner: Any, payload: bytes) -> dict[str, Any]:
    has_key = inner.HasField("partition_key") and not inner.null_partition_key
    key = inner.partition_key if has_key else None
    raw_key = key.encode() if isinstance(key, str) else key  # bytes: the key is no UTF-8
    if raw_key is not None and inner.partition_key_b64_encoded:
        raw_key = base64.b64decode(raw_key, validate=True)
    sequence_id = inner.sequence_id if inner.HasField("sequence_id") else described.sequence_id
    return {
        "key": key,
        "value": None if inner.null_value else payload,
        "topic": TOPIC,
        "partition": 3,
        "message_id": f"{LEDGER_ID}:{entry_id}:3:{index}",
        "ledger_id": LEDGER_ID,
        "entry_id": entry_id,
        "batch_index": None if index == -1 else index,
        "publish_time": timestamp(described.publish_time),
        "event_time": timestamp(inner.event_time) if inner.event_time else None,
        "producer_name": described.producer_name,
        "sequence_id": sequence_id - (1 << 64) if sequence_id >> 63 else sequence_id,
        "properties": {pair.key: pair.value for pair in inner.properties},
        "ordering_key": inner.ordering_key if inner.HasField("ordering_key") else None,
        "schema_version": described.schema_version if described.HasField("schema_version") else None,
        "replicated_from": described.replicated_from if described.HasField("replicated_from") else None,
        "key_bytes": raw_key,
    }


def timestamp(ms: int) -> datetime.datetime | None:
    if ms > MAX_TIME_MS:
        return None
    return EPOCH + datetime.timedelta(milliseconds=ms)
