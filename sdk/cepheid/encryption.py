"""Encryption of payloads between producers and consumers, in the format of Pulsar's clients. Brokers see ciphertext alone.

    payload ──compress──► AES-256-GCM with a data key ──► entry; its metadata has the nonce (encryption_param), and the data key,
    encrypted once for each public key (encryption_keys): RSA keys by RSA-OAEP with SHA-1, keys of elliptic curves by ECIES.
    A batch is encrypted as a whole, chunks one by one.

ECIES has no single standard form. This is that of the Java client, which is the only official one that takes keys of elliptic
curves: the "ECIES" of Bouncy Castle with a MAC key of 128 bits (IEEE 1363a, stream mode)

    ephemeral public key V, uncompressed │ C = data key XOR K2 │ HMAC-SHA-1 with key K1 of C and eight zero bytes
    K1 (16 bytes), K2 (as long as the data key) = KDF2 with SHA-1 of V and the x coordinate of the shared point

A producer makes a new data key every four hours, and each message has a nonce of its own. What messages have besides their
payload, such as keys and properties, is not encrypted, except within a batch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from cepheid.errors import MissingExtraError, UnreadableMessageError, UsageError
from cepheid_wire import pulsar_api_pb2 as pb

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey
    from cryptography.hazmat.primitives.asymmetric.padding import OAEP
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

OnDecryptionFailure = Literal["fail", "discard", "consume"]
HOW_TO_INSTALL = "pip install 'cepheid[encryption]'"
DATA_KEY_BYTES = 32
NONCE_BYTES = 12
TAG_BYTES = 16
MAC_KEY_BYTES = 16
MAC_BYTES = 20
DATA_KEY_LIFETIME_S = 4 * 3600.0
MAX_MESSAGES_PER_DATA_KEY = 1 << 30
"""Far below 2^32, beyond which random nonces of 96 bits may repeat (NIST SP 800-38D, 8.3)."""
MAX_KNOWN_DATA_KEYS = 1000


class KeyReader(Protocol):
    """Gives keys as PEM: RSA keys, or keys of elliptic curves, which of the official clients only Java's takes.

    Called while a producer is opened, every four hours, and for the first message with a data key.
    """

    def public_key(self, name: str) -> bytes:
        """Return the public key with which producers encrypt. Any exception means that there is none."""

    def private_key(self, name: str, metadata: Mapping[str, str]) -> bytes:
        """Return the private key for messages that say `name`. `metadata`: what the producer's client added to the key."""


@dataclass(frozen=True, slots=True)
class KeyFiles:
    """Keys in PEM files: one file for all names, or files by name. A producer needs public keys, a consumer private ones."""

    public: str | Mapping[str, str] | None = None
    private: str | Mapping[str, str] | None = None

    def public_key(self, name: str) -> bytes:
        return _file_of(self.public, "public", name)

    def private_key(self, name: str, metadata: Mapping[str, str]) -> bytes:
        return _file_of(self.private, "private", name)


def _file_of(files: str | Mapping[str, str] | None, kind: str, name: str) -> bytes:
    path = files if files is None or isinstance(files, str) else files.get(name)
    if path is None:
        raise UsageError(f"KeyFiles names no {kind} key {name!r}: give {kind}=PATH, or {kind}={{{name!r}: PATH}}")
    return Path(path).read_bytes()


@dataclass(frozen=True, slots=True)
class EncryptedPayload:
    """What a consumer with `on_decryption_failure="consume"` must know to decrypt `message.data` by itself."""

    keys: Mapping[str, tuple[bytes, Mapping[str, str]]]
    """By the name of each key: the data key encrypted with it, and its metadata."""
    nonce: bytes
    algorithm: str
    compression: str
    """How the payload is compressed once it is decrypted: NONE, LZ4, ZLIB, ZSTD, SNAPPY."""
    uncompressed_bytes: int
    batch_size: int
    """Number of messages in the payload; 0: it is not a batch."""


