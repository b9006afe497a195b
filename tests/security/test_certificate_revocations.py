"""Revocation lists: which ones count, what they do to a handshake on either side, and how they are exchanged."""

from __future__ import annotations

import datetime
import errno
import logging
import os
import re
import socket
import ssl
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Literal

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.name import _ASN1Type

from cepheid_bookie.access import OPEN_ACCESS
from cepheid_bookie.secured_ports import secured_ports
from cepheid_broker.standalone import StandaloneSettings
from cepheid_security import ClientTls, SecurityConfigurationError, ServerTls, client_context
from cepheid_security.authority import Authority
from cepheid_security.certificate_revocations import RevokedCertificates, parse_lists
from cepheid_security.settings import TlsSettings
from tests.security.test_passwords_and_tls import handshake

NOW = datetime.datetime.now(datetime.UTC)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A CA with a list that revokes `leaver` and the server's certificate `stolen`."""
    authority = Authority(tmp_path, NOW)
    for name in ("server", "stolen"):
        authority.issue(name, hosts=("localhost",), for_servers=True)
    for name in ("client", "leaver"):
        authority.issue(name, for_servers=False)
    authority.ensure_revocation_list()
    for name in ("leaver", "stolen"):
        authority.revoke(name)
    return tmp_path


def lists(directory: Path, path: Path | None = None) -> RevokedCertificates:
    return RevokedCertificates(str(path or directory / "crl.pem"), str(directory / "ca.pem"))


def is_revoked(revoked: RevokedCertificates, directory: Path, name: str) -> bool:
    return revoked.why_revoked((directory / f"{name}.pem").read_bytes()) is not None


def server_context(directory: Path, name: str = "server") -> ssl.SSLContext:
    files = (str(directory / f"{name}.pem"), str(directory / f"{name}-key.pem"))
    crl = str(directory / "crl.pem")
    return ServerTls(*files, client_ca_file=str(directory / "ca.pem"), client_certificates="optional", crl=crl).context


def client_tls(directory: Path, name: str) -> ClientTls:
    return ClientTls(*(str(directory / each) for each in ("ca.pem", f"{name}.pem", f"{name}-key.pem", "crl.pem")))


