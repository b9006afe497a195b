"""Revoked tokens: which ones are meant, and the list of them in metadata."""

from __future__ import annotations

import pytest

from cepheid_metadata import MemoryStore, MemoryTree, Revocation, RevocationListFullError
from cepheid_metadata import revocations as stored
from cepheid_security import AuthenticationError, Principal, TokenIdentity
from cepheid_security.revocations import RevokedTokens
from cepheid_security.token_keys import TokenKey
from cepheid_security.tokens import TokenVerifier, create_token, token_digest

KEY = TokenKey(None, ("HS256",), bytes(range(64)))
NOW_MS = 1_800_000_000_000
TOKEN = create_token(KEY, "app", NOW_MS).encode()


def principal_of(token: bytes) -> Principal:
    return TokenVerifier([KEY]).verify(token, NOW_MS)


@pytest.mark.parametrize(
    ("revoked", "holds"),
    [
        (RevokedTokens(), True),
        (RevokedTokens(digests={token_digest(TOKEN)}), False),
        (RevokedTokens(digests={token_digest(create_token(KEY, "app", NOW_MS).encode())}), True),  # it has another id
        (RevokedTokens(roles={"app": NOW_MS - 1}), True),
        (RevokedTokens(roles={"app": NOW_MS}), False),
        (RevokedTokens(roles={"other": NOW_MS}), True),
    ],
)
def test_which_tokens_are_revoked(revoked: RevokedTokens, holds: bool) -> None:
    if holds:
        revoked.check(principal_of(TOKEN))
    else:
        with pytest.raises(AuthenticationError, match="revoked"):
            revoked.check(principal_of(TOKEN))


def test_a_role_whose_tokens_were_revoked_cannot_come_through_a_proxy() -> None:
    """The proxy shows its own credentials: which token its client showed is not known."""
    revoked = RevokedTokens(roles={"app": NOW_MS})
    revoked.check(Principal("proxy", "tls", original_role="other"))
    with pytest.raises(AuthenticationError, match="the tokens of 'app' were revoked, and behind a proxy"):
        revoked.check(Principal("proxy", "tls", original_role="app"))


def test_a_token_is_revoked_by_its_id_and_one_of_unknown_age_with_its_role() -> None:
    token = principal_of(TOKEN).token
    assert token is not None
    assert token.token_id is not None
    with pytest.raises(AuthenticationError):
        RevokedTokens(token_ids={token.token_id}).check(principal_of(TOKEN))
    ageless = Principal("app", "token", token=TokenIdentity("digest"))
    with pytest.raises(AuthenticationError):
        RevokedTokens(roles={"app": 0}).check(ageless)
    RevokedTokens(roles={"app": NOW_MS}).check(Principal("app", "tls"))


def test_a_signature_that_is_written_in_another_way_is_that_of_the_same_token() -> None:
    """The last character of base64 has bits without meaning: each token has several texts."""
    assert {token_digest(TOKEN[:-1] + bytes([last])) for last in b"ABCD"} == {token_digest(TOKEN)}


def entry(kind: str, value: str, **fields: object) -> Revocation:
    return Revocation.model_validate({"kind": kind, "value": value, "revoked_at_ms": 0, **fields})


async def test_the_list_forgets_tokens_that_have_expired_and_extends_what_a_role_has() -> None:
    store = MemoryStore(MemoryTree())
    await stored.revoke(store, entry("digest", "a", until_ms=10), now_ms=0)
    await stored.revoke(store, entry("role", "app", issued_up_to_ms=5, until_ms=50), now_ms=0)
    await stored.revoke(store, entry("role", "app", issued_up_to_ms=3, until_ms=60), now_ms=9)
    found = {each.value: (each.issued_up_to_ms, each.until_ms) for each in await stored.list_revocations(store)}
    assert found == {"a": (None, 10), "app": (5, 60)}
    assert await stored.cancel_revocation(store, "role", "app", now_ms=10)
    assert not await stored.cancel_revocation(store, "role", "app", now_ms=10)
    assert await stored.list_revocations(store) == ()


async def test_a_full_list_says_so_and_can_still_be_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "MAX_REVOCATIONS", 2)
    store = MemoryStore(MemoryTree())
    for value in "ab":
        await stored.revoke(store, entry("id", value), now_ms=0)
    with pytest.raises(RevocationListFullError, match="it has 2 entries"):
        await stored.revoke(store, entry("id", "c"), now_ms=0)
    await stored.revoke(store, entry("id", "a", reason="again"), now_ms=0)
    assert await stored.cancel_revocation(store, "id", "b", now_ms=0)
