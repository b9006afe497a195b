"""What must not be accepted on the ports of a bookie: refused, one line in its audit log, nothing else happens.

Handshakes that fail on the gRPC port have no line: gRPC reports them to nobody (docs/security.md).
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import re
import shutil
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cepheid_bookie.denials import Denials
from cepheid_bookie.grpc_server import BookieServer
from cepheid_bookie.health_server import HealthServer, Page, Request
from cepheid_bookie.secured_ports import health_context
from cepheid_ledger.grpc_connection import GrpcConnection
from cepheid_ports import ThreadWorker
from cepheid_rpc import (
    FRAME_HEAD,
    REQUEST_LENGTH,
    SCAN_NONCE_BYTES,
    SCAN_TOKEN_BYTES,
    TLS_MARK,
    FrameKind,
    ReadRequest,
    Status,
    decode_read_answer,
    encode_read_request,
)
from cepheid_security import ClientTls
from cepheid_security.audit import AuditLog
from cepheid_security.peer_settings import BookieAccessSettings
from cepheid_security.read_tickets import LAST_ENTRY, ReadTicket, TicketKey, sign_ticket
from tests.rpc.test_grpc_security import (
    CALLS,
    EXPIRED,
    LEDGER,
    NOW,
    OTHER_LEDGER,
    TICKET,
    OneAdd,
    outcome_of,
    secured_bookie,
    settings_of,
    tls_of,
)
from tests.security.bad_input_world import Files
from tests.support import wait_until

UNKNOWN_KEY = sign_ticket(TicketKey(2, b"x" * 32, 0), ReadTicket(LEDGER, 0, LAST_ENTRY, "app", NOW + 1000))
FORGED = sign_ticket(TicketKey(1, b"x" * 32, 0), ReadTicket(LEDGER, 0, LAST_ENTRY, "app", NOW + 1000))
WRITE = "only brokers and repair workers"
READ = "a read needs a ticket"


class Secured:
    """A bookie with TLS and an audit log, of which `lines` returns what is new."""

    def __init__(self, server: BookieServer, audit: AuditLog, written: list[bytes]) -> None:
        self.server = server
        self._audit = audit
        self._written = written

    @property
    def scan_port(self) -> int:
        assert self.server._scans is not None
        return self.server._scans.port

    @property
    def scan_token(self) -> bytes:
        assert self.server._scans is not None
        return self.server._scans.token

    async def lines(self, at_least: int = 1) -> list[dict[str, Any]]:
        while True:
            await asyncio.sleep(0.03)  # a second line, which must not be there, would come in this time
            found = b"".join(self._written).splitlines()
            if not self._audit.figures().waiting and len(found) >= at_least:
                self._written.clear()
                return [json.loads(line) for line in found]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certificates")
    Files.make(directory)
    for name in ("", "-key"):  # the bookie's own: it names 127.0.0.1
        (directory / f"bookie{name}.pem").write_bytes((directory / f"server{name}.pem").read_bytes())
    return directory


@asynccontextmanager
async def secured(files: Path, directory: Path, roles: BookieAccessSettings | None = None) -> AsyncIterator[Secured]:
    written: list[bytes] = []
    audit = AuditLog(written.append, ThreadWorker("audit"), lambda: NOW)
    tls = settings_of(files, crl=str(files / "crl.pem"))
    async with secured_bookie(files, directory, tls, roles=roles, denials=Denials(audit)) as server:
        yield Secured(server, audit, written)
    await audit.aclose()


GRPC: dict[str, tuple[str, str, str, str]] = {
    # the call: operation, object and reason of its line, as the role app; a ticket changes nothing where there is none
    "add": ("Add", "", WRITE, "PERMISSION_DENIED"),
    "write lac": ("WriteLac", "", WRITE, "PERMISSION_DENIED"),
    "fence": ("ReadLac", f"ledger {LEDGER}", WRITE, "PERMISSION_DENIED"),
    "fencing read": ("Read", f"ledger {LEDGER}", WRITE, "PERMISSION_DENIED"),
    "fence with ticket": ("ReadLac", f"ledger {LEDGER}", WRITE, "PERMISSION_DENIED"),
    "lac": ("ReadLac", f"ledger {LEDGER}", READ, "PERMISSION_DENIED"),
    "read": ("Read", f"ledger {LEDGER}", READ, "PERMISSION_DENIED"),
    "scan": ("Read", f"ledger {LEDGER}", "without a ticket", "UNAUTHORIZED"),
    "scan with the ticket of another ledger": ("Read", f"ledger {LEDGER}", "not valid for these entries", "UNAUTHORIZED"),
    "scan with an expired ticket": ("Read", f"ledger {LEDGER}", "has expired", "TICKET_EXPIRED"),
    "lac with the ticket of another ledger": ("ReadLac", f"ledger {LEDGER}", "not valid for these entries", "UNAUTHORIZED"),
}


async def test_calls_on_the_grpc_port(files: Path, tmp_path: Path) -> None:
    async with secured(files, tmp_path) as bookie:
        connection = GrpcConnection("b", f"{TLS_MARK}127.0.0.1:{bookie.server.port}", tls=tls_of(files, "app"))
        for call, (operation, what, reason, outcome) in GRPC.items():
            assert await outcome_of(CALLS[call], connection) == outcome, call
            (line,) = await bookie.lines()
            assert (line["operation"], line.get("object", ""), line["result"]) == (operation, what, "denied"), line
            assert (line["role"], line["method"]) == ("app", "tls")
            assert re.fullmatch(r"127\.0\.0\.1:\d+", line["peer"])
            assert reason in line["reason"], line
        for call in ("scan with ticket", "lac with ticket"):
            assert await outcome_of(CALLS[call], connection) == "OK", "nothing was fenced or written"
        await connection.aclose()
        broker = GrpcConnection("b", f"{TLS_MARK}127.0.0.1:{bookie.server.port}", tls=tls_of(files, "broker"))
        assert await outcome_of(CALLS["add"], broker) == "OK"
        await broker.aclose()


async def test_a_revoked_certificate_on_the_grpc_port(files: Path, tmp_path: Path) -> None:
    """gRPC accepts it in the handshake: each call is refused."""
    async with secured(files, tmp_path) as bookie:
        connection = GrpcConnection("b", f"{TLS_MARK}127.0.0.1:{bookie.server.port}", tls=tls_of(files, "revoked"))
        calls = {"add": "Add", "fence": "Recover", "lac with ticket": "ReadLac", "scan with ticket": "Read"}
        for call, operation in calls.items():
            assert "the certificate was revoked by its CA" in await outcome_of(CALLS[call], connection), call
            (line,) = await bookie.lines()
            assert (line["operation"], line["role"], line["result"]) == (operation, "revoked", "denied")
            assert "the certificate was revoked by its CA" in line["reason"]
        await connection.aclose()


async def test_a_read_ends_when_the_certificate_of_its_client_is_revoked(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cepheid_security.certificate_revocations.LOOK_S", 0.0)
    files = shutil.copytree(files, tmp_path / "files")
    async with secured(files, tmp_path) as bookie:
        connection = GrpcConnection("b", f"{TLS_MARK}127.0.0.1:{bookie.server.port}", tls=tls_of(files, "broker"))
        read = bookie.server._bookie.read

        async def revoke_then_read(request: ReadRequest) -> AsyncIterator[Any]:
            Files(files).revoke("broker")
            async for answer in read(request):
                yield answer

        monkeypatch.setattr(bookie.server._bookie, "read", revoke_then_read)
        assert "the certificate was revoked by its CA" in await outcome_of(CALLS["read"], connection)
        (line,) = await bookie.lines()
        assert (line["operation"], line["role"], line["result"]) == ("Read", "broker", "denied")
        await connection.aclose()


async def test_calls_streams_and_scans_end_when_a_certificate_is_revoked(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cepheid_security.certificate_revocations.LOOK_S", 0.0)
    monkeypatch.setattr("cepheid_bookie.grpc_server._CERTIFICATE_LOOKS_S", 0.02)
    files = shutil.copytree(files, tmp_path / "files")
    async with secured(files, tmp_path) as bookie:
        connection = GrpcConnection("b", f"{TLS_MARK}127.0.0.1:{bookie.server.port}", tls=tls_of(files, "broker"))
        source = OneAdd(10)
        stream = connection.open_add_stream(source)  # type: ignore[arg-type]
        stream.wake()
        await wait_until(lambda: source.outcome is Status.OK)
        asking = bookie.server._bookie.scan  # type: ignore[attr-defined]

        def revoke_app(request: ReadRequest) -> Any:
            Files(files).revoke("app")
            return asking(request)

        Files(files).revoke("broker")
        await wait_until(lambda: isinstance(source.outcome, BaseException))
        assert "the certificate was revoked by its CA" in str(source.outcome)
        assert "the certificate was revoked by its CA" in await outcome_of(CALLS["lac"], connection)
        assert len(await bookie.lines(2)) == 2
        monkeypatch.setattr(bookie.server._bookie, "scan", revoke_app)
        assert (await _scan(bookie, Files(files).client("app"))).startswith("closed")
        (line,) = await bookie.lines()
        assert (line["operation"], line["role"], line["object"]) == ("Scan", "app", f"ledger {LEDGER}")
        assert "the certificate was revoked by its CA" in line["reason"]
        await stream.aclose()
        await connection.aclose()


async def test_old_versions_of_tls_and_weak_ciphers_on_the_grpc_port(files: Path, tmp_path: Path) -> None:
    """gRPC has a TLS library of its own, with no setting for either."""
    weak = Files(files).client("app")
    weak.maximum_version = ssl.TLSVersion.TLSv1_2
    weak.set_ciphers("AES128-SHA:AES128-GCM-SHA256:ECDHE-RSA-AES128-SHA:ECDHE-ECDSA-AES128-SHA:@SECLEVEL=0")
    good = Files(files).client("app")
    good.maximum_version = ssl.TLSVersion.TLSv1_2
    for context in (weak, good, Files(files).client("app"), Files(files).old()):
        context.set_alpn_protocols(["h2"])
    async with secured(files, tmp_path) as bookie:
        for context in (Files(files).old(), weak):
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await _shaken(bookie.server.port, context)
        assert await _shaken(bookie.server.port, good) == "TLSv1.2"
        assert await _shaken(bookie.server.port, Files(files).client("app")) == "TLSv1.3"


async def _shaken(port: int, context: ssl.SSLContext) -> str | None:
    """Return the version of TLS that the port speaks with a client."""
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="localhost")
    writer.close()
    version: str | None = writer.get_extra_info("ssl_object").version()
    return version


def test_the_grpc_port_without_tls_1_2(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cipher of TLS 1.2 that needs an RSA key leaves a bookie with an EC key only TLS 1.3. gRPC reads the variable once."""
    monkeypatch.setenv("GRPC_SSL_CIPHER_SUITES", "ECDHE-RSA-AES128-GCM-SHA256")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        assert process.submit(_versions_of_tls, files, tmp_path).result() == ["refused", "TLSv1.3", "OK"]


