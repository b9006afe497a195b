"""The small HTTP responder: pages, what it refuses, and that nobody keeps it busy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus

import pytest

from cepheid_bookie import health_server
from cepheid_bookie.errors import PortInUseError
from cepheid_bookie.health_server import HealthServer, Page
from cepheid_dev.free_ports import is_taken
from cepheid_security import connection_limits
from tests.support import cancel_once_listening, free_port, wait_until


@asynccontextmanager
async def serving() -> AsyncIterator[HealthServer]:
    pages = {
        "/health": lambda: Page("fine\n"),
        "/ready": lambda: Page("not yet\n", HTTPStatus.SERVICE_UNAVAILABLE),
        "/metrics": lambda: Page("figures\n"),
    }
    server = HealthServer("127.0.0.1", 0, pages)
    await server.start()
    try:
        yield server
    finally:
        await server.aclose()


async def ask(server: HealthServer, request: bytes) -> tuple[int, str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request)
    try:
        answer = (await reader.read()).decode()
        writer.close()
        await writer.wait_closed()
    except ConnectionResetError:
        answer = ""
    head, _, body = answer.partition("\r\n\r\n")
    return (int(head.split()[1]) if head else 0), body


@pytest.mark.parametrize(
    ("request_line", "status", "body"),
    [
        ("GET /health HTTP/1.1", 200, "fine\n"),
        ("GET /ready?verbose=1 HTTP/1.1", 503, "not yet\n"),
        ("HEAD /health HTTP/1.1", 200, ""),
        ("GET / HTTP/1.1", 404, "there are /health, /ready, /metrics\n"),
        ("POST /health HTTP/1.1", 405, "only GET and HEAD\n"),
        ("nonsense", 405, "only GET and HEAD\n"),
    ],
)
async def test_a_page_and_what_is_none(request_line: str, status: int, body: str) -> None:
    async with serving() as server:
        assert await ask(server, f"{request_line}\r\nHost: x\r\n\r\n".encode()) == (status, body)


async def test_a_request_without_end_is_cut_off() -> None:
    async with serving() as server:
        endless = b"GET /health HTTP/1.1\r\nX: " + b"x" * (2 * health_server.MAX_REQUEST_BYTES)
        assert await ask(server, endless) == (0, "")
        assert await ask(server, b"GET /health HTTP/1.1\r\n\r\n") == (200, "fine\n")


async def test_who_says_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_server, "TIMEOUT_S", 0.05)
    async with serving() as server:
        assert await ask(server, b"") == (0, "")


async def test_probes_are_answered_when_all_places_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_server, "MAX_CONNECTIONS", 1)
    async with serving() as server:
        _, silent = await asyncio.open_connection("127.0.0.1", server.port)
        await wait_until(lambda: server.statistics().connections == 1, what="the first connection")
        assert await ask(server, b"GET /health HTTP/1.1\r\n\r\n") == (200, "fine\n")
        assert await ask(server, b"GET /metrics HTTP/1.1\r\n\r\n") == (
            503, "1 connections to the health port are open: close unused ones\n",
        )  # fmt: skip
        silent.close()
        await silent.wait_closed()
        await wait_until(lambda: server.statistics().connections == 0, what="its end")
        assert await ask(server, b"GET /metrics HTTP/1.1\r\n\r\n") == (200, "figures\n")


async def test_a_flood_drops_its_own_connections_and_never_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_server, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(connection_limits, "RESERVE", 2)
    async with serving() as server:
        flood = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(4)]
        async with asyncio.timeout(10):
            assert await flood[1][0].read() == b"", "the oldest one in the reserve"
        assert await ask(server, b"GET /health HTTP/1.1\r\n\r\n") == (200, "fine\n")
        assert server.statistics().connections <= 3
        for _, writer in flood:
            writer.close()


async def test_a_port_in_use_is_named() -> None:
    async with serving() as server:
        with pytest.raises(PortInUseError, match=rf"127.0.0.1:{server.port} for health.*--http-port"):
            await HealthServer("127.0.0.1", server.port, {}).start()


async def test_a_start_that_is_cancelled_closes_its_port() -> None:
    port = free_port()
    await cancel_once_listening(HealthServer("127.0.0.1", port, {}).start(), port)
    assert not is_taken(port)
