"""Create, verify and show JSON Web Tokens as Pulsar uses them: the claim `sub` is the role.

A token is refused for `alg` none, an algorithm for another kind of key, an unknown key id, a time before or after its validity, a
wrong audience or issuer, or a missing role. Reasons never contain the token. Claims and algorithms: RFC 7519, RFC 7518, RFC 8725.
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from cepheid_security.principal import AuthenticationError, Principal, TokenIdentity
from cepheid_security.token_keys import TokenKey

MAX_TOKEN_BYTES = 16 << 10
_MAX_ROLE_CHARACTERS = 1000
_MAX_TIME_S = 1 << 53  # larger numbers, infinity and NaN are not times


class TokenVerifier:
    """Verifies tokens with a fixed set of keys. `leeway_s` is the tolerated difference of clocks.

    `audience`: a token must be for it, or for one of several. `method` is that of returned principals. `must_expire` refuses
    tokens without an expiry.
    """

    def __init__(
        self,
        keys: Sequence[TokenKey],
        *,
        role_claim: str = "sub",
        audience: str | Sequence[str] | None = None,
        issuer: str | None = None,
        leeway_s: float = 0.0,
        method: str = "token",
        must_expire: bool = False,
    ) -> None:
        self._keys = tuple(keys)
        self._role_claim = role_claim
        self._audience = audience
        self._issuer = issuer
        self._leeway_s = leeway_s
        self._method = method
        self._must_expire = must_expire

    def verify(self, token: bytes, now_ms: int) -> Principal:
        """Return the principal of a valid token. Raises AuthenticationError with the reason."""
        import jwt

        if len(token) > MAX_TOKEN_BYTES:
            raise AuthenticationError(f"a token has {len(token)} bytes, at most {MAX_TOKEN_BYTES} are read")
        try:
            header = jwt.get_unverified_header(token)
        except jwt.PyJWTError:
            raise AuthenticationError("that is not a token: it has no readable header") from None
        except RecursionError:  # older PyJWT: a header of nested brackets
            raise AuthenticationError("that is not a token: it has no readable header") from None
        if "crit" in header:  # RFC 7515 §4.1.11: unknown extensions must be refused
            raise AuthenticationError("the token has extensions (crit) that are not known here")
        algorithm, key_id = header.get("alg"), header.get("kid")
        claims = self._verified(token, str(algorithm), None if key_id is None else str(key_id))
        self._check_times(claims, now_ms)
        role = claims.get(self._role_claim)
        if not isinstance(role, str) or not role.strip() or len(role) > _MAX_ROLE_CHARACTERS:
            raise AuthenticationError(f"the token's claim {self._role_claim!r}, the role, is missing or is not a name")
        expires, issued = claims.get("exp"), claims.get("iat")
        token_id = claims.get("jti")
        identity = TokenIdentity(
            token_digest(token),
            token_id if isinstance(token_id, str) else None,
            int(float(issued) * 1000) if _is_time(issued) else None,
        )
        expires_at_ms = None if expires is None else int((float(expires) + self._leeway_s) * 1000)
        return Principal(role, self._method, expires_at_ms, token=identity)

    def _verified(self, token: bytes, algorithm: str, key_id: str | None) -> Mapping[str, Any]:
        import jwt

        candidates = [key for key in self._keys if algorithm in key.algorithms]
        if not candidates:
            raise AuthenticationError(f"no key of this cluster is for tokens of the algorithm {algorithm[:20]!r}")
        if key_id is not None and any(key.key_id is not None for key in self._keys):
            candidates = [key for key in candidates if key.key_id == key_id]
            if not candidates:
                raise AuthenticationError(f"the token names the key {key_id[:100]!r}, which this cluster does not have")
        # Times are checked with our own clock, which tests and the simulator can move.
        options: Any = {"verify_exp": False, "verify_nbf": False, "verify_iat": False, "verify_aud": self._audience is not None}
        problem = "its signature does not match"
        for key in candidates:
            try:
                claims: Mapping[str, Any] = jwt.decode(
                    token,
                    _verifying(key.key),
                    algorithms=[algorithm],
                    audience=self._audience,
                    issuer=self._issuer,
                    options=options,
                )
                return claims
            except jwt.InvalidAudienceError:
                problem = "it is for another audience"
            except jwt.InvalidIssuerError:
                problem = "it is from another issuer"
            except jwt.MissingRequiredClaimError as error:
                problem = f"its claim {error.claim!r} is missing"
            except jwt.InvalidSignatureError:
                continue
            except (jwt.PyJWTError, ValueError, TypeError, OverflowError) as error:
                problem = f"it cannot be read ({type(error).__name__})"
        raise AuthenticationError(f"the token is not valid: {problem}")

    def _check_times(self, claims: Mapping[str, Any], now_ms: int) -> None:
        now_s = now_ms / 1000
        for claim in ("exp", "nbf"):
            value = claims.get(claim)
            if value is None:
                if claim == "exp" and self._must_expire:
                    raise AuthenticationError("the token never expires, and tokens of an issuer must: its claim 'exp' is missing")
                continue
            if not _is_time(value):
                raise AuthenticationError(f"the token's claim {claim!r} is no time")
            if claim == "exp" and now_s >= value + self._leeway_s:
                raise AuthenticationError(f"the token expired {now_s - value:.0f} s ago")
            if claim == "nbf" and now_s < value - self._leeway_s:
                raise AuthenticationError(f"the token is not valid for another {value - now_s:.0f} s")


def _is_time(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and -_MAX_TIME_S < value < _MAX_TIME_S


def token_digest(token: bytes) -> str:
    """Return the digest by which a revocation names a token (`TokenIdentity.digest`)."""
    return hashlib.sha256(token.strip().rpartition(b".")[0]).hexdigest()


def claimed_issuer(token: bytes) -> str | None:
    """Return the issuer that a token claims to be from, unverified. It selects the keys to verify the token with."""
    parts = token.split(b".", 2)
    if len(token) > MAX_TOKEN_BYTES or len(parts) < 2:
        return None
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + b"=" * (-len(parts[1]) % 4)))
    except (ValueError, RecursionError):
        return None
    issuer = claims.get("iss") if isinstance(claims, dict) else None
    return issuer if isinstance(issuer, str) else None


def named_key(token: bytes) -> str | None:
    """Return the key id in a token's header, unverified; None without one."""
    import jwt

    try:
        key_id = jwt.get_unverified_header(token).get("kid") if len(token) <= MAX_TOKEN_BYTES else None
    except (jwt.PyJWTError, RecursionError):
        return None
    return key_id if isinstance(key_id, str) else None


def create_token(
    key: TokenKey, role: str, now_ms: int, *, expires_in_s: float | None = None, algorithm: str | None = None, **claims: Any
) -> str:
    """Return a signed token for `role`. `algorithm` None: the first one of the key."""
    import jwt

    payload = {"sub": role, "iat": now_ms // 1000, "jti": secrets.token_hex(8), **claims}
    if expires_in_s is not None:
        payload["exp"] = int(now_ms / 1000 + expires_in_s)
    headers = None if key.key_id is None else {"kid": key.key_id}
    return jwt.encode(payload, key.key, algorithm=algorithm or key.algorithms[0], headers=headers)


def read_unverified(token: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return header and claims of a token without verifying it, to show them. Raises AuthenticationError."""
    import jwt

    try:
        return jwt.get_unverified_header(token), jwt.decode(token, options={"verify_signature": False})
    except jwt.PyJWTError:
        raise AuthenticationError("that is not a token: three parts of base64 with dots between them are expected") from None


def _verifying(key: Any) -> Any:
    """Return the public key of a private key, else the key itself: files of either kind may verify."""
    return key.public_key() if hasattr(key, "private_bytes") else key
