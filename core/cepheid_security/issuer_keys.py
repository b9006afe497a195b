"""The known keys of one OpenID Connect issuer, and when to fetch them again. No I/O and no clock.

                 ┌─ fetched less than `refresh_s` ago ──► used; a token that names an unknown key causes a fetch, at most every 10 s
    a token ────►├─ older, not yet `stale_s` ───────────► used, and fetched again meanwhile, if the issuer can be reached
                 └─ never fetched, or older ────────────► the token waits for a fetch; it is refused if that fails

After a failure the next fetch waits: 1 s, doubling up to a minute. Times are seconds of a clock that never goes back.
Documents: OpenID Connect Discovery 1.0 §3, §4.3; RFC 7517 (JSON Web Key).
"""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from cepheid_security.principal import SecurityConfigurationError
from cepheid_security.token_keys import TokenKey, algorithms_of

MAX_DOCUMENT_BYTES = 256 << 10
"""Largest accepted document of an issuer. Usual documents have a few kilobytes."""
_MAX_KEYS = 100
_UNKNOWN_KEY_PAUSE_S = 10.0  # any client can name any key in a token: it must not decide how often an issuer is called
_FIRST_RETRY_S = 1.0
_MAX_RETRY_S = 60.0
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class IssuerError(Exception):
    """The documents of an issuer cannot be fetched or used. The message says why."""


class Need(enum.Enum):
    """What to do before verifying a token."""

    NOTHING = "nothing"
    REFRESH = "refresh"
    """Use the known keys, and fetch them again in the background."""
    WAIT = "wait"
    """Fetch the keys first."""
    REFUSE = "refuse"
    """Refuse the token: there are no usable keys, and it is too early to fetch again."""


class IssuerKeys:
    """The keys of one issuer."""

    def __init__(self, *, refresh_s: float, stale_s: float) -> None:
        self._refresh_s = refresh_s
        self._stale_s = max(stale_s, refresh_s)
        self._keys: tuple[TokenKey, ...] = ()
        self._fetched_at_s: float | None = None
        self._tried_at_s: float | None = None
        self._next_try_s = 0.0
        self._pause_s = _FIRST_RETRY_S
        self.problem = ""
        """Why the last fetch failed, or ""."""

    def __repr__(self) -> str:
        return f"<IssuerKeys {len(self._keys)}{f', {self.problem}' if self.problem else ''}>"

    def usable(self, now_s: float) -> tuple[TokenKey, ...]:
        """Return the keys for verifying tokens; () before the first fetch, or if the last one is too long ago."""
        is_usable = self._fetched_at_s is not None and now_s - self._fetched_at_s < self._stale_s
        return self._keys if is_usable else ()

    def lacks(self, key_id: str | None, now_s: float) -> bool:
        """Whether no usable key can be the one that a token names; None: it names none."""
        keys = self.usable(now_s)
        return not keys or (key_id is not None and all(key.key_id not in (key_id, None) for key in keys))

    def need(self, key_id: str | None, now_s: float) -> Need:
        """Return what to do before verifying a token that names the key `key_id`, or no key (None)."""
        may_try = self._tried_at_s is None or now_s >= self._next_try_s
        keys = self.usable(now_s)
        if not keys:
            return Need.WAIT if may_try else Need.REFUSE
        if (
            self.lacks(key_id, now_s)
            and may_try
            and self._tried_at_s is not None
            and now_s - self._tried_at_s >= _UNKNOWN_KEY_PAUSE_S
        ):
            return Need.WAIT
        assert self._fetched_at_s is not None
        is_old = now_s - self._fetched_at_s >= self._refresh_s
        return Need.REFRESH if is_old and may_try else Need.NOTHING

    def on_fetched(self, keys: Sequence[TokenKey], now_s: float) -> None:
        """Use these keys instead of the earlier ones: a key that the issuer withdrew is no longer accepted."""
        self._keys, self._fetched_at_s, self._tried_at_s = tuple(keys), now_s, now_s
        self._next_try_s, self._pause_s, self.problem = now_s, _FIRST_RETRY_S, ""

    def on_failed(self, problem: str, now_s: float) -> None:
        """Keep the known keys, and wait before the next fetch."""
        self._tried_at_s, self.problem = now_s, problem
        self._next_try_s, self._pause_s = now_s + self._pause_s, min(2 * self._pause_s, _MAX_RETRY_S)


def check_url(url: str, what: str) -> None:
    """Raise SecurityConfigurationError unless the URL is https. An issuer on this machine may use http, for tests and sidecars."""
    parts = urlsplit(url)
    is_local = parts.scheme == "http" and parts.hostname in _LOOPBACK
    if not parts.hostname or (parts.scheme != "https" and not is_local):
        raise SecurityConfigurationError(
            f"{what} must be an https:// URL, got {url[:200]!r}: whoever changes its keys makes tokens"
        )


def discovery_url(issuer: str) -> str:
    """Return the address of an issuer's configuration (OpenID Connect Discovery §4)."""
    return f"{issuer.rstrip('/')}/.well-known/openid-configuration"


def keys_url(document: bytes, issuer: str) -> str:
    """Return the URL of the keys in an issuer's configuration. Raises IssuerError."""
    found = read_object(document)
    if found.get("issuer") != issuer:  # §4.3: it must be the very same text
        raise IssuerError(f"its configuration is that of the issuer {str(found.get('issuer'))[:200]!r}: name exactly this issuer")
    url = found.get("jwks_uri")
    if not isinstance(url, str):
        raise IssuerError("its configuration has no jwks_uri")
    try:
        check_url(url, "jwks_uri")
    except SecurityConfigurationError as error:
        raise IssuerError(str(error)) from None
    return url


def read_keys(document: bytes) -> tuple[TokenKey, ...]:
    """Return the keys of a JWKS document that can verify tokens. Raises IssuerError if there is none."""
    entries = read_object(document).get("keys")
    if not isinstance(entries, list) or len(entries) > _MAX_KEYS:
        raise IssuerError(f"its document of keys is not a list `keys` of at most {_MAX_KEYS}")
    keys = tuple(key for entry in entries if isinstance(entry, dict) and (key := _key_of(entry)) is not None)
    if not keys:
        raise IssuerError(f"none of its {len(entries)} keys is an RSA or EC key for signatures that is long enough")
    return keys


def read_object(document: bytes) -> dict[str, Any]:
    """Return a JSON object. Raises IssuerError."""
    try:
        found = json.loads(document)
    except (ValueError, RecursionError):
        raise IssuerError("its answer is not JSON") from None
    if not isinstance(found, dict):
        raise IssuerError("its answer is not a JSON object")
    return found


def _key_of(entry: dict[str, Any]) -> TokenKey | None:
    """Return the key of an entry, or None if it does not verify signatures. A published secret key (`oct`) is never used."""
    import jwt

    operations = entry.get("key_ops")
    verifies = entry.get("use", "sig") == "sig" and (
        operations is None or (isinstance(operations, list) and "verify" in operations)
    )
    if entry.get("kty") not in ("RSA", "EC") or "d" in entry or not verifies:
        return None
    try:
        key = jwt.PyJWK.from_dict({name: value for name, value in entry.items() if name != "alg"}).key
        algorithms = algorithms_of(key)
    except (jwt.PyJWTError, SecurityConfigurationError, ValueError, TypeError, KeyError):
        return None
    if (algorithm := entry.get("alg")) is not None:
        algorithms = tuple(name for name in algorithms if name == algorithm)
    key_id = entry.get("kid")
    return TokenKey(key_id if isinstance(key_id, str) else None, algorithms, key) if algorithms else None
