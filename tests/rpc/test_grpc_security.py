"""A bookie's gRPC port with TLS: what each role may do, over real connections with certificates of a CA made here."""

from __future__ import annotations

import asyncio
import datetime
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cepheid_bookie import Bookie, BookieIdentity, RealDisk, StorageSettings, grpc_server
from cepheid_bookie.access import FENCE, OPERATION_NEEDS, SCAN, BookieAccess, Need, ticket_check
from cepheid_bookie.denials import Denials
from cepheid_bookie.grpc_server import BookieServer
from cepheid_bookie.memory_index import MemoryBlockIndex
from cepheid_bookie.scan_server import ScanServer
from cepheid_bookie.secured_ports import access_of, secured_ports
from cepheid_ledger import LedgerSettings
from cepheid_ledger.grpc_connection import GrpcConnection
from cepheid_ports import Ports
from cepheid_recovery.roles import BookieNode, BookieNodeSettings
from cepheid_rpc import (
    TLS_MARK,
    AddAnswer,
    AddRequest,
    BookieUnavailableError,
    ExplicitLac,
    LacRequest,
    ReadRequest,
    Status,
    encode_group,
)
from cepheid_security import ClientTls, Principal, SecurityConfigurationError
from cepheid_security.audit import AuditLog
from cepheid_security.authority import ROTATION_STAGES, Authority
from cepheid_security.peer_settings import BookieAccessSettings, BookieTlsSettings, PeerTlsSettings
from cepheid_security.read_tickets import LAST_ENTRY, ReadTicket, TicketKey, check_ticket, sign_ticket
from tests.bookie.bookie_support import KEY as MASTER_KEY
from tests.bookie.bookie_support import added
from tests.rpc.memory_bookie import MemoryBookie
from tests.support import wait_until

LEDGER = 7
NOW = 1_700_000_000_000
KEY = TicketKey(1, b"k" * 32, 0)
TICKET = sign_ticket(KEY, ReadTicket(LEDGER, 0, LAST_ENTRY, "app", NOW + 1000))
OTHER_LEDGER = sign_ticket(KEY, ReadTicket(LEDGER + 1, 0, LAST_ENTRY, "app", NOW + 1000))
EXPIRED = sign_ticket(KEY, ReadTicket(LEDGER, 0, LAST_ENTRY, "app", NOW - 1_000_000))
UNKNOWN_KEY = sign_ticket(TicketKey(2, b"o" * 32, 0), ReadTicket(LEDGER, 0, LAST_ENTRY, "app", NOW + 1000))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certificates")
    authority = Authority(directory, datetime.datetime.now(datetime.UTC))
    for name in ("bookie", "broker"):
        authority.issue(name, hosts=["127.0.0.1"], for_servers=True)
    for name in ("app", "admin"):
        authority.issue(name, for_servers=False)
    (directory / "other").mkdir()
    stranger = Authority(directory / "other", datetime.datetime.now(datetime.UTC))
    stranger.issue("broker", for_servers=False)
    return directory


def tls_of(made: Path, role: str) -> ClientTls:
    """What a role connects with; "stranger" has no certificate, "impostor" one of another CA."""
    ca = str(made / "ca.pem")
    if role == "stranger":
        return ClientTls(ca)
    directory, name = (made / "other", "broker") if role == "impostor" else (made, role)
    return ClientTls(ca, str(directory / f"{name}.pem"), str(directory / f"{name}-key.pem"))


def settings_of(made: Path, **changes: Any) -> BookieTlsSettings:
    files = {"certificate_file": made / "bookie.pem", "key_file": made / "bookie-key.pem", "client_ca_file": made / "ca.pem"}
    return BookieTlsSettings(**{name: str(path) for name, path in files.items()}, **changes)