def _versions_of_tls(files: Path, directory: Path) -> list[str]:
    """Return what becomes of a client with TLS 1.2 at most, of one with TLS 1.3, and of a broker."""

    async def scenario() -> list[str]:
        old, new = (Files(files).client("app") for _ in range(2))
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        found: list[str] = []
        async with secured(files, directory) as bookie:
            for context in (old, new):
                context.set_alpn_protocols(["h2"])
                try:
                    found.append(str(await _shaken(bookie.server.port, context)))
                except (ssl.SSLError, ConnectionError):
                    found.append("refused")
            broker = GrpcConnection("b", f"{TLS_MARK}127.0.0.1:{bookie.server.port}", tls=tls_of(files, "broker"))
            found.append(await outcome_of(CALLS["add"], broker))
            await broker.aclose()
        return found

    return asyncio.run(scenario())


@pytest.mark.parametrize("case", ["no certificate", "impostor", "expired", "future", "plain text"])
async def test_a_stranger_to_the_grpc_port(files: Path, tmp_path: Path, case: str) -> None:
    """It is refused, and nothing happens. gRPC tells nobody, so there is no line."""
    pair = (str(files / f"{case}.pem"), str(files / f"{case}-key.pem")) if case in ("impostor", "expired", "future") else ()
    async with secured(files, tmp_path) as bookie:
        mark = "" if case == "plain text" else TLS_MARK
        stranger = GrpcConnection("b", f"{mark}127.0.0.1:{bookie.server.port}", tls=ClientTls(str(files / "ca.pem"), *pair))
        assert await outcome_of(CALLS["fence"], stranger) == "UNAVAILABLE"
        await stranger.aclose()
        broker = GrpcConnection("b", f"{TLS_MARK}127.0.0.1:{bookie.server.port}", tls=tls_of(files, "broker"))
        assert await outcome_of(CALLS["add"], broker) == "OK", "nothing was fenced"
        await broker.aclose()


