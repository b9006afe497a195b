"""Bookies on this machine: blocks are read from their entry logs, and what is not right there is an error like any other."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from cepheid_bookie.disk import DiskFile
from cepheid_bookie.entry_log import list_logs, log_path
from cepheid_rpc import (
    FRAME_HEAD,
    RUN_PLACE,
    BookieUnavailableError,
    FrameKind,
    MalformedGroupError,
    ReadAnswer,
    ReadRequest,
    encode_read_request,
)
from cepheid_scan import (
    EntriesUnreadableError,
    ReadSettings,
    ScanCounters,
    bookie_channels,
    bookie_reads,
    entry_source,
    scan_connection,
)
from cepheid_scan.bookie_answers import BookieAnswers, stored_answer
from cepheid_scan.bookie_channels import ScanDoor, close_channels, known_door
from cepheid_scan.bookie_reads import BookieRead
from cepheid_scan.entry_source import EntrySource
from cepheid_scan.replica_order import Suspects
from cepheid_scan.scan_connection import ScanConnection, dial_on_machine
from tests.scan.scan_bookies import LEDGER, ScanBookies, groups_of, piece_of

REQUEST = ReadRequest(LEDGER, 0, 199, max_bytes=1 << 40, scan=True)
LOG = bytes(range(256)) * 16


@pytest.fixture
def bookies(tmp_path: Path) -> Iterator[ScanBookies]:
    """One, "a", whose ledger lies in several entry logs."""
    with ScanBookies(tmp_path, ["a"], log_bytes=100_000) as one:
        for group in groups_of(200):
            one.add(group)
            one.checkpoint()
        yield one
    close_channels()


def answers_of(bookies: ScanBookies) -> list[ReadAnswer]:
    return [answer for answer, _ in BookieAnswers("a", bookies.addresses["a"], REQUEST)]


def entries_of(bookies: ScanBookies) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    for answer in answers_of(bookies):
        assert not answer.missing
        for group in answer.groups:
            group.verify()
            for entry_id in range(group.first_entry_id, group.last_entry_id + 1):
                found[entry_id] = bytes(group.payload(entry_id))
    return found


def log_descriptors() -> list[str]:
    """That only read: the bookie's own write, too."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            if ".log" in target and fcntl.fcntl(int(descriptor), fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                found.append(descriptor)
    return found


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_who_is_on_the_machine_reads_the_logs_and_gets_what_the_port_gives(
    bookies: ScanBookies, monkeypatch: pytest.MonkeyPatch
) -> None:
    bookie = bookies.bookies["a"]
    by_log = entries_of(bookies)
    wait_for(lambda: bookie.statistics().scan_shared_bytes == bookie.statistics().scan_sent_bytes)
    statistics = bookie.statistics()
    assert statistics.scan_shared_bytes > 200_000
    assert len(list_logs(bookie._directories.data)) > 2, "more logs than one"
    monkeypatch.setattr(scan_connection, "_ON_MACHINE", False)
    assert entries_of(bookies) == by_log
    assert by_log.keys() == set(range(200))
    assert bookie.statistics().scan_shared_bytes == statistics.scan_shared_bytes
    assert bookie.statistics().scan_sent_bytes == 2 * statistics.scan_sent_bytes


def test_no_descriptor_stays_open(bookies: ScanBookies) -> None:
    entries_of(bookies)
    before = log_descriptors()
    for _ in range(3):
        entries_of(bookies)
        given_up = iter(BookieAnswers("a", bookies.addresses["a"], REQUEST))
        next(given_up)
        assert len(log_descriptors()) > len(before)
        del given_up
    wait_for(lambda: log_descriptors() == before)  # the bookie is of this process, too, and closes its own when they are sent


def test_a_log_that_is_deleted_meanwhile_is_read_all_the_same(bookies: ScanBookies) -> None:
    answers_of(bookies)
    _, door = known_door(bookies.addresses["a"])
    assert door is not None
    connection = dial_on_machine(door)
    assert connection is not None
    with connection:
        connection.ask(door.token, encode_read_request(REQUEST))
        kind, size_bytes, first, last = connection.head()
        assert kind == FrameKind.PLACE
        logs = list_logs(bookies.bookies["a"]._directories.data)
        bookies.delete(LEDGER, "a")
        assert bookies.call(bookies.bookies["a"].reclaim())[:1] == logs[:1]
        answer = stored_answer(connection.body(kind, size_bytes), LEDGER, first, last)
    assert not answer.missing
    for group in answer.groups:
        group.verify()


def test_a_bookie_that_turns_its_machine_away_is_read_by_its_port(bookies: ScanBookies, monkeypatch: pytest.MonkeyPatch) -> None:
    """Because the process is another user's; or because nobody listens on that socket, as in another container."""
    monkeypatch.setattr("cepheid_bookie.scan_server._may_read_logs", lambda _: False)
    assert len(entries_of(bookies)) == 200
    monkeypatch.setattr(scan_connection, "local_scan_address", lambda _: "\0nobody")
    assert len(entries_of(bookies)) == 200
    statistics = bookies.bookies["a"].statistics()
    assert statistics.scan_shared_bytes == 0
    assert statistics.scan_sent_bytes > 400_000


