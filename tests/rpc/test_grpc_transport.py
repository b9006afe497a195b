"""The gRPC transport between GrpcConnection and BookieServer, over real sockets, with a bookie in memory."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import grpc
import grpc.aio
import pytest

from cepheid_bookie import grpc_server
from cepheid_bookie.grpc_server import BookieServer, PortInUseError
from cepheid_bookie.scan_server import ScannedBookie, ScanServer
from cepheid_bookie.settings import BookieServerSettings
from cepheid_ledger import LedgerSettings
from cepheid_ledger.grpc_connection import GrpcAddStream, GrpcConnection
from cepheid_ledger.recovery_stream import RecoveryStream
from cepheid_ports import Ports
from cepheid_rpc import (
    ADD,
    READ_LAC,
    RECOVER,
    SERVICE,
    AddAnswer,
    AddRequest,
    BookieUnavailableError,
    EntryGroup,
    ExplicitLac,
    LacAnswer,
    LacRequest,
    MessageKind,
    MissingEntries,
    ReadAnswer,
    ReadRequest,
    Status,
    decode_numbered,
    encode_add_answers,
    encode_add_message,
    encode_group,
    encode_lac_request,
    encode_numbered,
    encode_read_request,
    local_scan_address,
    method_path,
)
from tests.rpc.memory_bookie import MemoryBookie, QueueSource
from tests.support import wait_until

KEY = b"k" * 16


def group(ledger_id: int, first: int, *payloads: bytes) -> EntryGroup:
    return encode_group(ledger_id, first, first - 1, 0, payloads)


def add(ledger_id: int, first: int, *payloads: bytes) -> AddRequest:
    return AddRequest(group(ledger_id, first, *payloads), KEY)


def ok(ledger_id: int, first: int, last: int) -> AddAnswer:
    return AddAnswer(ledger_id, first, last, Status.OK)


async def read_status_in_the_end(connection: GrpcConnection) -> Status:
    deadline = asyncio.get_running_loop().time() + 10
    while True:
        try:
            return (await connection.read_lac(LacRequest(1, KEY))).status
        except BookieUnavailableError:
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.02)


def limits_of(timeout_s: float) -> LedgerSettings:
    """With which the transport itself waits for so long, twice as long as the ledger client."""
    half = timeout_s / 2
    return LedgerSettings(add_timeout_s=half, read_timeout_s=half, recovery_timeout_s=half, speculative_read_s=half)


@asynccontextmanager
async def served(
    bookie: MemoryBookie, settings: BookieServerSettings | None = None, timeout_s: float = 10.0
) -> AsyncIterator[tuple[BookieServer, GrpcConnection]]:
    server = BookieServer(bookie, "127.0.0.1", 0, settings)
    await server.start()
    limits = limits_of(timeout_s)
    connection = GrpcConnection("b1", f"127.0.0.1:{server.port}", limits)
    try:
        yield server, connection
    finally:
        await connection.aclose()
        await server.aclose()


async def test_adds_are_stored_and_answered_in_order() -> None:
    bookie, source = MemoryBookie(), QueueSource()
    async with served(bookie) as (_, connection):
        stream = connection.open_add_stream(source)
        sent = [add(7, 0, b"a", b"b"), add(7, 2, b"c"), add(9, 5, b"d" * 5_000_000)]
        source.waiting += sent
        stream.wake()
        await wait_until(lambda: len(source.answers) == 3)
        assert source.answers == [ok(7, 0, 1), ok(7, 2, 2), ok(9, 5, 5)]
        assert bookie.requests == sent
        assert not source.broken


async def test_strangers_are_cut_off_and_have_a_bound() -> None:
    server = BookieServer(MemoryBookie(), "127.0.0.1", 0, BookieServerSettings(handshake_timeout_s=0.3, max_connections=2))
    await server.start()
    try:
        silent = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(3)]
        async with asyncio.timeout(10):
            await silent[2][0].read()  # returns: there are two already
            for reader, _ in silent:
                while await reader.read(100):  # gRPC's settings, before its time limit
                    pass
        for _, writer in silent:
            writer.close()
        connection = GrpcConnection("b", f"127.0.0.1:{server.port}")
        assert await read_status_in_the_end(connection) is not None
        await connection.aclose()
    finally:
        await server.aclose()


async def test_what_waits_travels_together() -> None:
    bookie, source = MemoryBookie(), QueueSource()
    async with served(bookie) as (_, connection):
        stream = connection.open_add_stream(source)
        source.waiting += [add(1, entry_id, b"x" * 1000) for entry_id in range(500)]
        for _ in range(500):
            stream.wake()
        await wait_until(lambda: len(source.answers) == 500)
        assert source.messages == 1
        assert source.answer_messages == 1


async def test_a_group_larger_than_a_message_is_cut_and_arrives_whole() -> None:
    bookie, source = MemoryBookie(), QueueSource()
    async with served(bookie) as (_, connection):
        stream = connection.open_add_stream(source)
        source.waiting.append(add(1, 0, *[bytes([number]) * 1_000_000 for number in range(40)]))
        stream.wake()
        await wait_until(lambda: sum(a.last_entry_id - a.first_entry_id + 1 for a in source.answers) == 40)
        assert len(bookie.groups[1]) > 1
        assert [payload[0] for part in bookie.groups[1] for payload in part.payloads()] == list(range(40))


async def test_a_damaged_group_is_answered_so_and_never_stored() -> None:
    bookie, source = MemoryBookie(), QueueSource()
    async with served(bookie) as (_, connection):
        stream = connection.open_add_stream(source)
        damaged = bytearray(group(1, 3, b"payload").data)
        damaged[-1] ^= 1
        source.waiting += [
            add(1, 2, b"good"),
            AddRequest(EntryGroup(1, 3, [len(damaged)], bytes(damaged)), KEY),
            add(2, 0, b""),
        ]
        stream.wake()
        await wait_until(lambda: len(source.answers) == 3)
        assert AddAnswer(1, 3, 3, Status.BAD_DIGEST) in source.answers
        assert [request.group.first_entry_id for request in bookie.requests] == [2, 0]


async def test_unanswered_bytes_of_a_stream_are_bounded() -> None:
    bookie, source = MemoryBookie(), QueueSource()
    bookie.hold_answers = True
    async with served(bookie, BookieServerSettings(stream_in_flight_bytes=2_000_000)) as (server, connection):
        stream = connection.open_add_stream(source)
        source.waiting += [add(1, entry_id, b"x" * 500_000) for entry_id in range(100)]
        stream.wake()
        await wait_until(lambda: server.in_flight_bytes >= 2_000_000)
        await asyncio.sleep(0.05)  # time in which a server without a bound would go on
        assert server.in_flight_bytes < 3_500_000
        bookie.hold_answers = False
        bookie.release()
        await wait_until(lambda: len(source.answers) == 100)
        assert server.in_flight_bytes == 0


async def test_a_lac_comes_with_the_highest_entry() -> None:
    bookie = MemoryBookie()
    bookie.groups[4] = [group(4, 0, b"a", b"b")]
    async with served(bookie) as (_, connection):
        assert await connection.write_lac(ExplicitLac(4, 1, KEY)) is Status.OK
        answer = await connection.read_lac(LacRequest(4, KEY, fence=True))
        assert (answer.status, answer.last_add_confirmed, answer.explicit_lac) == (Status.OK, 0, 1)
        assert answer.highest_entry == bookie.groups[4][0].slice(1, 1)
        assert (await connection.read_lac(LacRequest(5, KEY))).status is Status.NO_LEDGER


async def test_a_read_streams_chunks_and_says_what_is_missing() -> None:
    bookie = MemoryBookie()
    bookie.groups[4] = [group(4, 0, b"a", b"b"), group(4, 2, b"c")]
    async with served(bookie) as (_, connection):
        chunks = [chunk async for chunk in connection.read(ReadRequest(4, 0, 3))]
        assert [list(chunk.groups) for chunk in chunks] == [[bookie.groups[4][0]], [bookie.groups[4][1]], []]
        (missing,) = chunks[-1].missing
        assert (missing.first_entry_id, missing.last_entry_id, missing.status) == (3, 3, Status.NO_ENTRY)


async def test_a_reader_that_does_not_read_stops_the_bookie_from_reading_on() -> None:
    bookie = MemoryBookie()
    payload = b"x" * 1_000_000
    bookie.groups[1] = [group(1, entry_id, payload) for entry_id in range(60)]
    async with served(bookie) as (_, connection):
        reading = connection.read(ReadRequest(1, 0, 59))
        await anext(reading)
        read = -1
        while read != bookie.chunks_read:  # until it stands still
            read = bookie.chunks_read
            await asyncio.sleep(0.1)
        assert bookie.chunks_read < 40
        await reading.aclose()  # type: ignore[attr-defined]
        await wait_until(lambda: bookie.reads_ended == 1)


# Recoveries, which share a stream


async def test_recoveries_that_begin_together_share_messages() -> None:
    bookie = MemoryBookie()
    for ledger_id in range(50):
        bookie.groups[ledger_id] = [group(ledger_id, 0, b"a", b"b")]
    async with served(bookie) as (server, connection):
        fences = await asyncio.gather(*(connection.read_lac(LacRequest(n, KEY, fence=True)) for n in range(51)))
        assert [answer.status for answer in fences] == [Status.OK] * 50 + [Status.NO_LEDGER]
        assert [fence.highest_entry for fence in fences[:50]] == [bookie.groups[n][0].slice(1, 1) for n in range(50)]
        reads = await asyncio.gather(*(read_all(connection, ReadRequest(n, 0, 4, fence=True)) for n in range(50)))
        assert [[list(chunk.groups) for chunk in chunks] for chunks in reads] == [[bookie.groups[n]] for n in range(50)]
        assert {chunks[0].missing for chunks in reads} == {(MissingEntries(2, 4, Status.NO_ENTRY),)}
        (stream,) = server._recovery_streams
        assert stream.messages_read <= 3


async def read_all(connection: GrpcConnection, request: ReadRequest) -> list[ReadAnswer]:
    return [chunk async for chunk in connection.read(request)]


@pytest.mark.parametrize("per_message", [1, 200])
async def test_answers_of_recoveries_that_wait_to_be_sent_are_bounded(per_message: int) -> None:
    """Here by a client that does not read, whether it asks in one message or in many."""
    bookie = MemoryBookie()
    for ledger_id in range(200):
        bookie.groups[ledger_id] = [group(ledger_id, 0, bytes(250_000))]
    async with served(bookie) as (server, _), grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stream = channel.stream_stream(method_path(RECOVER))()
        asked = [(n, encode_read_request(ReadRequest(n, 0, 0, fence=True))) for n in range(200)]
        for first in range(0, 200, per_message):
            await stream.write(encode_numbered(MessageKind.RECOVERY_REQUESTS, asked[first : first + per_message]))
        read = -1
        while read != bookie.chunks_read:  # until it stands still
            read = bookie.chunks_read
            await asyncio.sleep(0.1)
        (recoveries,) = server._recovery_streams
        assert recoveries.unsent_bytes <= grpc_server._UNSENT_BYTES
        assert bookie.chunks_read < 60  # gRPC holds some megabytes itself
        answered: set[int] = set()
        while len(answered) < 200:
            answered |= {number for number, _ in decode_numbered(await stream.read(), MessageKind.RECOVERY_ANSWERS)}
        stream.cancel()


async def test_a_message_with_more_recoveries_than_may_run_at_once_is_worked_on_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "_RECOVERIES_AT_ONCE", 10)
    bookie = MemoryBookie()
    bookie.speaks.clear()
    async with served(bookie) as (server, connection):
        fences = [asyncio.create_task(connection.read_lac(LacRequest(n, KEY, fence=True))) for n in range(100)]
        await wait_until(lambda: len(bookie.speaks._waiters) == 10)  # type: ignore[attr-defined]
        (recoveries,) = server._recovery_streams
        assert recoveries.at_once == 10
        bookie.speaks.set()
        assert {fence.status for fence in await asyncio.gather(*fences)} == {Status.NO_LEDGER}


async def test_a_long_recovery_read_gets_its_first_piece_from_the_stream_and_the_rest_as_any_read() -> None:
    bookie = MemoryBookie()
    payloads = [bytes([number]) * 200_000 for number in range(10)]
    bookie.groups[1] = [group(1, entry_id, payload) for entry_id, payload in enumerate(payloads)]
    async with served(bookie) as (_, connection):
        chunks = await read_all(connection, ReadRequest(1, 0, 20, fence=True))
        assert [bytes(payload) for chunk in chunks for part in chunk.groups for payload in part.payloads()] == payloads
        assert bookie.reads_ended == 2
        assert chunks[-1].missing[-1].last_entry_id == 20


async def test_a_bookie_of_an_older_release_takes_each_request_of_a_recovery_as_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "RECOVER", "NotKnownYet")
    bookie = MemoryBookie()
    bookie.groups[1] = [group(1, 0, b"a")]
    async with served(bookie) as (_, connection):
        fences = await asyncio.gather(*(connection.read_lac(LacRequest(1, KEY, fence=True)) for _ in range(3)))
        assert [fence.status for fence in fences] == [Status.OK] * 3
        assert (await read_all(connection, ReadRequest(1, 0, 0, fence=True)))[0].groups == (bookie.groups[1][0],)


async def test_a_bookie_that_is_upgraded_at_its_address_takes_recoveries_on_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as before:
        before.setattr(grpc_server, "RECOVER", "NotKnownYet")
        async with served(MemoryBookie()) as (server, connection):
            await connection.read_lac(LacRequest(1, KEY, fence=True))
            await server.aclose()
            before.undo()
            upgraded = BookieServer(MemoryBookie(), "127.0.0.1", server.port)
            await upgraded.start()
            assert await read_status_in_the_end(connection) is Status.NO_LEDGER
            assert (await connection.read_lac(LacRequest(1, KEY, fence=True))).status is Status.NO_LEDGER
            assert len(upgraded._recovery_streams) == 1
            await connection.aclose()
            await upgraded.aclose()


@pytest.mark.parametrize("failure", [AssertionError, asyncio.CancelledError])
async def test_one_recovery_that_a_bookie_cannot_answer_leaves_the_others_alone(failure: type[BaseException]) -> None:
    """CancelledError: of a task of the storage code that this one waited for."""

    class Broken(MemoryBookie):
        async def read_lac(self, request: LacRequest) -> LacAnswer:
            if request.ledger_id == 1:
                raise failure
            return await super().read_lac(request)

    async with served(Broken(), timeout_s=2.0) as (server, connection):
        fences = await asyncio.gather(*(connection.read_lac(LacRequest(n, KEY, fence=True)) for n in range(3)))
        assert [fence.status for fence in fences] == [Status.NO_LEDGER, Status.UNKNOWN, Status.NO_LEDGER]
        (recoveries,) = server._recovery_streams
        await wait_until(lambda: recoveries.at_once == 0)


async def test_a_fence_that_is_not_answered_in_time_does_not_keep_others_from_their_answers() -> None:
    class Slow(MemoryBookie):
        async def read_lac(self, request: LacRequest) -> LacAnswer:
            if request.ledger_id == 1:
                await asyncio.get_running_loop().create_future()
            return await super().read_lac(request)

    async with served(Slow(), BookieServerSettings(stop_grace_s=0.1), timeout_s=0.3) as (_, connection):
        late, answered = await asyncio.gather(
            *(connection.read_lac(LacRequest(n, KEY, fence=True)) for n in (1, 2)), return_exceptions=True
        )
        assert isinstance(late, BookieUnavailableError)
        assert "no answer in time" in str(late)
        assert isinstance(answered, LacAnswer)


class Hanging(MemoryBookie):
    """Does not answer fences of ledger 1. `hanging` counts those that it works on."""

    hanging = 0

    async def read_lac(self, request: LacRequest) -> LacAnswer:
        if request.ledger_id != 1:
            return await super().read_lac(request)
        self.hanging += 1
        try:
            return await asyncio.get_running_loop().create_future()
        finally:
            self.hanging -= 1


async def test_a_bookie_gives_up_recoveries_that_their_client_gave_up() -> None:
    """Cancelled by whoever waited, or not answered in time."""
    bookie = Hanging()
    async with served(bookie, BookieServerSettings(stop_grace_s=0.1), timeout_s=0.3) as (_, connection):
        cancelled = asyncio.create_task(connection.read_lac(LacRequest(1, KEY, fence=True)))
        await wait_until(lambda: bookie.hanging == 1)
        cancelled.cancel()
        await wait_until(lambda: bookie.hanging == 0)
        with pytest.raises(BookieUnavailableError, match="no answer in time"):
            await connection.read_lac(LacRequest(1, KEY, fence=True))
        await wait_until(lambda: bookie.hanging == 0)
        assert (await connection.read_lac(LacRequest(2, KEY, fence=True))).status is Status.NO_LEDGER


async def test_a_recovery_that_is_given_up_before_it_was_sent_never_is() -> None:
    class SlowCall:
        def __init__(self) -> None:
            self.sent: list[bytes] = []
            self.takes = asyncio.Event()

        async def write(self, message: bytes) -> None:
            self.sent += [bytes(request) for _, request in decode_numbered(message, MessageKind.RECOVERY_REQUESTS)]
            await self.takes.wait()

        async def read(self) -> bytes:
            return await asyncio.get_running_loop().create_future()

        def cancel(self) -> None: ...

    call = SlowCall()
    stream = RecoveryStream(call, "b1", 10.0)
    asking = [asyncio.create_task(stream.ask(b"first"))]
    await wait_until(lambda: bool(call.sent))
    asking += [asyncio.create_task(stream.ask(request)) for request in (b"given up", b"last")]
    await asyncio.sleep(0)
    asking[1].cancel()
    await asyncio.sleep(0)
    call.takes.set()
    await wait_until(lambda: len(call.sent) == 2)
    assert call.sent == [b"first", b"last"]
    await stream.aclose()
    await asyncio.gather(*asking, return_exceptions=True)


async def test_recoveries_under_way_when_the_bookie_stops_are_answered_and_later_ones_unavailable() -> None:
    bookie = MemoryBookie()
    bookie.speaks.clear()
    async with served(bookie) as (server, connection):
        fence = asyncio.create_task(connection.read_lac(LacRequest(1, KEY, fence=True)))
        await wait_until(lambda: any(stream.at_once for stream in server._recovery_streams))
        stopping = asyncio.create_task(server.aclose())
        await asyncio.sleep(0.05)
        bookie.speaks.set()
        await stopping
        assert (await fence).status is Status.NO_LEDGER
        with pytest.raises(BookieUnavailableError):
            await connection.read_lac(LacRequest(1, KEY, fence=True))


async def test_a_connection_that_is_abandoned_lets_its_recoveries_end() -> None:
    bookie = MemoryBookie()
    bookie.speaks.clear()
    async with served(bookie) as (server, connection):
        fence = asyncio.create_task(connection.read_lac(LacRequest(1, KEY, fence=True)))
        await wait_until(lambda: any(stream.at_once for stream in server._recovery_streams))
        abandoning = asyncio.create_task(connection.abandon("it is elsewhere"))
        await asyncio.sleep(0.05)
        bookie.speaks.set()
        assert (await fence).status is Status.NO_LEDGER
        await abandoning
        await wait_until(lambda: not server._recovery_streams)


@pytest.mark.parametrize("how", ["abandon", "aclose"])
async def test_a_long_recovery_read_that_is_overtaken_by_the_end_of_its_connection(how: str) -> None:
    """It has its first piece and needs a call for the rest: it has time for that, unless the whole process ends."""
    bookie = MemoryBookie()
    bookie.groups[1] = [group(1, entry_id, bytes(200_000)) for entry_id in range(10)]
    async with served(bookie) as (_, connection):
        chunks = connection.read(ReadRequest(1, 0, 9, fence=True))
        read = [await anext(chunks)]
        ending = asyncio.create_task(connection.abandon("it is elsewhere") if how == "abandon" else connection.aclose())
        await asyncio.sleep(0.05)
        if how == "abandon":
            read += [chunk async for chunk in chunks]
            assert sum(len(part) for chunk in read for part in chunk.groups) == 10
        else:
            with pytest.raises(BookieUnavailableError, match="the connection was closed"):
                await anext(chunks)
        await ending


async def test_a_fence_at_a_bookie_of_an_older_release_ends_though_its_connection_is_abandoned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grpc_server, "RECOVER", "NotKnownYet")
    async with served(MemoryBookie()) as (_, connection):
        fence = asyncio.create_task(connection.read_lac(LacRequest(1, KEY, fence=True)))
        await asyncio.sleep(0)
        abandoning = asyncio.create_task(connection.abandon("it is elsewhere"))
        assert (await fence).status is Status.NO_LEDGER
        await abandoning


async def test_an_abandoned_connection_closes_though_a_recovery_read_is_never_read_on() -> None:
    bookie = MemoryBookie()
    bookie.groups[1] = [group(1, entry_id, bytes(200_000)) for entry_id in range(10)]
    async with served(bookie, timeout_s=0.2) as (_, connection):
        chunks = connection.read(ReadRequest(1, 0, 9, fence=True))
        await anext(chunks)
        await connection.abandon("it is elsewhere")
        with pytest.raises(BookieUnavailableError, match="it is elsewhere"):
            await anext(chunks)


async def test_a_request_without_a_fence_ends_a_stream_of_recoveries_with_the_reason() -> None:
    async with served(MemoryBookie()) as (server, _), grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stream = channel.stream_stream(method_path(RECOVER))()
        await stream.write(encode_numbered(MessageKind.RECOVERY_REQUESTS, [(1, encode_lac_request(LacRequest(7, KEY)))]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "ledger 7 without a fence" in (caught.value.details() or "")


async def test_no_bookie_at_the_address_is_unavailable_not_a_negative() -> None:
    connection = GrpcConnection("b1", "127.0.0.1:1")
    source = QueueSource()
    source.waiting.append(add(1, 0, b"x"))
    connection.open_add_stream(source).wake()
    with pytest.raises(BookieUnavailableError, match=r"bookie b1 at 127.0.0.1:1: ReadLac failed: UNAVAILABLE"):
        await connection.read_lac(LacRequest(1, KEY))
    with pytest.raises(BookieUnavailableError):
        await connection.write_lac(ExplicitLac(1, 0, KEY))
    with pytest.raises(BookieUnavailableError):
        await anext(connection.read(ReadRequest(1, 0, 0)))
    await wait_until(lambda: bool(source.broken))
    assert isinstance(source.broken[0], BookieUnavailableError)
    await connection.aclose()
    assert len(source.broken) == 1


async def test_a_silent_bookie_breaks_the_stream_and_times_reads_out() -> None:
    bookie, source = MemoryBookie(), QueueSource()
    bookie.hold_answers = True
    bookie.speaks.clear()
    async with served(bookie, BookieServerSettings(stop_grace_s=0.1), timeout_s=0.3) as (_, connection):
        source.waiting.append(add(1, 0, b"x"))
        connection.open_add_stream(source).wake()
        with pytest.raises(BookieUnavailableError, match="no answer in time"):
            await anext(connection.read(ReadRequest(1, 0, 0)))
        with pytest.raises(BookieUnavailableError, match="DEADLINE_EXCEEDED"):
            await connection.read_lac(LacRequest(1, KEY))
        await wait_until(lambda: bool(source.broken))
        assert "no answer in time" in str(source.broken[0])
        bookie.speaks.set()


class SilentChannel:
    """A channel, and every call on it, to a bookie that never says anything."""

    def __init__(self, *_: object, **__: object) -> None:
        self.cancelled = False

    def __call__(self, *_: object, **__: object) -> SilentChannel:
        return SilentChannel()

    stream_stream = unary_unary = unary_stream = __call__

    async def write(self, _: bytes) -> None:
        pass

    async def read(self) -> bytes:
        await asyncio.get_running_loop().create_future()
        raise AssertionError("it was answered")

    def cancel(self) -> None:
        self.cancelled = True

    async def close(self, *_: object) -> None:
        pass


@pytest.mark.virtual_time
@pytest.mark.deadline(1000)
async def test_the_transport_never_gives_up_before_the_ledger_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its limits follow `add_timeout_s` and the longest of the timeouts for reads: they were 10 s, whatever those said."""
    monkeypatch.setattr("cepheid_ledger.grpc_connection._channel", SilentChannel)
    loop, source = asyncio.get_running_loop(), QueueSource()
    connection = GrpcConnection("b1", "127.0.0.1:1", LedgerSettings(add_timeout_s=30.0, recovery_timeout_s=40.0))
    source.waiting.append(add(1, 0, b"x"))
    connection.open_add_stream(source).wake()
    await asyncio.sleep(59)
    assert not source.broken
    await asyncio.sleep(20)
    assert "no answer in time" in str(source.broken)
    asked_at = loop.time()
    with pytest.raises(BookieUnavailableError, match="no answer in time"):
        await anext(connection.read(ReadRequest(1, 0, 0)))
    assert loop.time() - asked_at == pytest.approx(80)
    await connection.aclose()


