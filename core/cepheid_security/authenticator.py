"""Authenticate clients, in the same way on every port: credentials in, a principal or the reason of the refusal out.

token ─► TokenVerifier, or OidcVerifier when it is from one of its issuers     basic ─► bcrypt, in a worker
tls   ─► names of the verified certificate          none  ─► the anonymous role, if the operator named one

A revoked token is refused, whichever of the two verifiers accepted it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from cepheid_security.failed_attempts import network_of
from cepheid_security.oidc import Fetch, OidcVerifier
from cepheid_security.passwords import VerifiedPasswords, check_password, read_passwords
from cepheid_security.principal import (
    AuthenticationError,
    AuthenticationUnavailableError,
    Credentials,
    Principal,
    SecurityConfigurationError,
)
from cepheid_security.revocations import NOTHING_REVOKED, RevokedTokens
from cepheid_security.settings import AuthenticationSettings
from cepheid_security.tls import FileState, file_state
from cepheid_security.token_keys import TokenKey, key_path, public_key, secret_key
from cepheid_security.tokens import TokenVerifier

MAX_PASSWORD_CHECKS = 32
"""Maximum of concurrent checks: each takes 50 ms or more of a processor, and unauthenticated clients can cause them."""
MAX_PASSWORD_CHECKS_OF_ADDRESS = 4
"""Maximum of concurrent checks of one address, so that its wrong passwords do not keep out users at others."""
_MAX_BASIC_BYTES = 1024

RunBlocking = Callable[[Callable[[], Principal]], Awaitable[Principal]]


class Authenticator:
    """Authenticates clients. `now_ms` is the wall clock; `run_blocking` runs a function outside the event loop, for slow bcrypt.

    Call `aclose` once, when no client is authenticated any more.
    """

    def __init__(
        self,
        settings: AuthenticationSettings,
        now_ms: Callable[[], int],
        run_blocking: RunBlocking,
        *,
        fetch: Fetch | None = None,
    ) -> None:
        """Read keys and passwords. `fetch` fetches documents of issuers; None: over HTTP. Raises SecurityConfigurationError."""
        self._settings = settings
        self._now_ms = now_ms
        self._run_blocking = run_blocking
        if "token" in settings.methods and not (settings.secret_keys or settings.public_keys):
            raise SecurityConfigurationError("the method token needs authentication.secret_keys or authentication.public_keys")
        if "basic" in settings.methods and settings.passwords_file is None:
            raise SecurityConfigurationError("the method basic needs authentication.passwords_file")
        self._seen = self._files()
        self._tokens, self._passwords = self._read()
        self._oidc = OidcVerifier(settings.oidc, settings.clock_leeway_s, fetch) if "oidc" in settings.methods else None
        self.revoked: RevokedTokens = NOTHING_REVOKED
        """Revoked tokens. The follower of their record replaces it."""
        self.failures = 0
        """Number of refused clients and calls."""
        self._password_checks = asyncio.Semaphore(MAX_PASSWORD_CHECKS)
        self._verified = VerifiedPasswords()
        self._password_shares: dict[str, _Share] = {}

    def __repr__(self) -> str:
        return f"<Authenticator {', '.join(self._settings.methods)}>"

    def reload_if_changed(self) -> bool:
        """Read keys and passwords again if their files were replaced, and return whether they were.

        Connected clients stay connected. On SecurityConfigurationError the earlier keys and passwords stay in use.
        """
        files = self._files()
        if files == self._seen:
            return False
        self._tokens, self._passwords = self._read()
        self._verified = VerifiedPasswords()  # a password may have changed
        self._seen = files
        return True

    def _read(self) -> tuple[TokenVerifier, Mapping[str, bytes]]:
        """Return the keys and passwords in the files. Raises SecurityConfigurationError."""
        settings = self._settings
        tokens = TokenVerifier(
            [*_keys(settings.secret_keys, secret_key), *_keys(settings.public_keys, public_key)],
            role_claim=settings.role_claim,
            audience=settings.audience,
            issuer=settings.issuer,
            leeway_s=settings.clock_leeway_s,
        )
        return tokens, {} if settings.passwords_file is None else read_passwords(settings.passwords_file)

    def _files(self) -> FileState:
        settings = self._settings
        locations = [_named(each)[1] for each in (*settings.secret_keys, *settings.public_keys)]
        paths = [str(key_path(each)) for each in locations if not each.startswith("data:")]
        return file_state([*paths, *([] if settings.passwords_file is None else [settings.passwords_file])])

    @property
    def accepts_certificates(self) -> bool:
        """Whether clients may authenticate by their TLS certificate."""
        return "tls" in self._settings.methods

    async def authenticate(self, credentials: Credentials) -> Principal:
        """Return the principal of these credentials. Raises AuthenticationError."""
        try:
            return await self._authenticate(credentials)
        except AuthenticationUnavailableError:
            raise  # not the client's failure
        except AuthenticationError:
            self.failures += 1
            raise

    async def _authenticate(self, credentials: Credentials) -> Principal:
        method = credentials.method or "none"
        if method == "none":
            if self._settings.anonymous_role is None:
                raise AuthenticationError(f"this cluster asks for credentials: {', '.join(self._settings.methods)}")
            return Principal(self._settings.anonymous_role, "none")
        if method == "token" and self._oidc is not None:
            return await self._check_token(self._oidc, credentials.data.strip())
        if method not in self._settings.methods or method == "oidc":  # clients send its tokens with the method token
            shown = method[:20]
            raise AuthenticationError(f"the method {shown!r} is not accepted here, but: {', '.join(self._settings.methods)}")
        if method == "token":
            return self._unrevoked(self._tokens.verify(credentials.data.strip(), self._now_ms()))
        if method == "basic":
            return await self._check_password(credentials.data, credentials.peer)
        if not credentials.certificate_names:
            raise AuthenticationError("the client showed no certificate that one of this cluster's CAs signed")
        expires_at_ms = credentials.certificate_expires_at_ms
        if expires_at_ms is not None and self._now_ms() >= expires_at_ms:  # since the handshake
            raise AuthenticationError("the client's certificate has expired: connect again with a new one")
        return Principal(credentials.certificate_names[0], "tls", expires_at_ms=expires_at_ms)

    def problems(self) -> list[str]:
        """Return sentences for operators about current problems of authentication."""
        return [] if self._oidc is None else self._oidc.problems()

    async def aclose(self) -> None:
        if self._oidc is not None:
            await self._oidc.aclose()

    async def _check_token(self, oidc: OidcVerifier, token: bytes) -> Principal:
        """Verify a token of an OpenID Connect issuer or of this cluster's own keys. Pulsar's clients send both alike."""
        if oidc.knows(token) or "token" not in self._settings.methods:
            principal = await oidc.verify(token, self._now_ms())
        else:
            principal = self._tokens.verify(token, self._now_ms())
        return self._unrevoked(principal)

    def _unrevoked(self, principal: Principal) -> Principal:
        """Return the principal if its token is not revoked. Raises AuthenticationError."""
        self.revoked.check(principal)
        return principal

    async def _check_password(self, data: bytes, peer: str) -> Principal:
        if len(data) > _MAX_BASIC_BYTES:
            raise AuthenticationError(f"a user name with its password has {len(data)} bytes, at most {_MAX_BASIC_BYTES} are read")
        known = self._verified.get(data, _now_s())
        if known is not None:
            return known
        network = network_of(peer)
        share = self._password_shares.setdefault(network, _Share())
        share.users += 1
        try:
            async with share.checks, self._password_checks:
                passwords, verified = self._passwords, self._verified  # a reload may replace them meanwhile
                principal = await self._run_blocking(lambda: check_password(passwords, data))
                verified.add(data, principal, _now_s())
                return principal
        finally:
            share.users -= 1
            if not share.users:
                self._password_shares.pop(network, None)


class _Share:
    """Limits concurrent password checks of one address; further ones wait. The connection limits bound how many can wait."""

    def __init__(self) -> None:
        self.checks = asyncio.Semaphore(MAX_PASSWORD_CHECKS_OF_ADDRESS)
        self.users = 0


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _keys(named: tuple[str, ...], read: Callable[[str, str | None], TokenKey]) -> list[TokenKey]:
    keys: list[TokenKey] = []
    for each in named:
        name, location = _named(each)
        try:
            keys.append(read(location, name))
        except SecurityConfigurationError as error:
            shown = name or ("a token key" if each.startswith("data:") else each)
            raise SecurityConfigurationError(f"{shown}: {error}") from None
    return keys


def _named(each: str) -> tuple[str | None, str]:
    """Return the name of a key, if any, and its location."""
    name, equals, location = each.partition("=")
    # A data: URL may end in `=`; a key's name has neither a slash nor a colon.
    return (name, location) if equals and "/" not in name and ":" not in name else (None, each)
