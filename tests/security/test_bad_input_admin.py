"""What must not be accepted on the admin port, with TLS and without: refused, one line in the audit log, nothing else happens."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tests.security.bad_input_world import BAD_TOKENS, HUGE, BadInputWorld, call, connected, made, running_bad_input_world

CLUSTERS = "/admin/v2/clusters"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BadInputWorld]:
    with running_bad_input_world(tmp_path_factory.mktemp("bad-input")) as world:
        yield world


@pytest.fixture(autouse=True)
def _failures_are_answered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cepheid_security.failed_attempts._FREE", 1000)  # their delays have tests of their own


@pytest.mark.parametrize("case", BAD_TOKENS)
def test_a_bad_token(world: BadInputWorld, case: str) -> None:
    token, reason = BAD_TOKENS[case]
    told, line = world.refused(lambda world: call(world, CLUSTERS, token))
    assert re.search(f"401: .*({reason})", told), told
    assert (line["operation"], line["result"]) == (f"GET {CLUSTERS}", "denied")
    assert re.search(reason, line["reason"])
    assert not token or token not in str(line)


async def _sent(world: BadInputWorld, port: str, data: bytes) -> str:
    """Send bytes, and return what is answered."""
    reader, writer = await connected(world, port, None)
    try:
        writer.write(data)
        return (await reader.read(-1)).decode(errors="replace")
    except OSError as error:
        return f"closed: {error!r}"
    finally:
        writer.close()


STRANGERS: dict[str, tuple[Callable[[BadInputWorld], Awaitable[str]], str, str, str]] = {
    # what is tried: the attempt, what the client is told, operation and reason of the line
    "no credentials": (lambda w: call(w, CLUSTERS), "401: .*asks for credentials", f"GET {CLUSTERS}", "asks for credentials"),
    "a token of 1 MB": (lambda w: call(w, CLUSTERS, HUGE), "431|closed", "request", "has 65,536 bytes at most"),
    "a certificate of another CA": (
        lambda w: call(w, CLUSTERS, port="https", tls=w.files.client("impostor")), "closed|no TLS", "tls.handshake", "certificate",
    ),
    "a certificate that has expired": (
        lambda w: call(w, CLUSTERS, port="https", tls=w.files.client("expired")), "closed|no TLS", "tls.handshake", "certificate",
    ),
    "a certificate that is not valid yet": (
        lambda w: call(w, CLUSTERS, port="https", tls=w.files.client("future")), "closed|no TLS", "tls.handshake", "certificate",
    ),
    "a certificate that was revoked": (
        lambda w: call(w, CLUSTERS, port="https", tls=w.files.client("revoked")), "closed|no TLS", "tls.handshake", "revoked",
    ),
    "TLS 1.1": (
        lambda w: call(w, CLUSTERS, made(), port="https", tls=w.files.old()), "no TLS", "tls.handshake", "protocol",
    ),
    "plain text on the port with TLS": (
        lambda w: call(w, CLUSTERS, made(), port="https"), "closed", "tls.handshake", r"does not speak TLS.*http:// is on port",
    ),
    "TLS on the port without": (
        lambda w: call(w, CLUSTERS, made(), tls=w.files.client()), "no TLS", "tls.handshake", r"https:// is on port \d+",
    ),
    "a handshake that does not end": (
        lambda w: _sent(w, "https", b"\x16\x03\x01"), "", "tls.handshake", "no TLS handshake within 3 s",
    ),
    "a head that does not end": (
        lambda w: _sent(w, "http", b"GET / HTTP/1.1\r\n"), "408", "request", "the head of the request took more than 3 s",
    ),
    "an original principal of a role that is not a proxy": (
        lambda w: call(w, "/admin/v2/persistent/a/n", made(), headers="X-Original-Principal: root\r\n"),
        "403: .*not one of authorization.proxy_roles", "GET /admin/v2/persistent/{tenant}/{namespace}", "authorization.proxy_roles",
    ),
    "a client that says it is a broker": (
        lambda w: call(w, "/admin/v2/persistent/a/n", made(), headers="X-Cepheid-Acting-For: root\r\n"),
        "403: .*which only brokers may", "GET /admin/v2/persistent/{tenant}/{namespace}", "which only brokers may",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", STRANGERS)
def test_a_stranger(world: BadInputWorld, case: str) -> None:
    attempt, told, operation, reason = STRANGERS[case]
    answer, line = world.refused(attempt)
    assert re.search(told, answer), answer
    assert (line["operation"], line["result"]) == (operation, "denied")
    assert re.search(reason, line["reason"]), line


FOREIGN: dict[str, tuple[str, str]] = {
    # what is read, or changed, of another tenant: method and path
    "topics": ("GET", "/admin/v2/persistent/b/n"),
    "topics, as a pattern asks for them": ("GET", "/admin/v2/namespaces/b/n/topics"),
    "lookup": ("GET", "/lookup/v2/topic/persistent/b/n/orders"),
    "plan": ("GET", "/cepheid/v1/plan?topic=persistent://b/n/orders"),
    "partitions for a plan": ("GET", "/cepheid/v1/topics?topic=persistent://b/n/orders"),
    "statistics": ("GET", "/admin/v2/persistent/b/n/orders/stats"),
    "internal statistics": ("GET", "/admin/v2/persistent/b/n/orders/internalStats"),
    "schema": ("GET", "/admin/v2/schemas/b/n/orders/schema"),
    "partitioned metadata": ("GET", "/admin/v2/persistent/b/n/orders/partitions"),
    "a message": ("GET", "/admin/v2/persistent/b/n/orders/subscription/s/position/1"),
    "policies": ("GET", "/admin/v2/namespaces/b/n"),
    "permissions": ("GET", "/admin/v2/namespaces/b/n/permissions"),
    "a dead-letter topic": ("PUT", "/admin/v2/persistent/b/n/orders-s-DLQ"),
    "deletion": ("DELETE", "/admin/v2/persistent/b/n/orders"),
    "a grant to oneself": ("POST", "/admin/v2/namespaces/b/n/permissions/app"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_call_about_another_tenant(world: BadInputWorld, case: str) -> None:
    method, path = FOREIGN[case]
    told, line = world.refused(lambda world: call(world, path, made(), method=method))
    assert told.startswith("403: "), told
    assert (line["result"], line["role"], line["operation"].split()[0]) == ("denied", "app", method)


def test_metrics_and_ledgers_show_nothing_of_another_tenant(world: BadInputWorld) -> None:
    """These answers leave out what the role may not see, so nothing is denied."""
    for path in ("/metrics", "/cepheid/v1/ledgers"):
        told = world.run(call(world, path, made()))
        assert told.startswith("200: ")
        assert "b/n" not in told


LEAVING = {
    "an encoded ..": ("GET", "/admin/v2/persistent/a/%2E%2E/orders/stats"),
    "an encoded slash in the namespace": ("GET", "/admin/v2/persistent/a/n%2F..%2F..%2Fb%2Fn/orders/stats"),
    "an encoded .. as the topic": ("DELETE", "/admin/v2/persistent/a/n/%2E%2E"),
    "a control character": ("PUT", "/admin/v2/persistent/a/n/or%0Aders"),
    "a control character in the namespace": ("PUT", "/admin/v2/namespaces/a/n%00"),
    "a tenant that is a step of a path": ("PUT", "/admin/v2/tenants/%2E%2E"),
    "a topic in a query": ("GET", "/cepheid/v1/plan?topic=persistent://a/../orders"),
}


@pytest.mark.parametrize("case", LEAVING)
def test_a_name_that_tries_to_leave_its_namespace(world: BadInputWorld, case: str) -> None:
    method, path = LEAVING[case]
    token = made(sub="root" if "tenants" in path else "app")
    told, line = world.refused(partial(_with_body, path=path, method=method, token=token))
    assert told.startswith("412: "), told
    assert line["result"] == "invalid", line


async def _with_body(world: BadInputWorld, path: str, method: str, token: str) -> str:
    body: dict[str, Any] = {"allowedClusters": ["standalone"]} if method == "PUT" and "tenants" in path else {}
    if not body:
        return await call(world, path, token, method=method)
    text = '{"allowedClusters": ["standalone"]}'
    headers = f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n"
    return await call(world, path, token, method=method, headers=headers, body=text)


def test_a_certificate_that_has_expired_since_the_handshake(world: BadInputWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cepheid_broker.admin.authentication.certificate_expires_at_ms", lambda _certificate: 0)
    told, line = world.refused(partial(call, path=CLUSTERS, port="https", tls=world.files.client("app")))
    assert told.startswith("401: ")
    assert "the client's certificate has expired" in told
    assert line["result"] == "denied"
    assert "the client's certificate has expired" in line["reason"]


def test_a_certificate_that_was_revoked_since_the_handshake(world: BadInputWorld) -> None:
    """An open connection is refused at its next request, also one that shows a token."""
    reader, writer = world.run(connected(world, "https", world.files.client("leaver")))

    async def ask() -> str:
        writer.write(f"GET {CLUSTERS} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {made()}\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        size_bytes = int(re.search(rb"content-length: (\d+)", head.lower())[1])  # type: ignore[index]
        return (head + await reader.readexactly(size_bytes)).decode()

    async def refused(_world: BadInputWorld) -> str:
        while "200 OK" in (answer := await ask()):  # noqa: ASYNC110  until the broker has read the new list
            await asyncio.sleep(0.02)
        assert await reader.read() == b""
        return answer

    assert "200 OK" in world.run(ask())
    world.files.revoke("leaver")
    told, line = world.refused(refused)
    assert "401 Unauthorized" in told
    assert "the certificate was revoked by its CA: connect again with a new one" in told
    assert (line["operation"], line["object"], line["result"]) == ("request", "admin port", "denied")
    assert line["reason"] == "the certificate was revoked by its CA"
    writer.close()
