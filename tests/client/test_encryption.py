"""Encrypted messages: in batches, alone, chunked, also with the official client; and what happens without keys."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pulsar
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

import cepheid
from cepheid.encryption import MAX_MESSAGES_PER_DATA_KEY, MessageDecryptor, MessageEncryptor
from cepheid_wire import pulsar_api_pb2 as pb
from tests.client.conftest import TIMEOUT_S, ClusterThread
from tests.client.test_official_client import official


def write_pair(
    folder: Path, name: str, key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey
) -> cepheid.KeyFiles:
    private, public = folder / f"{name}.key.pem", folder / f"{name}.pub.pem"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return cepheid.KeyFiles(str(public), str(private))


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> cepheid.KeyFiles:
    return write_pair(tmp_path_factory.mktemp("keys"), "app", rsa.generate_private_key(65537, 2048))


@pytest.fixture(scope="module")
def other_keys(tmp_path_factory: pytest.TempPathFactory) -> cepheid.KeyFiles:
    return write_pair(tmp_path_factory.mktemp("others"), "app", rsa.generate_private_key(65537, 2048))


def payloads() -> list[bytes]:
    return [b"order %d" % number for number in range(5)]


@pytest.mark.parametrize("batching", [True, False])
async def test_the_official_client_reads_what_we_encrypt(
    cluster: ClusterThread, topic: str, keys: cepheid.KeyFiles, batching: bool
) -> None:
    async with cepheid.connect(cluster.url) as client:
        async with client.producer(
            topic, batching=batching, compression="zlib", encryption_keys=["app"], key_reader=keys
        ) as producer:
            for payload in payloads():
                producer.send_nowait(payload)
            await producer.flush()

    def read(theirs: pulsar.Client) -> list[bytes]:
        reader = pulsar.CryptoKeyReader(str(keys.public), str(keys.private))
        consumer = theirs.subscribe(topic, "s", crypto_key_reader=reader, initial_position=pulsar.InitialPosition.Earliest)
        return [consumer.receive(int(TIMEOUT_S * 1000)).data() for _ in payloads()]

    assert await official(cluster, read) == payloads()


@pytest.mark.parametrize("batching", [True, False])
async def test_we_read_what_the_official_client_encrypts(
    cluster: ClusterThread, topic: str, keys: cepheid.KeyFiles, batching: bool
) -> None:
    def publish(theirs: pulsar.Client) -> None:
        reader = pulsar.CryptoKeyReader(str(keys.public), str(keys.private))
        producer = theirs.create_producer(
            topic, encryption_key="app", crypto_key_reader=reader, batching_enabled=batching,
            compression_type=pulsar.CompressionType.ZLib,
        )  # fmt: skip
        for payload in payloads():
            producer.send_async(payload, lambda *_: None)
        producer.flush()

    await official(cluster, publish)
    async with cepheid.connect(cluster.url) as client, client.reader(topic, key_reader=keys) as reader:
        assert [(await reader.read(TIMEOUT_S)).data for _ in payloads()] == payloads()


async def test_chunks_are_encrypted_one_by_one(cluster: ClusterThread, topic: str, keys: cepheid.KeyFiles) -> None:
    payload = os.urandom(6 * 1024 * 1024)
    async with cepheid.connect(cluster.url) as client:
        async with client.producer(topic, chunking=True, encryption_keys=["app", "second"], key_reader=keys) as producer:
            await producer.send(payload, key="k")
        async with client.table_view(topic, key_reader=keys) as view:
            assert view["k"] == payload


async def test_without_the_key_a_message_fails_is_discarded_or_comes_encrypted(
    cluster: ClusterThread, topic: str, keys: cepheid.KeyFiles, other_keys: cepheid.KeyFiles
) -> None:
    async with cepheid.connect(cluster.url) as client, client.producer(topic) as plain:
        async with client.producer(topic, encryption_keys=["app"], key_reader=keys) as producer:
            for payload in payloads():
                producer.send_nowait(payload)
            await producer.flush()
        await plain.send(b"plain")

        async with client.consumer(topic, "no keys", start="earliest") as consumer:
            message = await consumer.receive(TIMEOUT_S)
            with pytest.raises(cepheid.UnreadableMessageError, match="encrypted for app: open the consumer with a key_reader"):
                _ = message.value
        async with client.consumer(topic, "fail", start="earliest", key_reader=other_keys) as consumer:
            message = await consumer.receive(TIMEOUT_S)
            with pytest.raises(cepheid.UnreadableMessageError, match="cannot be decrypted: key 'app'"):
                _ = message.data
            await consumer.ack(message)
            assert (await consumer.receive(TIMEOUT_S)).value == b"plain", "the batch is one message that cannot be read"
        async with client.consumer(
            topic, "discard", start="earliest", key_reader=other_keys, on_decryption_failure="discard"
        ) as consumer:
            assert (await consumer.receive(TIMEOUT_S)).value == b"plain"
        async with client.consumer(topic, "discard", key_reader=keys) as consumer:
            assert (await consumer.receive(TIMEOUT_S)).value == b"plain", "what was discarded is acknowledged"
        async with client.consumer(topic, "consume", start="earliest", on_decryption_failure="consume") as consumer:
            message = await consumer.receive(TIMEOUT_S)
            assert message.encryption is not None
            assert message.encryption.batch_size == len(payloads())
            assert list(message.encryption.keys) == ["app"]
            assert b"order" not in message.data
            with pytest.raises(cepheid.UnreadableMessageError, match=r"is encrypted: decrypt message\.data"):
                _ = message.value


async def test_a_topic_that_needs_encryption_takes_it(cluster: ClusterThread, topic: str, keys: cepheid.KeyFiles) -> None:
    async with cepheid.connect(cluster.url, request_timeout_s=3.0) as client:
        cluster.admin("PUT", f"namespaces/public/{topic[:40]}")
        cluster.admin("POST", f"namespaces/public/{topic[:40]}/encryptionRequired", True)
        name = f"public/{topic[:40]}/secret"
        with pytest.raises(cepheid.Error):
            await client.producer(name)
        async with client.producer(name, encryption_keys=["app"], key_reader=keys) as producer:
            await producer.send(b"hidden")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"encryption_keys": ["app"]}, "are given together"),
        ({"key_reader": cepheid.KeyFiles()}, "are given together"),
        ({"encryption_keys": ["app"], "key_reader": cepheid.KeyFiles()}, "names no public key 'app'"),
        ({"encryption_keys": ["app"], "key_reader": cepheid.KeyFiles("/not/there")}, "'app' for encryption cannot be used"),
        ({"encryption_keys": "app", "key_reader": cepheid.KeyFiles()}, "must be a list"),
    ],
)
async def test_arguments_that_cannot_encrypt(arguments: dict[str, object], message: str) -> None:
    async with cepheid.connect("pulsar://127.0.0.1:1") as client:
        with pytest.raises(cepheid.UsageError, match=message):
            client.producer("t", **arguments)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"retry": True}, "encrypted again"),
        ({"encryption_keys": ["app"]}, "are for dead_letters and retry"),
        ({"retry": True, "encryption_keys": ["app"], "key_reader": cepheid.KeyFiles(private="x")}, "names no public key 'app'"),
        ({"retry": True, "encryption_keys": ["app"], "key_reader": None}, "need a key_reader"),
    ],
)
async def test_decrypted_messages_are_not_published_again_in_the_clear(
    keys: cepheid.KeyFiles, arguments: dict[str, Any], message: str
) -> None:
    async with cepheid.connect("pulsar://127.0.0.1:1") as client:
        with pytest.raises(cepheid.UsageError, match=message):
            client.consumer("t", "s", type="shared", **{"key_reader": keys, **arguments})


async def test_dead_letters_and_retries_are_encrypted_again(cluster: ClusterThread, topic: str, keys: cepheid.KeyFiles) -> None:
    async with cepheid.connect(cluster.url) as client:
        async with (
            client.producer(topic, encryption_keys=["app"], key_reader=keys) as producer,
            client.consumer(
                topic,
                "s",
                type="shared",
                key_reader=keys,
                encryption_keys=["app"],
                dead_letters=cepheid.DeadLetters(after=1, subscription="buried"),
                retry=True,
            ) as consumer,
        ):
            await producer.send(b"secret")
            await consumer.retry_later(await consumer.receive(TIMEOUT_S), 0)
            again = await consumer.receive(TIMEOUT_S)
            assert (again.data, again.topic.rpartition("/")[2]) == (b"secret", f"{topic}-s-RETRY")
            await consumer.retry_later(again, 0)
            for name in (f"{topic}-s-RETRY", f"{topic}-s-DLQ"):
                async with client.consumer(
                    name, "look", type="shared", start="earliest", on_decryption_failure="consume"
                ) as without_key:
                    seen = await without_key.receive(TIMEOUT_S)
                    assert seen.encryption is not None
                    assert b"secret" not in seen.data
                async with client.reader(name, key_reader=keys) as with_key:
                    assert (await with_key.read(TIMEOUT_S)).data == b"secret"


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP521R1()])
def test_a_data_key_is_encrypted_for_keys_of_elliptic_curves(
    tmp_path: Path, keys: cepheid.KeyFiles, curve: ec.EllipticCurve
) -> None:
    write_pair(tmp_path, "other", ec.generate_private_key(curve))
    mine = write_pair(tmp_path, "mine", ec.generate_private_key(curve))
    both = cepheid.KeyFiles(public={"app": str(keys.public), "mine": str(mine.public)})
    metadata = pb.MessageMetadata()
    sealed = MessageEncryptor(["app", "mine"], both).encrypt(metadata, b"order 1")
    assert MessageDecryptor(mine_only(mine)).decrypt(metadata, sealed) == b"order 1"
    other = cepheid.KeyFiles(private={"mine": str(tmp_path / "other.key.pem")})
    with pytest.raises(cepheid.UnreadableMessageError, match="encrypted for another key, or changed"):
        MessageDecryptor(other).decrypt(metadata, sealed)


def mine_only(files: cepheid.KeyFiles) -> cepheid.KeyFiles:
    return cepheid.KeyFiles(private={"mine": str(files.private)})


JAVA_KEY = b"""-----BEGIN EC PRIVATE KEY-----
MHcCAQEEIDcMPLd+ZZ9c9BMEqUfO+pjGIqr2WjkQN/bkydCQrUYAoAoGCCqGSM49
AwEHoUQDQgAEu1v5uN61QCpsBsBGWskpUuO+Ue8dc6BXszWF1ylqukvZacMdayfu
5dXvfqfV2iYC6OQ69lNp4B+KbHbj4qCcZQ==
-----END EC PRIVATE KEY-----
"""
JAVA_DATA_KEY = bytes.fromhex("1fd891a3fa489bac893467a0d7c2925d64cf01c5550888979f329c160bfdcddd")
JAVA_WRAPPED = bytes.fromhex(
    "043781cef1b75009d1478cf0d5635e44dd886026b4c223a4c89e1a3e14200fe982cace6dddf37e77cac40f1bb8e82e1a893e434544321851112b"
    "fef0969012056878ca7f352db0ba99f539da5e9255c5e25c96a4021d3bb8a584ca29cf416c5ba85c7e64198e9572e3184093df991de4c3b7dfd1c9"
)
"""Made by the cipher of the Java client: ECIES of Bouncy Castle 1.78.1 with IESParameterSpec(null, null, 128)."""


def test_a_data_key_that_a_java_client_encrypted_for_an_elliptic_curve(tmp_path: Path) -> None:
    private = tmp_path / "java.pem"
    private.write_bytes(JAVA_KEY)
    metadata = pb.MessageMetadata(encryption_param=bytes(12))
    metadata.encryption_keys.add(key="mine", value=JAVA_WRAPPED)
    sealed = AESGCM(JAVA_DATA_KEY).encrypt(bytes(12), b"from Java", None)
    assert MessageDecryptor(cepheid.KeyFiles(private=str(private))).decrypt(metadata, sealed) == b"from Java"
    metadata.encryption_keys[0].value = JAVA_WRAPPED[:80]
    with pytest.raises(cepheid.UnreadableMessageError, match="80 bytes encrypted, too few for a key on secp256r1"):
        MessageDecryptor(cepheid.KeyFiles(private=str(private))).decrypt(metadata, sealed)


def test_keys_that_cannot_encrypt_are_refused(tmp_path: Path) -> None:
    files = write_pair(tmp_path, "ed", ed25519.Ed25519PrivateKey.generate())
    with pytest.raises(cepheid.UsageError, match="is a Ed25519PublicKey: use an RSA key or a key of an elliptic curve"):
        MessageEncryptor(["ed"], files)
    metadata = pb.MessageMetadata()
    metadata.encryption_keys.add(key="ed", value=b"")
    with pytest.raises(cepheid.UnreadableMessageError, match="is a Ed25519PrivateKey: use an RSA key"):
        MessageDecryptor(files).decrypt(metadata, b"")


def test_a_data_key_is_renewed_after_its_time_and_its_number_of_messages(keys: cepheid.KeyFiles) -> None:
    now = 0.0
    encryptor, decryptor = MessageEncryptor(["app"], keys, monotonic=lambda: now), MessageDecryptor(keys)

    def data_key() -> bytes:
        metadata = pb.MessageMetadata(producer_name="p", sequence_id=0, publish_time=0)
        assert decryptor.decrypt(metadata, encryptor.encrypt(metadata, b"payload")) == b"payload"
        return metadata.encryption_keys[0].value

    first = data_key()
    assert data_key() == first
    now = 4 * 3600.0
    second = data_key()
    assert second != first
    encryptor._left = 0
    assert data_key() not in (first, second)
    assert encryptor._left == MAX_MESSAGES_PER_DATA_KEY - 1


@pytest.mark.parametrize("change", ["payload", "nonce", "size of the nonce"])
def test_what_was_changed_on_the_way_is_not_delivered(keys: cepheid.KeyFiles, change: str) -> None:
    metadata = pb.MessageMetadata(producer_name="p", sequence_id=0, publish_time=0)
    sealed = MessageEncryptor(["app"], keys).encrypt(metadata, b"payload")
    match change:
        case "payload":
            sealed = bytes([sealed[0] ^ 1]) + sealed[1:]
        case "nonce":
            metadata.encryption_param = bytes(12)
        case _:
            metadata.encryption_param = b"short"
    with pytest.raises(cepheid.UnreadableMessageError, match="cannot be decrypted"):
        MessageDecryptor(keys).decrypt(metadata, sealed)
