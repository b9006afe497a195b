"""Where an answer comes from: the port of scans, or gRPC where there is none; and what becomes of bytes that are no answer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from cepheid_bookie import grpc_server
from cepheid_bookie.entry_block import encode_block_to
from cepheid_rpc import (
    FRAME_HEAD,
    REQUEST_LENGTH,
    SCAN_NONCE_BYTES,
    SCAN_TOKEN_BYTES,
    BookieUnavailableError,
    Buffer,
    DigestMismatchError,
    EntryGroup,
    FrameKind,
    MalformedGroupError,
    ReadAnswer,
    ReadRequest,
    encode_read_answer,
    scan_proof,
)
from cepheid_scan import bookie_channels, scan_connection
from cepheid_scan.bookie_answers import BookieAnswers, CancelledAnswersError, stored_answer
from cepheid_scan.bookie_channels import ScanDoor, close_channels, known_door
from tests.scan.scan_bookies import LEDGER, ScanBookies, groups_of
from tests.support import free_port

REQUEST = ReadRequest(LEDGER, 0, 99, max_bytes=1 << 40, scan=True)
TOKEN = bytes(range(SCAN_TOKEN_BYTES))


@pytest.fixture(autouse=True)
def _fresh_process() -> Iterator[None]:
    yield
    close_channels()


@pytest.fixture(params=["on this machine", "by the port"])
def one(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ScanBookies]:
    with ScanBookies(tmp_path, ["a"], share_logs=request.param == "on this machine") as bookies:
        for group in groups_of(100):
            bookies.add(group)
        bookies.checkpoint()
        yield bookies


def answers_of(address: str, request: ReadRequest = REQUEST) -> list[ReadAnswer]:
    return [answer for answer, _ in BookieAnswers("a", address, request)]


def entry_ids(answers: Sequence[ReadAnswer]) -> list[int]:
    groups = [group for answer in answers for group in answer.groups]
    return [entry_id for group in groups for entry_id in range(group.first_entry_id, group.last_entry_id + 1)]


def came_past_grpc(answers: Sequence[ReadAnswer]) -> bool:
    return all(isinstance(memoryview(group.data).obj, np.ndarray) for answer in answers for group in answer.groups)


def knows(monkeypatch: pytest.MonkeyPatch, address: str, door: ScanDoor) -> None:
    monkeypatch.setitem(bookie_channels._doors, address, (door, 0.0))


def test_blocks_come_past_grpc_and_where_to_is_asked_once(one: ScanBookies) -> None:
    address = one.addresses["a"]
    assert known_door(address) == (False, None)
    first = answers_of(address)
    is_known, door = known_door(address)
    assert is_known
    assert door is not None
    assert door.host == "127.0.0.1"
    second = answers_of(address)
    assert known_door(address)[1] is door
    for answers in (first, second):
        assert entry_ids(answers) == list(range(100))
        assert came_past_grpc(answers)


def test_a_bookie_without_such_a_port_is_read_by_grpc(tmp_path: Path) -> None:
    with ScanBookies(tmp_path, ["a"], stored=False) as bookies:
        for group in groups_of(100):
            bookies.add(group)
        for _ in range(2):
            answers = answers_of(bookies.addresses["a"])
            assert entry_ids(answers) == list(range(100))
            assert not came_past_grpc(answers)
        assert known_door(bookies.addresses["a"]) == (True, None)


def test_a_bookie_that_serves_scans_in_another_way_is_read_by_grpc(one: ScanBookies, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in (1, 9):
        close_channels()
        monkeypatch.setattr(grpc_server, "encode_scan_port", lambda *_, v=version: bytes([v]) + bytes(18))
        answers = answers_of(one.addresses["a"])
        assert entry_ids(answers) == list(range(100))
        assert not came_past_grpc(answers)
        assert known_door(one.addresses["a"]) == (True, None)


@pytest.mark.parametrize("one", ["by the port"], indirect=True)
def test_a_port_that_cannot_be_reached_is_not_tried_again_for_a_while(
    one: ScanBookies, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    address, closed = one.addresses["a"], free_port()
    dialled: list[int] = []
    connect = socket.create_connection

    def refused(target: tuple[str, int], timeout: float) -> socket.socket:
        dialled.append(target[1])
        return connect(("127.0.0.1", closed), timeout=timeout)

    monkeypatch.setattr(scan_connection.socket, "create_connection", refused)
    for _ in range(3):
        assert entry_ids(answers_of(address)) == list(range(100))
    assert len(dialled) == 1
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("scan.port_unreachable: ")
    monkeypatch.setattr(scan_connection.socket, "create_connection", connect)
    monkeypatch.setitem(bookie_channels._doors, address, (None, 0.0))  # the while is over
    assert came_past_grpc(answers_of(address))


@pytest.mark.parametrize("which", ["restarted", "another bookie", "nobody"])
def test_a_port_that_is_no_longer_the_bookies_is_asked_for_anew(
    which: str, one: ScanBookies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = one.addresses["a"]
    if which == "restarted":
        answers_of(address)
        one.stop("a")
        one.start("a")
        assert entry_ids(answers_of(address)) == list(range(100))
        return
    with ScanBookies(tmp_path / "other", ["b"]) as other:
        other.add(groups_of(1)[0])
        answers_of(other.addresses["b"])
        door = known_door(other.addresses["b"])[1]
        assert door is not None
        port = door.port if which == "another bookie" else free_port()
        knows(monkeypatch, address, ScanDoor("127.0.0.1", port, TOKEN))
        answers = answers_of(address)
        assert entry_ids(answers) == list(range(100)), "and not that there is no such ledger"
        assert came_past_grpc(answers)


def test_a_bookie_that_is_down_is_unavailable(one: ScanBookies) -> None:
    one.stop("a")
    with pytest.raises(Exception, match=r"UNAVAILABLE|failed to connect"):
        answers_of(one.addresses["a"])


class FakeBookie:
    """Takes one connection, and says what it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, say: Callable[[socket.socket], None], *, proves: bool = True) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._say = say
        self._proves = proves
        self.address = f"127.0.0.1:{free_port()}"
        knows(monkeypatch, self.address, ScanDoor("127.0.0.1", self._listener.getsockname()[1], TOKEN))
        self.requests: list[bytes] = []
        self.told = b""  # though it has proved nothing
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> FakeBookie:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # a thread that still waits for somebody goes on
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        with suppress(OSError), self._listener.accept()[0] as connection:
            nonce = connection.recv(SCAN_NONCE_BYTES, socket.MSG_WAITALL)
            if not self._proves:
                self._say(connection)
                connection.settimeout(30)
                while told := connection.recv(1 << 16):
                    self.told += told
                return
            connection.sendall(scan_proof(TOKEN, nonce))
            head = connection.recv(SCAN_TOKEN_BYTES + REQUEST_LENGTH.size, socket.MSG_WAITALL)
            assert head[:SCAN_TOKEN_BYTES] == TOKEN
            self.requests.append(connection.recv(REQUEST_LENGTH.unpack_from(head, SCAN_TOKEN_BYTES)[0], socket.MSG_WAITALL))
            self._say(connection)


