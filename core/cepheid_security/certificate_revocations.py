"""Certificates that their CA has revoked: revocation lists (CRLs) in files, checked at each handshake and on open connections.

    file or folder of CRLs ──► signed by a CA that this process trusts? ──► serial numbers by issuer
    handshake ──► OpenSSL checks chain, dates and name ──► RevocationContext looks up the certificate ──► refused, or the connection
    open connection, call of gRPC ──► why_revoked ──► ended

Rules
1. A list stays in force after the date of its next update, with a warning. What it revokes stays revoked, and other certificates
   are accepted. OpenSSL's own check (VERIFY_CRL_CHECK_LEAF) would refuse every certificate of that CA from this date on, and every
   one of a CA without a list: one file not replaced in time would stop a cluster. gRPC for Python has no such check. So all ports
   decide here, by the same rule, and a resumed TLS session is checked as well.
2. Lists of one CA add up. A list counts only if a CA in the CA file signed it: lists are often fetched over plain HTTP.
3. Only a newer list of the same CA can take a revocation back. At a start, a file that cannot be used is an error. Later, the lists
   read from it before stay in force, and so do the lists of a CA whose files were removed or replaced by older ones (with a lower
   CRL number). Each such case is logged once and listed among the problems.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import re
import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from cepheid_security.principal import SecurityConfigurationError

log = logging.getLogger(__name__)

LOOK_S = 10.0
"""Time between two checks for new files, in handshakes and calls."""
FOLLOW_S = 5.0
"""Time between two checks of servers: for new files, in a thread, and for revoked certificates of open connections. Handshakes and
calls then need no check of their own."""
REVOKED = "the certificate was revoked by its CA"
_BEGIN, _END = b"-----BEGIN X509 CRL-----", b"-----END X509 CRL-----"
_PEM = re.compile(_BEGIN + rb".+?" + _END, re.DOTALL)

NameKey = tuple[frozenset[tuple[str, bytes]], ...]
"""The name of a CA, normalized as in OpenSSL's comparison: without the encodings, case and spacing of its strings."""
CertificateId = tuple[NameKey, int]
"""Name of the issuer and serial number."""


@dataclass(frozen=True, slots=True)
class RevocationList:
    """The contents of one list. `next_update` is None if the CA gives no date, `number` is -1 if it does not number its lists.

    `scope`: the CA's name and key, and which of its certificates the list covers; all of them if `is_complete`.
    """

    issuer: str
    next_update: datetime.datetime | None
    serials: frozenset[int]
    path: str
    scope: tuple[NameKey, bytes, bytes]
    number: int
    is_complete: bool


