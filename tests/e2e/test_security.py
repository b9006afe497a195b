"""TLS and authentication with real clients: one server, set up by `cepheid secure init`, with both kinds of port."""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import bcrypt
import pulsar
import pytest

import cepheid
from cepheid_cli import secure
from cepheid_ports import Ports
from cepheid_scan import scan
from cepheid_security import client_context, token_keys
from cepheid_security.authority import Authority
from cepheid_security.tokens import create_token
from cepheid_testkit import StandaloneCluster
from tests.e2e.official_client import EARLIEST, client_of, publish, receive

AT_ONCE_S = 10.0
"""Far less than the 30 s for which a client repeats what may pass."""
HOUR_S = 3600
KEEPALIVE_S = 0.3
"""Credentials that have expired are noticed within it."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("secured")
    secure.init(directory)
    hashed = bcrypt.hashpw(b"a:secret", bcrypt.gensalt(4)).decode()
    (directory / "users").write_text(f"ann:{hashed}\n")
    return directory


class Clock:
    """The server's, which a test may put forward."""

    ahead_s = 0

    def __call__(self) -> int:
        return time.time_ns() // 1_000_000 + 1000 * self.ahead_s


def secured(made: Path, clock: Clock | None = None, **changes: dict[str, Any]) -> StandaloneCluster:
    settings: dict[str, Any] = tomllib.loads((made / "server.toml").read_text())
    settings["tls"] |= {"port": 0, "admin_port": 0, "plain_ports": True, **changes.get("tls", {})}
    settings["authentication"] |= {"methods": ["token", "basic", "tls"], "passwords_file": str(made / "users")}
    del settings["authorization"]  # who somebody is, not what they may do
    settings["connection"] = {"keepalive_s": KEEPALIVE_S}
    return StandaloneCluster(ports=Ports(wall_ms=clock or Clock()), **settings)


def tls_url(cluster: StandaloneCluster) -> str:
    return cluster.standalone.service_urls[1]


def token_of(made: Path, *, expires_in_s: float | None = None) -> str:
    key = token_keys.secret_key(str(made / "token.key"))
    return create_token(key, "app", time.time_ns() // 1_000_000, expires_in_s=expires_in_s)


OFFICIAL: dict[str, Callable[[Path], Any]] = {
    "token": lambda made: pulsar.AuthenticationToken(token_of(made)),
    "basic": lambda made: pulsar.AuthenticationBasic("ann", "a:secret"),
    "certificate": lambda made: pulsar.AuthenticationTLS(str(made / "client.pem"), str(made / "client-key.pem")),
}


async def test_the_official_client_authenticates_over_tls(made: Path) -> None:
    async with secured(made) as cluster:

        def work(authentication: Any, topic: str) -> list[bytes]:
            ca = str(made / "ca.pem")
            with client_of(tls_url(cluster), authentication=authentication, tls_trust_certs_file_path=ca) as client:
                publish(client, topic, [b"1", b"2"])
                consumer = client.subscribe(topic, "s", initial_position=EARLIEST)
                return [message.data() for message in receive(consumer, 2)]

        for kind, authentication in OFFICIAL.items():
            assert await cluster.blocking(partial(work, authentication(made), kind)) == [b"1", b"2"]


OURS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "token": lambda made: {"token": token_of(made)},
    "basic": lambda made: {"password": ("ann", "a:secret")},
    "certificate": lambda made: {
        "tls_certificate_file": str(made / "client.pem"),
        "tls_key_file": str(made / "client-key.pem"),
    },
}


async def test_our_client_authenticates_over_tls(made: Path) -> None:
    async with secured(made) as cluster:
        for credentials in OURS.values():
            async with cepheid.connect(tls_url(cluster), tls_ca_file=str(made / "ca.pem"), **credentials(made)) as client:
                async with client.producer("orders") as producer:
                    await producer.send(b"1")


