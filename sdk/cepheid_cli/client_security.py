"""What commands show to servers, from the environment: the token of `client_environment`, and the certificates of `ClientTls`.

CEPHEID_TLS_CA_FILE                  the CAs that sign servers' certificates (PEM); unset: those of the system
CEPHEID_TLS_CERTIFICATE_FILE, CEPHEID_TLS_KEY_FILE     a certificate of one's own
"""

from __future__ import annotations

import ssl

from cepheid_security import ClientTls
from cepheid_security.client_environment import own_token

__all__ = ["own_tls", "own_token"]


def own_tls() -> ssl.SSLContext:
    """Return the context for servers with TLS. Raises SecurityConfigurationError."""
    return ClientTls.from_environment().context()