@asynccontextmanager
async def secured_bookie(
    made: Path,
    directory: Path,
    tls: BookieTlsSettings | None = None,
    roles: BookieAccessSettings | None = None,
    denials: Denials | None = None,
) -> AsyncIterator[BookieServer]:
    """With entries 0..9 of one ledger, on both ports."""
    denials = denials or Denials()
    values: dict[str, Any] = {"min_free_journal_bytes": 0, "min_free_data_bytes": 0}
    identity, disk = BookieIdentity("b"), RealDisk(directory / "b")
    bookie = await Bookie.open(identity, StorageSettings(**values), disk, MemoryBlockIndex(), Ports())
    bookie.authorize_reads(ticket_check(lambda *asked: check_ticket(asked[0], {1: KEY}, NOW, *asked[1:]), denials))
    group = encode_group(LEDGER, 0, -1, 0, [b"x%d" % number for number in range(10)])
    await added(bookie, group)
    tls = tls or settings_of(made)
    roles = roles or BookieAccessSettings()
    ports = secured_ports(tls, access_of(tls, roles))
    server = BookieServer(
        bookie,
        "127.0.0.1",
        0,
        scans=ScanServer(
            bookie,
            "127.0.0.1",
            0,
            Ports(),
            tls=ports.scan_context,
            certificate_role=roles.certificate_role,
            denials=denials,
        ),
        credentials=ports.credentials,
        revoked=ports.revoked,
        access=ports.access,
        plain_port=tls.plain_port,
        denials=denials,
    )
    await server.start()
    try:
        yield server
    finally:
        await server.aclose()
        await bookie.aclose()


class OneAdd:
    """An add stream's source with one request; `outcome` is the status or the error."""

    def __init__(self, entry_id: int) -> None:
        self.waiting = [AddRequest(encode_group(LEDGER, entry_id, -1, 0, [b"new"]), MASTER_KEY)]
        self.outcome: Status | BaseException | None = None

    def next_message(self, max_bytes: int) -> list[AddRequest]:
        waiting, self.waiting = self.waiting, []
        return waiting

    def on_answers(self, answers: list[AddAnswer]) -> None:
        self.outcome = answers[0].status

    def on_broken(self, error: BaseException) -> None:
        self.outcome = error


async def add(connection: GrpcConnection, *, turns: int = 0) -> Status:
    """`turns`: of the loop before the request is sent, the last one a busy one. The bookie may deny the stream meanwhile."""
    source = OneAdd(10)
    stream = connection.open_add_stream(source)  # type: ignore[arg-type]
    for _ in range(turns):
        await asyncio.sleep(0)
    time.sleep(0.003 if turns else 0.0)  # noqa: ASYNC251
    stream.wake()
    await wait_until(lambda: source.outcome is not None)
    await stream.aclose()
    if isinstance(source.outcome, BaseException):
        raise source.outcome
    assert source.outcome is not None
    return source.outcome


async def read(connection: GrpcConnection, **request: Any) -> Status:
    answers = [answer async for answer in connection.read(ReadRequest(LEDGER, 0, 9, **request))]
    return answers[0].missing[0].status if answers[0].missing else Status.OK


async def lac(connection: GrpcConnection, **request: Any) -> Status:
    return (await connection.read_lac(LacRequest(LEDGER, **request))).status


CALLS: dict[str, Callable[[GrpcConnection], Awaitable[Status]]] = {
    "add": add,
    "write lac": lambda c: c.write_lac(ExplicitLac(LEDGER, 3, MASTER_KEY)),
    "fence": lambda c: lac(c, master_key=MASTER_KEY, fence=True),
    "fencing read": lambda c: read(c, master_key=MASTER_KEY, fence=True),
    "lac": lambda c: lac(c, master_key=MASTER_KEY),
    "read": lambda c: read(c),
    "scan": lambda c: read(c, scan=True),
    "scan with ticket": lambda c: read(c, scan=True, ticket=TICKET),
    "scan with the ticket of another ledger": lambda c: read(c, scan=True, ticket=OTHER_LEDGER),
    "scan with an expired ticket": lambda c: read(c, scan=True, ticket=EXPIRED),
    "scan with a ticket of an unknown key": lambda c: read(c, scan=True, ticket=UNKNOWN_KEY),
    "lac with ticket": lambda c: lac(c, master_key=b"", ticket=TICKET),
    "lac with the ticket of another ledger": lambda c: lac(c, master_key=b"", ticket=OTHER_LEDGER),
    "fence with ticket": lambda c: lac(c, master_key=b"", ticket=TICKET, fence=True),
}
BY_TICKET = {
    "scan": "UNAUTHORIZED",
    "scan with ticket": "OK",
    "scan with the ticket of another ledger": "UNAUTHORIZED",
    "scan with an expired ticket": "TICKET_EXPIRED",
    "scan with a ticket of an unknown key": "TICKET_KEY_UNKNOWN",
    "lac with ticket": "OK",
    "lac with the ticket of another ledger": "UNAUTHORIZED",
}
DENIED = dict.fromkeys(CALLS, "PERMISSION_DENIED")
EXPECTED = {
    "broker": dict.fromkeys(CALLS, "OK") | BY_TICKET | {"fence with ticket": "BAD_REQUEST"},
    "bookie": dict.fromkeys(CALLS, "OK") | BY_TICKET | {"fence with ticket": "BAD_REQUEST"},
    "admin": DENIED | BY_TICKET | {"read": "OK", "lac": "OK"},
    "app": DENIED | BY_TICKET,
    "stranger": dict.fromkeys(CALLS, "UNAVAILABLE"),
    "impostor": dict.fromkeys(CALLS, "UNAVAILABLE"),
}