async def test_a_server_refuses_a_revoked_client(directory: Path) -> None:
    assert await handshake(server_context(directory), client_tls(directory, "client").context()) == ("client",)
    leaver = client_tls(directory, "leaver")
    with pytest.raises(ssl.SSLCertVerificationError, match="the certificate was revoked by its CA"):
        shake_hands(server_context(directory), leaver.context())


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """Do a handshake in memory. A server with TLS 1.3 decides about a client that has finished its part."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(to_client, to_server, server_hostname="localhost"),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    while sides:
        try:
            sides[0].do_handshake()
            sides.pop(0)
        except ssl.SSLWantReadError:
            sides.reverse()


async def test_a_client_refuses_a_revoked_server(directory: Path) -> None:
    context = client_tls(directory, "client").context()
    with pytest.raises(ssl.SSLCertVerificationError, match="the certificate was revoked by its CA"):
        await handshake(server_context(directory, "stolen"), context)
    unaware = client_context(ca_file=str(directory / "ca.pem"))
    assert await handshake(server_context(directory, "stolen"), unaware) == ()


def test_a_blocking_client_refuses_a_revoked_server(directory: Path) -> None:
    listener = socket.create_server(("localhost", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        try:
            server_context(directory, "stolen").wrap_socket(connection, server_side=True).close()
        except OSError:
            connection.close()

    thread = threading.Thread(target=serve)
    thread.start()
    url = f"https://localhost:{listener.getsockname()[1]}/"
    with pytest.raises(urllib.error.URLError, match="the certificate was revoked by its CA"):
        urllib.request.urlopen(url, context=client_tls(directory, "client").context(), timeout=10)
    thread.join()
    listener.close()


def test_lists_of_a_folder_add_up_and_may_be_binary(directory: Path) -> None:
    folder = directory / "crls"
    folder.mkdir()
    (folder / "first.pem").write_bytes((directory / "crl.pem").read_bytes())
    second = directory / "second"
    second.mkdir()
    for name in ("ca.pem", "ca-key.pem", "client.pem", "client-key.pem"):
        (second / name).write_bytes((directory / name).read_bytes())
    Authority(second, NOW).revoke("client")
    parsed = x509.load_pem_x509_crl((second / "crl.pem").read_bytes())
    (folder / "second.crl").write_bytes(parsed.public_bytes(Encoding.DER))
    revoked = lists(directory, folder)
    assert [is_revoked(revoked, directory, name) for name in ("client", "leaver", "server")] == [True, True, False]


def test_a_list_past_its_next_update_stays_in_force_with_a_warning(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("leaver", "crl"):
        (directory / f"{name}.pem").rename(directory / f"{name}.old")
    (directory / "leaver.old").rename(directory / "leaver.pem")
    Authority(directory, NOW - datetime.timedelta(days=500)).revoke("leaver")
    revoked = lists(directory)
    assert [is_revoked(revoked, directory, name) for name in ("leaver", "client")] == [True, False]
    (problem,) = revoked.problems()
    assert "was to be replaced by" in problem
    assert [record.__dict__["problem"] for record in caplog.records if record.message == "tls.crl_not_current"] == [problem]
    Authority(directory, NOW).ensure_revocation_list()
    revoked.reload_if_changed()
    assert revoked.problems() == []
    assert is_revoked(revoked, directory, "leaver"), "a new list keeps what the old one has"


def test_a_list_of_another_ca_revokes_nothing(directory: Path) -> None:
    other = directory / "other"
    other.mkdir()
    stranger = Authority(other, NOW)
    stranger.revoke("0x1F")
    with pytest.raises(SecurityConfigurationError, match="does not have the signature of that CA"):
        lists(directory, other / "crl.pem")  # the name of the CA is the same
    renamed = directory / "renamed"
    renamed.mkdir()
    Authority(renamed, NOW).rotate("trust")
    Authority(renamed, NOW).rotate("sign")
    Authority(renamed, NOW).rotate("finish")
    revoked = lists(directory, renamed / "crl.pem")
    assert not is_revoked(revoked, directory, "leaver")
    unknown, nothing = revoked.problems()
    assert "has no revocation list of a CA in" in nothing
    assert re.search(r"has a revocation list of CN=.*, which is no CA in", unknown)
    other_cas = RevokedCertificates(str(renamed / "crl.pem"), str(renamed / "ca.pem"))
    for each in (shared := [revoked, other_cas]):
        each._sharing = shared
    assert revoked.problems() == [nothing], "another port of this process has this CA"


def test_a_file_that_cannot_be_used_leaves_the_earlier_list_in_force(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    revoked, good = lists(directory), (directory / "crl.pem").read_bytes()
    for bad in (b"", good[:200] + b"\n-----END X509 CRL-----\n", None):
        if bad is None:
            (directory / "crl.pem").unlink()
        else:
            (directory / "new").write_bytes(bad)
            os.replace(directory / "new", directory / "crl.pem")
        caplog.clear()
        for _ in range(2):
            revoked.reload_if_changed()
        assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == ["tls.crl_not_reloaded"]
        assert is_revoked(revoked, directory, "leaver")
    for missing in ("none", "leaver.pem"):
        with pytest.raises(SecurityConfigurationError, match=r"cannot be read|has no revocation list"):
            lists(directory, directory / missing)


def signed_list(
    directory: Path,
    *entries: tuple[int, x509.ExtensionType | None],
    number: int | None = None,
    issuer: x509.Name | None = None,
    extension: x509.ExtensionType | None = None,
) -> bytes:
    """Return a list in PEM that the CA in `directory` signed, of serial numbers with an extension each."""
    ca = x509.load_pem_x509_certificate((directory / "ca.pem").read_bytes())
    key = load_pem_private_key((directory / "ca-key.pem").read_bytes(), None)
    builder = x509.CertificateRevocationListBuilder().issuer_name(issuer or ca.subject).last_update(NOW)
    builder = builder.next_update(NOW + datetime.timedelta(days=9))
    if number is not None:
        builder = builder.add_extension(x509.CRLNumber(number), critical=False)
    if extension is not None:
        builder = builder.add_extension(extension, critical=True)
    for serial, of_entry in entries:
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(NOW)
        if of_entry is not None:
            entry = entry.add_extension(of_entry, critical=False)
        builder = builder.add_revoked_certificate(entry.build())
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)


UNKNOWN_REASON = x509.UnrecognizedExtension(x509.ObjectIdentifier("2.5.29.21"), b"\x0a\x01\x07")


def test_a_list_with_an_unknown_reason_is_unusable(directory: Path) -> None:
    revoked = lists(directory)
    (directory / "crl.pem").write_bytes(signed_list(directory, (5, UNKNOWN_REASON)))
    revoked.reload_if_changed()
    assert is_revoked(revoked, directory, "leaver")
    with pytest.raises(SecurityConfigurationError, match=r"crl.pem has a revocation list that cannot be read"):
        lists(directory)


def test_a_list_that_is_cut_off_makes_its_file_unusable(directory: Path) -> None:
    data = (directory / "crl.pem").read_bytes()
    for cut in (data[:-10], data[: len(data) // 2], data[:20]):
        (directory / "two.pem").write_bytes(data + cut)
        with pytest.raises(SecurityConfigurationError, match=r"two\.pem has a revocation list that is cut off"):
            lists(directory, directory / "two.pem")


def test_a_file_that_becomes_readable_is_read(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    revoked = lists(directory)
    Authority(directory, NOW).revoke("client")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", refuse_reading)
        revoked.reload_if_changed()
    (directory / "crl.pem").chmod(0o640)
    revoked.reload_if_changed()
    assert is_revoked(revoked, directory, "client")


def test_a_file_is_read_again_after_a_passing_failure(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    revoked = lists(directory)
    Authority(directory, NOW).revoke("client")
    read_bytes = Path.read_bytes
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda path: refuse_reading(path) if path.name == "crl.pem" else read_bytes(path))
        revoked.reload_if_changed()
        assert "cannot be read: Permission denied" in " ".join(revoked.problems())
    revoked.reload_if_changed()
    assert (is_revoked(revoked, directory, "client"), revoked.problems()) == (True, [])


def refuse_reading(path: Path) -> bytes:
    raise PermissionError(errno.EACCES, "Permission denied", str(path))


def test_a_new_list_is_readable_before_it_replaces_the_old_one(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[int] = []
    replace = os.replace

    def note(source: Path, target: Path) -> None:
        modes.append(source.stat().st_mode & 0o777)
        replace(source, target)

    monkeypatch.setattr(os, "replace", note)
    Authority(directory, NOW).revoke("client")
    assert modes == [0o644]


def test_lists_that_are_removed_stay_in_force(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = directory / "crls"
    folder.mkdir()
    (folder / "crl.pem").write_bytes((directory / "crl.pem").read_bytes())
    revoked = lists(directory, folder)
    (folder / "crl.pem").unlink()
    for _ in range(2):
        revoked.reload_if_changed()
    assert is_revoked(revoked, directory, "leaver")
    (problem,) = revoked.problems()
    assert problem.endswith("the earlier one stays in force; put the CA's list there")
    assert [record.__dict__["error"] for record in caplog.records if record.message == "tls.crl_not_reloaded"] == [problem]
    Authority(directory, NOW).revoke("client")
    (folder / "other-name.pem").write_bytes((directory / "crl.pem").read_bytes())
    revoked.reload_if_changed()
    assert (revoked.problems(), is_revoked(revoked, directory, "client")) == ([], True)


def test_an_older_list_does_not_replace_a_newer_one(directory: Path) -> None:
    for before, after, kept in ((9, 3, True), (9, None, True), (9, 9, False), (9, 10, False), (None, 1, False)):
        (directory / "crl.pem").write_bytes(signed_list(directory, (5, None), number=before))
        revoked = lists(directory)
        (directory / "crl.pem").write_bytes(signed_list(directory, number=after))
        revoked.reload_if_changed()
        assert any(5 in each.serials for each in revoked.lists) is kept, (before, after)
        assert ["is older than the one in force" in problem for problem in revoked.problems()] == [True] * kept


def test_the_lists_of_the_own_ca_have_rising_numbers(directory: Path) -> None:
    """The clock may have been set back."""
    revoked = lists(directory)
    Authority(directory, NOW - datetime.timedelta(days=1)).revoke("client")
    revoked.reload_if_changed()
    assert is_revoked(revoked, directory, "client")


def test_one_bad_file_of_a_folder_does_not_hold_up_the_others(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = directory / "crls"
    folder.mkdir()
    (folder / "README").write_text("Lists of revoked certificates\n")
    (folder / "first.pem").write_bytes(signed_list(directory, (5, None)))
    (folder / "second.pem").write_bytes(signed_list(directory, (6, None)))
    caplog.set_level(logging.INFO)
    revoked = lists(directory, folder)
    assert [record.__dict__["path"] for record in caplog.records if record.message == "tls.crl_file_ignored"] == [
        str(folder / "README")
    ]
    assert revoked.problems() == []
    (folder / "first.pem").write_bytes(signed_list(directory, (5, None))[:-9])
    (folder / "second.pem").write_bytes((directory / "crl.pem").read_bytes())
    revoked.reload_if_changed()
    assert is_revoked(revoked, directory, "leaver")
    assert any(5 in each.serials for each in revoked.lists)
    (problem,) = revoked.problems()
    assert problem.startswith(f"{folder / 'first.pem'} has a revocation list that is cut off")


def test_names_of_a_ca_are_compared_by_value(directory: Path) -> None:
    """A CA may write its name with other string types, case or spacing in its certificates than in its lists."""
    encoded = _ASN1Type.PrintableString
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "cepheid  ca", encoded)])
    number = x509.load_pem_x509_certificate((directory / "client.pem").read_bytes()).serial_number
    (directory / "crl.pem").write_bytes(signed_list(directory, (number, None), issuer=name))
    revoked = lists(directory)
    assert (is_revoked(revoked, directory, "client"), revoked.problems()) == (True, [])


def test_indirect_lists_are_unusable(directory: Path) -> None:
    other = x509.CertificateIssuer([x509.DirectoryName(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "B")]))])
    indirect = x509.IssuingDistributionPoint(None, None, False, False, None, True, False)
    for data in (signed_list(directory, (7, other)), signed_list(directory, (7, None), extension=indirect)):
        (directory / "crl.pem").write_bytes(data)
        with pytest.raises(SecurityConfigurationError, match="has an indirect revocation list"):
            lists(directory)


async def test_servers_read_lists_in_a_thread(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def note(path: Path, data: bytes) -> list[object]:
        threads.append(threading.current_thread())
        return parse_lists(path, data)

    revoked = lists(directory)
    Authority(directory, NOW).revoke("client")
    monkeypatch.setattr("cepheid_security.certificate_revocations.parse_lists", note)
    await revoked.follow_in_thread(0)
    assert is_revoked(revoked, directory, "client")
    assert len(threads) == 1
    assert threading.main_thread() not in threads


def test_an_unforeseen_failure_leaves_the_lists_in_force(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who look for new lists do not end by it: the follower of a broker, the timers of a bookie's streams."""

    def fail(_path: Path, _data: bytes) -> None:
        raise RuntimeError("a defect")

    revoked = lists(directory)
    Authority(directory, NOW).revoke("client")
    monkeypatch.setattr("cepheid_security.certificate_revocations.parse_lists", fail)
    revoked.reload_if_changed()
    assert [is_revoked(revoked, directory, name) for name in ("leaver", "client")] == [True, False]


