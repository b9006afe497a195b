"""Scans of bookies with TLS: certificates, tickets, and what happens when a ticket expires."""

from __future__ import annotations

import datetime
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cepheid_bookie.access import ticket_check
from cepheid_decode import EntriesUnreadableError, LedgerHistory, Piece, ReadSettings, ScanCounters
from cepheid_rpc import TLS_MARK
from cepheid_scan import entry_source as module
from cepheid_scan import ledger_ends
from cepheid_scan.bookie_channels import close_channels, known_door
from cepheid_scan.entry_source import EntrySource
from cepheid_scan.ledger_ends import LacCalls, newest_ends
from cepheid_scan.replica_order import Suspects
from cepheid_security import ClientTls
from cepheid_security.authority import Authority
from cepheid_security.peer_settings import BookieTlsSettings
from cepheid_security.read_tickets import LAST_ENTRY, ReadTicket, TicketKey, check_ticket, sign_ticket
from tests.scan.scan_bookies import LEDGER, ScanBookies, groups_of, payload, piece_of

NOW = 1_700_000_000_000
KEY = TicketKey(1, b"k" * 32, 0)
QUICK = ReadSettings(read_timeout_s=10.0, read_attempts=2, unreachable_s=0.2)


def ticket_for(ledger_id: int = LEDGER, last: int = LAST_ENTRY, until_ms: int = NOW + 1000) -> bytes:
    return sign_ticket(KEY, ReadTicket(ledger_id, 0, last, "app", until_ms))


VALID, EXPIRED = ticket_for(), ticket_for(until_ms=NOW - 1_000_000)
OTHER_KEY = TicketKey(2, b"o" * 32, 0)
OF_ANOTHER_KEY = sign_ticket(OTHER_KEY, ReadTicket(LEDGER, 0, LAST_ENTRY, "app", NOW + 1000))


@pytest.fixture(autouse=True)
def _fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "_suspects", Suspects())
    yield
    close_channels()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certificates")
    authority = Authority(directory, datetime.datetime.now(datetime.UTC))
    authority.issue("bookie", hosts=["127.0.0.1"], for_servers=True)
    authority.issue("app", for_servers=False)
    return directory


@pytest.fixture
def reader(made: Path) -> ReadSettings:
    return replace(QUICK, tls=ClientTls(str(made / "ca.pem"), str(made / "app.pem"), str(made / "app-key.pem")))


@pytest.fixture
def two(made: Path, tmp_path: Path) -> Iterator[ScanBookies]:
    files = {"certificate_file": "bookie.pem", "key_file": "bookie-key.pem", "client_ca_file": "ca.pem"}
    tls = BookieTlsSettings.model_validate({name: str(made / file) for name, file in files.items()})
    with ScanBookies(tmp_path, ["a", "b"], tls=tls) as bookies:
        for bookie in bookies.bookies.values():
            bookie.authorize_reads(ticket_check(lambda *asked: check_ticket(asked[0], {1: KEY}, NOW, *asked[1:])))
        for group in groups_of(5000, per_group=70):
            bookies.add(group)
        bookies.checkpoint()
        yield bookies


def source_of(
    bookies: ScanBookies,
    settings: ReadSettings,
    replan: Callable[[Piece], LedgerHistory | None] | None = None,
    counters: ScanCounters | None = None,
) -> EntrySource:
    return EntrySource(bookies.addresses, b"", settings, counters or ScanCounters(), replan=replan)


def piece_with(ticket: bytes) -> Piece:
    return replace(piece_of(0, 4999, (0, "ab")), ticket=ticket)


def ledger_with(ticket: bytes) -> LedgerHistory:
    fragments = piece_of(0, 4999, (0, "ab")).fragments
    return LedgerHistory(LEDGER, -1, True, 0, None, 2, 2, fragments, b"", ticket=ticket)


def test_stored_blocks_come_through_tls_past_grpc(two: ScanBookies, reader: ReadSettings) -> None:
    counters = ScanCounters()
    groups = list(source_of(two, reader, counters=counters).read(piece_with(VALID)))
    payloads = [bytes(each) for group in groups for each in group.payloads()]
    assert payloads == [payload(entry_id) for entry_id in range(5000)]
    assert counters.retries == 0
    (bookie,) = counters.by_bookie
    is_known, door = known_door(two.addresses[bookie])
    assert is_known
    assert door is not None, "nothing went wrong past gRPC"
    assert door.secured
    assert all(not bookie.runs.can_share for bookie in two.bookies.values()), "entry logs hold other topics' entries"


def test_the_end_of_an_open_ledger_is_told_to_who_has_a_ticket(two: ScanBookies, reader: ReadSettings) -> None:
    calls = LacCalls(reader.tls)
    assert newest_ends([ledger_with(VALID)], two.addresses, 5.0, calls)[0].last_entry_id == -1
    with pytest.raises(Exception, match="UNAUTHORIZED"):
        newest_ends([ledger_with(ticket_for(LEDGER + 1))], two.addresses, 5.0, calls)
    calls.close()


