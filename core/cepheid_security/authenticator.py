"""Who is that? One answer for every port: credentials in, a principal out, or the reason why not.

token ─► TokenVerifier        basic ─► bcrypt, in a worker        tls ─► names of the verified certificate
none  ─► the anonymous role, where the operator named one
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from cepheid_security.passwords import check_password, read_passwords
from cepheid_security.principal import AuthenticationError, Credentials, Principal, SecurityConfigurationError
from cepheid_security.settings import AuthenticationSettings
from cepheid_security.token_keys import TokenKey, public_key, secret_key
from cepheid_security.tokens import TokenVerifier

MAX_PASSWORD_CHECKS = 32
"""That wait or run: each takes 50 ms and more of a processor, and strangers can ask for them."""
_MAX_BASIC_BYTES = 1024

RunBlocking = Callable[[Callable[[], Principal]], Awaitable[Principal]]


class Authenticator:
    """`now_ms`: the wall clock. `run_blocking` runs a function off the loop: bcrypt takes 50 ms and more on purpose."""

    def __init__(self, settings: AuthenticationSettings, now_ms: Callable[[], int], run_blocking: RunBlocking) -> None:
        """Reads keys and passwords. Raises SecurityConfigurationError."""
        self._settings = settings
        self._now_ms = now_ms
        self._run_blocking = run_blocking
        if "token" in settings.methods and not (settings.secret_keys or settings.public_keys):
            raise SecurityConfigurationError("the method token needs authentication.secret_keys or authentication.public_keys")
        if "basic" in settings.methods and settings.passwords_file is None:
            raise SecurityConfigurationError("the method basic needs authentication.passwords_file")
        keys = [*_keys(settings.secret_keys, secret_key), *_keys(settings.public_keys, public_key)]
        self._tokens = TokenVerifier(
            keys,
            role_claim=settings.role_claim,
            audience=settings.audience,
            issuer=settings.issuer,
            leeway_s=settings.clock_leeway_s,
        )
        self._password_checks = 0
        self._passwords = read_passwords(settings.passwords_file) if settings.passwords_file is not None else {}

    def __repr__(self) -> str:
        return f"<Authenticator {', '.join(self._settings.methods)}>"

    async def authenticate(self, credentials: Credentials) -> Principal:
        """Raises AuthenticationError."""
        method = credentials.method or "none"
        if method == "none":
            if self._settings.anonymous_role is None:
                raise AuthenticationError(f"this cluster asks for credentials: {', '.join(self._settings.methods)}")
            return Principal(self._settings.anonymous_role, "none")
        if method not in self._settings.methods:
            shown = method[:20]
            raise AuthenticationError(f"the method {shown!r} is not accepted here, but: {', '.join(self._settings.methods)}")
        if method == "token":
            return self._tokens.verify(credentials.data.strip(), self._now_ms())
        if method == "basic":
            return await self._check_password(credentials.data)
        if not credentials.certificate_names:
            raise AuthenticationError("the client showed no certificate that one of this cluster's CAs signed")
        return Principal(credentials.certificate_names[0], "tls")

    async def _check_password(self, data: bytes) -> Principal:
        if len(data) > _MAX_BASIC_BYTES:
            raise AuthenticationError(f"a user name with its password has {len(data)} bytes, at most {_MAX_BASIC_BYTES} are read")
        if self._password_checks >= MAX_PASSWORD_CHECKS:
            raise AuthenticationError("too many passwords are being checked at this moment; try again")
        self._password_checks += 1
        try:
            return await self._run_blocking(lambda: check_password(self._passwords, data))
        finally:
            self._password_checks -= 1


def _keys(named: tuple[str, ...], read: Callable[[str, str | None], TokenKey]) -> list[TokenKey]:
    keys: list[TokenKey] = []
    for each in named:
        name, equals, location = each.partition("=")
        # A data: URL may end in `=`; a key's name has neither a slash nor a colon.
        has_name = bool(equals) and "/" not in name and ":" not in name
        try:
            keys.append(read(location, name) if has_name else read(each, None))
        except SecurityConfigurationError as error:
            shown = name if has_name else "a token key" if each.startswith("data:") else each
            raise SecurityConfigurationError(f"{shown}: {error}") from None
    return keys
