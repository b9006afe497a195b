"""Credentials of clients other than certificates, from environment variables, so that no process list shows a secret.

CEPHEID_TOKEN_FILE, CEPHEID_TOKEN    a file with a token, or a token
CEPHEID_OAUTH2_FILE                  a client id and secret, for which an issuer returns tokens (JSON, as for Pulsar's clients)
CEPHEID_OAUTH2_AUDIENCE              the audience of these tokens, unless the file has it
CEPHEID_USER                         a user name, with its password in
CEPHEID_PASSWORD_FILE, CEPHEID_PASSWORD

The first of these that is set counts; an empty variable counts as unset. `ClientTls.from_environment` has the certificates.
"""

from __future__ import annotations

import base64
import functools
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from cepheid_ports import CepheidError
from cepheid_security.oauth2 import ClientCredentials

Token = str | Path | Callable[[], str]
"""A token, a file with it, or a function that returns it, such as `ClientCredentials`. The last two may change with time."""


class NoTokenError(CepheidError):
    """A token or password that was configured cannot be read."""


@dataclass(slots=True)
class TokenFile:
    """A function that returns the token currently in a file, since an expiring token is replaced there.

    If the file cannot be read, as in a Spark task on another machine, it returns the last token that was read.
    """

    path: str
    _known: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        """Raises NoTokenError."""
        self._known = self._known or _text_of(Path(self.path), "the file of the token is")

    def __call__(self) -> str:
        with suppress(NoTokenError):
            self._known = _text_of(Path(self.path), "the file of the token is")
        return self._known


@dataclass(frozen=True, slots=True)
class ClientSecrets:
    """A token, or a user name with a password; by default neither. No repr shows them."""

    token: Token | None = field(default=None, repr=False)
    password: tuple[str, str] | None = field(default=None, repr=False)

    def authorization(self) -> str | None:
        """Return the current HTTP Authorization header, or None without secrets. It may wait for an issuer of tokens.

        Raises NoTokenError, and what a token function raises.
        """
        if self.password is not None:
            return f"Basic {base64.b64encode(':'.join(self.password).encode()).decode()}"
        if self.token is None:
            return None
        if isinstance(self.token, Path):
            token = _text_of(self.token, "the file of the token is")
        else:
            token = (self.token() if callable(self.token) else self.token).strip()
        if not (token.isascii() and token.isprintable()):  # HTTP libraries quote it in their refusal
            raise NoTokenError("the token has characters that no token has, e.g. the end of a line: its text is not shown here")
        return f"Bearer {token}" if token else None


NO_SECRETS = ClientSecrets()


def own_secrets() -> ClientSecrets:
    """Return the secrets in the environment, without fetching tokens. Raises NoTokenError, SecurityConfigurationError."""
    environment = os.environ
    if path := environment.get("CEPHEID_TOKEN_FILE"):
        return ClientSecrets(TokenFile(path, _text_of(Path(path), "CEPHEID_TOKEN_FILE names")))
    if token := environment.get("CEPHEID_TOKEN", "").strip():
        return ClientSecrets(token)
    if path := environment.get("CEPHEID_OAUTH2_FILE"):
        return ClientSecrets(oauth2_credentials(path, environment.get("CEPHEID_OAUTH2_AUDIENCE") or None))
    if user := environment.get("CEPHEID_USER"):
        if path := environment.get("CEPHEID_PASSWORD_FILE"):
            return ClientSecrets(password=(user, _text_of(Path(path), "CEPHEID_PASSWORD_FILE names")))
        if password := environment.get("CEPHEID_PASSWORD"):
            return ClientSecrets(password=(user, password))
        raise NoTokenError("CEPHEID_USER is set without a password: set CEPHEID_PASSWORD_FILE or CEPHEID_PASSWORD")
    return NO_SECRETS


@functools.cache
def oauth2_credentials(path: str, audience: str | None = None) -> ClientCredentials:
    """Return the token function for a key file. All connections of a process share it, and so a valid token."""
    return ClientCredentials.from_file(path, audience=audience)


def _text_of(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise NoTokenError(f"{what} {path}, which cannot be read: {error}", path=str(path)) from None
