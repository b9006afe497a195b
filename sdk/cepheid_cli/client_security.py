"""Credentials of commands, from the environment: the secrets of `client_environment`, and the certificates of `ClientTls`.

CEPHEID_TLS_CA_FILE                  the CAs that sign servers' certificates (PEM); unset: those of the system
CEPHEID_TLS_CERTIFICATE_FILE, CEPHEID_TLS_KEY_FILE     the client's own certificate
CEPHEID_TLS_CRL                      file or folder of the revocation lists of these CAs
"""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

from cepheid.admin.sync import Admin, connect
from cepheid_security import ClientTls
from cepheid_security.client_environment import own_secrets

if TYPE_CHECKING:
    import cepheid.sync

__all__ = ["connect_admin", "connect_client", "own_secrets", "own_tls"]


def own_tls() -> ssl.SSLContext:
    """Return the context for servers with TLS. Raises SecurityConfigurationError."""
    return ClientTls.from_environment().context()


def connect_admin(url: str) -> Admin:
    """Return the admin API at `url`, with the credentials of the environment.

    Raises UsageError, NoTokenError, SecurityConfigurationError.
    """
    tls, secrets = ClientTls.from_environment(), own_secrets()
    return connect(
        url,
        token=secrets.token,
        password=secrets.password,
        tls_ca_file=tls.ca_file,
        tls_certificate_file=tls.certificate_file,
        tls_key_file=tls.key_file,
        tls_crl=tls.crl,
    )


def connect_client(url: str) -> cepheid.sync.Client:
    """Return a client for the brokers at `url`, with the credentials of the environment; raises the errors of `connect_admin`."""
    import cepheid.sync  # here, as most commands need only the admin API

    tls, secrets = ClientTls.from_environment(), own_secrets()
    return cepheid.sync.connect(
        url,
        request_timeout_s=10.0,  # a person waits for the result
        token=secrets.token,
        password=secrets.password,
        tls_ca_file=tls.ca_file,
        tls_certificate_file=tls.certificate_file,
        tls_key_file=tls.key_file,
        tls_crl=tls.crl,
    )
