"""Credentials of a client: a token, a user name with a password, or the certificate of its TLS connection."""

from __future__ import annotations

import base64
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cepheid.errors import ConnectError, NotAllowedError, UsageError
from cepheid_ports import CepheidError
from cepheid_security import SecurityConfigurationError, client_context
from cepheid_security.oauth2 import ClientCredentials, TokenRefusedError
from cepheid_wire import ServerError


@dataclass(frozen=True, slots=True)
class Security:
    """How a client connects. Secrets are kept out of its repr."""

    token: str | Path | Callable[[], str] | None = field(default=None, repr=False)
    """The token, the file that has it, or a function that returns it."""
    password: tuple[str, str] | None = field(default=None, repr=False)
    """User name and password."""
    tls_ca_file: str | None = None
    tls_certificate_file: str | None = None
    tls_key_file: str | None = None
    tls_check_hostname: bool = True
    tls_crl: str | None = None

    def check(self) -> None:
        """Raises UsageError."""
        if self.token is not None and self.password is not None:
            raise UsageError("give a token or a password, not both")
        if self.tls_key_file is not None and self.tls_certificate_file is None:
            raise UsageError("tls_key_file needs tls_certificate_file")
        if self.password is not None and ":" in self.password[0]:
            raise UsageError("a user name has no colon")

    def tls_context(self) -> ssl.SSLContext:
        """Return the TLS context. Raises UsageError, which names an unusable file."""
        try:
            return client_context(
                ca_file=self.tls_ca_file,
                certificate_file=self.tls_certificate_file,
                key_file=self.tls_key_file,
                check_hostname=self.tls_check_hostname,
                crl=self.tls_crl,
            )
        except SecurityConfigurationError as error:
            raise UsageError(str(error)) from None

    async def show(self, *, renew: bool = False) -> tuple[str, bytes]:
        """Return method and data for CONNECT; with `renew` for a broker that requests them again.

        Raises ConnectError, which may be temporary; NotAllowedError: the issuer refuses this client.
        """
        if isinstance(self.token, ClientCredentials):
            import asyncio  # here, since the blocking admin client does not need it

            return await asyncio.to_thread(self.show_now, renew=renew)
        return self.show_now()

    def show_now(self, *, renew: bool = False) -> tuple[str, bytes]:
        """Return the same as `show`, blocking while an issuer of OAuth2 tokens answers, if there is one. Raises ConnectError."""
        if isinstance(self.token, ClientCredentials):
            try:
                return "token", self.token(renew=renew).encode()
            except TokenRefusedError as error:
                raise NotAllowedError(f"no token: {error}", code=ServerError.AUTHENTICATION_ERROR) from error
            except (CepheidError, UnicodeEncodeError) as error:
                raise ConnectError(f"no token: {error}") from error
        if self.password is not None:
            return "basic", ":".join(self.password).encode()
        if self.token is not None:
            try:
                if isinstance(self.token, Path):
                    token = self.token.read_text()
                else:
                    token = self.token() if callable(self.token) else self.token
            except OSError as error:
                raise ConnectError(f"the file with the token cannot be read: {error}") from error
            except Exception as error:  # the application's function: links that attach again must survive its temporary failures
                raise ConnectError(f"the token function raised {error!r}") from error
            return "token", token.strip().encode()
        return ("tls", b"") if self.tls_certificate_file is not None else ("none", b"")

    async def authorization(self) -> str | None:
        """Return the HTTP header, None without credentials; a certificate needs none. Raises ConnectError."""
        return _authorization(*await self.show())

    def authorization_now(self) -> str | None:
        """Return the same as `authorization`; may block for an issuer of tokens. Raises ConnectError."""
        return _authorization(*self.show_now())


def _authorization(method: str, data: bytes) -> str | None:
    if method == "token":
        return f"Bearer {data.decode()}" if data else None
    return f"Basic {base64.b64encode(data).decode()}" if method == "basic" else None
