"""One stored entry as the answer of a peek: its payload as body, the rest in `X-Pulsar-…` headers (docs/reference/shapes.md §8).

    tail ──► metadata ──► headers        the first that clients look at is num-batch-message: only a batch has it
         └─► payload ───► decompressed   as stored: one that is encrypted, and one chunk of a larger message

Clients rebuild the message from these. A header holds printable ASCII: other characters of names and keys are percent-encoded as
UTF-8; properties are one JSON object (and also one header each for older clients, if there are few).
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from cepheid_metadata import Position
from cepheid_wire import decompress, parse_metadata, split_tail
from cepheid_wire import pulsar_api_pb2 as pb

PREFIX = "X-Pulsar-"
_MAX_PROPERTIES_BYTES = 32 << 10  # http.client reads no line above 64 KiB
_MAX_PROPERTY_HEADERS = 32  # http.client reads at most 100 headers
_TOKEN = re.compile(r"[-!#$%&'*+.^_`|~0-9A-Za-z]+")
_PRINTABLE = "".join(map(chr, range(0x21, 0x7F))) + " "
_MAX_TIME_MS = 253_402_300_799_999  # the last moment of the year 9999; the times are the producer's own

_PLAIN = (
    ("producer-name", "producer_name"),
    ("sequence-id", "sequence_id"),
    ("highest-sequence-id", "highest_sequence_id"),
    ("replicated-from", "replicated_from"),
    ("partition-key", "partition_key"),
    ("partition-key-b64-encoded", "partition_key_b64_encoded"),
    ("null-partition-key", "null_partition_key"),
    ("uncompressed-size", "uncompressed_size"),
    ("encryption-algo", "encryption_algo"),
    ("marker-type", "marker_type"),
    ("txnid-least-bits", "txnid_least_bits"),
    ("txnid-most-bits", "txnid_most_bits"),
    ("null-value", "null_value"),
    ("uuid", "uuid"),
    ("num-chunks-from-msg", "num_chunks_from_msg"),
    ("total-chunk-msg-size", "total_chunk_msg_size"),
    ("chunk-id", "chunk_id"),
    ("PROPERTY-TOTAL-CHUNKS", "num_chunks_from_msg"),
    ("PROPERTY-CHUNK-ID", "chunk_id"),
)
_TIMES = (("publish-time", "publish_time"), ("event-time", "event_time"), ("deliver-at-time", "deliver_at_time"))
_BYTES = (
    ("Base64-ordering-key", "ordering_key"),
    ("Base64-encryption-param", "encryption_param"),
    ("Base64-schema-version", "schema_version"),
)


def message_answer(position: Position, tail: bytes | memoryview) -> tuple[bytes, list[tuple[str, str]]]:
    """Return body and headers. Raises BadTailError for an entry that no client could read."""
    metadata = parse_metadata(tail)
    _, payload = split_tail(tail)
    stored_bytes = len(payload)
    if not metadata.encryption_keys and not _is_chunk(metadata):
        body = decompress(metadata.compression, payload, metadata.uncompressed_size)
    else:
        body = bytes(payload)
    headers = [(f"{PREFIX}{name}", value) for name, value in _headers(position, metadata, stored_bytes)]
    return body, headers


def _is_chunk(metadata: pb.MessageMetadata) -> bool:
    """Return whether the entry is a chunk: the whole message was compressed, then cut (protocol.md §10.5)."""
    return metadata.HasField("chunk_id") and metadata.num_chunks_from_msg > 1


def _headers(position: Position, metadata: pb.MessageMetadata, stored_bytes: int) -> Iterator[tuple[str, str]]:
    yield "Message-ID", f"{position.ledger_id}:{position.entry_id}"
    if metadata.HasField("num_messages_in_batch"):
        yield "num-batch-message", str(metadata.num_messages_in_batch)
        yield "batch-size", str(stored_bytes)
    for name, field in _TIMES:
        if getattr(metadata, field) > 0:
            yield name, _iso_time(getattr(metadata, field))
    for name, field in _PLAIN:
        if metadata.HasField(field):
            yield name, _text(getattr(metadata, field))
    for name, field in _BYTES:
        if metadata.HasField(field):
            yield name, base64.b64encode(getattr(metadata, field)).decode()
    if metadata.compression != pb.NONE:
        yield "compression", pb.CompressionType.Name(metadata.compression)
    if metadata.encryption_keys:
        yield "Is-Encrypted", "true"
        for key in metadata.encryption_keys:
            yield "Base64-encryption-keys", base64.b64encode(key.SerializeToString()).decode()
    for cluster in metadata.replicate_to:
        yield "replicated-to", _text(cluster)
    yield from _properties(metadata)


def _properties(metadata: pb.MessageMetadata) -> Iterator[tuple[str, str]]:
    properties = {_readable(each.key): _readable(each.value) for each in metadata.properties}
    if not properties:
        return
    as_json = json.dumps(properties)
    if len(as_json) > _MAX_PROPERTIES_BYTES:
        yield "PROPERTIES-LEFT-OUT", f"{len(properties)} properties, {len(as_json)} bytes: too many for a header"
        return
    yield "PROPERTY", as_json
    if len(properties) <= _MAX_PROPERTY_HEADERS:
        for key, value in properties.items():
            if _TOKEN.fullmatch(key):
                yield f"PROPERTY-{key}", _text(value)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return quote(_readable(value), safe=_PRINTABLE).strip()  # leading and trailing spaces are not part of a header's value


def _readable(value: Any) -> str:
    """Return text; protobuf returns `bytes` for text that is not UTF-8."""
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)


def _iso_time(at_ms: int) -> str:
    at = datetime.fromtimestamp(min(at_ms, _MAX_TIME_MS) // 1000, UTC).replace(microsecond=min(at_ms, _MAX_TIME_MS) % 1000 * 1000)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
