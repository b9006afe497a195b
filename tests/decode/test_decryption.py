"""Encrypted entries, decoded with the right keys, with others, and with none. What the official client encrypts: tests/scan."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from cepheid.encryption import MessageEncryptor
from cepheid_decode import BadRecordError, OnBadRecord, ScanCounters
from cepheid_wire import encode_batch, encode_tail
from cepheid_wire import pulsar_api_pb2 as pb
from cepheid_wire.payload_decryption import PayloadDecryptor
from tests.decode.decode_reference import compress, decode, message, metadata, piece, single


class Keys:
    def __init__(self) -> None:
        self._key = rsa.generate_private_key(65537, 2048)

    def public_key(self, name: str) -> bytes:
        return self._key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)

    def private_key(self, name: str, metadata: Mapping[str, str]) -> bytes:
        return self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


KEYS, OTHERS = Keys(), Keys()


def sealed(payload: bytes, keys: Keys = KEYS, **fields: Any) -> bytes:
    described = metadata(**fields)
    encryptor = MessageEncryptor(["app"], keys)
    return encode_tail(described, encryptor.encrypt(described, payload))


def sealed_packed(codec: int, payload: bytes, **fields: Any) -> bytes:
    described = metadata(compression=codec, **fields)
    packed = compress(codec, payload, described)
    return encode_tail(described, MessageEncryptor(["app"], KEYS).encrypt(described, packed))


def sealed_chunks(payload: bytes, count: int, keys: tuple[Keys, ...] = (KEYS,), codec: int = pb.NONE) -> list[bytes]:
    described = metadata(uuid="u", num_chunks_from_msg=count, compression=codec)
    packed = compress(codec, payload, described)
    described.total_chunk_msg_size = len(packed)
    step = -(-len(packed) // count)
    tails = []
    for chunk_id, each in zip(range(count), itertools.cycle(keys), strict=False):
        described.chunk_id = chunk_id
        part = packed[chunk_id * step : (chunk_id + 1) * step]
        tails.append(encode_tail(described, MessageEncryptor(["app"], each).encrypt(described, part)))
    return tails


def opened(tails: list[bytes], columns: tuple[str, ...] = ("value",), **options: Any) -> list[dict[str, Any]]:
    return decode(tails, columns, decryptor=PayloadDecryptor(KEYS.private_key), **options)


@pytest.mark.parametrize("codec", [pb.NONE, pb.LZ4, pb.ZLIB, pb.ZSTD, pb.SNAPPY])
def test_messages_alone_and_in_batches_are_decrypted_before_they_are_unpacked(codec: int) -> None:
    batch = encode_batch([message(b"one", partition_key="k"), message(b"two")])
    tails = [
        single(b"plain"),
        sealed_packed(codec, b"alone" * 50, partition_key="a", properties={"p": "q"}),
        sealed_packed(codec, batch, num_messages_in_batch=2),
        sealed_packed(codec, b""),
    ]
    assert opened(tails, ("key", "value", "batch_index", "properties")) == [
        {"key": None, "value": b"plain", "batch_index": None, "properties": {}},
        {"key": "a", "value": b"alone" * 50, "batch_index": None, "properties": {"p": "q"}},
        {"key": "k", "value": b"one", "batch_index": 0, "properties": {}},
        {"key": None, "value": b"two", "batch_index": 1, "properties": {}},
        {"key": None, "value": b"", "batch_index": None, "properties": {}},
    ]


@pytest.mark.parametrize("codec", [pb.NONE, pb.ZSTD])
def test_chunks_are_decrypted_one_by_one(codec: int) -> None:
    payload = bytes(range(256)) * 10
    tails = sealed_chunks(payload, 3, codec=codec)
    assert opened([*tails, single(b"m")]) == [{"value": payload}, {"value": b"m"}]
    assert opened(tails[2:], before=tails[:2], of_piece=piece(1, first_entry_id=2, last_entry_id=2)) == [{"value": payload}]


def test_without_keys_a_message_in_chunks_is_shown_whole_and_encrypted() -> None:
    (row,) = decode(sealed_chunks(b"0123456789", 2), ["value", "properties"], on_bad_record=OnBadRecord.NULL)
    assert len(row["value"]) == 10 + 2 * 16
    assert "encryption.key.app" in row["properties"]


def test_what_the_keys_do_not_decrypt_is_a_bad_record_and_shown_as_it_is_stored() -> None:
    tails = [sealed(b"first"), sealed(b"secret", OTHERS), *sealed_chunks(b"0123456789", 2, (OTHERS,)), sealed(b"last")]
    with pytest.raises(BadRecordError, match=r"12:1 of .* its payload cannot be decrypted: key 'app': "):
        opened(tails)
    counters = ScanCounters()
    assert opened(tails, on_bad_record=OnBadRecord.SKIP, counters=counters) == [{"value": b"first"}, {"value": b"last"}]
    assert counters.bad_records == 2
    rows = opened(tails, ("value", "properties"), on_bad_record=OnBadRecord.NULL)
    assert [len(row["value"]) for row in rows] == [5, 6 + 16, 10 + 2 * 16, 4]
    assert ["encryption.param" in row["properties"] for row in rows] == [False, True, True, False]


def test_a_message_of_which_some_chunks_cannot_be_decrypted_is_a_bad_record() -> None:
    tails = sealed_chunks(b"0123456789ab", 2, (OTHERS, KEYS))
    with pytest.raises(BadRecordError, match="some of its chunks cannot be decrypted"):
        opened(tails)
    assert opened(tails, on_bad_record=OnBadRecord.NULL) == [{"value": None}]


def test_what_is_not_as_the_metadata_says_once_decrypted_is_a_bad_record() -> None:
    for tail, reason in (
        (sealed(b"no batch", num_messages_in_batch=3), "a batch"),
        (sealed(b"no lz4", compression=pb.LZ4, uncompressed_size=9), "cannot be decompressed"),
        (sealed(b"x", compression=pb.LZ4, uncompressed_size=1 << 30), "the limit is"),
        (sealed(b"x", txnid_least_bits=1, txnid_most_bits=1), "a transaction"),
    ):
        with pytest.raises(BadRecordError, match=reason):
            opened([tail])
        assert opened([tail, sealed(b"next")], on_bad_record=OnBadRecord.NULL) == [{"value": None}, {"value": b"next"}]


def test_a_private_key_is_asked_for_once_for_each_data_key() -> None:
    asked: list[str] = []

    def private_key(name: str, metadata: Mapping[str, str]) -> bytes:
        asked.append(name)
        return KEYS.private_key(name, metadata)

    encryptor, tails = MessageEncryptor(["app"], KEYS), []
    for number in range(5):
        described = metadata(sequence_id=number)
        tails.append(encode_tail(described, encryptor.encrypt(described, b"%d" % number)))
    decode(tails, ["value"], decryptor=PayloadDecryptor(private_key))
    assert asked == ["app"]
