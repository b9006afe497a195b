"""A certificate authority of one's own, for clusters that have none: a CA, and certificates that it signs.

Keys are EC keys of the curve P-256. The files are PEM; keys are readable by their owner alone.
"""

from __future__ import annotations

import datetime
import errno
import ipaddress
import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cepheid_security.principal import SecurityConfigurationError

_CA_DAYS = 3650
_CERTIFICATE_DAYS = 397  # what current TLS clients accept at most of a server's certificate
RENEW_BEFORE = datetime.timedelta(days=30)
"""Time before its end from which a certificate or token is made again."""
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252})")


class Authority:
    """A CA that is kept in `directory` as ca.pem and ca-key.pem."""

    def __init__(self, directory: Path, now: datetime.datetime, renew_before: datetime.timedelta = RENEW_BEFORE) -> None:
        """Make the CA, or read the one that is there. Raises SecurityConfigurationError."""
        from cryptography.hazmat.primitives.asymmetric import ec

        self._directory, self._now, self._renew_before = directory, now, renew_before
        certificate_file, key_file = directory / "ca.pem", directory / "ca-key.pem"
        if certificate_file.exists() != key_file.exists():
            raise SecurityConfigurationError(f"{directory} has only one of ca.pem and ca-key.pem: restore the other, or remove it")
        if certificate_file.exists():
            self._certificate, self._key = _read(certificate_file, key_file)
            return
        self._key = ec.generate_private_key(ec.SECP256R1())
        name = _name("Cepheid CA")
        self._certificate = self._sign(name, name, self._key.public_key(), _CA_DAYS, is_ca=True, names=(), for_servers=False)
        write_private(key_file, _pem_of_key(self._key))
        certificate_file.write_bytes(_pem_of(self._certificate))

    def issue(self, name: str, *, hosts: Sequence[str] = (), for_servers: bool) -> None:
        """Write `NAME.pem` and `NAME-key.pem`, in the place of earlier ones. `hosts`: names and addresses of a server.

        Raises SecurityConfigurationError: one of `hosts` is neither.
        """
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(
            _name(name),
            self._certificate.subject,
            key.public_key(),
            _CERTIFICATE_DAYS,
            is_ca=False,
            names=hosts,
            for_servers=for_servers,
        )
        replace_private(self._directory / f"{name}-key.pem", _pem_of_key(key))
        certificate_file = self._directory / f"{name}.pem"
        replace_private(certificate_file, _pem_of(certificate))
        certificate_file.chmod(0o644)

    def ensure(self, name: str, *, hosts: Sequence[str] = (), for_servers: bool) -> str | None:
        """Issue `NAME.pem` when it is missing, expires soon, or lacks one of `hosts`. Return what was done, or None.

        Hosts that it has stay: clients use them. Raises SecurityConfigurationError, also as `issued`.
        """
        found = self.issued(name)
        if found is None:
            self.issue(name, hosts=hosts, for_servers=for_servers)
            return f"{name}.pem"
        new = [host for host in dict.fromkeys(hosts) if host not in found.hosts]
        if not new and found.valid_until > self._now + self._renew_before:
            return None
        self.issue(name, hosts=(*found.hosts, *new), for_servers=for_servers)
        why = f"now also for {', '.join(new)}" if new else "it expired soon"
        return f"{name}.pem (again, {why})"

    def issued(self, name: str) -> Issued | None:
        """Return what `NAME.pem` says; None when it or its key is missing, as after a run that was broken off.

        Raises SecurityConfigurationError: it was signed by another CA, or is not the certificate of the key beside it.
        """
        from cryptography import x509
        from cryptography.exceptions import InvalidSignature

        certificate_file, key_file = self._directory / f"{name}.pem", self._directory / f"{name}-key.pem"
        if not certificate_file.exists() or not key_file.exists():
            return None
        certificate, key = _read(certificate_file, key_file)
        try:
            certificate.verify_directly_issued_by(self._certificate)
        except (InvalidSignature, ValueError, TypeError):
            raise SecurityConfigurationError(
                f"{certificate_file} was not signed by {self._directory / 'ca.pem'}: remove {name}.pem and {name}-key.pem to have "
                "new ones made, or restore ca.pem and ca-key.pem"
            ) from None
        if certificate.public_key() != key.public_key():
            raise SecurityConfigurationError(f"{certificate_file} is not the certificate of {name}-key.pem: remove both files")
        try:
            found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except x509.ExtensionNotFound:
            found = ()
        return Issued(tuple(str(each.value) for each in found), certificate.not_valid_after_utc)

    def _sign(
        self, subject: Any, issuer: Any, public: Any, days: int, *, is_ca: bool, names: Sequence[str], for_servers: bool
    ) -> Any:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.x509.oid import ExtendedKeyUsageOID

        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._now - datetime.timedelta(hours=1))  # clocks of clients may be behind
            .not_valid_after(self._now + datetime.timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=0 if is_ca else None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .add_extension(
                x509.KeyUsage(
                    digital_signature=not is_ca,
                    content_commitment=False,
                    key_encipherment=False,
                    data_encipherment=False,
                    key_agreement=False,
                    key_cert_sign=is_ca,
                    crl_sign=is_ca,
                    encipher_only=False,
                    decipher_only=False,
                ),
                critical=True,
            )
        )
        if not is_ca:
            usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
            if for_servers:  # brokers are clients of each other, too
                usages.insert(0, ExtendedKeyUsageOID.SERVER_AUTH)
            builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName([_general_name(each) for each in names]), critical=False)
        return builder.sign(self._key, hashes.SHA256())


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate that is there: the names and addresses that it is for, and its end."""

    hosts: tuple[str, ...]
    valid_until: datetime.datetime


def write_private(path: Path, data: bytes) -> None:
    """Write a file that its owner alone may read. A file that exists stays: raises FileExistsError."""
    if path.exists() or path.is_symlink():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    replace_private(path, data)


def replace_private(path: Path, data: bytes) -> None:
    """Write a file that its owner alone may read, in the place of an earlier one. It is there whole or not at all."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _name(common_name: str) -> Any:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _general_name(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if _HOST.fullmatch(host) is None:
        raise SecurityConfigurationError(f"{host!r} is neither a host name nor an address, such as broker.example.org or 10.0.0.5")
    return x509.DNSName(host)


def _pem_of(certificate: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return bytes(certificate.public_bytes(Encoding.PEM))


def _pem_of_key(key: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def _read(certificate_file: Path, key_file: Path) -> tuple[Any, Any]:
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        return x509.load_pem_x509_certificate(certificate_file.read_bytes()), load_pem_private_key(key_file.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        message = f"{certificate_file} and {key_file.name} cannot be read: {error}; restore them, or remove both"
        raise SecurityConfigurationError(message) from None
