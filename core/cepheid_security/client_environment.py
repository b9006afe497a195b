"""What clients show to brokers beside a certificate, and where the environment has it, so that no secret stands in a process list.

CEPHEID_TOKEN_FILE, CEPHEID_TOKEN    a token, of a file or as it is
CEPHEID_OAUTH2_FILE                  a client id with its secret, for which an issuer gives tokens (JSON, as for Pulsar's clients)
CEPHEID_OAUTH2_AUDIENCE              the audience of these tokens, unless the file has it
CEPHEID_USER                         a user name, with its password in
CEPHEID_PASSWORD_FILE, CEPHEID_PASSWORD

The first of these that is set counts. `ClientTls.from_environment` has the certificates. A variable that is empty is one that is
not set.
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
"""A token, the file that has it, or a function that returns it, such as `ClientCredentials`. The last two may change with time."""


class NoTokenError(CepheidError):
    """A token or a password was named that cannot be read."""


@dataclass(slots=True)
class TokenFile:
    """A function that returns the token in a file as it is now, since one that expires is replaced there.

    Where there is no such file any more, as in a Spark task on another machine, it is the last one that was read.
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
        """Return the header of HTTP for this moment, None without secrets. It may wait for an issuer of tokens.

        Raises NoTokenError, and what a function as token raises.
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
    """Return what the environment names. Raises NoTokenError, SecurityConfigurationError; nothing is fetched yet."""
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
    """Return what fetches tokens, by a key file. One process makes several connections: they share a token while it holds."""
    return ClientCredentials.from_file(path, audience=audience)


def _text_of(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise NoTokenError(f"{what} {path}, which cannot be read: {error}", path=str(path)) from None
