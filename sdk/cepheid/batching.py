"""Encodes messages as entries: the batch that is being filled, and the bytes of a SEND frame. No I/O, no clock.

    add_plain, add ──► OpenBatch ──encode_payload()──► payload ──► SendFrames.batch() ──► the parts of one frame

Messages that have only a payload are the common case. Their header in the batch depends on their size alone, so a batch of
equal sizes is one `join`: the work per message is an append.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from struct import Struct
from typing import Any

from cepheid.compression import Compressor
from cepheid.encryption import MessageEncryptor
from cepheid.errors import MessageTooLargeError
from cepheid_wire import crc32c_of
from cepheid_wire import pulsar_api_pb2 as pb
from cepheid_wire.compression import MAX_UNCOMPRESSED_BYTES
from cepheid_wire.payload_decryption import TAG_BYTES

_size = Struct(">I").pack
_sizes = Struct(">II").pack
_checksum = Struct(">HI").pack
_CHECKSUM_MARKER = 0x0E01

FrameParts = tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Attributes:
    """Optional parts of a message besides its payload."""

    key: str | None = None
    ordering_key: bytes | None = None
    properties: Mapping[str, str] | None = None
    event_time_ms: int | None = None
    deliver_at_ms: int | None = None
    is_null: bool = False
    has_base64_key: bool = False


NO_ATTRIBUTES = Attributes()
NO_VALUE = Attributes(is_null=True)


@lru_cache(maxsize=4096)
def plain_header(payload_bytes: int) -> bytes:
    """Return the header in a batch for a message that has only a payload."""
    metadata = pb.SingleMessageMetadata(payload_size=payload_bytes).SerializeToString()
    return _size(len(metadata)) + metadata


def header_of(payload_bytes: int, attributes: Attributes) -> bytes:
    """Return the header in a batch for a message with attributes."""
    metadata = pb.SingleMessageMetadata(payload_size=payload_bytes)
    _set_attributes(metadata, attributes)
    encoded = metadata.SerializeToString()
    return _size(len(encoded)) + encoded


class OpenBatch:
    """The messages of one batch in their order."""

    __slots__ = ("_headers", "_payloads", "first", "size_bytes")

    def __init__(self) -> None:
        self._payloads: list[bytes] = []
        self._headers: list[bytes] | None = None  # None as long as all messages have only a payload
        self.size_bytes = 0  # payloads, and headers with attributes
        self.first: Attributes | None = None  # the entry repeats the key of its first message: brokers read only that one

    def __len__(self) -> int:
        return len(self._payloads)

    def add_plain(self, payload: bytes) -> int:
        """Add a message without attributes; return the new number of messages."""
        payloads = self._payloads
        payloads.append(payload)
        self.size_bytes += len(payload)
        if self._headers is not None:
            self._headers.append(plain_header(len(payload)))
        return len(payloads)

    def add(self, payload: bytes, header: bytes, attributes: Attributes) -> int:
        """Add a message with attributes and its header (`header_of`); return the new number of messages."""
        if self._headers is None:
            self._headers = [plain_header(len(earlier)) for earlier in self._payloads]
        if not self._payloads:
            self.first = attributes
        self._payloads.append(payload)
        self._headers.append(header)
        self.size_bytes += len(payload) + len(header)
        return len(self._payloads)

    def encode_payload(self) -> bytes:
        """Return the uncompressed payload of the entry."""
        payloads = self._payloads
        if self._headers is None:
            first_bytes = len(payloads[0])
            if all(len(payload) == first_bytes for payload in payloads):
                header = plain_header(first_bytes)
                return header + header.join(payloads)
            return b"".join([part for payload in payloads for part in (plain_header(len(payload)), payload)])
        return b"".join([part for both in zip(self._headers, payloads, strict=True) for part in both])


class SendFrames:
    """Creates the SEND frames of one producer."""

    def __init__(
        self,
        producer_id: int,
        producer_name: str,
        schema_version: bytes,
        compression: int,
        compress: Compressor | None,
        encryptor: MessageEncryptor | None = None,
    ) -> None:
        self._producer_id = producer_id
        self._base = pb.MessageMetadata(producer_name=producer_name, sequence_id=0, publish_time=0)
        if schema_version:
            self._base.schema_version = schema_version
        self._compression = compression
        self._compress = compress
        self._encryptor = encryptor
        self._is_plain = compress is None and encryptor is None
        self._lone_metadata = self._metadata(0, 0)
        self._lone_metadata.num_messages_in_batch = 1
        self._lone_command = _command(pb.CommandSend(producer_id=producer_id, sequence_id=0, num_messages=1))

    def batch(self, batch: OpenBatch, first_sequence_id: int, now_ms: int) -> tuple[FrameParts, int]:
        """Return the parts of the frame of a batch, and the size of its payload in it."""
        count = len(batch)
        if count == 1 and batch.first is None and self._is_plain:
            return self._lone(batch, first_sequence_id, now_ms)
        metadata = self._metadata(first_sequence_id, now_ms)
        metadata.num_messages_in_batch = count
        if count > 1:
            metadata.highest_sequence_id = first_sequence_id + count - 1
        if (first := batch.first) is not None:
            _set_key(metadata, first)
            if first.ordering_key is not None:
                metadata.ordering_key = first.ordering_key
        payload = self._sealed(metadata, batch.encode_payload())
        send = pb.CommandSend(producer_id=self._producer_id, sequence_id=first_sequence_id, num_messages=count)
        if count > 1:
            send.highest_sequence_id = first_sequence_id + count - 1
        return _frame(_command(send), metadata, payload), len(payload)

    def _lone(self, batch: OpenBatch, sequence_id: int, now_ms: int) -> tuple[FrameParts, int]:
        """Return the frame of one message without attributes whose sender waits for it, reusing the protobuf objects."""
        metadata, command, payload = self._lone_metadata, self._lone_command, batch.encode_payload()
        metadata.sequence_id, metadata.publish_time = sequence_id, now_ms
        command.send.sequence_id = sequence_id
        return _frame(command, metadata, payload), len(payload)

    def single(self, payload: bytes, attributes: Attributes, sequence_id: int, now_ms: int) -> tuple[FrameParts, int]:
        """Return the parts of the frame of an unbatched message, and the size of its payload and metadata."""
        metadata = self._metadata(sequence_id, now_ms)
        _set_attributes(metadata, attributes)
        if attributes.deliver_at_ms is not None:
            metadata.deliver_at_time = attributes.deliver_at_ms
        packed = self._sealed(metadata, payload)
        send = pb.CommandSend(producer_id=self._producer_id, sequence_id=sequence_id)
        return _frame(_command(send), metadata, packed), len(packed) + metadata.ByteSize()

    def chunks(
        self, payload: bytes, attributes: Attributes, sequence_id: int, now_ms: int, max_message_bytes: int
    ) -> list[FrameParts]:
        """Return the frames of a message cut into entries of at most `max_message_bytes`, all with one sequence id."""
        metadata = self._metadata(sequence_id, now_ms)
        _set_attributes(metadata, attributes)
        if attributes.deliver_at_ms is not None:
            metadata.deliver_at_time = attributes.deliver_at_ms
        packed = self._packed(metadata, payload)
        metadata.uuid = f"{metadata.producer_name}-{sequence_id}"
        metadata.total_chunk_msg_size = len(packed)
        metadata.num_chunks_from_msg = metadata.chunk_id = 0x7FFF_FFFF  # the largest values: the size must hold for all chunks
        if self._encryptor is not None:
            self._encryptor.describe(metadata)
        room_bytes = max_message_bytes - metadata.ByteSize() - (TAG_BYTES if self._encryptor is not None else 0)
        if room_bytes < max_message_bytes // 2:
            raise MessageTooLargeError(
                f"the key and properties of a message have {metadata.ByteSize():,} bytes; the broker takes messages of up to "
                f"{max_message_bytes:,} bytes, and half of that for them if the payload is cut into chunks"
            )
        pieces = [packed[start : start + room_bytes] for start in range(0, len(packed), room_bytes)]
        metadata.num_chunks_from_msg = len(pieces)
        frames = []
        for chunk_id, piece in enumerate(pieces):
            metadata.chunk_id = chunk_id
            send = pb.CommandSend(producer_id=self._producer_id, sequence_id=sequence_id, is_chunk=True)
            sealed = piece if self._encryptor is None else self._encryptor.encrypt(metadata, piece)
            frames.append(_frame(_command(send), metadata, sealed))
        return frames

    def _metadata(self, sequence_id: int, now_ms: int) -> pb.MessageMetadata:
        metadata = pb.MessageMetadata()
        metadata.CopyFrom(self._base)
        metadata.sequence_id, metadata.publish_time = sequence_id, now_ms
        return metadata

    def _sealed(self, metadata: pb.MessageMetadata, payload: bytes) -> bytes:
        """Return the payload compressed, then encrypted."""
        packed = self._packed(metadata, payload)
        return packed if self._encryptor is None else self._encryptor.encrypt(metadata, packed)

    def _packed(self, metadata: pb.MessageMetadata, payload: bytes) -> bytes:
        if self._compress is None:
            return payload
        if len(payload) > MAX_UNCOMPRESSED_BYTES:
            raise MessageTooLargeError(
                f"consumers decompress up to {MAX_UNCOMPRESSED_BYTES:,} bytes; this message has {len(payload):,}: send it without "
                "compression"
            )
        metadata.compression = self._compression  # type: ignore[assignment]  # to protobuf an enum is an int
        metadata.uncompressed_size = len(payload)
        return self._compress(payload)


def _set_attributes(metadata: Any, attributes: Attributes) -> None:
    """Set the fields that batched and unbatched messages have in common."""
    _set_key(metadata, attributes)
    if attributes.ordering_key is not None:
        metadata.ordering_key = attributes.ordering_key
    if attributes.properties:
        for key, value in attributes.properties.items():
            metadata.properties.add(key=key, value=value)
    if attributes.event_time_ms is not None:
        metadata.event_time = attributes.event_time_ms
    if attributes.is_null:
        metadata.null_value = True


def _set_key(metadata: Any, attributes: Attributes) -> None:
    if attributes.key is not None:
        metadata.partition_key = attributes.key
        if attributes.has_base64_key:
            metadata.partition_key_b64_encoded = True


def _command(send: pb.CommandSend) -> pb.BaseCommand:
    return pb.BaseCommand(type=pb.BaseCommand.SEND, send=send)


def _frame(send: pb.BaseCommand, metadata: pb.MessageMetadata, payload: bytes) -> FrameParts:
    command = send.SerializeToString()
    encoded = metadata.SerializeToString()
    sized_metadata = _size(len(encoded)) + encoded
    crc = crc32c_of(sized_metadata, payload)
    tail_bytes = 6 + len(sized_metadata) + len(payload)
    head = b"".join(
        (_sizes(4 + len(command) + tail_bytes, len(command)), command, _checksum(_CHECKSUM_MARKER, crc), sized_metadata)
    )
    return head, payload
