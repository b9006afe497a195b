from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import cramjam
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cepheid_wire import (
    MAX_BATCH_MESSAGES,
    SMALLEST_MESSAGE_BYTES,
    BadTailError,
    MetadataShape,
    add_checksum,
    count_messages,
    encode_tail,
    parse_metadata,
    read_metadata,
    split_tail,
)
from cepheid_wire import pulsar_api_pb2 as pb
from cepheid_wire.batch import encode_batch
from tests.wire.strategies import messages, shuffled

OPTIONAL = {  # field of the view → field of the metadata
    "num_messages_in_batch": "num_messages_in_batch",
    "highest_sequence_id": "highest_sequence_id",
    "ordering_key": "ordering_key",
    "event_time_ms": "event_time",
    "deliver_at_ms": "deliver_at_time",
    "uuid": "uuid",
    "chunk_id": "chunk_id",
    "num_chunks_from_msg": "num_chunks_from_msg",
    "marker_type": "marker_type",
    "txnid_least_bits": "txnid_least_bits",
    "txnid_most_bits": "txnid_most_bits",
    "replicated_from": "replicated_from",
}


def tail_of(metadata: bytes, payload: bytes = b"", checksum: bool = True) -> bytes:
    tail = len(metadata).to_bytes(4, "big") + metadata + payload
    return add_checksum(tail) if checksum else tail


def metadata_with(**fields: Any) -> pb.MessageMetadata:
    return pb.MessageMetadata(producer_name="p", sequence_id=1, publish_time=2, **fields)


@pytest.mark.slow
@given(st.data(), st.binary(min_size=18, max_size=48), st.booleans())
def test_what_is_read_equals_the_whole_metadata(data: st.DataObject, payload: bytes, checksum: bool) -> None:
    metadata = data.draw(messages(pb.MessageMetadata))
    if metadata.HasField("num_messages_in_batch"):
        metadata.num_messages_in_batch = 1 + metadata.num_messages_in_batch % 3  # allowed, and the tail has room for it
    written = data.draw(shuffled(metadata))
    tail = memoryview(tail_of(written, payload, checksum))

    view = read_metadata(tail)
    assert view.producer_name == metadata.producer_name
    assert (view.sequence_id, view.publish_time_ms) == (metadata.sequence_id, metadata.publish_time)
    for ours, theirs in OPTIONAL.items():
        assert getattr(view, ours) == (getattr(metadata, theirs) if metadata.HasField(theirs) else None)
    assert view.partition_key == (metadata.partition_key.encode() if metadata.HasField("partition_key") else None)
    assert view.partition_key_is_base64 == metadata.partition_key_b64_encoded
    assert view.is_encrypted == bool(metadata.encryption_keys)
    assert view.is_batch == metadata.HasField("num_messages_in_batch")
    assert count_messages(tail) == view.num_messages == metadata.num_messages_in_batch
    assert split_tail(tail) == (written, payload)


@pytest.mark.parametrize(("count", "is_batch"), [(None, False), (1, True), (1000, True)])
def test_a_batch_is_known_by_presence_of_its_count(count: int | None, is_batch: bool) -> None:
    tail = encode_tail(metadata_with(num_messages_in_batch=count), bytes(6000))
    assert read_metadata(tail).is_batch is is_batch
    assert count_messages(tail) == (count or 1)


def largest_batch(messages: int) -> bytes:
    """With messages as small as they can be."""
    return encode_batch([(pb.SingleMessageMetadata(), b"")] * messages)


def test_the_smallest_message_of_a_batch_has_the_size_that_is_counted_on() -> None:
    assert len(largest_batch(1000)) == 1000 * SMALLEST_MESSAGE_BYTES


@pytest.mark.parametrize(
    ("compression", "compress"),
    [
        (pb.NONE, bytes),
        (pb.ZLIB, lambda data: zlib.compress(data, 9)),
        (pb.LZ4, lambda data: bytes(cramjam.lz4.compress_block(data, store_size=False))),
        (pb.ZSTD, lambda data: bytes(cramjam.zstd.compress(data, 22))),
        (pb.SNAPPY, lambda data: bytes(cramjam.snappy.compress_raw(data))),
    ],
)
@pytest.mark.parametrize("count", [1, 2, 1000, 1_000_000])
def test_as_many_messages_as_a_producer_can_put_into_a_batch_are_counted(
    compression: int, compress: Callable[[bytes], bytes], count: int
) -> None:
    batch = largest_batch(1) * count
    fields = {"compression": compression, "uncompressed_size": len(batch)} if compression else {}
    metadata = metadata_with(num_messages_in_batch=count, **fields)
    tail = encode_tail(metadata, compress(batch))
    assert count_messages(tail) == read_metadata(tail).num_messages == count


