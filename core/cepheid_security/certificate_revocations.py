"""Certificates that their CA has revoked: revocation lists (CRLs) in files, checked at each handshake and on open connections.

    file or folder of CRLs ──► signed by a CA that this process trusts? ──► serial numbers by issuer
    handshake ──► OpenSSL checks chain, dates and name ──► RevocationContext looks up the certificate ──► refused, or the connection
    open connection, call of gRPC ──► why_revoked ──► ended

Rules
1. A list stays in force after its date of the next update, with a warning. What it revokes stays revoked, and other certificates
   are accepted. OpenSSL's own check (VERIFY_CRL_CHECK_LEAF) would refuse every certificate of that CA from this date on, and of a
   CA without a list: one file that was not replaced in time would stop a cluster. gRPC for Python has no such check at all. So all
   ports decide here, by the same rule, and a resumed TLS session is checked as well.
2. Lists of one CA add up. A list counts only with the signature of a CA in the file of CAs: lists often come by plain HTTP.
3. Files that cannot be used leave the earlier lists in force, and are named in the log once.
"""

from __future__ import annotations

import datetime
import logging
import re
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from cepheid_security.principal import SecurityConfigurationError

log = logging.getLogger(__name__)

LOOK_S = 10.0
"""Time between two looks for new files."""
REVOKED = "the certificate was revoked by its CA"
_BEGIN, _END = b"-----BEGIN X509 CRL-----", b"-----END X509 CRL-----"
_PEM = re.compile(_BEGIN + rb".+?" + _END, re.DOTALL)

CertificateId = tuple[bytes, int]
"""Name of the issuer (DER) and serial number."""


@dataclass(frozen=True, slots=True)
class RevocationList:
    """What one list says. `next_update` is None where the CA names no date."""

    issuer: str
    next_update: datetime.datetime | None
    serials: frozenset[int]


class RevokedCertificates:
    """The lists in a file or in the files of a folder, PEM or DER. It reads them again when they change, as they are asked for."""

    def __init__(self, path: str, ca_file: str) -> None:
        """`ca_file`: the CAs whose lists count. Raises SecurityConfigurationError."""
        self._path, self._ca_file = path, ca_file
        self._seen = self._state()
        self.lists: tuple[RevocationList, ...] = ()
        self._serials: Mapping[bytes, frozenset[int]] = {}
        self._read()
        self.version = 0
        """Another number when the lists have changed."""
        self._looked_at_s = time.monotonic()
        self._warned: set[str] = set()
        self._warn()

    def __repr__(self) -> str:
        return f"<RevokedCertificates {self._path}: {sum(len(each.serials) for each in self.lists)}>"

    def why_revoked(self, certificate: bytes) -> str | None:
        """Return a sentence when the certificate (PEM or DER) is revoked, None when it is not."""
        self.follow()
        issuer, serial = certificate_id(certificate)
        return REVOKED if serial in self._serials.get(issuer, ()) else None

    def follow(self) -> None:
        """Look for new files, at most once in LOOK_S."""
        now_s = time.monotonic()
        if now_s - self._looked_at_s >= LOOK_S:
            self._looked_at_s = now_s
            self.reload_if_changed()

    def reload_if_changed(self) -> None:
        """Read the files again when they have changed."""
        state = self._state()
        if state != self._seen:
            self._seen = state
            try:
                self._read()
            except SecurityConfigurationError as error:
                log.warning("tls.crl_not_reloaded", extra={"error": str(error), "hint": "the earlier lists stay in force"})
            except Exception:  # callers look again and again: one file must not end that, whatever it contains
                log.exception("tls.crl_not_reloaded", extra={"hint": "the earlier lists stay in force"})
            else:
                self.version += 1
                count = sum(len(each.serials) for each in self.lists)
                log.info("tls.crl_reloaded", extra={"path": self._path, "certificates": count})
        self._warn()

    def problems(self) -> list[str]:
        """Return sentences for people about lists that are missing or too old."""
        if not self.lists:
            return [f"{self._path} has no revocation list of a CA in {self._ca_file}: no certificate is revoked"]
        now = datetime.datetime.now(datetime.UTC)
        newest: dict[str, datetime.datetime] = {}
        for each in self.lists:
            if each.next_update is not None:
                newest[each.issuer] = max(each.next_update, newest.get(each.issuer, each.next_update))
        return [
            f"the revocation list of {issuer} in {self._path} was to be replaced by {until:%Y-%m-%d %H:%M} UTC: it stays in force, "
            "and later revocations are not known here; get the CA's current list"
            for issuer, until in newest.items()
            if until < now
        ]

    def _warn(self) -> None:
        found = set(self.problems())
        for problem in sorted(found - self._warned):
            log.warning("tls.crl_not_current", extra={"problem": problem})
        self._warned = found

    def _files(self) -> list[Path]:
        path = Path(self._path)
        if not path.is_dir():
            return [path]
        return sorted(each for each in path.iterdir() if each.is_file() and not each.name.startswith("."))

    def _state(self) -> tuple[tuple[str, int, int], ...]:
        found: list[tuple[str, int, int]] = []
        try:
            for path in (*self._files(), Path(self._ca_file)):
                stat = path.stat()
                found.append((str(path), stat.st_ctime_ns, stat.st_ino))  # ctime: chmod changes it as well
        except OSError:  # reading names the file
            found.append(("", 0, 0))
        return tuple(found)

    def _read(self) -> None:
        """Raises SecurityConfigurationError."""
        authorities = _authorities(self._ca_file)
        lists: list[RevocationList] = []
        serials: dict[bytes, frozenset[int]] = {}
        try:
            read = [(path, path.read_bytes()) for path in self._files()]
        except OSError as error:
            raise SecurityConfigurationError(
                f"the revocation lists in {self._path} cannot be read: {error.strerror}", path=self._path
            ) from None
        for path, data in read:
            for parsed in parse_lists(path, data):
                issuer = parsed.issuer.public_bytes()
                keys = [each.public_key() for each in authorities if each.subject == parsed.issuer]
                name = parsed.issuer.rfc4514_string()
                if not keys:  # of a CA that signs for other ports of this process, or that was replaced
                    log.info("tls.crl_of_another_ca", extra={"path": str(path), "issuer": name, "ca_file": self._ca_file})
                    continue
                if not any(_is_signed_with(parsed, key) for key in keys):
                    raise SecurityConfigurationError(
                        f"the revocation list of {name} in {path} does not have the signature of that CA in {self._ca_file}",
                        path=str(path),
                    )
                listed = _serials_of(parsed, path)
                lists.append(RevocationList(name, parsed.next_update_utc, listed))
                serials[issuer] = serials.get(issuer, frozenset()) | listed
        self.lists, self._serials = tuple(lists), serials