def test_the_bookies_of_a_standalone_process_have_the_lists_of_its_broker(directory: Path) -> None:
    names = {"certificate_file": "server.pem", "key_file": "server-key.pem", "client_ca_file": "ca.pem", "crl": "crl.pem"}
    tls = {name: str(directory / file) for name, file in names.items()}
    settings = StandaloneSettings(data_dir=directory, tls=tls)  # type: ignore[arg-type]
    ports = secured_ports(settings.bookie_tls, OPEN_ACCESS)
    assert ports.revoked is not None
    assert is_revoked(ports.revoked, directory, "leaver")


def test_lists_need_a_ca(directory: Path) -> None:
    with pytest.raises(SecurityConfigurationError, match="need ca_file"):
        client_context(crl=str(directory / "crl.pem"))


def test_openssl_takes_the_list_of_the_own_ca(directory: Path) -> None:
    """Other servers and clients check it themselves."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(directory / "ca.pem")
    context.load_verify_locations(directory / "crl.pem")
    assert context.cert_store_stats() == {"x509": 1, "crl": 1, "x509_ca": 1}


@pytest.mark.parametrize(
    ("certificates", "crl", "looks_up"), [("none", "crl.pem", False), ("optional", None, False), ("required", "crl.pem", True)]
)
def test_a_list_counts_for_clients_only_where_they_are_asked_for_certificates(
    certificates: Literal["none", "optional", "required"], crl: str | None, looks_up: bool
) -> None:
    """A broker may have it for the servers that it connects to alone."""
    tls = TlsSettings(certificate_file="server.pem", key_file="server-key.pem", client_certificates=certificates, crl=crl)
    assert tls.looks_up_revoked_clients is looks_up
