"""Whatever bytes come, rows are those that the protobuf library reads, or the entry is refused when the library refuses it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from hypothesis import given, settings
from hypothesis import strategies as st

from cepheid_decode import BadRecordError, OnBadRecord, decode_framing
from cepheid_decode.decode_fields import PADDING_BYTES, Kind, parse_fields, read_varints
from cepheid_decode.decode_framing import guess_starts
from cepheid_decode.decode_payloads import joined
from cepheid_decode.decode_records import MESSAGE_METADATA, SINGLE_MESSAGE_METADATA, RecordKind, parse_records
from cepheid_wire import BadTailError, encode_batch, encode_tail
from cepheid_wire import pulsar_api_pb2 as pb
from cepheid_wire.varint import varint
from tests.decode.decode_reference import batched, decode, message, metadata, reference_rows, single
from tests.wire.strategies import messages, shuffled

KINDS = [SINGLE_MESSAGE_METADATA, MESSAGE_METADATA]


def laid_out(records: list[bytes]) -> tuple[Any, Any, Any]:
    """The records one behind the other, with bytes of nobody between them."""
    gap = b"\x0a"
    data = joined([piece for record in records for piece in (gap, record)])
    ends = np.cumsum([len(record) + 1 for record in records]).astype(np.int64)
    return data, ends - np.array([len(record) for record in records]), ends


def assert_read_as_protobuf_reads(records: list[bytes], kind: RecordKind) -> None:
    found = parse_records(*laid_out(records), kind)
    assert len(found.data) >= PADDING_BYTES
    by_owner: dict[int, list[tuple[bytes, bytes]]] = {}
    for i, owner in enumerate(found.properties.owners.tolist()):
        key, value = (found.data[spans[0][i] : spans[1][i]].tobytes() for spans in (found.properties.keys, found.properties.values))
        by_owner.setdefault(owner, []).append((key, value))
    for row, record in enumerate(records):
        try:
            expected: Any = kind.message.FromString(record)
            accepted = expected.IsInitialized()
        except DecodeError:
            accepted = False
        if accepted and any(each.field_number == 8 and each.wire_type == 0 for each in UnknownFieldSet(expected)):
            continue  # a codec of the future is no unknown field to us: refused, here or when the payload is unpacked
        assert (row not in found.refused) == accepted, (record.hex(), found.refused.get(row))
        if not accepted:
            continue
        for number, field_kind in kind.fields.items():
            descriptor = kind.message.DESCRIPTOR.fields_by_number[number]
            if field_kind is Kind.REPEATED:
                continue
            has = expected.HasField(descriptor.name)
            assert bool(found.fields.present(number)[row]) == has, (descriptor.name, record.hex())
            if not has:
                continue
            value = getattr(expected, descriptor.name)
            if field_kind is Kind.BYTES:
                start, end = (int(bound[row]) for bound in found.fields.span(number))
                assert found.data[start:end].tobytes() == (value.encode() if isinstance(value, str) else value)
            else:
                shown = int(found.fields.number(number)[row])
                assert (shown != 0) == value if field_kind is Kind.BOOL else shown & (1 << 64) - 1 == value & (1 << 64) - 1
        encoded = [
            tuple(part.encode() if isinstance(part, str) else part for part in (pair.key, pair.value))
            for pair in expected.properties
        ]
        assert by_owner.get(row, []) == encoded


def mutated(chance: random.Random, record: bytes) -> bytes:
    changed = bytearray(record)
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(len(changed) + 1)
        match chance.randrange(4):
            case 0:
                del changed[at:]
            case 1:
                changed[at:at] = chance.randbytes(chance.randrange(1, 4))
            case 2:
                del changed[at : at + chance.randrange(1, 4)]
            case _ if at < len(changed):
                changed[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, changed[at] ^ 1 << chance.randrange(8)))
    return bytes(changed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.message.__name__)
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_record_reads_as_protobuf_reads_it(kind: RecordKind, data: st.DataObject) -> None:
    records = data.draw(st.lists(messages(kind.message).flatmap(shuffled), min_size=1, max_size=6))
    assert_read_as_protobuf_reads(records, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.message.__name__)
@settings(max_examples=40, deadline=None)
@given(st.data(), st.randoms(use_true_random=False))
def test_a_broken_record_reads_as_protobuf_reads_it(kind: RecordKind, data: st.DataObject, chance: random.Random) -> None:
    records = data.draw(st.lists(messages(kind.message).flatmap(shuffled), min_size=1, max_size=4))
    assert_read_as_protobuf_reads([*(mutated(chance, record) for record in records for _ in range(5)), *records], kind)


ODD = {
    "a number of ten bytes": b"\x18\x05\x40" + b"\xff" * 9 + b"\x01",
    "a number beyond 64 bits": b"\x18\x05\x40" + b"\xff" * 9 + b"\x7f",
    "a number of eleven bytes": b"\x18\x05\x40" + b"\xff" * 10 + b"\x01",
    "a size beyond 32 bits": b"\x18" + varint(1 << 32 | 5),
    "a negative size of five bytes": b"\x18\xff\xff\xff\xff\x0f",
    "a negative size": b"\x18" + varint(-1),
    "the size twice": b"\x18\x01\x18\x05",
    "a tag in too many bytes": b"\x98\x00\x05",
    "a tag of three bytes": b"\x18\x05\x80\x80\x01\x00",
    "field 0": b"\x18\x05\x00\x01",
    "field 0, delimited": b"\x18\x05\x02\x01a",
    "a group": b"\x18\x05\x5b\x08\x01\x5c",
    "a group that does not end": b"\x18\x05\x5b\x08\x01",
    "wire type 6": b"\x18\x05\x5e",
    "wire type 7": b"\x18\x05\x5f",
    "a known number with another wire type": b"\x1a\x01a\x18\x05\x12\x01k\x10\x07",
    "a text of more than there is": b"\x18\x05\x12\x7f",
    "a text of -1 bytes": b"\x18\x05\x12" + varint(-1),
    "a text whose size does not end": b"\x18\x05\x12" + b"\xff" * 11,
    "a fixed one cut off": b"\x18\x05\x61\x01\x02",
    "a truth that is 2": b"\x18\x05\x20\x02",
    "a truth of 64 bits": b"\x18\x05\x20" + varint(1 << 63),
    "a property without value": b"\x18\x05\x0a\x03\x0a\x01k",
    "a property that is none": b"\x18\x05\x0a\x01\xff",
    "nothing": b"",
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_record_reads_as_protobuf_reads_it(name: str) -> None:
    assert_read_as_protobuf_reads([b"\x18\x01", ODD[name], b"\x12\x01k\x18\x02"], SINGLE_MESSAGE_METADATA)


@given(st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 300), min_size=1, max_size=8))
def test_numbers_of_every_size(numbers: list[int]) -> None:
    encoded = [varint(number) for number in numbers]
    data = joined(encoded)
    ends = np.cumsum([len(each) for each in encoded])
    starts = ends - np.array([len(each) for each in encoded])
    values, following = read_varints(data, starts)
    assert (following == ends).all()
    assert [value & (1 << 64) - 1 for value in values.tolist()] == numbers


def test_fields_that_no_message_has_are_absent_everywhere() -> None:
    table = parse_fields(joined([b"\x08\x01"]), np.array([0]), np.array([2]), {1: Kind.INT32, 2: Kind.BYTES})
    assert table.present(2).tolist() == [False]
    assert table.number(9, default=4).tolist() == [4]
    assert not table.has_all(2)


# ---- Where messages begin ----

Batches = list[list[tuple[pb.SingleMessageMetadata, bytes]]]


def plain_messages() -> st.SearchStrategy[tuple[pb.SingleMessageMetadata, bytes]]:
    payloads = st.binary(max_size=30) | st.integers(0, 300).map(bytes) | st.just(b"\0\0\0\x02\x18\x00" * 3)
    keys = st.none() | st.sampled_from(["", "k", "k" * 150])
    return st.builds(lambda payload, key: message(payload, **({} if key is None else {"partition_key": key})), payloads, keys)


@pytest.mark.parametrize("way", ["seek", "lanes", "hop"])
@settings(max_examples=30, deadline=None)
@given(batches=st.lists(st.lists(plain_messages(), min_size=1, max_size=6), min_size=1, max_size=5))
def test_every_way_to_find_messages_finds_the_same(way: str, batches: Batches) -> None:
    payloads = [encode_batch(batch) for batch in batches]
    data, starts, ends = laid_out(payloads)
    counts = np.array([len(batch) for batch in batches])
    expected = []
    for start, batch in zip(starts.tolist(), batches, strict=True):
        for one in batch:
            expected.append(start)
            start += len(encode_batch([one]))
    with pytest.MonkeyPatch.context() as patch:
        _only(patch, way)
        places = guess_starts(data, starts, ends, counts)
    if way == "seek":  # of a batch it finds all, or nothing but its beginning
        expected = [at if found >= 0 else -1 for at, found in zip(expected, places.tolist(), strict=True)]
    assert places.tolist() == expected


@pytest.mark.parametrize("size_bytes", [255, 256, 1023])
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("payload", [b"x" * 20, bytes(20), b"\x00\x00\x03\x0a\x0a" * 4])
def test_messages_with_long_metadata_need_no_loop(size_bytes: int, every: int, payload: bytes) -> None:
    batch = [message(payload, partition_key="k" * (size_bytes - 5 if number % every == 0 else 1)) for number in range(50)]
    assert max(metadata.ByteSize() for metadata, _ in batch) == size_bytes
    data, starts, ends = laid_out([encode_batch(batch)] * 3)
    with pytest.MonkeyPatch.context() as patch:
        _only(patch, "seek")
        places = guess_starts(data, starts, ends, np.array([50] * 3))
    assert (places >= 0).all()
    assert (np.diff(places) > 0).all()


def _only(patch: pytest.MonkeyPatch, way: str) -> None:
    if way != "hop":
        patch.setattr(decode_framing, "hop", lambda *_: [])
    patch.setattr(decode_framing, "_are_lanes", lambda counts: way == "lanes" and len(counts) > 0)
    patch.setattr(decode_framing, "_SEEK_MAX_MESSAGE_BYTES", 1 << 40 if way == "seek" else -1)


def any_messages() -> st.SearchStrategy[tuple[pb.SingleMessageMetadata, bytes]]:
    return st.tuples(messages(pb.SingleMessageMetadata), st.binary(max_size=20))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["seek", "lanes", "hop"])
@settings(max_examples=30, deadline=None)
@given(batches=st.lists(st.lists(any_messages(), min_size=1, max_size=5), min_size=1, max_size=4))
def test_any_batches_read_as_protobuf_reads_them(way: str, batches: Batches) -> None:
    for batch in batches:
        for inner, _ in batch:
            inner.partition_key_b64_encoded = False
    tails = [batched(batch) for batch in batches]
    with pytest.MonkeyPatch.context() as patch:
        _only(patch, way)
        assert decode(tails) == reference_rows(tails)


def _made(chance: random.Random) -> bytes:
    count = chance.choice((1, 2, 5, 30))
    batch = [
        message(chance.randbytes(chance.randrange(40)), **({"partition_key": f"k{i}"} if chance.random() < 0.5 else {}))
        for i in range(count)
    ]
    codec = chance.choice((pb.NONE, pb.NONE, pb.LZ4, pb.ZLIB, pb.ZSTD, pb.SNAPPY))
    if chance.random() < 0.3:
        return single(chance.randbytes(20), partition_key="k", properties={"a": "b"})
    return batched(batch, compression=codec)


def _outcome(read: Callable[[list[bytes]], list[dict[str, Any]]], tail: bytes) -> list[dict[str, Any]] | None:
    try:
        return read([tail])
    except (BadRecordError, BadTailError, UnicodeError):
        return None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_a_damaged_entry_is_refused_or_reads_as_protobuf_reads_it(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(40):
        whole = _made(chance)
        tail = mutated(chance, whole[6:])  # without checksum
        found, expected = _outcome(decode, tail), _outcome(reference_rows, tail)
        if expected is None or any(isinstance(value, bytes) for row in expected for value in _texts(row)):
            continue_ok = found is None
        else:
            continue_ok = found == expected
        assert continue_ok or _is_beyond_the_reference(tail), (tail.hex(), found, expected)
        among = decode([whole, tail, whole], ["value"], on_bad_record=OnBadRecord.SKIP)
        alone = decode([whole], ["value"])
        assert among[: len(alone)] == alone == among[len(among) - len(alone) :]


def _texts(row: dict[str, Any]) -> list[Any]:
    return [row["key"], row["producer_name"], row["replicated_from"], *row["properties"], *row["properties"].values()]


def _is_beyond_the_reference(tail: bytes) -> bool:
    """What the reference does not know: chunks, markers, transactions, encryption, codecs of the future."""
    from cepheid_wire import parse_metadata

    try:
        described = parse_metadata(tail)
    except BadTailError:
        return False
    special = ("marker_type", "txnid_least_bits", "num_chunks_from_msg")
    return any(described.HasField(name) for name in special) or len(described.encryption_keys) > 0 or b"\x40" in tail


def test_false_places_lead_nowhere_and_end() -> None:
    """Keys that look like sizes and tags, cut off anywhere: each step forward is one, whatever stands there."""
    pattern = b"\0\0\x02\x0a\x12\x0a\0\0\0\x12\x12\x7f\0\0\0\x0a\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01" * 3
    for end in range(1, len(pattern)):
        tails = [batched([message(pattern[:end], partition_key="k"), message(pattern[end:]), message(pattern)])]
        assert decode(tails, ["value"]) == [{"value": row["value"]} for row in reference_rows(tails)]
        broken = encode_tail(metadata(num_messages_in_batch=3), pattern[:end])
        with pytest.raises(BadRecordError):
            decode([broken])


def test_damage_beside_good_batches_costs_only_itself() -> None:
    good = batched([message(b"%d" % i, partition_key=f"k{i}") for i in range(100)])
    bad = encode_tail(metadata(num_messages_in_batch=9), b"\0\0\0\x02\x18\x05" * 30)
    rows = decode([good, bad, good], ["value", "key"], on_bad_record=OnBadRecord.NULL)
    assert rows == [*decode([good], ["value", "key"]), {"value": None, "key": None}, *decode([good], ["value", "key"])]
