"""Scans past gRPC: what comes over the connection, and who is not answered. Which blocks are sent as they lie on disk."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from cepheid_bookie import Bookie, RealDisk, entry_reader, scan_server
from cepheid_bookie.block_index import BlockRef
from cepheid_bookie.entry_log import list_logs, log_path
from cepheid_bookie.entry_reader import StoredRun, find_run
from cepheid_bookie.errors import PortInUseError
from cepheid_bookie.memory_index import MemoryBlockIndex
from cepheid_bookie.scan_server import ScanServer
from cepheid_ports import Ports
from cepheid_rpc import (
    FRAME_HEAD,
    MAX_SCAN_REQUEST_BYTES,
    PLACES_AHEAD,
    REQUEST_LENGTH,
    RUN_PLACE,
    SCAN_PROOF_BYTES,
    FrameKind,
    ReadAnswer,
    ReadRequest,
    Status,
    decode_read_answer,
    encode_read_request,
    local_scan_address,
    scan_proof,
    stored_groups,
)
from tests.bookie.bookie_support import KiB, Machine, added, entries_of, group_of, read_all, small_settings
from tests.support import wait_until

NONCE = bytes(range(16))
BIG = small_settings(write_cache_bytes=32 << 20, block_bytes=300 * KiB, log_bytes=64 << 20)
REQUEST = ReadRequest(7, 0, 599, max_bytes=1 << 40, scan=True)
ALL = ReadRequest(7, 0, 3999, max_bytes=1 << 40, scan=True)


@pytest.fixture(autouse=True)
def _short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry_reader, "_RUN_BYTES", 1)


class Reader:
    """A client of its own: bytes, and nothing that the product's reader makes of them."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def ask(self, server: ScanServer, request: ReadRequest, *, token: bytes | None = None) -> None:
        body = encode_read_request(request)
        self.writer.write(NONCE + (token or server.token) + REQUEST_LENGTH.pack(len(body)) + body)

    async def frames(self) -> list[tuple[FrameKind, int, int, bytes]]:
        """All behind the proof, with the last one; raises IncompleteReadError when the connection ends before it."""
        found = []
        await self.reader.readexactly(SCAN_PROOF_BYTES)
        while True:
            kind, size_bytes, first, last = FRAME_HEAD.unpack(await self.reader.readexactly(FRAME_HEAD.size))
            found.append((FrameKind(kind), first, last, await self.reader.readexactly(size_bytes)))
            if kind == FrameKind.END:
                assert await self.reader.read() == b"", "a connection carries one answer"
                return found

    async def is_turned_away(self, proof: bytes = b"") -> bool:
        """The connection ends without an answer; by a reset if something that was sent is left unread."""
        try:
            return await self.reader.read() == proof
        except ConnectionResetError:
            return True


@asynccontextmanager
async def serving(bookie: Bookie, host: str = "127.0.0.1") -> AsyncIterator[ScanServer]:
    server = ScanServer(bookie, host, 0, Ports())
    await server.start()
    try:
        yield server
    finally:
        await server.aclose()


@asynccontextmanager
async def reader_of(server: ScanServer, host: str = "127.0.0.1") -> AsyncIterator[Reader]:
    reader, writer = await asyncio.open_connection(host, server.port)
    try:
        yield Reader(reader, writer)
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()  # else the loop ends before, and the transport is found unclosed by a later test


@asynccontextmanager
async def reader_on_machine(server: ScanServer) -> AsyncIterator[Reader]:
    reader, writer = await asyncio.open_unix_connection(local_scan_address(server.token))
    try:
        yield Reader(reader, writer)
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def asked(server: ScanServer, request: ReadRequest) -> list[tuple[FrameKind, int, int, bytes]]:
    async with reader_of(server) as reader:
        reader.ask(server, request)
        return await reader.frames()


async def store_more_than_connections_buffer(bookie: Bookie) -> None:
    for first in range(0, 4000, 400):
        await added(bookie, *[group_of(7, start, 20, size=5_000) for start in range(first, first + 400, 20)])
        await bookie.checkpoint()