class RevokedCertificates:
    """The lists in a file or in the files of a folder, PEM or DER. They are read again after a change, at the next query."""

    def __init__(self, path: str, ca_file: str) -> None:
        """`ca_file`: the CAs whose lists count. Raises SecurityConfigurationError."""
        self._path, self._ca_file = path, ca_file
        self._seen = self._state()
        """State of the files at the last reading; empty to read them again, because one could not be read."""
        self.lists: tuple[RevocationList, ...] = ()
        self._serials: Mapping[NameKey, frozenset[int]] = {}
        self._unused: list[str] = []
        """Sentences about files and lists that the last reading did not use."""
        self._ignored: set[Path] = set()
        self._unknown: dict[NameKey, str] = {}
        """Sentences about lists of CAs that are not in `ca_file`."""
        self._sharing: list[RevokedCertificates] = [self]
        """All readers of these files, each with a CA file of its own, such as that for clients and that for servers."""
        self._reading = threading.Lock()
        self._read(is_start=True)
        self.version = 0
        """Incremented when the lists have changed."""
        self._looked_at_s = time.monotonic()
        self._warned: set[str] = set()
        self._warn()

    def share(self, others: list[RevokedCertificates]) -> None:
        """Join the other readers of the same files. The CA of a list is unknown only if none of them knows it."""
        self._sharing = others
        others.append(self)

    def __repr__(self) -> str:
        return f"<RevokedCertificates {self._path}: {sum(len(each.serials) for each in self.lists)}>"

    def why_revoked(self, certificate: bytes) -> str | None:
        """Return a sentence if the certificate (PEM or DER) is revoked, else None."""
        self.follow()
        issuer, serial = certificate_id(certificate)
        return REVOKED if serial in self._serials.get(issuer, ()) else None

    def follow(self) -> None:
        """Check for new files, at most once in LOOK_S."""
        now_s = time.monotonic()
        if now_s - self._looked_at_s >= LOOK_S:
            self._looked_at_s = now_s
            self.reload_if_changed()

    async def follow_in_thread(self, every_s: float = FOLLOW_S) -> None:
        """Wait, then read the files again when they have changed. The lists of a large CA take long to parse."""
        await asyncio.sleep(every_s)
        await asyncio.to_thread(self.reload_if_changed)

    def reload_if_changed(self) -> None:
        """Read the files again if they have changed. Thread-safe; does not wait for a reading in another thread."""
        for each in self._sharing:
            if each._reading.acquire(blocking=False):
                try:
                    each._reload_if_changed()
                finally:
                    each._reading.release()

    def _reload_if_changed(self) -> None:
        self._looked_at_s = time.monotonic()
        state = self._state()
        if state != self._seen:
            self._seen, before, lists = state, self._unused, self.lists
            try:
                self._read()
            except SecurityConfigurationError as error:
                self._unused, self._seen = [f"{error}: the earlier lists stay in force"], ()
            except Exception:  # callers look again and again: one file must not end that, whatever it contains
                log.exception("tls.crl_not_reloaded", extra={"hint": "the earlier lists stay in force"})
                self._unused = [f"{self._path} could not be read, the log has the reason: the earlier lists stay in force"]
            if self.lists != lists:
                self.version += 1
                count = sum(len(each.serials) for each in self.lists)
                log.info("tls.crl_reloaded", extra={"path": self._path, "certificates": count})
            for problem in self._unused:
                if problem not in before:
                    log.warning("tls.crl_not_reloaded", extra={"error": problem})
        self._warn()

    def problems(self) -> list[str]:
        """Return sentences for operators about lists that are missing, out of date or not used."""
        return [*self._unused, *self._of_unknown_cas(), *self._not_current()]

    def _of_unknown_cas(self) -> list[str]:
        return [said for issuer, said in self._unknown.items() if all(issuer in each._unknown for each in self._sharing)]

    def _not_current(self) -> list[str]:
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
        found = set(self._not_current())
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

    def _read(self, *, is_start: bool = False) -> None:
        """Raises SecurityConfigurationError: no file can be read; at the start also when one of them cannot be used."""
        authorities = _authorities(self._ca_file)
        try:
            files = self._files()
        except OSError as error:
            raise _unreadable(self._path, error) from None
        lists: list[RevocationList] = []
        unused: list[str] = []
        unknown: dict[NameKey, str] = {}
        for path in files:
            try:
                lists += self._lists_in(path, authorities, unknown)
            except SecurityConfigurationError as error:
                if is_start:
                    raise
                unused.append(f"{error}: its earlier lists stay in force")
                lists += [each for each in self.lists if each.path == str(path)]
        trusted = {_authority_key(each) for each in authorities}
        for scope in dict.fromkeys(each.scope for each in self.lists if each.scope[:2] in trusted):
            before = [each for each in self.lists if each.scope == scope]
            problem = self._why_kept(before, lists)
            if problem is not None:
                unused.append(problem)
                lists = [*(each for each in lists if each.scope != scope), *before]
        serials: dict[NameKey, frozenset[int]] = {}
        for each in lists:
            issuer = each.scope[0]
            serials[issuer] = serials.get(issuer, frozenset()) | each.serials
        self.lists, self._serials, self._unused, self._unknown = tuple(lists), serials, unused, unknown

    def _why_kept(self, before: list[RevocationList], found: list[RevocationList]) -> str | None:
        """Return why these lists of one scope stay in force although the files no longer have them, or None if they do not."""
        scope, name, number = before[0].scope, before[0].issuer, max(each.number for each in before)
        numbers = [each.number for each in found if each.scope == scope]
        if not numbers:
            if any(each.is_complete and each.scope[:2] == scope[:2] and each.number >= number >= 0 for each in found):
                return None
            return (
                f"{self._path} no longer has a revocation list of {name}: the earlier one stays in force; put the CA's list there"
            )
        if max(numbers) >= number:
            return None
        found_number = "no CRL number" if max(numbers) < 0 else f"CRL number {max(numbers)}"
        return (
            f"the revocation list of {name} in {self._path} is older than the one in force ({found_number} after {number}): the "
            "newer one stays in force; get the CA's current list"
        )

    def _lists_in(self, path: Path, authorities: list[Any], unknown: dict[NameKey, str]) -> list[RevocationList]:
        """Return the lists in a file, and add to `unknown` those of unknown CAs. Raises SecurityConfigurationError."""
        try:
            data = path.read_bytes()
        except OSError as error:
            self._seen = ()  # it may be readable next time without a change, such as after a lack of file descriptors
            raise _unreadable(str(path), error) from None
        if path != Path(self._path) and not _has_list(data):
            if path not in self._ignored:
                log.info("tls.crl_file_ignored", extra={"path": str(path), "reason": "it has no revocation list"})
            self._ignored.add(path)
            return []
        lists: list[RevocationList] = []
        for parsed in parse_lists(path, data):
            issuer = _name_key(parsed.issuer)
            known = [each for each in authorities if _name_key(each.subject) == issuer]
            name = parsed.issuer.rfc4514_string()
            if not known:
                log.info("tls.crl_of_another_ca", extra={"path": str(path), "issuer": name, "ca_file": self._ca_file})
                unknown[issuer] = f"{path} has a revocation list of {name}, which is no CA in {self._ca_file}: it revokes nothing"
                continue
            signer = next((each for each in known if _is_signed_with(parsed, each.public_key())), None)
            if signer is None:
                raise SecurityConfigurationError(
                    f"the revocation list of {name} in {path} does not have the signature of that CA in {self._ca_file}",
                    path=str(path),
                )
            lists.append(_list_of(parsed, path, signer))
        return lists


