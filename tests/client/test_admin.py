"""`cepheid.admin`, on asyncio and blocking: against a cluster, and against a server that answers badly."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

import cepheid
import cepheid.admin.sync
from cepheid.admin.exchange import Place, message_place, parse_admin_url
from tests.admin import admin_client_code
from tests.client.conftest import ClusterThread


@pytest.mark.page
def test_the_calls_are_those_that_the_broker_serves() -> None:
    for name, text in admin_client_code.modules().items():
        written = (admin_client_code.FOLDER / name).read_text()
        assert written == text, f"sdk/cepheid/admin/{name} is out of date: python -m tests.admin.admin_client_code"


@pytest.mark.page
def test_every_call_has_a_type() -> None:
    assert "-> Any:" not in admin_client_code.modules()["async_calls.py"]


async def test_every_kind_of_answer_is_decoded(cluster: ClusterThread, topic: str) -> None:
    async with cepheid.admin.connect(cluster.admin_url) as admin, cepheid.connect(cluster.url) as client:
        await admin.topics.create(topic, {"owner": "billing"})
        assert f"persistent://public/default/{topic}" in await admin.namespaces.topics("public/default")
        assert await admin.topics.properties(topic) == {"owner": "billing"}
        async with client.producer(topic) as producer:
            message_id = await producer.send(b"hello")
        await admin.subscriptions.create(topic, "a/b %", cepheid.EARLIEST)
        assert await admin.subscriptions.list(topic) == ["a/b %"]
        message = await admin.subscriptions.peek_message(topic, "a/b %", 1)
        assert b"hello" in message.payload
        assert message.headers["x-pulsar-message-id"] == f"{message_id.ledger_id}:{message_id.entry_id}"
        assert await admin.topics.backlog_size(topic, message_id) >= 0
        assert await admin.topics.get_retention(topic) is None
        await admin.topics.set_retention(topic, {"retentionTimeInMinutes": 5, "retentionSizeInMB": 10})
        assert await admin.topics.get_retention(topic) == {"retentionTimeInMinutes": 5, "retentionSizeInMB": 10}
        assert "cepheid_broker_topics" in await admin.brokers.metrics()
        lines = b"".join([piece async for piece in admin.metadata.backup()]).splitlines()
        assert b"end" in lines[-1]
        assert await admin.call("GET", "/admin/v2/clusters") == await admin.clusters.list()


async def test_topics_of_both_domains_are_called_alike(cluster: ClusterThread, topic: str) -> None:
    volatile = f"non-persistent://public/default/{topic}"
    async with cepheid.admin.connect(cluster.admin_url) as admin:
        await admin.topics.create_partitioned(volatile, 2)
        assert (await admin.topics.partitions(volatile))["partitions"] == 2
        assert volatile in await admin.topics.list_partitioned("public/default", domain="non-persistent")
        await admin.topics.delete_partitioned(volatile)


def test_the_blocking_client_has_the_same_calls(cluster: ClusterThread, topic: str) -> None:
    with cepheid.admin.sync.connect(cluster.admin_url) as admin:
        admin.topics.create(topic)
        with pytest.raises(cepheid.ConflictError, match=r"already exists.*409"):
            admin.topics.create(topic)
        with pytest.raises(cepheid.PreconditionError):
            admin.namespaces.delete_bundle("public/default", "no-range")
        with pytest.raises(cepheid.NotFoundError) as caught:
            admin.topics.stats(f"{topic}-not-there")
        assert caught.value.status == 404
        with pytest.raises(cepheid.NotAllowedError, match="not served"):
            admin.call("POST", "/admin/v2/brokers/shutdown")
        assert b"end" in b"".join(admin.metadata.backup()).splitlines()[-1]
    with pytest.raises(cepheid.ClosedError):
        admin.topics.list("public/default")


@pytest.mark.parametrize(
    ("url", "places"),
    [
        ("http://one", (Place("one", 8080, False),)),
        ("https://[::1],two:99/", (Place("::1", 8443, True), Place("two", 99, True))),
        ("pulsar://one:6650", None),
        ("http://one/path", None),
        ("http://one:port", None),
        ("http://", None),
    ],
)
def test_admin_urls(url: str, places: tuple[Place, ...] | None) -> None:
    if places is None:
        with pytest.raises(cepheid.UsageError, match="is not an admin address"):
            parse_admin_url(url)
    else:
        assert parse_admin_url(url) == places


def test_names_that_cannot_be_are_refused_before_anything_is_sent() -> None:
    admin = cepheid.admin.sync.connect("http://127.0.0.1:1")
    with pytest.raises(cepheid.UsageError):
        admin.topics.stats("persistent://too/few")
    with pytest.raises(cepheid.UsageError):
        admin.namespaces.policies("no-slash")


def test_a_message_id_of_a_batch_keeps_its_index() -> None:
    inside = cepheid.MessageId(3, 4, batch_index=5, partition=1, batch_size=9)
    assert message_place(inside) == {"ledgerId": 3, "entryId": 4, "partitionIndex": 1, "batchIndex": 5}
    assert message_place({"ledgerId": 3}) == {"ledgerId": 3}


def both(url: str, **options: float | str) -> list[Callable[[], Awaitable[object]]]:
    """The same call with both clients."""
    asynchronous = cepheid.admin.connect(url, **options)  # type: ignore[arg-type]
    blocking = cepheid.admin.sync.connect(url, **options)  # type: ignore[arg-type]
    return [lambda: asynchronous.brokers.list(), lambda: asyncio.to_thread(blocking.brokers.list)]


@contextlib.asynccontextmanager
async def server(answer: bytes | None) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Answers every request with these bytes, or never; and keeps what it was asked."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            asked.append(await reader.readuntil(b"\r\n\r\n"))
            if answer is None:
                await reader.read()
            else:
                writer.write(answer)
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", asked


JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (JSON + b'Content-Length: 5\r\n\r\n["a"]', ["a"]),
        (JSON + b'Transfer-Encoding: chunked\r\n\r\n2\r\n["\r\n3;x=y\r\na"]\r\n0\r\n\r\n', ["a"]),
        (JSON + b'\r\n["a"]', ["a"]),  # it ends with the connection
        (b"HTTP/1.1 204 No Content\r\n\r\n", None),
        (JSON + b'Content-Length: 50\r\n\r\n["a"]', cepheid.ConnectError),
        (JSON + b"Transfer-Encoding: chunked\r\n\r\nff\r\n[", cepheid.ConnectError),
        (b"SSH-2.0-OpenSSH\r\n\r\n", cepheid.ConnectError),
        (b"", cepheid.ConnectError),
        (b"HTTP/1.1 307 Temporary Redirect\r\nLocation: ftp://one\r\n\r\n", cepheid.ConnectError),
        (b'HTTP/1.1 503 Service Unavailable\r\nContent-Length: 17\r\n\r\n{"reason":"busy"}', cepheid.RefusedError),
        (b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n", cepheid.NotAllowedError),
    ],
)
async def test_answers_of_all_kinds(answer: bytes, expected: object) -> None:
    async with server(answer) as (url, _):
        for call in both(url):
            if isinstance(expected, type):
                with pytest.raises(expected):
                    await call()
            else:
                assert await call() == expected


async def test_a_server_that_does_not_answer_is_given_up() -> None:
    async with server(None) as (url, _):
        for call in both(url, request_timeout_s=0.2):
            with pytest.raises(cepheid.TimedOutError, match=r"did not answer GET /admin/v2/brokers within 0\.2 s"):
                await call()


async def test_a_redirect_is_followed_with_the_credentials_but_not_in_circles() -> None:
    async with server(JSON + b"Content-Length: 2\r\n\r\n[]") as (there, asked):
        moved = f"HTTP/1.1 307 Temporary Redirect\r\nLocation: {there}/admin/v2/brokers?a=b\r\nContent-Length: 0\r\n\r\n"
        async with server(moved.encode()) as (url, _):
            for call in both(url, token="secret"):
                assert await call() == []
        for each in asked:
            assert each.startswith(b"GET /admin/v2/brokers?a=b HTTP/1.1\r\n")
            assert b"Authorization: Bearer secret\r\n" in each
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    circle = f"HTTP/1.1 307 Temporary Redirect\r\nLocation: http://127.0.0.1:{port}/\r\nContent-Length: 0\r\n\r\n".encode()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(circle)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", port):
        for call in both(f"http://127.0.0.1:{port}"):
            with pytest.raises(cepheid.ConnectError, match="was redirected 5 times"):
                await call()


async def test_the_first_address_that_answers_is_used() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        dead = free.getsockname()[1]
    async with server(JSON + b"Content-Length: 2\r\n\r\n[]") as (url, _):
        for call in both(f"http://127.0.0.1:{dead},{url.removeprefix('http://')}"):
            assert await call() == []
    for call in both(f"http://127.0.0.1:{dead}"):
        with pytest.raises(cepheid.ConnectError, match=f"no admin API answers at http://127.0.0.1:{dead}"):
            await call()


async def test_a_password_is_sent_as_basic_credentials() -> None:
    async with server(JSON + b"Content-Length: 2\r\n\r\n[]") as (url, asked):
        async with cepheid.admin.connect(url, password=("ann", "pw")) as admin:
            await admin.brokers.list()
        assert b"Authorization: Basic YW5uOnB3\r\n" in asked[0]
