"""Decompresses payloads: the whole message or batch, before it is encrypted (protocol.md §10.2). For tools and admin calls: a
broker stores and delivers payloads unchanged.

LZ4 │ one raw block, no frame header       ZLIB │ a zlib stream, perhaps without its end
ZSTD │ one frame                           SNAPPY │ raw, no frame header

The output must be as large as the metadata says, or the payload is rejected: what a peer sends cannot make this process allocate
more than `MAX_UNCOMPRESSED_BYTES`.
"""

from __future__ import annotations

import zlib

from cepheid_wire import pulsar_api_pb2 as pb
from cepheid_wire.errors import BadTailError

MAX_UNCOMPRESSED_BYTES = 64 << 20  # twelve times the largest message that clients send by default


def decompress(compression: int, payload: bytes | memoryview, uncompressed_size: int) -> bytes:
    """Raises BadTailError if the payload is not compressed that way, or is not `uncompressed_size` long."""
    if compression == pb.NONE:
        return bytes(payload)
    kind = pb.CompressionType.Name(compression)
    if not 0 <= uncompressed_size <= MAX_UNCOMPRESSED_BYTES:
        message = f"{kind} payload claims {uncompressed_size} bytes uncompressed, the limit is {MAX_UNCOMPRESSED_BYTES}"
        raise BadTailError(message, uncompressed_size=uncompressed_size)
    try:
        data = _decompressed(compression, payload, uncompressed_size)
    except (zlib.error, ValueError, OSError) as error:
        raise BadTailError(f"{kind} payload cannot be decompressed: {error}", payload_bytes=len(payload)) from None
    if len(data) != uncompressed_size:
        message = f"{kind} payload has {len(data)} bytes uncompressed, its metadata says {uncompressed_size}"
        raise BadTailError(message, uncompressed_size=uncompressed_size)
    return data


def _decompressed(compression: int, payload: bytes | memoryview, size_bytes: int) -> bytes:
    if compression == pb.ZLIB:
        # One byte more, so that a longer payload is noticed. The declared size decides, not the end of the stream: the official
        # Java client ends with a sync flush and writes no final block (CompressionCodecZLib: deflate(…, SYNC_FLUSH), no finish()).
        return zlib.decompressobj().decompress(payload, size_bytes + 1)
    import cramjam  # only tools and admin calls need it

    if size_bytes == 0:
        return b""
    output = bytearray(size_bytes)
    try:
        if compression == pb.LZ4:
            written = cramjam.lz4.decompress_block_into(bytes(payload), output, output_len=size_bytes)
        elif compression == pb.ZSTD:
            written = cramjam.zstd.decompress_into(bytes(payload), output)
        else:
            written = cramjam.snappy.decompress_raw_into(bytes(payload), output)
    except cramjam.DecompressionError as error:
        raise ValueError(error) from None
    return bytes(output[:written])
