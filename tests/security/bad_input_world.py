"""One secured server, what strangers and clients without permission try at its ports, and what comes of it.

root   super-user                  app    produce and consume in a/n, nothing in b/n
proxy  speaks for others           gone   its tokens were revoked
"""

from __future__ import annotations

import asyncio
import datetime
import json
import ssl
import time
import warnings
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jwt
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from google.protobuf.message import Message

from cepheid_security import client_context
from cepheid_security.authority import Authority
from cepheid_wire import BODY_FIELDS, FrameSplitter, ServerError, encode_body, parse_command
from cepheid_wire import pulsar_api_pb2 as pb
from tests.admin.admin_world import AdminWorld, running_admin
from tests.security.test_tokens import signed_with_public_key

T = TypeVar("T")
NOW_S = int(time.time())
SECRET = bytes(range(64))
RSA_KEY = rsa.generate_private_key(65537, 2048)
RSA_PUBLIC = RSA_KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
GOOD = {"sub": "app", "aud": "cluster", "iss": "us", "exp": NOW_S + 3600, "iat": NOW_S - 60}
TIMEOUT_S = 3.0
"""For a TLS handshake, for CONNECT, and for the head of a request."""
_CHANGED_BY_CLIENTS = ("clusters", "tenants", "namespaces", "topics", "chains", "cursors", "schemas", "ledgers", "permissions")


def made(key: Any = SECRET, algorithm: str = "HS256", key_id: str | None = "hmac", **claims: Any) -> str:
    given = {name: value for name, value in {**GOOD, **claims}.items() if value is not None}
    return jwt.encode(given, key, algorithm=algorithm, headers={"kid": key_id} if key_id else None)


BAD_TOKENS: dict[str, tuple[str, str]] = {
    "expired": (made(exp=NOW_S - 60), "the token expired"),
    "not yet valid": (made(nbf=NOW_S + 3600), "is not valid for another"),
    "wrong audience": (made(aud="other"), "it is for another audience"),
    "no audience": (made(aud=None), "'aud' is missing"),
    "wrong issuer": (made(iss="them"), "it is from another issuer"),
    "unsigned": (made(None, "none"), "tokens of the algorithm 'none'"),
    "HMAC with the text of the public key": (signed_with_public_key(RSA_PUBLIC, GOOD), "signature does not match"),
    "signature cut off": (made()[:-20], "signature does not match|no readable header"),
    "cut off": (made()[:40], "not a token|cannot be read"),
    "unknown key": (made(key_id="stolen"), "names the key 'stolen'"),
    "key of the other kind": (made(RSA_KEY, "RS256", "hmac"), "names the key 'hmac'"),
    "another secret": (made(SECRET[::-1]), "signature does not match"),
    "no role": (made(sub=None), "the role, is missing"),
    "17 KB": (made(x="x" * 17_000), "at most 16384 are read"),
    "no token": ("", "not a token"),
    "of a role whose tokens were revoked": (made(sub="gone"), "revoked"),
}
HUGE = made(x="x" * 1_000_000)


@dataclass(frozen=True)
class Files:
    """Certificates of the server's CA, of another CA, one that has expired, one of the future, and one that was revoked."""

    directory: Path

    @classmethod
    def make(cls, directory: Path) -> Files:
        now = datetime.datetime.now(datetime.UTC)
        authority = Authority(directory, now)
        authority.issue("server", hosts=["localhost", "127.0.0.1"], for_servers=True)
        authority.issue("elsewhere", hosts=["elsewhere.example.org"], for_servers=True)
        for name in ("app", "broker", "revoked", "leaver"):
            authority.issue(name, for_servers=False)
        authority.revoke("revoked")
        Authority(directory, now - datetime.timedelta(days=500)).issue("expired", for_servers=False)
        Authority(directory, now + datetime.timedelta(days=2)).issue("future", for_servers=False)
        (directory / "other").mkdir()
        Authority(directory / "other", now).issue("app", for_servers=False)
        (directory / "other" / "app.pem").rename(directory / "impostor.pem")
        (directory / "other" / "app-key.pem").rename(directory / "impostor-key.pem")
        return cls(directory)

    def path(self, name: str) -> str:
        return str(self.directory / name)

    def client(self, name: str | None = None) -> ssl.SSLContext:
        pair = (self.path(f"{name}.pem"), self.path(f"{name}-key.pem")) if name is not None else (None, None)
        return client_context(ca_file=self.path("ca.pem"), certificate_file=pair[0], key_file=pair[1])

    def revoke(self, name: str) -> None:
        Authority(self.directory, datetime.datetime.now(datetime.UTC)).revoke(name)

    def old(self) -> ssl.SSLContext:
        """A client that speaks TLS 1.1 at most."""
        context = self.client()
        context.set_ciphers("ALL:@SECLEVEL=0")
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            context.minimum_version = ssl.TLSVersion.TLSv1
            context.maximum_version = ssl.TLSVersion.TLSv1_1
        return context

    def trusting_another_ca(self) -> ssl.SSLContext:
        return client_context(ca_file=str(self.directory / "other" / "ca.pem"))


