"""HTTP on the protocol port: one redirect to the admin port, over real sockets, and no way to hold or mislead anybody with it."""

from __future__ import annotations

import asyncio

import pytest

from cepheid_broker.protocol.http_redirect import MAX_HEAD_BYTES
from cepheid_broker.settings import ConnectionSettings
from cepheid_wire import encode_body
from cepheid_wire import pulsar_api_pb2 as pb
from tests.broker.broker_world import BrokerWorld
from tests.support import wait_until

ADMIN_PORT = 18080


async def ask(world: BrokerWorld, *pieces: bytes) -> bytes:
    """Everything that comes back until the broker closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", world.broker.port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("request_bytes", "status", "location"),
    [
        (b"GET /a/b?c=%2Fd HTTP/1.1\r\nHost: x\r\n\r\n", b"307", "http://127.0.0.1:18080/a/b?c=%2Fd"),
        (b"PUT /a HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", b"307", "http://127.0.0.1:18080/a"),
        (b"POST /a HTTP/1.0\r\n\r\n", b"307", "http://127.0.0.1:18080/a"),
        (b"DELETE /a HTTP/1.1\r\n\r\n", b"307", "http://127.0.0.1:18080/a"),
        (b"GET a HTTP/1.1\r\n\r\n", b"400", ""),
        (b"GET /a b HTTP/1.1\r\n\r\n", b"400", ""),
        (b"GET /\xc3\xa4 HTTP/1.1\r\n\r\n", b"400", ""),
        (b"GET /a\nSet-Cookie:x HTTP/1.1\r\n\r\n", b"400", ""),
        (b"GET /" + b"a" * MAX_HEAD_BYTES + b" HTTP/1.1\r\n\r\n", b"431", ""),
    ],
)
async def test_the_answer_to_a_request(request_bytes: bytes, status: bytes, location: str) -> None:
    async with BrokerWorld() as world:
        world.broker.admin_port = lambda: ADMIN_PORT
        answer = await ask(world, request_bytes)
        assert answer.split(b" ")[1] == status
        assert (f"Location: {location}\r\n".encode() in answer) == bool(location)
        assert answer.endswith(b"Content-Length: 0\r\nConnection: close\r\n\r\n")
        await wait_until(lambda: world.broker.statistics().connections == 0)


async def test_a_head_in_pieces() -> None:
    async with BrokerWorld() as world:
        world.broker.admin_port = lambda: ADMIN_PORT
        answer = await ask(world, b"GET /a HT", b"TP/1.1\r", b"\n", b"X: y\r\n\r", b"\n")
        assert b"Location: http://127.0.0.1:18080/a\r\n" in answer


async def test_a_broker_without_an_admin_api_says_so() -> None:
    async with BrokerWorld() as world:
        assert (await ask(world, b"GET /a HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 503 ")


@pytest.mark.slow
async def test_a_head_that_never_ends_is_closed_in_time_and_counts_until_then() -> None:
    async with BrokerWorld(connection=ConnectionSettings(handshake_timeout_s=1.0)) as world:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.broker.port)
        writer.write(b"GET /a HTTP/1.1\r\n")
        await wait_until(lambda: world.broker.statistics().connections == 1)
        with pytest.raises((ConnectionResetError, EOFError)):
            await reader.readexactly(1)
        await wait_until(lambda: world.broker.statistics().connections == 0)
        writer.close()


@pytest.mark.slow
async def test_a_client_that_does_not_leave_is_left() -> None:
    async with BrokerWorld() as world:
        world.broker.admin_port = lambda: ADMIN_PORT
        reader, writer = await asyncio.open_connection("127.0.0.1", world.broker.port)
        writer.write(b"GET /a HTTP/1.1\r\n\r\n")
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 307")
        assert world.broker.statistics().connections == 1, "it counts as long as it is there"
        await wait_until(lambda: world.broker.statistics().connections == 0)
        writer.close()


async def test_clients_of_the_protocol_go_on_beside_it() -> None:
    async with BrokerWorld() as world, await world.client() as client:
        world.broker.admin_port = lambda: ADMIN_PORT
        await client.produce_on("t")
        assert (await ask(world, b"GET /a HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 307 ")
        receipts = await client.publish(3)
        assert [receipt.body.message_id.entryId for receipt in receipts] == [0, 1, 2]
        assert world.broker.statistics().connections_accepted == 2


async def test_a_frame_whose_later_piece_looks_like_http_is_a_frame() -> None:
    """Also from a client that was silent for a while, as the keepalive sees it."""
    quick = ConnectionSettings(keepalive_s=0.3)
    async with BrokerWorld(connection=quick) as world, await world.client() as client:
        world.broker.admin_port = lambda: ADMIN_PORT
        (connection,) = world.broker._listener.connections
        frame = encode_body(pb.CommandPartitionedTopicMetadata(topic="persistent://public/default/GET /a", request_id=7))
        cut = frame.index(b"GET ")
        client.send_bytes(frame[:cut])
        await client.drain()
        await wait_until(lambda: connection._ping_unanswered)  # it asks whether the other side is there
        client.send_bytes(frame[cut:])
        answer = await client.expect(pb.CommandPartitionedTopicMetadataResponse)
        assert answer.request_id == 7


async def test_a_broker_that_stops_waits_for_no_head() -> None:
    async with BrokerWorld() as world:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.broker.port)
        writer.write(b"GET /a HTTP/1.1\r\n")
        await wait_until(lambda: any(connection.closed for connection in world.broker._listener.connections))
    with pytest.raises((ConnectionResetError, EOFError)):
        async with asyncio.timeout(5.0):
            await reader.readexactly(1)
    writer.close()
