"""Encryption of payloads between producers and consumers, in the format of Pulsar's clients. Brokers see only ciphertext.

    payload ──compress──► AES-256-GCM with a data key ──► entry; its metadata has the nonce (encryption_param), and the data key,
    encrypted once for each public key (encryption_keys; cepheid_wire/data_keys.py).
    A batch is encrypted as a whole, chunks one by one.

A producer creates a new data key every four hours, and each message has its own nonce. Other parts of messages than the
payload, such as keys and properties, are not encrypted, except within a batch.
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
from cepheid_wire.data_keys import encrypt_data_key
from cepheid_wire.payload_decryption import HOW_TO_INSTALL, PayloadDecryptor, UndecryptableError, has_cryptography

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

OnDecryptionFailure = Literal["fail", "discard", "consume"]
DATA_KEY_BYTES = 32
NONCE_BYTES = 12
DATA_KEY_LIFETIME_S = 4 * 3600.0
MAX_MESSAGES_PER_DATA_KEY = 1 << 30
"""Limit of messages per data key, far below 2^32, from where random nonces of 96 bits may repeat (NIST SP 800-38D, 8.3)."""


class KeyReader(Protocol):
    """Returns keys as PEM: RSA keys, or elliptic curve keys, which only Java's official client supports.

    Called when a producer is opened, every four hours, and for the first message with a data key.
    """

    def public_key(self, name: str) -> bytes:
        """Return the public key with which producers encrypt. Any exception means that it does not exist."""

    def private_key(self, name: str, metadata: Mapping[str, str]) -> bytes:
        """Return the private key for messages that name `name`. `metadata`: what the producer's client added to the key."""


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
    """The data that a consumer with `on_decryption_failure="consume"` needs to decrypt `message.data` itself."""

    keys: Mapping[str, tuple[bytes, Mapping[str, str]]]
    """The encrypted data key and its metadata, by the name of the key that encrypts it."""
    nonce: bytes
    algorithm: str
    compression: str
    """The compression of the decrypted payload: NONE, LZ4, ZLIB, ZSTD, SNAPPY."""
    uncompressed_bytes: int
    batch_size: int
    """Number of messages in the payload; 0: it is not a batch."""


class MessageEncryptor:
    """Encrypts the payloads of one producer, over all its partitions."""

    def __init__(self, names: Sequence[str], reader: KeyReader, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        """Raises UsageError if a public key is not available, MissingExtraError."""
        if not names or isinstance(names, str):
            raise UsageError(f"encryption_keys must be a list of one or more names of keys, got {names!r}")
        _require_library()
        self._public_keys = {name: _public_key(reader, name) for name in dict.fromkeys(names)}
        self._monotonic = monotonic
        self._renew()

    def encrypt(self, metadata: pb.MessageMetadata, payload: bytes) -> bytes:
        """Return the ciphertext of a payload, and add to `metadata` what consumers need."""
        if self._left == 0 or self._monotonic() >= self._renew_at:
            self._renew()
        self._left -= 1
        nonce = os.urandom(NONCE_BYTES)
        self.describe(metadata, nonce)
        return self._cipher.encrypt(nonce, payload, None)

    def describe(self, metadata: pb.MessageMetadata, nonce: bytes = bytes(NONCE_BYTES)) -> None:
        """Set the fields of `metadata` for an encrypted entry."""
        del metadata.encryption_keys[:]
        for name, wrapped in self._wrapped.items():
            metadata.encryption_keys.add(key=name, value=wrapped)
        metadata.encryption_param = nonce

    def _renew(self) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        data_key = os.urandom(DATA_KEY_BYTES)
        self._wrapped = {name: encrypt_data_key(key, data_key) for name, key in self._public_keys.items()}
        self._cipher = AESGCM(data_key)
        self._left = MAX_MESSAGES_PER_DATA_KEY
        self._renew_at = self._monotonic() + DATA_KEY_LIFETIME_S


class MessageDecryptor:
    """Decrypts the payloads of one consumer."""

    def __init__(self, reader: KeyReader | None) -> None:
        """Without `reader` nothing can be decrypted. Raises MissingExtraError."""
        if reader is not None:
            _require_library()
        self._decryptor = None if reader is None else PayloadDecryptor(reader.private_key)

    def decrypt(self, metadata: pb.MessageMetadata, payload: bytes | memoryview) -> bytes:
        """Return the payload as it was before encryption. Raises UnreadableMessageError."""
        if self._decryptor is None:
            names = ", ".join(each.key for each in metadata.encryption_keys)
            raise UnreadableMessageError(f"the message is encrypted for {names}: open the consumer with a key_reader")
        try:
            return self._decryptor.decrypt(metadata, payload)
        except UndecryptableError as error:
            raise UnreadableMessageError(f"the message cannot be decrypted: {error.args[0]}") from error


def encrypted_payload(metadata: pb.MessageMetadata) -> EncryptedPayload:
    """Return the encryption data in the metadata of an entry."""
    return EncryptedPayload(
        {each.key: (each.value, {one.key: one.value for one in each.metadata}) for each in metadata.encryption_keys},
        metadata.encryption_param,
        metadata.encryption_algo,
        pb.CompressionType.Name(metadata.compression),
        metadata.uncompressed_size,
        metadata.num_messages_in_batch if metadata.HasField("num_messages_in_batch") else 0,
    )


def _require_library() -> None:
    if not has_cryptography():
        raise MissingExtraError(f"encryption needs the library cryptography: {HOW_TO_INSTALL}")


def _public_key(reader: KeyReader, name: str) -> RSAPublicKey | EllipticCurvePublicKey:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(reader.public_key(name))
    except Exception as error:  # any error of the application's function, or of the library
        raise UsageError(f"the public key {name!r} for encryption cannot be used: {error or type(error).__name__}") from error
    if not isinstance(key, RSAPublicKey | EllipticCurvePublicKey):
        raise UsageError(f"the public key {name!r} is a {type(key).__name__}: use an RSA key or a key of an elliptic curve")
    return key
