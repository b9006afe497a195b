"""Data keys, encrypted with the public keys of the readers: by RSA-OAEP with SHA-1, or by ECIES for elliptic-curve keys.

ECIES has no single standard form. This is the form of the Java client, the only official client that accepts elliptic-curve
keys: the "ECIES" of Bouncy Castle with a MAC key of 128 bits (IEEE 1363a, stream mode)

    ephemeral public key V, uncompressed │ C = data key XOR K2 │ HMAC-SHA-1 with key K1 of C and eight zero bytes
    K1 (16 bytes), K2 (as long as the data key) = KDF2 with SHA-1 of V and the x coordinate of the shared point

The library `cryptography` is imported when it is first needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey
    from cryptography.hazmat.primitives.asymmetric.padding import OAEP
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

MAC_KEY_BYTES = 16
MAC_BYTES = 20


def encrypt_data_key(key: RSAPublicKey | EllipticCurvePublicKey, data_key: bytes) -> bytes:
    """Return the data key, encrypted."""
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

    return key.encrypt(data_key, _rsa_padding()) if isinstance(key, RSAPublicKey) else _ecies_encrypted(key, data_key)


def decrypt_data_key(pem: bytes, wrapped: bytes) -> bytes:
    """Return the data key. Raises ValueError for a key of another kind, and if it was encrypted with another key."""
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    key = load_pem_private_key(pem, None)
    if isinstance(key, RSAPrivateKey):
        return key.decrypt(wrapped, _rsa_padding())
    if isinstance(key, EllipticCurvePrivateKey):
        return _ecies_decrypted(key, wrapped)
    raise ValueError(f"it is a {type(key).__name__}: use an RSA key or a key of an elliptic curve")


def _rsa_padding() -> OAEP:
    from cryptography.hazmat.primitives.asymmetric.padding import MGF1, OAEP
    from cryptography.hazmat.primitives.hashes import SHA1

    return OAEP(mgf=MGF1(SHA1()), algorithm=SHA1(), label=None)  # as all clients of Pulsar do


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
    """Return the key of the MAC, and the bytes that are XORed with the data."""
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
