from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cepheid_wire import BadTailError, decode_batch, encode_batch
from cepheid_wire import pulsar_api_pb2 as pb
from tests.wire.strategies import messages


@pytest.mark.slow
@given(st.lists(st.tuples(messages(pb.SingleMessageMetadata), st.binary(max_size=20)), max_size=5))
def test_a_batch_survives(batch: list[tuple[pb.SingleMessageMetadata, bytes]]) -> None:
    payload = encode_batch(batch)
    decoded = list(decode_batch(payload, len(batch)))
    assert [metadata for metadata, _ in decoded] == [metadata for metadata, _ in batch]
    assert [bytes(body) for _, body in decoded] == [body for _, body in batch]
    assert [metadata.payload_size for metadata, _ in batch] == [len(body) for _, body in batch]


ONE = encode_batch([(pb.SingleMessageMetadata(), b"abc")])


@pytest.mark.parametrize(
    ("payload", "num_messages", "reason"),
    [
        (b"", 1, "ends before message 0"),
        (ONE, 2, "ends before message 1"),
        (ONE + b"\x00\x00", 2, "ends before message 1"),
        (ONE + b"x", 1, "1 bytes after a batch of 1"),
        (ONE[:-1], 1, "message 0 claims 3 bytes, 2 are left"),
        (b"\x00\x00\x00\x09\x18\x01", 1, "metadata of message 0 reaches beyond"),
        (b"\x00\x00\x00\x01\xff", 1, "metadata of message 0: "),
        (b"\x00\x00\x00\x0b\x18" + b"\xff" * 9 + b"\x01", 1, "message 0 claims -1 bytes"),
    ],
)
def test_a_batch_that_does_not_add_up_is_refused(payload: bytes, num_messages: int, reason: str) -> None:
    with pytest.raises(BadTailError, match=reason):
        list(decode_batch(payload, num_messages))


def test_a_message_without_a_size_is_refused() -> None:
    with pytest.raises(BadTailError, match="metadata of message 0 lacks a required field"):
        list(decode_batch(b"\x00\x00\x00\x00abc", 1))