class BadInputWorld:
    def __init__(self, admin: AdminWorld, files: Files, audit_file: Path) -> None:
        self.admin = admin
        self.files = files
        self._audit_file = audit_file
        self._seen = 0

    @property
    def ports(self) -> dict[str, int]:
        serving, broker = self.admin.standalone._serving, self.admin.standalone.broker
        return {"pulsar": broker.port, "pulsar+ssl": broker.tls_port, "http": serving.admin_port, "https": serving.tls_admin_port}

    def run(self, work: Awaitable[T]) -> T:
        async def limited() -> T:
            async with asyncio.timeout(60):
                return await work

        return self.admin.run(limited())

    def do(self, method: str, path: str, body: Any = None) -> None:
        """A call of the super-user that must succeed."""
        answer = self.admin.ask(method, path, headers={"Authorization": f"Bearer {made(sub='root')}"}, json=body)
        assert answer.is_success, f"{method} {path}: {answer.status_code} {answer.text}"

    def refused(self, attempt: Callable[[BadInputWorld], Awaitable[str]]) -> tuple[str, dict[str, Any]]:
        """Return what the client was told, and the line of the audit log. There is exactly one, and nothing else has happened."""
        self.run(self._new_lines(at_least=0))
        before = self.run(self._state())
        told = self.run(attempt(self))
        lines = self.run(self._new_lines(at_least=1))
        assert len(lines) == 1, lines
        assert self.run(self._state()) == before
        return told, lines[0]

    async def until_revoked(self, role: str) -> None:
        token = made(sub=role)
        while not (await call(self, "/admin/v2/clusters", token)).startswith("401"):  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    async def _new_lines(self, at_least: int) -> list[dict[str, Any]]:
        audit = self.admin.standalone.broker.audit
        while True:
            await asyncio.sleep(0.03)  # a second line, which must not be there, would come in this time
            while audit.figures().waiting:  # noqa: ASYNC110  the log tells nobody
                await asyncio.sleep(0.005)
            lines = self._audit_file.read_text().splitlines()
            if len(lines) >= self._seen + at_least:
                break
        new, self._seen = lines[self._seen :], len(lines)
        return [json.loads(line) for line in new]

    async def _state(self) -> dict[str, Any]:
        """All that clients and administrators change: metadata by key, and the topics that are open."""
        broker = self.admin.standalone.broker
        found: dict[str, Any] = {"open": sorted(str(topic.name) for topic in broker.topics.loaded())}
        pending = [f"/{name}" for name in _CHANGED_BY_CLIENTS]
        while pending:
            key = pending.pop()
            value = await broker.store.get(key)
            if value is not None:
                found[key] = value.version
                pending += [f"{key}/{name}" for name in await broker.store.children(key)]
        return found