class MessageEncryptor:
    """Encrypts the payloads of one producer, over all its partitions."""

    def __init__(self, names: Sequence[str], reader: KeyReader, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        """Raises UsageError when a public key cannot be had, MissingExtraError."""
        if not names or isinstance(names, str):
            raise UsageError(f"encryption_keys must be a list of one or more names of keys, got {names!r}")
        _require_library()
        self._public_keys = {name: _public_key(reader, name) for name in dict.fromkeys(names)}
        self._monotonic = monotonic
        self._renew()

    def encrypt(self, metadata: pb.MessageMetadata, payload: bytes) -> bytes:
        """Return the ciphertext of a payload, and set in `metadata` what consumers need."""
        if self._left == 0 or self._monotonic() >= self._renew_at:
            self._renew()
        self._left -= 1
        nonce = os.urandom(NONCE_BYTES)
        self.describe(metadata, nonce)
        return self._cipher.encrypt(nonce, payload, None)

    def describe(self, metadata: pb.MessageMetadata, nonce: bytes = bytes(NONCE_BYTES)) -> None:
        """Set the fields of `metadata` that an encrypted entry has."""
        del metadata.encryption_keys[:]
        for name, wrapped in self._wrapped.items():
            metadata.encryption_keys.add(key=name, value=wrapped)
        metadata.encryption_param = nonce

    def _renew(self) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        data_key = os.urandom(DATA_KEY_BYTES)
        self._wrapped = {name: _wrap(key, data_key) for name, key in self._public_keys.items()}
        self._cipher = AESGCM(data_key)
        self._left = MAX_MESSAGES_PER_DATA_KEY
        self._renew_at = self._monotonic() + DATA_KEY_LIFETIME_S


class MessageDecryptor:
    """Decrypts the payloads of one consumer. Data keys that were decrypted are remembered: producers use them for hours."""

    def __init__(self, reader: KeyReader | None) -> None:
        """Without `reader` nothing can be decrypted. Raises MissingExtraError."""
        if reader is not None:
            _require_library()
        self._reader = reader
        self._known: dict[bytes, bytes] = {}  # by the encrypted data key

    def decrypt(self, metadata: pb.MessageMetadata, payload: bytes | memoryview) -> bytes:
        """Return the payload as it was before it was encrypted. Raises UnreadableMessageError."""
        if self._reader is None:
            names = ", ".join(each.key for each in metadata.encryption_keys)
            raise UnreadableMessageError(f"the message is encrypted for {names}: open the consumer with a key_reader")
        problem = ""
        for each in metadata.encryption_keys:
            try:
                data_key = self._known.get(each.value) or self._unwrap(each)
                return _decrypted(data_key, metadata.encryption_param, payload)
            except UnreadableMessageError as error:
                problem = str(error.args[0])
        raise UnreadableMessageError(f"the message cannot be decrypted: {problem}")

    def _unwrap(self, each: pb.EncryptionKeys) -> bytes:
        assert self._reader is not None, "decrypt looked"
        try:
            pem = self._reader.private_key(each.key, {one.key: one.value for one in each.metadata})
            data_key = _unwrap(pem, each.value)
        except Exception as error:  # the application's function, or the library's many kinds
            raise UnreadableMessageError(f"key {each.key!r}: {error or type(error).__name__}") from error
        if len(self._known) >= MAX_KNOWN_DATA_KEYS:
            del self._known[next(iter(self._known))]
        self._known[each.value] = data_key
        return data_key


def encrypted_payload(metadata: pb.MessageMetadata) -> EncryptedPayload:
    """Return what the metadata of an entry says of its encryption."""
    return EncryptedPayload(
        {each.key: (each.value, {one.key: one.value for one in each.metadata}) for each in metadata.encryption_keys},
        metadata.encryption_param,
        metadata.encryption_algo,
        pb.CompressionType.Name(metadata.compression),
        metadata.uncompressed_size,
        metadata.num_messages_in_batch if metadata.HasField("num_messages_in_batch") else 0,
    )


def _decrypted(data_key: bytes, nonce: bytes, payload: bytes | memoryview) -> bytes:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    try:
        return AESGCM(data_key).decrypt(nonce, payload, None)
    except InvalidTag:
        raise UnreadableMessageError("its payload was changed, or belongs to another key") from None
    except ValueError as error:  # a data key or a nonce of an impossible size
        raise UnreadableMessageError(str(error)) from None


def _require_library() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise MissingExtraError(f"encryption needs the library cryptography: {HOW_TO_INSTALL}") from None


def _oaep() -> OAEP:
    from cryptography.hazmat.primitives.asymmetric.padding import MGF1, OAEP
    from cryptography.hazmat.primitives.hashes import SHA1

    return OAEP(mgf=MGF1(SHA1()), algorithm=SHA1(), label=None)  # what all clients of Pulsar use


def _public_key(reader: KeyReader, name: str) -> RSAPublicKey | EllipticCurvePublicKey:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(reader.public_key(name))
    except Exception as error:  # the application's function, or the library's many kinds
        raise UsageError(f"the public key {name!r} for encryption cannot be used: {error or type(error).__name__}") from error
    if not isinstance(key, RSAPublicKey | EllipticCurvePublicKey):
        raise UsageError(f"the public key {name!r} is a {type(key).__name__}: use an RSA key or a key of an elliptic curve")
    return key


def _wrap(key: RSAPublicKey | EllipticCurvePublicKey, data_key: bytes) -> bytes:
    """Return the data key, encrypted."""
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

    return key.encrypt(data_key, _oaep()) if isinstance(key, RSAPublicKey) else _ecies_encrypted(key, data_key)


def _unwrap(pem: bytes, wrapped: bytes) -> bytes:
    """Return the data key. Raises UsageError for other kinds of keys, ValueError if it was encrypted for another key."""
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    key = load_pem_private_key(pem, None)
    if isinstance(key, RSAPrivateKey):
        return key.decrypt(wrapped, _oaep())
    if isinstance(key, EllipticCurvePrivateKey):
        return _ecies_decrypted(key, wrapped)
    raise UsageError(f"it is a {type(key).__name__}: use an RSA key or a key of an elliptic curve")


def _ecies_encrypted(key: EllipticCurvePublicKey, data: bytes) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.ec import ECDH, generate_private_key
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    ephemeral = generate_private_key(key.curve)
    point = ephemeral.public_key().public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)
    mac_key, stream = _ecies_keys(point, ephemeral.exchange(ECDH(), key), len(data))
    ciphertext = _xor(data, stream)
    return point + ciphertext + _ecies_mac(mac_key, ciphertext)


