"""gRPC credentials from the certificate files of a process. gRPC is imported on use.

Servers read new files at each handshake (`grpc.dynamic_ssl_server_credentials`), so a replaced certificate or client CA applies to
the next connection. A channel keeps its credentials; its owner creates a new channel when `ClientTls.state` has changed.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from pathlib import Path
from typing import Any

from cepheid_security.principal import SecurityConfigurationError
from cepheid_security.tls import CertificateRule, ClientTls, ServerTls, file_state

log = logging.getLogger(__name__)


def channel_credentials(tls: ClientTls) -> Any:
    """Return `grpc.ChannelCredentials` from the current files. Raises SecurityConfigurationError."""
    import grpc

    files = (tls.ca_file, tls.key_file, tls.certificate_file)
    tls.context()  # reports the unusable file; gRPC would only fail to connect
    return grpc.ssl_channel_credentials(*(None if path is None else _bytes_of(path) for path in files))


def server_credentials(certificate_file: str, key_file: str, client_ca_file: str) -> Any:
    """Return `grpc.ServerCredentials` that demand a client certificate and follow changes of the files.

    If files cannot be used, the previous ones stay in force, and they are logged once.
    Raises SecurityConfigurationError if the first files cannot be used.
    """
    import grpc

    files = (certificate_file, key_file, client_ca_file)
    first = _server_configuration(*files)
    seen = file_state(files)

    def changed() -> Any:
        """Return the new configuration, or None if unchanged. gRPC calls it in its own thread at each handshake."""
        nonlocal seen
        state = file_state(files)
        if state == seen:
            return None
        seen = state
        try:
            configuration = _server_configuration(*files)
        except SecurityConfigurationError as error:
            log.warning("tls.not_reloaded", extra={"error": str(error), "hint": "the old certificate stays in use"})
            return None
        log.info("tls.reloaded", extra={"certificate": certificate_file})
        return configuration

    return grpc.dynamic_ssl_server_credentials(first, changed, require_client_authentication=True)


def _server_configuration(certificate_file: str, key_file: str, client_ca_file: str) -> Any:
    import grpc

    # Checked first: gRPC refuses a certificate and key that do not match without a reason.
    ServerTls(certificate_file, key_file, client_ca_file=client_ca_file, client_certificates="required")
    pair = (_bytes_of(key_file), _bytes_of(certificate_file))
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=_bytes_of(client_ca_file))


def peer_role(auth_context: dict[str, Any], rule: CertificateRule = "common_name") -> str:
    """Return the name in a gRPC peer's verified certificate that is its role by `rule`, "" without a certificate or such a name.

    `auth_context` is the call's. `certificate_names` decides likewise on other ports, where the first name is the role.
    """
    certificate = peer_certificate(auth_context)
    names = () if certificate is None else _names_in(certificate, rule)
    return names[0] if names else ""


@lru_cache(maxsize=256)
def _names_in(certificate: bytes, rule: CertificateRule) -> tuple[str, ...]:
    """Return the names in a PEM certificate by a rule. gRPC itself returns only the first of several common names."""
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    parsed = x509.load_pem_x509_certificate(certificate)
    if rule == "common_name":
        common = tuple(str(attribute.value) for attribute in parsed.subject.get_attributes_for_oid(NameOID.COMMON_NAME))
        return common if len(common) == 1 else ()
    kinds = {"dns": x509.DNSName, "uri": x509.UniformResourceIdentifier, "email": x509.RFC822Name}
    try:
        alternatives = parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return tuple(name.value for name in alternatives if isinstance(name, kinds[rule]))


def peer_certificate(auth_context: dict[str, Any]) -> bytes | None:
    """Return a gRPC peer's verified certificate (PEM), or None."""
    certificates: list[bytes] = list(auth_context.get("x509_pem_cert", ()))
    return certificates[0] if certificates else None


@lru_cache(maxsize=256)
def expires_at_ms(certificate: bytes) -> int:
    """Return when a certificate (PEM) expires, in ms of the wall clock. TLS checks that only in the handshake."""
    from cryptography import x509

    return int(x509.load_pem_x509_certificate(certificate).not_valid_after_utc.timestamp() * 1000)


def is_encrypted(auth_context: dict[str, Any]) -> bool:
    """Return whether a gRPC call came over TLS."""
    return b"ssl" in list(auth_context.get("transport_security_type", ()))


def _bytes_of(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise SecurityConfigurationError(f"{path} cannot be read: {error.strerror}", path=path) from None
