"""What the official Java and Go clients wrote can be read: every codec, alone, in a batch, and in chunks."""

from __future__ import annotations

import pytest

from cepheid_wire import BadTailError, decode_batch, decompress, parse_metadata, split_tail
from cepheid_wire import pulsar_api_pb2 as pb
from tests.wire.official_clients.recorded import CLIENTS, CODECS, SHAPES, VALUES, recorded_entries


def recorded_values(client: str, codec: str, shape: str) -> list[bytes]:
    entries = [(parse_metadata(entry), bytes(split_tail(entry)[1])) for entry in recorded_entries(client, codec, shape)]
    if shape == "chunked":
        entries = [(entries[0][0], b"".join(payload for _, payload in entries))]
    bodies = [decompress(metadata.compression, payload, metadata.uncompressed_size) for metadata, payload in entries]
    if shape == "batched":
        return [bytes(value) for _, value in decode_batch(bodies[0], entries[0][0].num_messages_in_batch)]
    return bodies


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("client", CLIENTS)
def test_what_an_official_client_wrote_is_decompressed(client: str, codec: str, shape: str) -> None:
    assert recorded_values(client, codec, shape) == VALUES[shape]


def test_a_zlib_stream_without_an_end_must_still_have_the_size_that_its_metadata_says() -> None:
    entry = recorded_entries("java", "zlib", "single")[0]
    metadata, payload = parse_metadata(entry), bytes(split_tail(entry)[1])
    assert payload.endswith(b"\x00\x00\xff\xff"), "the Java client ends with a sync flush"
    for packed, size in (
        (payload, metadata.uncompressed_size - 1),
        (payload, metadata.uncompressed_size + 1),
        (payload[:-8], metadata.uncompressed_size),
    ):
        with pytest.raises(BadTailError, match="bytes uncompressed, its metadata says"):
            decompress(pb.ZLIB, packed, size)
