"""Tokens of OpenID Connect issuers: which are accepted, and what happens when keys change or the issuer is away."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from cepheid_security import AuthenticationError, AuthenticationUnavailableError, Credentials, SecurityConfigurationError
from cepheid_security.authenticator import Authenticator
from cepheid_security.issuer_keys import IssuerError, IssuerKeys, Need, keys_url, read_keys
from cepheid_security.oauth2 import ClientCredentials, TokenRequestError
from cepheid_security.oidc import OidcVerifier
from cepheid_security.settings import AuthenticationSettings, OidcSettings
from cepheid_security.token_keys import TokenKey
from tests.security.local_issuer import AUDIENCE, CLIENT_ID, CLIENT_SECRET, LocalIssuer, running_issuer
from tests.security.test_tokens import signed_with_public_key

KEY = TokenKey("one", ("RS256",), None)
DAY_S = 86_400


def now_ms() -> int:
    return time.time_ns() // 1_000_000


@pytest.mark.parametrize(
    ("steps", "key_id", "at_s", "need"),
    [
        ([], "one", 0, Need.WAIT),
        (["failed"], "one", 0.5, Need.REFUSE),  # it was asked just before
        (["failed"], "one", 1, Need.WAIT),
        (["failed", "failed"], "one", 2.5, Need.REFUSE),  # the second failure is at 1 s: the pause has doubled
        (["fetched"], "one", 3599, Need.NOTHING),
        (["fetched"], None, 20, Need.NOTHING),
        (["fetched"], "other", 9, Need.NOTHING),  # a stranger does not decide how often an issuer is asked
        (["fetched"], "other", 10, Need.WAIT),
        (["fetched"], "one", 3600, Need.REFRESH),
        (["fetched", "failed"], "one", 4000, Need.REFRESH),
        (["fetched"], "one", DAY_S, Need.WAIT),
    ],
)
def test_when_keys_are_fetched(steps: list[str], key_id: str | None, at_s: float, need: Need) -> None:
    keys = IssuerKeys(refresh_s=3600, stale_s=DAY_S)
    for second, step in enumerate(steps):
        if step == "fetched":
            keys.on_fetched([KEY], second)
        else:
            keys.on_failed("away", second)
    assert keys.need(key_id, at_s) is need


def test_known_keys_are_used_while_the_issuer_is_away_but_not_for_ever() -> None:
    keys = IssuerKeys(refresh_s=10, stale_s=100)
    keys.on_fetched([KEY], 0)
    for second in range(10, 100, 10):
        keys.on_failed("away", second)
    assert keys.usable(99) == (KEY,)
    assert keys.usable(100) == ()


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (b"<html>", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "not a JSON object"),
        (b'{"issuer": "https://other", "jwks_uri": "https://other/keys"}', "of the issuer 'https://other'"),
        (b'{"issuer": "https://a"}', "no jwks_uri"),
        (b'{"issuer": "https://a", "jwks_uri": "http://a/keys"}', "must be an https:// URL"),
        (b'{"issuer": "https://a", "jwks_uri": "file:///etc/keys"}', "must be an https:// URL"),
    ],
)
def test_a_configuration_that_cannot_be_trusted_is_named(document: bytes, reason: str) -> None:
    with pytest.raises(IssuerError, match=reason):
        keys_url(document, "https://a")


def test_only_public_keys_for_signatures_are_taken() -> None:
    issuer = LocalIssuer()
    good = json.loads(issuer.documents()["/keys"])["keys"][0]
    others: list[Any] = [
        {"kty": "oct", "k": "AAAA", "alg": "HS256"},
        {**good, "use": "enc"},
        {**good, "key_ops": ["encrypt"]},
        {**good, "alg": "HS256"},
        {**good, "n": "AQAB"},  # far too short
        {"kty": "EC", "crv": "secp256k1", "x": "AA", "y": "AA"},
        {"kty": "RSA"},
        "text",
    ]
    found = read_keys(json.dumps({"keys": [*others, good]}).encode())
    assert [(key.key_id, key.algorithms) for key in found] == [("first", ("RS256",))]
    with pytest.raises(IssuerError, match="none of its 8 keys"):
        read_keys(json.dumps({"keys": others}).encode())


@pytest.fixture
def issuer() -> Iterator[LocalIssuer]:
    with running_issuer() as running:
        yield running


@asynccontextmanager
async def checking(issuer: LocalIssuer) -> AsyncIterator[OidcVerifier]:
    made = OidcVerifier(OidcSettings(issuers=(issuer.url,), audiences=("x", AUDIENCE)), 5.0)
    try:
        yield made
    finally:
        await made.aclose()


async def test_a_token_of_the_issuer_is_accepted_and_its_keys_are_fetched_once(issuer: LocalIssuer) -> None:
    async with checking(issuer) as verifier:
        for _ in range(3):
            principal = await verifier.verify(issuer.token().encode(), now_ms())
            assert (principal.role, principal.method, principal.wire_method) == (CLIENT_ID, "oidc", "token")
            assert principal.expires_at_ms is not None
        assert issuer.requests == ["/.well-known/openid-configuration", "/keys"]


def _with_public_key(issuer: LocalIssuer) -> str:
    public = next(iter(issuer._keys.values())).public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return signed_with_public_key(public, {"iss": issuer.url, "sub": "admin", "aud": AUDIENCE, "exp": now_ms() // 1000 + 60})


REFUSED: dict[str, tuple[Callable[[LocalIssuer], str], str]] = {
    "another audience": (lambda issuer: issuer.token(aud="elsewhere"), "another audience"),
    "no audience": (lambda issuer: issuer.token(aud=None), "'aud' is missing"),
    "another issuer": (lambda issuer: issuer.token(iss="https://evil.example"), "not from an issuer"),
    "no issuer": (lambda issuer: issuer.token(iss=None), "not from an issuer"),
    "expired": (lambda issuer: issuer.token(exp=1), "expired"),
    "never expires": (lambda issuer: issuer.token(exp=None), "never expires"),
    "no role": (lambda issuer: issuer.token(sub=None), "the role, is missing"),
    "unsigned": (lambda issuer: issuer.token(algorithm="none", key=""), "no key of this cluster is for tokens of the algorithm"),
    "signed by a secret": (lambda issuer: issuer.token(algorithm="HS256", key="x" * 64), "no key of this cluster"),
    "signed with the public key": (_with_public_key, "no key of this cluster"),
    "key of another": (lambda issuer: LocalIssuer().token(iss=issuer.url), "signature does not match"),
    "unknown key": (lambda issuer: issuer.token(key_id="stolen"), "names the key 'stolen'"),
    "garbage": (lambda issuer: "x.y.z", "not from an issuer"),
    "too long": (lambda issuer: issuer.token(x="x" * 1_000_000), "not from an issuer"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_a_bad_token_is_refused_with_the_reason(case: str, issuer: LocalIssuer) -> None:
    async with checking(issuer) as verifier:
        make, reason = REFUSED[case]
        token = make(issuer)
        with pytest.raises(AuthenticationError, match=reason) as refused:
            await verifier.verify(token.encode(), now_ms())
        assert token not in str(refused.value)


async def test_a_key_that_is_new_at_the_issuer_is_fetched_and_the_old_one_no_longer_accepted(
    issuer: LocalIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with checking(issuer) as verifier:
        old = issuer.token()
        await verifier.verify(old.encode(), now_ms())
        monkeypatch.setattr("cepheid_security.issuer_keys._UNKNOWN_KEY_PAUSE_S", 0.0)
        issuer.rotate("second")
        assert (await verifier.verify(issuer.token().encode(), now_ms())).role == CLIENT_ID
        with pytest.raises(AuthenticationError, match="names the key 'first'"):
            await verifier.verify(old.encode(), now_ms())


async def test_an_issuer_that_is_away_is_named_and_known_keys_go_on(issuer: LocalIssuer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with checking(issuer) as verifier:
        issuer.status = 503
        for _ in range(2):
            with pytest.raises(
                AuthenticationUnavailableError, match=r"cannot be checked at this moment: .* answers with status 503"
            ):
                await verifier.verify(issuer.token().encode(), now_ms())
        assert len(issuer.requests) == 1, "the second token found it too early to ask again"
        assert "status 503" in verifier.problems()[0]
        issuer.status = 200
        monkeypatch.setattr(verifier._issuers[issuer.url], "_next_try_s", 0.0)
        await verifier.verify(issuer.token().encode(), now_ms())
        assert not verifier.problems()
        issuer.status = 503
        await verifier.verify(issuer.token().encode(), now_ms())


async def test_a_key_that_may_be_new_at_an_issuer_that_is_away_is_not_wrong(
    issuer: LocalIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cepheid_security.issuer_keys._UNKNOWN_KEY_PAUSE_S", 0.0)
    async with checking(issuer) as verifier:
        old = issuer.token()
        await verifier.verify(old.encode(), now_ms())
        issuer.rotate("second")
        issuer.status = 503
        with pytest.raises(AuthenticationUnavailableError):
            await verifier.verify(issuer.token().encode(), now_ms())
        await verifier.verify(old.encode(), now_ms())
        with pytest.raises(AuthenticationError, match="signature does not match"):
            await verifier.verify(issuer.token(key_id="first").encode(), now_ms())


async def test_clients_that_cannot_be_checked_do_not_count_as_failures(issuer: LocalIssuer) -> None:
    async def run_blocking(check: Callable[[], Any]) -> Any:
        return check()

    settings = AuthenticationSettings(methods=("oidc",), oidc=OidcSettings(issuers=(issuer.url,), audiences=(AUDIENCE,)))
    authenticator = Authenticator(settings, now_ms, run_blocking)
    try:
        issuer.status = 503
        with pytest.raises(AuthenticationUnavailableError):
            await authenticator.authenticate(Credentials("token", issuer.token().encode()))
        assert authenticator.failures == 0
        with pytest.raises(AuthenticationError, match="not from an issuer"):
            await authenticator.authenticate(Credentials("token", b"x.y.z"))
        assert authenticator.failures == 1
    finally:
        await authenticator.aclose()


async def test_a_client_beyond_those_that_wait_for_keys_may_try_again(issuer: LocalIssuer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with checking(issuer) as verifier:
        monkeypatch.setattr("cepheid_security.oidc._MAX_WAITING", 0)
        with pytest.raises(AuthenticationUnavailableError, match="too many tokens wait"):
            await verifier.verify(issuer.token().encode(), now_ms())


def test_an_issuer_without_audience_or_without_tls_is_refused_at_the_start() -> None:
    for settings, reason in (
        (OidcSettings(issuers=("https://a",)), "needs authentication.oidc.issuers and authentication.oidc.audiences"),
        (OidcSettings(issuers=("http://a.example",), audiences=("x",)), "must be an https:// URL"),
    ):
        with pytest.raises(SecurityConfigurationError, match=reason):
            OidcVerifier(settings, 5.0)


def test_a_client_gets_tokens_for_its_secret_and_keeps_them_while_they_hold(issuer: LocalIssuer, tmp_path: Path) -> None:
    file = tmp_path / "app.json"
    file.write_text(json.dumps({"issuer_url": issuer.url, "client_id": CLIENT_ID, "client_secret": CLIENT_SECRET}))
    credentials = ClientCredentials.from_file(file, audience=AUDIENCE)
    assert credentials() == credentials()
    assert issuer.requests.count("/token") == 1
    credentials(renew=True)
    assert issuer.requests.count("/token") == 2
    clock = [0]
    issuer.lifetime_s = 100
    aging = ClientCredentials(issuer.url, CLIENT_ID, CLIENT_SECRET, wall_ms=lambda: clock[0])
    for clock[0], asked in ((0, 3), (69_000, 3), (70_000, 4)):
        aging()
        assert issuer.requests.count("/token") == asked
    assert CLIENT_SECRET not in repr(credentials)


def test_a_client_learns_why_it_gets_no_token(issuer: LocalIssuer, tmp_path: Path) -> None:
    with pytest.raises(TokenRequestError, match="status 401: invalid_client"):
        ClientCredentials(issuer.url, CLIENT_ID, "guess")()
    issuer.status = 302
    with pytest.raises(TokenRequestError, match="status 302"):
        ClientCredentials(issuer.url, CLIENT_ID, CLIENT_SECRET)()
    with pytest.raises(SecurityConfigurationError, match="must be an https:// URL"):
        ClientCredentials("http://elsewhere.example", CLIENT_ID, CLIENT_SECRET)
    file = tmp_path / "empty.json"
    file.write_text("{}")
    with pytest.raises(SecurityConfigurationError, match="must be a JSON object with the texts issuer_url"):
        ClientCredentials.from_file(file)
