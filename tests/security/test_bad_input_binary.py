"""What must not be accepted on the binary port, with TLS and without: refused, one line in the audit log, nothing else happens."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest

from cepheid_wire import encode_body
from cepheid_wire import pulsar_api_pb2 as pb
from tests.security.bad_input_world import (
    BAD_TOKENS,
    HUGE,
    TIMEOUT_S,
    BadInputWorld,
    connect,
    connected,
    made,
    running_bad_input_world,
    say,
)

Attempt = Callable[[BadInputWorld], Awaitable[str]]


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
    told, line = world.refused(partial(_connecting, token=token))
    assert re.search(f"AUTHENTICATION_ERROR: .*({reason})", told), told
    assert (line["operation"], line["result"]) == ("CONNECT", "denied")
    assert re.search(reason, line["reason"])
    assert not token or token not in str(line)


async def _connecting(world: BadInputWorld, token: str) -> str:
    return await say(world, "pulsar", connect(token))


async def _slow_handshake(world: BadInputWorld) -> str:
    reader, writer = await connected(world, "pulsar+ssl", None)
    try:
        writer.write(b"\x16\x03\x01")  # the first bytes of a handshake, and nothing after them
        return "closed" if await reader.read(100) == b"" else "answered"
    finally:
        writer.close()


async def _no_connect(world: BadInputWorld) -> str:
    _, writer = await connected(world, "pulsar+ssl", world.files.client())
    try:
        await asyncio.sleep(TIMEOUT_S + 0.5)
        return "closed"
    finally:
        writer.transport.abort()


async def _plain_text(world: BadInputWorld) -> str:
    reader, writer = await connected(world, "pulsar+ssl", None)
    try:
        writer.write(b"\0\0\0\x10plain text here!")
        return f"{await reader.read(100)!r}"
    finally:
        writer.close()


STRANGERS: dict[str, tuple[Attempt, str, str, str]] = {
    # what is tried: the attempt, what the client is told, operation and reason of the line
    "no credentials": (
        lambda w: say(w, "pulsar", connect()), "AUTHENTICATION_ERROR: this cluster asks", "CONNECT", "asks for credentials",
    ),
    "a token of 1 MB": (lambda w: say(w, "pulsar", connect(HUGE)), "closed", "CONNECT", "frame"),
    "a command before CONNECT": (
        lambda w: say(w, "pulsar", pb.CommandProducer(topic="a/n/orders", producer_id=0, request_id=1)),
        "closed", "CONNECT", "came before CONNECT",
    ),
    "a certificate of another CA": (
        lambda w: say(w, "pulsar+ssl", connect(), tls=w.files.client("impostor")), "closed|no TLS", "tls.handshake", "certificate",
    ),
    "a certificate that has expired": (
        lambda w: say(w, "pulsar+ssl", connect(), tls=w.files.client("expired")), "closed|no TLS", "tls.handshake", "certificate",
    ),
    "a certificate that is not valid yet": (
        lambda w: say(w, "pulsar+ssl", connect(), tls=w.files.client("future")), "closed|no TLS", "tls.handshake", "certificate",
    ),
    "a certificate that was revoked": (
        lambda w: say(w, "pulsar+ssl", connect(), tls=w.files.client("revoked")), "closed|no TLS", "tls.handshake", "revoked",
    ),
    "TLS 1.1": (lambda w: say(w, "pulsar+ssl", connect(), tls=w.files.old()), "no TLS", "tls.handshake", "protocol"),
    "plain text on the port with TLS": (_plain_text, "", "tls.handshake", r"does not speak TLS.*port \d+ is without TLS"),
    "TLS on the port without": (
        lambda w: say(w, "pulsar", connect(), tls=w.files.client()), "no TLS", "tls.handshake", r"TLS is on port \d+",
    ),
    "a handshake that does not end": (_slow_handshake, "closed", "tls.handshake", "no TLS handshake within 3 s"),
    "no CONNECT after the handshake": (_no_connect, "closed", "CONNECT", "no CONNECT within 3 s"),
    "an original principal of a role that is not a proxy": (
        lambda w: say(w, "pulsar", connect(made(), original_principal="root")),
        "AUTHORIZATION_ERROR: .*not one of authorization.proxy_roles", "CONNECT", "not one of authorization.proxy_roles",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", STRANGERS)
def test_a_stranger(world: BadInputWorld, case: str) -> None:
    attempt, told, operation, reason = STRANGERS[case]
    answer, line = world.refused(attempt)
    assert re.search(told, answer), answer
    assert (line["operation"], line["result"]) == (operation, "denied")
    assert re.search(reason, line["reason"]), line


@pytest.mark.parametrize("port", ["pulsar+ssl", "https"])
def test_a_client_refuses_a_server_of_another_ca_or_name(world: BadInputWorld, port: str) -> None:
    """The client does, so that this is no denial of the server's."""
    for context, name in ((world.files.trusting_another_ca(), "localhost"), (world.files.client(), "elsewhere.example.org")):
        with pytest.raises(ssl.SSLCertVerificationError):
            world.run(asyncio.open_connection("127.0.0.1", world.ports[port], ssl=context, server_hostname=name))


