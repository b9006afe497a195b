"""Calls between brokers with TLS and a token."""

from __future__ import annotations

import asyncio
import datetime
from pathlib import Path

import pytest

from cepheid_broker.ownership import ACTING_FOR, PeerCalls, There
from cepheid_broker.ownership.peer_calls import PeerUnreachableError
from cepheid_security import ClientTls, ServerTls
from cepheid_security.authority import Authority


async def test_a_call_goes_over_tls_with_the_brokers_own_token(tmp_path: Path) -> None:
    Authority(tmp_path, datetime.datetime.now(datetime.UTC)).issue("server", hosts=("127.0.0.1",), for_servers=True)
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n[42]")
        writer.close()

    tls = ServerTls(str(tmp_path / "server.pem"), str(tmp_path / "server-key.pem"))
    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=tls.context) as server:
        port = server.sockets[0].getsockname()[1]
        there = There("other", {"https": f"127.0.0.1:{port}", "pulsar+ssl": "127.0.0.1:1"})
        calls = PeerCalls(10.0, tls=ClientTls(str(tmp_path / "ca.pem")).followed(), token=lambda: "secret-token")
        acting_for = ACTING_FOR.set("ann\r\nX: y")
        assert await calls.call(there, "GET", "/x") == [42]
        ACTING_FOR.reset(acting_for)
        assert b"Authorization: Bearer secret-token\r\n" in asked[0]
        assert b"x-cepheid-acting-for: ann%0D%0AX%3A%20y\r\n" in asked[0]
        for without in (PeerCalls(10.0), PeerCalls(10.0, tls=ClientTls().followed())):
            with pytest.raises(PeerUnreachableError, match=r"https|certificate") as failed:
                await without.call(there, "GET", "/x")
            assert "secret" not in str(failed.value)
