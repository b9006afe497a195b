"""Keys: their hashes, who owns which of them, and what consumers may ask for."""

from __future__ import annotations

import time
from collections import Counter
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cepheid_broker.dispatch import key_owners
from cepheid_broker.dispatch.key_hash import HASHES, _hash_of_short_key, hash_of_key, hash_of_metadata, key_text, murmur3_32
from cepheid_broker.dispatch.key_owners import AutoSplit, Sticky
from cepheid_broker.dispatch.key_sharing import KeySharing, key_sharing_of
from cepheid_broker.errors import ConsumerAssignError
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.scripted_client import message, subscribe


@pytest.mark.parametrize(
    ("key", "expected"),
    [  # of the algorithm's published test vectors, and of its reference implementation
        (b"", 0),
        (b"test", 0xBA6BD213),
        (b"Hello, world!", 0xC0363E43),
        (b"The quick brown fox jumps over the lazy dog", 0x2E4FF723),
    ],
)
def test_murmur3(key: bytes, expected: int) -> None:
    assert murmur3_32(key) == expected
    assert hash_of_key(key) == (expected & 0x7FFFFFFF) % 65536


@pytest.mark.parametrize("size_bytes", [255, 256, 257, 4096, 4097, 5 << 20])
def test_keys_of_any_length_have_one_hash_each_and_cost_little(size_bytes: int) -> None:
    key = b"k" * size_bytes
    assert hash_of_key(key) == hash_of_key(bytes(key)) in range(HASHES)
    if size_bytes <= 4096:
        assert hash_of_key(key) == (murmur3_32(key) & 0x7FFFFFFF) % HASHES
    began = time.process_time()
    for number in range(20):
        hash_of_key(b"%d" % number + key)
    assert time.process_time() - began < 5  # byte by byte the longest keys take 15 s
    remembered = _hash_of_short_key.cache_info().currsize
    hash_of_key(b"a key that is too long to be remembered" + key)
    assert _hash_of_short_key.cache_info().currsize - remembered == 0 or size_bytes < 256


def metadata(sequence_id: int = 0, **fields: object) -> pb.MessageMetadata:
    return pb.MessageMetadata(producer_name="p", sequence_id=sequence_id, publish_time=1, **fields)  # type: ignore[arg-type]


def test_the_ordering_key_decides_then_the_partition_key() -> None:
    assert hash_of_metadata(metadata(partition_key="a", ordering_key=b"b")) == hash_of_key(b"b")
    assert hash_of_metadata(metadata(partition_key="a")) == hash_of_key(b"a")
    assert hash_of_metadata(metadata(partition_key="YQ==", partition_key_b64_encoded=True)) == hash_of_key(b"a")
    assert hash_of_metadata(metadata(partition_key="no base64!", partition_key_b64_encoded=True)) in range(HASHES)


def test_messages_without_a_key_are_spread_but_the_chunks_of_one_stay_together() -> None:
    assert len({hash_of_metadata(metadata(sequence_id)) for sequence_id in range(1000)}) > 900
    assert hash_of_metadata(metadata(7, chunk_id=0)) == hash_of_metadata(metadata(7, chunk_id=1))


def test_keys_are_told_to_people_in_a_sensible_length() -> None:
    assert key_text(message(0, partition_key="order-1")) == "order-1"
    assert key_text(message(0)) is None
    assert key_text(b"damaged") is None
    assert len(key_text(message(0, ordering_key=b"x" * 5000)) or "") == 100


@pytest.mark.slow
@given(st.lists(st.integers(0, 30), max_size=60))
def test_auto_split_stays_even_and_moves_only_what_it_must(joins_and_leaves: list[int]) -> None:
    """A number that is connected leaves, another one joins."""
    owners, connected = AutoSplit(), list[int]()
    before = [owners.owner(key_hash) for key_hash in range(0, HASHES, 8)]
    for consumer in joins_and_leaves:
        if leaves := consumer in connected:
            owners.leave(consumer)
            connected.remove(consumer)
        else:
            owners.join(consumer)
            connected.append(consumer)
        after = [owners.owner(key_hash) for key_hash in range(0, HASHES, 8)]
        for old, new in zip(before, after, strict=True):
            assert old == new or (old == consumer if leaves else new == consumer), "it moved between two that stayed"
        shares = Counter(after)
        assert sorted(shares, key=str) == sorted(connected or [None], key=str)
        assert max(shares.values()) - min(shares.values()) <= len(connected) + 1
        before = after


def test_more_consumers_than_slots_do_no_harm() -> None:
    with mock.patch.multiple(key_owners, SLOTS=4, _SLOT_SHIFT=14):
        owners = AutoSplit()
        for consumer in range(7):
            owners.join(consumer)
        for consumer in range(4):
            owners.leave(consumer)
        assert {owners.owner(key_hash) for key_hash in range(HASHES)} == {4, 5, 6}


def test_sticky_hashes_belong_to_the_ranges_that_were_asked_for() -> None:
    owners = Sticky()
    owners.join(1, [(0, 9), (100, 199)])
    owners.join(2, [(10, 19)])
    assert [owners.owner(key_hash) for key_hash in (0, 9, 10, 19, 20, 99, 100, 199, 200)] == [1, 1, 2, 2, None, None, 1, 1, None]
    owners.leave(1)
    assert [owners.owner(key_hash) for key_hash in (0, 10)] == [None, 2]


def ask(*ranges: tuple[int, int], mode: int = 1, **fields: object) -> pb.CommandSubscribe:
    meta = pb.KeySharedMeta(keySharedMode=mode, hashRanges=[pb.IntRange(start=a, end=b) for a, b in ranges], **fields)  # type: ignore[arg-type]
    return subscribe("t", "s", 1, 1, subType=pb.CommandSubscribe.Key_Shared, keySharedMeta=meta)


def test_what_is_asked_for_is_understood() -> None:
    assert key_sharing_of(ask((10, 19), (0, 9))) == KeySharing(sticky=True, ranges=((0, 9), (10, 19)))
    assert key_sharing_of(ask(mode=0, allowOutOfOrderDelivery=True)) == KeySharing(out_of_order=True)
    assert key_sharing_of(subscribe("t", "s", 1, 1, subType=pb.CommandSubscribe.Key_Shared)) == KeySharing()


@pytest.mark.parametrize(
    ("ranges", "text"),
    [
        ([], "needs 1 to 1000 hash ranges, not 0"),
        ([(0, 1)] * 1001, "not 1001"),
        ([(5, 4)], "5..4 is invalid"),
        ([(-1, 4)], "-1..4 is invalid"),
        ([(0, 65536)], "0..65536 is invalid"),
        ([(0, 10), (10, 20)], "0..10 and 10..20 of one consumer overlap"),
    ],
)
def test_bad_ranges_are_refused_by_name(ranges: list[tuple[int, int]], text: str) -> None:
    with pytest.raises(ConsumerAssignError, match=text.replace(".", r"\.")):
        key_sharing_of(ask(*ranges))


def test_a_conflict_names_the_ranges_and_the_holder() -> None:
    held = KeySharing(sticky=True, ranges=((0, 99), (200, 299)))
    assert KeySharing(sticky=True, ranges=((100, 199), (300, 400))).conflict(held, "a") is None
    overlap = KeySharing(sticky=True, ranges=((150, 250),)).conflict(held, "a")
    assert overlap is not None
    assert "150..250 overlaps 200..299 of consumer 'a'" in str(overlap)
    mode = KeySharing().conflict(held, "a")
    assert mode is not None
    assert "auto-split, in order; consumer 'a' of the subscription has sticky, in order" in str(mode)
