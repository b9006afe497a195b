"""TLS and role checks of a bookie's ports, from its settings."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from cepheid_bookie.access import OPEN_ACCESS, BookieAccess
from cepheid_security import SecurityConfigurationError
from cepheid_security.certificate_revocations import RevokedCertificates, revoked_certificates
from cepheid_security.grpc_tls import server_credentials
from cepheid_security.peer_settings import BookieAccessSettings, BookieTlsSettings, PeerTlsSettings
from cepheid_security.tls import followed_context

_OLDEST: Literal["1.2", "1.3"] = "1.2"


@dataclass(frozen=True, slots=True)
class SecuredPorts:
    """`credentials`: of the gRPC port. `scan_context`: gives the context of the scan port. None: without TLS.

    `revoked`: the certificates that the gRPC port refuses; the context of the scan port has them. None: they are not looked up.
    """

    credentials: Any
    scan_context: Callable[[], ssl.SSLContext] | None
    access: BookieAccess
    revoked: RevokedCertificates | None = None


def access_of(tls: BookieTlsSettings, access: BookieAccessSettings) -> BookieAccess:
    """Return what roles may do at a bookie: everything without TLS, and beside it on the port without TLS.

    Raises SecurityConfigurationError.
    """
    if not tls.enabled:
        return OPEN_ACCESS
    if not access.cluster_roles:
        raise SecurityConfigurationError(
            "access.cluster_roles is empty: no broker could write to this bookie. Name the roles in the certificates of brokers "
            "and bookies there"
        )
    roles = frozenset(access.cluster_roles), frozenset(access.reader_roles)
    return BookieAccess(*roles, open_without_tls=tls.has_plain_port, certificate_role=access.certificate_role)


def secured_ports(tls: BookieTlsSettings, access: BookieAccess) -> SecuredPorts:
    """Return the TLS of a bookie's ports. Raises SecurityConfigurationError."""
    tls.client_tls()  # names what is missing
    if tls.certificate_file is None or tls.key_file is None or tls.client_ca_file is None:
        return SecuredPorts(None, None, access)
    files = (tls.certificate_file, tls.key_file, tls.client_ca_file)
    context = followed_context(*files, tls.minimum_version, crl=tls.crl)
    revoked = None if tls.crl is None else revoked_certificates(tls.crl, tls.client_ca_file)
    return SecuredPorts(server_credentials(*files), context, access, revoked)


def health_context(tls: PeerTlsSettings) -> Callable[[], ssl.SSLContext] | None:
    """Return what gives the context of the health page; None: it has no TLS. Raises SecurityConfigurationError.

    It asks for a client certificate and does not demand one: probes have none.
    """
    tls.client_tls()  # names what is missing
    if tls.certificate_file is None or tls.key_file is None or tls.plain_http:
        return None
    ca_file, minimum_version = tls.ca_file, _OLDEST
    if isinstance(tls, BookieTlsSettings):
        ca_file, minimum_version = tls.client_ca_file, tls.minimum_version
    assert ca_file is not None, "client_tls has seen it"
    return followed_context(tls.certificate_file, tls.key_file, ca_file, minimum_version, "optional", tls.crl)