def test_an_end_before_the_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    body = encode_read_answer(ReadAnswer((groups_of(10)[0],), (), 10))

    def say(connection: socket.socket) -> None:
        connection.sendall(FRAME_HEAD.pack(FrameKind.ANSWER, len(body), 0, 0) + body)
        connection.sendall(FRAME_HEAD.pack(FrameKind.BLOCKS, 1000, 10, 19) + bytes(999))

    with FakeBookie(monkeypatch, say) as bookie:
        got: list[ReadAnswer] = []
        with pytest.raises(BookieUnavailableError, match="ended before the answer"):
            got.extend(answer for answer, _ in BookieAnswers("a", bookie.address, REQUEST))
        assert entry_ids(got) == list(range(10)), "what came before is given out"


@pytest.mark.parametrize(
    ("frame", "what"),
    [
        pytest.param(FRAME_HEAD.pack(9, 0, 0, 0), "kind 9", id="kind"),
        pytest.param(FRAME_HEAD.pack(FrameKind.BLOCKS, 1 << 30, 0, 9), "1073741824 bytes", id="size"),
        pytest.param(FRAME_HEAD.pack(FrameKind.ANSWER, 3, 0, 0) + b"xyz", "format 120", id="answer"),
    ],
)
def test_what_is_no_frame_is_refused(frame: bytes, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeBookie(monkeypatch, lambda connection: connection.sendall(frame)) as bookie:
        with pytest.raises(MalformedGroupError, match=what):
            answers_of(bookie.address)


def _says_nothing(connection: socket.socket) -> None:
    pass


def _says_hello(connection: socket.socket) -> None:
    connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n" * 10)


def _ends(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("one", ["by the port"], indirect=True)
@pytest.mark.parametrize("stranger", [_says_nothing, _says_hello, _ends])
def test_a_stranger_behind_the_port_of_before_is_no_bookie(
    stranger: Callable[[socket.socket], None], one: ScanBookies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan_connection, "CONNECT_TIMEOUT_S", 0.2)
    address = one.addresses["a"]
    with FakeBookie(monkeypatch, stranger, proves=False) as fake:
        door = known_door(fake.address)[1]
        assert door is not None
        knows(monkeypatch, address, door)
        answers = answers_of(address)
        assert entry_ids(answers) == list(range(100))
        assert not any(answer.missing for answer in answers)
        assert came_past_grpc(answers), "its port is asked for anew"
    assert fake.told == b"", "neither the token nor the ticket"


@pytest.mark.parametrize("end", [FRAME_HEAD.pack(9, 0, 0, 0), FRAME_HEAD.pack(FrameKind.BLOCKS, 50, 0, 9) + bytes(50), b""])
def test_after_an_answer_that_went_wrong_the_bookie_is_asked_by_grpc(end: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeBookie(monkeypatch, lambda connection: connection.sendall(end)) as bookie:
        with pytest.raises((MalformedGroupError, BookieUnavailableError)):
            answers_of(bookie.address)
        assert known_door(bookie.address) == (True, None)


def test_cancelling_ends_a_wait_and_a_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()
    over = threading.Event()

    def silent(connection: socket.socket) -> None:
        asked.set()
        over.wait(30)

    with FakeBookie(monkeypatch, silent) as bookie:
        answers = BookieAnswers("a", bookie.address, REQUEST)
        failures: list[BaseException] = []

        def read() -> None:
            try:
                list(answers)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=read)
        thread.start()
        assert asked.wait(30)
        answers.cancel()
        over.set()
        thread.join(30)
        assert not thread.is_alive()
        assert len(failures) == 1
    never = BookieAnswers("a", f"127.0.0.1:{free_port()}", REQUEST)
    never.cancel()
    with pytest.raises(CancelledAnswersError):
        list(never)


def blocks_of(groups: Sequence[EntryGroup]) -> bytearray:
    parts: list[Buffer] = []
    for group in groups:
        encode_block_to(parts, group)
    return bytearray(b"".join(parts))


def test_an_answer_ends_where_blocks_are_damaged() -> None:
    groups = groups_of(30)
    whole = blocks_of(groups)
    one_bytes = len(whole) // 3

    def answer(data: bytearray, first: int = 0, last: int = 29) -> ReadAnswer:
        return stored_answer(memoryview(data), LEDGER, first, last)

    assert answer(whole) == ReadAnswer(tuple(groups), (), 30)
    for at in (0, 8, 16, 24, 28):  # magic, ledger, first entry, entries, bytes
        spoilt = bytearray(whole)
        spoilt[one_bytes + at] ^= 0x40
        assert answer(spoilt) == ReadAnswer((groups[0],), (), 10), at
    spoilt[one_bytes + 28] ^= 0x40
    spoilt[one_bytes + 32] ^= 0x40  # the end of an entry, which only digests can tell
    with pytest.raises(DigestMismatchError):
        answer(spoilt).groups[1].verify()
    assert answer(whole[:-1]).next_entry_id == 20
    assert answer(whole, last=25).groups == tuple(groups[:2]), "more than it says is not taken"
    assert answer(whole, last=35).next_entry_id == 30
    assert answer(whole[one_bytes:], first=0) == ReadAnswer((), (), 0)
    assert answer(bytearray()) == ReadAnswer((), (), 0)