async def outcome_of(call: Callable[[GrpcConnection], Awaitable[Status]], connection: GrpcConnection) -> str:
    try:
        return (await call(connection)).name
    except BookieUnavailableError as error:
        return next((word for word in ("PERMISSION_DENIED", "UNAVAILABLE") if word in str(error)), str(error))


@pytest.mark.parametrize("role", EXPECTED)
async def test_a_role_may_do_what_the_table_says(made: Path, tmp_path: Path, role: str) -> None:
    async with secured_bookie(made, tmp_path) as server:
        connection = GrpcConnection("b", f"{TLS_MARK}127.0.0.1:{server.port}", tls=tls_of(made, role))
        # Fences come last: after them an add is refused.
        ordered = sorted(CALLS, key=lambda name: "fenc" in name)
        assert {name: await outcome_of(CALLS[name], connection) for name in ordered} == EXPECTED[role]
        await connection.aclose()


async def test_each_operation_that_a_bookie_serves_has_a_row_and_no_row_is_left_over(tmp_path: Path) -> None:
    calls = BookieServer(MemoryBookie(), "127.0.0.1", 0)._methods()
    role = BookieNode(BookieNodeSettings(metadata="zk://a", data_dir=tmp_path, bookie_id="b"), Ports())
    pages = {*role._health._pages, *role._health._queried}
    kinds_of_requests = {FENCE, SCAN}
    assert {*calls, *pages, *kinds_of_requests} == set(OPERATION_NEEDS)


@pytest.mark.parametrize("needed", Need)
def test_a_need_is_met_by_the_roles_that_have_it(needed: Need) -> None:
    access = BookieAccess(cluster_roles=frozenset({"broker"}), reader_roles=frozenset({"admin"}))
    operation = next(name for name, need in OPERATION_NEEDS.items() if need is needed)

    def allowed(role: str, *, has_ticket: bool = False) -> bool:
        return access.refusal(operation, role, is_encrypted=True, has_ticket=has_ticket) is None

    everybody = needed in (Need.NOTHING, Need.CERTIFICATE, Need.TICKET)  # the port and the storage check the last two
    assert [allowed(role) for role in ("broker", "admin", "app")] == [True, needed is not Need.CLUSTER, everybody]
    assert allowed("app", has_ticket=True) == (everybody or needed is Need.READER_OR_TICKET)


def test_an_operation_without_a_row_is_refused() -> None:
    access = BookieAccess(cluster_roles=frozenset({"broker"}))
    assert "'Format' has no row" in str(access.refusal("Format", "broker", is_encrypted=True))


