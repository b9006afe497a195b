"""The admin port itself: open before it is served, quiet when it goes, and no thief of signals."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import logging
import signal
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cepheid_broker.admin import AdminContext, AdminServer
from cepheid_broker.admin.admin_protocol import MAX_HEAD_BYTES
from cepheid_broker.protocol import PortInUseError
from cepheid_broker.settings import AdminSettings
from cepheid_dev.free_ports import is_taken
from cepheid_security.connection_limits import RESERVE, RESERVE_PER_ADDRESS, ConnectionLimits, PortStatistics
from tests.admin.admin_world import AdminWorld, running_admin
from tests.support import wait_until


def another_server(admin: AdminWorld, port: int = 0) -> AdminServer:
    return AdminServer(AdminContext(admin.standalone.broker), "127.0.0.1", port)


@pytest.mark.slow
def test_requests_wait_until_they_are_served(admin: AdminWorld) -> None:
    async def ask_early() -> int:
        server = another_server(admin)
        server.listen()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as client:
            asking = asyncio.ensure_future(client.get("/status.html"))
            await asyncio.sleep(0)
            await server.start()
            try:
                return (await asking).status_code
            finally:
                await server.aclose()

    assert admin.run(ask_early()) == 200


def test_a_port_in_use_is_named(admin: AdminWorld) -> None:
    port = int(admin.standalone.admin_url.rpartition(":")[2])
    with pytest.raises(PortInUseError, match=f"127.0.0.1:{port}"):
        admin.run(another_server(admin, port).start())


@pytest.mark.slow
def test_a_start_that_is_given_up_leaves_nothing(admin: AdminWorld) -> None:
    async def give_up() -> int:
        server = another_server(admin)
        server.listen()
        starting = asyncio.ensure_future(server.start())
        await asyncio.sleep(0)
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
        await server.aclose()
        return server.port

    port = admin.run(give_up())
    assert not any(thread.name.startswith("admin-import") for thread in threading.enumerate())
    with socket.create_server(("127.0.0.1", port)):
        pass  # the port is free again


async def test_a_start_that_is_cancelled_while_it_begins_to_serve_takes_the_port_from_the_loop(
    monkeypatch: pytest.MonkeyPatch, admin: AdminWorld
) -> None:
    class Server:
        async def startup(self, sockets: list[socket.socket]) -> None:
            asyncio.get_running_loop().add_reader(sockets[0], lambda: None)
            begun.set_result(sockets[0].fileno())
            await asyncio.Event().wait()

    begun: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    server = another_server(admin)
    monkeypatch.setattr(server, "_build", Server)
    starting = asyncio.ensure_future(server.start())
    number = await begun
    starting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await starting
    assert not asyncio.get_running_loop().remove_reader(number), "the next file of this number would not be watched"


def test_a_stop_that_is_cancelled_closes_the_port(admin: AdminWorld) -> None:
    async def stop() -> int:
        server = another_server(admin)
        await server.start()
        stopping = asyncio.ensure_future(server.aclose())
        await asyncio.sleep(0)
        stopping.cancel()
        await asyncio.wait([stopping])
        return server.port

    assert not is_taken(admin.run(stop()))


@pytest.mark.slow
def test_an_idle_connection_does_not_hold_up_the_stop(admin: AdminWorld) -> None:
    async def stop() -> float:
        server = another_server(admin)
        await server.start()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client:
            assert (await client.get("/status.html")).status_code == 200
            began = asyncio.get_running_loop().time()
            await server.aclose()  # the client keeps its connection alive
            took_s = asyncio.get_running_loop().time() - began
            with pytest.raises(httpx.TransportError):
                await client.get("/status.html")
        return took_s

    assert admin.run(stop()) < 1.0


@pytest.mark.slow
def test_signals_stay_with_the_process(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with running_admin(tmp_path / "data") as admin:
        during = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        assert admin.get("/status.html").status_code == 200
        names = [thread.name for thread in threading.enumerate()]
        assert not any("AnyIO" in name or "asyncio_" in name for name in names), f"threads that nobody owns: {names}"
    # asyncio.Runner has SIGINT while it runs; uvicorn would have taken both
    assert during[1] == before[1]
    assert "uvicorn" not in repr(during)


def test_answers_come_without_delay(admin: AdminWorld) -> None:
    """Headers and body in two writes wait 40 ms for the client's acknowledgement unless Nagle's delay is off."""

    def ask() -> None:
        connection = http.client.HTTPConnection(admin.standalone.admin_url.removeprefix("http://"))
        for _ in range(20):
            connection.request("GET", "/admin/v2/tenants")
            connection.getresponse().read()
        connection.close()

    async def timed() -> float:
        began = asyncio.get_running_loop().time()
        await asyncio.to_thread(ask)
        return asyncio.get_running_loop().time() - began

    assert min(admin.run(timed()) for _ in range(3)) < 20 * 0.03


@contextlib.asynccontextmanager
async def serving(admin: AdminWorld, **settings: Any) -> AsyncIterator[AdminServer]:
    """Another admin port of the same broker, with settings of its own."""
    server = AdminServer(AdminContext(admin.standalone.broker, AdminSettings(**settings)), "127.0.0.1", 0)
    await server.start()
    try:
        yield server
    finally:
        await server.aclose()


async def ask(server: AdminServer, path: str) -> int:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as client:
        return (await client.get(path)).status_code


@pytest.mark.slow
def test_beyond_the_limit_of_connections_the_answer_is_503_and_probes_are_answered(admin: AdminWorld) -> None:
    async def crowd() -> list[int]:
        async with serving(admin, max_connections=3, keepalive_s=60) as server:
            statuses = []
            async with contextlib.AsyncExitStack() as stack:
                for _ in range(4):  # each keeps its connection
                    client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=60)
                    await stack.enter_async_context(client)
                    statuses.append((await client.get("/admin/v2/tenants")).status_code)
                statuses += [await ask(server, path) for path in ("/health", "/ready", "/status.html", "/admin/v2/tenants")]
            await wait_until(lambda: server.statistics().connections == 0)
            statuses.append(await ask(server, "/admin/v2/tenants"))
            return statuses

    assert admin.run(crowd()) == [200, 200, 200, 503, 200, 200, 200, 503, 200], "it goes on when they are gone"


@pytest.mark.slow
def test_a_probe_is_answered_behind_any_number_of_idle_connections(admin: AdminWorld) -> None:
    async def flood() -> tuple[int, int]:
        async with serving(admin, max_connections=5) as server, contextlib.AsyncExitStack() as stack:
            for _ in range(5 + 3 * RESERVE):
                _, writer = await asyncio.open_connection("127.0.0.1", server.port)
                stack.callback(writer.close)
            return await ask(server, "/ready"), server.statistics().connections

    status, connections = admin.run(flood())
    assert status == 200
    assert connections <= 5 + RESERVE


@pytest.mark.parametrize(
    ("sent", "answered"),
    [
        (b"", b""),
        (b"GET /ready HTTP/1.1\r\nHost: local", b"HTTP/1.1 408"),
        (
            b"POST /admin/v2/namespaces/public/default/messageTTL HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n1",
            b"HTTP/1.1 408",
        ),
        (b"GET /ready HTTP/1.1\r\nHost: localhost\r\n\r\n", b"HTTP/1.1 200"),
        (b"GET /none HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n1", b"HTTP/1.1 404"),
        (b"GET /ready HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * MAX_HEAD_BYTES, b"HTTP/1.1 431"),
    ],
    ids=["nothing", "head", "body", "one request", "an answered body", "an endless head"],
)
def test_a_connection_that_sends_no_more_is_closed(admin: AdminWorld, sent: bytes, answered: bytes) -> None:
    async def stay() -> bytes:
        async with serving(admin, header_timeout_s=0.2, transfer_timeout_s=0.2, keepalive_s=0.2) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(sent)
            received = await reader.read()
            writer.close()
            return received

    received = admin.run(stay())
    assert received.startswith(answered)
    assert received.count(b"HTTP/1.1 ") == (1 if answered else 0)


def test_an_empty_line_does_not_keep_a_connection_open(admin: AdminWorld) -> None:
    async def stay() -> bytes:
        async with serving(admin, keepalive_s=0.2) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await reader.readuntil(b"\r\n\r\nok")
            writer.write(b"\r\n")
            left = await reader.read()
            writer.close()
            return left

    assert admin.run(stay()) == b""


def test_a_client_that_reads_no_answer_is_disconnected(admin: AdminWorld) -> None:
    async def stay() -> None:
        async with serving(admin, transfer_timeout_s=0.2) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1)
            writer.write(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)
            await wait_until(lambda: server.statistics() == PortStatistics(connections=0, limited=0, timed_out=1))
            writer.close()
            assert not reader.at_eof()

    admin.run(stay())


def test_requests_broken_off_in_the_body_are_forgotten_quietly(admin: AdminWorld, caplog: pytest.LogCaptureFixture) -> None:
    async def break_off() -> None:
        async with serving(admin) as server:
            writers = [(await asyncio.open_connection("127.0.0.1", server.port))[1] for _ in range(50)]
            for writer in writers:
                writer.write(
                    b"POST /admin/v2/namespaces/public/default/messageTTL HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n1"
                )
            assert await ask(server, "/ready") == 200
            for writer in writers:
                writer.transport.abort()
            await wait_until(lambda: server.statistics().connections == 0)
            assert await ask(server, "/ready") == 200

    with caplog.at_level(logging.WARNING):
        admin.run(break_off())
    assert not caplog.records


def test_one_address_takes_its_own_share_of_the_connections_only() -> None:
    limits = ConnectionLimits[int](max_connections=10, max_per_address=2)
    admitted = [limits.admit(number, "192.0.2.1") for number in range(10)]
    assert [each.limited_by is None for each in admitted] == [True, True, *[False] * 8]
    assert "192.0.2.1 has 2" in str(admitted[2].limited_by)
    assert [each.dropped for each in admitted] == [*[None] * (2 + RESERVE_PER_ADDRESS), 2, 3, 4, 5], "its own, oldest first"
    assert limits.admit(100, "192.0.2.2").limited_by is None

    limits.release(0)
    assert limits.admit(101, "192.0.2.1").limited_by is None, "there is a place again"


@pytest.mark.parametrize("address", ["127.0.0.1", "127.1.2.3", "::1", "::ffff:127.0.0.1"])
def test_loopback_has_no_share_of_its_own(address: str) -> None:
    limits = ConnectionLimits[int](max_connections=10, max_per_address=2)
    assert all(limits.admit(number, address).limited_by is None for number in range(10))
    limited = [limits.admit(number, address) for number in range(10, 10 + RESERVE + 1)]
    assert all("10 connections" in str(each.limited_by) for each in limited)
    assert [each.dropped for each in limited] == [*[None] * RESERVE, 10]
    for number in range(10 + RESERVE + 1):
        limits.release(number)
    assert limits.statistics().connections == 0