def test_limits_of_the_transport_are_ten_seconds_by_default() -> None:
    assert (LedgerSettings().silent_stream_s, LedgerSettings().silent_call_s) == (10.0, 10.0)


@pytest.mark.slow
async def test_an_idle_stream_outlives_the_add_timeout() -> None:
    bookie, source = MemoryBookie(), QueueSource()
    async with served(bookie, timeout_s=1.0) as (_, connection):
        stream = connection.open_add_stream(source)
        await asyncio.sleep(1.2)  # the length of the silence is what is tried
        source.waiting.append(add(1, 0, b"x"))
        stream.wake()
        await wait_until(lambda: bool(source.answers))
        assert not source.broken


async def test_a_stopping_bookie_answers_what_it_admitted() -> None:
    bookie, source = MemoryBookie(), QueueSource()
    bookie.hold_answers = True
    async with served(bookie) as (server, connection):
        source.waiting.append(add(1, 0, b"x"))
        connection.open_add_stream(source).wake()
        await wait_until(lambda: bool(bookie.held))
        stopping = asyncio.create_task(server.aclose())
        await asyncio.sleep(0.05)
        assert not stopping.done()
        bookie.release()
        await stopping
        await wait_until(lambda: bool(source.broken))
        assert source.answers == [ok(1, 0, 0)]
        assert "ended the stream" in str(source.broken[0])


