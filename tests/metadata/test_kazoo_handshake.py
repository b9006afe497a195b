"""A server that takes connections and says nothing is tried again before the session would have ended."""

from __future__ import annotations

import asyncio

import pytest

from cepheid_metadata.kazoo_connection import KazooConnection, LoopInbox
from tests.support import wait_until

pytestmark = pytest.mark.slow


async def test_a_handshake_without_answer_is_given_up_while_the_session_can_still_be_saved() -> None:
    writers: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: writers.append(writer), "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    inbox = LoopInbox(lambda: None)
    connection = KazooConnection([f"{host}:{port}"], 3.0, None, inbox, lambda _: None)
    connection.start()
    try:
        await wait_until(lambda: len(writers) >= 2, timeout_s=2.5, what="a second attempt within a session of 3 s")
    finally:
        connection.cut()
        await asyncio.to_thread(connection.stop)
        inbox.close()
        for writer in writers:
            writer.transport.abort()
        server.close()