def told(frames: list[tuple[FrameKind, int, int, bytes]], first: int) -> tuple[dict[int, bytes], dict[int, Status]]:
    """Entries, and why others are missing; fails unless each frame goes on where the one before ended."""
    entries: dict[int, bytes] = {}
    missing: dict[int, Status] = {}
    due = first
    for kind, run_first, run_last, body in frames[:-1]:
        if kind is FrameKind.BLOCKS:
            groups = list(stored_groups(memoryview(body)))
            assert (run_first, groups[0].first_entry_id, groups[-1].last_entry_id) == (due, due, run_last)
            answer = ReadAnswer(tuple(groups), (), run_last + 1)
        else:
            answer = decode_read_answer(body)
        for group in answer.groups:
            group.verify()
        entries |= entries_of(answer.groups)
        for run in answer.missing:
            missing |= dict.fromkeys(range(run.first_entry_id, run.last_entry_id + 1), run.status)
        assert sorted([*entries, *missing])[-1] == answer.next_entry_id - 1
        due = answer.next_entry_id
    return entries, missing


async def test_blocks_cached_entries_and_gaps_come_as_a_read_gives_them() -> None:
    async with Machine(settings=BIG).bookie() as bookie, serving(bookie) as server:
        await added(bookie, *[group_of(7, first, 20, size=5_000) for first in (*range(0, 200, 20), *range(240, 500, 20))])
        await bookie.checkpoint()
        await added(bookie, group_of(7, 520, 10), group_of(7, 540, 10))
        for first, last in ((0, 599), (13, 177), (199, 201), (200, 239), (530, 545), (0, 0)):
            request = ReadRequest(7, first, last, max_bytes=1 << 40, scan=True)
            frames = await asked(server, request)
            assert frames[-1][0] is FrameKind.END
            entries, missing = await read_all(bookie, 7, first, last)
            assert told(frames, first) == (entries, missing)
        kinds = [kind for kind, *_ in await asked(server, REQUEST)]
        assert kinds.count(FrameKind.BLOCKS) >= 2
        assert kinds.count(FrameKind.ANSWER) >= 1
        statistics = bookie.statistics()
        assert (statistics.scan_requests, statistics.open_scans) == (7, 0)
        assert statistics.scan_sent_bytes > 2 * 20 * 23 * 5_000


async def test_several_blocks_go_in_one_frame_up_to_the_size_of_a_chunk() -> None:
    async with Machine(settings=BIG).bookie() as bookie, serving(bookie) as server:
        await added(bookie, *[group_of(7, first, 20, size=5_000) for first in range(0, 600, 20)])
        await bookie.checkpoint()
        frames = await asked(server, REQUEST)
        sizes = [len(body) for _, _, _, body in frames[:-1]]
        assert all(kind is FrameKind.BLOCKS for kind, *_ in frames[:-1])
        assert 600 * KiB < max(sizes) <= 1 << 20
        assert bookie.statistics().scan_disk_bytes == sum(sizes)
        assert told(frames, 0)[0].keys() == set(range(600))


async def test_a_refusal_is_told_in_words() -> None:
    async with Machine(settings=BIG).bookie() as bookie, serving(bookie) as server:
        await added(bookie, group_of(7, 0, 5))
        bookie.authorize_reads(lambda ticket, *_: Status.OK if ticket == b"yes" else Status.UNAUTHORIZED)
        refused = told(await asked(server, ReadRequest(7, 0, 4, 1 << 40, scan=True)), 0)
        assert refused == ({}, dict.fromkeys(range(5), Status.UNAUTHORIZED))
        allowed = ReadRequest(7, 0, 4, 1 << 40, scan=True, ticket=b"yes")
        assert len(told(await asked(server, allowed), 0)[0]) == 5
        unknown = ReadRequest(8, 0, 4, 1 << 40, scan=True, ticket=b"yes")
        assert told(await asked(server, unknown), 0)[1] == dict.fromkeys(range(5), Status.NO_LEDGER)


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return socket.has_dualstack_ipv6()