FOREIGN = "persistent://b/n/orders"
REQUESTS: dict[str, Callable[[str, str], pb.CommandProducer | object]] = {
    # by the name of the command in the audit log; of a topic and its namespace
    "PRODUCER": lambda topic, _: pb.CommandProducer(topic=topic, producer_id=0, request_id=1),
    "SUBSCRIBE": lambda topic, _: pb.CommandSubscribe(
        topic=topic, subscription="s", subType=pb.CommandSubscribe.Shared, consumer_id=0, request_id=1
    ),
    "LOOKUP": lambda topic, _: pb.CommandLookupTopic(topic=topic, request_id=1),
    "PARTITIONED_METADATA": lambda topic, _: pb.CommandPartitionedTopicMetadata(topic=topic, request_id=1),
    "GET_SCHEMA": lambda topic, _: pb.CommandGetSchema(topic=topic, request_id=1),
    "GET_OR_CREATE_SCHEMA": lambda topic, _: pb.CommandGetOrCreateSchema(
        topic=topic, request_id=1, schema=pb.Schema(name="", schema_data=b"", type=pb.Schema.String)
    ),
    # What a subscription to a pattern asks for: the list, and then to be notified.
    "GET_TOPICS_OF_NAMESPACE": lambda _, namespace: pb.CommandGetTopicsOfNamespace(namespace=namespace, request_id=1),
    "WATCH_TOPIC_LIST": lambda _, namespace: pb.CommandWatchTopicList(
        namespace=namespace, topics_pattern=".*", request_id=1, watcher_id=0
    ),
}


@pytest.mark.parametrize("command", REQUESTS)
def test_a_request_about_another_tenant(world: BadInputWorld, command: str) -> None:
    told, line = world.refused(partial(_asking, command=command, topic=FOREIGN, namespace="b/n"))
    assert told.startswith("AUTHORIZATION_ERROR: "), told
    assert (line["operation"], line["result"], line["role"]) == (command, "denied", "app")


async def _asking(world: BadInputWorld, command: str, topic: str, namespace: str) -> str:
    return await say(world, "pulsar", connect(made()), REQUESTS[command](topic, namespace))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "topic",
    ["persistent://b/n/orders-s-DLQ", "persistent://b/n/orders-s-RETRY"],
)
def test_a_dead_letter_or_retry_topic_in_a_foreign_namespace(world: BadInputWorld, topic: str) -> None:
    async def attempt(world: BadInputWorld) -> str:
        producer = pb.CommandProducer(topic=topic, producer_id=0, request_id=1, initial_subscription_name="s")
        return await say(world, "pulsar", connect(made()), producer)

    told, line = world.refused(attempt)
    assert told.startswith("AUTHORIZATION_ERROR: "), told
    assert (line["operation"], line["object"], line["result"]) == ("PRODUCER", topic, "denied")


LEAVING = {
    # a topic, and a namespace, whose names try to lead elsewhere
    "..": ("persistent://a/../orders", "a/.."),
    "../ in the last part": ("persistent://a/n/../../b/n/orders", "a/n/../../b"),
    "a control character": ("persistent://a/n/or\nders", "a/n\n"),
    "another scheme": ("file://a/n/orders", "file:///etc"),
}


@pytest.mark.parametrize("name", LEAVING)
@pytest.mark.parametrize("command", REQUESTS)
def test_a_name_that_tries_to_leave_its_namespace(world: BadInputWorld, command: str, name: str) -> None:
    topic, namespace = LEAVING[name]
    told, line = world.refused(partial(_asking, command=command, topic=topic, namespace=namespace))
    assert re.match("[A-Z_]+: ", told), told
    assert (line["operation"], line["result"], line["role"]) == (command, "invalid", "app"), line


def test_a_name_with_an_encoded_slash_stays_in_its_namespace(world: BadInputWorld) -> None:
    """It is never decoded, so it names a topic of b/n."""
    told, line = world.refused(
        partial(_asking, command="PRODUCER", topic="persistent://b/n/..%2F..%2Fa%2Fn%2Forders", namespace="")
    )
    assert told.startswith("AUTHORIZATION_ERROR: "), told
    assert (line["result"], line["object"]) == ("denied", "persistent://b/n/..%2F..%2Fa%2Fn%2Forders")


def test_a_connection_ends_when_its_certificate_expires(world: BadInputWorld) -> None:
    """As it does with a token: the handshake looked at the certificate once."""

    async def scenario() -> None:
        reader, writer = await connected(world, "pulsar+ssl", world.files.client("app"))
        writer.write(encode_body(pb.CommandConnect(client_version="x", protocol_version=20, auth_method_name="tls")))
        await reader.read(1 << 16)
        (connection,) = [each for each in world.admin.standalone.broker._listener.connections if each.over_tls]
        assert connection.principal is not None
        expires_at_ms = connection.principal.expires_at_ms
        assert expires_at_ms is not None
        assert expires_at_ms > connection._services.ports.wall_ms()
        connection.principal = replace(connection.principal, expires_at_ms=0)
        connection._on_timer()
        assert await reader.read(1 << 16) == b""
        writer.close()

    world.run(scenario())


def test_a_connection_ends_when_its_certificate_is_revoked(world: BadInputWorld) -> None:
    async def scenario(world: BadInputWorld) -> str:
        reader, writer = await connected(world, "pulsar+ssl", world.files.client("leaver"))
        writer.write(encode_body(pb.CommandConnect(client_version="x", protocol_version=20, auth_method_name="tls")))
        assert b"Cepheid" in await reader.read(1 << 16)
        world.files.revoke("leaver")
        told = await reader.read()
        writer.close()
        return told.decode(errors="replace")

    told, line = world.refused(scenario)
    assert "the certificate was revoked by its CA: connect again with a new one" in told
    assert (line["operation"], line["role"], line["result"]) == ("CONNECT", "leaver", "denied")
    assert line["reason"] in told