@lru_cache(maxsize=64)
def revoked_certificates(path: str, ca_file: str) -> RevokedCertificates:
    """Return the lists of these files, which all ports and connections of a process share. Raises SecurityConfigurationError."""
    return RevokedCertificates(path, ca_file)


@lru_cache(maxsize=1024)
def certificate_id(certificate: bytes) -> CertificateId:
    """Return what a revocation list names a certificate (PEM or DER) by."""
    from cryptography import x509

    load = x509.load_pem_x509_certificate if certificate.startswith(b"-----") else x509.load_der_x509_certificate
    parsed = load(certificate)
    return parsed.issuer.public_bytes(), parsed.serial_number


class _CheckedObject(ssl.SSLObject):
    def do_handshake(self) -> None:
        super().do_handshake()
        _check(self)


class _CheckedSocket(ssl.SSLSocket):
    def do_handshake(self, block: bool = False) -> None:
        super().do_handshake(block)
        _check(self)


class RevocationContext(ssl.SSLContext):
    """A context whose handshakes fail when `revoked` has the peer's certificate."""

    sslobject_class = _CheckedObject
    sslsocket_class = _CheckedSocket
    revoked: RevokedCertificates


def why_revoked(connection: ssl.SSLObject | ssl.SSLSocket | None) -> str | None:
    """Return a sentence when the certificate of the peer is revoked now, after the handshake; None: it is not, or not checked."""
    context = None if connection is None else connection.context
    if not isinstance(context, RevocationContext):
        return None
    assert connection is not None
    certificate = connection.getpeercert(True)
    return None if certificate is None else context.revoked.why_revoked(certificate)


def _check(connection: ssl.SSLObject | ssl.SSLSocket) -> None:
    """Raises SSLCertVerificationError."""
    if (reason := why_revoked(connection)) is not None:
        error = ssl.SSLCertVerificationError(1, f"[SSL: CERTIFICATE_REVOKED] certificate verify failed: {reason}")
        error.reason, error.verify_message = "CERTIFICATE_REVOKED", reason
        raise error


def parse_lists(path: Path, data: bytes) -> list[Any]:
    """Return the lists in a file, as `cryptography` has them. Raises SecurityConfigurationError."""
    try:
        from cryptography import x509
    except ImportError:
        raise SecurityConfigurationError(
            "revocation lists need the package cryptography: pip install 'cepheid[encryption]'"
        ) from None
    try:
        pems = _PEM.findall(data)
        last_line = data.rstrip().rpartition(b"\n")[2]
        cut_off = last_line.startswith(b"-----B") and _BEGIN.startswith(last_line)
        if cut_off or not data.count(_BEGIN) == data.count(_END) == len(pems):
            raise SecurityConfigurationError(f"{path} has a revocation list that is cut off: copy the file again", path=str(path))
        if not pems and not data.startswith(b"0"):  # DER begins with the tag of a sequence
            raise SecurityConfigurationError(f"{path} has no revocation list (-----BEGIN X509 CRL-----)", path=str(path))
        return [x509.load_pem_x509_crl(each) for each in pems] or [x509.load_der_x509_crl(data)]
    except ValueError as error:
        raise SecurityConfigurationError(f"{path} has a revocation list that cannot be read: {error}", path=str(path)) from None


def _authorities(ca_file: str) -> list[Any]:
    """Raises SecurityConfigurationError."""
    try:
        from cryptography import x509
    except ImportError:
        return []  # parsing a list names the package
    try:
        return list(x509.load_pem_x509_certificates(Path(ca_file).read_bytes()))
    except (OSError, ValueError) as error:
        raise SecurityConfigurationError(f"the CA file {ca_file} cannot be used: {error}", path=ca_file) from None


def _is_signed_with(parsed: Any, key: Any) -> bool:
    try:
        return bool(parsed.is_signature_valid(key))
    except (TypeError, ValueError):  # a key of another kind
        return False


def _serials_of(parsed: Any, path: Path) -> frozenset[int]:
    """Return the serial numbers that a list revokes. Raises SecurityConfigurationError."""
    try:
        return frozenset(each.serial_number for each in parsed if not _is_removal(each))
    except (TypeError, ValueError) as error:  # extensions of entries are parsed when they are asked for
        raise SecurityConfigurationError(f"{path} has a revocation list that cannot be read: {error}", path=str(path)) from None


def _is_removal(entry: Any) -> bool:
    """Return whether an entry of a delta list takes an earlier revocation back."""
    from cryptography import x509

    try:
        reason = entry.extensions.get_extension_for_class(x509.CRLReason).value.reason
    except x509.ExtensionNotFound:
        return False
    return bool(reason is x509.ReasonFlags.remove_from_crl)
