"""The admin port itself: open before it is served, quiet when it goes, and no thief of signals."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import signal
import socket
import threading
from pathlib import Path

import httpx
import pytest

from cepheid_broker.admin import AdminContext, AdminServer
from cepheid_broker.protocol import PortInUseError
from cepheid_broker.settings import AdminSettings
from tests.admin.admin_world import AdminWorld, running_admin


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


@pytest.mark.slow
def test_beyond_the_limit_of_connections_the_answer_is_503(admin: AdminWorld) -> None:
    async def crowd() -> list[int]:
        settings = AdminSettings(max_connections=3)
        server = AdminServer(AdminContext(admin.standalone.broker, settings), "127.0.0.1", 0)
        await server.start()
        statuses = []
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(4):  # each keeps its connection
                client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=60)
                await stack.enter_async_context(client)
                statuses.append((await client.get("/status.html")).status_code)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as client:
            statuses.append((await client.get("/status.html")).status_code)
        await server.aclose()
        return statuses

    assert admin.run(crowd()) == [200, 200, 200, 503, 200], "it goes on when they are gone"