async def test_the_connection_comes_back_when_the_bookie_does() -> None:
    bookie, source = MemoryBookie(), QueueSource()
    async with served(bookie) as (server, connection):
        assert (await connection.read_lac(LacRequest(1, KEY))).status is Status.NO_LEDGER
        await server.aclose()
        again = BookieServer(bookie, "127.0.0.1", server.port)
        await again.start()

        assert await read_status_in_the_end(connection) is Status.NO_LEDGER
        source.waiting.append(add(1, 0, b"x"))
        connection.open_add_stream(source).wake()
        await wait_until(lambda: bool(source.answers))
        await connection.aclose()
        await again.aclose()


async def test_a_client_that_vanishes_leaves_nothing_at_the_bookie() -> None:
    bookie, source = MemoryBookie(), QueueSource()
    bookie.hold_answers = True
    async with served(bookie) as (server, connection):
        source.waiting.append(add(1, 0, b"x"))
        connection.open_add_stream(source).wake()
        await wait_until(lambda: bool(bookie.held))
        await connection.aclose()
        await wait_until(lambda: "0 add streams" in repr(server))
        bookie.release()  # late answers go nowhere, quietly
        assert not source.broken, "its owner closed it, and knows"


@pytest.mark.parametrize("method", [READ_LAC, ADD])
async def test_bytes_that_are_not_understood_end_the_call_with_the_reason(method: str) -> None:
    bookie = MemoryBookie()
    async with served(bookie) as (server, _):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            newer = b"\x02" + encode_add_message([])[1:]

            async def call() -> None:
                if method == ADD:
                    stream = channel.stream_stream(method_path(ADD))()
                    await stream.write(newer)
                    await stream.read()
                else:
                    await channel.unary_unary(method_path(READ_LAC))(newer)

            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "format 2" in (caught.value.details() or "")