async def test_a_denial_says_why_and_is_logged(made: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with secured_bookie(made, tmp_path) as server:
        connection = GrpcConnection("b", f"{TLS_MARK}127.0.0.1:{server.port}", tls=tls_of(made, "app"))
        with pytest.raises(BookieUnavailableError, match="role 'app': only brokers and repair workers of this cluster"):
            await CALLS["write lac"](connection)
        with pytest.raises(BookieUnavailableError, match="role 'app': a read needs a ticket: plan it through a broker"):
            await CALLS["read"](connection)
        await connection.aclose()
        assert server._denials.roles == 2
    logged = [record for record in caplog.records if record.message == "bookie.request.denied"]
    assert [vars(record)["role"] for record in logged] == ["app", "app"]


async def test_a_denial_reaches_a_client_that_is_slow_to_send(made: Path, tmp_path: Path) -> None:
    async with secured_bookie(made, tmp_path) as server:
        connection = GrpcConnection("b", f"{TLS_MARK}127.0.0.1:{server.port}", tls=tls_of(made, "app"))
        outcomes = [await outcome_of(partial(add, turns=turns), connection) for turns in [*range(7, 13)] * 6]
        assert set(outcomes) == {"PERMISSION_DENIED"}
        await connection.aclose()


async def test_a_stream_of_adds_without_a_message_is_denied_in_the_end(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_server, "_DENIAL_WAITS_S", 0.01)
    async with secured_bookie(made, tmp_path) as server:
        connection = GrpcConnection("b", f"{TLS_MARK}127.0.0.1:{server.port}", tls=tls_of(made, "app"))
        source = OneAdd(10)
        stream = connection.open_add_stream(source)  # type: ignore[arg-type]
        await wait_until(lambda: source.outcome is not None)
        assert "PERMISSION_DENIED" in str(source.outcome)
        await stream.aclose()
        await connection.aclose()


async def test_the_audit_log_names_each_recovery_that_is_denied(made: Path, tmp_path: Path) -> None:
    """Though they share a stream."""
    audited: list[tuple[str, str, str]] = []

    class Audit(AuditLog):
        def record(self, principal: Principal | None, peer: str, operation: str, object: str, *_: Any) -> None:
            audited.append((principal.role if principal else "", operation, object))

    async with secured_bookie(made, tmp_path, denials=Denials(Audit())) as server:
        app = GrpcConnection("b", f"{TLS_MARK}127.0.0.1:{server.port}", tls=tls_of(made, "app"))
        await asyncio.gather(*(outcome_of(CALLS[name], app) for name in ("fence", "fencing read")))
        await app.aclose()
    assert audited == [("app", "ReadLac", "ledger 7"), ("app", "Read", "ledger 7")]


async def test_the_role_may_be_an_alternative_name(made: Path, tmp_path: Path) -> None:
    """A certificate with the common name `app` and the DNS name `writer`: by the rule `dns` its role is `writer`."""
    Authority(made, datetime.datetime.now(datetime.UTC)).issue("both", hosts=["writer", "10.0.0.1"], for_servers=False)
    roles = BookieAccessSettings(cluster_roles=("writer",), certificate_role="dns")
    async with secured_bookie(made, tmp_path, roles=roles) as server:
        for role, outcome in (("both", "OK"), ("broker", "PERMISSION_DENIED"), ("app", "PERMISSION_DENIED")):
            connection = GrpcConnection("b", f"{TLS_MARK}127.0.0.1:{server.port}", tls=tls_of(made, role))
            assert await outcome_of(CALLS["write lac"], connection) == outcome, role
            await connection.aclose()


async def test_a_port_without_tls_beside_it_is_open_until_it_is_closed(made: Path, tmp_path: Path) -> None:
    """While brokers get their certificates, one after the other."""
    async with secured_bookie(made, tmp_path, settings_of(made, plain_port=0)) as server:
        plain = GrpcConnection("b", f"127.0.0.1:{server.plain_port}")
        assert await outcome_of(CALLS["add"], plain) == "OK"
        assert await outcome_of(CALLS["lac"], plain) == "OK"
        secured = GrpcConnection("b", f"{TLS_MARK}127.0.0.1:{server.port}", tls=tls_of(made, "app"))
        assert await outcome_of(CALLS["add"], secured) == "PERMISSION_DENIED"
        for connection in (plain, secured):
            await connection.aclose()


async def test_brokers_and_a_bookie_get_the_stages_of_a_new_ca_in_any_order(made: Path, tmp_path: Path) -> None:
    """gRPC has a TLS library of its own, which has to find the right one of two CAs."""
    authority, bookie_files, broker_files = (
        shutil.copytree(made, tmp_path / name) for name in ("authority", "bookie-files", "broker-files")
    )
    async with secured_bookie(bookie_files, tmp_path) as server:
        for number, stage in enumerate(ROTATION_STAGES):
            Authority(authority, datetime.datetime.now(datetime.UTC)).rotate(stage)
            both = (bookie_files, broker_files)
            for receiver in both if number % 2 else reversed(both):
                shutil.copytree(authority, receiver, dirs_exist_ok=True)
                connection = GrpcConnection("b", f"{TLS_MARK}127.0.0.1:{server.port}", tls=tls_of(broker_files, "broker"))
                assert await outcome_of(CALLS["lac"], connection) == "OK", (stage, receiver.name)
                await connection.aclose()


async def test_calls_and_streams_end_when_the_certificate_of_their_connection_expires(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_server, "_CERTIFICATE_LOOKS_S", 0.02)
    denials = Denials()
    async with secured_bookie(made, tmp_path, denials=denials) as server:
        connection = GrpcConnection("b", f"{TLS_MARK}127.0.0.1:{server.port}", tls=tls_of(made, "broker"))
        source = OneAdd(10)
        stream = connection.open_add_stream(source)  # type: ignore[arg-type]
        stream.wake()
        await wait_until(lambda: source.outcome is Status.OK)
        server._wall_ms = lambda: 1 << 60
        await wait_until(lambda: isinstance(source.outcome, BaseException))
        assert "the certificate of this connection has expired" in str(source.outcome)
        for call in ("lac", "read", "write lac", "scan with ticket"):
            assert "has expired" in await outcome_of(CALLS[call], connection), call
        assert denials.roles == 5
        await stream.aclose()
        await connection.aclose()


async def test_a_stream_moves_to_a_connection_with_the_new_certificate_between_two_adds(made: Path, tmp_path: Path) -> None:
    """Else the bookie would end it when the old certificate expires, with adds on their way."""
    own = tmp_path / "own"
    shutil.copytree(made, own)
    async with secured_bookie(made, tmp_path) as server:
        settings = LedgerSettings(add_timeout_s=0.05)
        connection = GrpcConnection("b", f"{TLS_MARK}127.0.0.1:{server.port}", settings, tls=tls_of(own, "broker"))
        source = OneAdd(10)
        stream = connection.open_add_stream(source)  # type: ignore[arg-type]
        stream.wake()
        await wait_until(lambda: source.outcome is Status.OK)
        Authority(own, datetime.datetime.now(datetime.UTC)).issue("broker", hosts=["127.0.0.1"], for_servers=True)
        await wait_until(lambda: isinstance(source.outcome, BaseException))
        assert "the certificate of this process was replaced" in str(source.outcome)
        await stream.aclose()
        await connection.aclose()


async def test_an_exchanged_certificate_is_used_without_a_restart(made: Path, tmp_path: Path) -> None:
    """Server and client get certificates of a new CA; connections that are open go on."""
    directory = tmp_path / "rotating"
    directory.mkdir()

    def issue(into: Path) -> None:
        authority = Authority(into, datetime.datetime.now(datetime.UTC))
        for name in ("bookie", "broker"):
            authority.issue(name, hosts=["127.0.0.1"], for_servers=True)

    issue(directory)
    async with secured_bookie(directory, tmp_path, settings_of(directory)) as server:
        address = f"{TLS_MARK}127.0.0.1:{server.port}"
        before = GrpcConnection("b", address, tls=tls_of(directory, "broker"))
        assert await outcome_of(CALLS["lac"], before) == "OK"
        assert not before.is_outdated
        (tmp_path / "new").mkdir()
        issue(tmp_path / "new")
        for file in (tmp_path / "new").iterdir():
            file.replace(directory / file.name)
        assert before.is_outdated
        assert await outcome_of(CALLS["lac"], before) == "OK"
        after = GrpcConnection("b", address, tls=tls_of(directory, "broker"))
        assert await outcome_of(CALLS["lac"], after) == "OK"
        of_old_ca = GrpcConnection("b", address, tls=tls_of(made, "broker"))
        assert await outcome_of(CALLS["lac"], of_old_ca) == "UNAVAILABLE"
        for connection in (before, after, of_old_ca):
            await connection.aclose()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (BookieTlsSettings(certificate_file="c"), "tls.client_ca_file is missing"),
        (BookieTlsSettings(certificate_file="c", client_ca_file="a"), "set together"),
        (BookieTlsSettings(client_ca_file="a"), "tls.client_ca_file is set without tls.certificate_file"),
        (BookieTlsSettings(plain_port=1), "tls.plain_port is set without tls.certificate_file"),
        (BookieTlsSettings(key_file="k"), "set together"),
        (BookieTlsSettings(certificate_file="/no", key_file="/no", client_ca_file="/no"), "/no cannot be used"),
        (PeerTlsSettings(certificate_file="c", key_file="k"), "tls.ca_file is missing"),
        (PeerTlsSettings(ca_file="a"), "tls.ca_file is set without tls.certificate_file"),
    ],
)
def test_half_a_configuration_is_refused(settings: PeerTlsSettings, reason: str) -> None:
    with pytest.raises(SecurityConfigurationError, match=reason):
        settings.client_tls()