@pytest.mark.parametrize(
    ("count", "payload_bytes", "fields"),
    [
        (2**31 - 1, 1, {}),
        (2**31 - 1, 7 << 20, {}),
        (100, 300, {}),
        (100, 300, {"compression": pb.ZSTD}),
        (100, 300, {"compression": pb.ZSTD, "uncompressed_size": 599}),
        (2**31 - 1, 1, {"compression": pb.ZSTD, "uncompressed_size": 2**32 - 1}),
        (MAX_BATCH_MESSAGES + 1, 1 << 20, {"compression": pb.ZSTD, "uncompressed_size": 2**32 - 1}),
        (10_000, 100, {"compression": pb.LZ4, "uncompressed_size": 60_000}),
        (100_000, 100, {"compression": pb.ZLIB, "uncompressed_size": 600_000}),
        (10_000, 300, {"compression": pb.SNAPPY, "uncompressed_size": 60_000}),
    ],
)
def test_a_batch_of_more_messages_than_its_payload_can_hold_is_refused(
    count: int, payload_bytes: int, fields: dict[str, Any]
) -> None:
    tail = encode_tail(metadata_with(num_messages_in_batch=count, **fields), bytes(payload_bytes))
    for read in (count_messages, read_metadata):
        with pytest.raises(BadTailError, match=f"a batch of {count} messages, but its payload has room for"):
            read(tail)


@pytest.mark.parametrize("count", [0, -1, -(2**31)])
def test_a_batch_of_nothing_is_refused(count: int) -> None:
    tail = encode_tail(metadata_with(num_messages_in_batch=count), b"x")
    with pytest.raises(BadTailError, match=f"a batch of {count} messages"):
        count_messages(tail)
    with pytest.raises(BadTailError, match=f"a batch of {count} messages"):
        read_metadata(tail)


@pytest.mark.parametrize(
    ("tail", "reason"),
    [
        (b"", "no room for metadata"),
        (b"\x00\x00\x00", "no room for metadata"),
        (b"\x0e\x01\x00\x00\x00\x00\x00\x00", "no room for metadata"),
        (b"\x0e\x01\x00\x00\x00\x00", "metadata of 234946560 bytes cannot be in a tail of 6"),  # read as a size
        (b"\x0e\x02\x00\x00\x00\x02\x08\x01\x0e\x01", "cannot be in a tail of 10"),  # broker entry metadata: not from clients
        (tail_of(b"", b"")[:-1] + b"\x01", "metadata of 1 bytes cannot be in a tail of 10"),
        (b"\xff\xff\xff\xff" + bytes(10), "metadata of 4294967295 bytes cannot be"),
        (tail_of(b"\xff\xff"), "2 bytes are not valid message metadata"),
        (tail_of(b""), "lacks producer_name, sequence_id, publish_time"),
        (tail_of(b"\x10\x01\x18\x01"), "lacks producer_name"),
        (tail_of(metadata_with().SerializeToString() + b"\x22\x03\x0a\x01k"), r"lacks properties\[0\].value"),
    ],
)
def test_a_tail_that_a_consumer_could_not_read_is_refused(tail: bytes, reason: str) -> None:
    for read in (count_messages, read_metadata, parse_metadata):
        with pytest.raises(BadTailError, match=reason):
            read(tail)


def test_names_and_keys_that_are_not_utf8_are_read_all_the_same() -> None:
    raw = b"\x0a\x02\xffp" + b"\x10\x01\x18\x02" + b"\x32\x02\xffk"
    view = read_metadata(tail_of(raw))
    assert view.producer_name == "\\xffp"
    assert view.partition_key == b"\xffk"


@given(st.binary(max_size=60))
def test_random_bytes_are_a_tail_or_refused(noise: bytes) -> None:
    for tail in (noise, b"\x0e\x01" + noise, tail_of(noise)):
        try:
            assert count_messages(tail) >= 1
        except BadTailError:
            pass


# Shapes