async def test_a_failing_source_breaks_its_stream() -> None:
    class FailingSource(QueueSource):
        def on_answers(self, answers: object) -> None:
            raise ZeroDivisionError

    bookie, source = MemoryBookie(), FailingSource()
    async with served(bookie) as (_, connection):
        source.waiting.append(add(1, 0, b"x"))
        connection.open_add_stream(source).wake()
        await wait_until(lambda: bool(source.broken))


async def test_a_write_to_a_stream_that_has_ended_breaks_it_with_the_bookies_reason() -> None:
    source = QueueSource()
    source.waiting.append(add(1, 0, b"x"))
    call = Mock(
        write=AsyncMock(side_effect=asyncio.InvalidStateError("RPC already finished.")),
        read=AsyncMock(side_effect=asyncio.Event().wait),
        code=AsyncMock(return_value=grpc.StatusCode.PERMISSION_DENIED),
        details=AsyncMock(return_value="no"),
    )
    connection = GrpcConnection("b1", "127.0.0.1:1")
    stream = GrpcAddStream(connection, call, source, 10.0)
    stream.wake()
    await wait_until(lambda: bool(source.broken))
    assert "the bookie ended the stream with PERMISSION_DENIED: no" in str(source.broken[0])
    await stream.aclose()
    await connection.aclose()