@pytest.mark.parametrize(
    ("ticket", "reason"),
    [
        (b"", "UNAUTHORIZED: the read ticket is not valid for these entries"),
        (ticket_for(LEDGER + 1), "UNAUTHORIZED: the read ticket is not valid for these entries"),
        (ticket_for(last=4998), "UNAUTHORIZED: the read ticket is not valid for these entries"),
        (EXPIRED, "the read ticket has expired: plan again to get a new one"),
    ],
)
def test_a_read_without_a_valid_ticket_is_refused(two: ScanBookies, reader: ReadSettings, ticket: bytes, reason: str) -> None:
    with pytest.raises(EntriesUnreadableError, match=reason):
        list(source_of(two, reader).read(piece_with(ticket)))


def test_a_ticket_that_expires_is_replaced_by_planning_again(two: ScanBookies, reader: ReadSettings) -> None:
    planned = []

    def replan(piece: Piece) -> LedgerHistory:
        planned.append(piece.ledger_id)
        return ledger_with(VALID)

    groups = list(source_of(two, reader, replan).read(piece_with(EXPIRED)))
    assert sum(map(len, groups)) == 5000
    assert planned == [LEDGER]


def test_each_ledger_of_a_long_read_gets_a_new_ticket(two: ScanBookies, reader: ReadSettings) -> None:
    source = source_of(two, reader, lambda _: ledger_with(VALID))
    for topic in ("persistent://public/default/a", "persistent://public/default/b"):
        assert sum(map(len, source.read(replace(piece_with(EXPIRED), topic=topic)))) == 5000


def test_tickets_that_are_all_expired_end_the_read(two: ScanBookies, reader: ReadSettings) -> None:
    """As where the clocks of broker and bookie are hours apart."""
    tickets = iter([ticket_for(until_ms=NOW - 1_000_000 - number) for number in range(100)])
    with pytest.raises(EntriesUnreadableError, match="the read ticket has expired"):
        list(source_of(two, reader, lambda _: ledger_with(next(tickets))).read(piece_with(EXPIRED)))
    assert len(list(tickets)) > 90, "it does not plan again and again"


def test_a_ticket_whose_key_the_bookie_does_not_know_is_replaced_once(two: ScanBookies, reader: ReadSettings) -> None:
    """As after a theft, when the keys were deleted; or when a bookie missed a rotation."""
    planned = []

    def replan(piece: Piece) -> LedgerHistory:
        planned.append(piece.ledger_id)
        return ledger_with(VALID)

    groups = list(source_of(two, reader, replan).read(piece_with(OF_ANOTHER_KEY)))
    assert sum(map(len, groups)) == 5000
    assert planned == [LEDGER]


def test_a_bookie_that_knows_no_key_of_any_ticket_is_waited_for_and_named(two: ScanBookies, reader: ReadSettings) -> None:
    planned = []

    def replan(piece: Piece) -> LedgerHistory:
        planned.append(piece.ledger_id)
        return ledger_with(sign_ticket(OTHER_KEY, ReadTicket(LEDGER, 0, LAST_ENTRY, "app", NOW + 2000 + len(planned))))

    with pytest.raises(EntriesUnreadableError, match="the bookie does not know the key of the read ticket"):
        list(source_of(two, reader, replan).read(piece_with(OF_ANOTHER_KEY)))
    assert planned == [LEDGER, LEDGER], "once for a new ticket, once for where the ledger lies by now"


def test_the_end_of_a_ledger_is_asked_again_when_a_key_is_on_its_way(
    two: ScanBookies, reader: ReadSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = []

    def learn(pause_s: float) -> None:
        pauses.append(pause_s)
        for bookie in two.bookies.values():
            bookie.authorize_reads(ticket_check(lambda *asked: check_ticket(asked[0], {2: OTHER_KEY}, NOW, *asked[1:])))

    monkeypatch.setattr(ledger_ends.time, "sleep", learn)
    calls = LacCalls(reader.tls)
    assert newest_ends([ledger_with(OF_ANOTHER_KEY)], two.addresses, 5.0, calls)[0].last_entry_id == -1
    assert len(pauses) == 1
    calls.close()


def test_a_reader_without_a_certificate_is_shut_out(two: ScanBookies, made: Path) -> None:
    stranger = replace(QUICK, tls=ClientTls(str(made / "ca.pem")))
    with pytest.raises(EntriesUnreadableError):
        list(source_of(two, stranger).read(piece_with(VALID)))


def answer_to_a_nonce(address: tuple[str, int], context: ssl.SSLContext | None) -> bytes:
    """What a reader without a certificate gets; with TLS if there is a context."""
    try:
        with socket.create_connection(address, 5) as connection:
            with connection if context is None else context.wrap_socket(connection, server_hostname=address[0]) as reader:
                reader.sendall(b"\0" * 16)
                return reader.recv(16)
    except OSError:
        return b""


def test_the_scan_port_speaks_to_nobody_without_a_certificate(two: ScanBookies, made: Path) -> None:
    context = ClientTls(str(made / "ca.pem")).context()
    for server in two._servers.values():
        assert server._scans is not None
        address = "127.0.0.1", server._scans.port
        assert answer_to_a_nonce(address, None)[:1] in (b"", b"\x15"), "nothing, or an alert of TLS"
        assert answer_to_a_nonce(address, context) == b""


def test_addresses_say_that_they_take_tls(two: ScanBookies) -> None:
    assert all(address.startswith(TLS_MARK) for address in two.addresses.values())
