"""TLS contexts of servers and clients, and certificates that are exchanged without a restart."""

from __future__ import annotations

import os
import ssl
from collections.abc import Sequence
from typing import Literal

from cepheid_security.principal import SecurityConfigurationError

TlsVersion = Literal["1.2", "1.3"]
_VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""Of TLS 1.2: forward secrecy and authenticated encryption alone. Those of TLS 1.3 are all of that kind."""


class ServerTls:
    """A server's context. `reload_if_changed` reads its files again when they are others; connections that are open stay."""

    def __init__(
        self,
        certificate_file: str,
        key_file: str,
        *,
        client_ca_file: str | None = None,
        client_certificates: Literal["none", "optional", "required"] = "none",
        minimum_version: TlsVersion = "1.2",
    ) -> None:
        """Raises SecurityConfigurationError."""
        self._files = [name for name in (certificate_file, key_file, client_ca_file) if name is not None]
        self._certificate_file, self._key_file, self._client_ca_file = certificate_file, key_file, client_ca_file
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = _VERSIONS[minimum_version]
        self.context.set_ciphers(_CIPHERS)
        self.context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
        if client_certificates != "none":
            if client_ca_file is None:
                raise SecurityConfigurationError("client certificates are asked for, and no CA is given that would sign them")
            self.context.verify_mode = ssl.CERT_REQUIRED if client_certificates == "required" else ssl.CERT_OPTIONAL
        self._seen = self._state()
        self._load()

    def reload_if_changed(self) -> bool:
        """Whether there was something new. Raises SecurityConfigurationError: then the old certificate stays in use."""
        state = self._state()
        if state == self._seen:
            return False
        # A pair that does not match must not half replace the one in use: it is tried out first.
        ServerTls(self._certificate_file, self._key_file)
        self._load()
        self._seen = state
        return True

    def _state(self) -> tuple[tuple[int, int] | None, ...]:
        def of(path: str) -> tuple[int, int] | None:
            try:
                found = os.stat(path)
            except OSError:
                return None
            return found.st_mtime_ns, found.st_ino

        return tuple(map(of, self._files))

    def _load(self) -> None:
        try:
            self.context.load_cert_chain(self._certificate_file, self._key_file, password=_no_password)
        except (OSError, ssl.SSLError, ValueError) as error:
            message = f"certificate {self._certificate_file} with key {self._key_file} cannot be used: {_reason(error)}"
            raise SecurityConfigurationError(message, path=self._certificate_file) from None
        if self._client_ca_file is not None:
            _load_ca(self.context, self._client_ca_file)


def client_context(
    *,
    ca_file: str | None = None,
    certificate_file: str | None = None,
    key_file: str | None = None,
    check_hostname: bool = True,
) -> ssl.SSLContext:
    """Return the context of a client. Without `ca_file` the system's CAs are trusted. Raises SecurityConfigurationError."""
    context = ssl.create_default_context() if ca_file is None else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = check_hostname
    if ca_file is not None:
        _load_ca(context, ca_file)
    if certificate_file is not None:
        try:
            context.load_cert_chain(certificate_file, key_file, password=_no_password)
        except (OSError, ssl.SSLError, ValueError) as error:
            message = f"certificate {certificate_file} with key {key_file} cannot be used: {_reason(error)}"
            raise SecurityConfigurationError(message, path=certificate_file) from None
    return context


def certificate_names(certificate: dict[str, object] | None) -> tuple[str, ...]:
    """Return the common name, then the DNS names, of what `SSLObject.getpeercert()` gave; () without a verified certificate."""
    if not certificate:
        return ()
    subject = certificate.get("subject", ())
    alternatives = certificate.get("subjectAltName", ())
    assert isinstance(subject, Sequence)
    assert isinstance(alternatives, Sequence)
    common = [value for part in subject for name, value in part if name == "commonName"]
    dns = [value for kind, value in alternatives if kind == "DNS"]
    return tuple(dict.fromkeys([*common, *dns]))


def _load_ca(context: ssl.SSLContext, path: str) -> None:
    try:
        context.load_verify_locations(path)
    except (OSError, ssl.SSLError) as error:
        raise SecurityConfigurationError(f"the CA file {path} cannot be used: {_reason(error)}", path=path) from None


def _no_password() -> str:
    """Without it OpenSSL would ask on the terminal, and the server would stand still."""
    raise ValueError("the key has a password; store it without one, readable by this user alone")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error)).replace("_", " ").lower()
    return getattr(error, "strerror", None) or str(error)