async def test_a_port_in_use_says_what_to_do() -> None:
    async with served(MemoryBookie()) as (server, _):
        with pytest.raises(PortInUseError, match=r"cannot listen on .*another one"):
            await BookieServer(MemoryBookie(), "127.0.0.1", server.port).start()


def scans_of_a_sharing_bookie(port: int = 0) -> ScanServer:
    bookie = SimpleNamespace(runs=SimpleNamespace(can_share=True))
    return ScanServer(cast(ScannedBookie, bookie), "127.0.0.1", port, Ports())


def is_refused(family: socket.AddressFamily, address: Any) -> bool:
    with socket.socket(family) as probe:
        return probe.connect_ex(address) == errno.ECONNREFUSED


@pytest.mark.parametrize("times", [1, 2])
async def test_a_start_that_is_cancelled_closes_all_ports(times: int) -> None:
    scans = scans_of_a_sharing_bookie()
    server = BookieServer(MemoryBookie(), "127.0.0.1", 0, scans=scans)
    starting = asyncio.ensure_future(server.start())
    for _ in range(times):
        await asyncio.sleep(0)
        starting.cancel()
    await asyncio.wait([starting])
    assert starting.cancelled()
    assert scans.port, "the ports were open when the start was cancelled"
    await wait_until(lambda: is_refused(socket.AF_UNIX, local_scan_address(scans.token)), what="the end of the local scan port")
    for port in (server.port, scans.port):
        await wait_until(partial(is_refused, socket.AF_INET, ("127.0.0.1", port)), what=f"the end of port {port}")


