"""Parses the two kinds of metadata as tables: MessageMetadata of entries, SingleMessageMetadata of messages in batches.

    lockstep parser ──► table          what it marks as odd, or incomplete
          ▲                ▼
          └── plain form ◄── protobuf library ──► a text: why it is rejected

Rule 1: the library decides. What it rejects is bad; what it accepts is encoded again in its plain form, which the lockstep parser
always understands, appended to the other bytes, and parsed again. So all fields get into the table in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from cepheid_decode.decode_fields import PADDING_BYTES, Bytes, FieldTable, Ints, Kind, Spans, parse_fields
from cepheid_decode.decode_payloads import joined
from cepheid_wire import pulsar_api_pb2 as pb


@dataclass(frozen=True, slots=True)
class RecordKind:
    """`exotic`: fields with nested messages; only the library parses records that have them."""

    message: type[Message]
    fields: Mapping[int, Kind]
    required: tuple[int, ...]
    properties: int
    exotic: tuple[int, ...] = ()


MESSAGE_METADATA = RecordKind(
    pb.MessageMetadata,
    fields={
        1: Kind.BYTES,  # producer_name
        2: Kind.INT64,  # sequence_id
        3: Kind.INT64,  # publish_time
        4: Kind.REPEATED,  # properties
        5: Kind.BYTES,  # replicated_from
        6: Kind.BYTES,  # partition_key
        8: Kind.INT32,  # compression
        9: Kind.UINT32,  # uncompressed_size
        11: Kind.INT32,  # num_messages_in_batch
        12: Kind.INT64,  # event_time
        13: Kind.REPEATED,  # encryption_keys
        16: Kind.BYTES,  # schema_version
        17: Kind.BOOL,  # partition_key_b64_encoded
        18: Kind.BYTES,  # ordering_key
        20: Kind.INT32,  # marker_type
        22: Kind.INT64,  # txnid_least_bits
        25: Kind.BOOL,  # null_value
        26: Kind.BYTES,  # uuid
        27: Kind.INT32,  # num_chunks_from_msg
        28: Kind.INT32,  # total_chunk_msg_size
        29: Kind.INT32,  # chunk_id
        30: Kind.BOOL,  # null_partition_key
    },
    required=(1, 2, 3),
    properties=4,
    exotic=(13,),
)
SINGLE_MESSAGE_METADATA = RecordKind(
    pb.SingleMessageMetadata,
    fields={
        1: Kind.REPEATED,  # properties
        2: Kind.BYTES,  # partition_key
        3: Kind.INT32,  # payload_size
        4: Kind.BOOL,  # compacted_out
        5: Kind.INT64,  # event_time
        6: Kind.BOOL,  # partition_key_b64_encoded
        7: Kind.BYTES,  # ordering_key
        8: Kind.INT64,  # sequence_id
        9: Kind.BOOL,  # null_value
        10: Kind.BOOL,  # null_partition_key
    },
    required=(3,),
    properties=1,
)
_KEY_VALUE = {1: Kind.BYTES, 2: Kind.BYTES}
_COMPRESSION = 8


@dataclass(slots=True)
class Properties:
    """All properties of some records, by owner: key and value of each."""

    owners: Ints
    keys: Spans
    values: Spans


@dataclass(slots=True)
class Records:
    """Fields and properties. `refused`: why records are not valid; their fields have no meaning."""

    data: Bytes  # the bytes that the spans refer to: the given ones, perhaps followed by plain forms
    fields: FieldTable
    properties: Properties
    refused: dict[int, str]


def parse_records(data: Bytes, starts: Ints, ends: Ints, kind: RecordKind) -> Records:
    """Parse the records at `data[starts[i]:ends[i]]`; `data` must end with `PADDING_BYTES` of padding."""
    fields, properties = parse_in_lockstep(data, starts, ends, kind)
    odd = fields.odd.copy()
    for number in kind.exotic:
        if number in fields.has:
            odd |= fields.has[number]
    if not odd.any():
        return Records(data, fields, properties, {})
    refused: dict[int, str] = {}
    plain: list[bytes] = []
    starts, ends = starts.copy(), ends.copy()
    size = len(data) - PADDING_BYTES
    for row in np.flatnonzero(odd).tolist():
        form = plain_form(data[starts[row] : ends[row]].tobytes(), kind.message)
        if isinstance(form, str):
            refused[row], form = form, b""
        starts[row], ends[row] = size, size + len(form)
        plain.append(form)
        size += len(form)
    longer = joined((data[:-PADDING_BYTES], *plain))
    fields, properties = parse_in_lockstep(longer, starts, ends, kind)
    left = set(np.flatnonzero(fields.odd).tolist()) - refused.keys()
    assert not left, f"{kind.message.DESCRIPTOR.name} {left} in plain form is not understood"
    return Records(longer, fields, properties, refused)


def plain_form(record: bytes, message: type[Message]) -> bytes | str:
    """Return the record as the library encodes it, without unknown fields; or why it is rejected."""
    name = message.DESCRIPTOR.name
    try:
        parsed: Any = message.FromString(record)
    except DecodeError as error:
        return f"{len(record)} bytes are not a valid {name}: {error}"
    if not parsed.IsInitialized():
        return f"{name} lacks {', '.join(parsed.FindInitializationErrors())}"
    if message is pb.MessageMetadata:
        unknown_fields: Any = UnknownFieldSet(parsed)
        for unknown in unknown_fields:
            # To the library an unknown codec is an unknown field. That does not mean that the payload is not compressed.
            if unknown.field_number == _COMPRESSION and unknown.wire_type == 0:
                return f"compression {unknown.data} is unknown"
    parsed.DiscardUnknownFields()
    return bytes(parsed.SerializeToString())


def parse_in_lockstep(data: Bytes, starts: Ints, ends: Ints, kind: RecordKind) -> tuple[FieldTable, Properties]:
    """Parse without the library: it must decide about the `odd` records, whose fields and properties have no meaning."""
    fields = parse_fields(data, starts, ends, kind.fields)
    for number in kind.required:
        if not fields.has_all(number):
            fields.odd |= ~fields.present(number)
    owners, element_starts, element_ends = fields.elements(kind.properties)
    if fields.odd.any():  # the properties of odd records may be at any offset
        kept = ~fields.odd[owners]
        owners, element_starts, element_ends = owners[kept], element_starts[kept], element_ends[kept]
    if not len(owners):
        none = (owners, owners)
        return fields, Properties(owners, none, none)
    pairs = parse_fields(data, element_starts, element_ends, _KEY_VALUE)
    broken = pairs.odd | ~pairs.present(1) | ~pairs.present(2)
    if broken.any():
        fields.odd[owners[broken]] = True
    return fields, Properties(owners, pairs.span(1), pairs.span(2))