async def _scan(bookie: Secured, context: ssl.SSLContext | None, ticket: bytes = TICKET) -> str:
    """Scan the ledger through the scan port; return the status, or why there is none."""
    name = None if context is None else "localhost"
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", bookie.scan_port, ssl=context, server_hostname=name)
    except (ssl.SSLError, ConnectionError) as error:
        return f"no TLS: {getattr(error, 'reason', None) or error!r}"
    try:
        writer.write(bytes(SCAN_NONCE_BYTES))
        await reader.readexactly(SCAN_TOKEN_BYTES)
        request = encode_read_request(ReadRequest(LEDGER, 0, 9, scan=True, ticket=ticket))
        writer.write(bookie.scan_token + REQUEST_LENGTH.pack(len(request)) + request)
        kind, size_bytes, _, _ = FRAME_HEAD.unpack(await reader.readexactly(FRAME_HEAD.size))
        if kind != FrameKind.ANSWER:
            return "OK"
        answer = decode_read_answer(await reader.readexactly(size_bytes))
        return answer.missing[0].status.name if answer.missing else "OK"
    except (OSError, EOFError) as error:
        return f"closed: {error!r}"
    finally:
        writer.close()


SCANS: dict[str, tuple[Callable[[Secured, Files], Awaitable[str]], str, str, str]] = {
    # what is tried: the attempt, what the reader is told, operation and reason of the line
    "without a ticket": (lambda b, f: _scan(b, f.client("app"), b""), "UNAUTHORIZED", "Scan", "without a ticket"),
    "the ticket of another ledger": (
        lambda b, f: _scan(b, f.client("app"), OTHER_LEDGER), "UNAUTHORIZED", "Scan", "not valid for these entries",
    ),
    "an expired ticket": (lambda b, f: _scan(b, f.client("app"), EXPIRED), "TICKET_EXPIRED", "Scan", "has expired"),
    "a ticket that is signed with another key": (
        lambda b, f: _scan(b, f.client("app"), FORGED), "UNAUTHORIZED", "Scan", "not valid for these entries",
    ),
    "a ticket that names an unknown key": (
        lambda b, f: _scan(b, f.client("app"), UNKNOWN_KEY), "TICKET_KEY_UNKNOWN", "Scan", "a key that this bookie does not know",
    ),
    "no certificate": (lambda b, f: _scan(b, f.client()), "closed|no TLS", "tls.handshake", "certificate"),
    "a certificate of another CA": (
        lambda b, f: _scan(b, f.client("impostor")), "closed|no TLS", "tls.handshake", "certificate",
    ),
    "a certificate that has expired": (
        lambda b, f: _scan(b, f.client("expired")), "closed|no TLS", "tls.handshake", "certificate",
    ),
    "a certificate that is not valid yet": (
        lambda b, f: _scan(b, f.client("future")), "closed|no TLS", "tls.handshake", "certificate",
    ),
    "a certificate that was revoked": (
        lambda b, f: _scan(b, f.client("revoked")), "closed|no TLS", "tls.handshake", "revoked",
    ),
    "TLS 1.1": (lambda b, f: _scan(b, f.old()), "no TLS", "tls.handshake", "protocol"),
    "plain text": (lambda b, f: _scan(b, None), "closed", "tls.handshake", "does not speak TLS"),
}  # fmt: skip


