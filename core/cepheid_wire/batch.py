"""The payload of a batch, not compressed: its messages, one after the other. For tools; a broker does not read it.
for each message (protocol.md §10.2).
for each message (protocol.md §10.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from struct import Struct

from google.protobuf.message import DecodeError

from cepheid_wire import pulsar_api_pb2 as pb
from cepheid_wire.errors import BadTailError

SIZE_BYTES = 4
_size_at = Struct(">I").unpack_from
_size = Struct(">I").pack


def decode_batch(payload: bytes | memoryview, num_messages: int) -> Iterator[tuple[pb.SingleMessageMetadata, memoryview]]:
    """Yield the messages of a batch; bodies are views of `payload`. Raises BadTailError if there are not exactly `num_messages`."""
    view = memoryview(payload)
    start = 0
    for index in range(num_messages):
        if len(view) - start < SIZE_BYTES:
            raise BadTailError(f"a batch of {num_messages} ends before message {index}", payload_bytes=len(view))
        metadata_start = start + SIZE_BYTES
        body_start = metadata_start + _size_at(view, start)[0]
        if body_start > len(view):
            raise BadTailError(f"metadata of message {index} reaches beyond the batch", payload_bytes=len(view))
        try:
            metadata = pb.SingleMessageMetadata.FromString(bytes(view[metadata_start:body_start]))
        except DecodeError as error:
            raise BadTailError(f"metadata of message {index}: {error}", payload_bytes=len(view)) from None
        if not metadata.IsInitialized():
            raise BadTailError(f"metadata of message {index} lacks a required field", payload_bytes=len(view))
        start = body_start + metadata.payload_size
        if metadata.payload_size < 0 or start > len(view):
            raise BadTailError(
                f"message {index} claims {metadata.payload_size} bytes, {len(view) - body_start} are left",
                payload_bytes=len(view),
            )
        yield metadata, view[body_start:start]
    if start != len(view):
        raise BadTailError(f"{len(view) - start} bytes after a batch of {num_messages}", payload_bytes=len(view))


def encode_batch(messages: Iterable[tuple[pb.SingleMessageMetadata, bytes | memoryview]]) -> bytes:
    """Return the payload of a batch; sets `payload_size` in each metadata."""
    pieces: list[bytes | memoryview] = []
    for metadata, body in messages:
        metadata.payload_size = len(body)
        encoded = metadata.SerializeToString()
        pieces += (_size(len(encoded)), encoded, body)
    return b"".join(pieces)
