"""The token of a client, from its environment, so that no secret stands in a process list.

CEPHEID_TOKEN_FILE, CEPHEID_TOKEN    a token, of a file or as it is
CEPHEID_OAUTH2_FILE                  a client id with its secret, for which an issuer gives tokens (JSON, as for Pulsar's clients)
CEPHEID_OAUTH2_AUDIENCE              the audience of these tokens, unless the file has it

`ClientTls.from_environment` has the certificates. A variable that is empty is one that is not set.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

from cepheid_ports import CepheidError
from cepheid_security.oauth2 import ClientCredentials


class NoTokenError(CepheidError):
    """A token was named that cannot be read."""


def own_token() -> str:
    """Return the token, "" without one. Raises NoTokenError, TokenRequestError, SecurityConfigurationError."""
    if path := os.environ.get("CEPHEID_TOKEN_FILE"):
        try:
            return Path(path).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise NoTokenError(f"CEPHEID_TOKEN_FILE names {path}, which cannot be read: {error}", path=path) from None
    if token := os.environ.get("CEPHEID_TOKEN", "").strip():
        return token
    if path := os.environ.get("CEPHEID_OAUTH2_FILE"):
        return _credentials(path, os.environ.get("CEPHEID_OAUTH2_AUDIENCE"))()
    return ""


@functools.cache
def _credentials(path: str, audience: str | None) -> ClientCredentials:
    """One process makes several connections: they share a token while it holds."""
    return ClientCredentials.from_file(path, audience=audience)