@contextmanager
def running_bad_input_world(directory: Path) -> Iterator[BadInputWorld]:
    files = Files.make(directory)
    (directory / "hmac.key").write_bytes(SECRET)
    (directory / "rsa.pub").write_bytes(RSA_PUBLIC)
    settings: dict[str, Any] = {
        "authentication": {
            "methods": ["token", "tls"],
            "secret_keys": [f"hmac={directory}/hmac.key"],
            "public_keys": [f"rsa={directory}/rsa.pub"],
            "audience": "cluster",
            "issuer": "us",
        },
        "authorization": {"enabled": True, "super_user_roles": ["root"], "proxy_roles": ["proxy"]},
        "tls": {
            "certificate_file": files.path("server.pem"),
            "key_file": files.path("server-key.pem"),
            "client_ca_file": files.path("ca.pem"),
            "client_certificates": "optional",
            "crl": files.path("crl.pem"),
            "reload_s": 0.05,
            "port": 0,
            "admin_port": 0,
            "plain_ports": True,
        },
        "connection": {"handshake_timeout_s": TIMEOUT_S},
        "admin": {"header_timeout_s": TIMEOUT_S},
    }
    with running_admin(directory / "data", **settings) as admin:
        world = BadInputWorld(admin, files, directory / "data" / "audit" / "audit.log")
        for tenant in "ab":
            world.do("PUT", f"/admin/v2/tenants/{tenant}", {"adminRoles": [], "allowedClusters": ["standalone"]})
            world.do("PUT", f"/admin/v2/namespaces/{tenant}/n")
            world.do("PUT", f"/admin/v2/persistent/{tenant}/n/orders")
        world.do("POST", "/admin/v2/namespaces/a/n/permissions/app", ["produce", "consume"])
        gone = {"kind": "role", "value": "gone", "issued_up_to_ms": time.time_ns() // 1_000_000}
        world.do("POST", "/cepheid/v1/revocations", gone)
        world.run(world.until_revoked("gone"))
        yield world


# Clients, as bytes: those of the libraries would not send most of this.


async def say(world: BadInputWorld, port: str, *bodies: Message, tls: ssl.SSLContext | None = None) -> str:
    """Send commands, each after the answer to the one before; return code and text of the last answer, or that there was none."""
    try:
        reader, writer = await connected(world, port, tls)
    except (ssl.SSLError, ConnectionError) as error:
        return f"no TLS: {getattr(error, 'reason', None) or error!r}"
    try:
        splitter, answer = FrameSplitter(1 << 20), "closed"
        for body in bodies:
            writer.write(encode_body(body))
            answer = await _answer(reader, splitter)
        return answer
    finally:
        writer.close()


async def _answer(reader: asyncio.StreamReader, splitter: FrameSplitter) -> str:
    while True:
        try:
            data = await reader.read(1 << 16)
        except (OSError, ssl.SSLError) as error:
            return f"closed: {error!r}"
        if not data:
            return "closed"
        for kind, command, _ in splitter.feed(data):
            body = getattr(parse_command(command), BODY_FIELDS[kind])
            for code, text in (("error", "message"), ("error_code", "error_message")):
                if hasattr(body, code) and getattr(body, text):
                    return f"{ServerError(getattr(body, code)).name}: {getattr(body, text)}"
            return type(body).__name__


async def connected(
    world: BadInputWorld, port: str, tls: ssl.SSLContext | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    name = None if tls is None else "localhost"
    return await asyncio.open_connection("127.0.0.1", world.ports[port], ssl=tls, server_hostname=name)


def connect(token: str | None = None, **fields: Any) -> pb.CommandConnect:
    command = pb.CommandConnect(client_version="x", protocol_version=20, **fields)
    if token is not None:
        command.auth_method_name, command.auth_data = "token", token.encode()
    return command


async def call(
    world: BadInputWorld,
    path: str,
    token: str | None = None,
    *,
    method: str = "GET",
    port: str = "http",
    tls: ssl.SSLContext | None = None,
    headers: str = "",
    body: str = "",
) -> str:
    """Return status and reason of one request, whose path is sent as it is."""
    try:
        reader, writer = await connected(world, port, tls)
    except (ssl.SSLError, ConnectionError) as error:
        return f"no TLS: {getattr(error, 'reason', None) or error!r}"
    shown = "" if token is None else f"Authorization: Bearer {token}\r\n"
    try:
        writer.write(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{shown}{headers}\r\n{body}".encode())
        data = await reader.read(-1)
    except (OSError, ssl.SSLError) as error:
        return f"closed: {error!r}"
    finally:
        writer.close()
    head, _, answer = data.decode(errors="replace").partition("\r\n\r\n")
    return f"{head.split(' ')[1] if ' ' in head else 'closed'}: {answer}"
