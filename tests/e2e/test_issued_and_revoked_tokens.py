"""Tokens of an OAuth2 issuer with real clients, and the end of tokens before their time."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pulsar
import pytest
from typer.testing import CliRunner

import cepheid
from cepheid_cli.app import app
from cepheid_ports import Ports
from cepheid_security import token_keys
from cepheid_security.tokens import create_token
from cepheid_testkit import StandaloneCluster
from tests.e2e.official_client import EARLIEST, client_of, publish, receive
from tests.security.local_issuer import AUDIENCE, CLIENT_ID, CLIENT_SECRET, LocalIssuer, private_key_url, running_issuer

SECRET = bytes(range(64))
AT_ONCE_S = 10.0
"""Far less than the 30 s for which a client repeats what may pass."""
WITHIN_S = 1.0
"""A revocation is in force after it; the waits below allow a busy machine more."""


@pytest.fixture
def issuer() -> Iterator[LocalIssuer]:
    with running_issuer() as running:
        yield running


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "token.key"
    file.write_bytes(SECRET)
    return file


def asking(
    key_file: Path, issuer: LocalIssuer | None = None, *, ports: Ports | None = None, **connection: Any
) -> StandaloneCluster:
    authentication: dict[str, Any] = {"methods": ["token"], "secret_keys": [str(key_file)]}
    if issuer is not None:
        authentication |= {"methods": ["token", "oidc"], "oidc": {"issuers": [issuer.url], "audiences": [AUDIENCE]}}
    return StandaloneCluster(ports=ports, authentication=authentication, connection=connection)


def token_of(key_file: Path, role: str, later_s: int = 0) -> str:
    now_ms = time.time_ns() // 1_000_000 + 1000 * later_s
    return create_token(token_keys.secret_key(str(key_file)), role, now_ms, expires_in_s=3600)


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110  the test's own time limit ends it
        await asyncio.sleep(0.02)


async def test_the_official_client_gets_its_token_from_an_issuer(issuer: LocalIssuer, key_file: Path) -> None:
    params = {"type": "client_credentials", "issuer_url": issuer.url, "private_key": private_key_url(), "audience": AUDIENCE}
    async with asking(key_file, issuer) as cluster:

        def work(authentication: Any, topic: str) -> list[bytes]:
            with client_of(cluster.service_url, authentication=authentication) as client:
                publish(client, topic, [b"1", b"2"])
                consumer = client.subscribe(topic, "s", initial_position=EARLIEST)
                return [message.data() for message in receive(consumer, 2)]

        assert await cluster.blocking(partial(work, pulsar.AuthenticationOauth2(json.dumps(params)), "issued")) == [b"1", b"2"]
        own = pulsar.AuthenticationToken(token_of(key_file, "other"))
        assert await cluster.blocking(partial(work, own, "signed")) == [b"1", b"2"], "tokens of the cluster's own key go on"


async def test_clients_wait_for_an_issuer_that_is_away(
    issuer: LocalIssuer, key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Ours gives up at an error of authentication, as Java clients do; and an issuer's outage fills no audit log."""
    token = issuer.token()
    async with asking(key_file, issuer) as cluster:
        issuer.status = 503

        def work() -> None:
            with client_of(cluster.service_url, authentication=pulsar.AuthenticationToken(token)) as client:
                publish(client, "away", [b"1"])

        def ask() -> tuple[int, dict[str, str]]:
            request = urllib.request.Request(f"{cluster.admin_url}/admin/v2/clusters", headers={"Authorization": f"Bearer {token}"})
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    return answer.status, dict(answer.headers)
            except urllib.error.HTTPError as error:
                return error.code, dict(error.headers)

        async def connect() -> None:
            async with cepheid.connect(cluster.service_url, token=token) as client, client.producer("away"):
                pass

        publishing, connecting = asyncio.ensure_future(cluster.blocking(work)), asyncio.ensure_future(connect())
        await until(lambda: any(record.message == "authentication.unavailable" for record in caplog.records))
        status, headers = await cluster.blocking(ask)
        assert (status, "www-authenticate" in headers) == (503, False)
        await asyncio.sleep(1.0)
        assert not publishing.done()
        assert not connecting.done(), "it goes on trying"
        issuer.status = 200
        await asyncio.gather(publishing, connecting)
        assert (await cluster.blocking(ask))[0] == 200
    assert "authentication.failed" not in [record.message for record in caplog.records]


