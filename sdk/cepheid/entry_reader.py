"""Decodes the messages of a received entry. No I/O.

Most messages of a batch have only a payload, and equal sizes have equal headers, which are parsed once. If all payloads
of a batch also have the same size, it is cut at fixed distances.
"""

from __future__ import annotations

import struct
from struct import Struct

from google.protobuf.message import DecodeError

from cepheid.compression import HOW_TO_INSTALL
from cepheid.errors import UnreadableMessageError
from cepheid_wire import BadTailError, WireError, decompress
from cepheid_wire import pulsar_api_pb2 as pb

Single = tuple[int, pb.SingleMessageMetadata | None, bytes]
"""Index in the batch, its own metadata (None: it has none), payload."""

_size_at = Struct(">I").unpack_from
_SIZE_BYTES = 4
_plain_headers: dict[bytes, int] = {}
"""Header of a message that has only a payload, preceded by its size, and the size of the payload that follows."""
_MAX_PLAIN_HEADERS = 4096
_PLAIN_HEADER_BYTES = 4  # tag and size of a payload below 2 MiB: larger ones need more


def unpack(metadata: pb.MessageMetadata, payload: bytes | memoryview) -> bytes:
    """Return the decrypted payload of an entry, or of all chunks of a message, decompressed. Raises UnreadableMessageError."""
    try:
        return decompress(metadata.compression, payload, metadata.uncompressed_size)
    except ImportError as error:
        codec = pb.CompressionType.Name(metadata.compression)
        raise UnreadableMessageError(f"{codec} needs the library {error.name}: {HOW_TO_INSTALL}") from None
    except WireError as error:
        raise UnreadableMessageError(str(error.args[0])) from None


def split_plain_batch(payload: bytes, count: int) -> list[bytes] | None:
    """Return the payloads of a batch whose messages have only payloads of one size. None: it is another kind of batch."""
    each_bytes, rest_bytes = divmod(len(payload), count)
    if rest_bytes or each_bytes < _SIZE_BYTES:
        return None
    body_start = _SIZE_BYTES + _size_at(payload)[0]
    if body_start > each_bytes or _plain_headers.get(payload[:body_start]) != each_bytes - body_start:
        return None
    for index in range(body_start):  # each byte of the first header is compared with those at its offset in the others
        if payload[index::each_bytes].count(payload[index]) != count:
            return None
    return [payload[start : start + each_bytes - body_start] for start in range(body_start, len(payload) + 1, each_bytes)]


def split_batch(payload: bytes, count: int) -> list[Single]:
    """Return the messages of a batch without those that compaction removed. Raises UnreadableMessageError."""
    singles: list[Single] = []
    plain, start, end, header_bytes = _plain_headers, 0, len(payload), 0
    try:
        for index in range(count):
            body_start = start + header_bytes  # most headers are as long as the previous one
            size_bytes = plain.get(payload[start:body_start])
            single = None
            if size_bytes is None:
                body_start = start + _SIZE_BYTES + _size_at(payload, start)[0]
                if body_start > end:
                    raise BadTailError(f"the header of message {index} of a batch of {count} reaches beyond its end")
                header_bytes = body_start - start
                size_bytes, single = _parse_header(payload[start:body_start])
            start = body_start + size_bytes
            if size_bytes < 0 or start > end:
                raise BadTailError(f"message {index} of a batch of {count} reaches beyond its end")
            if single is None or not single.compacted_out:
                singles.append((index, single, payload[body_start:start]))
    except (DecodeError, BadTailError, struct.error) as error:
        raise UnreadableMessageError(f"a batch of {count} messages is damaged: {error}") from None
    return singles


def _parse_header(sized_header: bytes) -> tuple[int, pb.SingleMessageMetadata | None]:
    """Return the size of the payload, and the metadata unless the size is all it has. Raises DecodeError."""
    if (size_bytes := _plain_headers.get(sized_header)) is not None:
        return size_bytes, None
    header = sized_header[_SIZE_BYTES:]
    single = pb.SingleMessageMetadata.FromString(header)
    if len(header) > _PLAIN_HEADER_BYTES or len(single.ListFields()) != 1:
        return single.payload_size, single
    if len(_plain_headers) < _MAX_PLAIN_HEADERS and single.payload_size >= 0:
        _plain_headers[sized_header] = single.payload_size
    return single.payload_size, None


MAX_LOST = 1000


class ChunkBuffer:
    """Chunks of incomplete messages. Bounded: the oldest message is dropped for a new one.

    After `add`, the caller takes `repeated` (places of chunks that were received before at another place) and `given_up` (places of
    chunks that were dropped because of the limit).
    """

    def __init__(self, limit_messages: int = 10) -> None:
        self.repeated: list[tuple[int, int]] = []
        self.given_up: list[tuple[int, int]] = []
        self._limit_messages = limit_messages
        self._lost: dict[str, None] = {}  # dropped messages: their further chunks are dropped, too
        self._pending: dict[str, tuple[list[bytes], list[tuple[int, int]]]] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def clear(self) -> None:
        self._pending.clear()
        self._lost.clear()

    def add(
        self, metadata: pb.MessageMetadata, at: tuple[int, int], payload: bytes | memoryview
    ) -> tuple[bytes, tuple[tuple[int, int], ...]] | None:
        """Return the whole payload and the places of all chunks with the last chunk, otherwise None."""
        pieces, places = self._pending.get(metadata.uuid, (None, []))
        if metadata.chunk_id == 0 and (pieces is None or at == places[0]):  # the same place: a redelivery
            self._pending.pop(metadata.uuid, None)
            self._lost.pop(metadata.uuid, None)
            while len(self._pending) >= self._limit_messages:
                self._give_up(next(iter(self._pending)))
            pieces, places = self._pending[metadata.uuid] = ([], [])
        if pieces is None:
            if metadata.uuid in self._lost:
                self.given_up.append(at)
            return None  # its beginning was not received
        if metadata.chunk_id != len(pieces):
            if metadata.chunk_id < len(pieces) and at not in places:
                self.repeated.append(at)
            return None
        pieces.append(bytes(payload))
        places.append(at)
        if len(pieces) < metadata.num_chunks_from_msg:
            return None
        del self._pending[metadata.uuid]
        return b"".join(pieces), tuple(places)

    def _give_up(self, uuid: str) -> None:
        self.given_up += self._pending.pop(uuid)[1]
        self._lost[uuid] = None
        if len(self._lost) > MAX_LOST:
            del self._lost[next(iter(self._lost))]