_sharing: dict[str, list[RevokedCertificates]] = {}


@lru_cache(maxsize=64)
def revoked_certificates(path: str, ca_file: str) -> RevokedCertificates:
    """Return the lists of these files, shared by all ports and connections of a process. Raises SecurityConfigurationError."""
    found = RevokedCertificates(path, ca_file)
    found.share(_sharing.setdefault(path, []))
    return found


@lru_cache(maxsize=1024)
def certificate_id(certificate: bytes) -> CertificateId:
    """Return the issuer and serial number by which a revocation list names a certificate (PEM or DER)."""
    from cryptography import x509

    load = x509.load_pem_x509_certificate if certificate.startswith(b"-----") else x509.load_der_x509_certificate
    parsed = load(certificate)
    return _name_key(parsed.issuer), parsed.serial_number


class _CheckedObject(ssl.SSLObject):
    def do_handshake(self) -> None:
        super().do_handshake()
        _check(self)


class _CheckedSocket(ssl.SSLSocket):
    def do_handshake(self, block: bool = False) -> None:
        super().do_handshake(block)
        _check(self)


class RevocationContext(ssl.SSLContext):
    """A context whose handshakes fail if `revoked` lists the peer's certificate."""

    sslobject_class = _CheckedObject
    sslsocket_class = _CheckedSocket
    revoked: RevokedCertificates


def why_revoked(connection: ssl.SSLObject | ssl.SSLSocket | None) -> str | None:
    """Return a sentence if the peer's certificate has been revoked since the handshake. None: it has not, or is not checked."""
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
        if not _has_list(data):
            raise SecurityConfigurationError(f"{path} has no revocation list (-----BEGIN X509 CRL-----)", path=str(path))
        return [x509.load_pem_x509_crl(each) for each in pems] or [x509.load_der_x509_crl(data)]
    except ValueError as error:
        raise SecurityConfigurationError(f"{path} has a revocation list that cannot be read: {error}", path=str(path)) from None


def _has_list(data: bytes) -> bool:
    """Return whether a file has or may have a list. DER begins with the tag of a sequence and a length of more than one byte."""
    return b"-----BEGIN X509" in data or (data[:1] == b"0" and data[1:2] >= b"\x81")


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


def _list_of(parsed: Any, path: Path, authority: Any) -> RevocationList:
    """Decode a list of this CA. Raises SecurityConfigurationError."""
    from cryptography import x509

    try:  # extensions are parsed when they are asked for
        by_oid = {each.oid: each for each in parsed.extensions}
        is_indirect = any(each.oid == x509.IssuingDistributionPoint.oid and each.value.indirect_crl for each in by_oid.values())
        is_indirect = is_indirect or any(
            extension.oid == x509.CertificateIssuer.oid for each in parsed for extension in each.extensions
        )
        serials = frozenset(each.serial_number for each in parsed if not _is_removal(each))
    except (TypeError, ValueError) as error:
        raise SecurityConfigurationError(f"{path} has a revocation list that cannot be read: {error}", path=str(path)) from None
    if is_indirect:
        raise SecurityConfigurationError(
            f"{path} has an indirect revocation list, of certificates of several CAs: get the list of each CA by itself",
            path=str(path),
        )
    number = by_oid.get(x509.CRLNumber.oid)
    points, delta = by_oid.get(x509.IssuingDistributionPoint.oid), by_oid.get(x509.DeltaCRLIndicator.oid)
    part = (b"" if points is None else points.value.public_bytes()) + (b"" if delta is None else b"delta")
    return RevocationList(
        parsed.issuer.rfc4514_string(),
        parsed.next_update_utc,
        serials,
        str(path),
        (*_authority_key(authority), part),
        -1 if number is None else number.value.crl_number,
        not part,
    )


@lru_cache(maxsize=1024)
def _name_key(name: Any) -> NameKey:
    return tuple(frozenset((each.oid.dotted_string, _comparable(each.value)) for each in rdn) for rdn in name.rdns)


def _comparable(value: str | bytes) -> bytes:
    """Normalize a string as OpenSSL does: it ignores the case of ASCII letters, and repeated ASCII spaces."""
    return value if isinstance(value, bytes) else b" ".join(value.encode().lower().split())


def _authority_key(authority: Any) -> tuple[NameKey, bytes]:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    key = authority.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return _name_key(authority.subject), key


def _unreadable(path: str, error: OSError) -> SecurityConfigurationError:
    return SecurityConfigurationError(f"the revocation lists in {path} cannot be read: {error.strerror}", path=path)


def _is_removal(entry: Any) -> bool:
    """Return whether an entry of a delta list takes an earlier revocation back."""
    from cryptography import x509

    try:
        reason = entry.extensions.get_extension_for_class(x509.CRLReason).value.reason
    except x509.ExtensionNotFound:
        return False
    return bool(reason is x509.ReasonFlags.remove_from_crl)