@pytest.mark.skipif(not has_ipv6(), reason="the system has no IPv6")
async def test_all_addresses_of_a_machine_are_those_of_both_kinds() -> None:
    """As gRPC takes them on its port: else half of the readers would find one of the two closed."""
    async with Machine(settings=BIG).bookie() as bookie, serving(bookie, "::") as server:
        await added(bookie, group_of(7, 0, 5))
        for host in ("127.0.0.1", "::1"):
            async with reader_of(server, host) as reader:
                reader.ask(server, ReadRequest(7, 0, 4, 1 << 40, scan=True))
                assert len(told(await reader.frames(), 0)[0]) == 5, host
    async with Machine(settings=BIG).bookie() as bookie, serving(bookie, "::1") as server, reader_of(server, "::1") as reader:
        reader.ask(server, ReadRequest(7, 0, 4, 1 << 40, scan=True))
        assert told(await reader.frames(), 0)[1] == dict.fromkeys(range(5), Status.NO_LEDGER)


def no_requests() -> Iterator[tuple[str, bytes, str | None]]:
    """What is sent behind the token, and what the log says."""
    fenced = encode_read_request(ReadRequest(7, 0, 4, fence=True, master_key=bytes(16)))
    plain = encode_read_request(ReadRequest(7, 0, 4))
    endless = encode_read_request(ReadRequest(99, 0, 2**63 - 1, scan=True))
    yield "too long", REQUEST_LENGTH.pack(MAX_SCAN_REQUEST_BYTES + 1), "are taken"
    yield "garbage", REQUEST_LENGTH.pack(3) + b"xyz", ""
    yield "a fence", REQUEST_LENGTH.pack(len(fenced)) + fenced, "no scan"
    yield "a broker's read", REQUEST_LENGTH.pack(len(plain)) + plain, "no scan"
    yield "an end that has none behind it", REQUEST_LENGTH.pack(len(endless)) + endless, "not a range of entries"


@pytest.mark.parametrize(("what", "sent", "said"), [pytest.param(*case, id=case[0]) for case in no_requests()])
async def test_what_is_no_request_ends_the_connection(what: str, sent: bytes, said: str, caplog: pytest.LogCaptureFixture) -> None:
    async with Machine(settings=BIG).bookie() as bookie, serving(bookie) as server, reader_of(server) as reader:
        await added(bookie, group_of(7, 0, 5))
        reader.writer.write(NONCE + server.token + sent)
        assert await reader.is_turned_away(scan_proof(server.token, NONCE))
        assert bookie.statistics().scan_requests == 0
    (record,) = [record for record in caplog.records if record.message == "scan_server.request_refused"]
    assert said in record.__dict__["error"]


async def test_whoever_means_another_bookie_or_says_nothing_is_not_answered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scan_server, "_REQUEST_S", 0.05)
    async with Machine(settings=BIG).bookie() as bookie, serving(bookie) as server, serving(bookie) as other:
        assert server.token != other.token
        async with reader_of(server) as wrong, reader_of(server) as silent, reader_of(server) as gone:
            wrong.ask(server, REQUEST, token=other.token)
            gone.writer.write(NONCE[:5])
            gone.writer.write_eof()
            for reader, proof in ((wrong, scan_proof(server.token, NONCE)), (silent, b""), (gone, b"")):
                assert await reader.is_turned_away(proof)
        assert bookie.statistics().scan_requests == 0
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_reader_that_does_not_read_holds_its_place_and_no_thread() -> None:
    async with Machine(settings=BIG).bookie() as bookie, serving(bookie) as server:
        await store_more_than_connections_buffer(bookie)
        async with reader_of(server) as slow:
            slow.ask(server, ALL)
            await wait_until(lambda: bookie.statistics().scan_sent_bytes > 0)
            assert len(told(await asked(server, REQUEST), 0)[0]) == 600
            assert bookie.statistics().open_scans == 1
            frames = await slow.frames()
            assert len(told(frames, 0)[0]) == 4000
        await wait_until(lambda: bookie.statistics().open_scans == 0)


