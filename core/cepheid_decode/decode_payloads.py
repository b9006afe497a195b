"""Decompresses payloads into the same buffer, after the bytes that hold them.

LZ4 │ one raw block, no frame header       ZLIB │ a zlib stream, perhaps without its end
ZSTD │ one frame                           SNAPPY │ raw, no frame header

Rule 1: the output must be as large as the metadata says, or the payload is rejected. At most `MAX_PAYLOAD_BYTES` are allocated for
a payload, `MAX_CHUNKED_BYTES` for a chunked one: what a producer wrote cannot decide how much memory a reader needs.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import cramjam
import numpy as np

from cepheid_decode.decode_fields import PADDING_BYTES, Bytes

MAX_PAYLOAD_BYTES = 64 << 20  # twelve times the largest message that clients send by default
MAX_CHUNKED_BYTES = 512 << 20
NOT_COMPRESSED = 0

Unpack: TypeAlias = Callable[[Any, Bytes], int]  # source, target; returns the bytes written


def _unpack_lz4(source: Any, target: Any) -> int:
    return int(cramjam.lz4.decompress_block_into(source, target, output_len=len(target)))


def _unpack_zlib(source: Any, target: Bytes) -> int:
    # One byte more, so that a longer payload is noticed. The declared size decides, not the end of the stream: the official Java
    # client ends with a sync flush and writes no final block (CompressionCodecZLib: deflate(…, SYNC_FLUSH) without finish()).
    unpacked = zlib.decompressobj().decompress(source, len(target) + 1)
    if len(unpacked) > len(target):
        raise ValueError(f"it has more than the {len(target)} bytes that its metadata says")
    target[: len(unpacked)] = np.frombuffer(unpacked, np.uint8)
    return len(unpacked)


def _unpack_zstd(source: Any, target: Any) -> int:
    return int(cramjam.zstd.decompress_into(source, target))


def _unpack_snappy(source: Any, target: Any) -> int:
    return int(cramjam.snappy.decompress_raw_into(source, target))


_CODECS: dict[int, tuple[str, Unpack]] = {
    1: ("LZ4", _unpack_lz4),
    2: ("ZLIB", _unpack_zlib),
    3: ("ZSTD", _unpack_zstd),
    4: ("SNAPPY", _unpack_snappy),
}


MAX_COMPRESSION = max(_CODECS)


def refusal(compression: int, uncompressed_size: int, limit_bytes: int) -> str:
    """Return why a payload of an unknown codec, or one that is too large, is not decompressed."""
    if compression not in _CODECS:
        return f"compression {compression} is unknown"
    return f"{_CODECS[compression][0]} payload claims {uncompressed_size} bytes, the limit is {limit_bytes}"


def unpack_into(target: Bytes, compression: int, source: Bytes | memoryview) -> str | None:
    """Fill `target`, which is as large as the metadata says; or return why the payload is rejected."""
    name, unpack = _CODECS[compression]
    if not len(target):  # codecs differ in how they compress nothing
        return None
    try:
        written = unpack(source, target)
    except (cramjam.DecompressionError, zlib.error, ValueError, OSError) as error:
        return f"{name} payload of {len(source)} bytes cannot be decompressed: {error}"
    if written != len(target):
        return f"{name} payload has {written} bytes, its metadata says {len(target)}"
    return None


def extended(data: Bytes, more_bytes: int) -> Bytes:
    """Return a copy of `data` with room for `more_bytes` before its padding."""
    start = len(data) - PADDING_BYTES
    longer = np.empty(len(data) + more_bytes, np.uint8)
    longer[:start] = data[:start]
    longer[-PADDING_BYTES:] = 0
    return longer


def joined(pieces: Sequence[Any]) -> Bytes:
    """Return all pieces (bytes or views of bytes), concatenated, and the padding."""
    return np.frombuffer(b"".join((*pieces, bytes(PADDING_BYTES))), np.uint8)