async def test_our_client_and_the_command_line_get_theirs_too(
    issuer: LocalIssuer, key_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asking(key_file, issuer) as cluster:
        credentials = cepheid.ClientCredentials(issuer.url, CLIENT_ID, CLIENT_SECRET, audience=AUDIENCE)
        async with cepheid.connect(cluster.service_url, token=credentials) as client, client.producer("orders") as producer:
            await producer.send(b"1")
        wrong = cepheid.ClientCredentials(issuer.url, CLIENT_ID, "guess")
        async with cepheid.connect(cluster.service_url, token=wrong) as client:
            started = time.monotonic()
            with pytest.raises(cepheid.NotAllowedError, match="status 401: invalid_client"):
                await client.producer("orders").__aenter__()
            assert time.monotonic() - started < AT_ONCE_S
        file = tmp_path / "app.json"
        file.write_text(json.dumps({"issuer_url": issuer.url, "client_id": CLIENT_ID, "client_secret": CLIENT_SECRET}))
        monkeypatch.setenv("CEPHEID_OAUTH2_FILE", str(file))
        monkeypatch.setenv("CEPHEID_OAUTH2_AUDIENCE", AUDIENCE)
        assert "orders" in await command(cluster, "topics", "list", "public/default")
        assert "1" in await command(cluster, "consume", "orders", "-n", "1", "--earliest", "--url", cluster.service_url)


async def test_an_issued_token_that_expires_is_renewed_on_the_living_connection(issuer: LocalIssuer, key_file: Path) -> None:
    """The broker's clock is put forward, so nothing depends on how long a step takes."""
    ahead_ms = [0]
    ports = Ports(wall_ms=lambda: time.time_ns() // 1_000_000 + ahead_ms[0])
    async with asking(key_file, issuer, ports=ports, keepalive_s=1.0) as cluster:
        credentials = cepheid.ClientCredentials(issuer.url, CLIENT_ID, CLIENT_SECRET, audience=AUDIENCE)
        async with cepheid.connect(cluster.service_url, token=credentials) as client, client.producer("orders") as producer:
            await producer.send(b"1")
            accepted = cluster.standalone.broker.statistics().connections_accepted
            issuer.lifetime_s, ahead_ms[0] = 3 * 3600, 2 * 3_600_000
            await until(lambda: issuer.requests.count("/token") == 2)
            await asyncio.sleep(1.3)  # a refusal would end the connection in this time
            await producer.send(b"2")
            assert cluster.standalone.broker.statistics().connections_accepted == accepted


async def command(cluster: StandaloneCluster, *words: str, stdin: str | None = None) -> str:
    given = [*words] if "--url" in words else [*words, "--admin-url", cluster.admin_url]
    result = await cluster.blocking(lambda: CliRunner().invoke(app, given, input=stdin))
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


@pytest.mark.parametrize("by", ["token", "id", "role"])
async def test_a_revoked_token_is_cut_off(by: str, key_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CEPHEID_TOKEN", token_of(key_file, "admin"))
    token = token_of(key_file, "app")
    file = tmp_path / "app.token"
    file.write_text(token)
    name = json.loads(await asyncio.to_thread(lambda: CliRunner().invoke(app, ["tokens", "validate"], input=token).output))
    given = {"token": [str(file)], "id": ["--id", name["claims"]["jti"]], "role": ["--role", "app", "--reason", "lost laptop"]}[by]
    async with asking(key_file) as cluster:
        broker = cluster.standalone.broker
        async with cepheid.connect(cluster.service_url, token=token) as client, client.producer("orders") as producer:
            await producer.send(b"before")
            await command(cluster, "tokens", "revoke", *given)
            started = time.monotonic()
            await until(lambda: broker.statistics().connections == 0)
            assert time.monotonic() - started < 10 * WITHIN_S
            with pytest.raises(cepheid.Error, match="revoked"):
                async with cepheid.connect(cluster.service_url, token=token) as again, again.producer("orders"):
                    pass
            listed = json.loads(await command(cluster, "tokens", "revoked", "--json"))
            assert [entry["kind"] for entry in listed] == [{"token": "digest"}.get(by, by)]
            assert (listed[0]["until_ms"] is None) == (by != "token"), "it leaves the list when the token has expired"
            assert token not in json.dumps(listed)
            await command(cluster, "tokens", "revoke", *given, "--cancel")
        async with cepheid.connect(cluster.service_url, token=token) as client, client.producer("orders") as producer:
            await producer.send(b"after")
        assert "VALUE" in await command(cluster, "tokens", "revoked")


async def test_a_revocation_outlives_a_restart_and_leaves_other_roles_alone(
    key_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CEPHEID_TOKEN", token_of(key_file, "admin"))
    settings: dict[str, Any] = {"authentication": {"methods": ["token"], "secret_keys": [str(key_file)]}}
    data = tmp_path / "data"
    async with StandaloneCluster(data_dir=data, **settings) as cluster:
        await command(cluster, "tokens", "revoke", "--role", "app")
    async with StandaloneCluster(data_dir=data, **settings) as cluster:
        for role, reason in (("app", "revoked"), ("other", None)):
            async with cepheid.connect(cluster.service_url, token=token_of(key_file, role, -60)) as client:
                if reason is None:
                    async with client.producer("orders"):
                        pass
                else:
                    with pytest.raises(cepheid.Error, match=reason):
                        await client.producer("orders").__aenter__()
        monkeypatch.setenv("CEPHEID_TOKEN", token_of(key_file, "app", 2))
        later = await cluster.blocking(
            lambda: CliRunner().invoke(app, ["topics", "list", "public/default", "--admin-url", cluster.admin_url])
        )
        assert later.exit_code == 0, "a token that was made after the revocation holds"
