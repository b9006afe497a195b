"""Keys of tokens, in the formats of Pulsar's tools, so that operators can keep their keys.

    secret key     random bytes                            HS256, HS384, HS512
    public key     X.509 SubjectPublicKeyInfo, DER or PEM  RS* and PS* of an RSA key, ES256/384/512 by the curve of an EC key

A key is given by a path, a `file:` URL, or a `data:` URL with base64. A key serves only the algorithms of its kind: a token signed
by HMAC with the text of a public key is refused, whatever its header says (RFC 8725 §3.1).
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from cepheid_security.principal import SecurityConfigurationError

SECRET_ALGORITHMS = ("HS256", "HS384", "HS512")
_RSA_ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
_CURVE_ALGORITHMS = {"secp256r1": "ES256", "secp384r1": "ES384", "secp521r1": "ES512"}
_MIN_SECRET_BYTES = 32  # RFC 7518 §3.2: at least as long as the hash of HS256
_MIN_RSA_BITS = 2048


@dataclass(frozen=True, slots=True)
class TokenKey:
    """A key that verifies tokens; a secret or private one also signs them."""

    key_id: str | None
    algorithms: tuple[str, ...]
    key: Any = field(repr=False)


def read_key_bytes(location: str) -> bytes:
    """Return the bytes that a path, a `file:` URL or a `data:` URL names. Raises SecurityConfigurationError."""
    scheme = urlsplit(location).scheme
    if scheme == "data":
        head, comma, text = location.partition(",")
        if not comma or not head.endswith(";base64"):
            raise SecurityConfigurationError("a data: URL of a key looks like data:;base64,AAAA…")
        try:
            return base64.b64decode(unquote(text), validate=True)
        except (binascii.Error, ValueError):
            raise SecurityConfigurationError("what follows data:;base64, is not base64") from None
    path = key_path(location)
    try:
        return path.read_bytes()
    except OSError as error:
        raise SecurityConfigurationError(f"the key file {path} cannot be read: {error.strerror}", path=str(path)) from None


def key_path(location: str) -> Path:
    """Return the file that a path or a `file:` URL names."""
    parts = urlsplit(location)
    return Path(unquote(parts.path) if parts.scheme == "file" else location)


def secret_key(location: str, key_id: str | None = None) -> TokenKey:
    """Return a secret key. Raises SecurityConfigurationError if it is not readable or too short to be safe."""
    secret = read_key_bytes(location)
    if len(secret) < _MIN_SECRET_BYTES:
        raise SecurityConfigurationError(
            f"a secret key has {len(secret)} bytes and needs {_MIN_SECRET_BYTES}: `cepheid tokens create-secret-key` makes one"
        )
    if _is_asymmetric(secret):
        raise SecurityConfigurationError(
            "a secret key is random bytes, and this is a public or private key: whoever has the public one could make tokens"
        )
    # Longer hashes need longer keys; PyJWT would warn at each token.
    allowed = tuple(name for name in SECRET_ALGORITHMS if len(secret) * 8 >= int(name[2:]))
    return TokenKey(key_id, allowed, secret)


def _is_asymmetric(data: bytes) -> bool:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_der_private_key, load_der_public_key

    if data.lstrip().startswith(b"-----BEGIN"):
        return True
    for load in (load_der_public_key, lambda der: load_der_private_key(der, None)):
        try:
            load(data)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            continue
        return True
    return False


def public_key(location: str, key_id: str | None = None) -> TokenKey:
    """Return a public key. Raises SecurityConfigurationError if it is not one, or of a kind that signs no tokens."""
    from cryptography.hazmat.primitives.serialization import load_der_public_key, load_pem_public_key

    data = read_key_bytes(location)
    try:
        loaded = load_pem_public_key(data) if data.lstrip().startswith(b"-----BEGIN") else load_der_public_key(data)
    except ValueError as error:
        raise SecurityConfigurationError(f"a public key is neither X.509 DER nor PEM: {error}") from None
    return TokenKey(key_id, algorithms_of(loaded), loaded)


def private_key(location: str, key_id: str | None = None) -> TokenKey:
    """Return a signing key in PKCS #8, DER or PEM. Raises SecurityConfigurationError."""
    from cryptography.hazmat.primitives.serialization import load_der_private_key, load_pem_private_key

    data = read_key_bytes(location)
    try:
        is_pem = data.lstrip().startswith(b"-----BEGIN")
        loaded = load_pem_private_key(data, None) if is_pem else load_der_private_key(data, None)
    except (ValueError, TypeError) as error:
        raise SecurityConfigurationError(f"a private key is neither PKCS #8 DER nor PEM without a password: {error}") from None
    return TokenKey(key_id, algorithms_of(loaded.public_key()), loaded)


def algorithms_of(public: Any) -> tuple[str, ...]:
    """Return the algorithms of a public key. Raises SecurityConfigurationError if it is too short, or of another kind."""
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

    if isinstance(public, RSAPublicKey):
        if public.key_size < _MIN_RSA_BITS:
            raise SecurityConfigurationError(f"an RSA key has {public.key_size} bits and needs {_MIN_RSA_BITS}")
        return _RSA_ALGORITHMS
    if isinstance(public, EllipticCurvePublicKey) and public.curve.name in _CURVE_ALGORITHMS:
        return (_CURVE_ALGORITHMS[public.curve.name],)
    raise SecurityConfigurationError("a token key is an RSA key or an EC key of the curve P-256, P-384 or P-521")
