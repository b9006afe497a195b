"""How many connections may be open, or not authenticated yet, in all and by address."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from types import SimpleNamespace
from typing import cast
from unittest.mock import Mock

import pytest

from cepheid_broker.protocol import Listener, PortInUseError, listening_socket
from cepheid_broker.protocol.services import Services
from cepheid_broker.settings import BrokerSettings
from cepheid_dev.free_ports import is_taken
from cepheid_ports import RefusalLog
from cepheid_security import ServerTls
from cepheid_security.connection_limits import Arrivals, Place
from cepheid_security.failed_attempts import MAX_DELAY_S, FailedAttempts
from cepheid_security.settings import TlsSettings
from cepheid_security.tls_acceptor import TlsAcceptor
from tests.broker.broker_world import BrokerWorld
from tests.support import cancel_once_listening, free_port

FAR, NEAR = "192.0.2.7", "127.0.0.1"


def admitted(arrivals: Arrivals, address: str = FAR) -> Place:
    place = arrivals.admit(address)
    assert isinstance(place, Place), place
    return place


@pytest.mark.parametrize(
    ("limits", "address", "reason"),
    [
        ({"max_arriving": 2}, NEAR, r"2 connections have not authenticated yet \(connection.max_unauthenticated\)"),
        ({"max_arriving_per_address": 2}, FAR, r"2 connections of 192.0.2.7 have not authenticated yet"),
        ({"max_per_address": 2}, FAR, r"192.0.2.7 has 2 connections open \(max_connections_per_address\)"),
    ],
)
def test_a_third_connection_is_refused_until_one_of_the_two_ends(limits: dict[str, int], address: str, reason: str) -> None:
    arrivals = Arrivals(**{"max_arriving": 9, "max_arriving_per_address": 9, "max_per_address": 9, **limits})
    first, _ = admitted(arrivals, address), admitted(arrivals, address)
    with pytest.raises(AssertionError, match=reason):
        admitted(arrivals, address)
    if "max_per_address" not in limits:
        first.settle()
    first.free()
    first.free()
    admitted(arrivals, address)
    assert arrivals.arriving == 2


def test_connections_that_have_authenticated_make_room_for_others_and_loopback_has_no_limit_of_its_own() -> None:
    arrivals = Arrivals(max_arriving=3, max_arriving_per_address=1, max_per_address=2)
    admitted(arrivals).settle()
    admitted(arrivals)
    for _ in range(2):
        admitted(arrivals, "::ffff:127.0.0.1")
    assert arrivals.arriving == 3


def test_failures_of_an_address_are_answered_later_and_later_until_it_rests() -> None:
    attempts = FailedAttempts()
    delays = [attempts.note(FAR, 0.0) for _ in range(18)]
    assert delays[:12] == [0.0] * 10 + [0.25, 0.5]
    assert delays[-1] == MAX_DELAY_S
    assert attempts.note(NEAR, 0.0) == 0.0
    assert attempts.note(FAR, 61.0) == 0.0


def test_whoever_has_a_network_of_ipv6_addresses_does_not_fail_as_many_clients() -> None:
    attempts = FailedAttempts()
    assert [attempts.note(f"2001:db8::{number:x}", 0.0) for number in range(12)][-2:] == [0.25, 0.5]
    assert attempts.note("2001:db8:0:1::1", 0.0) == 0.0


def test_addresses_of_ipv4_are_separate_on_a_port_for_both_kinds() -> None:
    attempts = FailedAttempts()
    assert [attempts.note(f"::ffff:192.0.2.{number}", 0.0) for number in range(12)] == [0.0] * 12


def test_connections_of_one_network_of_ipv6_count_together() -> None:
    arrivals = Arrivals(max_arriving=9, max_arriving_per_address=9, max_per_address=1)
    admitted(arrivals, "2001:db8::1")
    assert arrivals.admit("2001:db8::2") == "2001:db8::/64 has 1 connections open (max_connections_per_address)"
    admitted(arrivals, "2001:db8:0:1::1")


def listener_on(port: int, tls: ServerTls | None = None) -> Listener:
    settings = BrokerSettings.model_construct(host="127.0.0.1", port=port, tls=TlsSettings(port=port))
    return Listener(cast(Services, SimpleNamespace(settings=settings, authorizer=None)), tls)


async def test_a_start_that_is_cancelled_closes_the_protocol_port() -> None:
    port = free_port()
    await cancel_once_listening(listener_on(port).start(), port)
    assert not is_taken(port)


async def test_without_the_port_with_tls_the_one_without_is_closed_again() -> None:
    port = free_port()  # of both: the second one finds it in use
    with pytest.raises(PortInUseError):
        await listener_on(port, cast(ServerTls, SimpleNamespace())).start()
    assert not is_taken(port)


async def test_a_stop_that_is_cancelled_while_topics_are_handed_over_closes_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    async with BrokerWorld() as world:
        handing_over = asyncio.Event()

        async def hand_over(_timeout_s: float) -> None:
            handing_over.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(world.broker.ownership, "release_all", hand_over)
        port = world.broker.port
        stopping = asyncio.ensure_future(world.broker.aclose())
        await handing_over.wait()
        stopping.cancel()
        await asyncio.wait([stopping])
        assert not is_taken(port)
        monkeypatch.undo()


@pytest.mark.parametrize("turns", range(4))
async def test_a_connection_that_comes_when_a_port_with_tls_closes_is_closed_too(turns: int) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    admitted, failed = Mock(side_effect=lambda _: object()), Mock()
    acceptor = TlsAcceptor[object](
        listening_socket("127.0.0.1", 0, 8),
        lambda: context,
        handshake_timeout_s=30.0,
        admit=admitted,
        make=Mock(),
        on_failed=failed,
        refusals=RefusalLog(),
        plain_hint=str,
    )
    acceptor.start()
    with socket.create_connection(("127.0.0.1", acceptor.port)) as client:
        for _ in range(turns):
            await asyncio.sleep(0)
        await acceptor.aclose()
        client.setblocking(False)
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.get_running_loop().sock_recv(client, 1) == b""
    assert failed.call_count == admitted.call_count, "places are given back"
