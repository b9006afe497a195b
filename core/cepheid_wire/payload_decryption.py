"""Decrypts payloads that clients encrypted, for consumers and for readers of stored entries.

    encryption_keys: the data key, encrypted for each name (data_keys.py) ──private key of one of them──► data key
    payload: AES-256-GCM with the data key and the nonce in encryption_param ──────────────────────► payload, still compressed

An entry of several messages is encrypted as a whole, the chunks of a message one by one. The library `cryptography` is imported
for the first payload.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import TypeAlias

from cepheid_ports import CepheidError
from cepheid_wire import pulsar_api_pb2 as pb
from cepheid_wire.data_keys import decrypt_data_key

HOW_TO_INSTALL = "pip install 'cepheid[encryption]'"
TAG_BYTES = 16
"""Number of bytes that AES-GCM adds to a payload."""
_MAX_KNOWN_DATA_KEYS = 1000

PrivateKeyOf: TypeAlias = Callable[[str, Mapping[str, str]], bytes]
"""Returns a private key as PEM (RSA or elliptic curve), for its name and the metadata that the producer added to it.
Any exception means that there is none."""


class UndecryptableError(CepheidError):
    """A payload that cannot be decrypted with the available keys."""


class PayloadDecryptor:
    """Decrypts payloads. Remembers data keys, which producers use for hours. Not thread-safe."""

    def __init__(self, private_key: PrivateKeyOf) -> None:
        self._private_key = private_key
        self._known: dict[bytes, bytes] = {}  # by the encrypted data key

    def decrypt(self, metadata: pb.MessageMetadata, payload: bytes | memoryview) -> bytes:
        """Return the payload before encryption. Raises UndecryptableError."""
        problem = "its metadata names no key"
        for each in metadata.encryption_keys:
            try:
                data_key = self._known.get(each.value) or self._unwrap(each)
                return _decrypted(data_key, metadata.encryption_param, payload)
            except UndecryptableError as error:
                problem = str(error.args[0])
        raise UndecryptableError(problem)

    def _unwrap(self, each: pb.EncryptionKeys) -> bytes:
        try:
            pem = self._private_key(each.key, {one.key: one.value for one in each.metadata})
            data_key = decrypt_data_key(pem, each.value)
        except Exception as error:  # of the application's function or of the library, which raises many kinds
            raise UndecryptableError(f"key {each.key!r}: {error or type(error).__name__}") from error
        if len(self._known) >= _MAX_KNOWN_DATA_KEYS:
            del self._known[next(iter(self._known))]
        self._known[each.value] = data_key
        return data_key


def has_cryptography() -> bool:
    """Whether the library is installed."""
    return importlib.util.find_spec("cryptography") is not None


def _decrypted(data_key: bytes, nonce: bytes, payload: bytes | memoryview) -> bytes:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    try:
        return AESGCM(data_key).decrypt(nonce, payload, None)
    except InvalidTag:
        raise UndecryptableError("its payload was changed, or belongs to another key") from None
    except ValueError as error:  # a data key or a nonce of an invalid size
        raise UndecryptableError(str(error)) from None
