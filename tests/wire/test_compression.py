"""Payloads as clients compress them, and those that are not what they say."""

from __future__ import annotations

import zlib

import cramjam
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cepheid_wire import BadTailError, decompress
from cepheid_wire import pulsar_api_pb2 as pb

PAYLOAD = b"the same words over and over, " * 50
KINDS = [pb.LZ4, pb.ZLIB, pb.ZSTD, pb.SNAPPY]


def compressed(kind: int, data: bytes) -> bytes:
    if kind == pb.ZLIB:
        return zlib.compress(data)
    if kind == pb.LZ4:
        return bytes(cramjam.lz4.compress_block(data, store_size=False))
    return bytes(cramjam.zstd.compress(data) if kind == pb.ZSTD else cramjam.snappy.compress_raw(data))


@pytest.mark.parametrize("kind", KINDS, ids=pb.CompressionType.Name)
def test_a_payload_is_decompressed_to_the_size_it_says(kind: int) -> None:
    packed = compressed(kind, PAYLOAD)
    assert decompress(kind, packed, len(PAYLOAD)) == PAYLOAD
    assert decompress(kind, memoryview(packed), len(PAYLOAD)) == PAYLOAD
    for size in (len(PAYLOAD) - 1, len(PAYLOAD) + 1, 1 << 31, -1):
        with pytest.raises(BadTailError):
            decompress(kind, packed, size)
    # The end of a zlib stream may be missing, as it is in what the Java client writes, but nothing of its content.
    for broken in (packed[: -8 if kind == pb.ZLIB else -3], b"", b"\x00" * 40, bytes(reversed(packed))):
        with pytest.raises(BadTailError):
            decompress(kind, broken, len(PAYLOAD))


def test_what_is_not_compressed_stays_as_it_is() -> None:
    assert decompress(pb.NONE, memoryview(PAYLOAD), 0) == PAYLOAD


@pytest.mark.parametrize("kind", KINDS, ids=pb.CompressionType.Name)
@given(data=st.binary(max_size=200), size=st.integers(0, 300))
def test_bytes_of_anybody_are_a_payload_of_that_size_or_refused(kind: int, data: bytes, size: int) -> None:
    try:
        assert len(decompress(kind, data, size)) == size
    except BadTailError:
        pass


def test_a_small_payload_that_claims_to_be_small_takes_no_memory() -> None:
    bomb = zlib.compress(b"\x00" * (4 << 20))
    with pytest.raises(BadTailError, match="1001 bytes uncompressed"):
        decompress(pb.ZLIB, bomb, 1000)
