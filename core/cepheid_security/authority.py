"""A certificate authority of one's own, for clusters that have none: a CA, and certificates that it signs.

Keys are EC keys of the curve P-256. The files are PEM; keys are readable by their owner alone.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cepheid_security.principal import SecurityConfigurationError

_CA_DAYS = 3650
_CERTIFICATE_DAYS = 397  # what current TLS clients accept at most of a server's certificate


class Authority:
    """A CA that is kept in `directory` as ca.pem and ca-key.pem."""

    def __init__(self, directory: Path, now: datetime.datetime) -> None:
        """Makes the CA, or reads the one that is there. Raises SecurityConfigurationError."""
        from cryptography.hazmat.primitives.asymmetric import ec

        self._directory, self._now = directory, now
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
        """Write `NAME.pem` and `NAME-key.pem`. `hosts`: names and addresses under which a server is reached."""
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
        write_private(self._directory / f"{name}-key.pem", _pem_of_key(key))
        (self._directory / f"{name}.pem").write_bytes(_pem_of(certificate))

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


def write_private(path: Path, data: bytes) -> None:
    """Write a file that its owner alone may read. A file that exists stays: raises FileExistsError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def _name(common_name: str) -> Any:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _general_name(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
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
        raise SecurityConfigurationError(f"the CA in {certificate_file.parent} cannot be read: {error}") from None