def learned(tail: bytes) -> MetadataShape:
    shape = MetadataShape()
    for _ in range(16):
        shape.learn(tail, parse_metadata(tail))
    return shape


COMMON = {"partition_key": "a-key", "uncompressed_size": 9, "event_time": 7, "ordering_key": b"ok", "schema_version": b"\0\1"}


@pytest.mark.parametrize(
    "fields",
    [
        {"sequence_id": 2**62, "publish_time": 2**40},
        {"event_time": 2**40, "uncompressed_size": 300},
        {"partition_key": "other", "ordering_key": b"\n\xff"},
    ],
    ids=str,
)
def test_metadata_with_other_numbers_and_keys_has_the_same_shape(fields: dict[str, Any]) -> None:
    shape = learned(tail_of(metadata_with(**COMMON).SerializeToString(), b"payload"))
    metadata = metadata_with(**COMMON)
    metadata.MergeFrom(pb.MessageMetadata(**fields))
    assert shape.fits(memoryview(tail_of(metadata.SerializeToString(), b"another payload")))


@pytest.mark.parametrize(
    "fields",
    [
        {"num_messages_in_batch": 2},
        {"num_chunks_from_msg": 2},
        {"marker_type": 1},
        {"producer_name": "q"},
        {"partition_key": "longer"},
        {"schema_version": b"\0\2"},
        {"deliver_at_time": 5},
        {"properties": [pb.KeyValue(key="k", value="v")]},
    ],
    ids=str,
)
def test_metadata_that_differs_in_more_has_another_shape(fields: dict[str, Any]) -> None:
    shape = learned(tail_of(metadata_with(**COMMON).SerializeToString()))
    metadata = metadata_with(**COMMON)
    metadata.MergeFrom(pb.MessageMetadata(**fields))
    assert not shape.fits(tail_of(metadata.SerializeToString(), b"payload"))


def test_no_shape_is_learned_from_large_metadata() -> None:
    """Compiling the pattern of 4 MiB of properties took 5 s and 471 MB."""
    for size, fits in ((900, True), (1024, False)):
        tail = tail_of(metadata_with(properties=[pb.KeyValue(key="k", value="x" * size)]).SerializeToString())
        assert learned(tail).fits(tail) is fits


@pytest.mark.parametrize(
    "encoded",
    [
        metadata_with(num_messages_in_batch=3).SerializeToString(),
        metadata_with(num_chunks_from_msg=2).SerializeToString(),
        metadata_with().SerializeToString() + b"\xc3\x3e\xc4\x3e",  # a group, which protobuf skips
    ],
)
def test_batches_chunks_and_groups_are_not_learned(encoded: bytes) -> None:
    tail = tail_of(encoded, bytes(40))
    assert not learned(tail).fits(tail)


@pytest.mark.slow
@given(st.data())
def test_any_single_message_is_learned(data: st.DataObject) -> None:
    metadata = data.draw(messages(pb.MessageMetadata))
    metadata.ClearField("num_messages_in_batch")
    metadata.ClearField("num_chunks_from_msg")
    for name in ("sequence_id", "publish_time", "event_time"):
        setattr(metadata, name, getattr(metadata, name) >> 1)  # above 2^63 they are parsed
    tail = tail_of(data.draw(shuffled(metadata)), data.draw(st.binary(max_size=8)))
    assert learned(tail).fits(tail)


def test_a_tail_without_checksum_is_not_learned_and_does_not_fit() -> None:
    encoded = metadata_with().SerializeToString()
    assert not learned(tail_of(encoded, checksum=False)).fits(tail_of(encoded, checksum=False))
    assert not learned(tail_of(encoded)).fits(tail_of(encoded, checksum=False))


@pytest.mark.slow
@given(st.data())
def test_what_fits_a_shape_is_one_message_that_consumers_can_read(data: st.DataObject) -> None:
    encoded = metadata_with(**COMMON).SerializeToString()
    at, removed = data.draw(st.integers(0, len(encoded) - 1)), data.draw(st.integers(0, 3))
    changed = encoded[:at] + data.draw(st.binary(min_size=removed, max_size=removed)) + encoded[at + removed :]
    tail = tail_of(changed, data.draw(st.binary(max_size=8)))
    if learned(tail_of(encoded)).fits(tail):
        assert count_messages(tail) == 1
        assert parse_metadata(tail).schema_version == COMMON["schema_version"]