FORKED = """
import os, cepheid.sync
client = cepheid.sync.connect({url!r}, tls_ca_file={ca!r}, token={token!r})
producer, reader = client.producer("forked"), client.reader("forked")
producer.send(b"parent")
if (child := os.fork()) == 0:
    producer.send(b"child")
    client.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
producer.send(b"parent again")
print([reader.read(30).data.decode() for _ in range(3)])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
async def test_a_forked_child_leaves_the_tls_connection_of_its_parent_alone(made: Path) -> None:
    async with secured(made) as cluster:
        code = FORKED.format(url=tls_url(cluster), ca=str(made / "ca.pem"), token=token_of(made))
        command = [sys.executable, "-c", code]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.stdout, done.stderr) == ("['parent', 'child', 'parent again']\n", "")


REFUSED: dict[str, tuple[Callable[[Path], dict[str, Any]], str]] = {
    "nothing": (lambda made: {}, "this cluster asks for credentials: token, basic, tls"),
    "expired": (lambda made: {"token": token_of(made, expires_in_s=-60)}, "the token expired"),
    "garbage": (lambda made: {"token": "x"}, "that is not a token"),
    "wrong password": (lambda made: {"password": ("ann", "guess")}, "the user name or the password is wrong"),
    "wrong user": (lambda made: {"password": ("eve", "a:secret")}, "the user name or the password is wrong"),
}


async def test_bad_credentials_are_refused_with_the_reason(made: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with secured(made) as cluster:
        for url in cluster.standalone.service_urls:
            for credentials, reason in REFUSED.values():
                async with cepheid.connect(url, tls_ca_file=str(made / "ca.pem"), **credentials(made)) as client:
                    with pytest.raises(cepheid.NotAllowedError, match=reason):  # at once: asking again changes nothing
                        await client.producer("orders").__aenter__()
    refused = [record for record in caplog.records if record.message == "authentication.failed"]
    assert len(refused) == 4, "one line for each reason, not for each attempt"
    assert "a:secret" not in caplog.text


@contextmanager
def demanding_certificates(made: Path) -> Iterator[str]:
    """A server that refuses clients without a certificate, and says so in an alert of TLS as OpenSSL does. Yields its URL."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made / "server.pem", made / "server-key.pem")
    context.load_verify_locations(made / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED

    def serve() -> None:
        connection, _ = listener.accept()
        with context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False) as secured:
            with pytest.raises(ssl.SSLError):
                secured.do_handshake()
            plain = socket.socket(fileno=secured.detach())
        with plain, suppress(OSError):  # the client resets the connection if it closes it with unread bytes
            plain.shutdown(socket.SHUT_WR)
            while plain.recv(1024):
                pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"pulsar+ssl://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(AT_ONCE_S)


async def test_a_client_without_the_certificate_that_a_broker_asks_for_is_told_at_once(made: Path) -> None:
    with demanding_certificates(made) as url:
        async with cepheid.connect(url, tls_ca_file=str(made / "ca.pem")) as client:
            with pytest.raises(cepheid.NotAllowedError, match="it accepts no client without a valid certificate"):
                await client.producer("orders").__aenter__()


async def test_a_broker_that_ends_the_handshake_silently_may_want_a_certificate(made: Path) -> None:
    async with secured(made, tls={"client_certificates": "required"}) as cluster:
        async with cepheid.connect(tls_url(cluster), tls_ca_file=str(made / "ca.pem"), request_timeout_s=1) as client:
            with pytest.raises(cepheid.TimedOutError, match="it may ask for a client certificate that it accepts"):
                await client.producer("orders").__aenter__()


async def test_a_broker_that_is_not_trusted_is_named_at_once(made: Path, tmp_path: Path) -> None:
    Authority(tmp_path, datetime.datetime.now(datetime.UTC))
    async with secured(made) as cluster:
        async with cepheid.connect(tls_url(cluster), tls_ca_file=str(tmp_path / "ca.pem")) as client:
            started = time.monotonic()
            with pytest.raises(cepheid.UntrustedBrokerError, match=r"the certificate of .* is not accepted"):
                await client.producer("orders").__aenter__()
            assert time.monotonic() - started < AT_ONCE_S


async def test_tls_at_a_port_without_it_and_none_at_a_port_with_it(made: Path) -> None:
    async with secured(made) as cluster:
        plain, over_tls = cluster.standalone.service_urls
        for url, reason in (
            (plain.replace("pulsar:", "pulsar+ssl:"), r"during the TLS handshake; its port may be one without TLS"),
            (over_tls.replace("pulsar+ssl:", "pulsar:"), r"closed the connection before it answered; its port may be one for TLS"),
        ):
            async with cepheid.connect(url, tls_ca_file=str(made / "ca.pem"), request_timeout_s=1) as client:
                with pytest.raises(cepheid.TimedOutError, match=reason):
                    await client.producer("orders").__aenter__()


