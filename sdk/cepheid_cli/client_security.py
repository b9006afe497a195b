"""What commands show to servers, from the environment, so that no secret stands in a process list.

CEPHEID_TOKEN_FILE, CEPHEID_TOKEN    a token, of a file or as it is
CEPHEID_TLS_CA_FILE                  the CAs that sign servers' certificates (PEM); unset: those of the system
CEPHEID_TLS_CERTIFICATE_FILE, CEPHEID_TLS_KEY_FILE     a certificate of one's own
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from cepheid_ports import CepheidError
from cepheid_security import client_context


class NoTokenError(CepheidError):
    """A token was named that cannot be read."""


def own_token() -> str:
    """Return the token, "" without one. Raises NoTokenError."""
    if path := os.environ.get("CEPHEID_TOKEN_FILE"):
        try:
            return Path(path).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise NoTokenError(f"CEPHEID_TOKEN_FILE names {path}, which cannot be read: {error}", path=path) from None
    return os.environ.get("CEPHEID_TOKEN", "").strip()


def own_tls() -> ssl.SSLContext:
    """Return the context for servers with TLS. Raises SecurityConfigurationError."""
    return client_context(
        ca_file=os.environ.get("CEPHEID_TLS_CA_FILE"),
        certificate_file=os.environ.get("CEPHEID_TLS_CERTIFICATE_FILE"),
        key_file=os.environ.get("CEPHEID_TLS_KEY_FILE"),
    )