def cut_off(file: DiskFile) -> None:
    """As when the disk gives an error from there on."""
    file.truncate(file.size() // 2)


def flip_a_head(file: DiskFile) -> None:
    """Of a block in the middle."""
    place = file.pread(file.size(), 0).index(b"CPBK", file.size() // 3)
    file.pwrite(b"XXXX", place)


def flip_a_payload(file: DiskFile) -> None:
    place = file.pread(file.size(), 0).index(b"~~~~", file.size() // 3)
    file.pwrite(b"~~X~", place)


@pytest.mark.parametrize("damage", [cut_off, flip_a_head, flip_a_payload])
def test_what_is_damaged_on_disk_costs_what_it_costs_by_grpc(
    damage: Callable[[DiskFile], None], bookies: ScanBookies, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = bookies.bookies["a"]._directories.data
    log_id = max(list_logs(disk), key=lambda log_id: disk.open(log_path(log_id)).size())
    file = disk.open(log_path(log_id))
    damage(file)
    file.close()
    found: dict[str, dict[int, bytes]] = {}
    for way in ("this machine", "port", "gRPC"):
        close_channels()
        monkeypatch.setattr(scan_connection, "_ON_MACHINE", way == "this machine")
        if way == "gRPC":
            monkeypatch.setitem(bookie_channels._doors, bookies.addresses["a"], (None, time.monotonic() + 600))
        monkeypatch.setattr(entry_source, "_suspects", Suspects())
        found[way] = undamaged(bookies)
    assert 100 < len(found["gRPC"]) < 200
    assert found["this machine"] == found["gRPC"]
    assert found["port"] == found["gRPC"]


def undamaged(bookies: ScanBookies) -> dict[int, bytes]:
    """What is left of the ledger for who leaves damage out; what is only unreadable here counts as that."""
    settings = ReadSettings(unreachable_s=0.1, read_attempts=1, decode_bytes=1)
    source = EntrySource(
        bookies.addresses, settings=settings, ticket=b"", counters=ScanCounters(), replan=None, damaged_as_empty=True
    )
    found: dict[int, bytes] = {}
    entry_id = 0
    while entry_id <= 199:
        try:
            for group in source.read(piece_of(entry_id, 199, (0, "a"))):
                entry_id = group.last_entry_id + 1
                found |= {each: bytes(group.payload(each)) for each in range(group.first_entry_id, entry_id)}
        except EntriesUnreadableError as error:
            entry_id = int(error.facts["entry_id"]) + 1
    return {entry_id: payload for entry_id, payload in found.items() if payload}


def connection_that_gets(*frames: tuple[bytes, bool]) -> tuple[ScanConnection, Callable[[], None]]:
    """Frames, and whether a log of `LOG` goes with each."""
    here, there = socket.socketpair(socket.AF_UNIX)
    with tempfile.TemporaryFile() as log:
        log.write(LOG)
        log.flush()
        for frame, with_log in frames:
            socket.send_fds(there, [frame], [log.fileno()] if with_log else [])
    there.shutdown(socket.SHUT_WR)
    return ScanConnection(here), there.close


def place(offset: int, size_bytes: int) -> bytes:
    return FRAME_HEAD.pack(FrameKind.PLACE, RUN_PLACE.size, 0, 9) + RUN_PLACE.pack(offset, size_bytes)


def test_places_are_in_the_log_that_came_last() -> None:
    connection, close = connection_that_gets((place(10, 20), True), (place(500, 7), False), (place(0, 4096), True))
    with connection:
        for start, size in ((10, 20), (500, 7), (0, 4096)):
            kind, size_bytes, *_ = connection.head()
            assert bytes(connection.body(kind, size_bytes)) == LOG[start : start + size]
        with pytest.raises(ConnectionError, match="ended before"):
            connection.head()
    close()


@pytest.mark.parametrize(
    ("frame", "with_log", "error", "what"),
    [
        pytest.param(place(0, 10), False, MalformedGroupError, "without a log", id="no log"),
        pytest.param(place(0, 1 << 30), True, MalformedGroupError, "1073741824 bytes", id="size"),
        pytest.param(place(2**63 - 9, 10), True, MalformedGroupError, "a place at", id="offset"),
        pytest.param(place(4090, 10), True, OSError, "ends at 4096, 4 bytes before", id="end"),
        pytest.param(FRAME_HEAD.pack(FrameKind.PLACE, 3, 0, 9) + b"xyz", True, MalformedGroupError, "3 bytes", id="no place"),
    ],
)
def test_a_place_that_makes_no_sense_is_refused(frame: bytes, with_log: bool, error: type[Exception], what: str) -> None:
    connection, close = connection_that_gets((frame, with_log))
    with connection:
        kind, size_bytes, *_ = connection.head()
        with pytest.raises(error, match=what):
            connection.body(kind, size_bytes)
    close()


def test_a_process_without_files_left_says_so_and_reads_no_other_log() -> None:
    connection, close = connection_that_gets((place(0, 10), True), (place(500, 7), True))
    with connection:
        kind, size_bytes, *_ = connection.head()
        connection.body(kind, size_bytes)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        try:
            with pytest.raises(OSError, match="cannot open more files"):
                connection.head()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    close()


def test_a_disk_that_does_not_answer_hangs_nobody(bookies: ScanBookies, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it end what waits for it: the thread stays until the disk answers."""
    answers = threading.Event()
    preadv = os.preadv

    def hang(*arguments: Any) -> int:
        assert answers.wait(60)
        return preadv(*arguments)

    monkeypatch.setattr(scan_connection.os, "preadv", hang)
    monkeypatch.setattr(bookie_reads, "_END_S", 0.05)
    before = log_descriptors()
    read = BookieRead("a", bookies.addresses["a"], REQUEST, read_ahead_bytes=1 << 20, verify=True)
    with pytest.raises(BookieUnavailableError, match=r"no answer within 0\.2 s"):
        read.next_chunk(0.2)
    read.close()
    assert read._thread.is_alive()
    answers.set()
    read._thread.join(30)
    assert not read._thread.is_alive()
    wait_for(lambda: log_descriptors() == before)


def test_nobody_is_on_a_machine_that_has_no_such_socket() -> None:
    assert dial_on_machine(ScanDoor("127.0.0.1", 1, bytes(16))) is None
