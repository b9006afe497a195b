"""Rows of what the official Java and Go clients wrote: every codec, alone, in a batch, and in chunks."""

from __future__ import annotations

import pytest

from cepheid_decode import BadRecordError
from cepheid_wire import encode_tail, parse_metadata, split_tail
from tests.decode.decode_reference import decode
from tests.wire.official_clients.recorded import CLIENTS, CODECS, SHAPES, VALUES, recorded_entries


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("client", CLIENTS)
def test_what_an_official_client_wrote_is_read(client: str, codec: str, shape: str) -> None:
    rows = decode(recorded_entries(client, codec, shape), ["value"])
    assert [row["value"] for row in rows] == VALUES[shape]


@pytest.mark.parametrize(("change", "cut"), [(-1, 0), (1, 0), (0, 8)], ids=["longer", "shorter", "cut"])
def test_a_zlib_stream_without_an_end_must_still_have_the_size_that_its_metadata_says(change: int, cut: int) -> None:
    entry = recorded_entries("java", "zlib", "single")[0]
    metadata, payload = parse_metadata(entry), bytes(split_tail(entry)[1])
    metadata.uncompressed_size += change
    with pytest.raises(BadRecordError, match="its metadata says"):
        decode([encode_tail(metadata, payload[: len(payload) - cut])], ["value"])