async def test_a_start_that_fails_closes_the_ports_that_it_opened() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = BookieServer(MemoryBookie(), "127.0.0.1", 0, scans=scans_of_a_sharing_bookie(taken.getsockname()[1]))
        with pytest.raises(PortInUseError, match="for scans"):
            await server.start()
    assert is_refused(socket.AF_INET, ("127.0.0.1", server.port))


async def test_more_answers_than_entries_break_the_stream() -> None:
    async def add_twice(_messages: object, context: Any) -> None:
        await context.read()
        await context.write(encode_add_answers([ok(1, 0, 0), ok(1, 1, 1)]))
        await context.read()

    server = grpc.aio.server()
    handlers = {ADD: grpc.stream_stream_rpc_method_handler(add_twice)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    connection = GrpcConnection("b1", f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    await server.start()
    source = QueueSource()
    source.waiting.append(add(1, 0, b"x"))
    connection.open_add_stream(source).wake()
    await wait_until(lambda: bool(source.broken))
    assert "1 more entries were answered than sent" in str(source.broken[0])
    await connection.aclose()
    await server.stop(None)


async def test_read_answers_survive_the_transport_unchanged() -> None:
    bookie = MemoryBookie()
    bookie.groups[1] = [group(1, 0, *[bytes([n]) * n for n in range(200)])]
    async with served(bookie) as (_, connection):
        (chunk,) = [chunk async for chunk in connection.read(ReadRequest(1, 0, 199))]
        assert chunk == ReadAnswer((bookie.groups[1][0],), (), 200)
        chunk.groups[0].verify()


async def test_a_connection_that_is_abandoned_breaks_its_streams_and_lets_reads_end() -> None:
    """The bookie registered elsewhere: writers must hear of it, also when the old process says nothing any more."""
    bookie, source = MemoryBookie(), QueueSource()
    async with served(bookie) as (_, connection):
        stream = connection.open_add_stream(source)
        source.waiting.append(add(1, 0, *[b"x" * 1_000_000] * 3))
        stream.wake()
        await wait_until(lambda: sum(a.last_entry_id - a.first_entry_id + 1 for a in source.answers) == 3)
        chunks = connection.read(ReadRequest(1, 0, 2, max_bytes=10_000_000))
        read = [await anext(chunks)]
        abandoning = asyncio.ensure_future(connection.abandon("bookie b1 moved"))
        await wait_until(lambda: bool(source.broken))
        assert "bookie b1 moved" in str(source.broken[0])
        read += [chunk async for chunk in chunks]
        assert sum(len(part) for chunk in read for part in chunk.groups) == 3
        await abandoning


@pytest.mark.parametrize("how", ["abandon", "aclose"])
async def test_calls_cut_off_by_the_end_of_a_connection_are_unavailable_not_cancelled(how: str) -> None:
    """Nobody cancelled those who wait: a reader at a bookie that moves asks elsewhere."""

    async def ask(connection: GrpcConnection, wait_ms: int = 0) -> str:
        with pytest.raises(BookieUnavailableError) as lac:
            await connection.read_lac(LacRequest(1, KEY, above=0, wait_ms=wait_ms))
        return str(lac.value)

    async def read(connection: GrpcConnection) -> str:
        with pytest.raises(BookieUnavailableError) as read:
            await anext(connection.read(ReadRequest(1, 0, 0)))
        return str(read.value)

    bookie = MemoryBookie()
    bookie.speaks.clear()
    server = BookieServer(bookie, "127.0.0.1", 0, BookieServerSettings(stop_grace_s=0.1))
    await server.start()
    connection = GrpcConnection("b1", f"127.0.0.1:{server.port}", limits_of(2.0))
    waiting = [asyncio.create_task(ask(connection, wait_ms=20_000)), asyncio.create_task(read(connection))]
    await wait_until(lambda: len(bookie.speaks._waiters) == 2)
    if how == "abandon":
        abandoning = asyncio.create_task(connection.abandon("bookie b1 moved"))
        assert "bookie b1 moved" in await waiting.pop(0)
        waiting.pop().cancel()  # has its time to end
        await abandoning
    else:
        await connection.aclose()
    assert all("the connection was closed" in said for said in await asyncio.gather(*waiting))
    why = "bookie b1 moved" if how == "abandon" else "the connection was closed"
    assert why in await ask(connection)
    assert why in await read(connection)
    with pytest.raises(BookieUnavailableError, match=why):
        await connection.write_lac(ExplicitLac(1, 0, KEY))
    with pytest.raises(BookieUnavailableError, match=why):
        connection.open_add_stream(QueueSource())
    await server.aclose()
