"""Certificates as roles, ports that are spoken to in the wrong language, and what strangers can occupy.

What must not be accepted is in tests/security/test_bad_input_*.py.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import logging
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cepheid
from cepheid_cli import secure
from cepheid_security import client_context
from cepheid_security.authority import Authority
from cepheid_testkit import StandaloneCluster
from tests.security.bad_input_world import RSA_PUBLIC, SECRET, made


@pytest.fixture
def files(tmp_path: Path) -> Path:
    secure.init(tmp_path)
    (tmp_path / "hmac.key").write_bytes(SECRET)
    (tmp_path / "rsa.pub").write_bytes(RSA_PUBLIC)
    return tmp_path


def server(files: Path, *, required: bool = False, **settings: Any) -> StandaloneCluster:
    authentication = {
        "methods": ["token", "tls"],
        "secret_keys": [f"hmac={files}/hmac.key"],
        "public_keys": [f"rsa={files}/rsa.pub"],
        "audience": "cluster",
        "issuer": "us",
    }
    tls = {
        "certificate_file": f"{files}/server.pem",
        "key_file": f"{files}/server-key.pem",
        "client_ca_file": f"{files}/ca.pem",
        "client_certificates": "required" if required else "optional",
        "port": 0,
        "admin_port": 0,
        "plain_ports": True,
    }
    return StandaloneCluster(authentication=authentication, tls=tls, **settings)


def ask(
    url: str, path: str = "/admin/v2/clusters", context: ssl.SSLContext | None = None, token: str | None = None
) -> tuple[int, str]:
    request = urllib.request.Request(url + path, headers={} if token is None else {"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, context=context, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"{}").get("reason", "")


async def connected(url: str, **credentials: Any) -> None:
    async with cepheid.connect(url, connect_timeout_s=20, **credentials) as client, client.producer("orders"):
        pass


async def test_a_certificate_is_a_role_on_the_admin_api_too(files: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    Authority(other, datetime.datetime.now(datetime.UTC)).issue("client", for_servers=False)
    expired = tmp_path / "expired"
    expired.mkdir()
    for name in ("ca.pem", "ca-key.pem"):
        (expired / name).write_bytes((files / name).read_bytes())
    Authority(expired, datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=500)).issue("client", for_servers=False)

    def context_of(directory: Path) -> ssl.SSLContext:
        files_of = {"certificate_file": f"{directory}/client.pem", "key_file": f"{directory}/client-key.pem"}
        return client_context(ca_file=f"{files}/ca.pem", **files_of)

    async with server(files) as cluster:
        await until(lambda: cluster.standalone._serving.tls_admin_port > 0)
        url = f"https://127.0.0.1:{cluster.standalone._serving.tls_admin_port}"

        def work() -> None:
            assert ask(url, context=context_of(files))[0] == 200
            assert ask(url, context=client_context(ca_file=f"{files}/ca.pem"))[0] == 401
            status, reason = ask(url, context=context_of(files), token="x")
            assert (status, reason[:20]) == (401, "that is not a token:"), "a header is judged by itself"
            for bad in (other, expired):
                with pytest.raises((urllib.error.URLError, OSError)):
                    ask(url, context=context_of(bad))

        await cluster.blocking(work)


async def test_probes_need_no_certificate_where_clients_do(files: Path) -> None:
    async with server(files, required=True) as cluster:
        await until(lambda: cluster.standalone._serving.tls_admin_port > 0)
        url = f"https://127.0.0.1:{cluster.standalone._serving.tls_admin_port}"
        context = client_context(ca_file=f"{files}/ca.pem")

        def work() -> None:
            assert ask(url, "/health", context)[0] == 200
            status, reason = ask(url, context=context, token=made())
            assert (status, reason[:40]) == (401, "this port asks for a client certificate ")

        await cluster.blocking(work)
        with pytest.raises(cepheid.Error):
            await connected(cluster.standalone.service_urls[1], token=made(), tls_ca_file=f"{files}/ca.pem", request_timeout_s=1)


async def test_the_wrong_language_is_named_with_the_right_port(files: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with server(files) as cluster:
        broker, serving = cluster.standalone.broker, cluster.standalone._serving
        await until(lambda: serving.tls_admin_port > 0)
        context = client_context(ca_file=f"{files}/ca.pem")
        for port in (broker.port, serving.admin_port):
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="localhost")
        for port in (broker.tls_port, serving.tls_admin_port):
            for plain in (b"\0\0\0\x10plain text here!", b"GET / HTTP/1.1\r\n\r\n"):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(plain)
                await until(lambda: reasons(caplog, "tls.handshake_failed") >= 1)
                writer.close()
    said = [str(record.__dict__.get("reason", record.__dict__.get("error", ""))) for record in caplog.records]
    for text in (
        f"it speaks TLS to the port without TLS; TLS is on port {broker.tls_port}",
        f"it speaks TLS to the port without TLS; https:// is on port {serving.tls_admin_port}",
        f"it does not speak TLS, and this port has nothing else; port {broker.port} is without TLS",
        f"it does not speak TLS, and this port has nothing else; http:// is on port {serving.admin_port}",
    ):
        assert text in said


def reasons(caplog: pytest.LogCaptureFixture, event: str) -> int:
    return sum(record.message == event for record in caplog.records)


async def test_handshakes_that_do_not_end_are_bounded_and_ended(files: Path, caplog: pytest.LogCaptureFixture) -> None:
    connection = {"handshake_timeout_s": 1.0, "max_unauthenticated": 3}
    async with server(files, connection=connection) as cluster:
        broker = cluster.standalone.broker
        idle = [await asyncio.open_connection("127.0.0.1", broker.tls_port) for _ in range(3)]
        await until(lambda: broker.statistics().connections_unauthenticated == 3)
        reader, fourth = await asyncio.open_connection("127.0.0.1", broker.tls_port)
        assert await reader.read() == b"", "a fourth one is closed at once"
        assert broker.statistics().connections_refused == 1
        await until(lambda: broker.statistics().connections_unauthenticated == 0)
        assert broker.statistics().handshakes_failed == 3
        assert any("no TLS handshake within 1 s" in str(record.__dict__.get("error")) for record in caplog.records)
        await connected(cluster.standalone.service_urls[1], token=made(), tls_ca_file=f"{files}/ca.pem")
        for writer in (fourth, *(writer for _, writer in idle)):
            writer.close()


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110  the test's own time limit ends it
        await asyncio.sleep(0.02)
