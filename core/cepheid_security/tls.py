"""TLS contexts of servers and clients, whose certificates can be replaced without a restart."""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from cepheid_security.certificate_revocations import RevocationContext, RevokedCertificates, revoked_certificates
from cepheid_security.principal import SecurityConfigurationError

log = logging.getLogger(__name__)

TlsVersion = Literal["1.2", "1.3"]
FileState = tuple[tuple[int, int] | None, ...]
CertificateRule = Literal["common_name", "dns", "uri", "email"]
"""Name in a certificate that is the role. The last three are kinds of subject alternative names."""
_SAN_KINDS = {"dns": "DNS", "uri": "URI", "email": "email"}
_VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""Ciphers for TLS 1.2: only those with forward secrecy and authenticated encryption, as all of TLS 1.3 have."""


class ServerTls:
    """TLS of a server. `context` is for the next connection, so read it for each one.

    `reload_if_changed` reads the files again when they were replaced. Open connections keep their context.
    """

    def __init__(
        self,
        certificate_file: str,
        key_file: str,
        *,
        client_ca_file: str | None = None,
        client_certificates: Literal["none", "optional", "required"] = "none",
        minimum_version: TlsVersion = "1.2",
        crl: str | None = None,
    ) -> None:
        """`crl`: file or folder of the revocation lists of the CAs in `client_ca_file`. Raises SecurityConfigurationError."""
        self._files = [name for name in (certificate_file, key_file, client_ca_file) if name is not None]
        self._certificate_file, self._key_file, self._client_ca_file = certificate_file, key_file, client_ca_file
        if client_certificates != "none" and client_ca_file is None:
            raise SecurityConfigurationError("client certificates are asked for, and no CA is given that would sign them")
        self._client_certificates = client_certificates
        self._minimum_version = _VERSIONS[minimum_version]
        self.revoked = _revoked(crl, client_ca_file, "client_ca_file")
        self._seen = self._state()
        self.context = self._load()

    def reload_if_changed(self) -> bool:
        """Read changed files, and return whether there were any. On SecurityConfigurationError the old certificate stays in use."""
        state = self._state()
        if state == self._seen:
            return False
        self.context = self._load()  # a new context: one in use cannot drop a CA, and must not be changed in part
        self._seen = state
        return True

    def _state(self) -> FileState:
        return file_state(self._files)

    def _load(self) -> ssl.SSLContext:
        """Raises SecurityConfigurationError."""
        context = _new_context(ssl.PROTOCOL_TLS_SERVER, self.revoked)
        context.minimum_version = self._minimum_version
        context.set_ciphers(_CIPHERS)
        context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
        if self._client_certificates != "none":
            context.verify_mode = ssl.CERT_REQUIRED if self._client_certificates == "required" else ssl.CERT_OPTIONAL
        try:
            context.load_cert_chain(self._certificate_file, self._key_file, password=_no_password)
        except (OSError, ssl.SSLError, ValueError) as error:
            message = f"certificate {self._certificate_file} with key {self._key_file} cannot be used: {_reason(error)}"
            raise SecurityConfigurationError(message, path=self._certificate_file) from None
        if self._client_ca_file is not None:
            _load_ca(context, self._client_ca_file)
        return context


def followed_context(
    certificate_file: str,
    key_file: str,
    client_ca_file: str,
    minimum_version: TlsVersion = "1.2",
    client_certificates: Literal["optional", "required"] = "required",
    crl: str | None = None,
) -> Callable[[], ssl.SSLContext]:
    """Return a function that returns a server's context, which requests client certificates, from the current files at each call.

    If files cannot be used, the previous context stays in force, and they are logged once.
    Raises SecurityConfigurationError if the first files cannot be used.
    """
    files = (certificate_file, key_file, client_ca_file)

    def load() -> ssl.SSLContext:
        return ServerTls(
            certificate_file,
            key_file,
            client_ca_file=client_ca_file,
            client_certificates=client_certificates,
            minimum_version=minimum_version,
            crl=crl,
        ).context

    return _followed(load, lambda: file_state(files))


def _followed(load: Callable[[], ssl.SSLContext], state: Callable[[], FileState]) -> Callable[[], ssl.SSLContext]:
    seen, context = state(), load()

    def follow() -> ssl.SSLContext:
        nonlocal seen, context
        if (found := state()) != seen:
            seen = found
            try:
                context = load()
            except SecurityConfigurationError as error:
                log.warning("tls.not_reloaded", extra={"error": str(error), "hint": "the old certificate stays in use"})
        return context

    return follow


@dataclass(frozen=True, slots=True)
class ClientTls:
    """The files for a process's outgoing TLS connections. Without `ca_file` the system's CAs are trusted.

    `crl`: file or folder of the revocation lists of the CAs in `ca_file`, against which servers' certificates are checked.
    """

    ca_file: str | None = None
    certificate_file: str | None = None
    key_file: str | None = None
    crl: str | None = None

    @classmethod
    def from_environment(cls) -> ClientTls:
        """Return the files named by CEPHEID_TLS_CA_FILE, _CERTIFICATE_FILE, _KEY_FILE and _CRL. Empty variables count as unset."""
        names = ("CEPHEID_TLS_CA_FILE", "CEPHEID_TLS_CERTIFICATE_FILE", "CEPHEID_TLS_KEY_FILE", "CEPHEID_TLS_CRL")
        return cls(*(os.environ.get(name) or None for name in names))

    @classmethod
    def of_metadata(cls) -> ClientTls | None:
        """Return the files named by CEPHEID_METADATA_TLS_CA_FILE, _CERTIFICATE_FILE, _KEY_FILE and _CRL, or None if none is set.

        They are for ZooKeeper only, which may have its own CA, and take precedence over the files for other connections.
        """
        names = ("CA_FILE", "CERTIFICATE_FILE", "KEY_FILE", "CRL")
        files = [os.environ.get(f"CEPHEID_METADATA_TLS_{name}") or None for name in names]
        return cls(*files) if any(files) else None

    def context(self) -> ssl.SSLContext:
        """Return a new context of these files. Raises SecurityConfigurationError."""
        if (self.certificate_file is None) != (self.key_file is None):
            raise SecurityConfigurationError("a client certificate and its key are given together, or neither of them")
        pair = (self.certificate_file, self.key_file)
        return client_context(ca_file=self.ca_file, certificate_file=pair[0], key_file=pair[1], crl=self.crl)

    def followed(self) -> Callable[[], ssl.SSLContext]:
        """Return a function that returns a context from the current files at each call, like `followed_context` for servers."""
        return _followed(self.context, self.state)

    def state(self) -> FileState:
        """Return a value that changes when one of the files changes."""
        return file_state([name for name in (self.ca_file, self.certificate_file, self.key_file) if name is not None])


def file_state(paths: Sequence[str]) -> FileState:
    """Return modification times and inodes of files, None for a missing one. The value changes when a file is replaced."""

    def of(path: str) -> tuple[int, int] | None:
        try:
            found = os.stat(path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino

    return tuple(map(of, paths))


def client_context(
    *,
    ca_file: str | None = None,
    certificate_file: str | None = None,
    key_file: str | None = None,
    check_hostname: bool = True,
    crl: str | None = None,
) -> ssl.SSLContext:
    """Return the context of a client. Without `ca_file` the system's CAs are trusted.

    `crl` is that of `ClientTls`. Raises SecurityConfigurationError.
    """
    revoked = _revoked(crl, ca_file, "ca_file")
    context = ssl.create_default_context() if ca_file is None else _new_context(ssl.PROTOCOL_TLS_CLIENT, revoked)
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


def certificate_names(certificate: dict[str, object] | None, rule: CertificateRule = "common_name") -> tuple[str, ...]:
    """Return the names in a result of `SSLObject.getpeercert()`; () without a verified certificate, or without such a name.

    The rule `common_name` returns the common name if there is exactly one; the others return the alternative names of that kind.
    By the first rule a host's DNS name is not a role, since a CA may sign both servers and clients.
    """
    if not certificate:
        return ()
    subject = certificate.get("subject", ())
    alternatives = certificate.get("subjectAltName", ())
    assert isinstance(subject, Sequence)
    assert isinstance(alternatives, Sequence)
    if rule != "common_name":
        return tuple(value for kind, value in alternatives if kind == _SAN_KINDS[rule])
    common = tuple(value for part in subject for name, value in part if name == "commonName")
    return common if len(common) == 1 else ()


def certificate_expires_at_ms(certificate: dict[str, object] | None) -> int | None:
    """Return when a certificate from `SSLObject.getpeercert()` expires, in ms of the wall clock; None without one.

    TLS checks the expiry only in the handshake.
    """
    return ssl.cert_time_to_seconds(str(certificate["notAfter"])) * 1000 if certificate else None


def _revoked(crl: str | None, ca_file: str | None, ca_name: str) -> RevokedCertificates | None:
    """Raises SecurityConfigurationError."""
    if crl is None:
        return None
    if ca_file is None:
        raise SecurityConfigurationError(f"revocation lists ({crl}) need {ca_name}: it names the CAs whose lists count")
    return revoked_certificates(crl, ca_file)


def _new_context(protocol: int, revoked: RevokedCertificates | None) -> ssl.SSLContext:
    if revoked is None:
        return ssl.SSLContext(protocol)
    context = RevocationContext(protocol)
    context.revoked = revoked
    return context


def _load_ca(context: ssl.SSLContext, path: str) -> None:
    try:
        context.load_verify_locations(path)
    except (OSError, ssl.SSLError) as error:
        raise SecurityConfigurationError(f"the CA file {path} cannot be used: {_reason(error)}", path=path) from None


def _no_password() -> str:
    """Raise ValueError for a key with a password. Without this, OpenSSL would prompt on the terminal and block the server."""
    raise ValueError("the key has a password; store it without one, readable by this user alone")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error)).replace("_", " ").lower()
    return getattr(error, "strerror", None) or str(error)
