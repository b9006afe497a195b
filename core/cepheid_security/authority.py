"""A certificate authority of one's own, for clusters that have none: a CA, and certificates that it signs.

Keys are EC keys of the curve P-256. The files are PEM; keys are readable by their owner alone.

The CA is replaced in three stages. After each, every process and client reads its files again before the next one begins, so that
no process shows a certificate that another one does not trust yet:

    stage     ca.pem        ca-key.pem     ca-next-key.pem    certificates
    (none)    old           old                               signed by the old CA
    trust     old, new      old            new                signed by the old CA
    sign      new, old      new                               signed by the new CA
    finish    new           new                               signed by the new CA

crl.pem has a list of revoked certificates (CRL) of each CA in ca.pem; that of the old CA is signed for the last time before `sign`.
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
ROTATION_STAGES = ("trust", "sign", "finish")
"""Stages of a replacement of the CA, in this order."""
_BACKDATED = datetime.timedelta(hours=1)
"""Time by which certificates begin before they are made: clocks of clients may be late."""
_NEXT_KEY = "ca-next-key.pem"
REVOCATION_FILE = "crl.pem"
_SERIAL = re.compile(
    r"(?:serial=|0x)([0-9A-Fa-f]{1,40})|((?:serial=|0x)?[0-9A-Fa-f]{2}(?::[0-9A-Fa-f]{2}){1,19})|([0-9A-Fa-f]{16,40})"
)
"""A serial number as `openssl x509 -serial` and `-text` print it, in hex. Few digits alone may be a misspelt name: `fade`."""
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252})")


class Authority:
    """A CA that is kept in `directory` as ca.pem and ca-key.pem. While it is being replaced, ca.pem has the old and the new one."""

    def __init__(self, directory: Path, now: datetime.datetime, renew_before: datetime.timedelta = RENEW_BEFORE) -> None:
        """Make the CA, or read the one that is there. Raises SecurityConfigurationError."""
        self._directory, self._now, self._renew_before = directory, now, renew_before
        certificate_file, key_file = directory / "ca.pem", directory / "ca-key.pem"
        if certificate_file.exists() != key_file.exists():
            raise SecurityConfigurationError(f"{directory} has only one of ca.pem and ca-key.pem: restore the other, or remove it")
        self._trusted: list[Any] = []
        """The certificates in ca.pem: that of this CA, and that of the CA before or after it."""
        if certificate_file.exists():
            self._trusted, self._key = _read_certificates(certificate_file), _read_key(key_file)
            self._certificate = _of_key(self._trusted, self._key)
            if self._certificate is None:
                raise SecurityConfigurationError(f"{key_file} is the key of no certificate in {certificate_file}: restore them")
            return
        self._certificate, self._key = self._new_authority("Cepheid CA")
        write_private(key_file, _pem_of_key(self._key))
        self._write_trusted(self._certificate)

    @property
    def rotation_stage(self) -> str:
        """The stage of the replacement of this CA, "" when it is not being replaced."""
        if self._next_authority() is not None:
            return "trust"
        return "sign" if len(self._trusted) > 1 else ""

    def rotation_stage_began(self) -> datetime.datetime:
        """Return when `rotation_stage` was reached, as the certificates that it made say. `rotation_stage` must not be empty."""
        if (found := self._next_authority()) is not None:
            made: list[Any] = [found[0]]
        else:
            made = [certificate for _, certificate in self._own_certificates()] or [self._certificate]
        began: datetime.datetime = min(each.not_valid_before_utc for each in made)
        return began + _BACKDATED

    def rotate(self, stage: str) -> str | None:
        """Take one of ROTATION_STAGES and return what was changed, None if the stage was taken before.

        A server's certificate keeps its hosts. Raises SecurityConfigurationError: another stage comes first.
        """
        match self.rotation_stage, stage:
            case "", "trust":
                certificate, key = self._new_authority(f"Cepheid CA {self._now:%Y-%m-%d}")
                replace_private(self._directory / _NEXT_KEY, _pem_of_key(key))
                self._write_trusted(self._certificate, certificate)
                self._write_revocation_lists()
                return "ca.pem has the old CA and a new one, which signs nothing yet"
            case "trust", "sign":
                return f"signed by the new CA: {', '.join(self._sign_with_next())}"
            case "sign", "finish":
                old = [name for name, certificate in self._own_certificates() if not _is_signed_by(certificate, self._certificate)]
                if old:  # of a run that was broken off, or put here since
                    raise SecurityConfigurationError(f"{', '.join(old)} was signed by the old CA: run `cepheid secure init` first")
                self._write_trusted(self._certificate)
                self._write_revocation_lists()
                return "ca.pem has the new CA alone"
            case "", "sign":
                raise SecurityConfigurationError("there is no new CA yet: stage trust comes first")
            case "trust", "finish":
                raise SecurityConfigurationError("the new CA signs nothing yet: stage sign comes first")
            case "sign", "trust":
                raise SecurityConfigurationError(
                    "the CA is being replaced already, and the new one signs: stage finish comes first"
                )
        return None

    def revoked(self) -> dict[int, datetime.datetime]:
        """Return the serial numbers of what is revoked in crl.pem, with the times. Raises SecurityConfigurationError."""
        return {entry.serial_number: entry.revocation_date_utc for parsed in self._revocation_lists() for entry in parsed}

    def revoke(self, what: str) -> tuple[int, bool]:
        """Revoke `NAME.pem`, or a certificate by its serial number in hex. Return the number, and whether that is new.

        Raises SecurityConfigurationError: there is neither, or another CA signed it. Which numbers a CA has used is known of the
        certificates in the directory alone.
        """
        path = self._directory / f"{what}.pem"
        if what not in ("ca", "ca-next", "crl") and path.parent == self._directory and path.is_file():
            serial = self._own_serial(path, _read_certificates(path)[0])
        else:
            found = _SERIAL.fullmatch(what)
            if found is None:
                raise SecurityConfigurationError(
                    f"{what!r} is neither a certificate in {self._directory} nor a serial number in hex, such as 0x5A01FF"
                )
            serial = int(re.sub("^serial=|^0x|:", "", what), 16)
            if any(each.serial_number == serial for each in self._trusted):
                raise SecurityConfigurationError(f"{what} is the number of a CA: replace it by `cepheid secure rotate-ca`")
            for name, certificate in self._own_certificates():
                if certificate.serial_number == serial:
                    self._own_serial(self._directory / f"{name}.pem", certificate)
        if serial in self.revoked():
            return serial, False
        self._write_revocation_lists(serial)
        return serial, True

    def _own_serial(self, path: Path, certificate: Any) -> int:
        """Raises SecurityConfigurationError: this CA did not sign it."""
        if not _is_signed_by(certificate, self._certificate):
            raise SecurityConfigurationError(
                f"{path} was not signed by the CA of {self._directory / 'ca-key.pem'}: a CA revokes its own certificates alone"
            )
        serial: int = certificate.serial_number
        return serial

    def ensure_revocation_list(self) -> str | None:
        """Write crl.pem when a CA in ca.pem has no list there, or the next update is due soon. Return what was done, or None.

        Raises SecurityConfigurationError.
        """
        lists = self._revocation_lists()
        own = [each for each in lists if _is_list_of(each, self._certificate)]
        if own and max(each.next_update_utc for each in own) > self._now + self._renew_before:
            return None
        self._write_revocation_lists()
        return f"{REVOCATION_FILE} (again, its next update was due soon)" if own else REVOCATION_FILE

    def _revocation_lists(self) -> list[Any]:
        from cepheid_security.certificate_revocations import parse_lists

        path = self._directory / REVOCATION_FILE
        return parse_lists(path, path.read_bytes()) if path.exists() else []

    def _write_revocation_lists(self, *serials: int) -> None:
        """Write the lists of all CAs in ca.pem, and add `serials` to that of this CA. A CA without a key keeps the list it has."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.serialization import Encoding

        before = self._revocation_lists()
        # Processes refuse a lower number than that of the list in force. The clock may have been set back.
        last_number = max(map(_number_of, before), default=0)
        signing = [(self._certificate, self._key)]
        if (following := self._next_authority()) is not None:
            signing.append(following)
        written = []
        for certificate, key in signing:
            entries = {entry.serial_number: entry for each in before if _is_list_of(each, certificate) for entry in each}
            for serial in serials if certificate is self._certificate else ():
                entries[serial] = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(self._now).build()
            builder = (
                x509.CertificateRevocationListBuilder()
                .issuer_name(certificate.subject)
                .last_update(self._now - _BACKDATED)
                .next_update(self._now + datetime.timedelta(days=_CERTIFICATE_DAYS))
                .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
                .add_extension(x509.CRLNumber(max(int(self._now.timestamp() * 1000), last_number + 1)), critical=False)
            )
            for entry in entries.values():
                builder = builder.add_revoked_certificate(entry)
            written.append(builder.sign(key, hashes.SHA256()))
        signers = [certificate for certificate, _ in signing]
        others = [each for each in self._trusted if each not in signers]
        written += [each for each in before if any(_is_list_of(each, other) for other in others)]
        path = self._directory / REVOCATION_FILE
        _replace(path, b"".join(each.public_bytes(Encoding.PEM) for each in written), 0o644)

    def _sign_with_next(self) -> list[str]:
        """Make the next CA the one that signs, and issue all certificates again. Returns their names."""
        found = self._next_authority()
        assert found is not None
        self._certificate, self._key = found
        self._write_trusted(self._certificate, *(each for each in self._trusted if each != self._certificate))
        replace_private(self._directory / "ca-key.pem", _pem_of_key(self._key))
        (self._directory / _NEXT_KEY).unlink()
        self._write_revocation_lists()
        names = []
        for name, certificate in self._own_certificates():
            self.issue(name, hosts=_hosts_of(certificate), for_servers=_is_for_servers(certificate))
            names.append(f"{name}.pem")
        return names

    def _next_authority(self) -> tuple[Any, Any] | None:
        """Return certificate and key of the CA that is trusted and does not sign yet."""
        path = self._directory / _NEXT_KEY
        if not path.exists():
            return None
        key = _read_key(path)
        certificate = _of_key(self._trusted, key)
        return None if certificate is None else (certificate, key)  # none: of a run that was broken off

    def _own_certificates(self) -> list[tuple[str, Any]]:
        """Return the certificates in the directory whose keys are there, by name."""
        names = [path.name.removesuffix("-key.pem") for path in sorted(self._directory.glob("*-key.pem"))]
        files = [(name, self._directory / f"{name}.pem") for name in names if name not in ("ca", "ca-next")]
        return [(name, _read_certificates(path)[0]) for name, path in files if path.exists()]

    def _new_authority(self, name: str) -> tuple[Any, Any]:
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        subject = _name(name)
        certificate = self._sign(
            subject, subject, key.public_key(), _CA_DAYS, is_ca=True, names=(), for_servers=False, signing_key=key
        )
        return certificate, key

    def _write_trusted(self, *certificates: Any) -> None:
        path = self._directory / "ca.pem"
        _replace(path, b"".join(map(_pem_of, certificates)), 0o644)
        self._trusted = list(certificates)

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
        _replace(self._directory / f"{name}.pem", _pem_of(certificate), 0o644)

    def ensure(self, name: str, *, hosts: Sequence[str] = (), for_servers: bool) -> str | None:
        """Issue `NAME.pem` when it is missing, expires soon, or lacks one of `hosts`. Return what was done, or None.

        Hosts that it has stay: clients use them. Raises SecurityConfigurationError, also as `issued`.
        """
        found = self.issued(name)
        if found is None:
            self.issue(name, hosts=hosts, for_servers=for_servers)
            return f"{name}.pem"
        new = [host for host in dict.fromkeys(hosts) if host not in found.hosts]
        if not new and not found.is_of_old_ca and not found.is_revoked and found.valid_until > self._now + self._renew_before:
            return None
        self.issue(name, hosts=(*found.hosts, *new), for_servers=for_servers)
        why = f"now also for {', '.join(new)}" if new else "the old CA signed it" if found.is_of_old_ca else "it expired soon"
        why = "it was revoked" if found.is_revoked else why
        return f"{name}.pem (again, {why})"

    def issued(self, name: str) -> Issued | None:
        """Return what `NAME.pem` says; None when it or its key is missing, as after a run that was broken off.

        Raises SecurityConfigurationError: it was signed by another CA, or is not the certificate of the key beside it.
        """
        certificate_file, key_file = self._directory / f"{name}.pem", self._directory / f"{name}-key.pem"
        if not certificate_file.exists() or not key_file.exists():
            return None
        certificate, key = _read_certificates(certificate_file)[0], _read_key(key_file)
        if not any(_is_signed_by(certificate, each) for each in self._trusted):
            raise SecurityConfigurationError(
                f"{certificate_file} was not signed by {self._directory / 'ca.pem'}: remove {name}.pem and {name}-key.pem to have "
                "new ones made, or restore ca.pem and ca-key.pem"
            )
        if certificate.public_key() != key.public_key():
            raise SecurityConfigurationError(f"{certificate_file} is not the certificate of {name}-key.pem: remove both files")
        is_of_old_ca = not _is_signed_by(certificate, self._certificate) and self.rotation_stage == "sign"
        is_revoked = certificate.serial_number in self.revoked()
        return Issued(_hosts_of(certificate), certificate.not_valid_after_utc, is_of_old_ca, is_revoked)

    def _sign(
        self,
        subject: Any,
        issuer: Any,
        public: Any,
        days: int,
        *,
        is_ca: bool,
        names: Sequence[str],
        for_servers: bool,
        signing_key: Any = None,
    ) -> Any:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.x509.oid import ExtendedKeyUsageOID

        signing_key = signing_key or self._key
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._now - _BACKDATED)
            .not_valid_after(self._now + datetime.timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=0 if is_ca else None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing_key.public_key()), critical=False)
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
        return builder.sign(signing_key, hashes.SHA256())


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate that is there: the names and addresses that it is for, its end, and whether a CA that is replaced signed it or
    it was revoked."""

    hosts: tuple[str, ...]
    valid_until: datetime.datetime
    is_of_old_ca: bool = False
    is_revoked: bool = False


def write_private(path: Path, data: bytes) -> None:
    """Write a file that its owner alone may read. A file that exists stays: raises FileExistsError."""
    if path.exists() or path.is_symlink():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    replace_private(path, data)


def replace_private(path: Path, data: bytes) -> None:
    """Write a file that its owner alone may read, in the place of an earlier one. It is there whole or not at all."""
    _replace(path, data, 0o600)


def _replace(path: Path, data: bytes, mode: int) -> None:
    """Write a file in the place of an earlier one. Its readers never see it without its mode."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), mode)
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