async def test_a_reader_that_goes_away_and_a_server_that_stops_leave_no_scan() -> None:
    async with Machine(settings=BIG).bookie() as bookie:
        await store_more_than_connections_buffer(bookie)
        server = ScanServer(bookie, "127.0.0.1", 0, Ports())
        await server.start()
        async with reader_of(server) as gone:
            gone.ask(server, ALL)
            await wait_until(lambda: bookie.statistics().open_scans == 1)
            gone.writer.transport.abort()
            await wait_until(lambda: bookie.statistics().open_scans == 0)
        async with reader_of(server) as waiting:
            waiting.ask(server, ALL)
            await wait_until(lambda: bookie.statistics().open_scans == 1)
            await server.aclose()
            assert bookie.statistics().open_scans == 0
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await waiting.frames()
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", server.port)


async def test_half_a_run_is_never_taken_for_a_whole_one(caplog: pytest.LogCaptureFixture) -> None:
    """The log goes while it is sent: the connection ends, and so does a frame whose head was sent."""
    machine = Machine(settings=BIG)
    async with machine.bookie() as bookie, serving(bookie) as server:
        await added(bookie, *[group_of(7, first, 20, size=5_000) for first in range(0, 600, 20)])
        await bookie.checkpoint()
        (log_id,) = [log_id for log_id in list_logs(machine.disk) if machine.disk.open(log_path(log_id)).size() > 1 << 20]
        machine.disk.open(log_path(log_id)).truncate(1 << 20)
        async with reader_of(server) as reader:
            reader.ask(server, REQUEST)
            with pytest.raises(asyncio.IncompleteReadError):
                await reader.frames()
        assert bookie.statistics().open_scans == 0
        assert bookie.statistics().read_unreadable_blocks == 1
    (warning,) = [record for record in caplog.records if record.message == "scan_server.log_unreadable"]
    assert "cannot be read" in warning.__dict__["error"]


async def test_those_without_a_token_have_a_bound_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_server, "_STRANGERS", 2)
    async with Machine(settings=BIG).bookie() as bookie, serving(bookie) as server:
        await added(bookie, group_of(7, 0, 5))
        request = ReadRequest(7, 0, 4, 1 << 40, scan=True)
        async with reader_of(server) as first, reader_of(server), reader_of(server) as third:
            assert await third.is_turned_away()
            first.ask(server, request)
            assert len(told(await first.frames(), 0)[0]) == 5
            assert len(told(await asked(server, request), 0)[0]) == 5, "its place is free"