async def test_connections_to_the_scan_port(files: Path, tmp_path: Path) -> None:
    async with secured(files, tmp_path) as bookie:
        for case, (attempt, told, operation, reason) in SCANS.items():
            answer = await attempt(bookie, Files(files))
            assert re.match(told, answer), (case, answer)
            (line,) = await bookie.lines()
            assert (line["operation"], line["result"]) == (operation, "denied"), (case, line)
            assert line.get("role", "") == ("app" if operation == "Scan" else ""), (case, line)
            assert reason in line["reason"], (case, line)
        assert await _scan(bookie, Files(files).client("app")) == "OK"


async def test_the_rule_of_certificates_holds_on_the_scan_port(files: Path, tmp_path: Path) -> None:
    async with secured(files, tmp_path, BookieAccessSettings(certificate_role="uri")) as bookie:
        assert await _scan(bookie, Files(files).client("app"), b"") == "UNAUTHORIZED"
        (line,) = await bookie.lines()
        assert line.get("role", "") == "", "its common name is no role by this rule"


async def test_a_scan_ends_when_the_certificate_of_its_reader_expires(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cepheid_bookie.scan_streams.certificate_expires_at_ms", lambda _certificate: 0)
    async with secured(files, tmp_path) as bookie:
        assert (await _scan(bookie, Files(files).client("app"))).startswith("closed")


async def test_a_handshake_with_the_scan_port_that_does_not_end(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cepheid_bookie.scan_server._REQUEST_S", 0.2)
    async with secured(files, tmp_path) as bookie:
        reader, writer = await asyncio.open_connection("127.0.0.1", bookie.scan_port)
        assert await reader.read() == b""
        writer.close()
        (line,) = await bookie.lines()
        assert (line["operation"], line["reason"]) == ("tls.handshake", "no TLS handshake within 0.2 s")


async def test_a_flood_of_refusals_is_summed_up(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cepheid_security.audit.REFUSALS_PER_WINDOW", 3)
    written: list[bytes] = []
    audit = AuditLog(written.append, ThreadWorker("audit"), lambda: NOW)
    denials = Denials(audit)
    for port in range(10):
        denials.handshake(f"10.0.0.1:{port}", "scan port 1", "certificate verify failed")
    await audit.aclose()
    lines = [json.loads(line) for line in b"".join(written).splitlines()]
    assert [line["operation"] for line in lines] == ["tls.handshake"] * 3 + ["audit.suppressed"]
    assert lines[-1]["reason"] == "7 more denials and failures"


# The health port


async def _get(port: int, context: ssl.SSLContext | None, path: str = "/metrics") -> str:
    try:
        name = None if context is None else "localhost"
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)
    except (ssl.SSLError, ConnectionError) as error:
        return f"no TLS: {getattr(error, 'reason', None) or error!r}"
    try:
        writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
        return (await reader.read()).decode(errors="replace")
    except OSError as error:
        return f"closed: {error!r}"
    finally:
        writer.close()


HEALTH: dict[str, tuple[Callable[[int, Files], Awaitable[str]], str]] = {
    "a certificate of another CA": (lambda port, f: _get(port, f.client("impostor")), "certificate"),
    "a certificate that has expired": (lambda port, f: _get(port, f.client("expired")), "certificate"),
    "a certificate that is not valid yet": (lambda port, f: _get(port, f.client("future")), "certificate"),
    "a certificate that was revoked": (lambda port, f: _get(port, f.client("revoked")), "revoked"),
    "TLS 1.1": (lambda port, f: _get(port, f.old()), "protocol"),
    "plain text": (lambda port, f: _get(port, None), "does not speak TLS, and this port has nothing else; ask for https://"),
}


async def test_the_rule_of_certificates_holds_on_the_health_port(files: Path) -> None:
    asked: list[Request] = []
    server = HealthServer(
        "127.0.0.1",
        0,
        {"/metrics": lambda: Page("metrics\n")},
        guard=asked.append,
        tls=health_context(settings_of(files)),
        certificate_role="uri",
    )
    await server.start()
    try:
        await _get(server.port, Files(files).client("app"))
    finally:
        await server.aclose()
    assert [request.role for request in asked] == [""], "its common name is no role by this rule"


async def test_connections_to_the_health_port(files: Path) -> None:
    refused: list[tuple[str, str]] = []
    server = HealthServer(
        "127.0.0.1",
        0,
        {"/metrics": lambda: Page("metrics\n")},
        tls=health_context(settings_of(files, crl=str(files / "crl.pem"))),
        on_refused=lambda peer, reason: refused.append((peer, reason)),
    )
    await server.start()
    try:
        for name in (None, "app"):  # probes have no certificate
            assert (await _get(server.port, Files(files).client(name))).endswith("metrics\n")
        for case, (attempt, reason) in HEALTH.items():
            answer = await attempt(server.port, Files(files))
            assert "metrics" not in answer, case
            while not refused:  # noqa: ASYNC110  the test's own time limit ends it
                await asyncio.sleep(0.01)
            ((peer, said),) = refused
            assert re.fullmatch(r"127\.0\.0\.1:\d+", peer)
            assert reason in said, (case, said)
            refused.clear()
    finally:
        await server.aclose()