def _hosts_of(certificate: Any) -> tuple[str, ...]:
    from cryptography import x509

    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return tuple(str(each.value) for each in found)


def _is_for_servers(certificate: Any) -> bool:
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    try:
        return ExtendedKeyUsageOID.SERVER_AUTH in certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return False


def _is_signed_by(certificate: Any, authority: Any) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def _is_list_of(revocations: Any, authority: Any) -> bool:
    """Return whether a revocation list is one of this CA."""
    return revocations.issuer == authority.subject and bool(revocations.is_signature_valid(authority.public_key()))


def _number_of(revocations: Any) -> int:
    """Return the CRL number of a list, 0 when it has none."""
    from cryptography import x509

    try:
        number: int = revocations.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
    except (x509.ExtensionNotFound, ValueError):
        return 0
    return number


def _of_key(certificates: Sequence[Any], key: Any) -> Any:
    """Return the certificate of this key, None if there is none."""
    return next((each for each in certificates if each.public_key() == key.public_key()), None)


def _read_certificates(path: Path) -> list[Any]:
    from cryptography import x509

    try:
        return list(x509.load_pem_x509_certificates(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise _unreadable(path, error) from None


def _read_key(path: Path) -> Any:
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        return load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> SecurityConfigurationError:
    return SecurityConfigurationError(
        f"{path} cannot be read: {error}; restore it, or remove it together with its key or certificate"
    )