async def test_a_token_that_expires_is_renewed_on_the_living_connection(made: Path) -> None:
    """By our client and by the official one. The broker's clock is put forward, so nothing depends on how long a step takes."""
    asked: list[str] = []
    clock = Clock()

    def fresh() -> str:
        asked.append(token_of(made, expires_in_s=HOUR_S if not asked else 3 * HOUR_S))
        return asked[-1]

    async with secured(made, clock) as cluster:
        broker = cluster.standalone.broker
        async with cepheid.connect(tls_url(cluster), tls_ca_file=str(made / "ca.pem"), token=fresh) as client:
            async with client.producer("orders") as producer:
                first = await producer.send(b"before")
                accepted = broker.statistics().connections_accepted
                clock.ahead_s = 2 * HOUR_S
                await until(lambda: len(asked) > 1)
                await asyncio.sleep(3 * KEEPALIVE_S)  # a refusal would end the connection in this time
                assert (await producer.send(b"after")).entry_id == first.entry_id + 1
                assert broker.statistics().connections_accepted == accepted
        del asked[:]
        clock.ahead_s = 0

        def official() -> None:
            authentication = pulsar.AuthenticationToken(fresh)
            ca = str(made / "ca.pem")
            with client_of(tls_url(cluster), authentication=authentication, tls_trust_certs_file_path=ca) as client:
                producer = client.create_producer("official")
                connections = len(asked)
                clock.ahead_s = 2 * HOUR_S
                while len(asked) == connections:
                    producer.send(b"x")
                    time.sleep(KEEPALIVE_S / 4)
                producer.send(b"after")

        await cluster.blocking(official)


async def test_a_client_that_does_not_renew_is_cut_off(made: Path) -> None:
    clock = Clock()
    async with secured(made, clock) as cluster:
        token = token_of(made, expires_in_s=HOUR_S)
        async with cepheid.connect(tls_url(cluster), tls_ca_file=str(made / "ca.pem"), token=token) as client:
            async with client.producer("orders") as producer:
                await producer.send(b"before")
                clock.ahead_s = 2 * HOUR_S
                await until(lambda: cluster.standalone.broker.statistics().connections == 0)


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110  the test's own time limit ends it
        await asyncio.sleep(KEEPALIVE_S / 4)


def ask(url: str, context: ssl.SSLContext | None, **headers: str) -> tuple[int, Any]:
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, context=context, timeout=30) as answer:
            return answer.status, json.loads(answer.read() or b"null") if "json" in answer.headers["content-type"] else None
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"null")


async def test_the_admin_api_asks_who_it_is(made: Path) -> None:
    async with secured(made) as cluster:
        serving = cluster.standalone._serving
        await until(lambda: serving.tls_admin_port > 0)
        context = client_context(ca_file=str(made / "ca.pem"))
        clusters = "/admin/v2/clusters"
        urls = (f"http://127.0.0.1:{serving.admin_port}", f"https://127.0.0.1:{serving.tls_admin_port}")

        def work() -> None:
            for url in urls:
                assert ask(f"{url}/health", context)[0] == 200, "probes have no credentials"
                status, body = ask(url + clusters, context)
                assert (status, body["reason"].partition(":")[0]) == (401, "this cluster asks for credentials")
                assert ask(f"{url}/metrics", context)[0] == 401
                assert ask(url + clusters, context, Authorization=f"Bearer {token_of(made)}") == (200, ["standalone"])
                assert ask(url + clusters, context, Authorization="Basic YW5uOmE6c2VjcmV0") == (200, ["standalone"])
                for wrong in ("Bearer x", "Basic x", "Digest y", ""):
                    assert ask(url + clusters, context, Authorization=wrong)[0] == 401, wrong

        await cluster.blocking(work)


async def test_who_speaks_the_wrong_language_to_a_port_is_told_why(made: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with secured(made) as cluster:
        caplog.set_level("INFO")
        broker = cluster.standalone.broker
        context = client_context(ca_file=str(made / "ca.pem"))
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection("127.0.0.1", broker.port, ssl=context, server_hostname="localhost")
        assert any(f"TLS is on port {broker.tls_port}" in str(getattr(record, "reason", "")) for record in caplog.records)
        reader, writer = await asyncio.open_connection("127.0.0.1", broker.tls_port)
        writer.write(b"\0\0\0\x10plain text here!")
        try:
            answer = await reader.read(100)
        except ConnectionError:
            answer = b""
        assert not answer.startswith(b"\0\0"), "no frame of the protocol"
        writer.close()


async def test_history_is_read_through_the_encrypted_port_alone(made: Path) -> None:
    async with secured(made) as cluster:
        ca = str(made / "ca.pem")
        async with cepheid.connect(tls_url(cluster), tls_ca_file=ca, token=token_of(made)) as client:
            async with client.producer("history") as producer:
                for number in range(3):
                    await producer.send(str(number).encode())

        def read() -> list[bytes]:
            with scan(
                "history",
                service_url=tls_url(cluster),
                token=token_of(made),
                tls_ca_file=ca,
                tls_certificate_file=str(made / "client.pem"),
                tls_key_file=str(made / "client-key.pem"),
                columns=["value"],
            ) as reader:
                values: list[bytes] = reader.read_all()["value"].to_pylist()
                return values

        assert await cluster.blocking(read) == [b"0", b"1", b"2"]
