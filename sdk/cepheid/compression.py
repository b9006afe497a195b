"""Compression of payloads: zlib from the standard library, the others from `cramjam` if it is installed."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Literal

from cepheid.errors import MissingExtraError, UsageError
from cepheid_wire import pulsar_api_pb2 as pb

Compression = Literal["none", "zlib", "lz4", "zstd", "snappy"]
Compressor = Callable[[bytes], bytes]

CODES: dict[str, int] = {"none": pb.NONE, "zlib": pb.ZLIB, "lz4": pb.LZ4, "zstd": pb.ZSTD, "snappy": pb.SNAPPY}
HOW_TO_INSTALL = "pip install 'cepheid[compression]'"


def compressor_of(name: str) -> tuple[int, Compressor | None]:
    """Return the protocol's code and the compression function; no function for "none".

    Raises UsageError for an unknown name, MissingExtraError if the library is not installed.
    """
    if name not in CODES:
        raise UsageError(f"compression must be one of {', '.join(CODES)}, got {name!r}")
    code = CODES[name]
    if code == pb.NONE:
        return code, None
    if code == pb.ZLIB:
        return code, zlib.compress
    try:
        import cramjam
    except ImportError:
        raise MissingExtraError(f"compression {name!r} needs the library cramjam: {HOW_TO_INSTALL}") from None
    compressors: dict[int, Compressor] = {
        pb.LZ4: lambda data: bytes(cramjam.lz4.compress_block(data, store_size=False)),
        pb.ZSTD: lambda data: bytes(cramjam.zstd.compress(data)),
        pb.SNAPPY: lambda data: bytes(cramjam.snappy.compress_raw(data)),
    }
    return code, compressors[code]
