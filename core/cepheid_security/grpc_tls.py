"""gRPC credentials from the certificate files of a process. gRPC is imported when it is used.

Servers ask for new files at each handshake (`grpc.dynamic_ssl_server_credentials`), so an exchanged certificate or client CA is in
use for the next connection. A channel keeps the credentials it was made with; its owner makes a new one when `ClientTls.state`
has changed.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from cepheid_security.principal import SecurityConfigurationError
from cepheid_security.tls import ClientTls, ServerTls, file_state

log = logging.getLogger(__name__)


def channel_credentials(tls: ClientTls) -> Any:
    """Return `grpc.ChannelCredentials` of the files as they are now. Raises SecurityConfigurationError."""
    import grpc

    files = (tls.ca_file, tls.key_file, tls.certificate_file)
    tls.context()  # names the file that is wrong; gRPC would only fail to connect
    return grpc.ssl_channel_credentials(*(None if path is None else _bytes_of(path) for path in files))


def server_credentials(certificate_file: str, key_file: str, client_ca_file: str) -> Any:
    """Return `grpc.ServerCredentials` that demand a client certificate and follow changes of the files.

    Files that cannot be used leave the previous ones in force, and are named in the log once.
    Raises SecurityConfigurationError when the first files cannot be used.
    """
    import grpc

    files = (certificate_file, key_file, client_ca_file)
    first = _server_configuration(*files)
    seen = file_state(files)

    def changed() -> Any:
        """Called by gRPC in a thread of its own at each handshake. None: as before."""
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

    # Tried out first: gRPC refuses a pair that does not match without a reason.
    ServerTls(certificate_file, key_file, client_ca_file=client_ca_file, client_certificates="required")
    pair = (_bytes_of(key_file), _bytes_of(certificate_file))
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=_bytes_of(client_ca_file))


def peer_role(auth_context: dict[str, Any]) -> str:
    """Return the common name of a gRPC peer's verified certificate, "" without one. `auth_context`: that of the call."""
    names = list(auth_context.get("x509_common_name", ()))
    return names[0].decode(errors="replace") if names else ""


def is_encrypted(auth_context: dict[str, Any]) -> bool:
    """Return whether a gRPC call came over TLS."""
    return b"ssl" in list(auth_context.get("transport_security_type", ()))


def _bytes_of(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise SecurityConfigurationError(f"{path} cannot be read: {error.strerror}", path=path) from None