@pytest.mark.parametrize("bound", ["_STRANGERS_PER_ADDRESS", "_SHARE_OF_ADDRESS"])
async def test_one_address_has_few_places(monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    monkeypatch.setattr("cepheid_security.connection_limits.is_loopback", lambda _address: False)
    monkeypatch.setattr(scan_server, bound, 1 if bound == "_STRANGERS_PER_ADDRESS" else scan_server._CONNECTIONS)
    async with Machine(settings=BIG).bookie() as bookie, serving(bookie) as server:
        async with reader_of(server), reader_of(server) as second:
            assert await second.is_turned_away()


@pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")
async def test_those_of_other_machines_do_not_take_places_away_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(scan_server, "_STRANGERS", 2)
    machine = Machine(settings=BIG, disk=RealDisk(tmp_path))  # type: ignore[arg-type]
    async with machine.bookie() as bookie, serving(bookie) as server:
        await added(bookie, group_of(7, 0, 5))
        async with reader_of(server), reader_of(server), reader_of(server) as third:
            assert await third.is_turned_away()
            async with reader_on_machine(server) as reader:
                reader.ask(server, ReadRequest(7, 0, 4, 1 << 40, scan=True))
                assert len(told(await reader.frames(), 0)[0]) == 5


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")
async def test_few_places_are_told_that_nobody_has_read(tmp_path: Path) -> None:
    """The scan stays open: what is deleted meanwhile takes space until they are, and somebody should see by whom."""
    machine = Machine(settings=BIG, disk=RealDisk(tmp_path))  # type: ignore[arg-type]
    async with machine.bookie() as bookie, serving(bookie) as server, reader_on_machine(server) as reader:
        await store_more_than_connections_buffer(bookie)
        reader.ask(server, ALL)
        await reader.reader.readexactly(SCAN_PROOF_BYTES)
        unread: list[int] = []
        read_bytes = places = 0
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(0.05 if len(unread) == PLACES_AHEAD else 30):
                    kind, size_bytes, *_ = FRAME_HEAD.unpack(await reader.reader.readexactly(FRAME_HEAD.size))
                    if kind == FrameKind.END:
                        break
                    assert (kind, size_bytes) == (FrameKind.PLACE, RUN_PLACE.size)
                    unread.append(RUN_PLACE.unpack(await reader.reader.readexactly(RUN_PLACE.size))[1])
                    places += 1
                    assert len(unread) <= PLACES_AHEAD
                    continue
            statistics = bookie.statistics()
            assert (statistics.open_scans, statistics.scan_shared_bytes) == (1, read_bytes)
            reader.writer.write(b"\1")
            read_bytes += unread.pop(0)
        assert places > 2 * PLACES_AHEAD
        reader.writer.write(b"\1" * len(unread))
        await wait_until(lambda: bookie.statistics().scan_shared_bytes == bookie.statistics().scan_sent_bytes)
        assert await reader.reader.read() == b"", "the connection ends when all is read"


def test_scans_leave_a_process_most_of_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_server.resource, "getrlimit", lambda _: (1024, 1024))
    assert scan_server._connection_limit() == 256
    monkeypatch.setattr(scan_server.resource, "getrlimit", lambda _: (1 << 20, 1 << 20))
    assert scan_server._connection_limit() == scan_server._CONNECTIONS


async def test_connections_have_a_bound_and_a_port_in_use_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_server, "_CONNECTIONS", 1)
    async with Machine(settings=BIG).bookie() as bookie, serving(bookie) as server:
        async with reader_of(server), reader_of(server) as second:
            assert await second.is_turned_away()
        with pytest.raises(PortInUseError, match="for scans"):
            await ScanServer(bookie, "127.0.0.1", server.port, Ports()).start()
        await added(bookie, group_of(7, 0, 5))
        while True:  # until the first one's end is noticed
            try:
                assert len(told(await asked(server, ReadRequest(7, 0, 4, 1 << 40, scan=True)), 0)[0]) == 5
            except (asyncio.IncompleteReadError, ConnectionError):
                await asyncio.sleep(0)
            else:
                break


def test_a_run_is_blocks_that_follow_each_other_and_were_all_asked_for() -> None:
    index = MemoryBlockIndex()
    blocks = [
        BlockRef(7, 0, 9, 1, 4096, 1000),
        BlockRef(7, 10, 19, 1, 5096, 1000),
        BlockRef(7, 20, 29, 1, 6096, 1000),
        BlockRef(7, 30, 39, 1, 8192, 1000),  # another flush
        BlockRef(7, 40, 49, 2, 9192, 1000),  # another log
        BlockRef(7, 60, 69, 2, 10192, 1000),  # behind a gap
    ]
    index.write(blocks, {})

    def run(first: int, last: int, max_bytes: int = 1 << 20) -> tuple[int, int, int, int] | None:
        found = find_run(index, 7, first, last, max_bytes)
        return None if found is None else (found.last_entry_id, found.offset, found.size_bytes, found.blocks)

    assert find_run(index, 7, 0, 99, 1 << 20) == StoredRun(0, 29, 1, 4096, 3000, 3)
    assert run(0, 28) == (19, 4096, 2000, 2), "not a block of which less is wanted"
    assert run(0, 99, 2500) == (19, 4096, 2000, 2)
    assert run(0, 99, 10) == (9, 4096, 1000, 1), "one at least"
    assert run(5, 99) is None
    assert run(30, 99) == (39, 8192, 1000, 1)
    assert run(40, 99) == (49, 9192, 1000, 1)
    assert run(50, 99) is None
    assert run(70, 99) is None
    assert run(0, 5) is None
