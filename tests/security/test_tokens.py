"""Tokens: what is accepted, and the reason for each that is not."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from cepheid_security import AuthenticationError, SecurityConfigurationError
from cepheid_security.token_keys import TokenKey, private_key, public_key, secret_key
from cepheid_security.tokens import TokenVerifier, create_token

NOW_MS = 1_800_000_000_000
SECRET = bytes(range(64))
DATA_URL = f"data:;base64,{base64.b64encode(SECRET).decode()}"
KEY = secret_key(DATA_URL)


def url_of(data: bytes) -> str:
    return f"data:;base64,{base64.b64encode(data).decode()}"


def pair(key: Any) -> tuple[TokenKey, TokenKey]:
    private = key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return private_key(url_of(private)), public_key(url_of(public))


def signed(claims: dict[str, Any], *, algorithm: str = "HS256", key: Any = SECRET, **headers: Any) -> bytes:
    return jwt.encode(claims, key, algorithm=algorithm, headers=headers or None).encode()


@pytest.mark.parametrize("algorithm", ["HS256", "HS384", "HS512"])
def test_a_secret_key_serves_all_hashes_that_pulsar_signs_with(algorithm: str) -> None:
    principal = TokenVerifier([KEY]).verify(signed({"sub": "app"}, algorithm=algorithm), NOW_MS)
    assert (principal.role, principal.method, principal.expires_at_ms) == ("app", "token", None)


@pytest.mark.parametrize("key", [rsa.generate_private_key(65537, 2048), ec.generate_private_key(ec.SECP384R1())])
def test_a_pair_of_keys_signs_and_checks(key: Any) -> None:
    signing, checking = pair(key)
    token = create_token(signing, "app", NOW_MS, expires_in_s=60)
    principal = TokenVerifier([checking], leeway_s=5).verify(token.encode(), NOW_MS)
    assert principal.expires_at_ms == NOW_MS + 65_000


RSA_PRIVATE, RSA_PUBLIC = pair(rsa.generate_private_key(65537, 2048))


PUBLIC_DER = RSA_PUBLIC.key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def signed_with_public_key(public_pem: bytes, claims: dict[str, Any]) -> str:
    """The forgery that a library without a list of algorithms would accept (RFC 8725 §2.1), signed without PyJWT's own check."""
    parts = [base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in ({"alg": "HS256"}, claims)]
    signature = hmac.new(public_pem, b".".join(parts), hashlib.sha256).digest()
    return b".".join([*parts, base64.urlsafe_b64encode(signature).rstrip(b"=")]).decode()


def hmac_with_public_key() -> bytes:
    text = RSA_PUBLIC.key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return signed_with_public_key(text, {"sub": "admin"}).encode()


REFUSED: dict[str, tuple[bytes, str]] = {
    "expired": (signed({"sub": "a", "exp": NOW_MS // 1000 - 10}), "expired 10 s ago"),
    "not yet valid": (signed({"sub": "a", "nbf": NOW_MS // 1000 + 60}), "not valid for another 60 s"),
    "expires at infinity": (signed({"sub": "a", "exp": float("inf")}), "'exp' is no time"),
    "valid from no number on": (signed({"sub": "a", "nbf": float("nan")}), "'nbf' is no time"),
    "unknown extensions": (signed({"sub": "a"}, crit=["x"], x=1), "extensions|no readable header"),
    "no role": (signed({"name": "a"}), "claim 'sub', the role, is missing"),
    "role is a number": (signed({"sub": "5", "exp": "soon"}), "'exp' is no time"),
    "wrong key": (signed({"sub": "a"}, key=SECRET[::-1]), "signature does not match"),
    "no algorithm": (
        signed({"sub": "a"}, algorithm="none", key=None),
        "no key of this cluster is for tokens of the algorithm 'none'",
    ),
    "HMAC with the text of the public key": (hmac_with_public_key(), "no key of this cluster"),
    "changed": (signed({"sub": "a"})[:-4] + b"AAAA", "signature does not match"),
    "cut off": (signed({"sub": "a"})[:40], "no readable header|cannot be read"),
    "not a token": (b"hello", "no readable header"),
    "empty": (b"", "no readable header"),
    "too long": (signed({"sub": "a" * 1_000_000}), "at most 16384 are read"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_token_is_refused_with_the_reason_and_never_shown(case: str) -> None:
    token, reason = REFUSED[case]
    keys = [RSA_PUBLIC] if case.startswith("HMAC") else [KEY]
    with pytest.raises(AuthenticationError, match=reason) as refused:
        TokenVerifier(keys).verify(token, NOW_MS)
    assert len(token) < 6 or token.decode() not in str(refused.value)


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ({"aud": "other", "iss": "us"}, "another audience"),
        ({"iss": "us"}, "'aud' is missing"),
        ({"aud": "cluster", "iss": "them"}, "another issuer"),
        ({"aud": ["x", "cluster"], "iss": "us"}, None),
    ],
)
def test_audience_and_issuer_are_checked_where_they_are_set(claims: dict[str, Any], reason: str | None) -> None:
    verifier = TokenVerifier([KEY], audience="cluster", issuer="us")
    token = signed({"sub": "a", **claims})
    if reason is None:
        assert verifier.verify(token, NOW_MS).role == "a"
        return
    with pytest.raises(AuthenticationError, match=reason):
        verifier.verify(token, NOW_MS)


def test_the_leeway_covers_clocks_that_differ() -> None:
    token = signed({"sub": "a", "exp": NOW_MS // 1000 - 3, "nbf": NOW_MS // 1000 + 3})
    assert TokenVerifier([KEY], leeway_s=5).verify(token, NOW_MS).role == "a"


def test_while_a_key_is_exchanged_both_hold_and_a_key_that_is_named_alone_is_tried() -> None:
    old, new = secret_key(DATA_URL, "old"), secret_key(url_of(SECRET[::-1]), "new")
    verifier = TokenVerifier([old, new])
    assert verifier.verify(create_token(old, "a", NOW_MS).encode(), NOW_MS).role == "a"
    assert verifier.verify(create_token(new, "b", NOW_MS).encode(), NOW_MS).role == "b"
    assert verifier.verify(signed({"sub": "c"}), NOW_MS).role == "c", "a token that names no key"
    with pytest.raises(AuthenticationError, match="names the key 'stolen'"):
        verifier.verify(signed({"sub": "d"}, kid="stolen"), NOW_MS)
    with pytest.raises(AuthenticationError, match="signature does not match"):
        verifier.verify(signed({"sub": "e"}, kid="new"), NOW_MS)


@pytest.mark.parametrize(
    ("read", "location", "reason"),
    [
        (secret_key, url_of(b"short"), "has 5 bytes and needs 32"),
        (secret_key, url_of(PUBLIC_DER), "whoever has the public one could make tokens"),
        (secret_key, "data:;base64,***", "is not base64"),
        (secret_key, "data:text", "looks like data:;base64"),
        (secret_key, "/no/such/key", "cannot be read: No such file"),
        (public_key, url_of(SECRET), "neither X.509 DER nor PEM"),
        (private_key, url_of(SECRET), "neither PKCS #8 DER nor PEM"),
    ],
)
def test_a_key_that_cannot_be_used_is_named(read: Any, location: str, reason: str) -> None:
    with pytest.raises(SecurityConfigurationError, match=reason):
        read(location)


def test_keys_do_not_show_in_a_repr() -> None:
    assert "\\x00" not in repr(KEY)
    assert "key=" not in repr(KEY)