def _ecies_decrypted(key: EllipticCurvePrivateKey, wrapped: bytes) -> bytes:
    from hmac import compare_digest

    from cryptography.hazmat.primitives.asymmetric.ec import ECDH, EllipticCurvePublicKey

    point_bytes = 1 + 2 * ((key.curve.key_size + 7) // 8)
    if len(wrapped) <= point_bytes + MAC_BYTES:
        raise ValueError(f"the data key has {len(wrapped)} bytes encrypted, too few for a key on {key.curve.name}")
    point, ciphertext, mac = wrapped[:point_bytes], wrapped[point_bytes:-MAC_BYTES], wrapped[-MAC_BYTES:]
    ephemeral = EllipticCurvePublicKey.from_encoded_point(key.curve, point)
    mac_key, stream = _ecies_keys(point, key.exchange(ECDH(), ephemeral), len(ciphertext))
    if not compare_digest(mac, _ecies_mac(mac_key, ciphertext)):
        raise ValueError("the data key was encrypted for another key, or changed")
    return _xor(ciphertext, stream)


def _ecies_keys(point: bytes, shared: bytes, data_bytes: int) -> tuple[bytes, bytes]:
    """Return the key of the MAC, and what the data is combined with."""
    from hashlib import sha1

    needed_bytes = MAC_KEY_BYTES + data_bytes
    blocks = range(1, 1 + -(-needed_bytes // sha1().digest_size))
    derived = b"".join(sha1(point + shared + block.to_bytes(4, "big")).digest() for block in blocks)
    return derived[:MAC_KEY_BYTES], derived[MAC_KEY_BYTES:needed_bytes]


def _ecies_mac(key: bytes, ciphertext: bytes) -> bytes:
    from hmac import digest

    no_encoding_parameters = bytes(8)  # their size in bits
    return digest(key, ciphertext + no_encoding_parameters, "sha1")


def _xor(data: bytes, stream: bytes) -> bytes:
    return bytes(one ^ other for one, other in zip(data, stream, strict=True))
