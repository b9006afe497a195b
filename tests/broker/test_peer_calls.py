"""Calls of another broker's admin API: what it answers, and what it should not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from cepheid_broker.admin.errors import http_status_of
from cepheid_broker.ownership.ownership import There
from cepheid_broker.ownership.peer_calls import PeerCalls, PeerSilentError, PeerUnreachableError, RemoteRefusedError


@asynccontextmanager
async def answering(answer: str) -> AsyncIterator[There]:
    """A broker that answers everything like that; {address} in it is its own."""
    address = ""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head, _, content = answer.replace("{address}", address).partition("\n\n")
        lines = [*head.splitlines(), f"Content-Length: {len(content)}", "", content]
        writer.write("\r\n".join(lines).encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield There("other", {"http": address})
    finally:
        server.close()
        await server.wait_closed()


async def test_brokers_that_send_each_other_the_same_call_are_no_redirect_for_the_caller() -> None:
    """A 307 without a place to go to is what no client understands."""
    async with answering("HTTP/1.1 307 Temporary Redirect\nLocation: http://{address}/x") as there:
        calls = PeerCalls(5.0)
        with pytest.raises(PeerUnreachableError, match="GET /x") as refused:
            await calls.call(there, "GET", "/x")
        assert http_status_of(refused.value) == 503
        assert refused.value.retriable
        assert calls.failed == 1


async def test_an_answer_that_is_no_json_names_the_broker() -> None:
    async with answering("HTTP/1.1 200 OK\n\n<html>a proxy</html>") as there:
        with pytest.raises(PeerUnreachableError, match=r"broker other .*GET /x"):
            await PeerCalls(5.0).call(there, "GET", "/x")


async def test_a_call_without_an_answer_says_that_it_may_be_carried_out() -> None:
    silence = asyncio.Event()

    async def stay_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await silence.wait()
        writer.close()

    server = await asyncio.start_server(stay_silent, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        with pytest.raises(PeerSilentError, match="does not answer GET /x: timeout"):
            await PeerCalls(0.05).call(There("other", {"http": f"{host}:{port}"}), "GET", "/x")
    finally:
        silence.set()
        server.close()
        await asyncio.sleep(0.01)  # the connection is closed by then


async def test_a_place_that_is_no_address_names_the_broker() -> None:
    async with answering("HTTP/1.1 307 Temporary Redirect\nLocation: /elsewhere") as there:
        with pytest.raises(PeerUnreachableError, match="broker other"):
            await PeerCalls(5.0).call(there, "GET", "/x")


async def test_refusals_keep_their_status_and_reason() -> None:
    async with answering('HTTP/1.1 412 Precondition Failed\n\n{"reason": "it has consumers"}') as there:
        with pytest.raises(RemoteRefusedError, match="it has consumers") as refused:
            await PeerCalls(5.0).call(there, "GET", "/x")
        assert http_status_of(refused.value) == 412
    async with answering("HTTP/1.1 204 No Content") as there:
        assert await PeerCalls(5.0).call(there, "GET", "/x") is None
